// Memory that the ranks of one node share: every rank gives a part, all of them can read and write
// every part at its own address of it.
//
// Each part is aligned to 64 bytes and untouched at first (its pages are zero, and get their place
// near the rank that touches them first). Construction and destruction are collective. A window
// that is destroyed by an exception is left to the end of the process instead, since the other
// ranks may never come to free it. Order between ranks is made by atomics in the window: MPI-3
// shared memory with the unified memory model, which is what every CPU that this program runs on
// offers.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <vector>

namespace qshard {

class SharedWindow {
 public:
  SharedWindow() = default;
  SharedWindow(MPI_Comm node_comm, size_t own_bytes);
  ~SharedWindow();
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(SharedWindow&& other) noexcept;
  char* part(int node_rank) const { return parts_[node_rank]; }

 private:
  MPI_Win window_ = MPI_WIN_NULL;
  std::vector<char*> parts_;
};

}  // namespace qshard
