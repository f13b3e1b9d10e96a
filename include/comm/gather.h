// Moving whole host arrays to rank 0: for exports and checks, not for the training step.
#pragma once

#include <vector>

#include "comm/world.h"

namespace qshard {

// On rank 0 the ranks' arrays one after the other in rank order; elsewhere empty. Collective; n may
// differ and be 0. Messages stay below 2 GiB.
std::vector<float> gather_to_rank0(const World& world, const float* data, int64_t n);

}  // namespace qshard
