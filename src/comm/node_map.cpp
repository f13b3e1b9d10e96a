#include "comm/node_map.h"

#include <exception>
#include <map>

namespace qshard {

NodeMap::NodeMap(const World& world, int ranks_per_node) {
  const int color = ranks_per_node > 0 ? world.rank() / ranks_per_node : 0;
  QS_MPI(MPI_Comm_split(world.node_comm(), color, world.rank(), &comm_));
  QS_MPI(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
  QS_MPI(MPI_Comm_rank(comm_, &local_));
  int lowest = world.rank();  // names the node
  QS_MPI(MPI_Bcast(&lowest, 1, MPI_INT, 0, comm_));
  std::vector<int> lowest_of(world.size());
  QS_MPI(MPI_Allgather(&lowest, 1, MPI_INT, lowest_of.data(), 1, MPI_INT, world.comm()));

  std::map<int, std::vector<int>> by_lowest;
  for (int r = 0; r < world.size(); ++r) by_lowest[lowest_of[r]].push_back(r);
  for (auto& [first, ranks] : by_lowest) {
    if (first == lowest) node_ = nodes();
    members_.push_back(std::move(ranks));
  }
  for (int n = 0; n < nodes(); ++n)
    for (size_t i = 0; i < members_[n].size(); ++i)
      if (n != node_ && static_cast<int>(i) % local_size() == local_)
        wards_.push_back(members_[n][i]);
}

NodeMap::~NodeMap() {
  if (std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
}

int NodeMap::agent(int node) const {
  return members_[node][local_ % static_cast<int>(members_[node].size())];
}

}  // namespace qshard
