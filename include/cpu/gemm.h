// Matrix products of the CPU backend, by oneDNN. The only door to that library.
//
// bf16 products accumulate in f32. On a CPU without avx512_bf16, oneDNN's bf16 products are several
// times slower than f32 ones (38 against 117 GFLOP/s measured), so the operands are converted to
// f32 first; `native_bf16` = false forces that way.
#pragma once

#include <memory>
#include <string>

#include "tensor/tensor.h"

namespace qshard::cpu {

std::string gemm_library();  // "oneDNN 2.6.0"

class Gemm {
 public:
  // `native_bf16` has no effect where the CPU lacks the instructions.
  explicit Gemm(int threads, bool native_bf16 = true);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // The three products of a linear layer; shapes, dtypes and views as in device/ops.h.
  void linear(Tensor x, Tensor w, Tensor y);
  void linear_dgrad(Tensor dy, Tensor w, Tensor dx, bool accumulate);
  void linear_wgrad(Tensor dy, Tensor x, Tensor dw, bool accumulate);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qshard::cpu
