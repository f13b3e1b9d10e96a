#include "fsdp/prefetch.h"

namespace qshard {

Prefetch::Prefetch(Unit& root, std::vector<Unit*> layers, const FsdpOptions& options)
    : root_(root), layers_(std::move(layers)), options_(options) {}

void Prefetch::begin_forward() {
  root_.gather();
  const int ahead = std::min(options_.forward_depth(), static_cast<int>(layers_.size()));
  for (int l = 0; l < ahead; ++l) layers_[l]->gather();
  root_.wait();
}

void Prefetch::enter_forward(int l) {
  layers_[l]->wait();
  const int end = std::min(l + options_.forward_depth() + 1, static_cast<int>(layers_.size()));
  for (int next = l + 1; next < end; ++next) layers_[next]->gather();
}

void Prefetch::leave_forward(int l, bool backward_follows) {
  if (!backward_follows)
    layers_[l]->reshard();
  else if (options_.reshards_to_group())
    layers_[l]->reshard_to_group();
  else if (options_.reshard_after_forward)
    layers_[l]->reshard();
}

void Prefetch::begin_backward(MicroBatch micro) {
  micro_ = micro;
  const int last = static_cast<int>(layers_.size()) - 1;
  for (int l = last; l >= 0 && l > last - options_.backward_depth(); --l) layers_[l]->gather();
  root_.begin_grad();
}

void Prefetch::enter_backward(int l) {
  layers_[l]->wait();
  for (int next = l - 1; next >= 0 && next >= l - options_.backward_depth(); --next)
    layers_[next]->gather();
  layers_[l]->begin_grad();
}

void Prefetch::leave_backward(int l) {
  reshard_after_backward(*layers_[l]);
  reduce(*layers_[l]);
}

void Prefetch::end_backward() {
  reshard_after_backward(root_);
  reduce(root_);
  while (!reducing_.empty()) advance_reductions();
}

void Prefetch::end_forward() { root_.reshard(); }

void Prefetch::reshard_after_backward(Unit& unit) {
  if (options_.reshard_after_backward || micro_.last) unit.reshard();
}

// Starts this unit's reduction, then goes on with earlier ones: their peers had one layer's time.
void Prefetch::reduce(Unit& unit) {
  if (!reduces()) return unit.keep_grad();
  unit.reduce();
  advance_reductions();
  reducing_.push_back(&unit);
}

void Prefetch::advance_reductions() {
  const bool accumulate = options_.reduce_every_microbatch && !micro_.first;
  std::vector<Unit*> left;
  for (Unit* unit : reducing_)
    if (!unit->advance_reduction(accumulate, micro_.last, micro_.loss_scale)) left.push_back(unit);
  reducing_ = std::move(left);
}

}  // namespace qshard
