#include "train/adamw.h"

#include <gtest/gtest.h>

#include <cmath>

#include "../test_main.h"

namespace qshard {
namespace {

// A unit of one matrix and one vector, with weights and gradients that a formula gives.
struct SmallUnit {
  Sharding sharding;
  std::unique_ptr<Unit> unit;

  explicit SmallUnit(DType param_dtype) {
    FsdpOptions options;
    options.param_dtype = param_dtype;
    sharding.mesh = std::make_unique<Mesh>(test_world(), MeshShape{1, 1, "", 0});
    sharding.collectives = make_collectives("mpi", test_world(), test_backend(), 1);
    unit =
        std::make_unique<Unit>("small", std::vector<ParamSpec>{{"matrix", {5, 7}}, {"vector", {9}}},
                               true, true, options, sharding, test_backend());
    sharding.finish_setup();
    unit->attach();
    for (int i = 0; i < 2; ++i)
      for (int64_t j = 0; j < unit->master(i).numel(); ++j)
        unit->master(i).as<float>()[j] = static_cast<float>(std::sin(3 * i + j));
    unit->cast_to_compute();
    unit->publish();
  }
  void set_gradient(int step) {
    for (int i = 0; i < 2; ++i)
      for (int64_t j = 0; j < unit->grad_shard(i).numel(); ++j)
        unit->grad_shard(i).as<float>()[j] = static_cast<float>(std::cos(step + 2 * i + 0.7 * j));
  }
};

// PyTorch's AdamW in double: decay, moments, bias corrections, eps outside the root's correction.
double reference(double p, int param, int64_t j, const AdamWOptions& o, double lr, int steps,
                 double grad_scale) {
  const double decay = param == 1 && o.decay_matrices_only ? 0 : o.weight_decay;
  double m = 0, v = 0;
  for (int t = 1; t <= steps; ++t) {
    const double g = static_cast<float>(std::cos(t + 2 * param + 0.7 * j)) * grad_scale;
    p -= lr * decay * p;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, t)), v_root = std::sqrt(v);
    p -= lr * m_hat / (v_root / std::sqrt(1 - std::pow(o.beta2, t)) + o.eps);
  }
  return p;
}

class AdamW : public testing::TestWithParam<bool> {};

TEST_P(AdamW, MatchesPyTorchsFormulaOnEveryParameter) {
  AdamWOptions options;
  options.decay_matrices_only = GetParam();
  SmallUnit small(DType::f32);
  for (int step = 1; step <= 5; ++step) {
    small.set_gradient(step);
    adamw_update(*small.unit, *test_backend().ops, options, 1e-2, step, 0.25f);
  }
  for (int i = 0; i < 2; ++i)
    for (int64_t j = 0; j < small.unit->master(i).numel(); ++j) {
      const double start = static_cast<float>(std::sin(3 * i + j));
      EXPECT_NEAR(small.unit->master(i).as<float>()[j],
                  reference(start, i, j, options, 1e-2, 5, 0.25), 2e-6)
          << "parameter " << i << " element " << j;
    }
}
INSTANTIATE_TEST_SUITE_P(DecayMatricesOnly, AdamW, testing::Bool());

TEST(AdamWUpdate, Bf16CopyIsTheRoundedMaster) {
  SmallUnit small(DType::bf16);
  small.set_gradient(1);
  adamw_update(*small.unit, *test_backend().ops, {}, 1e-2, 1, 1.0f);
  for (int i = 0; i < 2; ++i) {
    const Tensor rounded = small.unit->compute_shard(i), master = small.unit->master(i);
    std::vector<float> back(rounded.numel());
    test_backend().ops->cast(rounded, Tensor::of(back.data(), rounded.shape));
    for (int64_t j = 0; j < master.numel(); ++j)
      EXPECT_NEAR(back[j], master.as<float>()[j], std::abs(back[j]) / 256) << i << " " << j;
  }
}

TEST(AdamWUpdate, SumOfSquaresCoversAllParametersWithoutPadding) {
  SmallUnit small(DType::f32);
  small.set_gradient(1);
  double expected = 0;
  for (int i = 0; i < 2; ++i)
    for (int64_t j = 0; j < (i == 0 ? 35 : 9); ++j)
      expected += std::pow(static_cast<float>(std::cos(1 + 2 * i + 0.7 * j)), 2);
  double total = 2;
  add_grad_sum_squares(*small.unit, *test_backend().ops, Tensor::of(&total, {1}));
  EXPECT_NEAR(total, 2 + expected, 1e-12);
}

TEST(AdamWUpdate, ClipFactor) {
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0f);
  EXPECT_EQ(clip_factor(1e9, 0), 1.0f);  // 0: no clipping
  EXPECT_FLOAT_EQ(clip_factor(4.0, 1.0), static_cast<float>(1 / (4 + 1e-6)));
  EXPECT_FLOAT_EQ(clip_factor(1.0, 1.0), static_cast<float>(1 / (1 + 1e-6)));  // as PyTorch
}

}  // namespace
}  // namespace qshard
