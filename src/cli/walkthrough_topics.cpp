#include "cli/walkthrough_topics.h"

#include <algorithm>
#include <cmath>

#include "backends.h"
#include "train/metrics.h"
#include "train/step_recorder.h"

namespace qshard {
namespace {

std::string numbers(const std::vector<double>& values) {
  std::string text;
  for (double v : values) text += fmt::format("{:>6g}", v);
  return text;
}

// --- ring

// values[rank][chunk]: one number stands for a chunk.
using Chunks = std::vector<std::vector<double>>;

// Round s of a ring reduce-scatter: rank r passes chunk r−s−1 on to rank r+1, which adds it.
void reduce_round(Chunks& values, int s) {
  const int N = static_cast<int>(values.size());
  const Chunks before = values;
  for (int r = 0; r < N; ++r) {
    const int chunk = ((r - s - 1) % N + N) % N;
    values[(r + 1) % N][chunk] += before[r][chunk];
  }
}

// Round s of a ring all-gather: rank r passes chunk r−s on, which replaces what the next one has.
void gather_round(Chunks& values, int s) {
  const int N = static_cast<int>(values.size());
  const Chunks before = values;
  for (int r = 0; r < N; ++r) {
    const int chunk = ((r - s) % N + N) % N;
    values[(r + 1) % N][chunk] = before[r][chunk];
  }
}

void show(Page& page, const std::string& title, const Chunks& values) {
  std::vector<std::string> lines;
  for (size_t r = 0; r < values.size(); ++r)
    lines.push_back(fmt::format("rank {} {}", r, numbers(values[r])));
  page.entry(title, "", lines);
}

double first_value(int rank, int chunk) { return (rank + 1) * 10 + chunk; }

// The same numbers through the real transport: sums of the own chunk, then all chunks; and what it
// counted as a ring's bytes for the two.
struct Moved {
  double sum = 0;
  std::vector<double> all;
  Traffic traffic;
};
Moved through_transport(const WalkthroughOptions& o, World& world, Backend& backend) {
  const int N = world.size(), own = world.rank();
  constexpr int64_t kChunk = 32;  // elements, all alike
  auto transport = make_transport(o.transport, world, backend, 1);
  const int unit = transport->add_unit(
      {"ring", {{0, kChunk}}, N * kChunk, DType::f32, DType::f32, false, false});
  transport->finish_setup();
  std::vector<float> host(N * kChunk);
  for (int c = 0; c < N; ++c)
    std::fill_n(&host[c * kChunk], kChunk, static_cast<float>(first_value(own, c)));
  backend.device->copy(transport->grad_buffer(unit), host.data(), host.size() * sizeof(float));
  const Buffer sum(*backend.device, DType::f32, {kChunk}, Segment::gradients, "own chunk");
  transport->reduce_start(unit);
  transport->reduce_wait(unit, std::vector<Tensor>{sum}, 1, false);
  const Tensor shard = transport->shard(unit, 0);
  backend.device->copy(shard.data, sum->data, sum->bytes());
  transport->publish(unit);
  transport->gather_start(unit);
  const Tensor full(transport->gather_wait(unit), DType::f32, {N * kChunk});
  Moved moved;
  moved.sum = host_values(*backend.device, sum)[0];
  const std::vector<float> values = host_values(*backend.device, full);
  for (int c = 0; c < N; ++c) moved.all.push_back(values[c * kChunk]);
  transport->reshard(unit);
  moved.traffic = transport->traffic();
  world.barrier();  // nobody's window goes while it is read
  return moved;
}

bool tell_ring(Page& page, const WalkthroughOptions& o, World& world, Backend& backend) {
  const int N = world.size();
  Chunks values(N);
  for (int r = 0; r < N; ++r)
    for (int c = 0; c < N; ++c) values[r].push_back(first_value(r, c));
  page.title(fmt::format("A ring of {} ranks: reduce-scatter, then all-gather", N));
  page.line(
      fmt::format("Every rank has {} chunks, one number each here. In a round every rank "
                  "sends one chunk to the next rank, so after N − 1 rounds it has sent "
                  "(N − 1)/N of the whole, and rank r owns the sum of chunk r.",
                  N));
  show(page, "at first", values);
  for (int s = 0; s + 1 < N; ++s) {
    reduce_round(values, s);
    show(page, fmt::format("reduce-scatter, round {} of {}", s + 1, N - 1), values);
  }
  Chunks sums = values;
  for (int s = 0; s + 1 < N; ++s) {
    gather_round(sums, s);
    show(page, fmt::format("all-gather, round {} of {}", s + 1, N - 1), sums);
  }
  const Moved moved = through_transport(o, world, backend);
  const int own = world.rank();
  const bool same_here = moved.sum == values[own][own] && moved.all == sums[own];
  int64_t same = same_here;
  world.all_reduce_sum(&same, 1);
  const int64_t ring = (N - 1) * 32 * 4;
  const Traffic& t = moved.traffic;
  page.section("The same through the real transport, chunks of 32 numbers");
  page.check(same == N, "sums and gathered chunks are those of the ring", "on every rank",
             fmt::format("on {} of {} ranks", same, N));
  const bool bytes = t.reduce_logical_bytes == ring && t.gather_logical_bytes == ring;
  page.check(bytes, "bytes that a ring sends per rank, as the transport counts them",
             fmt::format("{} + {}", ring, ring),
             fmt::format("{} + {}; really copied {} + {}", t.reduce_logical_bytes,
                         t.gather_logical_bytes, t.reduce_copied_bytes, t.gather_copied_bytes));
  return same == N && bytes;
}

// --- rope

constexpr int64_t kHeadDim = 8, kPositions = 6;

// A head of ones at every position, through the operator of steps 3 and 4: the norm leaves it.
std::vector<float> rotated_ones(Backend& backend, double theta) {
  const AttentionShape s{1, kPositions, 1, 1, kHeadDim};
  auto buffer = [&](Shape shape, const char* name) {
    return Buffer(*backend.device, DType::f32, shape, Segment::workspace, name);
  };
  const Buffer in = buffer({kPositions, 2 * kHeadDim}, "in"), weight = buffer({kHeadDim}, "weight"),
               rope = buffer({kPositions, kHeadDim}, "rope"),
               out = buffer({kPositions, 2 * kHeadDim}, "out"),
               rstd = buffer({kPositions, 2}, "rstd");
  std::vector<float> table(kPositions * kHeadDim);
  for (int64_t t = 0; t < kPositions; ++t)
    for (int64_t i = 0; i < kHeadDim / 2; ++i) {
      const double angle = static_cast<double>(t) * std::pow(theta, -2.0 * i / kHeadDim);
      table[t * kHeadDim + i] = static_cast<float>(std::cos(angle));
      table[t * kHeadDim + kHeadDim / 2 + i] = static_cast<float>(std::sin(angle));
    }
  backend.device->copy(rope->data, table.data(), rope->bytes());
  backend.ops->fill(in, 1);
  backend.ops->fill(weight, 1);
  backend.ops->qk_norm_rope(in, weight, weight, rope, 0, s, out, rstd);
  return host_values(*backend.device, out.tensor().col_range(0, kHeadDim));
}

bool tell_rope(Page& page, const WalkthroughOptions& o, Backend& backend) {
  const double theta = o.config.rope_theta;
  page.title(fmt::format("RoPE: {} numbers of a head, theta {:g}", kHeadDim, theta));
  page.line(
      "Number i and number i + head_dim/2 are a pair: a point that position t turns by "
      "t · theta^(−2i/head_dim). Early pairs turn fast, late ones hardly.");
  std::vector<Row> angles;
  for (int64_t i = 0; i < kHeadDim / 2; ++i) {
    const double step = std::pow(theta, -2.0 * static_cast<double>(i) / kHeadDim);
    angles.push_back({fmt::format("{} and {}", i, i + kHeadDim / 2), fmt::format("{:.3g}", step),
                      fmt::format("{:.4g}", 2 * M_PI / step)});
  }
  page.table({"pair", "radians a position", "positions a turn"}, angles);
  const std::vector<float> heads = rotated_ones(backend, theta);
  std::vector<Row> rows;
  for (int64_t t = 0; t < kPositions; ++t) {
    Row row = {fmt::format("{}", t)};
    for (int64_t d = 0; d < kHeadDim; ++d)
      row.push_back(fmt::format("{:.3f}", heads[t * kHeadDim + d]));
    rows.push_back(row);
  }
  page.section("A head of ones at positions 0, 1, …, from the operator of steps 3 and 4");
  page.table({"position", "0", "1", "2", "3", "4", "5", "6", "7"}, rows);
  page.section("Products q·k of a query (rows) and a key (columns)");
  std::vector<Row> products;
  double worst = 0;
  for (int64_t q = 0; q < kPositions; ++q) {
    Row row = {fmt::format("{}", q)};
    for (int64_t k = 0; k < kPositions; ++k) {
      double product = 0, by_distance = 0;
      for (int64_t d = 0; d < kHeadDim; ++d)
        product += double{heads[q * kHeadDim + d]} * heads[k * kHeadDim + d];
      for (int64_t i = 0; i < kHeadDim / 2; ++i)
        by_distance += 2 * std::cos(static_cast<double>(q - k) *
                                    std::pow(theta, -2.0 * static_cast<double>(i) / kHeadDim));
      worst = std::max(worst, std::abs(product - by_distance));
      row.push_back(fmt::format("{:.3f}", product));
    }
    products.push_back(row);
  }
  page.table({"query", "key 0", "1", "2", "3", "4", "5"}, products);
  const bool ok = worst < 1e-5;
  page.check(ok, "a product depends on the distance of the positions alone",
             "2 Σ cos(distance · angle) to 1e-5", fmt::format("largest difference {:.1e}", worst));
  return ok;
}

// --- mesh

// What rank 0 holds between steps, and what its transports counted in one.
Row strategy(const std::string& name, const std::string& mesh, const Document& step) {
  const Document &held = step["initial_state"][0]["allocated"],
                 &moved = step["communication"]["total"];
  auto bytes = [](const Document& n) { return human_bytes(n.get<double>()); };
  return {name,
          mesh,
          human_bytes(held["shards"].get<double>() + held["moments"].get<double>()),
          bytes(moved["gather_logical_bytes"][0]),
          bytes(moved["reduce_logical_bytes"][0]),
          bytes(moved["all_reduce_logical_bytes"][0])};
}

bool tell_mesh(Page& page, WalkthroughOptions o, World& world, Backend& backend) {
  const int N = world.size();
  page.title(
      fmt::format("Ways to share {} parameters between {} ranks", o.config.num_parameters(), N));
  page.line(
      "full: every rank has 1/N of everything, gathers what it needs, reduce-scatters "
      "gradients. hybrid: replicas shard inside, and all-reduce the gradients of their shards "
      "with the other replicas. none: every rank has everything, and all-reduces gradients.");
  std::vector<Row> rows;
  size_t checks = 0;
  bool ok = true;
  o.fsdp.reshard_ranks = 0;
  for (int S = N; S >= 1; --S) {
    if (N % S) continue;
    o.fsdp.mesh = fmt::format("{}x{}", N / S, S);
    const WalkthroughReport report = run_walkthrough(o, world, backend);
    ok = ok && report.ok;
    if (world.rank() != 0) continue;
    checks += report.document["checks"].size();
    rows.push_back(strategy(S == N   ? "full"
                            : S == 1 ? "none"
                                     : "hybrid",
                            o.fsdp.mesh, report.document));
  }
  page.table({"strategy", "mesh", "a rank holds", "gathers", "reductions", "all-reduces"}, rows);
  page.line(
      fmt::format("Measured in a step of each. Mesh: replicas x ranks of one. Held: parameters as "
                  "{}, f32 master weights and two moments, of all units, without what is gathered; "
                  "with replicas a buffer for their sums as well. "
                  "Gathers and the rest: bytes that a ring sends a step and rank.",
                  dtype_name(o.fsdp.param_dtype)));
  page.check(ok, "all checks of these steps", fmt::format("{} met", checks),
             ok ? fmt::format("{} met", checks) : "not all: see qshard walkthrough --mesh RxS");
  return ok;
}

// --- two ranks, two layers

bool tell_two_by_two(Page& page, WalkthroughOptions o, World& world, Backend& backend) {
  o.config.num_hidden_layers = 2;
  o.layer = 0;
  const WalkthroughReport report = run_walkthrough(o, world, backend);
  if (world.rank() != 0) return report.ok;
  page.title("Two ranks, two layers: one step as it happened");
  page.line(
      "Rank by rank in the order of time: what was moved between ranks, and between the "
      "moves what was computed. \"holds\": parameters it can read and full gradients.");
  for (const Document& rank : report.document["timeline"]) {
    page.section(fmt::format("rank {}", rank["rank"].get<int>()));
    std::vector<Row> rows;
    std::string group;
    const int64_t begin = rank["spans"][0]["begin_ns"];
    for (const Document& s : rank["spans"]) {
      const bool moves = s["lane"] != "compute";
      const std::string what =
          moves ? s["name"].get<std::string>() : s["phase"].get<std::string>() + ", computed";
      const std::string unit = s["unit"];
      const std::string now = what + unit;
      const std::string held = human_bytes(static_cast<double>(s["held_after"].get<int64_t>()));
      if (!moves && now == group) {  // the same pass goes on
        rows.back()[4] = held;
        continue;
      }
      group = moves ? "" : now;
      const auto sent = s["logical_bytes"].get<int64_t>();
      rows.push_back({fmt::format("{:.3f} ms",
                                  static_cast<double>(s["begin_ns"].get<int64_t>() - begin) / 1e6),
                      unit, what, sent ? human_bytes(static_cast<double>(sent)) : "", held});
    }
    page.table({"at", "unit", "what", "ring bytes", "holds"}, rows);
  }
  const auto checks = report.document["checks"].size();
  page.check(report.ok, "all checks of the walkthrough", fmt::format("{} met", checks),
             report.ok ? fmt::format("{} met", checks) : "not all: see qshard walkthrough");
  return report.ok;
}

}  // namespace

const std::vector<std::string>& topic_names() {
  static const std::vector<std::string> names = {"ring", "rope", "mesh", "two-by-two"};
  return names;
}

TopicText tell_topic(const std::string& name, const WalkthroughOptions& options,
                     const PrintStyle& style, World& world, Backend& backend) {
  if (name == "two-by-two" && world.size() != 2)
    throw AgreedError(fmt::format("--topic two-by-two is told on 2 ranks, this run has {}: use "
                                  "mpirun -n 2",
                                  world.size()),
                      kExitUsage);
  Page page(style);
  TopicText told;
  if (name == "ring") told.ok = tell_ring(page, options, world, backend);
  if (name == "rope") told.ok = tell_rope(page, options, backend);
  if (name == "mesh") told.ok = tell_mesh(page, options, world, backend);
  if (name == "two-by-two") told.ok = tell_two_by_two(page, options, world, backend);
  told.text = page.take();
  return told;
}

}  // namespace qshard
