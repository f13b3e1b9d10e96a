// A transport that moves nothing, for planning with an imagined World (see World::imagined()): it
// follows the order of calls, counts what they would move, and accounts the memory that the
// transport of this name holds on one rank.
#pragma once

#include <memory>
#include <string>

#include "comm/collectives.h"

namespace qshard {

// transport: "shm", "mpi", "nccl" or "mpi-cuda". Nodes hold world.node_size() ranks each.
std::unique_ptr<Collectives> make_counting_collectives(const std::string& transport,
                                                       const World& world, Backend& backend,
                                                       int full_buffers);

}  // namespace qshard
