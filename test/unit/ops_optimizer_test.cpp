#include "ops_reference.h"

namespace qshard {
namespace {

// --- AdamW
struct AdamWReference {
  Values p, m, v;

  void step(const Values& g, const AdamWStep& s) {
    const double t = static_cast<double>(s.step), b1 = s.beta1, b2 = s.beta2, lr = s.lr;
    for (size_t i = 0; i < p.size(); ++i) {
      const double grad = g[i] * s.grad_scale;
      p[i] *= 1 - lr * s.weight_decay;
      m[i] = b1 * m[i] + (1 - b1) * grad;
      v[i] = b2 * v[i] + (1 - b2) * grad * grad;
      const double root = std::sqrt(v[i]) / std::sqrt(1 - std::pow(b2, t)) + s.eps;
      p[i] -= lr / (1 - std::pow(b1, t)) * m[i] / root;
    }
  }
};

class AdamW : public testing::TestWithParam<std::tuple<DType, int64_t, float>> {};

TEST_P(AdamW, FollowsTheFormula) {
  const auto [dtype, n, decay] = GetParam();
  Matrix p = Matrix::random(DType::f32, 1, n, 1), m(DType::f32, 1, n), v(DType::f32, 1, n);
  test_ops().fill(m.vector(), 0);
  test_ops().fill(v.vector(), 0);
  Matrix p_out(dtype, 1, n);
  AdamWReference reference{p.values(), m.values(), v.values()};
  for (uint32_t step = 1; step <= 5; ++step) {
    // Gradients from 1 to below eps, some zero.
    Matrix g = Matrix::random(DType::f32, 1, n, 10 + step);
    for (int64_t i = 0; i < n; ++i)
      g.set(0, i, i % 7 == 0 ? 0 : g.get(0, i) * std::pow(10.0, -static_cast<double>(i % 11)));
    const AdamWStep s{1e-2f, 0.9f, 0.95f, 1e-8f, decay, step, 0.5f};
    test_ops().adamw(p.vector(), g.vector(), m.vector(), v.vector(), p_out.vector(), s);
    reference.step(g.values(), s);
  }
  EXPECT_LT(error_of(p.values(), reference.p), 1e-6);
  EXPECT_LT(error_of(m.values(), reference.m), 1e-6);
  EXPECT_LT(error_of(v.values(), reference.v), 1e-6);
  for (int64_t i = 0; i < n; ++i) EXPECT_EQ(p_out.get(0, i), rounded(dtype, p.get(0, i)));
}
INSTANTIATE_TEST_SUITE_P(Sizes, AdamW,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16),
                                          testing::Values(1, 16, 1000),
                                          testing::Values(0.f, 0.1f)));

TEST(AdamWEdges, LateStepsAndNoCopy) {
  Matrix p(DType::f32, 1, 2, {1, -1}), g(DType::f32, 1, 2, {1, 1}), m(DType::f32, 1, 2, {0, 0}),
      v(DType::f32, 1, 2, {0, 0});
  AdamWReference reference{p.values(), m.values(), v.values()};
  const AdamWStep s{1e-3f, 0.9f, 0.999f, 1e-8f, 0.1f, 1'000'000, 1.f};
  test_ops().adamw(p.vector(), g.vector(), m.vector(), v.vector(), {}, s);
  reference.step(g.values(), s);
  EXPECT_LT(error_of(p.values(), reference.p), 1e-6);
  EXPECT_THROW(
      test_ops().adamw(p.vector(), g.vector(), m.vector(), v.vector(), {}, {1, 0, 0, 0, 0, 0, 1}),
      Error);
}

TEST(AdamWEdges, FactorsInMemoryGiveTheSameBits) {
  constexpr int64_t n = 37;
  const AdamWStep given{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 3, 0.5f};
  const AdamWFactors factors = given.factors();
  const AdamWStep read{7, 0.9f, 0.95f, 1e-8f, 7, 0, 7, &factors};
  Values results[2];
  for (const AdamWStep& s : {given, read}) {
    Matrix p = Matrix::random(DType::f32, 1, n, 1), g = Matrix::random(DType::f32, 1, n, 2),
           m = Matrix::random(DType::f32, 1, n, 3), v(DType::f32, 1, n);
    test_ops().fill(v.vector(), 0.25f);
    test_ops().adamw(p.vector(), g.vector(), m.vector(), v.vector(), {}, s);
    results[s.on_device != nullptr] = p.values();
  }
  EXPECT_EQ(results[0], results[1]);
}

// --- sums
double total_of(Tensor x) {
  double total = 0;
  test_ops().add_sum(x, Tensor::of(&total, {1}));
  return total;
}

double total_of_squares(Tensor x) {
  double total = 0;
  test_ops().add_sum_squares(x, Tensor::of(&total, {1}));
  return total;
}

TEST(Sums, AreF64) {
  constexpr int64_t n = 200'003;  // several pieces and a tail
  Matrix x = Matrix::random(DType::f32, 1, n, 1);
  x.set(0, 5, 1e6);
  long double sum = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += x.get(0, i);
    squares += x.get(0, i) * x.get(0, i);
  }
  EXPECT_NEAR(total_of(x.vector()) / static_cast<double>(sum), 1, 1e-12);
  EXPECT_NEAR(total_of_squares(x.vector()) / static_cast<double>(squares), 1, 1e-12);
  EXPECT_EQ(total_of(x.vector().row_range(0, 0)), 0);
  EXPECT_EQ(total_of(x.vector().row_range(5, 6)), 1e6);
  Matrix nan(DType::f32, 1, 3, {1, std::nan(""), 2});
  EXPECT_TRUE(std::isnan(total_of_squares(nan.vector())));
}

TEST(Sums, AreAddedToTheTotal) {
  Matrix x(DType::f32, 1, 3, {1, 2, 3});
  double total = 0.5;
  const Tensor t = Tensor::of(&total, {1});
  test_ops().add_sum(x.vector(), t);
  EXPECT_EQ(total, 6.5);
  test_ops().add_sum_squares(x.vector(), t);
  EXPECT_EQ(total, 20.5);
}

TEST(SumParts, InOrder) {
  constexpr int64_t n = 45;
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    std::vector<Matrix> parts;
    std::vector<Tensor> tensors;
    for (uint32_t i = 0; i < 5; ++i)
      parts.push_back(Matrix::random(dtype, 1, n, i, std::pow(100, i % 3)));
    for (Matrix& part : parts) tensors.push_back(part.vector());
    Matrix out = Matrix::random(DType::f32, 1, n, 9), added = out;
    Values expected, expected_added;
    for (int64_t i = 0; i < n; ++i) {
      float sum = 0;
      for (Matrix& part : parts) sum += static_cast<float>(part.get(0, i));
      expected.push_back(sum * 0.25f);
      expected_added.push_back(sum * 0.25f + static_cast<float>(out.get(0, i)));
    }
    test_ops().sum_parts(tensors, 0.25f, out.vector(), false);
    EXPECT_EQ(out.values(), expected);
    test_ops().sum_parts(tensors, 0.25f, added.vector(), true);
    EXPECT_EQ(added.values(), expected_added);

    const float scale = 0.25f;
    test_ops().sum_parts(tensors, Factor::of(&scale), out.vector(), false);
    EXPECT_EQ(out.values(), expected);

    std::reverse(tensors.begin(), tensors.end());
    test_ops().sum_parts(tensors, 0.25f, added.vector(), false);
    EXPECT_NE(added.values(), expected);  // the order is seen
  }
}

// Sums so large that whole vectors are streamed: at any alignment, with a part of a vector at the
// end.
TEST(SumParts, LargeOnes) {
  constexpr int64_t n = (1 << 15) + 5;
  const auto value = [](int64_t part, int64_t i) { return static_cast<float>((i + part) % 1000); };
  std::vector<std::vector<float>> parts(3, std::vector<float>(n));
  std::vector<Tensor> tensors;
  for (int64_t p = 0; p < 3; ++p) {
    for (int64_t i = 0; i < n; ++i) parts[p][i] = value(p, i);
    tensors.push_back(Tensor(parts[p].data(), DType::f32, {n}));
  }
  std::vector<float> out(n + 64);
  for (int64_t start = 0; start < 32; ++start) {
    std::fill(out.begin(), out.end(), -7.f);
    test_ops().sum_parts(tensors, 0.5f, Tensor(out.data() + start, DType::f32, {n}), false);
    for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
      const bool inside = start <= i && i < start + n;
      const int64_t at = i - start;
      const float sum = value(0, at) + value(1, at) + value(2, at);
      ASSERT_EQ(out[i], inside ? 0.5f * sum : -7.f) << start << " " << i;
    }
  }
}

// --- casts. All patterns and ties are in ops_vec_test.
TEST(Cast, RoundsViewsAndBack) {
  Matrix from = Matrix::random(DType::f32, 3, 37, 1, 1, 5);
  for (DType dtype : {DType::bf16, DType::fp16}) {
    Matrix to(dtype, 3, 37, 2), back(DType::f32, 3, 37, 1);
    test_ops().cast(from.tensor(), to.tensor());
    test_ops().cast(to.tensor(), back.tensor());
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t j = 0; j < 37; ++j) {
        EXPECT_EQ(to.get(i, j), rounded(dtype, from.get(i, j)));
        EXPECT_EQ(back.get(i, j), to.get(i, j));
      }
    EXPECT_TRUE(to.gaps_untouched() && back.gaps_untouched());
  }
  Matrix copy(DType::f32, 3, 37);
  test_ops().cast(from.tensor(), copy.tensor());
  EXPECT_EQ(copy.values(), from.values());
}

TEST(Cast, SpecialValues) {
  const double tiny = std::ldexp(1.0, -149), bf16_tiny = std::ldexp(1.0, -133);
  Matrix from(DType::f32, 1, 6, {HUGE_VAL, -HUGE_VAL, tiny, bf16_tiny, -0.0, std::nan("")}),
      to(DType::bf16, 1, 6);
  test_ops().cast(from.vector(), to.vector());
  EXPECT_EQ(to.get(0, 0), HUGE_VAL);
  EXPECT_EQ(to.get(0, 1), -HUGE_VAL);
  EXPECT_EQ(to.get(0, 2), 0);
  EXPECT_EQ(to.get(0, 3), bf16_tiny);
  EXPECT_TRUE(std::signbit(to.get(0, 4)));
  EXPECT_TRUE(std::isnan(to.get(0, 5)));
}

TEST(Cast, Fp16) {
  Matrix from(DType::f32, 1, 3, {1.5, -65504, 6e-8}), back(DType::f32, 1, 3);
  std::vector<fp16_t> half(3);
  test_ops().cast(from.vector(), Tensor::of(half.data(), {3}));
  test_ops().cast(Tensor::of(half.data(), {3}), back.vector());
  EXPECT_EQ(back.values(), (Values{1.5, -65504, std::ldexp(1.0, -24)}));
}

TEST(Fill, EveryDtype) {
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    Matrix x(dtype, 1, 41);
    test_ops().fill(x.vector(), 1.25f);
    EXPECT_EQ(x.values(), Values(41, 1.25));
  }
}

// --- initial values
Values normal(int64_t n, uint64_t seed, uint64_t stream, int64_t first, float std = 1) {
  Matrix x(DType::f32, 1, n);
  test_ops().init_normal(x.vector(), seed, stream, first, std);
  return x.values();
}

TEST(InitNormal, DoesNotDependOnTheCut) {
  const Values all = normal(10'000, 7, 3, 0);
  for (int64_t first : {0, 1, 2, 3, 4, 5, 4095, 9'000})
    for (int64_t n : {1, 2, 3, 5, 999}) {
      const Values part = normal(n, 7, 3, first);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + first)) << first << " " << n;
    }
}

TEST(InitNormal, IsStandardNormal) {
  constexpr int64_t n = 1'000'000;
  const Values x = normal(n, 1, 2, 0, 0.02f);
  double mean = 0, variance = 0, kurtosis = 0, neighbours = 0;
  for (double v : x) mean += v / (0.02 * n);
  for (size_t i = 0; i < x.size(); ++i) {
    const double v = x[i] / 0.02;
    variance += v * v / n, kurtosis += v * v * v * v / n;
    if (i > 0) neighbours += v * x[i - 1] / 0.02 / n;
  }
  // Five standard errors each.
  EXPECT_NEAR(mean, 0, 5e-3);
  EXPECT_NEAR(variance, 1, 5 * std::sqrt(2.0 / n));
  EXPECT_NEAR(kurtosis, 3, 5 * std::sqrt(96.0 / n));
  EXPECT_NEAR(neighbours, 0, 5e-3);
}

TEST(InitNormal, DependsOnSeedStreamAndPlace) {
  const Values a = normal(100, 1, 2, 0);
  EXPECT_EQ(a, normal(100, 1, 2, 0));
  EXPECT_NE(a, normal(100, 2, 1, 0));
  EXPECT_NE(a, normal(100, 1, 3, 0));
  EXPECT_NE(a, normal(100, 2, 2, 0));
  EXPECT_NE(a, normal(100, 1 + (uint64_t{1} << 32), 2, 0));
  EXPECT_NE(a, normal(100, 1, 2 + (uint64_t{1} << 32), 0));
  EXPECT_NE(a, normal(100, 1, 2, int64_t{1} << 34));
}

TEST(OptimizerErrors, Shapes) {
  Matrix a(DType::f32, 1, 8), b(DType::f32, 1, 9), half(DType::bf16, 1, 8),
      view(DType::f32, 2, 4, 1);
  EXPECT_THROW(
      test_ops().adamw(a.vector(), b.vector(), a.vector(), a.vector(), {}, {1, 0, 0, 0, 0, 1, 1}),
      Error);
  EXPECT_THROW(test_ops().adamw(a.vector(), half.vector(), a.vector(), a.vector(), {},
                                {1, 0, 0, 0, 0, 1, 1}),
               Error);
  EXPECT_THROW(test_ops().cast(a.vector(), b.vector()), Error);
  EXPECT_THROW(total_of(half.vector()), Error);
  EXPECT_THROW(total_of(view.tensor()), Error);
  EXPECT_THROW(test_ops().add_sum(a.vector(), b.vector()), Error);
  EXPECT_THROW(test_ops().fill(view.tensor(), 1), Error);
  const Tensor parts[] = {a.vector(), half.vector()};
  EXPECT_THROW(test_ops().sum_parts(parts, 1, a.vector(), false), Error);
  EXPECT_THROW(test_ops().sum_parts({}, 1, a.vector(), false), Error);
  EXPECT_THROW(test_ops().init_normal(half.vector(), 1, 1, 0, 1), Error);
}

}  // namespace
}  // namespace qshard
