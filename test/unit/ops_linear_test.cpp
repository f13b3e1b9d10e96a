#include "cpu/gemm.h"
#include "ops_reference.h"

namespace qshard {
namespace {

struct Dims {
  int64_t N, I, O, gap;
};

// The double products of what the matrices hold.
Values product(const Matrix& a, const Matrix& b, int64_t m, int64_t n, int64_t k, bool transpose_a,
               bool transpose_b) {
  Values c;
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l)
        sum +=
            (transpose_a ? a.get(l, i) : a.get(i, l)) * (transpose_b ? b.get(j, l) : b.get(l, j));
      c.push_back(sum);
    }
  return c;
}

class Linear : public testing::TestWithParam<std::tuple<DType, DType, Dims, bool>> {
 protected:
  DType param_ = std::get<0>(GetParam()), out_ = std::get<1>(GetParam());
  Dims d_ = std::get<2>(GetParam());
  cpu::Gemm gemm_{1, std::get<3>(GetParam())};
  Matrix x_ = Matrix::random(param_, d_.N, d_.I, 1, 1, d_.gap);
  Matrix w_ = Matrix::random(param_, d_.O, d_.I, 2);
  Matrix dy_ = Matrix::random(param_, d_.N, d_.O, 3, 1, d_.gap);
};

TEST_P(Linear, Forward) {
  Matrix y(out_, d_.N, d_.O, d_.gap);
  gemm_.linear(x_.tensor(), w_.tensor(), y.tensor());
  EXPECT_LT(error_of(y.values(), product(x_, w_, d_.N, d_.O, d_.I, false, true)), tolerance(out_));
  EXPECT_TRUE(y.gaps_untouched());
}

TEST_P(Linear, InputGradient) {
  const Values expected = product(dy_, w_, d_.N, d_.I, d_.O, false, false);
  Matrix dx(out_, d_.N, d_.I, d_.gap);
  gemm_.linear_dgrad(dy_.tensor(), w_.tensor(), dx.tensor(), false);
  EXPECT_LT(error_of(dx.values(), expected), tolerance(out_));

  Matrix more = Matrix::random(out_, d_.N, d_.I, 4, 1, d_.gap);
  const Values before = more.values();
  gemm_.linear_dgrad(dy_.tensor(), w_.tensor(), more.tensor(), true);
  EXPECT_LT(error_of(more.values(), sum_of(expected, before)), tolerance(out_));
  EXPECT_TRUE(dx.gaps_untouched() && more.gaps_untouched());
}

TEST_P(Linear, WeightGradient) {
  const Values expected = product(dy_, x_, d_.O, d_.I, d_.N, true, false);
  Matrix dw(DType::f32, d_.O, d_.I);
  gemm_.linear_wgrad(dy_.tensor(), x_.tensor(), dw.tensor(), false);
  EXPECT_LT(error_of(dw.values(), expected), tolerance(DType::f32));

  Matrix more = Matrix::random(DType::f32, d_.O, d_.I, 4);
  const Values before = more.values();
  gemm_.linear_wgrad(dy_.tensor(), x_.tensor(), more.tensor(), true);
  EXPECT_LT(error_of(more.values(), sum_of(expected, before)), tolerance(DType::f32));
}

constexpr Dims kDims[] = {
    {1, 1, 1, 0}, {7, 13, 5, 3}, {1, 64, 33, 0}, {33, 96, 64, 32}, {70, 130, 65, 1}};
INSTANTIATE_TEST_SUITE_P(F32, Linear,
                         testing::Combine(testing::Values(DType::f32), testing::Values(DType::f32),
                                          testing::ValuesIn(kDims), testing::Values(true)));
INSTANTIATE_TEST_SUITE_P(Bf16, Linear,
                         testing::Combine(testing::Values(DType::bf16),
                                          testing::Values(DType::f32, DType::bf16),
                                          testing::ValuesIn(kDims), testing::Bool()));
INSTANTIATE_TEST_SUITE_P(Fp16, Linear,
                         testing::Combine(testing::Values(DType::fp16),
                                          testing::Values(DType::f32, DType::fp16),
                                          testing::ValuesIn(kDims), testing::Bool()));

// A product larger than one block of converted operands in each direction, with parts at the ends.
// Every element is a sum of whole numbers that f32 holds.
TEST(LinearConverted, InBlocks) {
  constexpr int64_t N = 1030, I = 2059, O = 2050;
  cpu::Gemm gemm(1, false);
  for (DType dtype : {DType::bf16, DType::fp16}) {
    Matrix x(dtype, N, I), w(dtype, O, I), y(DType::f32, N, O), half(dtype, N, O);
    const auto small = [](int64_t i, int64_t j) {
      return static_cast<double>((i + 3 * j) % 5 - 2);
    };
    for (int64_t i = 0; i < N; ++i)
      for (int64_t j = 0; j < I; ++j) x.set(i, j, small(i, j));
    for (int64_t i = 0; i < O; ++i)
      for (int64_t j = 0; j < I; ++j) w.set(i, j, small(j, i));
    for (int64_t n = 0; n < N; ++n) half.set(n, n, 1);
    gemm.linear(x.tensor(), w.tensor(), y.tensor());
    gemm.linear(x.tensor(), w.tensor(), half.tensor());
    for (int64_t n : {int64_t{0}, int64_t{1023}, int64_t{1024}, N - 1})
      for (int64_t o : {int64_t{0}, int64_t{2047}, int64_t{2048}, O - 1}) {
        double sum = 0;
        for (int64_t i = 0; i < I; ++i) sum += small(n, i) * small(i, o);
        EXPECT_EQ(y.get(n, o), sum) << n << " " << o;
        EXPECT_EQ(half.get(n, o), rounded(dtype, sum)) << n << " " << o;
      }
    Matrix dx(dtype, N, I, Values(N * I, 1));
    gemm.linear_dgrad(half.tensor(), w.tensor(), dx.tensor(), true);
    double sum = 1;
    for (int64_t o = 0; o < O; ++o) sum += half.get(N - 1, o) * small(I - 1, o);
    EXPECT_NEAR(dx.get(N - 1, I - 1), sum, std::abs(sum) * tolerance(dtype));
  }
}

TEST(LinearConverted, SaysWhatItComputesIn) {
  const cpu::Gemm gemm(1, false);
  EXPECT_EQ(gemm.describe(DType::f32), "f32");
  EXPECT_NE(gemm.describe(DType::bf16).find("f32 (oneDNN has no fast bf16"), std::string::npos);
  EXPECT_NE(gemm.describe(DType::fp16).find("f32 (oneDNN has no fast fp16"), std::string::npos);
}

TEST(LinearEdges, NoTokens) {
  Matrix x(DType::f32, 0, 8), w = Matrix::random(DType::f32, 4, 8, 1), y(DType::f32, 0, 4);
  test_ops().linear(x.tensor(), w.tensor(), y.tensor());
  Matrix dw = Matrix::random(DType::f32, 4, 8, 2);
  const Values before = dw.values();
  test_ops().linear_wgrad(y.tensor(), x.tensor(), dw.tensor(), true);
  EXPECT_EQ(dw.values(), before);
  test_ops().linear_wgrad(y.tensor(), x.tensor(), dw.tensor(), false);
  EXPECT_EQ(dw.values(), Values(32, 0));
}

// More shapes than the primitive cache holds.
TEST(LinearEdges, ManyShapes) {
  cpu::Gemm gemm(1);
  Matrix x = Matrix::random(DType::f32, 1100, 3, 1), w = Matrix::random(DType::f32, 2, 3, 2);
  const Values expected = product(x, w, 1100, 2, 3, false, true);
  for (int64_t n = 1; n <= 1100; n += 1) {
    Matrix y(DType::f32, n, 2);
    gemm.linear(x.tensor().row_range(0, n), w.tensor(), y.tensor());
    ASSERT_LT(error_of(y.values(), Values(expected.begin(), expected.begin() + 2 * n)), 1e-5) << n;
  }
}

TEST(LinearErrors, ShapesAndDtypes) {
  Matrix x(DType::f32, 4, 8), w(DType::f32, 6, 8), y(DType::f32, 4, 6), half(DType::bf16, 4, 6);
  EXPECT_THROW(test_ops().linear(x.tensor(), w.tensor(), x.tensor()), Error);
  EXPECT_THROW(test_ops().linear(x.tensor(), y.tensor(), y.tensor()), Error);
  EXPECT_THROW(test_ops().linear(x.tensor(), w.tensor(), half.tensor()), Error);
  EXPECT_THROW(test_ops().linear_wgrad(y.tensor(), x.tensor(), y.tensor(), false), Error);
  EXPECT_THROW(test_ops().linear_dgrad(y.tensor(), x.tensor(), x.tensor(), false), Error);
  Tensor overlapping = y.tensor();
  overlapping.ld = 5;
  EXPECT_THROW(test_ops().linear(x.tensor(), w.tensor(), overlapping), Error);
}

TEST(MeasurePeak, IsAFiniteRate) {
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    const double rate = test_ops().measure_peak(dtype, 0.01);
    EXPECT_GT(rate, 1e8);
    EXPECT_LT(rate, 1e15);
  }
}

}  // namespace
}  // namespace qshard
