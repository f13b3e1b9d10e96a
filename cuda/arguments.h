// Dtypes of operators on a GPU, and what the launchers take instead of Tensors.
#pragma once

#include "cuda/view.h"
#include "device/arguments.h"

namespace qshard::cuda {

// t.dtype; throws unless it is f32, bf16 or fp16.
DType param_dtype(const char* op, const char* name, const Tensor& t);
// Throws unless x's dtype is f32 or that of the parameters.
void expect_residual(const char* op, const Tensor& x, DType param);

View view_of(const Tensor& t);       // of a matrix; a vector is one row; empty for Tensor()
View flat_view_of(const Tensor& t);  // of contiguous memory as one row

}  // namespace qshard::cuda
