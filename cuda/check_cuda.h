// Every call of the CUDA runtime and of cuBLAS goes through CUDA_CHECK or CUBLAS_CHECK: they throw
// an Error with the call, its place and the library's own text. Errors of kernels show up at a
// later call; CUDA_LAUNCH_BLOCKING=1 moves them to the launch.
//
// No fmt here: nvcc does not get through its headers in C++20, and .cu files include this one.
#pragma once

#include <cuda_runtime.h>

namespace qshard::cuda {

void check(cudaError_t status, const char* call, const char* file, int line);
// cuBLAS statuses are plain ints here, so that kernels need not include cuBLAS.
void check_cublas(int status, const char* call, const char* file, int line);

}  // namespace qshard::cuda

#define CUDA_CHECK(call) ::qshard::cuda::check((call), #call, __FILE__, __LINE__)
#define CUBLAS_CHECK(call) \
  ::qshard::cuda::check_cublas(static_cast<int>(call), #call, __FILE__, __LINE__)
