#include "cuda_ops_reference.h"

namespace qshard {
namespace {

// --- embedding
class CudaEmbedding : public testing::TestWithParam<
                          std::tuple<std::pair<DType, DType>, std::pair<int64_t, int64_t>>> {};

TEST_P(CudaEmbedding, RowsAndTheirGradient) {
  const auto [R, P] = std::get<0>(GetParam());
  const auto [C, gap] = std::get<1>(GetParam());
  // More ids than one tile, more rows than blocks; some ids often, most never.
  constexpr int64_t N = 1030, V = 1500;
  std::mt19937 engine(7);
  std::vector<int32_t> numbers(N);
  for (int32_t& id : numbers)
    id = static_cast<int32_t>(engine() % 4 == 0 ? engine() % V
                                                : 1024 * (engine() % 2) + engine() % 3 / 2);
  TwinIds ids(numbers);
  Twin w = Twin::random(P, V, C, 1), x(R, N, C, gap);
  cuda_ops().embedding(ids.gpu(), w.gpu(), x.gpu());
  cpu_ops().embedding(ids.cpu(), w.cpu(), x.cpu());
  EXPECT_EQ(x.download(), x.host());

  Twin dx = Twin::random(R, N, C, 2, gap), dw = Twin::random(DType::f32, V, C, 3);
  cuda_ops().embedding_grad(ids.gpu(), dx.gpu(), dw.gpu());
  cpu_ops().embedding_grad(ids.cpu(), dx.cpu(), dw.cpu());
  EXPECT_EQ(dw.download(), dw.host());  // in token order: exactly
}
INSTANTIATE_TEST_SUITE_P(Dtypes, CudaEmbedding,
                         testing::Combine(dtype_pairs(),
                                          testing::Values(std::pair<int64_t, int64_t>{16, 8},
                                                          std::pair<int64_t, int64_t>{5, 3})));

// --- SwiGLU
class CudaSwiGlu : public testing::TestWithParam<std::tuple<DType, int64_t, int64_t>> {};

TEST_P(CudaSwiGlu, ForwardAndGradient) {
  const auto [dtype, F, gap] = GetParam();
  constexpr int64_t N = 3;
  Twin gu = Twin::random(dtype, N, 2 * F, 1, gap, 4), a(dtype, N, F, gap);
  cuda_ops().swiglu(gu.gpu(), a.gpu());
  cpu_ops().swiglu(gu.cpu(), a.cpu());
  EXPECT_LT(error_of(a.download(), a.host()), tolerance(dtype));

  Twin da = Twin::random(dtype, N, F, 2, gap), d_gu(dtype, N, 2 * F, gap);
  cuda_ops().swiglu_grad(da.gpu(), gu.gpu(), d_gu.gpu());
  cpu_ops().swiglu_grad(da.cpu(), gu.cpu(), d_gu.cpu());
  EXPECT_LT(error_of(d_gu.download(), d_gu.host()), tolerance(dtype));

  cuda_ops().swiglu_grad(da.gpu(), gu.gpu(), gu.gpu());
  EXPECT_EQ(gu.download(), d_gu.download());
}
INSTANTIATE_TEST_SUITE_P(Shapes, CudaSwiGlu,
                         testing::Combine(testing::Values(DType::f32, DType::bf16, DType::fp16),
                                          testing::Values(1, 16, 45, 1032),
                                          testing::Values(0, 7, 8)));

TEST(CudaSwiGluEdges, LargeGates) {
  Twin gu(DType::f32, 1, 8, {-1e4f, 1e4f, -200, 200, 2, 2, 2, 2}), a(DType::f32, 1, 4);
  cuda_ops().swiglu(gu.gpu(), a.gpu());
  EXPECT_EQ(a.download(), (Floats{0, 2e4f, 0, 400}));
}

// --- cross-entropy
class CudaCrossEntropy : public testing::TestWithParam<std::tuple<DType, int64_t, int64_t>> {};

TEST_P(CudaCrossEntropy, LossAndGradient) {
  const auto [dtype, V, gap] = GetParam();
  const auto last = static_cast<int32_t>(V) - 1;
  const std::vector<int32_t> numbers = {0, -100, last, last / 2, -100, last / 3};
  const auto n = static_cast<int64_t>(numbers.size());
  TwinIds labels(numbers);
  Twin logits = Twin::random(DType::f32, n, V, 1, gap, 5);
  Twin loss(DType::f32, 1, n), d(dtype, n, V, gap), only_loss(DType::f32, 1, n);
  cuda_ops().cross_entropy(logits.gpu(), labels.gpu(), 0.125f, d.gpu(), loss.gpu_vector());
  cpu_ops().cross_entropy(logits.cpu(), labels.cpu(), 0.125f, d.cpu(), loss.cpu_vector());
  EXPECT_LT(error_of(loss.download(), loss.host()), 2e-6);
  EXPECT_LT(error_of(d.download(), d.host()), tolerance(dtype));

  cuda_ops().cross_entropy(logits.gpu(), labels.gpu(), 0.125f, {}, only_loss.gpu_vector());
  EXPECT_EQ(only_loss.download(), loss.download());

  // Over the logits, each row from the same start: same bits as beside them.
  Tensor over = logits.gpu();
  over.dtype = dtype;
  over.ld = logits.gpu().ld * 4 / static_cast<int64_t>(dtype_size(dtype));
  cuda_ops().cross_entropy(logits.gpu(), labels.gpu(), 0.125f, over, only_loss.gpu_vector());
  EXPECT_EQ(only_loss.download(), loss.download());
  const std::vector<char> over_bytes = logits.download_bytes(), bytes = d.download_bytes();
  for (int64_t row = 0; row < n; ++row) {
    const auto offset = [&](int64_t ld) {
      return static_cast<size_t>(row * ld) * dtype_size(dtype);
    };
    EXPECT_EQ(std::memcmp(over_bytes.data() + offset(over.ld), bytes.data() + offset(d.gpu().ld),
                          static_cast<size_t>(V) * dtype_size(dtype)),
              0);
  }
}
// One turn of the block and several, with vectors and without.
INSTANTIATE_TEST_SUITE_P(Shapes, CudaCrossEntropy,
                         testing::Combine(testing::Values(DType::f32, DType::bf16, DType::fp16),
                                          testing::Values(1, 16, 97, 2500, 17000),
                                          testing::Values(0, 8)));

TEST(CudaCrossEntropyEdges, HugeTinyAndImpossible) {
  constexpr int64_t n = 6, V = 20;
  Floats x(n * V, -1e30f);
  const auto at = [&](int64_t row, int64_t j) -> float& {
    return x[static_cast<size_t>(row * V + j)];
  };
  for (int64_t j = 0; j < V; ++j) {
    at(1, j) = j == 7 ? 3e38f : -3e38f;
    at(2, j) = j == 3 ? 0 : -INFINITY;
    at(3, j) = 1e30f;
    at(4, j) = j == 11 ? NAN : 1;
    at(5, j) = 1;
  }
  Twin logits(DType::f32, n, V, x), loss(DType::f32, 1, n), d(DType::f32, n, V);
  TwinIds labels({5, 7, 3, 19, 2, 20});
  cuda_ops().cross_entropy(logits.gpu(), labels.gpu(), 1, d.gpu(), loss.gpu_vector());
  const Floats losses = loss.download(), gradient = d.download();
  EXPECT_NEAR(losses[0], std::log(V), 1e-6);  // log(20) beside 1e30: the shift must cancel first
  EXPECT_EQ(losses[1], 0);
  EXPECT_EQ(losses[2], 0);
  EXPECT_NEAR(losses[3], std::log(V), 1e-6);
  EXPECT_TRUE(std::isnan(losses[4]));  // a NaN is not lost in the maximum
  EXPECT_TRUE(std::isnan(losses[5]));  // a label that does not exist
  EXPECT_NEAR(gradient[5], 1.0 / V - 1, 1e-6);
  EXPECT_EQ(gradient[1 * V + 7], 0);
  EXPECT_EQ(gradient[2 * V + 4], 0);
}

TEST(CudaMlpEmbedLossErrors, Shapes) {
  Twin logits(DType::f32, 2, 5), loss(DType::f32, 1, 2), a(DType::f32, 2, 3);
  TwinIds labels({0, 0});
  auto& ops = cuda_ops();
  EXPECT_THROW(ops.cross_entropy(logits.gpu(), labels.gpu(), 1, a.gpu(), loss.gpu_vector()), Error);
  EXPECT_THROW(ops.swiglu(logits.gpu(), a.gpu()), Error);
  EXPECT_THROW(ops.swiglu_grad(a.gpu(), logits.gpu(), logits.gpu()), Error);
  EXPECT_THROW(ops.embedding(labels.gpu(), a.gpu(), logits.gpu()), Error);
  EXPECT_THROW(ops.embedding(loss.gpu_vector(), a.gpu(), a.gpu()), Error);
  EXPECT_THROW(ops.embedding_grad(labels.gpu(), logits.gpu(), a.gpu()), Error);
}

}  // namespace
}  // namespace qshard
