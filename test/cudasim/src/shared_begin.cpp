#include <cstddef>

namespace cudasim {
// First thread-local object of the program (src/shared_region.h).
extern thread_local char shared_begin_marker[];
alignas(128) thread_local char shared_begin_marker[128];
}  // namespace cudasim
