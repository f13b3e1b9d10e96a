// Which ranks share memory, and who exchanges rows with whom between nodes.
//
// [Note: Agents] On every other node one rank is this rank's agent: it receives this rank's rows
// into the memory of its node, and sends this rank the sum of its node's gradients for them. The
// ranks for which this one is the agent are its wards. So a node receives each remote row once, and
// the work is spread evenly; nodes may have different numbers of ranks.
#pragma once

#include <vector>

#include "comm/world.h"

namespace qshard {

class NodeMap {
 public:
  // Collective. ranks_per_node > 0 makes nodes of that many successive ranks of one machine, for
  // tests of what happens between nodes; 0: the machine's own.
  NodeMap(const World& world, int ranks_per_node);
  ~NodeMap();
  NodeMap(const NodeMap&) = delete;
  NodeMap& operator=(const NodeMap&) = delete;

  MPI_Comm comm() const { return comm_; }  // of the ranks of this node, in rank order
  int local() const { return local_; }     // this rank's place in it
  int local_size() const { return static_cast<int>(members_[node_].size()); }
  int node() const { return node_; }  // nodes are numbered by their lowest rank
  int nodes() const { return static_cast<int>(members_.size()); }
  int agent(int node) const;  // of this rank, on another node: a rank of the world
  const std::vector<int>& wards() const { return wards_; }  // ranks of the world

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  int local_ = 0, node_ = 0;
  std::vector<std::vector<int>> members_;  // [node] its ranks, ascending
  std::vector<int> wards_;
};

}  // namespace qshard
