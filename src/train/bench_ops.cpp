#include <algorithm>
#include <functional>

#include "device/traced_ops.h"
#include "model/qwen3_layer.h"
#include "train/bench.h"
#include "train/stopwatch.h"

namespace qshard {
namespace {

struct OpRow {
  std::string op, what;
  int64_t flops = 0, bytes = 0;
  int64_t m = 0, n = 0, k = 0;  // of a product
  Times times;
};

// Makes the operands of an operator, measures it, frees them: one after the other, so that the
// operators of a large model need the memory of one.
class OpBench {
 public:
  OpBench(const BenchOptions& o, const World& world, Backend& backend)
      : config_(bench_model(o)),
        s_(config_, o.batch, o.seq),
        P_(parse_dtype(o.param_dtype)),
        chunk_(std::clamp<int64_t>(kLogitsBytes / (4 * config_.vocab_size), 1, s_.N)),
        device_(*backend.device),
        backend_(backend),
        watch_(world, *backend.device, o.warm_up, o.repeats) {}

  void products();
  void others();
  const std::vector<OpRow>& rows() const { return rows_; }

 private:
  static constexpr int64_t kLogitsBytes = int64_t{256} << 20;
  using Work = std::function<void(Ops&)>;

  Buffer made(DType dtype, Shape shape) {  // normal numbers
    Buffer wide(device_, DType::f32, shape, Segment::workspace, "bench");
    backend_.ops->init_normal(wide, 1, 2, 0, 0.02f);
    if (dtype == DType::f32) return wide;
    Buffer narrow(device_, dtype, shape, Segment::workspace, "bench");
    backend_.ops->cast(wide, narrow);
    return narrow;
  }
  Buffer ids(int64_t n, int64_t limit) {
    std::vector<int32_t> values(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) values[i] = static_cast<int32_t>(i * 2654435761 % limit);
    Buffer buffer(device_, DType::i32, {n}, Segment::workspace, "bench");
    device_.copy(buffer->data, values.data(), buffer->bytes());
    return buffer;
  }

  // FLOPs and bytes as the trace counts them; `bytes` of operators that leave no span.
  OpRow& measure(const std::string& op, const std::string& what, const Work& work,
                 int64_t bytes = 0) {
    OpRow row;
    row.op = op, row.what = what, row.bytes = bytes;
    {
      Trace trace;
      const TracedBackend traced(backend_, trace);
      work(*backend_.ops);
      for (const Span& span : trace.spans()) row.flops += span.flops, row.bytes += span.bytes;
    }
    row.times = watch_.time_short([&] { work(*backend_.ops); });
    rows_.push_back(row);
    return rows_.back();
  }
  void product(const std::string& what, int64_t rows, int64_t in, int64_t out);
  void norms();
  void attention();
  void mlp();
  void root();
  void flat();

  const Qwen3Config config_;
  const LayerShape s_;
  const DType P_;
  const int64_t chunk_;  // rows of logits that exist at once
  Device& device_;
  Backend& backend_;
  Stopwatch watch_;
  std::vector<OpRow> rows_;
};

void OpBench::product(const std::string& what, int64_t rows, int64_t in, int64_t out) {
  const Buffer x = made(P_, {rows, in}), w = made(P_, {out, in}), y = made(P_, {rows, out});
  const Buffer dw = made(DType::f32, {out, in});
  auto add = [&](const char* op, int64_t m, int64_t n, int64_t k, const Work& work) {
    OpRow& row = measure(op, what, work);
    row.m = m, row.n = n, row.k = k;
  };
  add("linear", rows, out, in, [&](Ops& ops) { ops.linear(x, w, y); });
  add("linear_dgrad", rows, in, out, [&](Ops& ops) { ops.linear_dgrad(y, w, x, false); });
  add("linear_wgrad", out, in, rows, [&](Ops& ops) { ops.linear_wgrad(y, x, dw, false); });
}

void OpBench::products() {
  product("q, k, v", s_.N, s_.C, s_.qkv_cols());
  product("o_proj", s_.N, s_.H * s_.D, s_.C);
  product("gate, up", s_.N, s_.C, 2 * s_.F);
  product("down_proj", s_.N, s_.F, s_.C);
  product("head", chunk_, s_.C, config_.vocab_size);
}

void OpBench::others() {
  norms();
  attention();
  mlp();
  root();
  flat();
}

void OpBench::norms() {
  const DType R = DType::f32;
  const Buffer x = made(R, {s_.N, s_.C}), sum = made(R, {s_.N, s_.C}), w = made(P_, {s_.C});
  const Buffer delta = made(P_, {s_.N, s_.C}), y = made(P_, {s_.N, s_.C});
  const Buffer rstd = made(DType::f32, {s_.N}), dw = made(DType::f32, {s_.C});
  const std::string what = "hidden";
  measure("rms_norm", what, [&](Ops& ops) { ops.rms_norm(x, w, s_.eps, y, rstd); });
  measure("add_rms_norm", what,
          [&](Ops& ops) { ops.add_rms_norm(x, delta, w, s_.eps, sum, y, rstd); });
  measure("add", what, [&](Ops& ops) { ops.add(x, delta, sum); });
  const Buffer dy = made(DType::f32, {s_.N, s_.C});
  measure("rms_norm_grad", what, [&](Ops& ops) {
    ops.rms_norm_grad(dy, x, w, rstd, sum, P_ == R ? Tensor() : y.tensor(), dw, false);
  });
}

void OpBench::attention() {
  const int64_t HD = s_.H * s_.D, KD = s_.K * s_.D;
  const Buffer qkv = made(P_, {s_.N, s_.qkv_cols()}), d_qkv = made(P_, {s_.N, s_.qkv_cols()});
  const Buffer qk = made(P_, {s_.N, HD + KD}), w = made(P_, {s_.D});
  const Buffer rope = made(DType::f32, {s_.T, s_.D}), rstd = made(DType::f32, {s_.N, s_.H + s_.K});
  const Buffer dq_norm = made(DType::f32, {s_.D}), dk_norm = made(DType::f32, {s_.D});
  const Buffer o = made(P_, {s_.N, HD}), d_o = made(P_, {s_.N, HD});
  const Buffer lse = made(DType::f32, {s_.B, s_.H, s_.T});
  const AttentionShape shape = s_.attention();
  const Tensor in = qkv->col_range(0, HD + KD), d_in = d_qkv->col_range(0, HD + KD);
  const Tensor q = qk->col_range(0, HD), k = qk->col_range(HD, HD + KD),
               v = qkv->col_range(HD + KD, HD + 2 * KD);
  measure("qk_norm_rope", "q, k",
          [&](Ops& ops) { ops.qk_norm_rope(in, w, w, rope, s_.eps, shape, qk, rstd); });
  measure("qk_norm_rope_grad", "q, k", [&](Ops& ops) {
    ops.qk_norm_rope_grad(d_in, in, w, w, rope, rstd, shape, d_in, dq_norm, dk_norm, false);
  });
  measure("attention", "causal", [&](Ops& ops) { ops.attention(q, k, v, shape, o, lse); });
  measure("attention_grad", "causal", [&](Ops& ops) {
    ops.attention_grad(q, k, v, o, d_o, lse, shape, d_qkv->col_range(0, HD),
                       d_qkv->col_range(HD, HD + KD), d_qkv->col_range(HD + KD, HD + 2 * KD));
  });
}

void OpBench::mlp() {
  const Buffer gate_up = made(P_, {s_.N, 2 * s_.F}), d_gate_up = made(P_, {s_.N, 2 * s_.F});
  const Buffer act = made(P_, {s_.N, s_.F});
  measure("swiglu", "ffn", [&](Ops& ops) { ops.swiglu(gate_up, act); });
  measure("swiglu_grad", "ffn", [&](Ops& ops) { ops.swiglu_grad(act, gate_up, d_gate_up); });
}

void OpBench::root() {
  const int64_t V = config_.vocab_size;
  {
    const Buffer tokens = ids(s_.N, V), w = made(P_, {V, s_.C}), x = made(DType::f32, {s_.N, s_.C});
    measure("embedding", "hidden", [&](Ops& ops) { ops.embedding(tokens, w, x); });
  }
  {
    const Buffer tokens = ids(s_.N, V), dx = made(DType::f32, {s_.N, s_.C}),
                 dw = made(DType::f32, {V, s_.C});
    measure("embedding_grad", "hidden", [&](Ops& ops) { ops.embedding_grad(tokens, dx, dw); });
  }
  const Buffer logits = made(DType::f32, {chunk_, V}), d_logits = made(P_, {chunk_, V});
  const Buffer labels = ids(chunk_, V), losses = made(DType::f32, {chunk_});
  measure("cross_entropy", "vocabulary",
          [&](Ops& ops) { ops.cross_entropy(logits, labels, 1, d_logits, losses); });
}

// Operators on flat memory, at the size of a layer's largest parameter.
void OpBench::flat() {
  const int64_t n = s_.F * s_.C, f32 = 4 * n;
  const int64_t p = n * static_cast<int64_t>(dtype_size(P_));
  const Buffer w = made(DType::f32, {n}), g = made(DType::f32, {n}), m = made(DType::f32, {n});
  const Buffer v = made(DType::f32, {n}), rounded = made(P_, {n});
  const Buffer total(device_, DType::f64, {1}, Segment::workspace, "total");
  backend_.ops->fill(v, 1);
  const AdamWStep step{0, 0.9f, 0.95f, 1e-8f, 0, 10, 1};  // rate 0: weights stay as they are
  const Tensor out = P_ == DType::f32 ? Tensor() : rounded.tensor();
  const Tensor parts[] = {w, g};
  const std::string what = "gate_proj";
  measure("adamw", what, [&](Ops& ops) { ops.adamw(w, g, m, v, out, step); });
  measure(
      "cast", what, [&](Ops& ops) { ops.cast(w, rounded); }, f32 + p);
  measure(
      "add_sum", what, [&](Ops& ops) { ops.add_sum(g, total); }, f32);
  measure(
      "add_sum_squares", what, [&](Ops& ops) { ops.add_sum_squares(g, total); }, f32);
  measure(
      "sum_parts", "2 × gate_proj", [&](Ops& ops) { ops.sum_parts(parts, 1, m, false); }, 3 * f32);
  measure(
      "init_normal", what, [&](Ops& ops) { ops.init_normal(m, 1, 2, 0, 1); }, f32);
  measure(
      "fill", what, [&](Ops& ops) { ops.fill(m, 1); }, f32);
}

Document row_start(const OpRow& row) { return {{"operator", row.op}, {"part", row.what}}; }

void add_times(Document& to, const Times& times) {
  to["time_us"] = times.median * 1e6;
  to["lowest_us"] = times.lowest * 1e6;
  to["highest_us"] = times.highest * 1e6;
}

}  // namespace

Document bench_gemm(const BenchOptions& o, World& world, Backend& backend) {
  const Ceilings ceilings = measure_ceilings(o, world, backend);
  OpBench bench(o, world, backend);
  bench.products();
  double best = ceilings.flops_per_s;
  for (const OpRow& row : bench.rows())
    best = std::max(best, static_cast<double>(row.flops) / row.times.median);
  Document doc = {{"best_gflop_per_s", best * 1e-9}, {"rows", Document::array()}};
  for (const OpRow& row : bench.rows()) {
    Document line = row_start(row);
    line["m"] = row.m, line["n"] = row.n, line["k"] = row.k;
    add_times(line, row.times);
    const double rate = static_cast<double>(row.flops) / row.times.median;
    line["gflop_per_s"] = rate * 1e-9;
    line["share_of_best"] = rate / best;
    doc["rows"].push_back(line);
  }
  return doc;
}

Document bench_ops(const BenchOptions& o, World& world, Backend& backend) {
  const Ceilings ceilings = measure_ceilings(o, world, backend);
  OpBench bench(o, world, backend);
  bench.products();
  bench.others();
  Document doc = {{"products_gflop_per_s", ceilings.flops_per_s * 1e-9},
                  {"copy_gb_per_s", ceilings.bytes_per_s * 1e-9},
                  {"rows", Document::array()}};
  for (const OpRow& row : bench.rows()) {
    Document line = row_start(row);
    add_times(line, row.times);
    const double flops = static_cast<double>(row.flops) / row.times.median,
                 bytes = static_cast<double>(row.bytes) / row.times.median;
    line["flop"] = row.flops;
    line["gflop_per_s"] = flops * 1e-9;
    line["share_of_products"] = flops / ceilings.flops_per_s;
    line["least_bytes"] = row.bytes;
    line["gb_per_s"] = bytes * 1e-9;
    line["share_of_copy"] = bytes / ceilings.bytes_per_s;
    doc["rows"].push_back(line);
  }
  return doc;
}

}  // namespace qshard
