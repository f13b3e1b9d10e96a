// Rates of the CPU operators with the shapes of the small30m model: 1024 tokens, hidden 512, 8
// query and 4 kv heads of 64, ffn 1536. One thread, or as many as QSHARD_BENCH_THREADS says.
//
//   build/test/bench/ops_bench --benchmark_filter=linear
//
// FLOP/s of attention count the causal half: 4·D a query and visible key forward, 2.5 times that
// backward. Bytes/s count each operand once.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <vector>

#include "cpu/backend_cpu.h"

namespace qshard {
namespace {

Backend& backend() {
  static Backend backend = [] {
    const char* threads = std::getenv("QSHARD_BENCH_THREADS");
    return make_cpu_backend(threads ? std::atoi(threads) : 1);
  }();
  return backend;
}
Ops& ops() { return *backend().ops; }

// Memory filled with normal numbers.
Buffer random(DType dtype, Shape shape) {
  Buffer wide(*backend().device, DType::f32, shape, Segment::workspace, "bench");
  ops().init_normal(wide, 1, 2, 0, 1);
  if (dtype == DType::f32) return wide;
  Buffer narrow(*backend().device, dtype, shape, Segment::workspace, "bench");
  ops().cast(wide, narrow);
  return narrow;
}

void set_rate(benchmark::State& state, const char* name, double amount) {
  state.counters[name] = benchmark::Counter(amount, benchmark::Counter::kIsIterationInvariantRate,
                                            benchmark::Counter::kIs1000);
}

// --- products
struct Layer {
  const char* name;
  int64_t I, O;
};
constexpr Layer kLayers[] = {
    {"qkv", 512, 1024}, {"o", 512, 512}, {"gate_up", 512, 3072}, {"down", 1536, 512}};
enum class Pass { forward, dgrad, wgrad };

void product(benchmark::State& state, DType dtype, Layer layer, Pass pass) {
  constexpr int64_t N = 1024;
  const Buffer x = random(dtype, {N, layer.I}), w = random(dtype, {layer.O, layer.I});
  const Buffer y = random(dtype, {N, layer.O}), dw = random(DType::f32, {layer.O, layer.I});
  const Buffer dx = random(dtype, {N, layer.I});
  for (auto _ : state) {
    if (pass == Pass::forward) ops().linear(x, w, y);
    if (pass == Pass::dgrad) ops().linear_dgrad(y, w, dx, false);
    if (pass == Pass::wgrad) ops().linear_wgrad(y, x, dw, true);
  }
  set_rate(state, "FLOP/s", 2.0 * N * static_cast<double>(layer.I * layer.O));
}

// --- attention
void attention(benchmark::State& state, DType dtype, AttentionShape s, bool backward) {
  const int64_t N = s.B * s.T, q_cols = s.H * s.D, kv_cols = s.K * s.D, all = q_cols + 2 * kv_cols;
  const Buffer qkv = random(dtype, {N, all}), d_qkv = random(dtype, {N, all});
  const Buffer o = random(dtype, {N, q_cols}), d_o = random(dtype, {N, q_cols});
  const Buffer lse = random(DType::f32, {s.B, s.H, s.T});
  const auto q = [&](const Tensor& t) { return t.col_range(0, q_cols); };
  const auto k = [&](const Tensor& t) { return t.col_range(q_cols, q_cols + kv_cols); };
  const auto v = [&](const Tensor& t) { return t.col_range(q_cols + kv_cols, all); };
  ops().attention(q(qkv), k(qkv), v(qkv), s, o, lse);
  for (auto _ : state) {
    if (backward)
      ops().attention_grad(q(qkv), k(qkv), v(qkv), o, d_o, lse, s, q(d_qkv), k(d_qkv), v(d_qkv));
    else
      ops().attention(q(qkv), k(qkv), v(qkv), s, o, lse);
  }
  const double pairs = static_cast<double>(s.B * s.H) * static_cast<double>(s.T * (s.T + 1) / 2);
  set_rate(state, "FLOP/s", pairs * 4.0 * static_cast<double>(s.D) * (backward ? 2.5 : 1.0));
}

// --- the rest
constexpr int64_t N = 1024, C = 512, F = 1536;

void add_rms_norm(benchmark::State& state, DType dtype) {
  const Buffer x = random(DType::f32, {N, C}), delta = random(dtype, {N, C}),
               w = random(dtype, {C});
  const Buffer y = random(dtype, {N, C}), rstd = random(DType::f32, {N});
  for (auto _ : state) ops().add_rms_norm(x, delta, w, 1e-6f, x, y, rstd);
  set_rate(state, "B/s", static_cast<double>(2 * x->bytes() + delta->bytes() + y->bytes()));
}

void rms_norm_grad(benchmark::State& state, DType dtype) {
  const Buffer dy = random(DType::f32, {N, C}), x = random(DType::f32, {N, C}),
               w = random(dtype, {C});
  const Buffer rstd = random(DType::f32, {N}), d_res = random(DType::f32, {N, C}),
               dw = random(DType::f32, {C});
  const Buffer copy = random(dtype, {N, C});
  ops().fill(rstd, 1);
  for (auto _ : state) ops().rms_norm_grad(dy, x, w, rstd, d_res, copy, dw, true);
  set_rate(state, "B/s", static_cast<double>(4 * x->bytes() + copy->bytes()));
}

void qk_norm_rope(benchmark::State& state, DType dtype, bool backward) {
  const AttentionShape s{4, 256, 8, 4, 64};
  const Buffer in = random(dtype, {N, (s.H + s.K) * s.D}),
               out = random(dtype, {N, (s.H + s.K) * s.D});
  const Buffer w = random(dtype, {s.D}), rope = random(DType::f32, {s.T, s.D});
  const Buffer rstd = random(DType::f32, {N, s.H + s.K}), dw = random(DType::f32, {s.D}),
               dw2 = random(DType::f32, {s.D});
  const Buffer d_in = random(dtype, {N, (s.H + s.K) * s.D});
  for (auto _ : state) {
    if (backward)
      ops().qk_norm_rope_grad(out, in, w, w, rope, rstd, s, d_in, dw, dw2, false);
    else
      ops().qk_norm_rope(in, w, w, rope, 1e-6f, s, out, rstd);
  }
  set_rate(state, "B/s", static_cast<double>((backward ? 3 : 2) * in->bytes()));
}

void swiglu(benchmark::State& state, DType dtype, bool backward) {
  const Buffer gu = random(dtype, {N, 2 * F}), a = random(dtype, {N, F}),
               d_gu = random(dtype, {N, 2 * F});
  for (auto _ : state) {
    if (backward)
      ops().swiglu_grad(a, gu, d_gu);
    else
      ops().swiglu(gu, a);
  }
  set_rate(state, "element/s", static_cast<double>(N * F));
}

void cross_entropy(benchmark::State& state, DType dtype) {
  constexpr int64_t n = 256, V = 32768;
  const Buffer logits = random(DType::f32, {n, V}), d = random(dtype, {n, V}),
               loss = random(DType::f32, {n});
  const Buffer labels(*backend().device, DType::i32, {n}, Segment::workspace, "labels");
  for (auto _ : state) ops().cross_entropy(logits, labels, 1, d, loss);
  set_rate(state, "element/s", static_cast<double>(n * V));
}

void adamw(benchmark::State& state, DType dtype) {
  constexpr int64_t n = 4 << 20;
  const Buffer p = random(DType::f32, {n}), g = random(DType::f32, {n}),
               m = random(DType::f32, {n});
  const Buffer v = random(DType::f32, {n}), p_out = random(dtype, {n});
  ops().fill(v, 1);
  for (auto _ : state) ops().adamw(p, g, m, v, p_out, {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 10, 1});
  set_rate(state, "B/s", static_cast<double>(7 * p->bytes() + p_out->bytes()));
}

void init_normal(benchmark::State& state, DType) {
  const Buffer x = random(DType::f32, {1 << 20});
  for (auto _ : state) ops().init_normal(x, 1, 2, 0, 1);
  set_rate(state, "element/s", static_cast<double>(x->numel()));
}

template <typename F_, typename... A>
void add(const std::string& name, F_ run, A... arguments) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [=](benchmark::State& state) { run(state, arguments...); })
      ->Unit(benchmark::kMicrosecond)
      ->UseRealTime();
}

void add_all() {
  for (DType dtype : {DType::f32, DType::bf16}) {
    const std::string end = fmt::format("/{}", dtype_name(dtype));
    for (Layer layer : kLayers) {
      add(fmt::format("linear/{}{}", layer.name, end), product, dtype, layer, Pass::forward);
      add(fmt::format("linear_dgrad/{}{}", layer.name, end), product, dtype, layer, Pass::dgrad);
      add(fmt::format("linear_wgrad/{}{}", layer.name, end), product, dtype, layer, Pass::wgrad);
    }
    for (AttentionShape s : {AttentionShape{4, 256, 8, 4, 64}, AttentionShape{1, 2048, 8, 4, 64}}) {
      add(fmt::format("attention/T{}{}", s.T, end), attention, dtype, s, false);
      add(fmt::format("attention_grad/T{}{}", s.T, end), attention, dtype, s, true);
    }
    add("add_rms_norm" + end, add_rms_norm, dtype);
    add("rms_norm_grad" + end, rms_norm_grad, dtype);
    add("qk_norm_rope" + end, qk_norm_rope, dtype, false);
    add("qk_norm_rope_grad" + end, qk_norm_rope, dtype, true);
    add("swiglu" + end, swiglu, dtype, false);
    add("swiglu_grad" + end, swiglu, dtype, true);
    add("cross_entropy" + end, cross_entropy, dtype);
    add("adamw" + end, adamw, dtype);
  }
  add("init_normal", init_normal, DType::f32);
}

}  // namespace
}  // namespace qshard

int main(int argc, char** argv) {
  qshard::add_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
