// When a unit is gathered, resharded and reduced. The order of the layers' units is known, so it is
// written down: forward 0 … U−1, backward U−1 … 0, each gather started `depth` units ahead.
//
//   forward   enter_forward(u): wait for u, start u+1 … u+depth     leave_forward(u): reshard u
//   backward  enter_backward(u): wait for u, start u−1 … u−depth, take u's gradient buffer
//             leave_backward(u): reshard u, start its reduction, finish that of u+1; with several
//             replicas: go on with those of u+1, u+2 and u+3, each in another part
// With reshard_after_forward = false the units stay gathered from forward to backward, with
// reshard_after_backward = false from one micro-batch's backward to the next one's forward.
#pragma once

#include <memory>
#include <vector>

#include "fsdp/unit.h"

namespace qshard {

// Which micro-batch of a step is running: decides what accumulates and when gradients are reduced.
struct MicroBatch {
  bool first = true, last = true;
  float loss_scale = 1;  // of backward; the reduction divides by it: [Note: Loss scaling]
  // In the device's memory, or null: what is used instead of the weight and the loss scale.
  const GradFactors* factors = nullptr;
};

class Prefetch {
 public:
  Prefetch(Unit& root, std::vector<Unit*> units, const FsdpOptions& options);

  void begin_forward();  // gathers the root unit and starts the first units
  void enter_forward(int u);
  void leave_forward(int u, bool backward_follows);
  void begin_backward(MicroBatch micro);
  void enter_backward(int u);
  void leave_backward(int u);
  void end_backward();  // reduces the root unit; every reduction has finished on return
  void end_forward();   // instead of backward (evaluation): everything is sharded again

 private:
  bool reduces() const { return options_.reduce_every_microbatch || micro_.last; }
  void reshard_after_backward(Unit& unit);
  void reduce(Unit& unit);
  void advance_reductions();

  Unit& root_;
  std::vector<Unit*> units_;  // of the layers
  FsdpOptions options_;
  MicroBatch micro_;
  std::vector<Unit*> reducing_;  // started and not finished, the earliest first
};

}  // namespace qshard
