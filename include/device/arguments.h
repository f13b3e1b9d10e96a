// Checks of an operator's arguments that all backends make.
#pragma once

#include "tensor/tensor.h"

namespace qshard {

// Throws unless `t` has this dtype and shape, memory if it has elements, and rows that do not
// overlap.
void expect(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape);
// As above, and without gaps between the rows.
void expect_contiguous(const char* op, const char* name, const Tensor& t, DType dtype,
                       const Shape& shape);
// Throws unless `t` has `rank` dimensions; the first check of the tensor that defines the sizes.
void expect_rank(const char* op, const char* name, const Tensor& t, int rank);

}  // namespace qshard
