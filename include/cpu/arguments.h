// Checks of an operator's arguments, and the step from run-time dtypes to template parameters.
#pragma once

#include "tensor/tensor.h"

namespace qshard::cpu {

// Throws unless `t` has this dtype and shape, memory if it has elements, and rows that do not
// overlap.
void expect(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape);
// As above, and without gaps between the rows.
void expect_contiguous(const char* op, const char* name, const Tensor& t, DType dtype,
                       const Shape& shape);
// Throws unless `t` has `rank` dimensions; the first check of the tensor that defines the sizes.
void expect_rank(const char* op, const char* name, const Tensor& t, int rank);
[[noreturn]] void fail_dtype(const char* op, const char* name, DType dtype, const char* allowed);

// Calls f(T{}) with T = float or bf16_t, the dtypes of parameters and activations.
template <typename F>
void with_dtype(const char* op, const char* name, DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(bf16_t{});
    default:
      fail_dtype(op, name, dtype, "f32 or bf16");
  }
}

// Calls f(R{}, P{}) for the residual stream's and the parameters' dtype; R is f32 or P.
template <typename F>
void with_dtypes(const char* op, DType residual, DType param, F&& f) {
  with_dtype(op, "the parameter dtype", param, [&](auto p) {
    if (residual == DType::f32) return f(float{}, p);
    if (residual == param) return f(p, p);
    fail_dtype(op, "the residual stream", residual, "f32 or the parameters' dtype");
  });
}

}  // namespace qshard::cpu
