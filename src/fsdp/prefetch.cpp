#include "fsdp/prefetch.h"

namespace qshard {

Prefetch::Prefetch(Unit& root, std::vector<Unit*> units, const FsdpOptions& options)
    : root_(root), units_(std::move(units)), options_(options) {}

void Prefetch::begin_forward() {
  root_.gather();
  const int ahead = std::min(options_.forward_depth(), static_cast<int>(units_.size()));
  for (int u = 0; u < ahead; ++u) units_[u]->gather();
  root_.wait();
}

void Prefetch::enter_forward(int u) {
  units_[u]->wait();
  const int end = std::min(u + options_.forward_depth() + 1, static_cast<int>(units_.size()));
  for (int next = u + 1; next < end; ++next) units_[next]->gather();
}

void Prefetch::leave_forward(int u, bool backward_follows) {
  if (!backward_follows)
    units_[u]->reshard();
  else if (options_.reshards_to_group())
    units_[u]->reshard_to_group();
  else if (options_.reshard_after_forward)
    units_[u]->reshard();
}

void Prefetch::begin_backward(MicroBatch micro) {
  micro_ = micro;
  QS_CHECK(!options_.gradients_over_activations ||
               options_.reduces_once(micro.first && micro.last ? 1 : 2),
           "gradient shards lie over activations: a step of several micro-batches that are reduced "
           "one by one would lose them");
  const int last = static_cast<int>(units_.size()) - 1;
  for (int u = last; u >= 0 && u > last - options_.backward_depth(); --u) units_[u]->gather();
  root_.begin_grad();
}

void Prefetch::enter_backward(int u) {
  units_[u]->wait();
  for (int next = u - 1; next >= 0 && next >= u - options_.backward_depth(); --next)
    units_[next]->gather();
  units_[u]->begin_grad();
}

void Prefetch::leave_backward(int u) {
  reshard_after_backward(*units_[u]);
  reduce(*units_[u]);
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

// Starts this unit's reduction, then goes on with earlier ones: their peers had one unit's time.
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
    if (!unit->advance_reduction(accumulate, micro_.last, micro_.loss_scale, micro_.factors))
      left.push_back(unit);
  reducing_ = std::move(left);
}

}  // namespace qshard
