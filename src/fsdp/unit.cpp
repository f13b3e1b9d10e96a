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
  int64_t elements = 0;
  for (const Piece& piece : spec.pieces) elements += piece.count;
  if (sharding.replica_sums)
    replica_sum_.emplace(name, elements, options.reduce_dtype, sharding.mesh->replicas().size(),
                         backend, *sharding.replica_sums);
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

void Unit::attach() {
  int64_t count = 0;
  for (const Piece& piece : layout_.pieces()) count += piece.count;
  auto allocate = [&](Segment segment, const char* what) {
    return Buffer(*backend_.device, DType::f32, {count}, segment, name_ + " " + what);
  };
  if (!options_.forward_only) {
    exp_avg_buffer_ = allocate(Segment::moments, "exp_avg");
    exp_avg_sq_buffer_ = allocate(Segment::moments, "exp_avg_sq");
    grad_buffer_ = allocate(Segment::gradients, "gradient shard");
    exp_avg_ = split(exp_avg_buffer_, true);
    exp_avg_sq_ = split(exp_avg_sq_buffer_, true);
    grad_shard_ = split(grad_buffer_, true);
    grad_pieces_ = split(grad_buffer_, false);
    if (replica_sum_) replica_sum_->attach();
  }
  if (options_.param_dtype != DType::f32) {
    master_buffer_ = allocate(Segment::shards, "master weights");
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

bool Unit::advance_reduction(bool accumulate, bool last_micro_batch, float loss_scale) {
  switch (reduction_) {
    case Reduction::idle:
      fail("unit {}: advance_reduction without reduce", name_);
    case Reduction::scattering:
      collectives_.reduce_wait(id_, grad_pieces_, replica_sum_ ? 1.0f : mean_ / loss_scale,
                               accumulate);
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
      replica_sum_->finish(grad_buffer_, 1 / loss_scale);
      reduction_ = Reduction::idle;
  }
  return true;
}

Tensor Unit::compute_shard(int i) const {
  if (options_.param_dtype == DType::f32) return {};
  return collectives_.shard(id_, i).row_range(0, layout_[i].numel_of(world_.rank()));
}

void Unit::init_parameters(uint64_t seed, float std) {
  for (int i = 0; i < size(); ++i) {
    const ParamSpec& spec = layout_.params()[i];
    if (master_[i].numel() == 0) continue;
    if (spec.init == Init::ones) {
      backend_.ops->fill(master_[i], 1.0f);
      continue;
    }
    const uint64_t stream = XXH3_64bits(spec.name.data(), spec.name.size());
    const int64_t first = rows(i).begin * layout_[i].row_numel;
    backend_.ops->init_normal(master_[i], seed, stream, first, std);
  }
  cast_to_compute();
  publish();
}

void Unit::cast_to_compute() {
  for (int i = 0; i < size(); ++i)
    if (Tensor shard = compute_shard(i); shard && shard.numel())
      backend_.ops->cast(master_[i], shard);
}

void Unit::publish() { collectives_.publish(id_); }

}  // namespace qshard
