// Checks of an operator's arguments, and what the launchers take instead of Tensors.
#pragma once

#include "cuda/view.h"
#include "tensor/tensor.h"

namespace qshard::cuda {

// Throws unless `t` has this dtype and shape, memory if it has elements, and rows that do not
// overlap.
void expect(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape);
// As above, and without gaps between the rows.
void expect_contiguous(const char* op, const char* name, const Tensor& t, DType dtype,
                       const Shape& shape);
// Throws unless `t` has `rank` dimensions; the first check of the tensor that defines the sizes.
void expect_rank(const char* op, const char* name, const Tensor& t, int rank);

// t.dtype; throws unless it is f32, bf16 or fp16.
DType param_dtype(const char* op, const char* name, const Tensor& t);
// Throws unless x's dtype is f32 or that of the parameters.
void expect_residual(const char* op, const Tensor& x, DType param);

View view_of(const Tensor& t);       // of a matrix; a vector is one row; empty for Tensor()
View flat_view_of(const Tensor& t);  // of contiguous memory as one row

}  // namespace qshard::cuda
