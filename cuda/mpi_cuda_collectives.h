// The transport between GPUs over plain MPI, for systems without NCCL and as its twin: sums in rank
// order, as `mpi` has them.
//
// [Note: Steps of the mpi-cuda transport] A gather or a reduction of a unit is one MPI call on
// packed rows ([N, packed rows of a rank]) and copies around it, on a stream of its own:
//   gather   shard → MPI_Iallgather → the full buffer, after its last use
//   reduce   the gradient, packed by ranks → MPI_Ialltoall → own rows of every rank, then summed
// MPI knows nothing of streams: it may read what a copy wrote, or write what one reads, only once
// the host has seen that copy's event. So starts put work into a queue, and every call of the
// transport, and every wait of the device, moves the queues on: events that were reached let MPI
// calls start, in the order of the queue, which is the same on all ranks; MPI calls that are
// complete let copies start. A wait returns when its copies are enqueued; the compute stream waits
// for them.
//
// A CUDA-aware MPI gets GPU memory, any other one pinned memory of the host.
#pragma once

#include <memory>
#include <string>

#include "comm/collectives.h"

namespace qshard {

// `backend`: made by make_cuda_backend(). `full_buffers` as in make_collectives(). memory: "device"
// or "pinned" says what MPI gets; auto: device memory where the MPI library says at run time that
// it takes it. "device" against the library's word is a usage error. Collective.
std::unique_ptr<Collectives> make_mpi_cuda_collectives(World& world, Backend& backend,
                                                       int full_buffers, const std::string& memory);

}  // namespace qshard
