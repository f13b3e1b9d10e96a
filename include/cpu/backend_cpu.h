// The CPU backend: host memory, oneDNN matrix products, own vector kernels.
#pragma once

#include "device/ops.h"

namespace qshard {

// Throws when this CPU lacks an instruction set that the program was compiled for. The operators
// run on `threads` OpenMP threads, whatever OMP_NUM_THREADS says.
Backend make_cpu_backend(int threads);

}  // namespace qshard
