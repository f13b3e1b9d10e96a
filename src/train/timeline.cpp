#include "train/timeline.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "tensor/tensor.h"

namespace qshard {
namespace {

bool is_product(const Span& span) { return span.name.starts_with("linear"); }
bool is_attention(const Span& span) { return span.name.starts_with("attention"); }

// Of its tensors, each once: what an operator has to read and write.
double tensor_bytes(const Span& span) {
  double bytes = 0;
  for (const TraceTensor& t : span.tensors) {
    double n = static_cast<double>(dtype_size(parse_dtype(t.dtype)));
    for (const int64_t dim : t.shape) n *= static_cast<double>(dim);
    bytes += n;
  }
  return bytes;
}

// Of the operands: the first tensor's, which both a product and attention read.
const std::string& operand_dtype(const Span& span) { return span.tensors.front().dtype; }

double positive(const nlohmann::json& json, const std::string& key, const std::string& where) {
  if (!json.contains(key) || !json.at(key).is_number() || json.at(key).get<double>() <= 0)
    fail("{}: {} is missing or not a number above 0", where, key);
  return json.at(key).get<double>();
}

Link read_link(const nlohmann::json& json, const std::string& key, const std::string& where) {
  if (!json.contains(key)) fail("{}: {} is missing", where, key);
  const nlohmann::json& link = json.at(key);
  return {positive(link, "gb_per_s", where + ": " + key) * 1e9,
          link.value("latency_us", 0.0) / 1e6};
}

// A ring over the transport's ranks: every one receives the others' rows. Between nodes the ranks
// of a node share their links, through which each node receives the other nodes' rows once.
double ring_seconds(const Span& span, const Hardware& h) {
  if (span.ranks <= 1) return 0;
  const double received = static_cast<double>(span.logical_bytes);
  const bool one_node = span.nodes == 1 || span.ranks > span.nodes;
  double seconds = one_node ? received / h.in_node.bytes_per_s : 0, latency = h.in_node.latency_s;
  if (span.nodes > 1) {
    const double total = received * span.ranks / (span.ranks - 1);  // of the whole unit
    const double per_link = total * (span.nodes - 1) / span.ranks;
    seconds = std::max(seconds, per_link / h.between_nodes.bytes_per_s);
    latency += h.between_nodes.latency_s * std::ceil(std::log2(span.nodes));
  }
  return seconds + latency;
}

}  // namespace

Hardware Hardware::from_json(const nlohmann::json& json, const std::string& where) {
  try {
    Hardware h;
    h.name = json.at("name");
    h.source = json.value("source", "");
    h.ranks_per_node = static_cast<int>(positive(json, "ranks_per_node", where));
    h.memory_bytes = static_cast<int64_t>(json.value("memory_gb", 0.0) * 1e9);
    for (const auto& [dtype, tflops] : json.at("peak_tflops").items())
      h.peak_flops[dtype] = tflops.get<double>() * 1e12;
    h.product_share = positive(json, "product_share", where);
    h.attention_share = positive(json, "attention_share", where);
    h.memory_share = positive(json, "memory_share", where);
    h.memory_bytes_per_s = positive(json, "memory_gb_per_s", where) * 1e9;
    h.in_node = read_link(json, "in_node", where);
    h.between_nodes = read_link(json, "between_nodes", where);
    if (json.contains("host_gb_per_s"))
      h.host_bytes_per_s = positive(json, "host_gb_per_s", where) * 1e9;
    h.overlaps = json.value("overlaps", true);
    h.other_s = json.value("other_ms", 0.0) / 1e3;
    const nlohmann::json measured = json.value("measured", nlohmann::json::object());
    for (const auto& [key, rate] : measured.items()) h.measured[key] = rate.get<double>();
    return h;
  } catch (const nlohmann::json::exception& error) {
    fail("{}: not a hardware profile: {}", where, error.what());
  }
}

std::string rate_key(const Span& span) {
  if (span.lane == Lane::gather) return "all-gather";
  if (span.lane == Lane::reduce) return "reduce-scatter";
  if (is_product(span) || is_attention(span)) return operand_dtype(span) + "/" + span.name;
  return span.name;
}

double rate_work(const Span& span) {
  if (span.lane != Lane::compute) return static_cast<double>(span.logical_bytes);
  if (is_product(span) || is_attention(span)) return static_cast<double>(span.flops);
  return tensor_bytes(span);
}

double operator_seconds(const Span& span, const Hardware& h) {
  const double work = rate_work(span);
  if (const auto known = h.measured.find(rate_key(span)); known != h.measured.end())
    return work / known->second;
  const double bytes_s = tensor_bytes(span) / (h.memory_bytes_per_s * h.memory_share);
  if (!is_product(span) && !is_attention(span)) return bytes_s;
  const std::string& dtype = operand_dtype(span);
  const auto peak = h.peak_flops.find(dtype);
  if (peak == h.peak_flops.end()) fail("{} has no peak_tflops of {}", h.name, dtype);
  return work / (peak->second * (is_product(span) ? h.product_share : h.attention_share));
}

// What the update of offloaded states takes longer than its operators.
static double offload_wait(const Plan& plan, const Hardware& h) {
  if (plan.host_total() == 0) return 0;
  if (h.host_bytes_per_s == 0)
    fail("{} has no host_gb_per_s, the rate at which offloaded states come to a GPU", h.name);
  double update = 0;
  for (const Span& span : plan.spans)
    if (span.phase == "optimizer") update += operator_seconds(span, h);
  return std::max(0.0, static_cast<double>(plan.host_total()) / h.host_bytes_per_s - update);
}

StepTime simulate(const Plan& plan, const Hardware& h) {
  StepTime time;
  double now = 0, gather_free = 0, reduce_free = 0;
  std::map<std::string, double> gathered, reduced;  // unit → when its last one has ended
  auto move_bytes = [&](const Span& span) {
    const auto known = h.measured.find(rate_key(span));
    return known == h.measured.end() ? ring_seconds(span, h) : rate_work(span) / known->second;
  };
  auto start = [&](const Span& span, double& lane_free, double& busy, double& ended) {
    const double seconds = move_bytes(span);
    ended = lane_free = std::max(now, lane_free) + seconds;
    busy += seconds;
    if (!h.overlaps) now = ended;
  };
  auto wait = [&](double until, double& exposed) {
    exposed += std::max(0.0, until - now);
    now = std::max(now, until);
  };
  for (const Span& span : plan.spans) {
    if (span.lane == Lane::compute) {
      const double seconds = operator_seconds(span, h);
      now += seconds;
      time.compute += seconds;
      time.by_operator[span.name] += seconds;
    } else if (span.name == "all-gather start") {
      start(span, gather_free, time.gathers, gathered[span.unit]);
    } else if (span.name == "all-gather wait") {
      wait(gathered[span.unit], time.gather_wait);
    } else if (span.name == "reduce-scatter start") {
      start(span, reduce_free, time.reductions, reduced[span.unit]);
    } else if (span.name == "reduce-scatter wait") {
      wait(reduced[span.unit], time.reduce_wait);
    }
  }
  if (!h.overlaps) time.gather_wait = time.gathers, time.reduce_wait = time.reductions;
  time.offload_wait = offload_wait(plan, h);
  time.other = h.other_s;
  time.step = now + time.offload_wait + h.other_s;
  return time;
}

}  // namespace qshard
