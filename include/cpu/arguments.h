// The step from run-time dtypes to template parameters.
#pragma once

#include "device/arguments.h"

namespace qshard::cpu {

[[noreturn]] void fail_dtype(const char* op, const char* name, DType dtype, const char* allowed);

// Calls f(T{}) with the T of f32, bf16 or fp16: of parameters, activations, and what a cast knows.
template <typename F>
void with_dtype(const char* op, const char* name, DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(bf16_t{});
    case DType::fp16:
      return f(fp16_t{});
    default:
      fail_dtype(op, name, dtype, "f32, bf16 or fp16");
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
