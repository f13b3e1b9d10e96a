#include "train/step_graphs.h"

#include <chrono>
#include <cstring>
#include <utility>

namespace qshard {

void require_graphs(const std::string& transport, bool offload_optimizer) {
  if (transport != "nccl")
    fail_usage(
        "device.graph records what a GPU computes and NCCL moves, the transport here is {}: leave "
        "it false, or device.backend cuda with comm.transport nccl",
        transport);
  if (offload_optimizer)
    fail_usage(
        "device.graph records no update whose states pass through the host's memory: leave it "
        "false, or fsdp.offload none");
}

StepGraphs::StepGraphs(Device& device, int64_t tokens)
    : device_(device), tokens_(tokens), factors_(make_input(DType::u8, sizeof(Factors))) {}

StepGraphs::Input StepGraphs::make_input(DType dtype, int64_t n) const {
  const auto buffer = [&](Device& device) {
    return Buffer(device, dtype, {n}, Segment::workspace, "input of a step's graphs");
  };
  return {buffer(device_.host()), buffer(device_)};
}

template <typename Part>
Part* StepGraphs::upload(Part Factors::*part, const Part& values) {
  Part* const host = &(static_cast<Factors*>(factors_.host->data)->*part);
  Part* const device = &(static_cast<Factors*>(factors_.device->data)->*part);
  *host = values;
  device_.enqueue_copy(device, host, sizeof values);
  return device;
}

// Ids of all micro-batches, then labels.
std::vector<TokenBatch> StepGraphs::upload(const std::vector<TokenBatch>& micro_batches) {
  const auto n = static_cast<int64_t>(micro_batches.size());
  int32_t* const host = batches_.host->as<int32_t>();
  const int32_t* const device = batches_.device->as<int32_t>();
  const size_t bytes = static_cast<size_t>(tokens_) * sizeof(int32_t);
  std::vector<TokenBatch> uploaded;
  for (int64_t a = 0; a < n; ++a) {
    std::memcpy(host + a * tokens_, micro_batches[a].ids, bytes);
    std::memcpy(host + (n + a) * tokens_, micro_batches[a].labels, bytes);
    uploaded.push_back({device + a * tokens_, device + (n + a) * tokens_});
  }
  device_.enqueue_copy(batches_.device->data, host, batches_.host->bytes());
  return uploaded;
}

void StepGraphs::gradients(const std::vector<TokenBatch>& micro_batches, const GradFactors& factors,
                           const EnqueueGradients& enqueue) {
  if (micro_batches_ == 0) {
    micro_batches_ = micro_batches.size();
    batches_ = make_input(DType::i32, 2 * static_cast<int64_t>(micro_batches_) * tokens_);
  }
  if (micro_batches.size() != micro_batches_) return enqueue(micro_batches, nullptr);
  const std::vector<TokenBatch> uploaded = upload(micro_batches);
  GradFactors* const on_device = upload(&Factors::gradients, factors);
  run(gradients_, [&] { enqueue(uploaded, on_device); });
}

void StepGraphs::update(const UpdateFactors& factors, const EnqueueUpdate& enqueue) {
  UpdateFactors* const on_device = upload(&Factors::update, factors);
  run(update_, [&] { enqueue(on_device); });
}

void StepGraphs::run(Work& work, const std::function<void()>& enqueue) {
  using Clock = std::chrono::steady_clock;
  if (!std::exchange(work.done_once, true)) return enqueue();
  if (!work.recording) {
    const Clock::time_point begin = Clock::now();
    work.recording = device_.record(enqueue);
    reports_.push_back({work.what, work.recording->nodes(),
                        std::chrono::duration<double>(Clock::now() - begin).count()});
  }
  work.recording->run();
}

std::vector<StepGraphs::Report> StepGraphs::take_reports() { return std::exchange(reports_, {}); }

}  // namespace qshard
