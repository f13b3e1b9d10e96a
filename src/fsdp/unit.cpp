#include "fsdp/unit.h"

#include <xxhash.h>

namespace qshard {
namespace {

constexpr std::string_view kCheckpointNames[] = {"none", "selective", "full"};

}  // namespace

ActivationCheckpoint parse_activation_checkpoint(std::string_view name) {
  const auto* found = std::find(std::begin(kCheckpointNames), std::end(kCheckpointNames), name);
  if (found == std::end(kCheckpointNames))
    fail_usage("activation checkpointing '{}': expected none, selective or full", name);
  return static_cast<ActivationCheckpoint>(found - std::begin(kCheckpointNames));
}

std::string_view activation_checkpoint_name(ActivationCheckpoint mode) {
  return kCheckpointNames[static_cast<int>(mode)];
}

Unit::Unit(const std::string& name, std::vector<ParamSpec> params, bool own_full_buffer,
           bool own_grad_buffer, const FsdpOptions& options, Sharding& sharding, Backend& backend)
    : name_(name),
      layout_(std::move(params), sharding.shards().size()),
      options_(options),
      world_(sharding.shards()),
      mean_(1.0f / static_cast<float>(sharding.mesh->world().size())),
      backend_(backend),
      collectives_(*sharding.collectives),
      group_(own_full_buffer ? nullptr : sharding.group_gathers.get()) {
  UnitSpec spec{name,
                layout_.pieces(),
                layout_.elements(),
                options.param_dtype,
                options.reduce_dtype,
                own_full_buffer,
                own_grad_buffer};
  id_ = collectives_.add_unit(spec);
  if (sharding.replica_sums)
    replica_sum_.emplace(name, shard_elements(), options.reduce_dtype,
                         sharding.mesh->replicas().size(), backend, *sharding.replica_sums);
  if (!group_) return;
  for (Piece& piece : spec.pieces) piece.count *= world_.size() / sharding.mesh->group().size();
  spec.own_full_buffer = !options.reshard_after_backward;
  spec.own_grad_buffer = false;
  group_id_ = group_->add_unit(spec);
  group_rank_ = sharding.mesh->group().rank();
}

// Views of a flat [Σ count] buffer, one a parameter.
std::vector<Tensor> Unit::split(const Tensor& flat, bool true_rows_only) const {
  std::vector<Tensor> views;
  int64_t at = 0;
  for (int i = 0; i < size(); ++i) {
    const int64_t count = layout_[i].piece().count;
    const int64_t n = true_rows_only ? layout_[i].numel_of(world_.rank()) : count;
    views.push_back(flat.row_range(at, at + n));
    at += count;
  }
  return views;
}

int64_t Unit::shard_elements() const {
  int64_t count = 0;
  for (const Piece& piece : layout_.pieces()) count += piece.count;
  return count;
}

void Unit::attach(StateSlots* slots) {
  QS_CHECK(options_.offloads() == (slots != nullptr), "unit {}: offloading goes with slots", name_);
  Device& device = *backend_.device;
  Device& home = slots ? device.host() : device;  // of the optimizer's states
  slots_ = slots;
  stored_ = device.make_point();
  auto allocate = [&](Device& where, Segment segment, const char* what) {
    return Buffer(where, DType::f32, {shard_elements()}, segment, name_ + " " + what);
  };
  if (!options_.forward_only) {
    exp_avg_buffer_ = allocate(home, Segment::moments, "exp_avg");
    exp_avg_sq_buffer_ = allocate(home, Segment::moments, "exp_avg_sq");
    grad_buffer_ = allocate(device, Segment::gradients, "gradient shard");
    exp_avg_ = split(exp_avg_buffer_, true);
    exp_avg_sq_ = split(exp_avg_sq_buffer_, true);
    grad_shard_ = split(grad_buffer_, true);
    grad_pieces_ = split(grad_buffer_, false);
    if (replica_sum_) replica_sum_->attach();
  }
  if (options_.param_dtype != DType::f32) {
    master_buffer_ = allocate(home, Segment::shards, "master weights");
    master_ = split(master_buffer_, true);
  } else {
    for (int i = 0; i < size(); ++i)
      master_.push_back(
          collectives_.shard(id_, i).row_range(0, layout_[i].numel_of(world_.rank())));
  }
}

void Unit::gather() {
  if (state_ != State::sharded) return;
  gatherer().gather_start(gatherer_id());
  state_ = State::gathering;
}

void Unit::wait() {
  gather();
  if (state_ != State::gathering) return;
  full_ = static_cast<char*>(gatherer().gather_wait(gatherer_id()));
  state_ = State::unsharded;
}

void Unit::reshard() {
  QS_CHECK(state_ == State::unsharded, "unit {}: reshard without wait", name_);
  gatherer().reshard(gatherer_id());
  in_group_ = false;
  full_ = nullptr;
  state_ = State::sharded;
}

void Unit::reshard_to_group() {
  QS_CHECK(group_ && state_ == State::unsharded, "unit {}: reshard_to_group without {}", name_,
           group_ ? "wait" : "a group");
  const bool held = in_group_;  // since an earlier micro-batch
  if (!held) keep_rows_of_group();
  reshard();
  in_group_ = true;
}

void Unit::keep_rows_of_group() {
  for (int i = 0; i < size(); ++i) {
    const Tensor rows = group_->shard(group_id_, i);
    const int64_t first = layout_[i].offset + group_rank_ * rows.numel();
    const int64_t bytes = static_cast<int64_t>(dtype_size(options_.param_dtype));
    if (rows.numel() > 0)
      backend_.ops->cast(Tensor(full_ + first * bytes, rows.dtype, rows.shape), rows);
  }
  group_->publish(group_id_);
}

Tensor Unit::param(int i) const {
  QS_CHECK(state_ == State::unsharded, "unit {}: {} used while it is sharded", name_,
           layout_.params()[i].name);
  return Tensor(full_ + layout_[i].offset * static_cast<int64_t>(dtype_size(options_.param_dtype)),
                options_.param_dtype, layout_.params()[i].shape);
}

void Unit::begin_grad() {
  QS_CHECK(!options_.forward_only, "unit {}: backward of a model made for forward only", name_);
  grad_accumulates_ = grad_kept_;
  if (!grad_kept_) full_grad_ = collectives_.grad_buffer(id_);
}

Tensor Unit::grad(int i) const {
  QS_CHECK(full_grad_, "unit {}: gradient used outside its backward", name_);
  return Tensor(full_grad_ + layout_[i].offset, DType::f32, layout_.params()[i].shape);
}

void Unit::keep_grad() {
  QS_CHECK(full_grad_, "unit {}: keep_grad without a gradient", name_);
  grad_kept_ = true;
}

void Unit::reduce() {
  QS_CHECK(full_grad_ && reduction_ == Reduction::idle, "unit {}: reduce without a gradient",
           name_);
  collectives_.reduce_start(id_);
  full_grad_ = nullptr;
  grad_kept_ = false;
  reduction_ = Reduction::scattering;
}

bool Unit::advance_reduction(bool accumulate, bool last_micro_batch, float loss_scale,
                             const GradFactors* factors) {
  const Factor mean = factors ? Factor::of(&factors->mean) : Factor(mean_ / loss_scale);
  const Factor unscale = factors ? Factor::of(&factors->unscale) : Factor(1 / loss_scale);
  switch (reduction_) {
    case Reduction::idle:
      fail("unit {}: advance_reduction without reduce", name_);
    case Reduction::scattering:
      collectives_.reduce_wait(id_, grad_pieces_, replica_sum_ ? Factor(1) : mean, accumulate);
      reduction_ = Reduction::idle;
      if (!replica_sum_ || !last_micro_batch) return true;
      replica_sum_->start(grad_buffer_);
      reduction_ = Reduction::summing;
      return false;
    case Reduction::summing:
      replica_sum_->gather(mean_);
      reduction_ = Reduction::gathering;
      return false;
    case Reduction::gathering:
      replica_sum_->finish(grad_buffer_, unscale);
      reduction_ = Reduction::idle;
  }
  return true;
}

Tensor Unit::compute_shard(int i) const {
  if (options_.param_dtype == DType::f32) return {};
  return collectives_.shard(id_, i).row_range(0, layout_[i].numel_of(world_.rank()));
}

Unit::States Unit::states(int i, int64_t first, int64_t last) const {
  const auto part = [&](const Tensor& t) { return t ? t.row_range(first, last) : t; };
  States s{i, first, part(master_[i]), {}, {}, {}, part(compute_shard(i))};
  if (options_.forward_only) return s;
  s.exp_avg = part(exp_avg_[i]);
  s.exp_avg_sq = part(exp_avg_sq_[i]);
  s.grad_shard = part(grad_shard_[i]);
  return s;
}

// Flat, and in the order in which visit_piece() takes their pieces.
std::vector<Tensor> Unit::states_in_host(StateUse use) const {
  std::vector<Tensor> host;
  if (!slots_) return host;
  if (master_buffer_.tensor()) host.push_back(master_buffer_);
  if (use != StateUse::all_change) return host;
  host.push_back(exp_avg_buffer_);
  host.push_back(exp_avg_sq_buffer_);
  return host;
}

// Visits what [begin, begin + n) of the flat shard has of each parameter. piece: these elements of
// states_in_host(), on the device.
void Unit::visit_piece(int64_t begin, std::span<const Tensor> piece,
                       const std::function<void(const States&)>& visit) const {
  const int64_t end = begin + piece.front().numel();
  int64_t at = 0;
  for (int i = 0; i < size(); at += layout_[i++].piece().count) {
    const int64_t from = std::max(begin, at);
    const int64_t to = std::min(end, at + master_[i].numel());
    if (from >= to) continue;
    States s = states(i, from - at, to - at);
    size_t next = 0;
    if (master_buffer_.tensor()) s.master = piece[next++].row_range(from - begin, to - begin);
    for (Tensor* moment : {&s.exp_avg, &s.exp_avg_sq})
      *moment = next < piece.size() ? piece[next++].row_range(from - begin, to - begin) : Tensor();
    visit(s);
  }
}

void Unit::visit_states(StateUse use, const std::function<void(const States&)>& visit) {
  const std::vector<Tensor> host = states_in_host(use);
  if (host.empty()) {
    for (int i = 0; i < size(); ++i)
      if (const int64_t n = master_[i].numel()) visit(states(i, 0, n));
    return;
  }
  Device& device = *backend_.device;
  const bool fetches = use != StateUse::master_is_written;
  const bool stores = use != StateUse::master_is_read;
  device.hold(Queue::uploads, *stored_);
  for (int64_t begin = 0; begin < shard_elements(); begin += slots_->elements()) {
    const int64_t n = std::min(slots_->elements(), shard_elements() - begin);
    visit_piece(begin, slots_->take(host, begin, n, fetches), visit);
    slots_->give_back(stores);
  }
  if (stores) device.set(*stored_, Queue::downloads);
}

void Unit::init_parameters(uint64_t seed, float std) {
  visit_states(StateUse::master_is_written, [&](const States& s) {
    const ParamSpec& spec = layout_.params()[s.param];
    if (spec.init == Init::ones) return backend_.ops->fill(s.master, 1.0f);
    const uint64_t stream = XXH3_64bits(spec.name.data(), spec.name.size());
    const int64_t first = rows(s.param).begin * layout_[s.param].row_numel + s.first;
    backend_.ops->init_normal(s.master, seed, stream, first, std);
  });
  cast_to_compute();
  publish();
}

void Unit::cast_to_compute() {
  if (options_.param_dtype == DType::f32) return;
  visit_states(StateUse::master_is_read,
               [&](const States& s) { backend_.ops->cast(s.master, s.compute_shard); });
}

void Unit::publish() { collectives_.publish(id_); }

}  // namespace qshard
