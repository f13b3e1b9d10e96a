// Every operator gives the same bits with 1, 2 and 3 threads, and when it is run again.
#include <gtest/gtest-spi.h>

#include "cpu/backend_cpu.h"
#include "ops_reference.h"

namespace qshard {
namespace {

using Bytes = std::vector<std::vector<char>>;

// `run` makes its outputs anew and returns their bytes.
void expect_same_bits(const std::function<Bytes(Ops&)>& run) {
  Backend one = make_cpu_backend(1), two = make_cpu_backend(2), three = make_cpu_backend(3);
  const Bytes expected = run(*one.ops);
  EXPECT_EQ(run(*one.ops), expected);
  EXPECT_EQ(run(*two.ops), expected) << "2 threads";
  EXPECT_EQ(run(*three.ops), expected) << "3 threads";
}

class Threads : public testing::TestWithParam<DType> {
 protected:
  DType P = GetParam();
};

struct ProductDims {
  int64_t N, I, O;
};
class ThreadsOfProducts : public testing::TestWithParam<std::tuple<DType, ProductDims>> {};

TEST_P(ThreadsOfProducts, Linear) {
  const auto [P, d] = GetParam();
  Matrix x = Matrix::random(P, d.N, d.I, 1), w = Matrix::random(P, d.O, d.I, 2),
         dy = Matrix::random(P, d.N, d.O, 3);
  expect_same_bits([&, P = P, d = d](Ops& ops) {
    Matrix y(DType::f32, d.N, d.O), dx(P, d.N, d.I), dw(DType::f32, d.O, d.I),
        more = Matrix::random(DType::f32, d.O, d.I, 4);
    ops.linear(x.tensor(), w.tensor(), y.tensor());
    ops.linear_dgrad(dy.tensor(), w.tensor(), dx.tensor(), false);
    ops.linear_wgrad(dy.tensor(), x.tensor(), dw.tensor(), false);
    ops.linear_wgrad(dy.tensor(), x.tensor(), more.tensor(), true);
    return Bytes{y.bytes(), dx.bytes(), dw.bytes(), more.bytes()};
  });
}
// Few outputs and a long sum tempt a library to share out the sum itself.
INSTANTIATE_TEST_SUITE_P(
    Shapes, ThreadsOfProducts,
    testing::Combine(testing::Values(DType::f32, DType::bf16, DType::fp16),
                     testing::Values(ProductDims{8, 24, 16}, ProductDims{77, 130, 65},
                                     ProductDims{1, 512, 3000}, ProductDims{2048, 64, 32},
                                     ProductDims{1024, 16, 16}, ProductDims{300, 256, 512},
                                     ProductDims{16, 4096, 24})));

TEST_P(Threads, EmbeddingAndLoss) {
  constexpr int64_t N = 150, V = 70, C = 200;
  Values id_values;
  for (int64_t n = 0; n < N; ++n) id_values.push_back(static_cast<double>(n * n % V));
  Matrix ids(DType::i32, 1, N, id_values), w = Matrix::random(P, V, C, 1);
  Matrix dx = Matrix::random(DType::f32, N, C, 2), logits = Matrix::random(DType::f32, N, V, 3);
  expect_same_bits([&](Ops& ops) {
    Matrix x(DType::f32, N, C), dw = Matrix::random(DType::f32, V, C, 4), loss(DType::f32, 1, N),
                                d(P, N, V);
    ops.embedding(ids.vector(), w.tensor(), x.tensor());
    ops.embedding_grad(ids.vector(), dx.tensor(), dw.tensor());
    ops.cross_entropy(logits.tensor(), ids.vector(), 0.5f, d.tensor(), loss.vector());
    return Bytes{x.bytes(), dw.bytes(), loss.bytes(), d.bytes()};
  });
}

TEST_P(Threads, Norms) {
  constexpr int64_t N = 200, C = 333;
  Matrix x = Matrix::random(DType::f32, N, C, 1), w = Matrix::random(P, 1, C, 2),
         delta = Matrix::random(P, N, C, 3);
  Matrix dy = Matrix::random(DType::f32, N, C, 4);
  expect_same_bits([&](Ops& ops) {
    Matrix y(P, N, C), sum(DType::f32, N, C), rstd(DType::f32, 1, N), d_res = dy,
                                                                      dw(DType::f32, 1, C);
    ops.add_rms_norm(x.tensor(), delta.tensor(), w.vector(), 1e-6f, sum.tensor(), y.tensor(),
                     rstd.vector());
    ops.rms_norm_grad(dy.tensor(), sum.tensor(), w.vector(), rstd.vector(), d_res.tensor(), {},
                      dw.vector(), false);
    return Bytes{y.bytes(), sum.bytes(), rstd.bytes(), d_res.bytes(), dw.bytes()};
  });
}

TEST_P(Threads, Heads) {
  const AttentionShape s{2, 70, 6, 3, 32};
  const int64_t N = s.B * s.T, q_cols = s.H * s.D, kv_cols = s.K * s.D, qk_cols = q_cols + kv_cols;
  Matrix in = Matrix::random(P, N, qk_cols, 1), wq = Matrix::random(P, 1, s.D, 2),
         wk = Matrix::random(P, 1, s.D, 3);
  Matrix rope = Matrix::random(DType::f32, s.T, s.D, 4), v = Matrix::random(P, N, kv_cols, 5),
         d_o = Matrix::random(P, N, q_cols, 6);
  expect_same_bits([&](Ops& ops) {
    Matrix qk(P, N, qk_cols), rstd(DType::f32, N, s.H + s.K), o(P, N, q_cols),
        lse(DType::f32, s.B * s.H, s.T);
    Matrix d_qk(P, N, qk_cols), dv(P, N, kv_cols), dq_norm(DType::f32, 1, s.D),
        dk_norm(DType::f32, 1, s.D);
    ops.qk_norm_rope(in.tensor(), wq.vector(), wk.vector(), rope.tensor(), 1e-6f, s, qk.tensor(),
                     rstd.tensor());
    const Tensor q = qk.tensor().col_range(0, q_cols), k = qk.tensor().col_range(q_cols, qk_cols);
    const Tensor dq = d_qk.tensor().col_range(0, q_cols),
                 dk = d_qk.tensor().col_range(q_cols, qk_cols);
    const Tensor l = lse.shaped({s.B, s.H, s.T});
    ops.attention(q, k, v.tensor(), s, o.tensor(), l);
    ops.attention_grad(q, k, v.tensor(), o.tensor(), d_o.tensor(), l, s, dq, dk, dv.tensor());
    ops.qk_norm_rope_grad(d_qk.tensor(), in.tensor(), wq.vector(), wk.vector(), rope.tensor(),
                          rstd.tensor(), s, d_qk.tensor(), dq_norm.vector(), dk_norm.vector(),
                          false);
    return Bytes{qk.bytes(), o.bytes(),       lse.bytes(),    d_qk.bytes(),
                 dv.bytes(), dq_norm.bytes(), dk_norm.bytes()};
  });
}

TEST_P(Threads, ElementWise) {
  constexpr int64_t N = 33, F = 1000, n = N * F;
  Matrix gu = Matrix::random(P, N, 2 * F, 1), da = Matrix::random(P, N, F, 2),
         g = Matrix::random(DType::f32, 1, n, 3);
  Matrix part = Matrix::random(P, 1, n, 4);
  expect_same_bits([&](Ops& ops) {
    Matrix a(P, N, F), d_gu(P, N, 2 * F), p = g, m = g, v(DType::f32, 1, n), p_out(P, 1, n),
                                          out(DType::f32, 1, n);
    ops.swiglu(gu.tensor(), a.tensor());
    ops.swiglu_grad(da.tensor(), gu.tensor(), d_gu.tensor());
    ops.init_normal(v.vector(), 1, 2, 3, 1);
    ops.cast(part.vector(), v.vector());
    ops.fill(v.vector(), 1);
    ops.adamw(p.vector(), g.vector(), m.vector(), v.vector(), p_out.vector(),
              {0.1f, 0.9f, 0.99f, 1e-8f, 0.1f, 3, 1});
    const Tensor parts[] = {part.vector(), part.vector(), part.vector()};
    ops.sum_parts(parts, 0.3f, out.vector(), false);
    double sums[] = {0, 0};
    ops.add_sum(g.vector(), Tensor::of(&sums[0], {1}));
    ops.add_sum_squares(g.vector(), Tensor::of(&sums[1], {1}));
    std::vector<char> sum_bytes(sizeof sums);
    std::memcpy(sum_bytes.data(), sums, sizeof sums);
    return Bytes{a.bytes(), d_gu.bytes(),  p.bytes(),   m.bytes(),
                 v.bytes(), p_out.bytes(), out.bytes(), sum_bytes};
  });
}

TEST(ThreadsInitNormal, SameBits) {
  expect_same_bits([](Ops& ops) {
    Matrix x(DType::f32, 1, 100'001);
    ops.init_normal(x.vector(), 1, 2, 3, 1);
    return Bytes{x.bytes()};
  });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Threads, testing::Values(DType::f32, DType::bf16, DType::fp16));

// The check itself: a result that depends on the threads is found.
TEST(ThreadsChecker, FindsADifference) {
  int runs = 0;
  EXPECT_NONFATAL_FAILURE(
      expect_same_bits([&](Ops&) { return Bytes{{static_cast<char>(runs++ / 3)}}; }), "3 threads");
}

}  // namespace
}  // namespace qshard
