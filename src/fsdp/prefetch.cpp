#include "fsdp/prefetch.h"

namespace qshard {

Prefetch::Prefetch(Unit& root, std::vector<Unit*> layers, const FsdpOptions& options)
    : root_(root), layers_(std::move(layers)), options_(options) {}

void Prefetch::begin_forward() {
  root_.gather();
  const int ahead = std::min(options_.prefetch, static_cast<int>(layers_.size()));
  for (int l = 0; l < ahead; ++l) layers_[l]->gather();
  root_.wait();
}

void Prefetch::enter_forward(int l) {
  layers_[l]->wait();
  const int end = std::min(l + options_.prefetch + 1, static_cast<int>(layers_.size()));
  for (int next = l + 1; next < end; ++next) layers_[next]->gather();
}

void Prefetch::leave_forward(int l, bool backward_follows) {
  if (options_.reshard_after_forward || !backward_follows) layers_[l]->reshard();
}

void Prefetch::begin_backward(MicroBatch micro) {
  micro_ = micro;
  const int last = static_cast<int>(layers_.size()) - 1;
  for (int l = last; l >= 0 && l > last - options_.prefetch; --l) layers_[l]->gather();
  root_.begin_grad();
}

void Prefetch::enter_backward(int l) {
  layers_[l]->wait();
  for (int next = l - 1; next >= 0 && next >= l - options_.prefetch; --next)
    layers_[next]->gather();
  layers_[l]->begin_grad();
}

void Prefetch::leave_backward(int l) {
  layers_[l]->reshard();
  reduce(*layers_[l]);
}

void Prefetch::end_backward() {
  root_.reshard();
  reduce(root_);
  finish_pending();
}

void Prefetch::end_forward() { root_.reshard(); }

// Starts this unit's reduction, then finishes the previous unit's: its peers had one layer's time.
void Prefetch::reduce(Unit& unit) {
  if (!reduces()) return unit.keep_grad();
  unit.reduce();
  finish_pending();
  pending_ = &unit;
}

void Prefetch::finish_pending() {
  if (!pending_) return;
  pending_->finish_reduce(options_.reduce_every_microbatch && !micro_.first);
  pending_ = nullptr;
}

}  // namespace qshard
