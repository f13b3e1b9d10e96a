// Adds up a unit's gradient shards over the replicas, see [Note: Mesh].
//
// [Note: Replica sum] A reduce-scatter among the R ranks that hold the same rows, and an all-gather
// of what it gave: each rank sums 1/R of the rows, in the order of replicas, so that all R get the
// same bits, and sends 2·(R-1)/R of the shard's bytes. Both ways the values travel in reduce_dtype.
// start(), gather() and finish() each come a layer's backward after the one before.
#pragma once

#include <string>

#include "comm/collectives.h"

namespace qshard {

class ReplicaSum {
 public:
  // Of the unit's name, in the transport's: "layers.3 gradient".
  static constexpr const char* kNameSuffix = " gradient";

  // For gradients of f32 [elements]. Registers itself with `replicas`, of that many ranks; attach()
  // after its finish_setup().
  ReplicaSum(const std::string& unit, int64_t elements, DType reduce_dtype, int ranks,
             Backend& backend, Collectives& replicas);
  void attach();

  // What starts in fp16 travels times the loss scale both ways, so that small values stay above
  // what fp16 flushes to zero: gather()'s scale is that of the mean, finish()'s 1 / loss scale.
  void start(const Tensor& gradient);                 // starts the reduce-scatter
  void gather(float scale);                           // finishes it, starts the all-gather
  void finish(const Tensor& gradient, Factor scale);  // the sum times both scales

 private:
  Backend& backend_;
  Collectives& replicas_;
  DType dtype_;
  int64_t elements_, own_elements_ = 0;
  int id_ = -1;
  Buffer own_;  // this rank's part of the sum, f32; unused where it travels in f32
};

}  // namespace qshard
