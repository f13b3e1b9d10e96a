// Device memory through which optimizer states that lie in the host's memory pass in pieces.
//
// [Note: Offload]  With FsdpOptions::offload_optimizer a unit's f32 master weights, unless they are
// the transport's shards themselves, and AdamW's two moments lie in memory of Device::host().
// Operators get them in pieces of their flat shards, in one of two slots: while they work on a
// piece, the one before it goes back and the next one comes, each in a queue of its own ([Note:
// Queues]). Of a slot, the upload waits until what it held is back; of a unit, until all of its
// earlier pieces are. The host enqueues all of this and waits for nothing, so that pieces follow
// one another across units.
#pragma once

#include <span>
#include <vector>

#include "device/ops.h"

namespace qshard {

class StateSlots {
 public:
  // For pieces of at most `elements` of each of `tensors` states, f32.
  StateSlots(Backend& backend, int tensors, int64_t elements);
  ~StateSlots();  // waits for the copies
  StateSlots(const StateSlots&) = delete;

  int64_t elements() const { return elements_; }

  // Elements [begin, begin + n) of each of these host tensors, for the operators that follow; with
  // `fetch` false the values are undefined. Valid until the next take().
  std::vector<Tensor> take(std::span<const Tensor> host, int64_t begin, int64_t n, bool fetch);
  // No later operator uses what take() gave; with `store` it goes back to where it came from.
  void give_back(bool store);

 private:
  struct Slot {
    Buffer memory;  // [tensors · elements]
    std::unique_ptr<QueuePoint> filled, emptied;
  };
  struct Piece {
    Tensor host, device;
  };

  Device& device_;
  const int64_t elements_;
  Slot slots_[2];
  int current_ = 0;
  std::vector<Piece> pieces_;  // in the current slot
};

}  // namespace qshard
