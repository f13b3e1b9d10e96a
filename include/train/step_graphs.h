// A training step as recordings of the device, see [Note: Recording].
//
// [Note: Graphs of a step]  Two of them, since the host decides in between: the gradients (all
// micro-batches with their gathers and reductions, the sums of loss and grad²), after which the
// host reads the sums as it does without graphs, and the update. Each is done once as it is, which
// loads kernels and gives operators their scratch memory, recorded the next time, and from then on
// launched. What changes from step to step is copied to the device before: token ids, labels,
// GradFactors and UpdateFactors. Evaluations, and steps of another number of micro-batches than the
// first one, are done as without graphs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/qwen3_model.h"
#include "train/adamw.h"

namespace qshard {

// Refuses what has no graphs, as a usage error: transports but nccl, which goes with GPUs, and
// states in the host's memory.
void require_graphs(const std::string& transport, bool offload_optimizer);

class StepGraphs {
 public:
  struct Report {  // of a recording
    std::string what;
    int64_t nodes;
    double seconds;
  };
  // They enqueue the work and wait for nothing. With null: with the numbers of the step itself.
  using EnqueueGradients =
      std::function<void(const std::vector<TokenBatch>& micro_batches, const GradFactors*)>;
  using EnqueueUpdate = std::function<void(const UpdateFactors*)>;

  StepGraphs(Device& device, int64_t tokens);  // of a micro-batch

  // Between two calls of gradients() the host has waited for the first one's.
  void gradients(const std::vector<TokenBatch>& micro_batches, const GradFactors& factors,
                 const EnqueueGradients& enqueue);
  void update(const UpdateFactors& factors, const EnqueueUpdate& enqueue);

  std::vector<Report> take_reports();  // since the last call

 private:
  struct Factors {
    GradFactors gradients;
    UpdateFactors update;
  };
  struct Input {  // the host's, page-locked, and the device's
    Buffer host, device;
  };
  struct Work {
    explicit Work(const char* name) : what(name) {}
    const char* what;
    bool done_once = false;
    std::unique_ptr<Recording> recording;
  };
  Input make_input(DType dtype, int64_t n) const;
  // Both give what is to be used instead, on the device.
  std::vector<TokenBatch> upload(const std::vector<TokenBatch>& micro_batches);
  template <typename Part>
  Part* upload(Part Factors::*part, const Part& values);
  void run(Work& work, const std::function<void()>& enqueue);

  Device& device_;
  const int64_t tokens_;
  size_t micro_batches_ = 0;
  Input batches_, factors_;
  Work gradients_{"gradients"}, update_{"update"};
  std::vector<Report> reports_;
};

}  // namespace qshard
