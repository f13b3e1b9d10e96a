// One training step under FSDP: the same code for `train`, `verify` and benchmarks.
//
// [Note: A step]  count kept labels (one all-reduce) · per micro-batch: forward and backward,
// gradients reduce-scattered · loss and Σ grad² (one all-reduce) · stop if not finite (fp16: skip
// the update, see [Note: Loss scaling]) · clip · AdamW on the own rows. Loss = Σ cross-entropy of
// all kept labels of the global batch / their number, over all ranks and micro-batches. As in FSDP2
// the reduction averages over ranks; the local loss is scaled by ranks / kept labels, or ranks /
// gradient_divide_factor, to match. The
// host waits for the device once: it reads the sums of loss and grad², which the device adds up.
// With use_graphs() the device has the rest recorded: [Note: Graphs of a step].
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/transport_options.h"
#include "model/qwen3_model.h"
#include "train/adamw.h"
#include "train/grad_scaler.h"
#include "train/step_graphs.h"

namespace qshard {

struct StepResult {
  double loss = 0;        // nats per kept label
  double grad_norm = 0;   // before clipping
  int64_t kept = 0;       // labels that counted, all ranks
  bool updated = true;    // false: no label was kept, or overflow; no weight or moment changed
  bool overflow = false;  // of a gradient in fp16; loss and norm may be infinite or NaN
  double loss_scale = 0;  // of this step; 0: the dtype needs none
};

// What to put around a transport that moves between the ranks of a world, e.g. a trace.
using WrapTransport =
    std::function<std::unique_ptr<Collectives>(std::unique_ptr<Collectives>, const World&)>;

// The mesh and the transports that these options ask for; an option that does not fit the ranks or
// the transport is a usage error. Collective.
Sharding make_sharding(const TransportOptions& transport, const FsdpOptions& fsdp, World& world,
                       Backend& backend, const WrapTransport& wrap = nullptr);

// The same with transports that `make` makes, of so many full buffers. transport: their name.
using MakeTransport = std::function<std::unique_ptr<Collectives>(World&, int full_buffers)>;
MeshShape choose_shape(const FsdpOptions& fsdp, const std::vector<int>& nodes,
                       const std::string& transport);
Sharding make_sharding(const MeshShape& shape, const FsdpOptions& fsdp, World& world,
                       const MakeTransport& make);

class Engine {
 public:
  // B sequences of T tokens a rank and micro-batch. Collective.
  Engine(const Qwen3Config& config, const FsdpOptions& fsdp, const AdamWOptions& adamw,
         const TransportOptions& transport, int64_t B, int64_t T, World& world, Backend& backend);
  // With what make_sharding() has made for the same options.
  Engine(const Qwen3Config& config, const FsdpOptions& fsdp, const AdamWOptions& adamw,
         Sharding sharding, int64_t B, int64_t T, Backend& backend);

  // Before the first step; after require_graphs(). The results are the same bits.
  void use_graphs() { graphs_.emplace(*backend_.device, model_->shape().N); }
  std::vector<StepGraphs::Report> take_graph_reports() {
    return graphs_ ? graphs_->take_reports() : std::vector<StepGraphs::Report>();
  }

  // The micro-batches of this rank. A loss or norm that is not finite throws an AgreedError before
  // any weight changes, unless a lower scale of the loss may mend it.
  StepResult step(const std::vector<TokenBatch>& micro_batches, double lr);
  // Parts of step(), for callers that look at the gradient before the update.
  StepResult compute_gradients(const std::vector<TokenBatch>& micro_batches);
  // Copies to the host that were started before it are those of the weights before it.
  void update(const StepResult& result, double lr);

  // Mean loss over all kept labels of all ranks, 0 without any; every rank passes the same number
  // of batches. A loss that is not finite throws an AgreedError.
  double evaluate(const std::vector<TokenBatch>& batches);

  Qwen3Model& model() { return *model_; }
  Collectives& collectives() { return *sharding_.collectives; }
  const Sharding& sharding() const { return sharding_; }
  const Mesh& mesh() const { return *sharding_.mesh; }
  // Scale of the loss; none unless parameters are fp16.
  std::optional<GradScaler>& scaler() { return scaler_; }
  // That the last gradients were made with: the scaler's or a little less, see exact_scale().
  float applied_loss_scale() const { return applied_loss_scale_; }
  int64_t updates() const { return updates_; }
  void restore(int64_t steps_done, int64_t updates) {
    steps_done_ = steps_done, updates_ = updates;
  }
  int64_t steps_done() const { return steps_done_; }  // skipped ones included

 private:
  int64_t count_kept(const std::vector<TokenBatch>& batches) const;
  void enqueue_gradients(const std::vector<TokenBatch>& micro_batches, float weight,
                         const GradFactors* factors);
  [[noreturn]] void fail_not_finite(double own_loss, const StepResult& result) const;
  std::string find_cause(double own_loss) const;
  std::string bad_parameter() const;
  struct Sums {  // of this rank
    double loss, grad_squares;
  };
  void zero_sums() const;
  Sums read_sums() const;  // waits for the device
  Tensor loss_sum() const { return sums_->row_range(0, 1); }
  Tensor grad_sum() const { return sums_->row_range(1, 2); }

  World& world_;
  Backend& backend_;
  AdamWOptions adamw_;
  double divide_factor_;  // 0: the kept labels of a step
  Sharding sharding_;
  std::unique_ptr<Qwen3Model> model_;
  std::optional<GradScaler> scaler_;
  float applied_loss_scale_ = 1;
  Buffer sums_;  // f64: loss, grad²
  int64_t steps_done_ = 0, updates_ = 0;
  std::optional<StepGraphs> graphs_;  // gone before what it uses
};

}  // namespace qshard
