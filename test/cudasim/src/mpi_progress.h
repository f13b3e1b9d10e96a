// Keeps the simulated device going while the host waits for other ranks.
//
// A rank that blocks in MPI would leave its queued operations untouched, and a rank that waits for
// one of them would wait forever: on a GPU they run by themselves. So the blocking MPI calls of the
// program are interposed (mpi_progress.cpp).
#pragma once

#include <mpi.h>

#include <cstddef>

namespace cudasim {

// A duplicate of MPI_COMM_WORLD for the simulator; MPI_COMM_NULL without MPI.
MPI_Comm control_comm();

// Waits for the request; the device runs meanwhile. Returns MPI's error code.
int progress_until(MPI_Request* request, MPI_Status* status = MPI_STATUS_IGNORE);
// Waits until all ranks of the communicator have come here; the device runs meanwhile.
int progress_barrier(MPI_Comm comm);

// Whether MPI may touch device memory at any time, in whatever thread calls it: it stays open then.
bool mpi_holds_device_memory();

// Fails if the program still awaits [address, address + bytes), or a part of it, from MPI.
void check_receives(const void* address, size_t bytes, const char* user);

}  // namespace cudasim
