#include "train/memory_fit.h"

#include "backends.h"
#include "train/metrics.h"

namespace qshard {
namespace {

constexpr ActivationCheckpoint kModes[] = {
    ActivationCheckpoint::none, ActivationCheckpoint::selective, ActivationCheckpoint::full};

std::string gb(int64_t bytes) { return human_bytes(static_cast<double>(bytes)); }

bool host_fits(const Plan& plan, const MemoryOptions& options) {
  return plan.host_total() == 0 || plan.host_total() + options.host_others <= options.host_budget;
}

// The options of the first change that fits: one layer a unit, more activation checkpointing, then
// offloading (of a GPU), then smaller micro-batches, then more ranks; or an empty text.
std::string nearest_fit(PlanRequest request, const MemoryOptions& options, int64_t budget) {
  const ActivationCheckpoint given = request.fsdp.activation_checkpoint;
  const PlanRequest first = request;
  request.fsdp.layers_per_unit = 1;
  auto attempt_checkpointing = [&]() -> std::string {
    for (const ActivationCheckpoint mode : kModes) {
      if (mode < given) continue;
      request.fsdp.activation_checkpoint = mode;
      const Plan plan = plan_step(request);
      const int64_t bytes = plan.total() + options.others;
      if (bytes > budget || !host_fits(plan, options)) continue;
      std::string text;
      if (first.fsdp.layers_per_unit > 1) text += "--fsdp.layers_per_unit 1 ";
      if (mode != given)
        text += fmt::format("--train.activation_checkpoint {} ", activation_checkpoint_name(mode));
      if (request.fsdp.offload_optimizer != first.fsdp.offload_optimizer)
        text += "--fsdp.offload optimizer ";
      if (request.B != first.B) text += fmt::format("--train.micro_batch {} ", request.B);
      if (request.ranks != first.ranks) text += fmt::format("on {} ranks ", request.ranks);
      return fmt::format("{}({} a rank)", text, gb(bytes));
    }
    return "";
  };
  auto attempt = [&] {
    request.fsdp.offload_optimizer = first.fsdp.offload_optimizer;
    const std::string found = attempt_checkpointing();
    if (!found.empty() || !moves_gpu_memory(request.transport)) return found;
    request.fsdp.offload_optimizer = true;
    return attempt_checkpointing();
  };
  const int64_t samples = first.ranks * first.B * first.accumulation;
  for (; request.B >= 1; request.B /= 2) {
    if (request.B * (first.B / request.B) != first.B) break;  // the global batch stays
    request.set_accumulation(first.accumulation * (first.B / request.B));
    if (const std::string found = attempt(); !found.empty()) return found;
  }
  if (request.fsdp.mesh != "full" && request.fsdp.mesh != "auto")
    return "";  // fits these ranks only
  request.B = 1;
  for (request.ranks *= 2; request.ranks <= 1 << 14; request.ranks *= 2) {
    request.set_accumulation(std::max<int64_t>(1, samples / request.ranks));
    if (const std::string found = attempt(); !found.empty()) return found;
  }
  return "";
}

[[noreturn]] void fail_host(const Plan& plan, const MemoryOptions& options, int ranks_per_node) {
  const std::string copy = options.host_others > 0
                               ? fmt::format(", {} with the copies that checkpoint.async makes",
                                             gb(plan.host_total() + options.host_others))
                               : "";
  fail_usage(
      "fsdp.offload optimizer needs {} of the host's memory a rank{}, {} are there (what is free "
      "now, shared by the ranks). Use more ranks{}, or --fsdp.offload none\n{}",
      gb(plan.host_total()), copy, gb(options.host_budget),
      copy.empty() ? "" : ", or --checkpoint.async false", memory_table(plan, ranks_per_node));
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
    plan.memory.device[static_cast<size_t>(Segment::workspace)] += options.others;
    if (!host_fits(plan, options)) fail_host(plan, options, request.ranks_per_node);
    if (plan.total() <= budget) return plan;
    if (!options.choose_checkpoint) break;
  }
  const std::string nearest = nearest_fit(request, options, budget);
  fail_usage("this run needs {} a rank, {} are there ({}). {}\n{}", gb(plan.total()), gb(budget),
             options.limit_gb > 0 ? "train.memory_gb" : "what is free now, shared by the ranks",
             nearest.empty() ? "No setting of activation checkpointing, micro-batch or ranks fits"
                             : "Nearest setting that fits: " + nearest,
             memory_table(plan, request.ranks_per_node));
}

}  // namespace qshard
