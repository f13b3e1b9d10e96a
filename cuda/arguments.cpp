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

void expect(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape) {
  QS_CHECK(t.dtype == dtype && t.shape == shape, "{}: {} is {} {}, expected {} {}", op, name,
           dtype_name(t.dtype), t.shape.str(), dtype_name(dtype), shape.str());
  QS_CHECK(t.data || t.numel() == 0, "{}: {} {} has no memory", op, name, t.shape.str());
  QS_CHECK(t.shape.rank() < 2 || t.shape[0] <= 1 || t.ld >= t.shape.row_numel(),
           "{}: rows of {} {} overlap, their distance is {}", op, name, t.shape.str(), t.ld);
}

void expect_contiguous(const char* op, const char* name, const Tensor& t, DType dtype,
                       const Shape& shape) {
  expect(op, name, t, dtype, shape);
  QS_CHECK(t.contiguous(), "{}: {} {} must be contiguous, the distance of its rows is {}", op, name,
           t.shape.str(), t.ld);
}

void expect_rank(const char* op, const char* name, const Tensor& t, int rank) {
  QS_CHECK(t.shape.rank() == rank, "{}: {} is {}, expected {} dimensions", op, name, t.shape.str(),
           rank);
}

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
