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
// [Note: Order of the communicators] A kernel of NCCL holds its multiprocessors until the other
// ranks' kernels have come. If one rank runs the gather first and another the reduction, and
// neither finds room for the second, both wait for ever. So the two communicators' operations must
// start in one order on all ranks: that of the calls, which is the same everywhere, since one
// thread makes them and Prefetch has no branch that depends on time. NCCL 2.26 and newer starts
// kernels in that order when NCCL_LAUNCH_ORDER_IMPLICIT is set before its first launch, as it is
// here; with an older one, and in a graph, whose nodes have no order but that of events, each
// operation waits for the end of the last one, whichever its communicator was.
//
// Sums are NCCL's: repeatable on the same machine, but not in rank order, and with a reduce_dtype
// of 16 bits rounded to it after each rank's addition.
#pragma once

#include <memory>
#include <string>

#include "comm/collectives.h"

namespace qshard {

// `backend`: made by make_cuda_backend(). `full_buffers` as in make_collectives(). Collective;
// throws on every rank when two ranks share a GPU, or NCCL is too old for `buffers`:
//   plain        cudaMalloc
//   windows      ncclMemAlloc, registered as symmetric windows (NCCL 2.27)
//   copy-engine  the same, and gathers on a communicator with the zero-CTA policy, which takes no
//                multiprocessor where NCCL can do without (NCCL 2.28 inside NVLink's reach)
//
// An asynchronous NCCL error, such as a lost connection, is thrown by the next wait, also by that
// of the device for the compute stream. After an exception the communicators are aborted, so that
// leaving does not wait for ranks that may be gone.
std::unique_ptr<Collectives> make_nccl_collectives(World& world, Backend& backend, int full_buffers,
                                                   const std::string& buffers);

}  // namespace qshard
