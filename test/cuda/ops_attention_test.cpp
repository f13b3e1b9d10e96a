#include "cuda_ops_reference.h"

namespace qshard {
namespace {

struct Case {
  AttentionShape s;
  DType dtype;
  int64_t gap;
};

// q, k, v and their gradients are views of one fused matrix, as in the model; gap widens every row.
class CudaAttention : public testing::TestWithParam<Case> {
 protected:
  static Tensor part(const Tensor& fused, const AttentionShape& s, int which) {
    const int64_t q = s.H * s.D, kv = s.K * s.D, ends[] = {0, q, q + kv, q + 2 * kv};
    return fused.col_range(ends[which], ends[which + 1]);
  }
  static Floats part_of(const Floats& fused, const AttentionShape& s, int which) {
    const Tensor all = Tensor::of(fused.data(), {s.B * s.T, (s.H + 2 * s.K) * s.D});
    const Tensor view = part(all, s, which);
    Floats values;
    for (int64_t n = 0; n < view.rows(); ++n) {
      const float* row = view.as<float>() + n * view.ld;
      values.insert(values.end(), row, row + view.cols());
    }
    return values;
  }

  void run(float scale, double limit) {
    const auto& [s, dtype, gap] = GetParam();
    const int64_t N = s.B * s.T, cols = (s.H + 2 * s.K) * s.D;
    Twin qkv = Twin::random(dtype, N, cols, 1, gap, scale), d_qkv(dtype, N, cols, gap);
    Twin o(dtype, N, s.H * s.D, gap), d_o = Twin::random(dtype, N, s.H * s.D, 2, gap);
    Twin lse(DType::f32, s.B * s.H, s.T);
    const Tensor x = qkv.gpu(), y = qkv.cpu(), dx = d_qkv.gpu(), dy = d_qkv.cpu();
    const Shape lse_shape{s.B, s.H, s.T};

    cuda_ops().attention(part(x, s, 0), part(x, s, 1), part(x, s, 2), s, o.gpu(),
                         lse.gpu_shaped(lse_shape));
    cpu_ops().attention(part(y, s, 0), part(y, s, 1), part(y, s, 2), s, o.cpu(),
                        lse.cpu_shaped(lse_shape));
    EXPECT_LT(error_of(o.download(), o.host()), limit);
    EXPECT_LT(error_of(lse.download(), lse.host()), 1e-5);

    cuda_ops().attention_grad(part(x, s, 0), part(x, s, 1), part(x, s, 2), o.gpu(), d_o.gpu(),
                              lse.gpu_shaped(lse_shape), s, part(dx, s, 0), part(dx, s, 1),
                              part(dx, s, 2));
    cpu_ops().attention_grad(part(y, s, 0), part(y, s, 1), part(y, s, 2), o.cpu(), d_o.cpu(),
                             lse.cpu_shaped(lse_shape), s, part(dy, s, 0), part(dy, s, 1),
                             part(dy, s, 2));
    const Floats gpu = d_qkv.download();
    // The gradients of q and k cancel (Σ ds = 0) and are zero for T = 1: measured against dv's size
    // too.
    const Floats dv = part_of(d_qkv.host(), s, 2);
    const float smallest = 0.02f * std::abs(*std::max_element(dv.begin(), dv.end()));
    for (int which = 0; which < 3; ++which) {
      Floats a = part_of(gpu, s, which), b = part_of(d_qkv.host(), s, which);
      a.push_back(smallest);
      b.push_back(smallest);
      EXPECT_LT(error_of(a, b), 2 * limit) << "of q, k, v: " << which;
    }
    const std::vector<char> first = d_qkv.download_bytes();
    cuda_ops().attention_grad(part(x, s, 0), part(x, s, 1), part(x, s, 2), o.gpu(), d_o.gpu(),
                              lse.gpu_shaped(lse_shape), s, part(dx, s, 0), part(dx, s, 1),
                              part(dx, s, 2));
    EXPECT_EQ(d_qkv.download_bytes(), first) << "not repeatable";
  }

  double limit() const {
    switch (GetParam().dtype) {
      case DType::bf16:
        return 0.015;
      case DType::fp16:
        return 0.002;
      default:
        return 1e-5;
    }
  }
};

TEST_P(CudaAttention, IsTheCpus) { run(1, limit()); }

// Scores of some hundreds: the softmax is nearly one-hot, and exp would overflow without its shift.
TEST_P(CudaAttention, LargeScores) { run(6, 3 * limit()); }

// Ragged ends before, at and after the tiles' edges; groups of 1, 2 and 3 query heads.
std::vector<Case> cases() {
  const AttentionShape tensor[] = {{1, 1, 1, 1, 64},   {2, 8, 4, 2, 64},   {1, 65, 2, 1, 64},
                                   {1, 129, 1, 1, 64}, {1, 200, 3, 1, 64}, {2, 31, 2, 1, 128},
                                   {1, 33, 1, 1, 128}, {1, 130, 2, 2, 128}};
  const AttentionShape general[] = {{1, 1, 1, 1, 2},   {1, 33, 3, 1, 6},   {2, 17, 2, 1, 64},
                                    {1, 65, 2, 1, 80}, {1, 20, 2, 2, 256}, {1, 18, 1, 1, 384}};
  std::vector<Case> all;
  for (const AttentionShape& s : tensor)
    for (DType dtype : {DType::bf16, DType::fp16}) all.push_back({s, dtype, s.T % 2 ? 8 : 0});
  for (const AttentionShape& s : general)
    for (DType dtype : {DType::f32, DType::bf16}) all.push_back({s, dtype, s.T % 2 ? 5 : 0});
  all.push_back({{1, 20, 2, 1, 64}, DType::bf16, 3});  // rows that tensor cores cannot take
  return all;
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return fmt::format("B{}T{}H{}K{}D{}_{}_gap{}", c.s.B, c.s.T, c.s.H, c.s.K, c.s.D,
                     dtype_name(c.dtype), c.gap);
}
INSTANTIATE_TEST_SUITE_P(Shapes, CudaAttention, testing::ValuesIn(cases()), case_name);

TEST(CudaAttentionErrors, Shapes) {
  Twin q(DType::f32, 6, 8), k(DType::f32, 6, 4), lse(DType::f32, 2, 6);
  const Tensor l = lse.gpu_shaped({2, 2, 3});
  const AttentionShape s{2, 3, 2, 1, 4};
  auto& ops = cuda_ops();
  EXPECT_THROW(ops.attention(q.gpu(), q.gpu(), k.gpu(), s, q.gpu(), l), Error);
  EXPECT_THROW(ops.attention(q.gpu(), k.gpu(), k.gpu(), s, q.gpu(), lse.gpu()), Error);
  EXPECT_THROW(ops.attention(q.gpu(), k.gpu(), k.gpu(), {2, 3, 2, 3, 4}, q.gpu(), l), Error);
  Twin wide(DType::f32, 2, 400);
  EXPECT_THROW(ops.attention(wide.gpu(), wide.gpu(), wide.gpu(), {1, 2, 1, 1, 400}, wide.gpu(),
                             lse.gpu_shaped({1, 1, 2})),
               Error);
}

}  // namespace
}  // namespace qshard
