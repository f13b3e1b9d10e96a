// The CPU's operators. One caller at a time: they share a workspace (cast, fill, sum_parts, adamw
// and the sums do not use it and may run beside the others).
#pragma once

#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "device/ops.h"

namespace qshard::cpu {

class CpuOps final : public Ops {
 public:
  CpuOps(Device& device, int threads) : device_(device), team_(threads), gemm_(threads) {}

  void mark(const std::string&, const char*, const char*) override { device_.poll(); }
  void linear(Tensor x, Tensor w, Tensor y) override { gemm_.linear(x, w, y); }
  void linear_dgrad(Tensor dy, Tensor w, Tensor dx, bool accumulate) override {
    gemm_.linear_dgrad(dy, w, dx, accumulate);
  }
  void linear_wgrad(Tensor dy, Tensor x, Tensor dw, bool accumulate) override {
    gemm_.linear_wgrad(dy, x, dw, accumulate);
  }
  std::string products(DType param_dtype) const override { return gemm_.describe(param_dtype); }
  double measure_peak(DType param_dtype, double seconds) override;

  void embedding(Tensor ids, Tensor w, Tensor x) override;
  void embedding_grad(Tensor ids, Tensor dx, Tensor dw) override;

  void rms_norm(Tensor x, Tensor w, float eps, Tensor y, Tensor rstd) override;
  void add_rms_norm(Tensor x, Tensor delta, Tensor w, float eps, Tensor sum, Tensor y,
                    Tensor rstd) override;
  void add(Tensor x, Tensor delta, Tensor sum) override;
  void rms_norm_grad(Tensor dy, Tensor x, Tensor w, Tensor rstd, Tensor d_res, Tensor d_res_p,
                     Tensor dw, bool accumulate) override;

  void qk_norm_rope(Tensor qk_in, Tensor q_norm, Tensor k_norm, Tensor rope, float eps,
                    AttentionShape s, Tensor qk_out, Tensor rstd) override;
  void qk_norm_rope_grad(Tensor d_qk_out, Tensor qk_in, Tensor q_norm, Tensor k_norm, Tensor rope,
                         Tensor rstd, AttentionShape s, Tensor d_qk_in, Tensor dq_norm,
                         Tensor dk_norm, bool accumulate) override;

  void attention(Tensor q, Tensor k, Tensor v, AttentionShape s, Tensor o, Tensor lse) override;
  void attention_grad(Tensor q, Tensor k, Tensor v, Tensor o, Tensor d_o, Tensor lse,
                      AttentionShape s, Tensor dq, Tensor dk, Tensor dv) override;

  void swiglu(Tensor gu, Tensor a) override;
  void swiglu_grad(Tensor da, Tensor gu, Tensor d_gu) override;
  void cross_entropy(Tensor logits, Tensor labels, Factor scale, Tensor d_logits,
                     Tensor loss) override;

  void adamw(Tensor p, Tensor g, Tensor m, Tensor v, Tensor p_out, const AdamWStep& step) override;
  void add_sum(Tensor x, Tensor total) override;
  void add_sum_squares(Tensor x, Tensor total) override;
  void cast(Tensor from, Tensor to) override;
  void sum_parts(std::span<const Tensor> parts, Factor scale, Tensor out, bool accumulate) override;
  void init_normal(Tensor out, uint64_t seed, uint64_t stream, int64_t first, float std) override;
  void fill(Tensor out, float value) override;

 private:
  // At least `floats` floats, valid until the next call; the contents are undefined.
  float* workspace(int64_t floats);

  Device& device_;
  Team team_;
  Gemm gemm_;
  Buffer workspace_;
};

}  // namespace qshard::cpu
