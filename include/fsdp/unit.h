// One FSDP unit on this rank: its parameters, sharded on dim 0, and what belongs to them.
//
// [Note: Life of a unit]  Sharded → gather() → Gathering → wait() → Unsharded → reshard() →
// Sharded. In backward it is gathered again, begin_grad() … the operators write grad(i) … reduce(),
// and one unit later advance_reduction() leaves the mean gradient of the own rows in grad_shard(i);
// with several replicas it is called once more for each part of [Note: Replica sum].
//
// [Note: Groups] reshard_to_group() keeps the rows of the unit on the k ranks of a group of
// successive ranks until the next reshard(): as padded Shard(0) has N·chunk rows, a group's rank
// holds N/k·chunk of them, and a gather inside of the group fills the same buffer.
//
// Per parameter i the unit holds, for this rank's rows only: the f32 master weight, AdamW's two
// moments and the reduced gradient (views [rows·row_numel], padding excluded). With f32 parameters
// the transport's shard is the master weight itself; otherwise it is the master rounded to
// param_dtype. With [Note: Offload] some of these views are of memory of the host: what works on
// all states goes through visit_states().
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/replica_sum.h"
#include "fsdp/shard_layout.h"
#include "fsdp/sharding.h"
#include "fsdp/state_slots.h"

namespace qshard {

// What backward computes anew from kept values, so that fewer activations are held.
enum class ActivationCheckpoint : uint8_t { none, selective, full };
ActivationCheckpoint parse_activation_checkpoint(std::string_view name);  // throws a usage error
std::string_view activation_checkpoint_name(ActivationCheckpoint mode);

struct FsdpOptions {
  DType param_dtype = DType::f32;   // gather and compute
  DType reduce_dtype = DType::f32;  // gradients on their way to the reduction; sums are f32
  std::string mesh = "full";        // see choose_mesh()
  bool reshard_after_forward = true;
  // Ranks over which a layer stays sharded from forward to backward; 0: those of the mesh.
  int reshard_ranks = 0;
  bool reshard_after_backward = true;  // false: after the last micro-batch only
  int layers_per_unit = 1;             // successive ones that are a unit together
  int prefetch = 1;                    // units gathered ahead of the one that computes
  int forward_prefetch = -1, backward_prefetch = -1;  // the same, unless -1
  // false: gradients pile up in full and are reduced at the last micro-batch.
  bool reduce_every_microbatch = true;
  ActivationCheckpoint activation_checkpoint = ActivationCheckpoint::none;
  double gradient_divide_factor = 0;  // 0: the kept labels of a step
  // The gradient shards of layers lie over their activations: [Note: Gradients over activations].
  bool gradients_over_activations = false;
  bool forward_only = false;       // no moments and no gradients: units only give their parameters
  bool offload_optimizer = false;  // see [Note: Offload]
  int64_t offload_piece = int64_t{4} << 20;  // elements of a state that come and go at once

  int forward_depth() const { return forward_prefetch < 0 ? prefetch : forward_prefetch; }
  int backward_depth() const { return backward_prefetch < 0 ? prefetch : backward_prefetch; }
  // Full buffers of layers' units that a transport needs.
  int full_buffers() const { return std::max(forward_depth(), backward_depth()) + 1; }
  bool offloads() const { return offload_optimizer && !forward_only; }
  bool reshards_to_group() const { return reshard_after_forward && reshard_ranks > 0; }
  bool reduces_once(int64_t micro_batches) const {  // each gradient, in a step
    return micro_batches == 1 || !reduce_every_microbatch;
  }
  // A layer that stays gathered for long has a full buffer of its own.
  bool keeps_layers() const {
    return !reshard_after_forward || (!reshard_after_backward && !reshards_to_group());
  }
};

// What backward multiplies with, see [Note: Loss scaling]; the same in every micro-batch of a step.
struct GradFactors {
  float loss;     // a label's cross-entropy: its weight · loss scale
  float mean;     // a sum over ranks: 1 / (ranks · loss scale)
  float unscale;  // a mean over ranks: 1 / loss scale

  static GradFactors of(float weight, float loss_scale, int ranks) {
    return {weight * loss_scale, 1.0f / static_cast<float>(ranks) / loss_scale, 1 / loss_scale};
  }
};

class Unit {
 public:
  enum class State : uint8_t { sharded, gathering, unsharded };

  // Registers itself with the transports; attach() after Sharding::finish_setup(). A unit with
  // own_full_buffer never goes to a group. With options.offloads() attach() takes slots, which
  // outlive the unit's use.
  Unit(const std::string& name, std::vector<ParamSpec> params, bool own_full_buffer,
       bool own_grad_buffer, const FsdpOptions& options, Sharding& sharding, Backend& backend);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  void attach(StateSlots* slots = nullptr);

  const std::string& name() const { return name_; }
  const UnitLayout& layout() const { return layout_; }
  int size() const { return layout_.size(); }
  int64_t shard_elements() const;  // of all parameters, with padding
  State state() const { return state_; }

  void gather();   // starts the all-gather of all parameters as one batch; no-op unless sharded
  void wait();     // gathers first if nobody did
  void reshard();  // frees the rows of others; no communication
  void reshard_to_group();  // the same, but see [Note: Groups]

  Tensor param(int i) const;  // full parameter, valid while unsharded
  void begin_grad();          // obtains the full gradient buffer for this micro-batch
  Tensor grad(int i) const;   // full gradient, f32, valid from begin_grad() to reduce()
  bool grad_accumulates() const { return grad_accumulates_; }  // grad holds earlier micro-batches
  void keep_grad();  // instead of reduce(): the next begin_grad() continues to add
  void reduce();     // starts the reduce-scatter of the gradient
  // The next part of the reduction; returns whether it was the last one. accumulate: adds to what
  // grad_shard has, as in later micro-batches. last_micro_batch: the mean is to be over all ranks,
  // otherwise grad_shard may hold less. loss_scale: the mean is divided by it; factors: or by what
  // these say, in the device's memory, or null.
  bool advance_reduction(bool accumulate, bool last_micro_batch, float loss_scale = 1,
                         const GradFactors* factors = nullptr);

  RowRange rows(int i) const { return layout_[i].rows_of(world_.rank()); }  // that this rank holds
  Tensor master(int i) const { return master_[i]; }
  Tensor exp_avg(int i) const { return exp_avg_[i]; }
  Tensor exp_avg_sq(int i) const { return exp_avg_sq_[i]; }
  Tensor grad_shard(int i) const { return grad_shard_[i]; }
  Tensor grad_shards() const { return grad_buffer_; }  // all of them, f32 flat
  Tensor compute_shard(
      int i) const;  // param_dtype copy of master; empty when they are the same memory

  // The states of a parameter, or of part of its rows, in memory of the device; in the order of
  // its operators.
  struct States {
    int param;
    int64_t first;  // element of this rank's rows with which they begin
    Tensor master, exp_avg, exp_avg_sq, grad_shard, compute_shard;  // empty where there is none
  };
  // all_change: operators read and write all of them. With the others the moments are not to be
  // touched.
  enum class StateUse : uint8_t { all_change, master_is_read, master_is_written };
  // Every element that this rank holds, once, in order.
  void visit_states(StateUse use, const std::function<void(const States&)>& visit);

  void init_parameters(uint64_t seed, float std);  // a function of (seed, name, global index)
  void publish();          // after master was written: others may gather it (rounds nothing: see
                           // cast_to_compute)
  void cast_to_compute();  // compute_shard = master rounded; the optimizer does this itself

 private:
  enum class Reduction : uint8_t { idle, scattering, summing, gathering };
  std::vector<Tensor> split(const Tensor& flat, bool true_rows_only) const;
  States states(int i, int64_t first, int64_t last) const;
  std::vector<Tensor> states_in_host(StateUse use) const;
  void visit_piece(int64_t begin, std::span<const Tensor> piece,
                   const std::function<void(const States&)>& visit) const;
  void keep_rows_of_group();
  Collectives& gatherer() const { return in_group_ ? *group_ : collectives_; }
  int gatherer_id() const { return in_group_ ? group_id_ : id_; }

  std::string name_;
  UnitLayout layout_;
  FsdpOptions options_;
  const World& world_;  // of this replica
  const float mean_;    // 1 / ranks of all replicas
  Backend& backend_;
  Collectives& collectives_;
  int id_;
  Collectives* group_;  // or null
  int group_id_ = -1, group_rank_ = 0;
  bool in_group_ = false;  // the group holds the rows, and gathers them
  std::optional<ReplicaSum> replica_sum_;
  State state_ = State::sharded;
  char* full_ = nullptr;
  float* full_grad_ = nullptr;
  bool grad_accumulates_ = false, grad_kept_ = false;
  Reduction reduction_ = Reduction::idle;
  Buffer master_buffer_, exp_avg_buffer_, exp_avg_sq_buffer_, grad_buffer_;
  std::vector<Tensor> master_, exp_avg_, exp_avg_sq_, grad_shard_, grad_pieces_;
  StateSlots* slots_ = nullptr;         // or null: all states are on the device
  std::unique_ptr<QueuePoint> stored_;  // the last pieces are in the host's memory
};

}  // namespace qshard
