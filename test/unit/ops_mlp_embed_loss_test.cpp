#include "ops_reference.h"

namespace qshard {
namespace {

// --- embedding
class Embedding : public testing::TestWithParam<std::pair<DType, DType>> {};

TEST_P(Embedding, RowsAndTheirGradient) {
  const auto [residual, param] = GetParam();
  constexpr int64_t N = 9, V = 5, C = 37;
  Matrix ids(DType::i32, 1, N, {4, 0, 0, 2, 4, 4, 1, 0, 4}), w = Matrix::random(param, V, C, 1);
  const size_t id_of[N] = {4, 0, 0, 2, 4, 4, 1, 0, 4};
  Matrix x(residual, N, C, 3);
  test_ops().embedding(ids.vector(), w.tensor(), x.tensor());
  Values expected;
  for (size_t n = 0; n < N; ++n)
    for (int64_t c = 0; c < C; ++c) expected.push_back(w.get(static_cast<int64_t>(id_of[n]), c));
  EXPECT_EQ(x.values(), expected);
  EXPECT_TRUE(x.gaps_untouched());

  Matrix dx = Matrix::random(residual, N, C, 2, 1, 3), dw = Matrix::random(DType::f32, V, C, 3);
  // In token order, in f32: exactly this sum.
  Values sum = dw.values();
  for (size_t n = 0; n < N; ++n)
    for (size_t c = 0; c < C; ++c) {
      double& element = sum[id_of[n] * C + c];
      element = static_cast<float>(element) +
                static_cast<float>(dx.get(static_cast<int64_t>(n), static_cast<int64_t>(c)));
    }
  test_ops().embedding_grad(ids.vector(), dx.tensor(), dw.tensor());
  EXPECT_EQ(dw.values(), sum);
}
INSTANTIATE_TEST_SUITE_P(Dtypes, Embedding,
                         testing::Values(std::pair{DType::f32, DType::f32},
                                         std::pair{DType::f32, DType::bf16},
                                         std::pair{DType::bf16, DType::bf16},
                                         std::pair{DType::f32, DType::fp16},
                                         std::pair{DType::fp16, DType::fp16}));

// --- SwiGLU
Values swiglu(const Values& gu, size_t F) {
  Values a;
  for (size_t row = 0; row < gu.size(); row += 2 * F)
    for (size_t i = 0; i < F; ++i)
      a.push_back(gu[row + i] / (1 + std::exp(-gu[row + i])) * gu[row + F + i]);
  return a;
}

class SwiGlu : public testing::TestWithParam<std::tuple<DType, int64_t, int64_t>> {};

TEST_P(SwiGlu, ForwardAndGradient) {
  const auto [dtype, F, gap] = GetParam();
  constexpr int64_t N = 3;
  Matrix gu = Matrix::random(dtype, N, 2 * F, 1, 4, gap), a(dtype, N, F, gap);
  test_ops().swiglu(gu.tensor(), a.tensor());
  const auto reference = [F = static_cast<size_t>(F)](const Values& v) { return swiglu(v, F); };
  EXPECT_LT(error_of(a.values(), reference(gu.values())), tolerance(dtype));

  Matrix da = Matrix::random(dtype, N, F, 2), d_gu(dtype, N, 2 * F, gap);
  test_ops().swiglu_grad(da.tensor(), gu.tensor(), d_gu.tensor());
  const Values expected = numeric_gradient(
      gu.values(), [&](const Values& v) { return dot(reference(v), da.values()); });
  EXPECT_LT(error_of(d_gu.values(), expected), tolerance(dtype));
  EXPECT_TRUE(a.gaps_untouched() && d_gu.gaps_untouched());

  test_ops().swiglu_grad(da.tensor(), gu.tensor(), gu.tensor());
  EXPECT_EQ(gu.values(), d_gu.values());
}
INSTANTIATE_TEST_SUITE_P(Shapes, SwiGlu,
                         testing::Combine(testing::Values(DType::f32, DType::bf16, DType::fp16),
                                          testing::Values(1, 16, 45), testing::Values(0, 7)));

TEST(SwiGluEdges, LargeGates) {
  Matrix gu(DType::f32, 1, 8, {-1e4, 1e4, -200, 200, 2, 2, 2, 2}), a(DType::f32, 1, 4);
  test_ops().swiglu(gu.tensor(), a.tensor());
  EXPECT_EQ(a.values(), (Values{0, 2e4, 0, 400}));
  Matrix da(DType::f32, 1, 4, {1, 1, 1, 1});
  test_ops().swiglu_grad(da.tensor(), gu.tensor(), gu.tensor());
  EXPECT_EQ(gu.values(), (Values{0, 2, 0, 2, 0, 1e4, 0, 200}));
}

// --- cross-entropy
struct Loss {
  Values loss, d_logits;
};

Loss cross_entropy(const Matrix& logits, const std::vector<int>& labels, int64_t V, double scale) {
  Loss r;
  for (size_t row = 0; row < labels.size(); ++row) {
    const auto x = [&](int64_t j) { return logits.get(static_cast<int64_t>(row), j); };
    double largest = -HUGE_VAL, sum = 0;
    for (int64_t j = 0; j < V; ++j) largest = std::max(largest, x(j));
    for (int64_t j = 0; j < V; ++j) sum += std::exp(x(j) - largest);
    const bool kept = labels[row] >= 0;
    r.loss.push_back(kept ? largest + std::log(sum) - x(labels[row]) : 0);
    for (int64_t j = 0; j < V; ++j)
      r.d_logits.push_back(kept ? (std::exp(x(j) - largest) / sum - (j == labels[row])) * scale
                                : 0);
  }
  return r;
}

class CrossEntropy : public testing::TestWithParam<std::tuple<DType, int64_t>> {};

TEST_P(CrossEntropy, LossAndGradient) {
  const auto [dtype, V] = GetParam();
  const int last = static_cast<int>(V) - 1;
  const std::vector<int> labels = {0, -100, last, last / 2, -100, last / 3};
  const int64_t n = static_cast<int64_t>(labels.size());
  Matrix logits = Matrix::random(DType::f32, n, V, 1, 5, 3);
  Matrix label_matrix(DType::i32, 1, n, Values(labels.begin(), labels.end()));
  const Loss expected = cross_entropy(logits, labels, V, 0.125);

  Matrix loss(DType::f32, 1, n), d(dtype, n, V, 2);
  test_ops().cross_entropy(logits.tensor(), label_matrix.vector(), 0.125f, d.tensor(),
                           loss.vector());
  EXPECT_LT(error_of(loss.values(), expected.loss), 2e-6);
  EXPECT_LT(error_of(d.values(), expected.d_logits), tolerance(dtype));
  EXPECT_TRUE(d.gaps_untouched());
  for (size_t i : {size_t{1}, size_t{4}}) EXPECT_EQ(loss.values()[i], 0);

  Matrix only_loss(DType::f32, 1, n);
  test_ops().cross_entropy(logits.tensor(), label_matrix.vector(), 0.125f, {}, only_loss.vector());
  EXPECT_EQ(only_loss.values(), loss.values());

  // Over the logits, each row from the same start: same bits as beside them.
  Tensor over = logits.tensor();
  over.dtype = dtype;
  over.ld = logits.tensor().ld * 4 / static_cast<int64_t>(dtype_size(dtype));
  test_ops().cross_entropy(logits.tensor(), label_matrix.vector(), 0.125f, over,
                           only_loss.vector());
  EXPECT_EQ(only_loss.values(), loss.values());
  const auto* over_bytes = static_cast<const char*>(over.data);
  for (int64_t row = 0; row < n; ++row) {
    const auto distance = [&](int64_t ld) {
      return static_cast<size_t>(row * ld) * dtype_size(dtype);
    };
    EXPECT_EQ(
        std::memcmp(over_bytes + distance(over.ld), d.bytes().data() + distance(d.tensor().ld),
                    static_cast<size_t>(V) * dtype_size(dtype)),
        0);
  }
}
INSTANTIATE_TEST_SUITE_P(Shapes, CrossEntropy,
                         testing::Combine(testing::Values(DType::f32, DType::bf16, DType::fp16),
                                          testing::Values(1, 5, 16, 97, 3000)));

TEST(CrossEntropyEdges, HugeAndTinyLogits) {
  constexpr int64_t n = 4, V = 20;
  Matrix logits(DType::f32, n, V, Values(n * V, -1e30));
  for (int64_t j = 0; j < V; ++j) logits.set(1, j, j == 7 ? 3e38 : -3e38);
  for (int64_t j = 0; j < V; ++j) logits.set(2, j, j == 3 ? 0 : -HUGE_VAL);
  for (int64_t j = 0; j < V; ++j) logits.set(3, j, 1e30);
  Matrix labels(DType::i32, 1, n, {5, 7, 3, 19}), loss(DType::f32, 1, n), d(DType::f32, n, V);
  test_ops().cross_entropy(logits.tensor(), labels.vector(), 1, d.tensor(), loss.vector());
  EXPECT_NEAR(loss.get(0, 0), std::log(V),
              1e-6);  // log(20) beside 1e30: the shift must cancel first
  EXPECT_EQ(loss.get(0, 1), 0);
  EXPECT_EQ(loss.get(0, 2), 0);
  EXPECT_NEAR(d.get(0, 5), 1.0 / V - 1, 1e-6);
  EXPECT_EQ(d.get(1, 7), 0);
  EXPECT_EQ(d.get(2, 4), 0);
  EXPECT_NEAR(d.get(3, 0), 1.0 / V, 1e-6);
}

// The GPU's and our callers' checks rest on it: a NaN is not lost in the maximum.
TEST(CrossEntropyEdges, NanIsSeen) {
  Matrix logits = Matrix::random(DType::f32, 1, 40, 1), labels(DType::i32, 1, 1, Values{3}),
         loss(DType::f32, 1, 1);
  logits.set(0, 20, std::nan(""));
  test_ops().cross_entropy(logits.tensor(), labels.vector(), 1, {}, loss.vector());
  EXPECT_TRUE(std::isnan(loss.get(0, 0)));
}

TEST(MlpEmbedLossErrors, ShapesAndLabels) {
  Matrix logits(DType::f32, 2, 5), loss(DType::f32, 1, 2), a(DType::f32, 2, 3);
  for (double bad : {5.0, -1.0, -99.0}) {
    Matrix labels(DType::i32, 1, 2, {0, bad});
    EXPECT_THROW(test_ops().cross_entropy(logits.tensor(), labels.vector(), 1, {}, loss.vector()),
                 Error);
  }
  Matrix labels(DType::i32, 1, 2, {0, 0});
  EXPECT_THROW(
      test_ops().cross_entropy(logits.tensor(), labels.vector(), 1, a.tensor(), loss.vector()),
      Error);
  EXPECT_THROW(test_ops().swiglu(logits.tensor(), a.tensor()), Error);
  EXPECT_THROW(test_ops().swiglu_grad(a.tensor(), logits.tensor(), logits.tensor()), Error);
  EXPECT_THROW(test_ops().embedding(labels.vector(), a.tensor(), logits.tensor()), Error);
  EXPECT_THROW(test_ops().embedding(loss.vector(), a.tensor(), a.tensor()), Error);
  EXPECT_THROW(test_ops().embedding_grad(labels.vector(), logits.tensor(), a.tensor()), Error);
}

}  // namespace
}  // namespace qshard
