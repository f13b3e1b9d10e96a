// The ranks that share the parameters and what moves these between them.
#pragma once

#include <memory>

#include "comm/collectives.h"
#include "comm/mesh.h"

namespace qshard {

struct Sharding {
  std::unique_ptr<Mesh> mesh;
  std::unique_ptr<Collectives> collectives;  // of mesh->shards()
  // Of mesh->replicas(), for the sums of gradient shards; null with one replica.
  std::unique_ptr<Collectives> replica_sums;
  // Of mesh->group(), over which layers stay sharded from forward to backward; null unless
  // FsdpOptions::reshard_ranks says so. With private buffers: a shard may be written as soon as
  // this rank's own gather of it is over.
  std::unique_ptr<Collectives> group_gathers;

  Traffic traffic() const {  // of all three
    Traffic sum;
    for (const Collectives* transport :
         {collectives.get(), replica_sums.get(), group_gathers.get()})
      if (transport) sum += transport->traffic();
    return sum;
  }
  const World& shards() const { return mesh->shards(); }
  void finish_setup() {
    mesh->in_parts([&] {
      for (Collectives* transport : {collectives.get(), replica_sums.get(), group_gathers.get()})
        if (transport) transport->finish_setup();
    });
  }
};

}  // namespace qshard
