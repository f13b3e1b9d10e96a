#include "train/memory_fit.h"

#include <limits>

#include "train/metrics.h"

namespace qshard {
namespace {

constexpr ActivationCheckpoint kModes[] = {
    ActivationCheckpoint::none, ActivationCheckpoint::selective, ActivationCheckpoint::full};

std::string gb(int64_t bytes) { return human_bytes(static_cast<double>(bytes)); }

int64_t needed(const PlanRequest& request, int64_t others) {
  return plan_step(request).total() + others;
}

// The options of the first change that fits: one layer a unit, more activation checkpointing, then
// smaller micro-batches, then more ranks; or an empty text.
std::string nearest_fit(PlanRequest request, int64_t others, int64_t budget) {
  const ActivationCheckpoint given = request.fsdp.activation_checkpoint;
  const PlanRequest first = request;
  request.fsdp.layers_per_unit = 1;
  auto attempt = [&]() -> std::string {
    for (const ActivationCheckpoint mode : kModes) {
      if (mode < given) continue;
      request.fsdp.activation_checkpoint = mode;
      const int64_t bytes = needed(request, others);
      if (bytes > budget) continue;
      std::string text;
      if (first.fsdp.layers_per_unit > 1) text += "--fsdp.layers_per_unit 1 ";
      if (mode != given)
        text += fmt::format("--train.activation_checkpoint {} ", activation_checkpoint_name(mode));
      if (request.B != first.B) text += fmt::format("--train.micro_batch {} ", request.B);
      if (request.ranks != first.ranks) text += fmt::format("on {} ranks ", request.ranks);
      return fmt::format("{}({} a rank)", text, gb(bytes));
    }
    return "";
  };
  for (; request.B >= 1; request.B /= 2) {
    if (request.B * (first.B / request.B) != first.B) break;  // the global batch stays
    if (const std::string found = attempt(); !found.empty()) return found;
  }
  if (request.fsdp.mesh != "full" && request.fsdp.mesh != "auto")
    return "";  // fits these ranks only
  request.B = 1;
  for (request.ranks *= 2; request.ranks <= 1 << 14; request.ranks *= 2)
    if (const std::string found = attempt(); !found.empty()) return found;
  return "";
}

}  // namespace

int64_t memory_budget(const World& world, Device& device, double limit_gb) {
  int64_t bytes = static_cast<int64_t>(limit_gb * 1e9);
  if (bytes == 0) {
    bytes = device.bytes_available();
    if (device.is_host()) bytes /= world.machine_size();
    if (bytes == 0) bytes = std::numeric_limits<int64_t>::max();
  }
  double least = -static_cast<double>(bytes);
  world.all_reduce_max(&least, 1);
  return static_cast<int64_t>(-least);
}

Plan fit_memory(PlanRequest& request, const MemoryOptions& options, int64_t budget) {
  Plan plan;
  for (const ActivationCheckpoint mode : kModes) {
    if (options.choose_checkpoint) request.fsdp.activation_checkpoint = mode;
    plan = plan_step(request);
    plan.bytes[static_cast<size_t>(Segment::workspace)] += options.others;
    if (plan.total() <= budget) return plan;
    if (!options.choose_checkpoint) break;
  }
  const std::string nearest = nearest_fit(request, options.others, budget);
  fail_usage("this run needs {} a rank, {} are there ({}). {}\n{}", gb(plan.total()), gb(budget),
             options.limit_gb > 0 ? "train.memory_gb" : "what is free now, shared by the ranks",
             nearest.empty() ? "No setting of activation checkpointing, micro-batch or ranks fits"
                             : "Nearest setting that fits: " + nearest,
             memory_table(plan, request.ranks_per_node));
}

}  // namespace qshard
