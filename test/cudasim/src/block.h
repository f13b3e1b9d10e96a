// Runs the blocks of a kernel launch, one after the other in random order, each thread a fiber.
//
// A thread runs until it waits (barrier, warp collective) or ends; the next one is chosen by the
// seed. The last lane to arrive at a warp collective computes it for all.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cudasim/site.h"
#include "fiber.h"

namespace cudasim {

struct Launch {
  const void* kernel;  // its address, for names and attributes
  dim3 grid, block;
  size_t dynamic_bytes;         // of shared memory
  void (*invoke)(const void*);  // calls the kernel once, as the current thread
  const void* arguments;        // handed to invoke
  size_t argument_bytes;
};

void run_grid(const Launch& launch);

// An asynchronous copy from global to shared memory that has been issued and not waited for.
struct AsyncCopy {
  void* destination;
  const void* source;
  size_t bytes, source_bytes;  // the rest is zero-filled
  const void* code;            // that issued it
  bool landed;
};

struct Thread : Fiber {
  uint3 index{};
  int linear = 0, lane = 0, warp = 0;
  uint16_t barriers = 0;    // block barriers passed
  uint16_t warp_syncs = 0;  // __syncwarp of the whole warp passed
  const char* waits_in = nullptr;
  Site waits_at;
  std::vector<AsyncCopy> open_group;                     // issued, not yet committed
  std::vector<std::vector<AsyncCopy>> committed_groups;  // oldest first
};

// The thread that runs now, null outside of kernels.
extern Thread* current_thread;
uint32_t current_block();  // linear index
const Launch* current_launch();

// The static and dynamic shared memory of the running block.
struct SharedRange {
  char *begin, *end;
  char* dynamic_begin;
  size_t dynamic_bytes, dynamic_capacity;
};
const SharedRange& shared_range();
// Fails unless the bytes are shared memory of the running block.
void check_shared(const void* address, size_t bytes, const char* user);

using Combine = void (*)(void** frames, uint32_t mask);
// Joins the lanes of `mask` that have not exited; frames of missing lanes are null. `combine` may
// be null. `name` is for reports.
void warp_collective(const char* name, uint32_t mask, void* frame, Combine combine, Site site);

void print_current_thread();  // to stderr, for reports

}  // namespace cudasim
