#include <cuda_runtime.h>

#include "report.h"
#include "shared_region.h"

// The array that kernels declare as `extern __shared__ unsigned char smem[]` (cuda/kernel.cuh).
namespace qshard::cuda {
extern thread_local unsigned char smem[];
alignas(1024) thread_local unsigned char smem[cudasim::DYNAMIC_SHARED_CAPACITY];
}  // namespace qshard::cuda

namespace cudasim {

extern thread_local char shared_begin_marker[];

SharedRange shared_region(size_t dynamic_bytes) {
  char* begin = shared_begin_marker;
  char* dynamic = reinterpret_cast<char*>(qshard::cuda::smem);
  if (begin >= dynamic)
    fail("the program is linked in the wrong order: shared_begin.o, kernels, shared_end.o");
  return {begin, dynamic + DYNAMIC_SHARED_CAPACITY, dynamic, dynamic_bytes,
          DYNAMIC_SHARED_CAPACITY};
}

}  // namespace cudasim
