#include "cuda_ops_reference.h"

namespace qshard {
namespace {

struct Dims {
  int64_t N, I, O, gap;
};

class CudaLinear : public testing::TestWithParam<std::tuple<std::pair<DType, DType>, Dims>> {
 protected:
  DType out_ = std::get<0>(GetParam()).first, P_ = std::get<0>(GetParam()).second;
  Dims d_ = std::get<1>(GetParam());
  Twin x_ = Twin::random(P_, d_.N, d_.I, 1, d_.gap);
  Twin w_ = Twin::random(P_, d_.O, d_.I, 2);
  Twin dy_ = Twin::random(P_, d_.N, d_.O, 3, d_.gap);
};

TEST_P(CudaLinear, Forward) {
  Twin y(out_, d_.N, d_.O, d_.gap);
  cuda_ops().linear(x_.gpu(), w_.gpu(), y.gpu());
  cpu_ops().linear(x_.cpu(), w_.cpu(), y.cpu());
  EXPECT_LT(error_of(y.download(), y.host()), tolerance(out_));
}

TEST_P(CudaLinear, InputGradient) {
  Twin dx = Twin::random(out_, d_.N, d_.I, 4, d_.gap);
  for (bool accumulate : {true, false}) {
    cuda_ops().linear_dgrad(dy_.gpu(), w_.gpu(), dx.gpu(), accumulate);
    cpu_ops().linear_dgrad(dy_.cpu(), w_.cpu(), dx.cpu(), accumulate);
    EXPECT_LT(error_of(dx.download(), dx.host()), tolerance(out_));
  }
}

TEST_P(CudaLinear, WeightGradient) {
  Twin dw = Twin::random(DType::f32, d_.O, d_.I, 4);
  for (bool accumulate : {true, false}) {
    cuda_ops().linear_wgrad(dy_.gpu(), x_.gpu(), dw.gpu(), accumulate);
    cpu_ops().linear_wgrad(dy_.cpu(), x_.cpu(), dw.cpu(), accumulate);
    EXPECT_LT(error_of(dw.download(), dw.host()), tolerance(DType::f32));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CudaLinear,
    testing::Combine(dtype_pairs(), testing::Values(Dims{1, 1, 1, 0}, Dims{7, 13, 5, 3},
                                                    Dims{33, 96, 64, 32}, Dims{20, 130, 66, 8})));

TEST(CudaLinearEdges, NoTokens) {
  Twin x(DType::f32, 0, 8), w = Twin::random(DType::f32, 4, 8, 1), y(DType::f32, 0, 4);
  cuda_ops().linear(x.gpu(), w.gpu(), y.gpu());
  Twin dw = Twin::random(DType::f32, 4, 8, 2);
  cuda_ops().linear_wgrad(y.gpu(), x.gpu(), dw.gpu(), true);
  EXPECT_EQ(dw.download(), dw.host());
  cuda_ops().linear_wgrad(y.gpu(), x.gpu(), dw.gpu(), false);
  EXPECT_EQ(dw.download(), Floats(32, 0));
}

// More shapes than there are cached plans.
TEST(CudaLinearEdges, ManyShapes) {
  Twin x = Twin::random(DType::f32, 600, 3, 1), w = Twin::random(DType::f32, 2, 3, 2),
       y(DType::f32, 600, 2);
  for (int64_t n = 1; n <= 600; ++n)
    cuda_ops().linear(x.gpu().row_range(0, n), w.gpu(), y.gpu().row_range(0, n));
  cpu_ops().linear(x.cpu(), w.cpu(), y.cpu());
  EXPECT_LT(error_of(y.download(), y.host()), 1e-5);
}

TEST(CudaLinearErrors, ShapesAndDtypes) {
  Twin x(DType::f32, 4, 8), w(DType::f32, 6, 8), y(DType::f32, 4, 6), half(DType::bf16, 4, 6);
  auto& ops = cuda_ops();
  EXPECT_THROW(ops.linear(x.gpu(), w.gpu(), x.gpu()), Error);
  EXPECT_THROW(ops.linear(x.gpu(), y.gpu(), y.gpu()), Error);
  EXPECT_THROW(ops.linear(x.gpu(), w.gpu(), half.gpu()), Error);
  EXPECT_THROW(ops.linear_wgrad(y.gpu(), x.gpu(), y.gpu(), false), Error);
  EXPECT_THROW(ops.linear_dgrad(y.gpu(), x.gpu(), x.gpu(), false), Error);
}

TEST(CudaMeasurePeak, IsAFiniteRate) {
  const double rate = cuda_ops().measure_peak(DType::bf16, 0);
  EXPECT_GT(rate, 1e6);
  EXPECT_LT(rate, 1e16);
}

}  // namespace
}  // namespace qshard
