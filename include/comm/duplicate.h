// Communicators of their own for transports: what moves on one never meets what moves on another.
#pragma once

#include "comm/world.h"

namespace qshard {

// The same ranks, with MPI_ERRORS_RETURN. Collective; the caller frees it.
inline MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  QS_MPI(MPI_Comm_dup(comm, &copy));
  QS_MPI(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN));
  return copy;
}

}  // namespace qshard
