// The CUDA backend: a GPU, cuBLASLt matrix products, own kernels.
#pragma once

#include "cuda/device_cuda.h"
#include "cuda/gemm_cublaslt.h"
#include "device/ops.h"

namespace qshard {

// The GPU is chosen by the rank's place on its node (cuda/choose_device.h). Throws with the reason
// and the fix when there is no driver, no GPU or not enough of them.
Backend make_cuda_backend(int local_rank, int local_size,
                          cuda::F32Products f32_products = cuda::F32Products::exact);

// The device of such a backend; another one's is an error.
cuda::CudaDevice& gpu_of(Backend& backend);

}  // namespace qshard
