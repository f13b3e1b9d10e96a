#include "cuda_ops_reference.h"

namespace qshard {
namespace {

using enum DType;

class CudaAdamW : public testing::TestWithParam<std::tuple<DType, int64_t>> {};

TEST_P(CudaAdamW, FollowsTheCpu) {
  const auto [P, n] = GetParam();
  Twin p = Twin::random(f32, 1, n, 1), m(f32, 1, n, Floats(static_cast<size_t>(n), 0));
  Twin v(f32, 1, n, Floats(static_cast<size_t>(n), 0)), p_out(P, 1, n);
  Floats p_cpu = p.host();
  for (uint32_t step = 1; step <= 3; ++step) {
    Twin g = Twin::random(f32, 1, n, 10 + step, 0, step == 2 ? 1e-7f : 1.f);
    const AdamWStep s{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 0.5f};
    cuda_ops().adamw(p.gpu_vector(), g.gpu_vector(), m.gpu_vector(), v.gpu_vector(),
                     p_out.gpu_vector(), s);
    cpu_ops().adamw(p.cpu_vector(), g.cpu_vector(), m.cpu_vector(), v.cpu_vector(), {}, s);
  }
  EXPECT_LT(error_of(p.download(), p.host()), 1e-6);
  EXPECT_LT(error_of(m.download(), m.host()), 1e-6);
  EXPECT_LT(error_of(v.download(), v.host()), 1e-6);
  EXPECT_EQ(p_out.download(), rounded(p.download(), P));

  Twin g = Twin::random(f32, 1, n, 20);
  cuda_ops().adamw(p.gpu_vector(), g.gpu_vector(), m.gpu_vector(), v.gpu_vector(), {},
                   {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 4, 1});
  EXPECT_GT(error_of(p.download(), p.host()), 1e-4);  // the step without p_out was taken
}
INSTANTIATE_TEST_SUITE_P(Sizes, CudaAdamW,
                         testing::Combine(testing::Values(f32, bf16, fp16),
                                          testing::Values(1, 4, 1003, 2048)));

// A piece that does not begin at a multiple of 16 bytes.
TEST(CudaAdamWEdges, UnalignedPiece) {
  Twin p = Twin::random(f32, 1, 40, 1), g = Twin::random(f32, 1, 40, 2);
  Twin m(f32, 1, 40, Floats(40, 0)), v(f32, 1, 40, Floats(40, 0));
  const AdamWStep s{1e-2f, 0.9f, 0.95f, 1e-8f, 0.f, 1, 1.f};
  const auto piece = [](Tensor t) { return t.row_range(3, 36); };
  cuda_ops().adamw(piece(p.gpu_vector()), piece(g.gpu_vector()), piece(m.gpu_vector()),
                   piece(v.gpu_vector()), {}, s);
  cpu_ops().adamw(piece(p.cpu_vector()), piece(g.cpu_vector()), piece(m.cpu_vector()),
                  piece(v.cpu_vector()), {}, s);
  EXPECT_LT(error_of(p.download(), p.host()), 1e-6);
}

TEST(CudaSum, InF64AndAdded) {
  for (int64_t n : {0, 1, 7, 5000}) {
    Twin x = Twin::random(f32, 1, n, 1);
    Buffer total(*cuda_backend().device, f64, {1}, Segment::workspace, "total");
    double expected = 3, squares = 0, result = 3;
    for (float value : x.host()) expected += value, squares += double{value} * value;
    cuda_backend().device->copy(total->data, &result, sizeof result);
    cuda_ops().add_sum(x.gpu_vector(), total);
    cuda_backend().device->copy(&result, total->data, sizeof result);
    EXPECT_NEAR(result, expected, 1e-12 * std::max(1.0, squares));
    cuda_ops().add_sum_squares(x.gpu_vector(), total);
    cuda_backend().device->copy(&result, total->data, sizeof result);
    EXPECT_NEAR(result, expected + squares, 1e-12 * std::max(1.0, squares));
  }
}

// Neither vectors nor turns of the grid may skip an element: ones count them.
TEST(CudaSum, CountsEveryElement) {
  const int64_t n = int64_t{cuda::kSumBlocks} * 256 * 4 + 4099;
  Buffer ones(*cuda_backend().device, f32, {n}, Segment::workspace, "ones");
  cuda_ops().fill(ones, 1);
  Buffer total(*cuda_backend().device, f64, {1}, Segment::workspace, "total");
  double result = 0;
  for (const int64_t first : {0, 1}) {
    cuda_ops().add_sum(ones->row_range(first, n), total);
    cuda_backend().device->copy(&result, total->data, sizeof result);
    EXPECT_EQ(result, static_cast<double>(first == 0 ? n : 2 * n - 1));
  }
}

TEST(CudaCast, RoundsAsTheCpu) {
  // Ties, subnormals of fp16, overflow, infinities.
  Floats x = {0,     -0.f,          1,     -1.00390625f, 1.01171875f, 65504, 65520,
              1e-7f, 5.9604645e-8f, 3e38f, INFINITY,     -INFINITY};
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  while (x.size() < 70) x.push_back(normal(engine));
  const auto n = static_cast<int64_t>(x.size()) / 2;
  for (DType to : {f32, bf16, fp16}) {
    for (int64_t gap : {0, 1, 8}) {
      Twin from(f32, 2, n, x, gap), rounded_twin(to, 2, n, gap), back(f32, 2, n);
      cuda_ops().cast(from.gpu(), rounded_twin.gpu());
      EXPECT_EQ(rounded_twin.download(), rounded(x, to));
      cuda_ops().cast(rounded_twin.gpu(), back.gpu());
      EXPECT_EQ(back.download(), rounded(x, to));
    }
  }
}

TEST(CudaSumParts, InOrder) {
  for (DType dtype : {f32, bf16, fp16}) {
    for (int64_t n : {1, 64, 77}) {
      std::vector<Twin> parts;
      for (uint32_t i = 0; i < 5; ++i) parts.push_back(Twin::random(dtype, 1, n, i));
      Twin out = Twin::random(f32, 1, n, 9);
      std::vector<Tensor> gpu, cpu;
      for (Twin& part : parts) gpu.push_back(part.gpu_vector()), cpu.push_back(part.cpu_vector());
      for (bool accumulate : {true, false}) {
        cuda_ops().sum_parts(gpu, 0.2f, out.gpu_vector(), accumulate);
        cpu_ops().sum_parts(cpu, 0.2f, out.cpu_vector(), accumulate);
        EXPECT_LT(error_of(out.download(), out.host()), 1e-6);
      }
    }
  }
}

// The same numbers as on the CPU wherever the range is cut (to the last bits of log and sin).
TEST(CudaInitNormal, IsTheCpus) {
  for (int64_t first : {0, 1, 6, 1027}) {
    Twin x(f32, 1, 50);
    cuda_ops().init_normal(x.gpu_vector(), 12345678901ull, 42, first, 0.02f);
    cpu_ops().init_normal(x.cpu_vector(), 12345678901ull, 42, first, 0.02f);
    EXPECT_LT(error_of(x.download(), x.host()), 1e-6);
  }
}

TEST(CudaFill, EveryElementAndNoOther) {
  for (DType dtype : {f32, bf16, fp16}) {
    Twin x = Twin::random(dtype, 1, 50, 1);
    Floats expected = x.host();
    std::fill(expected.begin() + 3, expected.begin() + 45, 1.5f);
    cuda_ops().fill(x.gpu_vector().row_range(3, 45), 1.5f);
    EXPECT_EQ(x.download(), expected);
  }
}

TEST(CudaOptimizerErrors, SizesAndDtypes) {
  Twin x(f32, 1, 8), y(f32, 1, 7), half(bf16, 1, 8);
  auto& ops = cuda_ops();
  EXPECT_THROW(ops.adamw(x.gpu_vector(), y.gpu_vector(), x.gpu_vector(), x.gpu_vector(), {},
                         {0, 0, 0, 1, 0, 1, 1}),
               Error);
  EXPECT_THROW(ops.adamw(x.gpu_vector(), x.gpu_vector(), x.gpu_vector(), x.gpu_vector(), {},
                         {0, 0, 0, 1, 0, 0, 1}),
               Error);
  EXPECT_THROW(ops.add_sum(x.gpu_vector(), x.gpu_vector()), Error);
  EXPECT_THROW(ops.cast(x.gpu(), y.gpu()), Error);
  EXPECT_THROW(ops.sum_parts({}, 1, x.gpu_vector(), false), Error);
  EXPECT_THROW(ops.init_normal(half.gpu_vector(), 1, 1, 0, 1), Error);
}

}  // namespace
}  // namespace qshard
