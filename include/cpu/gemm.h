// Matrix products of the CPU backend, by oneDNN. The only door to that library. f32 products of few
// tokens are our own, see cpu/few_rows.h.
//
// bf16 and fp16 products accumulate in f32. On a CPU without avx512_bf16, oneDNN's bf16 products
// are several times slower than f32 ones (38 against 117 GFLOP/s measured), and fp16 ones it has
// for CPUs with fp16 arithmetic only: elsewhere operands are converted to f32, a block at a time;
// `native` = false forces that way.
#pragma once

#include <memory>
#include <string>

#include "tensor/tensor.h"

namespace qshard::cpu {

std::string gemm_library();  // "oneDNN 2.6.0"

class Gemm {
 public:
  // `native` has no effect where CPU or library lack 16-bit products.
  explicit Gemm(int threads, bool native = true);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  std::string describe(DType dtype) const;  // what products of it are computed in

  // The three products of a linear layer; shapes, dtypes and views as in device/ops.h.
  void linear(Tensor x, Tensor w, Tensor y);
  void linear_dgrad(Tensor dy, Tensor w, Tensor dx, bool accumulate);
  void linear_wgrad(Tensor dy, Tensor x, Tensor dw, bool accumulate);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qshard::cpu
