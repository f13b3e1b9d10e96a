// When a unit is gathered, resharded and reduced. The order of layers is known, so it is written
// down: forward 0 … L−1, backward L−1 … 0, each gather started `depth` layers ahead.
//
//   forward   enter_forward(l): wait for l, start l+1 … l+depth     leave_forward(l): reshard l
//   backward  enter_backward(l): wait for l, start l−1 … l−depth, take l's gradient buffer
//             leave_backward(l): reshard l, start its reduction, finish that of l+1; with several
//             replicas: go on with those of l+1, l+2 and l+3, each in another part
// With reshard_after_forward = false the layers stay gathered from forward to backward, with
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
};

class Prefetch {
 public:
  Prefetch(Unit& root, std::vector<Unit*> layers, const FsdpOptions& options);

  void begin_forward();  // gathers the root unit and starts the first layers
  void enter_forward(int l);
  void leave_forward(int l, bool backward_follows);
  void begin_backward(MicroBatch micro);
  void enter_backward(int l);
  void leave_backward(int l);
  void end_backward();  // reduces the root unit; every reduction has finished on return
  void end_forward();   // instead of backward (evaluation): everything is sharded again

 private:
  bool reduces() const { return options_.reduce_every_microbatch || micro_.last; }
  void reshard_after_backward(Unit& unit);
  void reduce(Unit& unit);
  void advance_reductions();

  Unit& root_;
  std::vector<Unit*> layers_;
  FsdpOptions options_;
  MicroBatch micro_;
  std::vector<Unit*> reducing_;  // started and not finished, the earliest first
};

}  // namespace qshard
