#include "device/arguments.h"

namespace qshard {

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

}  // namespace qshard
