#include "cpu/attention.h"
#include "ops_reference.h"

namespace qshard {
namespace {

// Plain causal attention in double over [N, heads·D] matrices.
struct Reference {
  AttentionShape s;

  size_t at(int64_t b, int64_t t, int64_t head, int64_t heads, int64_t d) const {
    return static_cast<size_t>(((b * s.T + t) * heads + head) * s.D + d);
  }

  // Scaled scores of one query over keys 0…t, and the log of their sum of exponentials.
  Values scores(const Values& q, const Values& k, int64_t b, int64_t h, int64_t t,
                double* lse) const {
    Values row;
    double largest = -HUGE_VAL, sum = 0;
    for (int64_t j = 0; j <= t; ++j) {
      double score = 0;
      for (int64_t d = 0; d < s.D; ++d)
        score += q[at(b, t, h, s.H, d)] * k[at(b, j, h / (s.H / s.K), s.K, d)];
      row.push_back(score / std::sqrt(static_cast<double>(s.D)));
      largest = std::max(largest, row.back());
    }
    for (double score : row) sum += std::exp(score - largest);
    *lse = largest + std::log(sum);
    return row;
  }

  struct Result {
    Values o, lse, dq, dk, dv;
  };

  template <typename F>
  void for_each_query(F&& f) const {
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = 0; h < s.H; ++h)
        for (int64_t t = 0; t < s.T; ++t) f(b, h, t, h / (s.H / s.K));
  }

  Result forward(const Values& q, const Values& k, const Values& v) const {
    Result r;
    r.o.assign(q.size(), 0);
    for_each_query([&](int64_t b, int64_t h, int64_t t, int64_t kv) {
      double lse;
      const Values row = scores(q, k, b, h, t, &lse);
      for (int64_t j = 0; j <= t; ++j)
        for (int64_t d = 0; d < s.D; ++d)
          r.o[at(b, t, h, s.H, d)] +=
              std::exp(row[static_cast<size_t>(j)] - lse) * v[at(b, j, kv, s.K, d)];
      r.lse.push_back(lse);
    });
    return r;
  }

  Result backward(const Values& q, const Values& k, const Values& v, const Values& d_o) const {
    Result r = forward(q, k, v);
    r.dq.assign(q.size(), 0), r.dk.assign(k.size(), 0), r.dv.assign(v.size(), 0);
    const double scale = 1 / std::sqrt(static_cast<double>(s.D));
    for_each_query([&](int64_t b, int64_t h, int64_t t, int64_t kv) {
      double lse, delta = 0;
      const Values row = scores(q, k, b, h, t, &lse);
      for (int64_t d = 0; d < s.D; ++d)
        delta += d_o[at(b, t, h, s.H, d)] * r.o[at(b, t, h, s.H, d)];
      for (int64_t j = 0; j <= t; ++j) {
        const double p = std::exp(row[static_cast<size_t>(j)] - lse);
        double dp = 0;
        for (int64_t d = 0; d < s.D; ++d) dp += d_o[at(b, t, h, s.H, d)] * v[at(b, j, kv, s.K, d)];
        const double ds = p * (dp - delta) * scale;
        for (int64_t d = 0; d < s.D; ++d) {
          r.dq[at(b, t, h, s.H, d)] += ds * k[at(b, j, kv, s.K, d)];
          r.dk[at(b, j, kv, s.K, d)] += ds * q[at(b, t, h, s.H, d)];
          r.dv[at(b, j, kv, s.K, d)] += p * d_o[at(b, t, h, s.H, d)];
        }
      }
    });
    return r;
  }
};

TEST(AttentionReference, GradientsAreDifferences) {
  const AttentionShape s{2, 3, 2, 1, 4};
  const Reference reference{s};
  const Values q = Matrix::random(DType::f32, 6, 8, 1).values(),
               k = Matrix::random(DType::f32, 6, 4, 2).values();
  const Values v = Matrix::random(DType::f32, 6, 4, 3).values(),
               d_o = Matrix::random(DType::f32, 6, 8, 4).values();
  const auto loss = [&](const Values& q_, const Values& k_, const Values& v_) {
    return dot(reference.forward(q_, k_, v_).o, d_o);
  };
  const Reference::Result r = reference.backward(q, k, v, d_o);
  EXPECT_LT(error_of(r.dq, numeric_gradient(q, [&](const Values& x) { return loss(x, k, v); })),
            1e-8);
  EXPECT_LT(error_of(r.dk, numeric_gradient(k, [&](const Values& x) { return loss(q, x, v); })),
            1e-8);
  EXPECT_LT(error_of(r.dv, numeric_gradient(v, [&](const Values& x) { return loss(q, k, x); })),
            1e-8);
}

struct Case {
  AttentionShape s;
  DType dtype;
  cpu::Bf16Products products;
  int64_t gap;
};

// q, k, v and their gradients are views of one fused matrix, as in the model; gap widens every row.
class Attention : public testing::TestWithParam<Case> {
 protected:
  void run(double scale) {
    const Tensor qkv = qkv_.tensor(), d_qkv = d_qkv_.tensor();
    for (int64_t i = 0; i < N_; ++i)
      for (int64_t j = 0; j < q_cols_ + 2 * kv_cols_; ++j) qkv_.set(i, j, scale * qkv_.get(i, j));
    const auto split = [&](const Tensor& t, int part) {
      const int64_t ends[] = {0, q_cols_, q_cols_ + kv_cols_, q_cols_ + 2 * kv_cols_};
      return t.col_range(ends[part], ends[part + 1]);
    };
    const Tensor q = split(qkv, 0), k = split(qkv, 1), v = split(qkv, 2), o = o_.tensor();
    const Tensor lse = lse_.shaped({s_.B, s_.H, s_.T});
    const cpu::Team team(1);
    std::vector<float> scratch(static_cast<size_t>(cpu::attention_scratch(s_, 1)), std::nanf(""));
    cpu::attention_forward(team, {q, k, v, o, lse}, s_, scratch.data(), GetParam().products);
    std::fill(scratch.begin(), scratch.end(), std::nanf(""));
    cpu::attention_backward(
        team, {q, k, v, o, d_o_.tensor(), lse, split(d_qkv, 0), split(d_qkv, 1), split(d_qkv, 2)},
        s_, scratch.data(), GetParam().products);
  }

  void compare(double limit) {
    const Values all = qkv_.values(), d_all = d_qkv_.values();
    const auto part = [&](const Values& fused, int64_t begin, int64_t cols) {
      Values values;
      for (int64_t n = 0; n < N_; ++n)
        for (int64_t c = 0; c < cols; ++c)
          values.push_back(fused[static_cast<size_t>(n * (q_cols_ + 2 * kv_cols_) + begin + c)]);
      return values;
    };
    const Reference::Result r =
        Reference{s_}.backward(part(all, 0, q_cols_), part(all, q_cols_, kv_cols_),
                               part(all, q_cols_ + kv_cols_, kv_cols_), d_o_.values());
    EXPECT_LT(error_of(o_.values(), r.o), limit);
    EXPECT_LT(error_of(lse_.values(), r.lse), 1e-5);
    // The gradients cancel (Σ ds = 0), and are all zero for T = 1: measured against dv's size, too.
    const double smallest = 1e-3 * *std::max_element(r.dv.begin(), r.dv.end());
    const auto padded = [&](Values v) { return v.push_back(smallest), v; };
    EXPECT_LT(error_of(padded(part(d_all, 0, q_cols_)), padded(r.dq)), 2 * limit);
    EXPECT_LT(error_of(padded(part(d_all, q_cols_, kv_cols_)), padded(r.dk)), 2 * limit);
    EXPECT_LT(error_of(part(d_all, q_cols_ + kv_cols_, kv_cols_), r.dv), 2 * limit);
    EXPECT_TRUE(o_.gaps_untouched() && d_qkv_.gaps_untouched());
  }

  const AttentionShape s_ = GetParam().s;
  const DType dtype_ = GetParam().dtype;
  const int64_t N_ = s_.B * s_.T, q_cols_ = s_.H * s_.D, kv_cols_ = s_.K * s_.D,
                gap_ = GetParam().gap;
  Matrix qkv_ = Matrix::random(dtype_, N_, q_cols_ + 2 * kv_cols_, 1, 1, gap_);
  Matrix d_qkv_{dtype_, N_, q_cols_ + 2 * kv_cols_, gap_};
  Matrix o_{dtype_, N_, q_cols_, gap_}, d_o_ = Matrix::random(dtype_, N_, q_cols_, 2, 1, gap_);
  Matrix lse_{DType::f32, s_.B* s_.H, s_.T};
};

TEST_P(Attention, IsTheReference) {
  run(1);
  compare(dtype_ == DType::f32 ? 1e-5 : dtype_ == DType::fp16 ? 0.002 : 0.015);
}

// Scores of some hundreds: the softmax is nearly one-hot, and exp would overflow without its shift.
TEST_P(Attention, LargeScores) {
  run(8);
  compare(dtype_ == DType::f32 ? 1e-4 : dtype_ == DType::fp16 ? 0.004 : 0.03);
}

std::vector<Case> cases() {
  const AttentionShape shapes[] = {
      {1, 1, 1, 1, 2},    {2, 8, 8, 4, 64},  {1, 63, 2, 1, 32},  {1, 64, 2, 2, 16},
      {1, 65, 3, 1, 4},   {1, 96, 1, 1, 80}, {2, 100, 4, 2, 64}, {1, 129, 2, 1, 128},
      {1, 33, 6, 2, 256}, {3, 17, 2, 1, 6},  {1, 200, 2, 2, 34},
  };
  std::vector<Case> all;
  for (const AttentionShape& s : shapes)
    for (int64_t gap : {0, 5}) {
      for (DType dtype : {DType::f32, DType::bf16, DType::fp16})
        all.push_back({s, dtype, cpu::Bf16Products::converted, gap});
      if (cpu::kBestBf16Products == cpu::Bf16Products::native)
        all.push_back({s, DType::bf16, cpu::Bf16Products::native, gap});
    }
  return all;
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return fmt::format("B{}T{}H{}K{}D{}_{}_{}_gap{}", c.s.B, c.s.T, c.s.H, c.s.K, c.s.D,
                     dtype_name(c.dtype),
                     c.products == cpu::Bf16Products::native ? "native" : "converted", c.gap);
}
INSTANTIATE_TEST_SUITE_P(Shapes, Attention, testing::ValuesIn(cases()), case_name);

TEST(AttentionOp, ScratchIsLinearInT) {
  const int64_t once = cpu::attention_scratch({1, 4096, 1, 1, 64}, 1);
  const int64_t twice = cpu::attention_scratch({1, 8192, 1, 1, 64}, 1);
  EXPECT_LT(static_cast<double>(twice), 2.01 * static_cast<double>(once));
}

TEST(AttentionErrors, Shapes) {
  Matrix q(DType::f32, 6, 8), k(DType::f32, 6, 4), lse(DType::f32, 2, 6);
  const Tensor l = lse.shaped({2, 2, 3});
  const AttentionShape s{2, 3, 2, 1, 4};
  EXPECT_THROW(test_ops().attention(q.tensor(), q.tensor(), k.tensor(), s, q.tensor(), l), Error);
  EXPECT_THROW(
      test_ops().attention(q.tensor(), k.tensor(), k.tensor(), s, q.tensor(), lse.tensor()), Error);
  EXPECT_THROW(
      test_ops().attention(q.tensor(), k.tensor(), k.tensor(), {2, 3, 2, 3, 4}, q.tensor(), l),
      Error);
}

}  // namespace
}  // namespace qshard
