#include "device/traced_ops.h"

#include <vector>

namespace qshard {
namespace {

OpTensor in(const char* name, const Tensor& t) { return {"in", name, t}; }
OpTensor weight(const char* name, const Tensor& t) { return {"weight", name, t}; }
OpTensor out(const char* name, const Tensor& t) { return {"out", name, t}; }

// Pairs (query, key) of all heads and sequences that a causal mask leaves.
int64_t causal_pairs(const AttentionShape& s) { return s.B * s.H * s.T * (s.T + 1) / 2; }

int64_t size(const Tensor& t) { return t ? static_cast<int64_t>(t.bytes()) : 0; }

// Of the rows that ids name, each as often as it is named.
int64_t row_bytes(const Tensor& ids, const Tensor& table) {
  return ids.numel() * table.cols() * static_cast<int64_t>(dtype_size(table.dtype));
}

int64_t product_flops(const Tensor& rows, const Tensor& w) {
  return 2 * rows.rows() * w.rows() * w.cols();
}

class TracedOps final : public Ops {
 public:
  TracedOps(std::unique_ptr<Ops> inner, Device& device, Trace& trace, OpObserver* observer)
      : inner_(std::move(inner)), device_(device), trace_(trace), observer_(observer) {}

  std::unique_ptr<Ops> take_inner() { return std::move(inner_); }

  void mark(const std::string& unit, const char* phase, const char* step) override {
    inner_->mark(unit, phase, step);
    trace_.mark(unit, phase, step);
  }

  void linear(Tensor x, Tensor w, Tensor y) override {
    run("linear", product_flops(x, w), {in("x", x), weight("w", w), out("y", y)},
        [&] { inner_->linear(x, w, y); });
  }
  void linear_dgrad(Tensor dy, Tensor w, Tensor dx, bool accumulate) override {
    run(
        "linear_dgrad", product_flops(dy, w), {in("dy", dy), weight("w", w), out("dx", dx)},
        [&] { inner_->linear_dgrad(dy, w, dx, accumulate); }, accumulate ? size(dx) : 0);
  }
  void linear_wgrad(Tensor dy, Tensor x, Tensor dw, bool accumulate) override {
    run(
        "linear_wgrad", product_flops(dy, dw), {in("dy", dy), in("x", x), out("dw", dw)},
        [&] { inner_->linear_wgrad(dy, x, dw, accumulate); }, accumulate ? size(dw) : 0);
  }

  void embedding(Tensor ids, Tensor w, Tensor x) override {
    run(
        "embedding", 0, {in("ids", ids), weight("w", w), out("x", x)},
        [&] { inner_->embedding(ids, w, x); }, row_bytes(ids, w) - size(w));
  }
  void embedding_grad(Tensor ids, Tensor dx, Tensor dw) override {
    run(
        "embedding_grad", dx.numel(), {in("ids", ids), in("dx", dx), out("dw", dw)},
        [&] { inner_->embedding_grad(ids, dx, dw); }, 2 * row_bytes(ids, dw) - size(dw));
  }

  // Square, add, times rstd, times w.
  void rms_norm(Tensor x, Tensor w, float eps, Tensor y, Tensor rstd) override {
    run("rms_norm", 4 * x.numel(), {in("x", x), weight("w", w), out("y", y), out("rstd", rstd)},
        [&] { inner_->rms_norm(x, w, eps, y, rstd); });
  }
  void add_rms_norm(Tensor x, Tensor delta, Tensor w, float eps, Tensor sum, Tensor y,
                    Tensor rstd) override {
    run("add_rms_norm", 5 * x.numel(),
        {in("x", x), in("delta", delta), weight("w", w), out("sum", sum), out("y", y),
         out("rstd", rstd)},
        [&] { inner_->add_rms_norm(x, delta, w, eps, sum, y, rstd); });
  }
  void add(Tensor x, Tensor delta, Tensor sum) override {
    run("add", x.numel(), {in("x", x), in("delta", delta), out("sum", sum)},
        [&] { inner_->add(x, delta, sum); });
  }
  void rms_norm_grad(Tensor dy, Tensor x, Tensor w, Tensor rstd, Tensor d_res, Tensor d_res_p,
                     Tensor dw, bool accumulate) override {
    run(
        "rms_norm_grad", 10 * x.numel(),
        {in("dy", dy), in("x", x), weight("w", w), in("rstd", rstd), out("d_res", d_res),
         out("dw", dw)},
        [&] { inner_->rms_norm_grad(dy, x, w, rstd, d_res, d_res_p, dw, accumulate); },
        size(d_res) + size(d_res_p) + (accumulate ? size(dw) : 0));
  }

  // The norm's 4 an element, the rotation's 3.
  void qk_norm_rope(Tensor qk_in, Tensor q_norm, Tensor k_norm, Tensor rope, float eps,
                    AttentionShape s, Tensor qk_out, Tensor rstd) override {
    run("qk_norm_rope", 7 * qk_in.numel(),
        {in("qk_in", qk_in), weight("q_norm", q_norm), weight("k_norm", k_norm), in("rope", rope),
         out("qk_out", qk_out), out("rstd", rstd)},
        [&] { inner_->qk_norm_rope(qk_in, q_norm, k_norm, rope, eps, s, qk_out, rstd); });
  }
  void qk_norm_rope_grad(Tensor d_qk_out, Tensor qk_in, Tensor q_norm, Tensor k_norm, Tensor rope,
                         Tensor rstd, AttentionShape s, Tensor d_qk_in, Tensor dq_norm,
                         Tensor dk_norm, bool accumulate) override {
    run(
        "qk_norm_rope_grad", 13 * qk_in.numel(),
        {in("d_qk_out", d_qk_out), in("qk_in", qk_in), weight("q_norm", q_norm),
         weight("k_norm", k_norm), in("rope", rope), in("rstd", rstd), out("d_qk_in", d_qk_in),
         out("dq_norm", dq_norm), out("dk_norm", dk_norm)},
        [&] {
          inner_->qk_norm_rope_grad(d_qk_out, qk_in, q_norm, k_norm, rope, rstd, s, d_qk_in,
                                    dq_norm, dk_norm, accumulate);
        },
        accumulate ? size(dq_norm) + size(dk_norm) : 0);
  }

  void attention(Tensor q, Tensor k, Tensor v, AttentionShape s, Tensor o, Tensor lse) override {
    run("attention", 4 * s.D * causal_pairs(s),
        {in("q", q), in("k", k), in("v", v), out("o", o), out("lse", lse)},
        [&] { inner_->attention(q, k, v, s, o, lse); });
  }
  void attention_grad(Tensor q, Tensor k, Tensor v, Tensor o, Tensor d_o, Tensor lse,
                      AttentionShape s, Tensor dq, Tensor dk, Tensor dv) override {
    run("attention_grad", 8 * s.D * causal_pairs(s),
        {in("q", q), in("k", k), in("v", v), in("o", o), in("d_o", d_o), in("lse", lse),
         out("dq", dq), out("dk", dk), out("dv", dv)},
        [&] { inner_->attention_grad(q, k, v, o, d_o, lse, s, dq, dk, dv); });
  }

  // The sigmoid counts 3.
  void swiglu(Tensor gu, Tensor a) override {
    run("swiglu", 5 * a.numel(), {in("gu", gu), out("a", a)}, [&] { inner_->swiglu(gu, a); });
  }
  void swiglu_grad(Tensor da, Tensor gu, Tensor d_gu) override {
    run("swiglu_grad", 10 * da.numel(), {in("da", da), in("gu", gu), out("d_gu", d_gu)},
        [&] { inner_->swiglu_grad(da, gu, d_gu); });
  }

  void cross_entropy(Tensor logits, Tensor labels, Factor scale, Tensor d_logits,
                     Tensor loss) override {
    run(
        "cross_entropy", 5 * logits.numel(),
        {in("logits", logits), in("labels", labels), out("loss", loss)},
        [&] { inner_->cross_entropy(logits, labels, scale, d_logits, loss); }, size(d_logits));
  }

  void adamw(Tensor p, Tensor g, Tensor m, Tensor v, Tensor p_out, const AdamWStep& s) override {
    run(
        "adamw", 14 * p.numel(), {in("g", g), out("p", p), out("m", m), out("v", v)},
        [&] { inner_->adamw(p, g, m, v, p_out, s); }, size(p) + size(m) + size(v) + size(p_out));
  }

  // Called by transports and for norms, losses and set-up: parts of other spans.
  void add_sum(Tensor x, Tensor total) override { inner_->add_sum(x, total); }
  void add_sum_squares(Tensor x, Tensor total) override { inner_->add_sum_squares(x, total); }
  void cast(Tensor from, Tensor to) override { inner_->cast(from, to); }
  void sum_parts(std::span<const Tensor> parts, Factor scale, Tensor to, bool accumulate) override {
    inner_->sum_parts(parts, scale, to, accumulate);
  }
  void init_normal(Tensor to, uint64_t seed, uint64_t stream, int64_t first, float std) override {
    inner_->init_normal(to, seed, stream, first, std);
  }
  void fill(Tensor to, float value) override { inner_->fill(to, value); }
  std::string products(DType param_dtype) const override { return inner_->products(param_dtype); }
  double measure_peak(DType param_dtype, double seconds) override {
    return inner_->measure_peak(param_dtype, seconds);
  }

 private:
  // more_bytes: of operands that are not in the list, or are read as well as written.
  template <typename Fn>
  void run(const char* name, int64_t flops, std::initializer_list<OpTensor> tensors, Fn operation,
           int64_t more_bytes = 0) {
    Span span = trace_.begin(Lane::compute, name);
    operation();
    if (trace_.recording()) {
      wait_for(*(tensors.end() - 1));
      span.flops = flops;
      span.bytes = more_bytes;
      for (const OpTensor& t : tensors) {
        span.bytes += size(t.tensor);
        span.tensors.push_back({t.role,
                                t.name,
                                std::string(dtype_name(t.tensor.dtype)),
                                {t.tensor.shape.begin(), t.tensor.shape.end()}});
      }
    }
    trace_.end(span);
    if (observer_) observer_->after(span, tensors);
  }

  // A copy is complete on return, after all that was asked of the device before.
  void wait_for(const OpTensor& result) {
    char byte = 0;
    if (result.tensor.numel() > 0) device_.copy(&byte, result.tensor.data, 1);
  }

  std::unique_ptr<Ops> inner_;
  Device& device_;
  Trace& trace_;
  OpObserver* observer_;
};

}  // namespace

std::unique_ptr<Ops> make_traced_ops(std::unique_ptr<Ops> ops, Device& device, Trace& trace,
                                     OpObserver* observer) {
  return std::make_unique<TracedOps>(std::move(ops), device, trace, observer);
}

TracedBackend::TracedBackend(Backend& backend, Trace& trace, OpObserver* observer)
    : backend_(backend) {
  backend.ops = make_traced_ops(std::move(backend.ops), *backend.device, trace, observer);
}

TracedBackend::~TracedBackend() {
  backend_.ops = static_cast<TracedOps&>(*backend_.ops).take_inner();
}

}  // namespace qshard
