// Where the kernels' shared memory lies.
//
// `__shared__` is thread_local in this build, so all of it is in the thread-local storage of the
// program, in link order. The objects are linked as shared_begin.o, kernels, shared_end.o: between
// the two markers lies the shared memory of the kernels and nothing else.
#pragma once

#include <cstddef>

#include "block.h"

namespace cudasim {

// Of the calling OS thread; `dynamic_bytes` as in the launch.
SharedRange shared_region(size_t dynamic_bytes);

constexpr size_t DYNAMIC_SHARED_CAPACITY = 227 << 10;  // the most of sm_90

}  // namespace cudasim
