// The products of few rows, beside double sums and beside the library's.
#include "cpu/few_rows.h"

#include "cpu/gemm.h"
#include "ops_reference.h"

namespace qshard::cpu {
namespace {

struct Dims {
  int64_t I, O, gap;
};

// The products of x[N,I], dy[N,O] and w[O,I] in double, and by `threads` threads.
struct Products {
  Products(int64_t rows, Dims dims) : N(rows), d(dims) {}

  int64_t N;
  Dims d;
  Matrix x = Matrix::random(DType::f32, N, d.I, 1, 1, d.gap);
  Matrix dy = Matrix::random(DType::f32, N, d.O, 2, 1, d.gap);
  Matrix w = Matrix::random(DType::f32, d.O, d.I, 3, 1, d.gap);
  Matrix y{DType::f32, N, d.O, d.gap}, dx{DType::f32, N, d.I, d.gap}, dw{DType::f32, d.O, d.I};
  Matrix more_dx = Matrix::random(DType::f32, N, d.I, 4, 1, d.gap);
  Matrix more_dw = Matrix::random(DType::f32, d.O, d.I, 5);

  void run(int threads) {
    const Team team(threads);
    std::vector<float> scratch;
    linear_few_rows(team, x.tensor(), w.tensor(), y.tensor(), scratch);
    linear_dgrad_few_rows(team, dy.tensor(), w.tensor(), dx.tensor(), false, scratch);
    linear_dgrad_few_rows(team, dy.tensor(), w.tensor(), more_dx.tensor(), true, scratch);
    linear_wgrad_few_rows(team, dy.tensor(), x.tensor(), dw.tensor(), false);
    linear_wgrad_few_rows(team, dy.tensor(), x.tensor(), more_dw.tensor(), true);
  }
  bool gaps_untouched() const {
    return y.gaps_untouched() && dx.gaps_untouched() && more_dx.gaps_untouched();
  }
};

// c[m,n] = Σ_l a(i, l) · b(l, j)
template <typename A, typename B>
Values product(int64_t m, int64_t n, int64_t k, A a, B b) {
  Values c;
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a(i, l) * b(l, j);
      c.push_back(sum);
    }
  return c;
}

class FewRows : public testing::TestWithParam<Dims> {};

TEST_P(FewRows, AreTheDoubleSums) {
  std::vector<int64_t> rows = {48, 64, 65, 70};
  for (int64_t N = 1; N <= 33; ++N) rows.push_back(N);
  for (const int64_t N : rows) {
    SCOPED_TRACE(N);
    Products p(N, GetParam());
    const Values dx_before = p.more_dx.values(), dw_before = p.more_dw.values();
    p.run(1);
    const auto x = [&](int64_t n, int64_t i) { return p.x.get(n, i); };
    const auto dy = [&](int64_t n, int64_t o) { return p.dy.get(n, o); };
    const auto w = [&](int64_t o, int64_t i) { return p.w.get(o, i); };
    const Values y = product(N, p.d.O, p.d.I, x, [&](int64_t i, int64_t o) { return w(o, i); });
    const Values dx = product(N, p.d.I, p.d.O, dy, w);
    const Values dw = product(
        p.d.O, p.d.I, N, [&](int64_t o, int64_t n) { return dy(n, o); }, x);
    EXPECT_LT(error_of(p.y.values(), y), tolerance(DType::f32));
    EXPECT_LT(error_of(p.dx.values(), dx), tolerance(DType::f32));
    EXPECT_LT(error_of(p.more_dx.values(), sum_of(dx, dx_before)), tolerance(DType::f32));
    EXPECT_LT(error_of(p.dw.values(), dw), tolerance(DType::f32));
    EXPECT_LT(error_of(p.more_dw.values(), sum_of(dw, dw_before)), tolerance(DType::f32));
    EXPECT_TRUE(p.gaps_untouched());
  }
}

TEST_P(FewRows, DoNotDependOnThreadsOrOtherRows) {
  Products all(33, GetParam());
  all.run(1);
  for (int threads : {2, 3}) {
    Products again(33, GetParam());
    again.run(threads);
    EXPECT_EQ(again.y.bytes(), all.y.bytes());
    EXPECT_EQ(again.dx.bytes(), all.dx.bytes());
    EXPECT_EQ(again.more_dx.bytes(), all.more_dx.bytes());
    EXPECT_EQ(again.dw.bytes(), all.dw.bytes());
    EXPECT_EQ(again.more_dw.bytes(), all.more_dw.bytes());
  }
  for (int64_t N : {1, 7, 16, 20, 32}) {
    Products some(N, GetParam());  // the first rows of the same values
    some.run(1);
    const auto starts = [](const Matrix& whole, const Matrix& start) {
      const Values a = whole.values(), b = start.values();
      return std::equal(b.begin(), b.end(), a.begin());
    };
    EXPECT_TRUE(starts(all.y, some.y)) << N;
    EXPECT_TRUE(starts(all.dx, some.dx)) << N;
  }
}

// Rows at the limits, where one row more or less is the library's.
TEST_P(FewRows, AgreeWithTheLibrary) {
  const Dims d = GetParam();
  Gemm gemm(1);
  for (const Rows rows : {kFewRowsOfLinear, kFewRowsOfDgrad, kFewRowsOfWgrad})
    for (int64_t N : {rows.least - 1, rows.least, rows.most, rows.most + 1}) {
      if (N == 0) continue;
      SCOPED_TRACE(N);
      Products own(N, d), library(N, d);
      own.run(1);
      gemm.linear(library.x.tensor(), library.w.tensor(), library.y.tensor());
      gemm.linear_dgrad(library.dy.tensor(), library.w.tensor(), library.dx.tensor(), false);
      gemm.linear_wgrad(library.dy.tensor(), library.x.tensor(), library.more_dw.tensor(), true);
      EXPECT_LT(error_of(own.y.values(), library.y.values()), tolerance(DType::f32));
      EXPECT_LT(error_of(own.dx.values(), library.dx.values()), tolerance(DType::f32));
      EXPECT_LT(error_of(own.more_dw.values(), library.more_dw.values()), tolerance(DType::f32));
    }
}

INSTANTIATE_TEST_SUITE_P(Shapes, FewRows,
                         testing::Values(Dims{1, 40, 1}, Dims{40, 1, 1}, Dims{13, 5, 3},
                                         Dims{33, 64, 0}, Dims{64, 33, 32}, Dims{130, 65, 1},
                                         Dims{48, 272, 0}, Dims{512, 24, 0}));

// Gradients that start anywhere: only whole vectors at their alignment are streamed.
TEST(FewRowsOfWgrad, AtAnyAddress) {
  constexpr int64_t N = 5, I = 64, O = 9;
  Matrix x = Matrix::random(DType::f32, N, I, 1), dy = Matrix::random(DType::f32, N, O, 2);
  std::vector<float> memory(O * I + 64);
  std::vector<float> first;
  for (int64_t start = 0; start < 32; ++start) {
    std::fill(memory.begin(), memory.end(), -7.f);
    linear_wgrad_few_rows(Team(1), dy.tensor(), x.tensor(),
                          Tensor(memory.data() + start, DType::f32, {O, I}), false);
    const auto begin = memory.begin() + start, end = begin + O * I;
    if (start == 0) first.assign(begin, end);
    EXPECT_TRUE(std::equal(first.begin(), first.end(), begin)) << start;
    EXPECT_TRUE(std::all_of(memory.begin(), begin, [](float v) { return v == -7.f; }));
    EXPECT_TRUE(std::all_of(end, memory.end(), [](float v) { return v == -7.f; }));
  }
}

}  // namespace
}  // namespace qshard::cpu
