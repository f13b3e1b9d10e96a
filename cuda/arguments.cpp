#include "cuda/arguments.h"

namespace qshard::cuda {
namespace {

Type type_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return Type::bf16;
    case DType::fp16:
      return Type::fp16;
    default:
      return Type::f32;
  }
}

}  // namespace

DType param_dtype(const char* op, const char* name, const Tensor& t) {
  QS_CHECK(t.dtype == DType::f32 || t.dtype == DType::bf16 || t.dtype == DType::fp16,
           "{}: {} is {}, the CUDA backend takes f32, bf16 or fp16", op, name, dtype_name(t.dtype));
  return t.dtype;
}

void expect_residual(const char* op, const Tensor& x, DType param) {
  QS_CHECK(x.dtype == DType::f32 || x.dtype == param,
           "{}: the residual stream is {}, expected f32 or the parameters' {}", op,
           dtype_name(x.dtype), dtype_name(param));
}

View view_of(const Tensor& t) {
  if (t.shape.rank() == 0) return {};
  if (t.shape.rank() != 2) return flat_view_of(t);
  return {t.data, type_of(t.dtype), t.rows(), t.cols(), t.ld};
}

View flat_view_of(const Tensor& t) {
  if (t.shape.rank() == 0) return {};
  return {t.data, type_of(t.dtype), 1, t.numel(), t.numel()};
}

}  // namespace qshard::cuda
