#include "comm/shared_window.h"

#include <cstdint>
#include <exception>
#include <utility>

#include "comm/world.h"

namespace qshard {
namespace {

constexpr uintptr_t kAlignment = 64;

char* align_up(void* address) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  return reinterpret_cast<char*>((value + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace

SharedWindow::SharedWindow(MPI_Comm node_comm, size_t own_bytes) {
  int ranks = 0;
  QS_MPI(MPI_Comm_size(node_comm, &ranks));
  MPI_Info info = MPI_INFO_NULL;
  QS_MPI(MPI_Info_create(&info));
  QS_MPI(MPI_Info_set(info, "alloc_shared_noncontig", "true"));  // parts begin on own pages
  void* own = nullptr;
  // Pages are mapped at different addresses but with the same offset in a page, so rounding each
  // part's address up gives the same element on every rank.
  const int code = MPI_Win_allocate_shared(static_cast<MPI_Aint>(own_bytes + kAlignment), 1, info,
                                           node_comm, &own, &window_);
  QS_CHECK(code == MPI_SUCCESS,
           "MPI_Win_allocate_shared of {} bytes a rank on {} ranks failed: {}. Is there room for "
           "all of them in /dev/shm (`df -h /dev/shm`; in a container: --shm-size)? "
           "`--comm.transport mpi` needs no shared memory",
           own_bytes, ranks, mpi_error_text(code));
  QS_MPI(MPI_Info_free(&info));
  QS_MPI(MPI_Win_lock_all(MPI_MODE_NOCHECK, window_));
  for (int r = 0; r < ranks; ++r) {
    MPI_Aint bytes = 0;
    int unit = 0;
    void* base = nullptr;
    QS_MPI(MPI_Win_shared_query(window_, r, &bytes, &unit, &base));
    parts_.push_back(align_up(base));
  }
}

SharedWindow::~SharedWindow() {
  if (window_ == MPI_WIN_NULL || std::uncaught_exceptions() > 0) return;
  MPI_Win_unlock_all(window_);
  MPI_Win_free(&window_);
}

SharedWindow& SharedWindow::operator=(SharedWindow&& other) noexcept {
  std::swap(window_, other.window_);
  std::swap(parts_, other.parts_);
  return *this;
}

}  // namespace qshard
