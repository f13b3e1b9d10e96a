// The transports between CPU ranks, for make_collectives() and for tests that need one of them.
#pragma once

#include <memory>

#include "comm/collectives.h"

namespace qshard {

// Full buffers, shards and gradients in windows of shared memory, one a node: inside a node a
// gather is a wait. Between nodes a rank sends its rows once to each, after a publish; sums are
// taken over the ranks of a node in rank order, then over nodes. ranks_per_node > 0 splits one
// machine into nodes of that many ranks, for tests of what happens between nodes.
std::unique_ptr<Collectives> make_shm_collectives(World& world, Backend& backend,
                                                  int ranks_per_node = 0);

// Private buffers and plain MPI calls: the simple twin that the others are checked against, bit for
// bit. `full_buffers` as in make_collectives().
std::unique_ptr<Collectives> make_mpi_collectives(World& world, Backend& backend, int full_buffers);

}  // namespace qshard
