#include "train/plan.h"

#include <numeric>

#include "backends.h"
#include "comm/counting_collectives.h"
#include "comm/traced_collectives.h"
#include "device/counting_backend.h"
#include "device/traced_ops.h"
#include "train/engine.h"
#include "train/metrics.h"

namespace qshard {

namespace {

int64_t sum_of(const SegmentBytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

}  // namespace

SegmentBytes bytes_held(const Device& device) {
  SegmentBytes bytes;
  for (const Segment segment : kSegments)
    bytes[static_cast<size_t>(segment)] = device.bytes_held(segment);
  return bytes;
}

MemoryUse memory_use(Device& device) {
  MemoryUse use{bytes_held(device), {}};
  if (device.is_host()) return use;
  for (const Segment segment : {Segment::shards, Segment::moments})
    use.host[static_cast<size_t>(segment)] = device.host().bytes_held(segment);
  return use;
}

int64_t Plan::total() const { return sum_of(memory.device); }
int64_t Plan::host_total() const { return sum_of(memory.host); }

Plan plan_step(const PlanRequest& r) {
  const auto world = World::imagined(r.ranks, r.ranks_per_node);
  Backend backend = make_counting_backend(moves_gpu_memory(r.transport));
  Trace trace;
  const TracedBackend traced(backend, trace);
  std::vector<int> nodes;
  for (int rank = 0; rank < r.ranks; ++rank) nodes.push_back(rank / r.ranks_per_node);
  Sharding sharding = make_sharding(
      choose_shape(r.fsdp, nodes, r.transport), r.fsdp, *world,
      [&](World& ranks, int full_buffers) {
        return make_traced_collectives(
            make_counting_collectives(r.transport, ranks, backend, full_buffers), ranks, trace);
      });
  const AdamWOptions adamw;
  Engine engine(r.config, r.fsdp, adamw, std::move(sharding), r.B, r.T, backend);
  Qwen3Model& model = engine.model();
  Plan plan;
  plan.memory = memory_use(*backend.device);

  const Buffer sums(*backend.device, DType::f64, {1}, Segment::workspace, "sums");
  for (int64_t a = 0; a < r.accumulation; ++a)
    model.forward_backward({nullptr, nullptr}, 1.0f, {a == 0, a + 1 == r.accumulation}, sums);
  for (int u = 0; u < model.num_units(); ++u)
    adamw_update(model.unit(u), *backend.ops, adamw, 0, 1, 1.0f);
  plan.traffic = engine.sharding().traffic();
  plan.spans = trace.spans();
  return plan;
}

std::string memory_table(const Plan& plan, int ranks_per_node, const MemoryUse* measured) {
  auto line = [&](std::string_view name, int64_t planned, int64_t found) {
    auto gb = [](int64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
    const std::string text =
        fmt::format("  {:<14}{:>12}{:>12}", name, gb(planned), gb(planned * ranks_per_node));
    if (!measured) return text + "\n";
    const double percent =
        planned ? 100.0 * static_cast<double>(found - planned) / static_cast<double>(planned) : 0;
    return text + fmt::format("{:>12}{:>+9.2f} %\n", gb(found), percent);
  };
  std::string text = fmt::format("  {:<14}{:>12}{:>12}", "planned", "a rank", "a node");
  text += measured ? fmt::format("{:>12}{:>11}\n", "measured", "off by") : "\n";
  for (const Segment segment : kSegments)
    text += line(segment_name(segment), plan[segment],
                 measured ? measured->device[static_cast<size_t>(segment)] : 0);
  text += line("total", plan.total(), measured ? sum_of(measured->device) : 0);
  for (const Segment segment : kSegments) {
    const auto s = static_cast<size_t>(segment);
    if (plan.memory.host[s] > 0)
      text += line(fmt::format("host {}", segment_name(segment)), plan.memory.host[s],
                   measured ? measured->host[s] : 0);
  }
  text.pop_back();
  return text;
}

}  // namespace qshard
