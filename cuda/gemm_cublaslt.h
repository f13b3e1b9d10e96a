// Matrix products of the CUDA backend, by cuBLASLt. The only door to that library.
//
// All products accumulate in f32, also where the result is bf16 or fp16 and where cuBLASLt splits
// the summed dimension. f32 operands are multiplied in f32, not TF32, unless an option allows it.
// The algorithm for a shape is asked for once; the workspace is allocated once. Repeatable bit by
// bit for the same shape, alignment and GPU.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "device/device.h"
#include "tensor/tensor.h"

namespace qshard::cuda {

enum class F32Products { exact, tf32 };

class Gemm {
 public:
  Gemm(Device& device, cudaStream_t stream, F32Products f32_products);
  ~Gemm();

  // The three products of a linear layer; shapes, dtypes and views as in device/ops.h.
  void linear(const Tensor& x, const Tensor& w, const Tensor& y);
  void linear_dgrad(const Tensor& dy, const Tensor& w, const Tensor& dx, bool accumulate);
  void linear_wgrad(const Tensor& dy, const Tensor& x, const Tensor& dw, bool accumulate);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qshard::cuda
