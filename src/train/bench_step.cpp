#include <algorithm>
#include <map>

#include "backends.h"
#include "comm/traced_collectives.h"
#include "device/traced_ops.h"
#include "train/bench.h"
#include "train/engine.h"
#include "train/stopwatch.h"

namespace qshard {
namespace {

// Tokens that differ between ranks and steps; what they say does not change what a step costs.
class SomeTokens {
 public:
  SomeTokens(Device& host, int64_t n, int rank, int64_t vocab)
      : ids_(host, DType::i32, {n}, Segment::workspace, "ids"),
        labels_(host, DType::i32, {n}, Segment::workspace, "labels") {
    for (int64_t i = 0; i < n; ++i) {
      ids_->as<int32_t>()[i] = static_cast<int32_t>((i + 1000003 * rank) * 2654435761 % vocab);
      labels_->as<int32_t>()[i] = static_cast<int32_t>((i + 7) * 2654435761 % vocab);
    }
  }
  std::vector<TokenBatch> batch() const { return {{ids_->as<int32_t>(), labels_->as<int32_t>()}}; }

 private:
  Buffer ids_, labels_;
};

FsdpOptions fsdp_of(const BenchOptions& o) {
  FsdpOptions fsdp;
  fsdp.param_dtype = parse_dtype(o.param_dtype);
  fsdp.reduce_dtype = parse_dtype(o.reduce_dtype);
  return fsdp;
}

constexpr double kRate = 1e-5;  // of learning: so small that random tokens do no harm

std::unique_ptr<Engine> make_engine(const BenchOptions& o, World& world, Backend& backend,
                                    const WrapTransport& wrap = nullptr) {
  const FsdpOptions fsdp = fsdp_of(o);
  auto engine = std::make_unique<Engine>(bench_model(o), fsdp, AdamWOptions(),
                                         make_sharding(o.transport, fsdp, world, backend, wrap),
                                         o.batch, o.seq, backend);
  engine->model().init_parameters(1);
  return engine;
}

std::vector<double> times_of_steps(const BenchOptions& o, bool graphs, World& world,
                                   Backend& backend) {
  auto engine = make_engine(o, world, backend);
  if (graphs) engine->use_graphs();
  const SomeTokens tokens(backend.device->host(), o.batch * o.seq, world.rank(),
                          engine->model().config().vocab_size);
  Stopwatch watch(world, *backend.device, o.warm_up, o.repeats);
  return watch.time([&] { engine->step(tokens.batch(), kRate); });
}

// What one kind of call took in each step of one rank.
struct Kind {
  std::vector<double> seconds;              // by step
  int64_t flops = 0, bytes = 0, calls = 0;  // of the last step
};
using Kinds = std::map<std::pair<std::string, std::string>, Kind>;  // by phase and call

void add_step(const std::vector<Span>& spans, size_t from, int64_t step, int64_t steps,
              Kinds& kinds) {
  for (auto& [name, kind] : kinds) kind.flops = kind.bytes = kind.calls = 0;
  for (size_t i = from; i < spans.size(); ++i) {
    const Span& span = spans[i];
    const bool moves = span.lane != Lane::compute;
    Kind& kind = kinds[{moves ? "transport" : span.phase, span.name}];
    kind.seconds.resize(static_cast<size_t>(steps));
    kind.seconds[step] += static_cast<double>(span.end_ns - span.begin_ns) * 1e-9;
    kind.flops += span.flops;
    kind.bytes += moves ? span.copied_bytes : span.bytes;
    ++kind.calls;
  }
}

// The kinds of this rank's calls in steps after the warm-up.
Kinds trace_steps(const BenchOptions& o, World& world, Backend& backend,
                  std::vector<double>& steps) {
  Trace trace;
  trace.record(false);
  const TracedBackend traced(backend, trace);
  auto engine = make_engine(o, world, backend,
                            [&](std::unique_ptr<Collectives> transport, const World& ranks) {
                              return make_traced_collectives(std::move(transport), ranks, trace);
                            });
  const SomeTokens tokens(backend.device->host(), o.batch * o.seq, world.rank(),
                          engine->model().config().vocab_size);
  Stopwatch once(world, *backend.device, 0, 1);
  Kinds kinds;
  for (int64_t i = 0; i < o.warm_up + o.repeats; ++i) {
    const size_t from = trace.spans().size();
    trace.record(i >= o.warm_up);
    steps.push_back(once.time([&] { engine->step(tokens.batch(), kRate); })[0]);
    if (i >= o.warm_up) add_step(trace.spans(), from, i - o.warm_up, o.repeats, kinds);
  }
  return kinds;
}

// Of rank 0, whose work and waits those of the others resemble; the shares are of its own step.
Document breakdown(const Kinds& kinds, const Ceilings& ceilings, double step) {
  Document rows = Document::array();
  double known = 0;
  for (const auto& [name, kind] : kinds) {
    const Times times = times_of(kind.seconds, 0);
    known += times.median;
    const bool moves = name.first == "transport";
    const double least = std::max(static_cast<double>(kind.flops) / ceilings.flops_per_s,
                                  static_cast<double>(kind.bytes) / ceilings.bytes_per_s);
    rows.push_back({{"phase", name.first},
                    {"operator", name.second},
                    {"calls", kind.calls},
                    {"time_ms", times.median * 1e3},
                    {"lowest_ms", times.lowest * 1e3},
                    {"highest_ms", times.highest * 1e3},
                    {"share_of_step", times.median / step},
                    {"flop", kind.flops},
                    {"bytes", kind.bytes},
                    {"share_of_ceiling", moves ? Document() : Document(least / times.median)}});
  }
  std::stable_sort(rows.begin(), rows.end(), [](const Document& a, const Document& b) {
    return a["time_ms"].get<double>() > b["time_ms"].get<double>();
  });
  const double rest = step - known;
  rows.push_back({{"phase", "-"},
                  {"operator", "everything else"},
                  {"calls", nullptr},
                  {"time_ms", rest * 1e3},
                  {"lowest_ms", nullptr},
                  {"highest_ms", nullptr},
                  {"share_of_step", rest / step},
                  {"flop", nullptr},
                  {"bytes", nullptr},
                  {"share_of_ceiling", nullptr}});
  return rows;
}

Document milliseconds(std::vector<double> seconds, int64_t from, int64_t to) {
  Document list = Document::array();
  for (int64_t i = from; i < to; ++i) list.push_back(seconds[i] * 1e3);
  return list;
}

}  // namespace

Document bench_step(const BenchOptions& o, bool with_breakdown, bool graphs, World& world,
                    Backend& backend) {
  if (graphs)
    collectively(world, [&] { require_graphs(transport_name(o.transport, backend), false); });
  const std::vector<double> steps = times_of_steps(o, graphs, world, backend);
  const int64_t memory = backend.device->bytes_peak();
  const Times times = times_of(steps, o.warm_up);
  const int64_t tokens = o.batch * o.seq * world.size();
  const double flops = bench_model(o).train_flops_per_token(o.seq) * static_cast<double>(tokens);
  const Ceilings ceilings = measure_ceilings(o, world, backend);
  Document doc = {{"tokens_per_step", tokens},
                  {"step_ms", times.median * 1e3},
                  {"lowest_ms", times.lowest * 1e3},
                  {"highest_ms", times.highest * 1e3},
                  {"tokens_per_s", static_cast<double>(tokens) / times.median},
                  {"model_gflop_per_s_all_ranks", flops / times.median * 1e-9},
                  {"products_gflop_per_s_per_rank", ceilings.flops_per_s * 1e-9},
                  {"copy_gb_per_s_per_rank", ceilings.bytes_per_s * 1e-9},
                  {"share_of_products", flops / times.median / ceilings.flops_per_s / world.size()},
                  {"memory_peak_bytes", memory},
                  {"warm_up_steps_ms", milliseconds(steps, 0, o.warm_up)},
                  {"steps_ms", milliseconds(steps, o.warm_up, o.warm_up + o.repeats)}};
  if (graphs) doc["graphs"] = true;
  if (!with_breakdown) return doc;
  std::vector<double> traced;
  const Kinds kinds = trace_steps(o, world, backend, traced);
  const Times traced_step = times_of(traced, o.warm_up);
  doc["traced_step_ms"] = traced_step.median * 1e3;
  doc["rows"] = breakdown(kinds, ceilings, traced_step.median);
  return doc;
}

}  // namespace qshard
