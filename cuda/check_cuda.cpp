#include "cuda/check_cuda.h"

#include <cublasLt.h>

#include "base/check.h"

namespace qshard::cuda {
namespace {

const char* advice(cudaError_t status) {
  switch (status) {
    case cudaErrorNoKernelImageForDevice:
      return "; this GPU's architecture is not among those compiled for: set CUDA_ARCHS in make";
    case cudaErrorInsufficientDriver:
      return "; the driver is older than the CUDA toolkit of this build: update it or build with "
             "an "
             "older toolkit";
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
      return "; an earlier kernel failed: compute-sanitizer names it";
    default:
      return "";
  }
}

}  // namespace

void check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  fail("CUDA error {} ({}) from {} at {}:{}{}", cudaGetErrorName(status),
       cudaGetErrorString(status), call, file, line, advice(status));
}

void check_cublas(int status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail("cuBLAS error {} from {} at {}:{}",
       cublasLtGetStatusName(static_cast<cublasStatus_t>(status)), call, file, line);
}

}  // namespace qshard::cuda
