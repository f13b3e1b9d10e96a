// The access tracker: races, uninitialised reads, bounds and missing stream order, found from the
// order that is guaranteed rather than from the one that happened.
//
// It sees every access of kernels in the tracker build, whose .cu files are compiled with
// -fsanitize=thread against tracker_hooks.cpp, and the accesses of copies and library operations.
// In the other builds all functions here return at once.
//
// Two accesses are ordered when
// - their operations are: by stream order, events, or a wait of the host between them; or
// - in one kernel, they are of the same thread, or of the same block with a __syncthreads between
//   them, or of the same warp with a whole-warp __syncwarp between them.
#pragma once

#include <cstddef>

namespace cudasim {

extern bool tracker_enabled;  // set by tracker_hooks.cpp

// `code`: the instruction that does it, for reports.
void track_read(const void* address, size_t bytes, const void* code);
void track_write(void* address, size_t bytes, const void* code);
void track_atomic(void* address, size_t bytes, const void* code);
// A cp.async to `address` begins: until track_write of it by the same thread nobody may touch it.
void track_pending_write(void* address, size_t bytes, const void* code);

// Accesses of the whole running operation (copies, matrix products, collectives).
void track_operation_read(const void* address, size_t bytes);
void track_operation_write(void* address, size_t bytes);

void tracker_allocated(char* base, size_t bytes, bool initialised);
void tracker_released(char* base, size_t bytes);

}  // namespace cudasim
