// What moves between nodes for the shared-memory transport, over MPI: rows of parameters from ranks
// to their agents, and sums of gradients from agents to their wards ([Note: Agents]). Starts do not
// block; the *_done calls test, and must be repeated until they say true. Without other nodes every
// call is empty.
#pragma once

#include <vector>

#include "comm/block_type.h"
#include "comm/node_map.h"
#include "comm/unit_table.h"

namespace qshard {

class NodeExchange {
 public:
  // Collective; after units.finish(). All arguments must outlive it.
  NodeExchange(const World& world, const NodeMap& nodes, const UnitTable& units, Device& device);
  ~NodeExchange();
  NodeExchange(const NodeExchange&) = delete;
  NodeExchange& operator=(const NodeExchange&) = delete;

  // Own rows of the unit's full buffer go to the agents, the wards' rows come into it.
  void start_rows(int unit, char* full);
  bool rows_done(int unit);

  // Sums of one unit in gradient slot `slot`: the agents' come into node_sum; once ward_sum of
  // every ward is written, send_sums sends them. Own node's node_sum is the caller's to write.
  void start_sums(int unit, int slot);
  Tensor ward_sum(int unit, int slot, size_t ward, int piece) const;  // f32 [count]
  void send_sums(int unit, int slot);
  bool sums_done(int slot);
  Tensor node_sum(int unit, int slot, int node, int piece) const;  // f32 [count]

 private:
  struct UnitRows {
    std::vector<BlockType> types;  // own rows, then each ward's
    std::vector<MPI_Request> requests;
    BlockType sums;  // packed rows in f32
  };
  struct SlotSums {
    Buffer from_nodes, for_wards;  // f32 [nodes, packed], [wards, packed]
    std::vector<MPI_Request> requests;
  };
  Tensor packed(const Buffer& buffer, int unit, int64_t index, int piece) const;

  const NodeMap& nodes_;
  const UnitTable& units_;
  MPI_Comm rows_comm_ = MPI_COMM_NULL, sums_comm_ = MPI_COMM_NULL;
  std::vector<UnitRows> rows_;  // [unit]
  std::vector<SlotSums> sums_;  // [slot]
};

}  // namespace qshard
