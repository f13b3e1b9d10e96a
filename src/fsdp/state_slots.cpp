#include "fsdp/state_slots.h"

#include <exception>

namespace qshard {

StateSlots::StateSlots(Backend& backend, int tensors, int64_t elements)
    : device_(*backend.device), elements_(elements) {
  for (Slot& slot : slots_)
    slot = {Buffer(device_, DType::f32, {tensors * elements}, Segment::workspace,
                   "slot of offloaded states"),
            device_.make_point(), device_.make_point()};
}

// After an exception a queue may wait for an operation that never ends.
StateSlots::~StateSlots() {
  if (std::uncaught_exceptions() == 0) device_.wait_for_copies();
}

std::vector<Tensor> StateSlots::take(std::span<const Tensor> host, int64_t begin, int64_t n,
                                     bool fetch) {
  const Slot& slot = slots_[current_ = 1 - current_];
  std::vector<Tensor> taken;
  pieces_.clear();
  for (const Tensor& t : host) {
    const int64_t at = std::ssize(pieces_) * elements_;
    pieces_.push_back({t.row_range(begin, begin + n), slot.memory->row_range(at, at + n)});
    taken.push_back(pieces_.back().device);
  }
  device_.hold(Queue::uploads, *slot.emptied);
  if (fetch)
    for (const Piece& piece : pieces_)
      device_.copy_on(Queue::uploads, piece.device.data, piece.host.data, piece.host.bytes());
  device_.set(*slot.filled, Queue::uploads);
  device_.hold(Queue::operators, *slot.filled);
  return taken;
}

void StateSlots::give_back(bool store) {
  const Slot& slot = slots_[current_];
  device_.order(Queue::operators, Queue::downloads);
  if (store)
    for (const Piece& piece : pieces_)
      device_.copy_on(Queue::downloads, piece.host.data, piece.device.data, piece.host.bytes());
  device_.set(*slot.emptied, Queue::downloads);
}

}  // namespace qshard
