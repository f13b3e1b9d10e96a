#include "model/qwen3_layer.h"

#include <cmath>

#include "model/qwen3_params.h"

namespace qshard {
namespace {

// Weights that read the same input, as one product where they are adjacent in the gathered unit.
// y [N, Σ rows] has a column range for each weight.
struct LinearGroup {
  Ops& ops;
  const LayerWeights& layer;
  std::vector<int> params;

  std::vector<Tensor> weights() const {
    return merged([&](int i) { return layer.param(i); });
  }
  std::vector<Tensor> gradients() const {
    return merged([&](int i) { return layer.grad(i); });
  }

  void forward(Tensor x, Tensor y) const {
    each(weights(), y, [&](Tensor w, Tensor part, bool) { ops.linear(x, w, part); });
  }
  void backward(Tensor dy, Tensor x, Tensor dx) const {
    const bool accumulate = layer.grad_accumulates();
    each(gradients(), dy,
         [&](Tensor dw, Tensor part, bool) { ops.linear_wgrad(part, x, dw, accumulate); });
    each(weights(), dy,
         [&](Tensor w, Tensor part, bool first) { ops.linear_dgrad(part, w, dx, !first); });
  }

 private:
  template <typename Get>
  std::vector<Tensor> merged(Get get) const {
    std::vector<Tensor> parts;
    for (int i : params) parts.push_back(get(i));
    if (Tensor all = concat_rows_if_adjacent(parts)) return {all};
    return parts;
  }
  template <typename Fn>
  static void each(const std::vector<Tensor>& weights, Tensor y, Fn fn) {
    int64_t at = 0;
    for (const Tensor& w : weights) {
      fn(w, y.col_range(at, at + w.rows()), at == 0);
      at += w.rows();
    }
  }
};

}  // namespace

LayerShape::LayerShape(const Qwen3Config& c, int64_t batch, int64_t seq)
    : B(batch),
      T(seq),
      N(batch * seq),
      C(c.hidden_size),
      H(c.num_attention_heads),
      K(c.num_key_value_heads),
      D(c.head_dim),
      F(c.intermediate_size),
      eps(static_cast<float>(c.rms_norm_eps)) {}

Tensor LentMemory::take(DType dtype, Shape shape) {
  const Tensor t(at_, dtype, shape);
  const int64_t bytes = (static_cast<int64_t>(t.bytes()) + 63) / 64 * 64;
  if (bytes > left_) return {};
  at_ += bytes;
  left_ -= bytes;
  return t;
}

LayerActivations::LayerActivations(const LayerShape& s, DType P, Device& device,
                                   const std::string& name, ActivationCheckpoint mode,
                                   const LayerActivations* lender, LentMemory& lent) {
  using enum ActivationCheckpoint;
  // kept_by: the most saving mode that keeps it.
  auto place = [&](Tensor LayerActivations::*field, ActivationCheckpoint kept_by, DType dtype,
                   Shape shape, const char* what) {
    if (mode > kept_by && lender) {
      this->*field = lender->*field;
      return;
    }
    this->*field = lent.take(dtype, shape);
    if (this->*field) return;
    owned_.emplace_back(device, dtype, shape, Segment::activations, name + "." + what);
    this->*field = owned_.back();
  };
  const DType R = DType::f32;
  place(&LayerActivations::x, full, R, {s.N, s.C}, "x");
  place(&LayerActivations::rstd1, none, DType::f32, {s.N}, "rstd1");
  place(&LayerActivations::normed1, none, P, {s.N, s.C}, "normed1");
  place(&LayerActivations::qkv, selective, P, {s.N, s.qkv_cols()}, "qkv");
  place(&LayerActivations::rstd_qk, none, DType::f32, {s.N, s.H + s.K}, "rstd_qk");
  place(&LayerActivations::qk, none, P, {s.N, (s.H + s.K) * s.D}, "qk");
  place(&LayerActivations::att, none, P, {s.N, s.H * s.D}, "att");
  place(&LayerActivations::lse, none, DType::f32, {s.B, s.H, s.T}, "lse");
  place(&LayerActivations::mid, selective, R, {s.N, s.C}, "mid");
  place(&LayerActivations::rstd2, none, DType::f32, {s.N}, "rstd2");
  place(&LayerActivations::normed2, none, P, {s.N, s.C}, "normed2");
  place(&LayerActivations::gate_up, selective, P, {s.N, 2 * s.F}, "gate_up");
  place(&LayerActivations::act, none, P, {s.N, s.F}, "act");
}

LayerWorkspace::LayerWorkspace(const LayerShape& s, DType P, double rope_theta, Device& device) {
  auto allocate = [&](DType dtype, Shape shape, const char* what) {
    return Buffer(device, dtype, shape, Segment::workspace, what);
  };
  rope = allocate(DType::f32, {s.T, s.D}, "rope");
  delta = allocate(P, {s.N, s.C}, "delta");
  d_norm = allocate(DType::f32, {s.N, s.C}, "d_norm");
  d_act = allocate(P, {s.N, s.F}, "d_act");
  d_att = allocate(P, {s.N, s.H * s.D}, "d_att");
  d_qkv = allocate(P, {s.N, s.qkv_cols()}, "d_qkv");

  // Angles in double: f32 angles lose digits at large positions.
  std::vector<float> table(s.T * s.D);
  const int64_t half = s.D / 2;
  for (int64_t t = 0; t < s.T; ++t)
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(t) * std::pow(rope_theta, -2.0 * i / s.D);
      table[t * s.D + i] = static_cast<float>(std::cos(angle));
      table[t * s.D + half + i] = static_cast<float>(std::sin(angle));
    }
  device.copy(rope->data, table.data(), rope->bytes());
}

namespace {

// Forward up to the input of down_proj, or, with `recompute`, what a mode has to compute anew.
struct LayerForward {
  Ops& ops;
  const LayerShape& s;
  const LayerWeights& layer;
  LayerActivations& a;
  LayerWorkspace& w;
  const char* phase;
  int64_t HD = s.H * s.D, KD = s.K * s.D;

  void step(const char* name) const { ops.mark(layer.name, phase, name); }

  void input_norm() const {
    step("1 input RMSNorm");
    ops.rms_norm(a.x, layer.param(kInputNorm), s.eps, a.normed1, a.rstd1);  // [N,C]
  }
  void qkv() const {
    step("2 q/k/v");
    LinearGroup{ops, layer, {kQProj, kKProj, kVProj}}.forward(a.normed1, a.qkv);  // [N,(H+2K)D]
  }
  void attention() const {
    step("3+4 q-norm, k-norm, RoPE");
    ops.qk_norm_rope(a.qkv.col_range(0, HD + KD), layer.param(kQNorm), layer.param(kKNorm), w.rope,
                     s.eps, s.attention(), a.qk, a.rstd_qk);  // [N,(H+K)D]
    step("5 attention");
    ops.attention(a.qk.col_range(0, HD), a.qk.col_range(HD, HD + KD),
                  a.qkv.col_range(HD + KD, HD + 2 * KD), s.attention(), a.att, a.lse);  // [N,H·D]
  }
  void output() const {
    step("6 o_proj");
    ops.linear(a.att, layer.param(kOProj), w.delta);  // [N,C]
    step("7+8 residual, RMSNorm");
    ops.add_rms_norm(a.x, w.delta, layer.param(kPostNorm), s.eps, a.mid, a.normed2, a.rstd2);
  }
  void gate_up() const {
    step("9 SwiGLU MLP");
    LinearGroup{ops, layer, {kGateProj, kUpProj}}.forward(a.normed2, a.gate_up);  // [N,2F]
  }
  void swiglu() const { ops.swiglu(a.gate_up, a.act); }  // [N,F]
};

}  // namespace

void layer_forward(Ops& ops, const LayerShape& s, const LayerWeights& layer, LayerActivations& a,
                   LayerWorkspace& w, Tensor out) {
  const LayerForward f{ops, s, layer, a, w, "forward"};
  f.input_norm();
  f.qkv();
  f.attention();
  f.output();
  f.gate_up();
  f.swiglu();
  ops.linear(a.act, layer.param(kDownProj), w.delta);  // [N,C]
  f.step("10 residual");
  ops.add(a.mid, w.delta, out);
}

void layer_recompute(Ops& ops, const LayerShape& s, const LayerWeights& layer, LayerActivations& a,
                     LayerWorkspace& w, ActivationCheckpoint mode) {
  const LayerForward f{ops, s, layer, a, w, "recompute"};
  const bool products = mode == ActivationCheckpoint::full;
  f.input_norm();
  if (products) f.qkv();
  f.attention();
  if (products) {
    f.output();
    f.gate_up();
  } else {
    f.step("8 RMSNorm");
    ops.rms_norm(a.mid, layer.param(kPostNorm), s.eps, a.normed2, a.rstd2);
    f.step("9 SwiGLU MLP");
  }
  f.swiglu();
}

void layer_backward(Ops& ops, const LayerShape& s, const LayerWeights& layer, LayerActivations& a,
                    LayerWorkspace& w, Tensor d_res, Tensor d_res_p) {
  const int64_t HD = s.H * s.D, KD = s.K * s.D;
  const Tensor& qkv = a.qkv;
  const Tensor& qk = a.qk;
  const Tensor& d_qkv = w.d_qkv;
  const bool accumulate = layer.grad_accumulates();
  const Tensor d_res_copy = d_res_p.data == d_res.data ? Tensor() : d_res_p;
  auto step = [&](const char* name) { ops.mark(layer.name, "backward", name); };

  // MLP
  step("9 SwiGLU MLP");
  LinearGroup{ops, layer, {kDownProj}}.backward(d_res_p, a.act, w.d_act);
  ops.swiglu_grad(w.d_act, a.gate_up, a.gate_up);
  LinearGroup{ops, layer, {kGateProj, kUpProj}}.backward(a.gate_up, a.normed2, w.d_norm);
  step("8+7 RMSNorm, residual");
  ops.rms_norm_grad(w.d_norm, a.mid, layer.param(kPostNorm), a.rstd2, d_res, d_res_copy,
                    layer.grad(kPostNorm), accumulate);
  // Attention
  step("6 o_proj");
  LinearGroup{ops, layer, {kOProj}}.backward(d_res_p, a.att, w.d_att);
  step("5 attention");
  ops.attention_grad(qk.col_range(0, HD), qk.col_range(HD, HD + KD),
                     qkv.col_range(HD + KD, HD + 2 * KD), a.att, w.d_att, a.lse, s.attention(),
                     d_qkv.col_range(0, HD), d_qkv.col_range(HD, HD + KD),
                     d_qkv.col_range(HD + KD, HD + 2 * KD));
  step("4+3 RoPE, q-norm, k-norm");
  const Tensor d_qk = d_qkv.col_range(0, HD + KD);
  ops.qk_norm_rope_grad(d_qk, qkv.col_range(0, HD + KD), layer.param(kQNorm), layer.param(kKNorm),
                        w.rope, a.rstd_qk, s.attention(), d_qk, layer.grad(kQNorm),
                        layer.grad(kKNorm), accumulate);
  step("2 q/k/v");
  LinearGroup{ops, layer, {kQProj, kKProj, kVProj}}.backward(d_qkv, a.normed1, w.d_norm);
  step("1 input RMSNorm, residual");
  ops.rms_norm_grad(w.d_norm, a.x, layer.param(kInputNorm), a.rstd1, d_res, d_res_copy,
                    layer.grad(kInputNorm), accumulate);
}

}  // namespace qshard
