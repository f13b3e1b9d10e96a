// Whether a run fits into memory, before any of it is allocated.
#pragma once

#include <limits>
#include <string>

#include "comm/world.h"
#include "train/plan.h"

namespace qshard {

struct MemoryOptions {
  double limit_gb = 0;  // of a rank, 1e9 bytes; 0: what the machine has
  bool choose_checkpoint =
      false;           // the least activation checkpointing that fits, instead of the request's
  int64_t others = 0;  // bytes of a rank that are not in the plan
  // What a rank may take of the host's memory for offloaded states, and what else it takes of it.
  int64_t host_budget = std::numeric_limits<int64_t>::max(), host_others = 0;
};

// Bytes that a rank may take: the limit, or what device and machine still have, shared evenly by
// the ranks that use them; the least of all ranks. Collective.
int64_t memory_budget(const World& world, Device& device, double limit_gb);

// Sets request.fsdp.activation_checkpoint if it is to be chosen, and returns the plan. A run that
// does not fit into `budget` is a usage error with the table and the nearest setting that fits, one
// whose offloaded states do not fit into the host's memory an error as well.
Plan fit_memory(PlanRequest& request, const MemoryOptions& options, int64_t budget);

}  // namespace qshard
