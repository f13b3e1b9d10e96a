// The transport between GPUs: NCCL on communicators made over MPI.
//
// [Note: Streams of the NCCL transport] Gathers and reductions have a communicator and a stream of
// high priority each; operators run on the device's compute stream. Events order the three streams;
// the host never waits.
//   gather_start   the gather stream waits for publish(u) and for the last use of the full buffer
//   gather_wait    the compute stream waits for the gather
//   reshard        marks the last use of the full buffer in the compute stream
//   reduce_start   the reduction stream waits for the gradient
//   reduce_wait    the compute stream waits for the reduction, then scales it into `dst`
// What remains is ordered by these: a shard is written only after its gather was waited for, and a
// gradient slot is used again only after reduce_wait of its holder. What gather_wait and
// grad_buffer return, and `dst`, belong to the compute stream.
//
// Sums are NCCL's: repeatable on the same machine, but not in rank order, and with a reduce_dtype
// of bf16 rounded to it after each rank's addition.
#pragma once

#include <memory>

#include "comm/collectives.h"

namespace qshard {

// `backend`: made by make_cuda_backend(). `full_buffers` as in make_collectives(). Collective;
// throws on every rank when two ranks share a GPU. An asynchronous NCCL error, such as a lost
// connection, is thrown by the next wait, also by that of the device for the compute stream; after
// an exception the communicators are aborted, so that leaving does not wait for ranks that may be
// gone.
std::unique_ptr<Collectives> make_nccl_collectives(World& world, Backend& backend,
                                                   int full_buffers);

}  // namespace qshard
