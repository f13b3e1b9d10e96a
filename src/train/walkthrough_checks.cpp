#include "train/walkthrough_checks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends.h"
#include "io/safetensors.h"
#include "model/qwen3_params.h"
#include "train/export.h"
#include "train/metrics.h"

namespace qshard {
namespace {

// --- sizes

// Rows r·ceil(D/N) … of D on N ranks, worked out here and not by the layout that is checked.
int64_t expected_rows(int64_t rows, int64_t ranks, int64_t rank) {
  const int64_t chunk = (rows + ranks - 1) / ranks;
  return std::clamp<int64_t>(rows - rank * chunk, 0, chunk);
}

int64_t numel(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

// Own rows and the transport's padded rows of every parameter, on every rank.
WalkthroughCheck check_shards(const WalkthroughOptions& o, const std::vector<RankRecord>& ranks) {
  const auto N = static_cast<int64_t>(ranks.size());
  const auto size = static_cast<int64_t>(dtype_size(o.fsdp.param_dtype));
  WalkthroughCheck check{"shard sizes, read from the buffers",
                         "ceil(rows / ranks) rows a rank; together every element once", "", true};
  int64_t buffers = 0;
  for (size_t u = 0; u < ranks[0].units.size(); ++u)
    for (size_t p = 0; p < ranks[0].units[u].params.size(); ++p) {
      int64_t all = 0;
      for (const RankRecord& rank : ranks) {
        const ParamRecord& own = rank.units[u].params[p];
        const int64_t row = numel(own.shape) / own.shape[0];
        const int64_t elements = expected_rows(own.shape[0], N, rank.rank) * row;
        const int64_t padded = (own.shape[0] + N - 1) / N * row;
        all += own.elements;
        ++buffers;
        const bool right = own.elements == elements && own.shard_elements == padded &&
                           own.shard_bytes == padded * size;
        if (!right && check.ok)
          check.found =
              fmt::format("{} on rank {}: {} elements of {} in a buffer of {} of {}", own.name,
                          rank.rank, own.elements, elements, own.shard_elements, padded);
        check.ok = check.ok && right;
      }
      const ParamRecord& any = ranks[0].units[u].params[p];
      if (all != numel(any.shape) && check.ok)
        check.found =
            fmt::format("{}: {} elements on all ranks of {}", any.name, all, numel(any.shape));
      check.ok = check.ok && all == numel(any.shape);
    }
  if (check.ok) check.found = fmt::format("{} buffers", buffers);
  return check;
}

// --- bytes

int64_t buffer_bytes(const UnitRecord& unit) {
  int64_t bytes = 0;
  for (const ParamRecord& p : unit.params) bytes += p.shard_bytes;
  return bytes;
}

int64_t gradient_bytes(const UnitRecord& unit, DType reduce_dtype) {
  int64_t elements = 0;
  for (const ParamRecord& p : unit.params) elements += p.shard_elements;
  return elements * static_cast<int64_t>(dtype_size(reduce_dtype));
}

// Every gather and reduction against what a ring sends for buffers of the size found.
WalkthroughCheck check_logical_bytes(const WalkthroughOptions& o,
                                     const std::vector<RankRecord>& ranks) {
  const auto others = static_cast<int64_t>(ranks.size()) - 1;
  WalkthroughCheck check{"bytes of every gather and reduction, counted by the transport",
                         "(ranks − 1) × the bytes of a rank's buffer", "", true};
  int64_t calls = 0, total = 0;
  for (const RankRecord& rank : ranks)
    for (const Span& span : rank.spans) {
      if (!is_transport(span)) continue;
      const auto unit = std::find_if(rank.units.begin(), rank.units.end(),
                                     [&](const UnitRecord& u) { return u.name == span.unit; });
      int64_t expected = 0;
      if (span.name == "all-gather start") expected = others * buffer_bytes(*unit);
      if (span.name == "reduce-scatter start")
        expected = others * gradient_bytes(*unit, o.fsdp.reduce_dtype);
      calls += expected > 0;
      total += span.logical_bytes;
      if (span.logical_bytes != expected && check.ok)
        check.found = fmt::format("{} of {} on rank {}: {} bytes, expected {}", span.name,
                                  span.unit, rank.rank, span.logical_bytes, expected);
      check.ok = check.ok && span.logical_bytes == expected;
    }
  if (check.ok) check.found = fmt::format("{} calls on all ranks, {} bytes", calls, total);
  return check;
}

// The spans of a rank together are what its transport has counted over the step.
WalkthroughCheck check_sums(const std::vector<RankRecord>& ranks) {
  WalkthroughCheck check{"the steps add up", "spans together = the transport's totals", "", true};
  for (const RankRecord& rank : ranks) {
    int64_t logical = 0, copied = 0;
    for (const Span& span : rank.spans)
      if (is_transport(span)) logical += span.logical_bytes, copied += span.copied_bytes;
    const Traffic& t = rank.traffic;
    const int64_t counted = t.gather_logical_bytes + t.reduce_logical_bytes;
    const int64_t really = t.gather_copied_bytes + t.reduce_copied_bytes;
    check.ok = check.ok && logical == counted && copied == really;
    if (rank.rank == 0 || !check.ok)
      check.found = fmt::format("rank {}: {} bytes logical of {}, {} copied of {}", rank.rank,
                                logical, counted, copied, really);
    if (!check.ok) break;
  }
  return check;
}

// Copied bytes follow from how the transport works; on several nodes it depends on the nodes.
WalkthroughCheck check_copied_bytes(const WalkthroughOptions& o,
                                    const std::vector<RankRecord>& ranks) {
  const bool in_place = o.transport == "shm";
  const bool one_node = std::all_of(ranks.begin(), ranks.end(),
                                    [&](const RankRecord& r) { return r.host == ranks[0].host; });
  WalkthroughCheck check{"bytes really copied", "", "", true};
  if (in_place && !one_node) {
    check.expected = "only the rows of other nodes move, once a step";
    for (const RankRecord& rank : ranks)
      check.ok = check.ok && rank.traffic.gather_copied_bytes <= rank.traffic.gather_logical_bytes;
  } else {
    check.expected = in_place ? "gathers 0: rows are read in place; reductions as logical"
                              : "as logical: buffers are private";
    for (const RankRecord& rank : ranks) {
      const Traffic& t = rank.traffic;
      check.ok = check.ok && t.reduce_copied_bytes == t.reduce_logical_bytes &&
                 t.gather_copied_bytes == (in_place ? 0 : t.gather_logical_bytes);
    }
  }
  const Traffic& t = ranks[0].traffic;
  check.found = fmt::format("rank 0: gathers {}, reductions {} bytes", t.gather_copied_bytes,
                            t.reduce_copied_bytes);
  return check;
}

// --- a layer is local

bool computes(const Span& s, const std::string& unit, const char* phase, int64_t micro_batch) {
  return !is_transport(s) && s.lane == Lane::compute && s.unit == unit && s.phase == phase &&
         s.micro_batch == micro_batch;
}

// Calls and bytes of the transport between the first and the last operator of each pass of a layer.
WalkthroughCheck check_local(const WalkthroughOptions& o, const std::vector<RankRecord>& ranks,
                             const char* phase, const char* name) {
  int64_t calls = 0, bytes = 0, passes = 0;
  for (const RankRecord& rank : ranks)
    for (int64_t l = 0; l < o.config.num_hidden_layers; ++l)
      for (int64_t m = 0; m < o.accumulation; ++m) {
        int64_t begin = INT64_MAX, end = 0;
        for (const Span& s : rank.spans)
          if (computes(s, fmt::format("layers.{}", l), phase, m)) {
            begin = std::min(begin, s.begin_ns);
            end = std::max(end, s.end_ns);
            bytes += s.logical_bytes + s.copied_bytes;
          }
        passes += end > begin;
        for (const Span& s : rank.spans)
          if (is_transport(s) && s.end_ns > begin && s.begin_ns < end) {
            ++calls;
            bytes += s.logical_bytes + s.copied_bytes;
          }
      }
  const auto expected =
      static_cast<int64_t>(ranks.size()) * o.config.num_hidden_layers * o.accumulation;
  return {name, fmt::format("0 calls, 0 bytes in {} passes", expected),
          fmt::format("{} calls, {} bytes in {} passes", calls, bytes, passes),
          calls == 0 && bytes == 0 && passes == expected};
}

// --- memory

WalkthroughCheck check_memory(const std::vector<RankRecord>& ranks) {
  const auto N = static_cast<int64_t>(ranks.size());
  WalkthroughCheck check{"memory of a unit's parameters after every reshard",
                         "the bytes of the rank's own buffer again", "", true};
  int64_t reshards = 0;
  for (const RankRecord& rank : ranks)
    for (const Span& s : rank.spans) {
      if (s.name != "reshard" && s.name != "all-gather start") continue;
      const auto unit = std::find_if(rank.units.begin(), rank.units.end(),
                                     [&](const UnitRecord& u) { return u.name == s.unit; });
      const int64_t own = buffer_bytes(*unit);
      const bool back = s.name == "reshard";
      reshards += back;
      const bool right = back ? s.unit_before == N * own && s.unit_after == own
                              : s.unit_before == own && s.unit_after == N * own;
      if (!right && check.ok)
        check.found = fmt::format("{} of {} on rank {}: {} → {} bytes, own buffer {}", s.name,
                                  s.unit, rank.rank, s.unit_before, s.unit_after, own);
      check.ok = check.ok && right;
    }
  for (const RankRecord& rank : ranks) {
    const int64_t before = rank.spans.front().held_before, after = rank.spans.back().held_after;
    if (before != after && check.ok)
      check.found = fmt::format("rank {} held {} bytes before the step and {} after it", rank.rank,
                                before, after);
    check.ok = check.ok && before == after;
  }
  if (check.ok)
    check.found = fmt::format("{} reshards; a rank holds {} bytes before and after the step",
                              reshards, ranks[0].spans.back().held_after);
  return check;
}

// --- arithmetic

WalkthroughCheck check_flops(const WalkthroughOptions& o, const std::vector<RankRecord>& ranks) {
  int64_t counted = 0;
  for (const RankRecord& rank : ranks)
    for (const Span& s : rank.spans)
      if (s.name.starts_with("linear") || s.name.starts_with("attention")) counted += s.flops;
  const double tokens =
      static_cast<double>(ranks.size()) * static_cast<double>(o.accumulation * o.batch * o.seq);
  const auto expected =
      static_cast<int64_t>(std::llround(o.config.train_flops_per_token(o.seq) * tokens));
  return {"FLOPs of products and attention, from the operators' shapes",
          fmt::format("{}: the model's per token × tokens", expected), fmt::format("{}", counted),
          counted == expected};
}

double relative_l2(double difference, double norm) {
  if (!std::isfinite(difference)) return INFINITY;
  return difference == 0 ? 0 : std::sqrt(difference) / (std::sqrt(norm) + 1e-30);
}

}  // namespace

std::vector<WalkthroughCheck> check_records(const WalkthroughOptions& o,
                                            const std::vector<RankRecord>& ranks) {
  return {check_shards(o, ranks),
          check_logical_bytes(o, ranks),
          check_copied_bytes(o, ranks),
          check_sums(ranks),
          check_local(o, ranks, "forward", "no communication in forward steps 1–10"),
          check_local(o, ranks, "backward", "no communication while a layer's backward computes"),
          check_memory(ranks),
          check_flops(o, ranks)};
}

namespace {

// A unit in the last place, relative; of 16-bit values.
double unit_of(DType dtype) { return dtype == DType::fp16 ? 0x1p-10 : 0x1p-7; }

}  // namespace

// Rounding: what each rank reduces, to reduce_dtype; then f32 sums of ranks and micro-batches. fp16
// has no smaller unit than 2^-24, of gradients times the scale of the loss.
WalkthroughCheck check_mean_gradient(const WalkthroughOptions& o, const World& world,
                                     Device& device, const Unit& unit,
                                     const StepRecorder& recorder) {
  constexpr int64_t kPart = 1 << 16;
  const double terms = world.size() + static_cast<double>(o.accumulation);
  const DType moved = o.fsdp.reduce_dtype;
  const double relative = terms * 0x1p-22 + (moved == DType::f32 ? 0 : unit_of(moved) / 2);
  const double smallest =
      moved == DType::fp16 ? static_cast<double>(o.accumulation) * 0x1p-24 / recorder.loss_scale()
                           : 1e-37;
  double worst = 0;  // share of the bound
  double difference = 0, norm = 0;
  for (int i = 0; i < unit.size(); ++i) {
    const std::vector<float>& local = recorder.gradient(i);
    const std::vector<float> own = host_values(device, unit.grad_shard(i));
    const ParamLayout& layout = unit.layout()[i];
    const int64_t first = layout.rows_of(world.rank()).begin * layout.row_numel;
    for (int64_t at = 0; at < static_cast<int64_t>(local.size()); at += kPart) {
      const int64_t n = std::min(kPart, static_cast<int64_t>(local.size()) - at);
      std::vector<double> sums(2 * n);
      for (int64_t j = 0; j < n; ++j) {
        sums[j] = local[at + j];
        sums[n + j] = recorder.magnitude(i)[at + j];
      }
      world.all_reduce_sum(sums.data(), static_cast<int>(2 * n));
      for (int64_t j = 0; j < n; ++j) {
        const int64_t k = at + j - first;
        if (k < 0 || k >= static_cast<int64_t>(own.size())) continue;
        const double mean = sums[j] / world.size(), bound = sums[n + j] / world.size() * relative;
        const double error = std::abs(own[k] - mean);
        const double share = error == 0 ? 0 : error / (bound + smallest);
        worst = std::isfinite(share) ? std::max(worst, share) : INFINITY;
        difference += error * error;
        norm += mean * mean;
      }
    }
  }
  double sums[2] = {difference, norm};
  world.all_reduce_sum(sums, 2);
  world.all_reduce_max(&worst, 1);
  return {"mean gradient = average over ranks of the ranks' own gradients",
          fmt::format("to the rounding of {}", dtype_name(o.fsdp.reduce_dtype)),
          fmt::format("relative L2 difference {:.1e}, at most {:.2f} of the rounding bound",
                      relative_l2(sums[0], sums[1]), worst),
          worst <= 1 && sums[1] > 0};
}

void set_weights(const WalkthroughOptions& o, const World& world, Qwen3Model& model) {
  if (o.reference.empty()) return model.init_parameters(o.seed);
  std::unique_ptr<HfWeights> weights;
  collectively(world, [&] { weights = std::make_unique<HfWeights>(o.reference); });
  import_weights(world, model, *weights, [](const std::string&) {});
}

WalkthroughCheck check_single_process(const WalkthroughOptions& o, const World& world,
                                      Backend& backend, TokenBatch batch,
                                      const StepRecorder& recorder) {
  WalkthroughCheck check{"the layer's output = that of one process with all weights", "", "", true};
  const double limit = o.fsdp.param_dtype == DType::f32 ? 1e-6 : unit_of(o.fsdp.param_dtype) / 2;
  check.expected = fmt::format("relative L2 difference below {:.0e}, on rank 0's tokens", limit);
  collectively(world, [&] {
    if (world.rank() != 0) return;
    const std::unique_ptr<World> alone = World::alone();
    Trace trace;
    StepRecorder own(*backend.device);
    const TracedBackend traced(backend, trace, &own);
    WalkthroughOptions cut = o;
    if (o.reference.empty()) cut.config.num_hidden_layers = o.layer + 1;  // or all that it holds
    Engine engine(cut.config, o.fsdp, AdamWOptions(), o.transport, o.batch, o.seq, *alone, backend);
    set_weights(cut, *alone, engine.model());
    const Unit& unit = engine.model().unit(static_cast<int>(o.layer) + 1);
    own.start(static_cast<int>(o.layer) + 1, unit.name(), unit.layout(), o.fsdp.param_dtype);
    engine.evaluate({batch});
    const Recorded &a = recorder.tensor("10 residual/add/sum"),
                   &b = own.tensor("10 residual/add/sum");
    double difference = 0, norm = 0;
    for (size_t i = 0; i < b.values.size(); ++i) {
      difference += (double{a.values[i]} - b.values[i]) * (double{a.values[i]} - b.values[i]);
      norm += double{b.values[i]} * b.values[i];
    }
    const double error = relative_l2(difference, norm);
    const bool same =
        std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(float)) == 0;
    check.ok = error <= limit && norm > 0 && a.values.size() == b.values.size();
    check.found = same ? fmt::format("bit for bit the same, {} values", a.values.size())
                       : fmt::format("{:.1e}", error);
  });
  return check;
}

// --- operators against a reference

namespace {

// Values [N, cols] of an operator, or columns of them.
struct Output {
  const char* reference;  // name in activations.safetensors
  const char* key;        // in the recorder
  int64_t begin, cols;
};

// q-norm and k-norm run in one pass with RoPE: their output is nowhere in memory, and is put
// together here from what the pass read and left.
Recorded normed_heads(const StepRecorder& recorder, const LayerShape& s, bool query) {
  const Recorded& qkv = recorder.tensor("2 q/k/v/linear/y");
  const Recorded& rstd = recorder.tensor("3+4 q-norm, k-norm, RoPE/qk_norm_rope/rstd");
  const std::vector<float>& weight = recorder.parameter(query ? kQNorm : kKNorm);
  const int64_t heads = query ? s.H : s.K, first = query ? 0 : s.H;
  Recorded out{s.N, heads * s.D, {}};
  for (int64_t n = 0; n < s.N; ++n)
    for (int64_t h = first; h < first + heads; ++h)
      for (int64_t d = 0; d < s.D; ++d)
        out.values.push_back(qkv.values[n * qkv.cols + h * s.D + d] *
                             rstd.values[n * rstd.cols + h] * weight[d]);
  return out;
}

Recorded columns(const Recorded& from, int64_t begin, int64_t cols) {
  Recorded out{from.rows, cols, {}};
  for (int64_t r = 0; r < from.rows; ++r)
    out.values.insert(out.values.end(), from.values.begin() + r * from.cols + begin,
                      from.values.begin() + r * from.cols + begin + cols);
  return out;
}

}  // namespace

std::vector<WalkthroughCheck> check_activations(const WalkthroughOptions& o, const World& world,
                                                const LayerShape& s, const StepRecorder& recorder) {
  const int64_t HD = s.H * s.D, KD = s.K * s.D;
  const char *qkv = "2 q/k/v/linear/y", *qk = "3+4 q-norm, k-norm, RoPE/qk_norm_rope/qk_out";
  const Output outputs[] = {
      {"step00_hidden_states", "1 input RMSNorm/rms_norm/x", 0, s.C},
      {"step01_input_layernorm", "1 input RMSNorm/rms_norm/y", 0, s.C},
      {"step02_q", qkv, 0, HD},
      {"step02_k", qkv, HD, KD},
      {"step02_v", qkv, HD + KD, KD},
      {"step03_q_norm", nullptr, 0, HD},
      {"step03_k_norm", nullptr, HD, KD},
      {"step04_q_rope", qk, 0, HD},
      {"step04_k_rope", qk, HD, KD},
      {"step05_attention", "5 attention/attention/o", 0, HD},
      {"step06_o_proj", "6 o_proj/linear/y", 0, s.C},
      {"step07_residual", "7+8 residual, RMSNorm/add_rms_norm/sum", 0, s.C},
      {"step08_post_attention_layernorm", "7+8 residual, RMSNorm/add_rms_norm/y", 0, s.C},
      {"step09_gate", "9 SwiGLU MLP/swiglu/gu", 0, s.F},
      {"step09_up", "9 SwiGLU MLP/swiglu/gu", s.F, s.F},
      {"step09_fused", "9 SwiGLU MLP/swiglu/a", 0, s.F},
      {"step09_mlp", "10 residual/add/delta", 0, s.C},
      {"step10_residual", "10 residual/add/sum", 0, s.C}};
  const double limit = o.fsdp.param_dtype == DType::f32    ? 1e-5
                       : o.fsdp.param_dtype == DType::fp16 ? 5e-3
                                                           : 3e-2;
  std::unique_ptr<SafetensorsFile> file;
  collectively(world, [&] {
    file = std::make_unique<SafetensorsFile>(o.reference + "/activations.safetensors");
    for (const Output& out : outputs)
      if ((*file)[out.reference].numel() != world.size() * s.N * out.cols)
        fail("{}: {} {} does not hold {} values", file->path(), out.reference,
             file->shape(out.reference).str(), world.size() * s.N * out.cols);
  });
  std::vector<WalkthroughCheck> checks;
  for (const Output& out : outputs) {
    const Recorded ours = out.key ? columns(recorder.tensor(out.key), out.begin, out.cols)
                                  : normed_heads(recorder, s, out.begin == 0);
    std::vector<float> truth(ours.values.size());
    file->read_f32(out.reference, world.rank() * static_cast<int64_t>(truth.size()),
                   static_cast<int64_t>(truth.size()), truth.data());
    double sums[2] = {0, 0};
    for (size_t i = 0; i < truth.size(); ++i) {
      sums[0] += (double{ours.values[i]} - truth[i]) * (double{ours.values[i]} - truth[i]);
      sums[1] += double{truth[i]} * truth[i];
    }
    world.all_reduce_sum(sums, 2);
    const double error = relative_l2(sums[0], sums[1]);
    checks.push_back({fmt::format("{} as in the reference", out.reference),
                      fmt::format("relative L2 difference below {:.0e}", limit),
                      fmt::format("{:.1e}", error), error <= limit});
  }
  return checks;
}

}  // namespace qshard
