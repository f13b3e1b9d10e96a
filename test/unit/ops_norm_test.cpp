#include "ops_reference.h"

namespace qshard {
namespace {

constexpr float kEps = 1e-5f;

struct Dims {
  int64_t N, C, gap;
};

Values rms_norm(const Values& x, const Values& w, size_t C) {
  Values y;
  for (size_t row = 0; row < x.size(); row += C) {
    double squares = 0;
    for (size_t c = 0; c < C; ++c) squares += x[row + c] * x[row + c];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(C) + double{kEps});
    for (size_t c = 0; c < C; ++c) y.push_back(x[row + c] * rstd * w[c]);
  }
  return y;
}

class RmsNorm : public testing::TestWithParam<std::tuple<DType, DType, Dims>> {
 protected:
  DType residual_ = std::get<0>(GetParam()), param_ = std::get<1>(GetParam());
  Dims d_ = std::get<2>(GetParam());
  size_t C_ = static_cast<size_t>(d_.C);
  Matrix x_ = Matrix::random(residual_, d_.N, d_.C, 1, 3, d_.gap);
  Matrix w_ = Matrix::random(param_, 1, d_.C, 2);
  Matrix rstd_{DType::f32, 1, d_.N};
};

TEST_P(RmsNorm, Forward) {
  Matrix y(param_, d_.N, d_.C, d_.gap);
  test_ops().rms_norm(x_.tensor(), w_.vector(), kEps, y.tensor(), rstd_.vector());
  EXPECT_LT(error_of(y.values(), rms_norm(x_.values(), w_.values(), C_)), tolerance(param_));
  EXPECT_TRUE(y.gaps_untouched());
  for (int64_t n = 0; n < d_.N; ++n) {
    double squares = 0;
    for (int64_t c = 0; c < d_.C; ++c) squares += x_.get(n, c) * x_.get(n, c);
    const double expected = 1 / std::sqrt(squares / static_cast<double>(d_.C) + double{kEps});
    EXPECT_NEAR(rstd_.get(0, n) / expected, 1, 1e-6);
  }
}

// Values whose squares are as small as epsilon, which belongs inside the root.
TEST_P(RmsNorm, OfSmallValues) {
  Matrix x = Matrix::random(residual_, d_.N, d_.C, 4, 3e-3, d_.gap);
  Matrix y(param_, d_.N, d_.C, d_.gap);
  test_ops().rms_norm(x.tensor(), w_.vector(), kEps, y.tensor(), rstd_.vector());
  EXPECT_LT(error_of(y.values(), rms_norm(x.values(), w_.values(), C_)), tolerance(param_));
}

TEST_P(RmsNorm, OfASum) {
  Matrix delta = Matrix::random(param_, d_.N, d_.C, 3, 1, d_.gap);
  Matrix sum(residual_, d_.N, d_.C), y(param_, d_.N, d_.C);
  test_ops().add_rms_norm(x_.tensor(), delta.tensor(), w_.vector(), kEps, sum.tensor(), y.tensor(),
                          rstd_.vector());
  EXPECT_LT(error_of(sum.values(), sum_of(x_.values(), delta.values())), tolerance(residual_));
  EXPECT_LT(error_of(y.values(), rms_norm(sum.values(), w_.values(), C_)), tolerance(param_));

  Matrix plain(residual_, d_.N, d_.C);
  test_ops().add(x_.tensor(), delta.tensor(), plain.tensor());
  EXPECT_EQ(plain.bytes(), sum.bytes());

  Matrix in_place = x_;
  test_ops().add(in_place.tensor(), delta.tensor(), in_place.tensor());
  EXPECT_EQ(in_place.values(), sum.values());
  in_place = x_;
  test_ops().add_rms_norm(in_place.tensor(), delta.tensor(), w_.vector(), kEps, in_place.tensor(),
                          y.tensor(), rstd_.vector());
  EXPECT_EQ(in_place.values(), sum.values());
  EXPECT_TRUE(in_place.gaps_untouched());
}

TEST_P(RmsNorm, Gradients) {
  Matrix y(param_, d_.N, d_.C);
  test_ops().rms_norm(x_.tensor(), w_.vector(), kEps, y.tensor(), rstd_.vector());
  Matrix dy = Matrix::random(DType::f32, d_.N, d_.C, 4);
  Matrix d_res = Matrix::random(residual_, d_.N, d_.C, 5, 1, d_.gap);
  Matrix copy(param_, d_.N, d_.C, d_.gap), dw = Matrix::random(DType::f32, 1, d_.C, 6);
  const Values d_res_before = d_res.values(), dw_before = dw.values();
  test_ops().rms_norm_grad(dy.tensor(), x_.tensor(), w_.vector(), rstd_.vector(), d_res.tensor(),
                           copy.tensor(), dw.vector(), true);

  const Values x = x_.values(), w = w_.values(), g = dy.values();
  const Values dx =
      numeric_gradient(x, [&](const Values& v) { return dot(rms_norm(v, w, C_), g); });
  const Values d_w =
      numeric_gradient(w, [&](const Values& v) { return dot(rms_norm(x, v, C_), g); });
  EXPECT_LT(error_of(d_res.values(), sum_of(dx, d_res_before)), tolerance(residual_));
  EXPECT_LT(error_of(copy.values(), sum_of(dx, d_res_before)), tolerance(param_));
  EXPECT_LT(error_of(dw.values(), sum_of(d_w, dw_before)), tolerance(DType::f32));
  EXPECT_TRUE(d_res.gaps_untouched() && copy.gaps_untouched());

  test_ops().rms_norm_grad(dy.tensor(), x_.tensor(), w_.vector(), rstd_.vector(), d_res.tensor(),
                           {}, dw.vector(), false);
  EXPECT_LT(error_of(dw.values(), d_w), tolerance(DType::f32));
}

const auto kDims =
    testing::Values(Dims{1, 1, 0}, Dims{3, 7, 5}, Dims{5, 16, 0}, Dims{2, 33, 1}, Dims{67, 12, 0});
INSTANTIATE_TEST_SUITE_P(F32, RmsNorm,
                         testing::Combine(testing::Values(DType::f32), testing::Values(DType::f32),
                                          kDims));
INSTANTIATE_TEST_SUITE_P(Bf16, RmsNorm,
                         testing::Combine(testing::Values(DType::f32, DType::bf16),
                                          testing::Values(DType::bf16), kDims));
INSTANTIATE_TEST_SUITE_P(Fp16, RmsNorm,
                         testing::Combine(testing::Values(DType::f32, DType::fp16),
                                          testing::Values(DType::fp16), kDims));

// --- q-norm, k-norm and RoPE
Values rope_table(const AttentionShape& s) {
  Values table;
  for (int64_t t = 0; t < s.T; ++t)
    for (int part = 0; part < 2; ++part)
      for (int64_t i = 0; i < s.D / 2; ++i) {
        const double angle =
            static_cast<double>(t) *
            std::pow(100.0, -2.0 * static_cast<double>(i) / static_cast<double>(s.D));
        table.push_back(part == 0 ? std::cos(angle) : std::sin(angle));
      }
  return table;
}

struct QkNormRope {
  AttentionShape s;
  Values rope;

  Values operator()(const Values& x, const Values& q_norm, const Values& k_norm) const {
    const auto D = static_cast<size_t>(s.D), heads = static_cast<size_t>(s.H + s.K);
    Values out(x.size());
    for (size_t row = 0; row < x.size() / D; ++row) {
      const size_t token = row / heads, head = row % heads, t = token % static_cast<size_t>(s.T);
      const Values in(x.begin() + static_cast<long>(row * D),
                      x.begin() + static_cast<long>((row + 1) * D));
      const Values y = rms_norm(in, head < static_cast<size_t>(s.H) ? q_norm : k_norm, D);
      for (size_t i = 0; i < D / 2; ++i) {
        const double cos = rope[t * D + i], sin = rope[t * D + D / 2 + i];
        out[row * D + i] = y[i] * cos - y[i + D / 2] * sin;
        out[row * D + i + D / 2] = y[i + D / 2] * cos + y[i] * sin;
      }
    }
    return out;
  }
};

class QkNorm : public testing::TestWithParam<std::tuple<DType, AttentionShape, int64_t>> {};

TEST_P(QkNorm, ForwardAndGradients) {
  const auto [dtype, s, gap] = GetParam();
  const int64_t N = s.B * s.T, cols = (s.H + s.K) * s.D;
  Matrix in = Matrix::random(dtype, N, cols, 1, 2, gap);
  Matrix q_norm = Matrix::random(dtype, 1, s.D, 2), k_norm = Matrix::random(dtype, 1, s.D, 3);
  Matrix rope(DType::f32, s.T, s.D, rope_table(s)), rstd(DType::f32, N, s.H + s.K);
  Matrix out(dtype, N, cols);
  const QkNormRope reference{s, rope.values()};
  test_ops().qk_norm_rope(in.tensor(), q_norm.vector(), k_norm.vector(), rope.tensor(), kEps, s,
                          out.tensor(), rstd.tensor());
  const Values x = in.values(), wq = q_norm.values(), wk = k_norm.values();
  EXPECT_LT(error_of(out.values(), reference(x, wq, wk)), tolerance(dtype));

  Matrix d_out = Matrix::random(dtype, N, cols, 4), d_in(dtype, N, cols, gap);
  Matrix dq = Matrix::random(DType::f32, 1, s.D, 5), dk = Matrix::random(DType::f32, 1, s.D, 6);
  const Values g = d_out.values(), dq_before = dq.values(), dk_before = dk.values();
  test_ops().qk_norm_rope_grad(d_out.tensor(), in.tensor(), q_norm.vector(), k_norm.vector(),
                               rope.tensor(), rstd.tensor(), s, d_in.tensor(), dq.vector(),
                               dk.vector(), true);
  const auto gradient = [&](const Values& at, auto&& f) {
    return numeric_gradient(at, [&](const Values& v) { return dot(f(v), g); });
  };
  const Values dx = gradient(x, [&](const Values& v) { return reference(v, wq, wk); });
  const Values d_wq = gradient(wq, [&](const Values& v) { return reference(x, v, wk); });
  const Values d_wk = gradient(wk, [&](const Values& v) { return reference(x, wq, v); });
  EXPECT_LT(error_of(d_in.values(), dx), tolerance(dtype));
  EXPECT_LT(error_of(dq.values(), sum_of(d_wq, dq_before)), tolerance(DType::f32));
  EXPECT_LT(error_of(dk.values(), sum_of(d_wk, dk_before)), tolerance(DType::f32));
  EXPECT_TRUE(d_in.gaps_untouched());

  Matrix in_place = d_out;
  test_ops().qk_norm_rope_grad(in_place.tensor(), in.tensor(), q_norm.vector(), k_norm.vector(),
                               rope.tensor(), rstd.tensor(), s, in_place.tensor(), dq.vector(),
                               dk.vector(), false);
  EXPECT_EQ(in_place.values(), d_in.values());
  EXPECT_LT(error_of(dq.values(), d_wq), tolerance(DType::f32));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, QkNorm,
    testing::Combine(testing::Values(DType::f32, DType::bf16, DType::fp16),
                     testing::Values(AttentionShape{1, 1, 1, 1, 2}, AttentionShape{2, 3, 2, 1, 4},
                                     AttentionShape{1, 5, 3, 3, 10}, AttentionShape{1, 2, 4, 2, 32},
                                     AttentionShape{2, 35, 1, 1, 6}),
                     testing::Values(0, 9)));

TEST(NormErrors, Shapes) {
  Matrix x(DType::f32, 4, 8), w(DType::f32, 1, 7), y(DType::bf16, 4, 8), rstd(DType::f32, 1, 4);
  Matrix w8(DType::f32, 1, 8), half(DType::bf16, 1, 8);
  EXPECT_THROW(test_ops().rms_norm(x.tensor(), w.vector(), kEps, x.tensor(), rstd.vector()), Error);
  EXPECT_THROW(test_ops().rms_norm(x.tensor(), w8.vector(), kEps, y.tensor(), rstd.vector()),
               Error);
  EXPECT_THROW(test_ops().rms_norm(y.tensor(), w8.vector(), kEps, x.tensor(), rstd.vector()),
               Error);
  EXPECT_THROW(test_ops().add(x.tensor(), w8.tensor(), x.tensor()), Error);
  EXPECT_THROW(test_ops().rms_norm_grad(x.tensor(), x.tensor(), w8.vector(), rstd.vector(),
                                        x.tensor(), y.tensor(), w8.vector(), false),
               Error);
  Matrix rope(DType::f32, 4, 3), qk(DType::f32, 4, 6), three(DType::f32, 1, 3),
      heads(DType::f32, 4, 2);
  EXPECT_THROW(test_ops().qk_norm_rope(qk.tensor(), three.vector(), three.vector(), rope.tensor(),
                                       kEps, {1, 4, 1, 1, 3}, qk.tensor(), heads.tensor()),
               Error);
}

}  // namespace
}  // namespace qshard
