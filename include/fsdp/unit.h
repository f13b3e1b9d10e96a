// One FSDP unit on this rank: its parameters, sharded on dim 0, and what belongs to them.
//
// [Note: Life of a unit]  Sharded → gather() → Gathering → wait() → Unsharded → reshard() →
// Sharded. In backward it is gathered again, begin_grad() … the operators write grad(i) … reduce(),
// and one unit later finish_reduce() leaves the mean gradient of the own rows in grad_shard(i).
//
// Per parameter i the unit holds, for this rank's rows only: the f32 master weight, AdamW's two
// moments and the reduced gradient (views [rows·row_numel], padding excluded). With f32 parameters
// the transport's shard is the master weight itself; otherwise it is the master rounded to
// param_dtype.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/shard_layout.h"

namespace qshard {

// What backward computes anew from kept values, so that fewer activations are held.
enum class ActivationCheckpoint : uint8_t { none, selective, full };
ActivationCheckpoint parse_activation_checkpoint(std::string_view name);  // throws a usage error
std::string_view activation_checkpoint_name(ActivationCheckpoint mode);

struct FsdpOptions {
  DType param_dtype = DType::f32;   // gather and compute
  DType reduce_dtype = DType::f32;  // gradients on their way to the reduction; sums are f32
  bool reshard_after_forward = true;
  int prefetch = 1;  // units gathered ahead of the one that computes
  bool reduce_every_microbatch =
      true;  // false: gradients pile up in full and are reduced at the last one
  ActivationCheckpoint activation_checkpoint = ActivationCheckpoint::none;
};

class Unit {
 public:
  enum class State : uint8_t { sharded, gathering, unsharded };

  // Registers itself with the transport; attach() after Collectives::finish_setup().
  Unit(const std::string& name, std::vector<ParamSpec> params, bool own_full_buffer,
       bool own_grad_buffer, const FsdpOptions& options, const World& world, Backend& backend,
       Collectives& collectives);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  void attach();

  const std::string& name() const { return name_; }
  const UnitLayout& layout() const { return layout_; }
  int size() const { return layout_.size(); }
  State state() const { return state_; }

  void gather();   // starts the all-gather of all parameters as one batch; no-op unless sharded
  void wait();     // gathers first if nobody did
  void reshard();  // frees the rows of others; no communication

  Tensor param(int i) const;  // full parameter, valid while unsharded
  void begin_grad();          // obtains the full gradient buffer for this micro-batch
  Tensor grad(int i) const;   // full gradient, f32, valid from begin_grad() to reduce()
  bool grad_accumulates() const { return grad_accumulates_; }  // grad holds earlier micro-batches
  void keep_grad();  // instead of reduce(): the next begin_grad() continues to add
  void reduce();     // starts the reduce-scatter of the gradient
  void finish_reduce(bool accumulate);  // mean over ranks, into grad_shard

  Tensor master(int i) const { return master_[i]; }
  Tensor exp_avg(int i) const { return exp_avg_[i]; }
  Tensor exp_avg_sq(int i) const { return exp_avg_sq_[i]; }
  Tensor grad_shard(int i) const { return grad_shard_[i]; }
  Tensor compute_shard(
      int i) const;  // param_dtype copy of master; empty when they are the same memory

  void init_parameters(uint64_t seed, float std);  // a function of (seed, name, global index)
  void publish();          // after master was written: others may gather it (rounds nothing: see
                           // cast_to_compute)
  void cast_to_compute();  // compute_shard = master rounded; the optimizer does this itself

 private:
  std::vector<Tensor> split(const Tensor& flat, bool true_rows_only) const;

  std::string name_;
  UnitLayout layout_;
  FsdpOptions options_;
  const World& world_;
  Backend& backend_;
  Collectives& collectives_;
  int id_;
  State state_ = State::sharded;
  char* full_ = nullptr;
  float* full_grad_ = nullptr;
  bool grad_accumulates_ = false, grad_kept_ = false, reducing_ = false;
  Buffer master_buffer_, exp_avg_buffer_, exp_avg_sq_buffer_, grad_buffer_;
  std::vector<Tensor> master_, exp_avg_, exp_avg_sq_, grad_shard_, grad_pieces_;
};

}  // namespace qshard
