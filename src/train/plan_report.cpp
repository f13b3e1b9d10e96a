#include "train/plan_report.h"

#include <algorithm>

#include "train/metrics.h"

namespace qshard {
namespace {

using Json = nlohmann::ordered_json;

Json setting_of(const PlanRequest& r) {
  const FsdpOptions& f = r.fsdp;
  return {{"parameters", r.config.num_parameters()},
          {"layers", r.config.num_hidden_layers},
          {"ranks", r.ranks},
          {"ranks_per_node", r.ranks_per_node},
          {"transport", r.transport},
          {"batch", r.B},
          {"seq", r.T},
          {"accumulation", r.accumulation},
          {"tokens_per_step", r.ranks * r.B * r.T * r.accumulation},
          {"param_dtype", dtype_name(f.param_dtype)},
          {"reduce_dtype", dtype_name(f.reduce_dtype)},
          {"mesh", f.mesh},
          {"reshard_after_forward", f.reshard_after_forward},
          {"layers_per_unit", f.layers_per_unit},
          {"prefetch", f.prefetch},
          {"activation_checkpoint", activation_checkpoint_name(f.activation_checkpoint)},
          {"offload", f.offload_optimizer ? "optimizer" : "none"}};
}

Json memory_of(const PlanRequest& r, const Plan& plan) {
  Json memory;
  for (const Segment segment : kSegments) memory[segment_name(segment)] = plan[segment];
  memory["total"] = plan.total();
  memory["node_total"] = plan.total() * r.ranks_per_node;
  for (const Segment segment : kSegments)
    if (const int64_t bytes = plan.memory.host[static_cast<size_t>(segment)])
      memory[fmt::format("host_{}", segment_name(segment))] = bytes;
  return memory;
}

Json traffic_of(const Plan& plan) {
  int64_t forward = 0, backward = 0, reductions = 0, replicas = 0, all = 0;
  double between = 0;
  for (const Span& span : plan.spans) {
    if (span.lane == Lane::compute) continue;
    // A rank's share of what its node receives: the other nodes' rows, once.
    if (span.ranks > 1)
      between += static_cast<double>(span.logical_bytes) * (span.nodes - 1) / (span.ranks - 1);
    all += span.logical_bytes;
    const bool of_replicas = span.unit.ends_with(" gradient");  // see ReplicaSum
    (of_replicas                 ? replicas
     : span.lane == Lane::reduce ? reductions
     : span.phase == "forward"   ? forward
                                 : backward) += span.logical_bytes;
  }
  return {{"forward_gathers", forward},
          {"backward_gathers", backward},
          {"reductions", reductions},
          {"replica_sums", replicas},
          {"total", all},
          {"between_nodes", static_cast<int64_t>(between)}};
}

Json flops_of(const PlanRequest& r, const Plan& plan) {
  int64_t executed = 0;
  for (const Span& span : plan.spans) executed += span.flops;
  const double tokens = static_cast<double>(r.B * r.T * r.accumulation);
  return {{"model", static_cast<int64_t>(r.config.train_flops_per_token(r.T) * tokens)},
          {"executed", executed}};
}

Json time_of(const PlanRequest& r, const Plan& plan, const Hardware& h, double tokens) {
  const StepTime t = simulate(plan, h);
  const double of_step = static_cast<double>(r.ranks * r.B * r.T * r.accumulation);
  Json time = {{"hardware", h.name},
               {"step", t.step},
               {"compute", t.compute},
               {"exposed_gathers", t.gather_wait},
               {"exposed_reductions", t.reduce_wait},
               {"hidden_communication", t.gathers + t.reductions - t.gather_wait - t.reduce_wait},
               {"exposed_offload", t.offload_wait},
               {"other", t.other},
               {"tokens_per_s", of_step / t.step},
               {"tokens_per_s_and_rank", of_step / t.step / r.ranks}};
  const auto peak = h.peak_flops.find(std::string(dtype_name(r.fsdp.param_dtype)));
  if (peak != h.peak_flops.end())
    time["mfu"] = r.config.train_flops_per_token(r.T) * of_step / r.ranks / t.step / peak->second;
  if (tokens > 0) time["days"] = tokens / of_step * t.step / 86400;
  time["operators"] = t.by_operator;
  return time;
}

std::string words_of(std::string name) {  // "exposed_gathers" is "exposed gathers"
  std::replace(name.begin(), name.end(), '_', ' ');
  return name;
}

std::string bytes_text(const Json& value) { return human_bytes(value.get<double>()); }

std::string milliseconds(const Json& value) {
  return fmt::format("{:.2f} ms", value.get<double>() * 1e3);
}

std::string number_text(double value) {
  constexpr std::pair<double, const char*> units[] = {
      {1e15, "P"}, {1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}};
  for (const auto& [size, unit] : units)
    if (value >= size) return fmt::format("{:.2f} {}", value / size, unit);
  return fmt::format("{:.0f} ", value);
}

}  // namespace

Json plan_report(const PlanRequest& request, const std::optional<Hardware>& hardware,
                 double tokens) {
  const Plan plan = plan_step(request);
  Json report = {{"setting", setting_of(request)},
                 {"memory_bytes", memory_of(request, plan)},
                 {"traffic_bytes", traffic_of(plan)},
                 {"flops", flops_of(request, plan)}};
  if (hardware) {
    report["seconds"] = time_of(request, plan, *hardware, tokens);
    if (hardware->memory_bytes > 0) report["fits"] = plan.total() <= hardware->memory_bytes;
  }
  return report;
}

std::string plan_text(const Json& report) {
  const Json &s = report["setting"], &m = report["memory_bytes"], &t = report["traffic_bytes"];
  std::string text = fmt::format(
      "model     {} parameters, {} layers\n"
      "setting   {} ranks, {} a node, {}; {} × {} tokens a rank and micro-batch, {} micro-batches: "
      "{} tokens a step\n"
      "          parameters {}, gradients reduced as {}, activation checkpointing {}; {} layer(s) "
      "a unit\n\n"
      "memory            a rank      a node\n",
      s["parameters"].get<int64_t>(), s["layers"].get<int64_t>(), s["ranks"].get<int>(),
      s["ranks_per_node"].get<int>(), s["transport"].get<std::string>(), s["batch"].get<int64_t>(),
      s["seq"].get<int64_t>(), s["accumulation"].get<int64_t>(),
      s["tokens_per_step"].get<int64_t>(), s["param_dtype"].get<std::string>(),
      s["reduce_dtype"].get<std::string>(), s["activation_checkpoint"].get<std::string>(),
      s["layers_per_unit"].get<int>());
  for (const auto& [segment, bytes] : m.items()) {
    if (segment == "node_total") continue;
    text += fmt::format("  {:<14}{:>10}{:>12}\n", words_of(segment), bytes_text(bytes),
                        human_bytes(bytes.get<double>() * s["ranks_per_node"].get<double>()));
  }
  if (report.contains("fits") && !report["fits"].get<bool>())
    text += "  more than this hardware has: see --search, or --ranks\n";
  text += "\ntraffic of a rank and step, as a ring sends it\n";
  for (const auto& [name, bytes] : t.items())
    text += fmt::format("  {:<24}{:>12}\n", words_of(name), bytes_text(bytes));
  text += fmt::format("\narithmetic of a rank and step\n  {:<24}{:>9}FLOP\n  {:<24}{:>9}FLOP\n",
                      "model", number_text(report["flops"]["model"].get<double>()), "executed",
                      number_text(report["flops"]["executed"].get<double>()));
  if (!report.contains("seconds")) return text + "\nfor times: --hardware FILE (data/hardware)\n";
  const Json& time = report["seconds"];
  text += fmt::format("\ntime of a step on {}\n", time["hardware"].get<std::string>());
  for (const char* name :
       {"compute", "exposed_gathers", "exposed_reductions", "exposed_offload", "other", "step"}) {
    if (name == std::string("exposed_offload") && s["offload"] == "none") continue;
    text += fmt::format("  {:<24}{:>12}\n", words_of(name), milliseconds(time[name]));
  }
  text += fmt::format("  {:<24}{:>12} (communication under compute)\n", "hidden",
                      milliseconds(time["hidden_communication"]));
  text += fmt::format("  {:.0f} tokens/s, {:.0f} a rank", time["tokens_per_s"].get<double>(),
                      time["tokens_per_s_and_rank"].get<double>());
  if (time.contains("mfu")) text += fmt::format(", MFU {:.1f} %", 100 * time["mfu"].get<double>());
  if (time.contains("days")) text += fmt::format(", {:.1f} days", time["days"].get<double>());
  return text + "\n";
}

std::vector<Json> search_plans(const PlanRequest& request, const Hardware& hardware,
                               int64_t memory_bytes, double tokens) {
  std::vector<Json> reports;
  const int64_t sequences = request.B * request.accumulation;
  PlanRequest r = request;
  for (r.B = 1; r.B <= sequences; ++r.B) {
    if (sequences % r.B != 0) continue;
    r.set_accumulation(sequences / r.B);
    for (const bool reshard : {true, false})
      for (const auto mode : {ActivationCheckpoint::none, ActivationCheckpoint::selective,
                              ActivationCheckpoint::full}) {
        r.fsdp.reshard_after_forward = reshard;
        r.fsdp.activation_checkpoint = mode;
        Json report = plan_report(r, hardware, tokens);
        if (report["memory_bytes"]["total"].get<int64_t>() <= memory_bytes)
          reports.push_back(std::move(report));
      }
  }
  std::stable_sort(reports.begin(), reports.end(), [](const Json& a, const Json& b) {
    return a["seconds"]["step"].get<double>() < b["seconds"]["step"].get<double>();
  });
  return reports;
}

std::string search_text(const std::vector<Json>& reports) {
  constexpr size_t kShown = 10;
  std::string text =
      fmt::format("{:>5} {:>5} {:<10} {:<8} {:>12} {:>12} {:>12} {:>7}\n", "batch", "accum",
                  "checkpoint", "reshard", "memory", "step", "tokens/s", "MFU");
  for (size_t i = 0; i < std::min(kShown, reports.size()); ++i) {
    const Json &s = reports[i]["setting"], &time = reports[i]["seconds"];
    text += fmt::format(
        "{:>5} {:>5} {:<10} {:<8} {:>12} {:>12} {:>12.0f} {:>7}\n", s["batch"].get<int64_t>(),
        s["accumulation"].get<int64_t>(), s["activation_checkpoint"].get<std::string>(),
        s["reshard_after_forward"].get<bool>(), bytes_text(reports[i]["memory_bytes"]["total"]),
        milliseconds(time["step"]), time["tokens_per_s"].get<double>(),
        time.contains("mfu") ? fmt::format("{:.1f} %", 100 * time["mfu"].get<double>()) : "");
  }
  if (reports.size() > kShown)
    text += fmt::format("and {} slower ones that fit\n", reports.size() - kShown);
  return text;
}

}  // namespace qshard
