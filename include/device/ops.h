// The operators of a Qwen3 step, behind one interface with one implementation a backend.
//
// Dimensions: N = B·T tokens, B sequences of T, C hidden, H query heads, K kv heads, D head_dim,
// F ffn, V vocabulary rows. dtypes: P = param_dtype (f32, bf16, fp16), R = dtype of the residual
// stream (f32 or P), everything else as stated. Sums, statistics, softmax and loss are f32 or
// wider. An output marked += adds to what is there; `accumulate` chooses between = and +=. Tensors
// may have ld > cols where a comment says "view". Results do not depend on the number of threads
// and are bitwise repeatable. Shapes are checked; a mismatch throws.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "device/device.h"
#include "device/factors.h"
#include "tensor/tensor.h"

namespace qshard {

// Causal attention with grouped kv heads. Query head h uses kv head h / (H / K).
struct AttentionShape {
  int64_t B, T, H, K, D;
};

// Bytes of a GPU that matrix products hold for themselves: what cuBLAS recommends for Hopper.
inline constexpr int64_t kGpuProductBytes = int64_t{32} << 20;

class Ops {
 public:
  virtual ~Ops() = default;

  // --- matrix products; w [O,I] as Hugging Face stores it. x, y, dx, dy may be views.
  virtual void linear(Tensor x, Tensor w, Tensor y) = 0;  // y[N,O] (P or f32) = x[N,I] (P) · wᵀ (P)
  virtual void linear_dgrad(Tensor dy, Tensor w, Tensor dx,
                            bool accumulate) = 0;  // dx[N,I] (P or f32) = dy[N,O] (P) · w
  virtual void linear_wgrad(Tensor dy, Tensor x, Tensor dw,
                            bool accumulate) = 0;  // dw[O,I] (f32) = dyᵀ (P) · x (P)

  // --- embedding. ids are i32 in [0, V), checked by the caller.
  virtual void embedding(Tensor ids, Tensor w, Tensor x) = 0;  // x[N,C] (R) = w[V,C] (P) rows
  virtual void embedding_grad(Tensor ids, Tensor dx,
                              Tensor dw) = 0;  // dw[V,C] (f32) += rows of dx (R), in token order

  // --- RMSNorm: y = x · rstd · w, rstd = 1/sqrt(mean(x²) + eps) over C.
  virtual void rms_norm(Tensor x, Tensor w, float eps, Tensor y,
                        Tensor rstd) = 0;  // x R, w,y P, rstd[N] f32
  // sum[N,C] (R) = x (R) + delta (P), then RMSNorm of sum. sum may be x.
  virtual void add_rms_norm(Tensor x, Tensor delta, Tensor w, float eps, Tensor sum, Tensor y,
                            Tensor rstd) = 0;
  virtual void add(Tensor x, Tensor delta,
                   Tensor sum) = 0;  // sum (R) = x (R) + delta (P); sum may be x
  // d_res[N,C] (R) += gradient through the norm of x, from dy (f32); d_res_p (P, or empty) gets a
  // copy of the new d_res for the products; dw[C] (f32) (+)= Σ_n dy·x·rstd.
  virtual void rms_norm_grad(Tensor dy, Tensor x, Tensor w, Tensor rstd, Tensor d_res,
                             Tensor d_res_p, Tensor dw, bool accumulate) = 0;

  // --- per-head q-norm and k-norm, then RoPE (element i pairs with i + D/2; positions 0…T-1).
  // qk_in: the first (H+K)·D columns of the q/k/v product, a view [N,(H+K)D]. rope: cos and sin,
  // f32 [T,D] = cos of the D/2 frequencies, then sin. qk_out [N,(H+K)D] P. rstd [N,H+K] f32.
  virtual void qk_norm_rope(Tensor qk_in, Tensor q_norm, Tensor k_norm, Tensor rope, float eps,
                            AttentionShape s, Tensor qk_out, Tensor rstd) = 0;
  // d_qk_out → d_qk_in (P, view; may be d_qk_out) and dq_norm[D], dk_norm[D] (f32, (+)=).
  virtual void qk_norm_rope_grad(Tensor d_qk_out, Tensor qk_in, Tensor q_norm, Tensor k_norm,
                                 Tensor rope, Tensor rstd, AttentionShape s, Tensor d_qk_in,
                                 Tensor dq_norm, Tensor dk_norm, bool accumulate) = 0;

  // --- attention: o = softmax(q·kᵀ/sqrt(D), causal)·v. q,o,dq,d_o [N,H·D], k,v,dk,dv [N,K·D], P,
  // all may be views. lse [B,H,T] f32 = log of the softmax's sum (natural log, scaled scores).
  // Memory linear in T. dq, dk, dv are overwritten.
  virtual void attention(Tensor q, Tensor k, Tensor v, AttentionShape s, Tensor o, Tensor lse) = 0;
  virtual void attention_grad(Tensor q, Tensor k, Tensor v, Tensor o, Tensor d_o, Tensor lse,
                              AttentionShape s, Tensor dq, Tensor dk, Tensor dv) = 0;

  // --- SwiGLU on the gate/up product gu [N,2F]: a[N,F] = silu(gate)·up, gate first. All P.
  virtual void swiglu(Tensor gu, Tensor a) = 0;
  virtual void swiglu_grad(Tensor da, Tensor gu, Tensor d_gu) = 0;  // d_gu may be gu

  // --- cross-entropy of one chunk of tokens. logits [n,V] f32; labels i32, -100 = ignored.
  // loss[n] (f32) = lse − logit[label], 0 where ignored. d_logits (P, view, or empty) =
  // (softmax − onehot)·scale, 0 rows where ignored; it may lie over logits with the same row start.
  virtual void cross_entropy(Tensor logits, Tensor labels, Factor scale, Tensor d_logits,
                             Tensor loss) = 0;

  // --- optimizer and element-wise
  // PyTorch's AdamW on one contiguous piece: p,g,m,v f32; p_out (P or empty) gets the rounded new
  // p.
  virtual void adamw(Tensor p, Tensor g, Tensor m, Tensor v, Tensor p_out,
                     const AdamWStep& step) = 0;
  // total (f64 [1]) += Σ x or Σ x², x f32, added up in f64 in a fixed order. The host reads the
  // total when it wants to, so a step can add many sums and wait for the device once.
  virtual void add_sum(Tensor x, Tensor total) = 0;
  virtual void add_sum_squares(Tensor x, Tensor total) = 0;
  virtual void cast(Tensor from,
                    Tensor to) = 0;  // f32 ↔ bf16/fp16, round to nearest even; also a plain copy
  // out (f32) (+)= scale · Σ_i parts[i], summed in the order of parts in f32; parts f32, bf16 or
  // fp16, n elements each.
  virtual void sum_parts(std::span<const Tensor> parts, Factor scale, Tensor out,
                         bool accumulate) = 0;
  // Element j of `out` (f32) = std · normal(seed, stream, first + j): counter-based, independent of
  // how the range is cut (Philox 4×32-10, Box–Muller). Ones when std is 0 is the caller's business.
  virtual void init_normal(Tensor out, uint64_t seed, uint64_t stream, int64_t first,
                           float std) = 0;
  virtual void fill(Tensor out, float value) = 0;  // f32, bf16, fp16

  // Names what the following operators are for, e.g. ("layers.0", "forward", "6 o_proj"): for a
  // traced backend, see [Note: Tracing]. On the CPU it is also where the device is polled.
  virtual void mark(const std::string& /*unit*/, const char* /*phase*/, const char* /*step*/) {}

  // What products of operands of this dtype are computed in, for the start log: "bf16".
  virtual std::string products(DType param_dtype) const {
    return std::string(dtype_name(param_dtype));
  }

  // FLOP/s of a large product on this rank's threads, measured now for about `seconds`.
  virtual double measure_peak(DType param_dtype, double seconds) = 0;
};

// One backend: a device and its operators. Made by make_backend() in src/backends.cpp.
struct Backend {
  Backend() = default;
  Backend(Backend&&) = default;
  Backend& operator=(Backend&& other) noexcept {
    ops = std::move(other.ops);  // first: the old operators hold memory of the old device
    device = std::move(other.device);
    return *this;
  }

  std::unique_ptr<Device> device;
  std::unique_ptr<Ops> ops;
};

}  // namespace qshard
