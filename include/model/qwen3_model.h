// A Qwen3 decoder under FSDP: the root unit, a unit for every FsdpOptions::layers_per_unit layers,
// and the only loop over layers.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "fsdp/prefetch.h"
#include "model/qwen3_layer.h"

namespace qshard {

// This rank's tokens of one micro-batch. ids and labels: int32 [B·T] of the host, or of the device
// where only it looks at them; labels are already shifted, -100 = ignored. Ids and labels are in
// range (the dataset checks). They stay as they are until the loss has been read; in memory of
// device().host() nobody waits for their copies.
struct TokenBatch {
  const int32_t* ids;
  const int32_t* labels;
};

class Qwen3Model {
 public:
  // B sequences of T tokens a micro-batch on this rank. More layers a unit than there are layers
  // are a usage error. Collective.
  Qwen3Model(const Qwen3Config& config, const FsdpOptions& fsdp, int64_t B, int64_t T,
             Sharding& sharding, Backend& backend);

  void init_parameters(uint64_t seed);
  void masters_written();  // after all units' masters were: rounds them and publishes

  // Forward and backward of one micro-batch; afterwards (if it reduces) every unit's grad_shard
  // holds the mean over ranks of the gradient of weight · Σ loss, summed over the step's
  // micro-batches so far. Adds Σ loss over this rank's kept labels to loss_sum, f64 [1] of
  // device().
  void forward_backward(TokenBatch batch, float weight, MicroBatch micro, Tensor loss_sum);
  void forward(TokenBatch batch, Tensor loss_sum);  // adds Σ loss only
  // Logits f32 [1,V] of the token after position `at` of ids [B·T], valid until the next call; what
  // follows `at` in its sequence has no influence on them. Collective.
  Tensor next_logits(const int32_t* ids, int64_t at);

  const Qwen3Config& config() const { return config_; }
  const LayerShape& shape() const { return shape_; }
  Device& device() const { return *backend_.device; }  // that holds its tensors
  int num_units() const { return static_cast<int>(units_.size()) + 1; }
  Unit& unit(int i) { return i == 0 ? *root_ : *units_[i - 1]; }  // 0: root, then the layers'

  // Rows of logits that exist at once.
  int64_t head_chunk() const { return head_chunk_; }
  void limit_head_chunk(int64_t rows) { head_chunk_ = std::clamp<int64_t>(rows, 1, head_chunk_); }

 private:
  void make_units(const FsdpOptions& options, Sharding& sharding);
  int layers_end(int unit) const {  // of a unit of layers, from 0
    return std::min((unit + 1) * layers_per_unit_, static_cast<int>(layers_.size()));
  }
  std::unique_ptr<StateSlots> make_slots(const FsdpOptions& options);
  void run_forward(TokenBatch batch, bool backward_follows);
  void head(Factor weight, bool backward, Tensor loss_sum);
  void copy_in(TokenBatch batch);
  Tensor head_weight(bool gradient) const;

  Qwen3Config config_;
  DType param_dtype_;
  ActivationCheckpoint checkpoint_;
  int layers_per_unit_;
  LayerShape shape_;
  Backend& backend_;
  Ops& ops_;
  std::unique_ptr<Unit> root_;
  std::vector<std::unique_ptr<Unit>> units_;  // of the layers
  std::unique_ptr<StateSlots> slots_;         // after the units: waits for copies of their states
  std::vector<LayerWeights> layers_;
  std::unique_ptr<Prefetch> prefetch_;
  std::vector<LayerActivations> activations_;
  std::unique_ptr<LayerWorkspace> workspace_;
  int64_t head_chunk_;
  Buffer ids_, labels_, final_, final_rstd_, final_normed_, logits_, losses_, d_res_, d_res_p_;
};

}  // namespace qshard
