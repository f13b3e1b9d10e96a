// The ranks as R replicas of S ranks each, as FSDP2's two-dimensional mesh has them.
//
// [Note: Mesh] rank = replica · S + place. The S ranks of a replica hold one whole copy of
// parameters, gradients and optimizer states, split on dim 0: they gather and reduce among
// themselves. The R ranks with the same place hold the same rows: once a step they add up their
// gradients, so that all of them make the same update and stay equal bit for bit. Samples, the loss
// and its mean go over all R·S ranks. With R = 1 the world itself is the one replica.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/world.h"

namespace qshard {

struct MeshShape {
  int replicas = 1, shards = 1;  // R, S
  std::string why;               // of `auto`, for the start log; else empty
  int group = 0;                 // ranks of a replica's groups, that divide S; 0: none are needed

  std::string str() const { return fmt::format("{}x{}", replicas, shards); }
};

// text: "RxS"; "full", one replica over all ranks; or "auto", a replica on each node where there
// are several nodes with equally many, successive ranks, else full. nodes: of each rank. Text that
// is none of these, or that does not fit the number of ranks, is a usage error.
MeshShape choose_mesh(const std::string& text, const std::vector<int>& nodes);

class Mesh {
 public:
  // Collective. shape fits the world, which outlives the mesh.
  Mesh(World& world, const MeshShape& shape);

  const MeshShape& shape() const { return shape_; }
  int replica() const { return world_.rank() / shape_.shards; }
  World& world() const { return world_; }
  World& shards() const { return shards_ ? *shards_ : world_; }  // of this rank's replica
  World& replicas() const;  // with this rank's rows; only where there are several
  World& group() const;     // successive ranks of a replica; only where shape().group says so

  // fn is collective over the ranks of one replica and throws on all of them or none; the first
  // replica calls it. Throws on every rank what it threw there. Collective.
  void on_first_replica(const std::function<void()>& fn) const;
  // fn is collective over a part of the world, such as a replica or a group, and throws on all
  // ranks of a part or none. Throws on every rank if it threw anywhere. Collective.
  void in_parts(const std::function<void()>& fn) const;

 private:
  World& world_;
  MeshShape shape_;
  std::unique_ptr<World> shards_, replicas_, group_;  // null where they are not needed
};

}  // namespace qshard
