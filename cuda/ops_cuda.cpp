#include "cuda/ops_cuda.h"

#include <chrono>

#include "cuda/arguments.h"
#include "cuda/check_cuda.h"

namespace qshard::cuda {

CudaOps::CudaOps(CudaDevice& device, F32Products f32_products)
    : device_(device),
      stream_(device.stream()),
      gemm_(device, device.stream(), f32_products),
      partial_sums_(device, DType::f64, {kSumBlocks}, Segment::workspace, "partial sums") {}

float* CudaOps::scratch(int64_t floats) {
  if (!scratch_.tensor() || scratch_->numel() < floats) {
    if (device_.recordings() > 0) recorded_scratch_.push_back(std::move(scratch_));
    scratch_.reset();  // before the larger one is made; waits for the kernels that use it
    scratch_ = Buffer(device_, DType::f32, {std::max<int64_t>(1, floats)}, Segment::workspace,
                      "operators' scratch");
  }
  return scratch_->as<float>();
}

// --- embedding
void CudaOps::embedding(Tensor ids, Tensor w, Tensor x) {
  expect_rank("embedding", "w", w, 2);
  const int64_t N = ids.numel(), C = w.cols();
  expect_contiguous("embedding", "ids", ids, DType::i32, ids.shape);
  expect("embedding", "w", w, param_dtype("embedding", "w", w), {w.rows(), C});
  expect_residual("embedding", x, w.dtype);
  expect("embedding", "x", x, x.dtype, {N, C});
  cuda::embedding(stream_, ids.as<int32_t>(), view_of(w), view_of(x));
}

void CudaOps::embedding_grad(Tensor ids, Tensor dx, Tensor dw) {
  expect_rank("embedding_grad", "dw", dw, 2);
  const int64_t N = ids.numel(), C = dw.cols();
  expect_contiguous("embedding_grad", "ids", ids, DType::i32, ids.shape);
  expect("embedding_grad", "dx", dx, param_dtype("embedding_grad", "dx", dx), {N, C});
  expect("embedding_grad", "dw", dw, DType::f32, {dw.rows(), C});
  cuda::embedding_grad(stream_, ids.as<int32_t>(), view_of(dx), view_of(dw));
}

// --- RMSNorm
namespace {

void expect_norm(const char* op, Tensor x, Tensor w, Tensor rstd) {
  expect_rank(op, "x", x, 2);
  const int64_t N = x.rows(), C = x.cols();
  expect(op, "w", w, param_dtype(op, "w", w), {C});
  expect_residual(op, x, w.dtype);
  expect(op, "x", x, x.dtype, {N, C});
  expect(op, "rstd", rstd, DType::f32, {N});
  QS_CHECK(C <= kMaxNormCols, "{}: {} columns are above the {} that fit shared memory", op, C,
           kMaxNormCols);
}

}  // namespace

void CudaOps::rms_norm(Tensor x, Tensor w, float eps, Tensor y, Tensor rstd) {
  expect_norm("rms_norm", x, w, rstd);
  expect("rms_norm", "y", y, w.dtype, x.shape);
  cuda::rms_norm(stream_, {view_of(x), {}, view_of(w), eps, {}, view_of(y), rstd.as<float>()});
}

void CudaOps::add_rms_norm(Tensor x, Tensor delta, Tensor w, float eps, Tensor sum, Tensor y,
                           Tensor rstd) {
  expect_norm("add_rms_norm", x, w, rstd);
  expect("add_rms_norm", "delta", delta, w.dtype, x.shape);
  expect("add_rms_norm", "sum", sum, x.dtype, x.shape);
  expect("add_rms_norm", "y", y, w.dtype, x.shape);
  cuda::rms_norm(stream_, {view_of(x), view_of(delta), view_of(w), eps, view_of(sum), view_of(y),
                           rstd.as<float>()});
}

void CudaOps::add(Tensor x, Tensor delta, Tensor sum) {
  expect_rank("add", "x", x, 2);
  expect("add", "delta", delta, param_dtype("add", "delta", delta), x.shape);
  expect_residual("add", x, delta.dtype);
  expect("add", "x", x, x.dtype, x.shape);
  expect("add", "sum", sum, x.dtype, x.shape);
  cuda::add(stream_, view_of(x), view_of(delta), view_of(sum));
}

void CudaOps::rms_norm_grad(Tensor dy, Tensor x, Tensor w, Tensor rstd, Tensor d_res,
                            Tensor d_res_p, Tensor dw, bool accumulate) {
  expect_norm("rms_norm_grad", x, w, rstd);
  const int64_t N = x.rows(), C = x.cols();
  expect("rms_norm_grad", "dy", dy, DType::f32, x.shape);
  expect("rms_norm_grad", "d_res", d_res, x.dtype, x.shape);
  if (d_res_p) expect("rms_norm_grad", "d_res_p", d_res_p, w.dtype, x.shape);
  expect("rms_norm_grad", "dw", dw, DType::f32, {C});
  cuda::rms_norm_grad(
      stream_, {view_of(dy), view_of(x), view_of(w), rstd.as<float>(), view_of(d_res),
                view_of(d_res_p), dw.as<float>(), accumulate, scratch(rms_norm_grad_parts(N) * C)});
}

// --- q-norm and k-norm with RoPE
namespace {

void expect_heads(const char* op, const AttentionShape& s, Tensor qk, Tensor q_norm, Tensor k_norm,
                  Tensor rope, Tensor rstd) {
  QS_CHECK(s.D > 0 && s.D % 2 == 0, "{}: head_dim {} must be even: RoPE turns pairs", op, s.D);
  const int64_t N = s.B * s.T, heads = s.H + s.K;
  expect(op, "qk_in", qk, param_dtype(op, "qk_in", qk), {N, heads * s.D});
  expect(op, "q_norm", q_norm, qk.dtype, {s.D});
  expect(op, "k_norm", k_norm, qk.dtype, {s.D});
  expect(op, "rope", rope, DType::f32, {s.T, s.D});
  expect_contiguous(op, "rstd", rstd, DType::f32, {N, heads});
}

}  // namespace

void CudaOps::qk_norm_rope(Tensor qk_in, Tensor q_norm, Tensor k_norm, Tensor rope, float eps,
                           AttentionShape s, Tensor qk_out, Tensor rstd) {
  expect_heads("qk_norm_rope", s, qk_in, q_norm, k_norm, rope, rstd);
  expect("qk_norm_rope", "qk_out", qk_out, qk_in.dtype, qk_in.shape);
  cuda::qk_norm_rope(stream_, {view_of(qk_in), view_of(q_norm), view_of(k_norm), view_of(rope), eps,
                               s.T, static_cast<int>(s.H), static_cast<int>(s.K),
                               static_cast<int>(s.D), view_of(qk_out), rstd.as<float>()});
}

void CudaOps::qk_norm_rope_grad(Tensor d_qk_out, Tensor qk_in, Tensor q_norm, Tensor k_norm,
                                Tensor rope, Tensor rstd, AttentionShape s, Tensor d_qk_in,
                                Tensor dq_norm, Tensor dk_norm, bool accumulate) {
  const char* op = "qk_norm_rope_grad";
  expect_heads(op, s, qk_in, q_norm, k_norm, rope, rstd);
  expect(op, "d_qk_out", d_qk_out, qk_in.dtype, qk_in.shape);
  expect(op, "d_qk_in", d_qk_in, qk_in.dtype, qk_in.shape);
  expect(op, "dq_norm", dq_norm, DType::f32, {s.D});
  expect(op, "dk_norm", dk_norm, DType::f32, {s.D});
  cuda::qk_norm_rope_grad(
      stream_, {view_of(d_qk_out), view_of(qk_in), view_of(q_norm), view_of(k_norm), view_of(rope),
                rstd.as<float>(), s.T, static_cast<int>(s.H), static_cast<int>(s.K),
                static_cast<int>(s.D), view_of(d_qk_in), dq_norm.as<float>(), dk_norm.as<float>(),
                accumulate, scratch(qk_norm_rope_grad_parts(s.B * s.T) * 2 * s.D)});
}

// --- attention
Attention CudaOps::attention_of(const char* op, const AttentionShape& s, Tensor q, Tensor k,
                                Tensor v, Tensor o, Tensor lse) const {
  QS_CHECK(
      s.B >= 1 && s.T >= 1 && s.K >= 1 && s.H % s.K == 0 && s.D > 0 && s.D % 2 == 0,
      "{}: B {}, T {}, {} query heads, {} kv heads, head_dim {}: kv heads must divide query heads, "
      "head_dim must be even",
      op, s.B, s.T, s.H, s.K, s.D);
  QS_CHECK(s.T < (int64_t{1} << 31) && s.B <= 65535 && s.H <= 65535,
           "{}: B {}, T {}, {} heads exceed what a launch takes", op, s.B, s.T, s.H);
  const int64_t N = s.B * s.T;
  expect(op, "q", q, param_dtype(op, "q", q), {N, s.H * s.D});
  expect(op, "k", k, q.dtype, {N, s.K * s.D});
  expect(op, "v", v, q.dtype, {N, s.K * s.D});
  expect(op, "o", o, q.dtype, {N, s.H * s.D});
  expect_contiguous(op, "lse", lse, DType::f32, {s.B, s.H, s.T});
  Attention a{};
  a.B = s.B;
  a.T = s.T;
  a.H = static_cast<int>(s.H);
  a.K = static_cast<int>(s.K);
  a.D = static_cast<int>(s.D);
  a.q = view_of(q);
  a.k = view_of(k);
  a.v = view_of(v);
  a.o = view_of(o);
  a.lse = lse.as<float>();
  QS_CHECK(attention_on_tensor_cores(a) || s.D <= kMaxGeneralHeadDim,
           "{}: head_dim {} is above the {} that fit shared memory", op, s.D, kMaxGeneralHeadDim);
  return a;
}

void CudaOps::attention(Tensor q, Tensor k, Tensor v, AttentionShape s, Tensor o, Tensor lse) {
  const Attention a = attention_of("attention", s, q, k, v, o, lse);
  if (attention_on_tensor_cores(a))
    attention_tensor(stream_, a);
  else
    attention_general(stream_, a);
}

void CudaOps::attention_grad(Tensor q, Tensor k, Tensor v, Tensor o, Tensor d_o, Tensor lse,
                             AttentionShape s, Tensor dq, Tensor dk, Tensor dv) {
  Attention a = attention_of("attention_grad", s, q, k, v, o, lse);
  expect("attention_grad", "d_o", d_o, q.dtype, q.shape);
  expect("attention_grad", "dq", dq, q.dtype, q.shape);
  expect("attention_grad", "dk", dk, q.dtype, k.shape);
  expect("attention_grad", "dv", dv, q.dtype, v.shape);
  a.d_o = view_of(d_o);
  a.dq = view_of(dq);
  a.dk = view_of(dk);
  a.dv = view_of(dv);
  a.delta = scratch(s.B * s.H * s.T);
  if (attention_on_tensor_cores(a))
    attention_tensor_grad(stream_, a);
  else
    attention_general_grad(stream_, a);
}

// --- SwiGLU and cross-entropy
void CudaOps::swiglu(Tensor gu, Tensor a) {
  expect_rank("swiglu", "a", a, 2);
  expect("swiglu", "a", a, param_dtype("swiglu", "a", a), {a.rows(), a.cols()});
  expect("swiglu", "gu", gu, a.dtype, {a.rows(), 2 * a.cols()});
  cuda::swiglu(stream_, view_of(gu), view_of(a));
}

void CudaOps::swiglu_grad(Tensor da, Tensor gu, Tensor d_gu) {
  expect_rank("swiglu_grad", "da", da, 2);
  expect("swiglu_grad", "da", da, param_dtype("swiglu_grad", "da", da), {da.rows(), da.cols()});
  expect("swiglu_grad", "gu", gu, da.dtype, {da.rows(), 2 * da.cols()});
  expect("swiglu_grad", "d_gu", d_gu, da.dtype, {da.rows(), 2 * da.cols()});
  cuda::swiglu_grad(stream_, view_of(da), view_of(gu), view_of(d_gu));
}

void CudaOps::cross_entropy(Tensor logits, Tensor labels, Factor scale, Tensor d_logits,
                            Tensor loss) {
  expect_rank("cross_entropy", "logits", logits, 2);
  const int64_t n = logits.rows(), V = logits.cols();
  expect("cross_entropy", "logits", logits, DType::f32, {n, V});
  expect("cross_entropy", "labels", labels, DType::i32, {n});
  expect("cross_entropy", "loss", loss, DType::f32, {n});
  if (d_logits)
    expect("cross_entropy", "d_logits", d_logits,
           param_dtype("cross_entropy", "d_logits", d_logits), {n, V});
  cuda::cross_entropy(stream_, view_of(logits), labels.as<int32_t>(), scale, view_of(d_logits),
                      loss.as<float>());
}

// --- optimizer and element-wise
namespace {

void expect_flat(const char* op, const char* name, const Tensor& t, DType dtype, int64_t n) {
  expect_contiguous(op, name, t, dtype, t.shape);
  QS_CHECK(t.numel() == n, "{}: {} {} has {} elements, expected {}", op, name, t.shape.str(),
           t.numel(), n);
}

}  // namespace

void CudaOps::adamw(Tensor p, Tensor g, Tensor m, Tensor v, Tensor p_out, const AdamWStep& step) {
  const int64_t n = p.numel();
  expect_flat("adamw", "p", p, DType::f32, n);
  expect_flat("adamw", "g", g, DType::f32, n);
  expect_flat("adamw", "m", m, DType::f32, n);
  expect_flat("adamw", "v", v, DType::f32, n);
  if (p_out) expect_flat("adamw", "p_out", p_out, param_dtype("adamw", "p_out", p_out), n);
  AdamW a{};
  a.n = n;
  a.p = p.as<float>();
  a.m = m.as<float>();
  a.v = v.as<float>();
  a.g = g.as<float>();
  a.p_out = flat_view_of(p_out);
  a.beta1 = step.beta1;
  a.beta2 = step.beta2;
  a.eps = step.eps;
  a.on_device = step.on_device;
  if (!a.on_device) a.factors = step.factors();
  cuda::adamw(stream_, a);
}

void CudaOps::add_sum_of(const char* op, const Tensor& x, Summand summand, const Tensor& total) {
  expect_flat(op, "x", x, DType::f32, x.numel());
  expect(op, "total", total, DType::f64, {1});
  cuda::add_sum(stream_, x.as<float>(), x.numel(), summand, partial_sums_->as<double>(),
                total.as<double>());
}

void CudaOps::add_sum(Tensor x, Tensor total) { add_sum_of("add_sum", x, Summand::value, total); }
void CudaOps::add_sum_squares(Tensor x, Tensor total) {
  add_sum_of("add_sum_squares", x, Summand::square, total);
}

void CudaOps::cast(Tensor from, Tensor to) {
  QS_CHECK(from.shape == to.shape, "cast: from {} to {}: the shapes must be equal",
           from.shape.str(), to.shape.str());
  expect("cast", "from", from, param_dtype("cast", "from", from), from.shape);
  expect("cast", "to", to, param_dtype("cast", "to", to), to.shape);
  const bool flat = from.contiguous() && to.contiguous();
  cuda::cast(stream_, flat ? flat_view_of(from) : view_of(from),
             flat ? flat_view_of(to) : view_of(to));
}

void CudaOps::sum_parts(std::span<const Tensor> parts, Factor scale, Tensor out, bool accumulate) {
  QS_CHECK(!parts.empty() && parts.size() <= kMaxParts, "sum_parts: {} parts, expected 1 to {}",
           parts.size(), kMaxParts);
  SumParts a{};
  a.n = out.numel();
  expect_flat("sum_parts", "out", out, DType::f32, a.n);
  param_dtype("sum_parts", "a part", parts[0]);
  for (const Tensor& part : parts) {
    expect_flat("sum_parts", "a part", part, parts[0].dtype, a.n);
    a.parts[a.count++] = part.data;
  }
  a.type = view_of(parts[0]).type;
  a.scale = scale;
  a.out = out.as<float>();
  a.accumulate = accumulate;
  cuda::sum_parts(stream_, a);
}

void CudaOps::init_normal(Tensor out, uint64_t seed, uint64_t stream, int64_t first, float std) {
  expect_contiguous("init_normal", "out", out, DType::f32, out.shape);
  QS_CHECK(first >= 0, "init_normal: first index {} is negative", first);
  cuda::init_normal(stream_, {out.as<float>(), out.numel(), first, seed, stream, std});
}

void CudaOps::fill(Tensor out, float value) {
  expect_contiguous("fill", "out", out, param_dtype("fill", "out", out), out.shape);
  cuda::fill(stream_, flat_view_of(out), value);
}

// Large enough to keep all processors busy for about a millisecond.
double CudaOps::measure_peak(DType param_dtype, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr int kProductsPerTiming = 8;  // the launch is a small part of it
  const int64_t n = int64_t{64} * device_.processors();
  const auto operand = [&](const char* name) {
    return Buffer(device_, param_dtype, {n, n}, Segment::workspace, name);
  };
  const Buffer x = operand("peak x"), w = operand("peak w"), y = operand("peak y");
  // Random numbers, as in training: constant ones draw less power and flatter the clock.
  const Buffer normal(device_, DType::f32, {n, n}, Segment::workspace, "peak numbers");
  init_normal(normal, 1, 1, 0, 1.f);
  cast(normal, x);
  cast(normal, w);
  linear(x, w, y);  // chooses the algorithm
  device_.synchronize();

  double best = 0;
  const Clock::time_point begin = Clock::now();
  do {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kProductsPerTiming; ++i) linear(x, w, y);
    device_.synchronize();
    const std::chrono::duration<double> spent = Clock::now() - start;
    const auto size = static_cast<double>(n);
    best = std::max(best, 2.0 * size * size * size * kProductsPerTiming / spent.count());
  } while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds);
  return best;
}

}  // namespace qshard::cuda
