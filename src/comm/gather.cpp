#include "comm/gather.h"

#include <algorithm>

namespace qshard {

std::vector<float> gather_to_rank0(const World& world, const float* data, int64_t n) {
  constexpr int64_t kMessage = int64_t{1} << 27;  // elements: 512 MiB
  constexpr int kTag = 11;
  if (world.rank() != 0) {
    QS_MPI(MPI_Send(&n, 1, MPI_INT64_T, 0, kTag, world.comm()));
    for (int64_t at = 0; at < n; at += kMessage)
      QS_MPI(MPI_Send(data + at, static_cast<int>(std::min(kMessage, n - at)), MPI_FLOAT, 0, kTag,
                      world.comm()));
    return {};
  }
  std::vector<float> all(data, data + n);
  for (int rank = 1; rank < world.size(); ++rank) {
    int64_t count = 0;
    QS_MPI(MPI_Recv(&count, 1, MPI_INT64_T, rank, kTag, world.comm(), MPI_STATUS_IGNORE));
    size_t at = all.size();
    all.resize(at + count);
    for (int64_t left = count; left > 0; left -= kMessage, at += kMessage)
      QS_MPI(MPI_Recv(all.data() + at, static_cast<int>(std::min(kMessage, left)), MPI_FLOAT, rank,
                      kTag, world.comm(), MPI_STATUS_IGNORE));
  }
  return all;
}

}  // namespace qshard
