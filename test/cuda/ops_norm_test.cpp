#include "cuda_ops_reference.h"

namespace qshard {
namespace {

constexpr float kEps = 1e-5f;

struct Dims {
  int64_t N, C, gap;
};

class CudaRmsNorm : public testing::TestWithParam<std::tuple<std::pair<DType, DType>, Dims>> {
 protected:
  Twin residual(uint32_t seed) const { return Twin::random(R_, d_.N, d_.C, seed, d_.gap); }
  Twin param(uint32_t seed) const { return Twin::random(P_, d_.N, d_.C, seed, d_.gap); }

  DType R_ = std::get<0>(GetParam()).first, P_ = std::get<0>(GetParam()).second;
  Dims d_ = std::get<1>(GetParam());
  Twin w_ = Twin::random(P_, 1, d_.C, 2);
  Twin rstd_{DType::f32, 1, d_.N};
};

TEST_P(CudaRmsNorm, Forward) {
  Twin x = residual(1), y = param(9);
  cuda_ops().rms_norm(x.gpu(), w_.gpu_vector(), kEps, y.gpu(), rstd_.gpu_vector());
  cpu_ops().rms_norm(x.cpu(), w_.cpu_vector(), kEps, y.cpu(), rstd_.cpu_vector());
  EXPECT_LT(error_of(y.download(), y.host()), tolerance(P_));
  EXPECT_LT(error_of(rstd_.download(), rstd_.host()), 1e-6);
}

TEST_P(CudaRmsNorm, OfASum) {
  Twin x = residual(1), delta = param(3), sum = residual(9), y = param(9), plain = residual(9);
  cuda_ops().add_rms_norm(x.gpu(), delta.gpu(), w_.gpu_vector(), kEps, sum.gpu(), y.gpu(),
                          rstd_.gpu_vector());
  cpu_ops().add_rms_norm(x.cpu(), delta.cpu(), w_.cpu_vector(), kEps, sum.cpu(), y.cpu(),
                         rstd_.cpu_vector());
  EXPECT_LT(error_of(sum.download(), sum.host()), tolerance(R_));
  EXPECT_LT(error_of(y.download(), y.host()), tolerance(P_) + tolerance(R_));
  EXPECT_LT(error_of(rstd_.download(), rstd_.host()), tolerance(R_));

  // The norm is that of the stored sum, so it is the same in two steps.
  cuda_ops().add(x.gpu(), delta.gpu(), plain.gpu());
  EXPECT_EQ(plain.download(), sum.download());
  Twin again = param(9);
  cuda_ops().rms_norm(plain.gpu(), w_.gpu_vector(), kEps, again.gpu(), rstd_.gpu_vector());
  EXPECT_EQ(again.download(), y.download());

  // In place.
  cuda_ops().add_rms_norm(x.gpu(), delta.gpu(), w_.gpu_vector(), kEps, x.gpu(), again.gpu(),
                          rstd_.gpu_vector());
  EXPECT_EQ(x.download(), sum.download());
}

TEST_P(CudaRmsNorm, Gradients) {
  Twin x = residual(1), d_res = residual(5), copy = param(9), y = param(9);
  Twin dy = Twin::random(DType::f32, d_.N, d_.C, 4, d_.gap),
       dw = Twin::random(DType::f32, 1, d_.C, 6);
  cuda_ops().rms_norm(x.gpu(), w_.gpu_vector(), kEps, y.gpu(), rstd_.gpu_vector());
  cpu_ops().rms_norm(x.cpu(), w_.cpu_vector(), kEps, y.cpu(), rstd_.cpu_vector());
  cuda_ops().rms_norm_grad(dy.gpu(), x.gpu(), w_.gpu_vector(), rstd_.gpu_vector(), d_res.gpu(),
                           copy.gpu(), dw.gpu_vector(), true);
  cpu_ops().rms_norm_grad(dy.cpu(), x.cpu(), w_.cpu_vector(), rstd_.cpu_vector(), d_res.cpu(),
                          copy.cpu(), dw.cpu_vector(), true);
  EXPECT_LT(error_of(d_res.download(), d_res.host()), tolerance(R_));
  EXPECT_LT(error_of(copy.download(), copy.host()), tolerance(P_));
  EXPECT_LT(error_of(dw.download(), dw.host()), tolerance(DType::f32));

  cuda_ops().rms_norm_grad(dy.gpu(), x.gpu(), w_.gpu_vector(), rstd_.gpu_vector(), d_res.gpu(), {},
                           dw.gpu_vector(), false);
  cpu_ops().rms_norm_grad(dy.cpu(), x.cpu(), w_.cpu_vector(), rstd_.cpu_vector(), d_res.cpu(), {},
                          dw.cpu_vector(), false);
  EXPECT_LT(error_of(dw.download(), dw.host()), tolerance(DType::f32));
  EXPECT_LT(error_of(d_res.download(), d_res.host()), 2 * tolerance(R_));
}

// Vectors and single elements; one chunk a thread and several; partial blocks of tokens.
INSTANTIATE_TEST_SUITE_P(Shapes, CudaRmsNorm,
                         testing::Combine(dtype_pairs(),
                                          testing::Values(Dims{1, 1, 0}, Dims{3, 7, 5},
                                                          Dims{19, 64, 8}, Dims{33, 40, 0},
                                                          Dims{2, 520, 3}, Dims{2, 8200, 0})));

TEST(CudaNormEdges, NoTokens) {
  Twin x(DType::f32, 0, 8), w = Twin::random(DType::f32, 1, 8, 1), rstd(DType::f32, 1, 0);
  Twin dw = Twin::random(DType::f32, 1, 8, 2);
  cuda_ops().rms_norm_grad(x.gpu(), x.gpu(), w.gpu_vector(), rstd.gpu_vector(), x.gpu(), {},
                           dw.gpu_vector(), true);
  EXPECT_EQ(dw.download(), dw.host());
  cuda_ops().rms_norm_grad(x.gpu(), x.gpu(), w.gpu_vector(), rstd.gpu_vector(), x.gpu(), {},
                           dw.gpu_vector(), false);
  EXPECT_EQ(dw.download(), Floats(8, 0));
}

// --- q-norm, k-norm and RoPE
class CudaQkNorm : public testing::TestWithParam<std::tuple<DType, AttentionShape, int64_t>> {};

Floats rope_table(const AttentionShape& s) {
  Floats table;
  for (int64_t t = 0; t < s.T; ++t)
    for (int part = 0; part < 2; ++part)
      for (int64_t i = 0; i < s.D / 2; ++i) {
        const double angle =
            static_cast<double>(t) *
            std::pow(100.0, -2.0 * static_cast<double>(i) / static_cast<double>(s.D));
        table.push_back(static_cast<float>(part == 0 ? std::cos(angle) : std::sin(angle)));
      }
  return table;
}

TEST_P(CudaQkNorm, ForwardAndGradients) {
  const auto [dtype, s, gap] = GetParam();
  const int64_t N = s.B * s.T, cols = (s.H + s.K) * s.D;
  Twin in = Twin::random(dtype, N, cols, 1, gap, 2), out(dtype, N, cols);
  Twin q_norm = Twin::random(dtype, 1, s.D, 2), k_norm = Twin::random(dtype, 1, s.D, 3);
  Twin rope(DType::f32, s.T, s.D, rope_table(s)), rstd(DType::f32, N, s.H + s.K);
  cuda_ops().qk_norm_rope(in.gpu(), q_norm.gpu_vector(), k_norm.gpu_vector(), rope.gpu(), kEps, s,
                          out.gpu(), rstd.gpu());
  cpu_ops().qk_norm_rope(in.cpu(), q_norm.cpu_vector(), k_norm.cpu_vector(), rope.cpu(), kEps, s,
                         out.cpu(), rstd.cpu());
  EXPECT_LT(error_of(out.download(), out.host()), tolerance(dtype));
  EXPECT_LT(error_of(rstd.download(), rstd.host()), 1e-6);

  Twin d_out = Twin::random(dtype, N, cols, 4), d_in(dtype, N, cols, gap);
  Twin dq = Twin::random(DType::f32, 1, s.D, 5), dk = Twin::random(DType::f32, 1, s.D, 6);
  for (bool accumulate : {true, false}) {
    cuda_ops().qk_norm_rope_grad(d_out.gpu(), in.gpu(), q_norm.gpu_vector(), k_norm.gpu_vector(),
                                 rope.gpu(), rstd.gpu(), s, d_in.gpu(), dq.gpu_vector(),
                                 dk.gpu_vector(), accumulate);
    cpu_ops().qk_norm_rope_grad(d_out.cpu(), in.cpu(), q_norm.cpu_vector(), k_norm.cpu_vector(),
                                rope.cpu(), rstd.cpu(), s, d_in.cpu(), dq.cpu_vector(),
                                dk.cpu_vector(), accumulate);
    EXPECT_LT(error_of(d_in.download(), d_in.host()), tolerance(dtype));
    EXPECT_LT(error_of(dq.download(), dq.host()), tolerance(DType::f32));
    EXPECT_LT(error_of(dk.download(), dk.host()), tolerance(DType::f32));
  }

  // In place: the same bits.
  cuda_ops().qk_norm_rope_grad(d_out.gpu(), in.gpu(), q_norm.gpu_vector(), k_norm.gpu_vector(),
                               rope.gpu(), rstd.gpu(), s, d_out.gpu(), dq.gpu_vector(),
                               dk.gpu_vector(), false);
  EXPECT_EQ(d_out.download(), d_in.download());
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CudaQkNorm,
    testing::Combine(testing::Values(DType::f32, DType::bf16, DType::fp16),
                     testing::Values(AttentionShape{1, 1, 1, 1, 2}, AttentionShape{2, 3, 2, 1, 4},
                                     AttentionShape{1, 5, 3, 3, 10}, AttentionShape{2, 9, 4, 2, 64},
                                     AttentionShape{1, 17, 2, 1, 128},
                                     AttentionShape{1, 3, 1, 1, 80}),
                     testing::Values(0, 8, 9)));

TEST(CudaNormErrors, Shapes) {
  Twin x(DType::f32, 4, 8), w(DType::f32, 1, 7), w8(DType::f32, 1, 8), y(DType::bf16, 4, 8);
  Twin rstd(DType::f32, 1, 4);
  auto& ops = cuda_ops();
  EXPECT_THROW(ops.rms_norm(x.gpu(), w.gpu_vector(), kEps, x.gpu(), rstd.gpu_vector()), Error);
  EXPECT_THROW(ops.rms_norm(x.gpu(), w8.gpu_vector(), kEps, y.gpu(), rstd.gpu_vector()), Error);
  EXPECT_THROW(ops.rms_norm(y.gpu(), w8.gpu_vector(), kEps, x.gpu(), rstd.gpu_vector()), Error);
  EXPECT_THROW(ops.add(x.gpu(), w8.gpu(), x.gpu()), Error);
  Twin wide(DType::f32, 1, 20000), one(DType::f32, 1, 1);
  EXPECT_THROW(ops.rms_norm(wide.gpu(), wide.gpu_vector(), kEps, wide.gpu(), one.gpu_vector()),
               Error);
  Twin rope(DType::f32, 4, 3), qk(DType::f32, 4, 6), three(DType::f32, 1, 3),
      heads(DType::f32, 4, 2);
  EXPECT_THROW(ops.qk_norm_rope(qk.gpu(), three.gpu_vector(), three.gpu_vector(), rope.gpu(), kEps,
                                {1, 4, 1, 1, 3}, qk.gpu(), heads.gpu()),
               Error);
}

}  // namespace
}  // namespace qshard
