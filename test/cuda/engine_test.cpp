// The training step on a GPU: how often the host waits for it.
#include "../cudasim/src/scheduler.h"
#include "../mpi/tiny_model.h"
#include "cuda_ops_reference.h"

namespace qshard {
namespace {

// A micro-batch's tokens in memory of the device's host().
class PinnedTokens {
 public:
  explicit PinnedTokens(const GlobalBatch& batch)
      : ids_(copy_of(batch.ids)), labels_(copy_of(batch.labels)) {}
  TokenBatch batch() const { return {ids_->as<int32_t>(), labels_->as<int32_t>()}; }

 private:
  static Buffer copy_of(const std::vector<int32_t>& values) {
    Buffer copy(cuda_backend().device->host(), DType::i32, {std::ssize(values)}, Segment::workspace,
                "tokens");
    std::copy(values.begin(), values.end(), copy->as<int32_t>());
    return copy;
  }
  Buffer ids_, labels_;
};

Engine make_engine(const TinyRun& run) {
  Engine engine(run.config, run.fsdp, run.adamw, "nccl", run.B, run.T, test_world(),
                cuda_backend());
  engine.model().init_parameters(run.seed);
  return engine;
}

// Most waits of any of 3 calls. What the device had done before the host asked is not counted, so
// a single call may show less.
template <typename Fn>
int64_t most_waits(Fn fn) {
  int64_t most = 0;
  for (int i = 0; i < 3; ++i) {
    const int64_t before = cudasim::host_waits();
    fn();
    most = std::max(most, cudasim::host_waits() - before);
  }
  return most;
}

class CudaEngine : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, CudaEngine, testing::Values(DType::f32, DType::bf16, DType::fp16));

TEST_P(CudaEngine, AStepAndAnEvaluationWaitOnce) {
  TinyRun run;
  run.fsdp.param_dtype = GetParam();
  Engine engine = make_engine(run);
  const GlobalBatch batch(0, run.B, run.T, run.config.vocab_size);
  const PinnedTokens tokens(batch);
  const std::vector<TokenBatch> pinned(2, tokens.batch()), pageable(2, batch.from(0));
  engine.step(pinned, run.lr);  // operators get their scratch memory
  EXPECT_EQ(most_waits([&] { engine.step(pinned, run.lr); }), 1);
  EXPECT_EQ(most_waits([&] { engine.evaluate(pinned); }), 1);
  // The count sees others: up to four for copies of tokens that lie elsewhere.
  EXPECT_GT(most_waits([&] { engine.step(pageable, run.lr); }), 2);
}

TEST_P(CudaEngine, LossIsThatOfTheCpu) {
  TinyRun run;
  run.fsdp.param_dtype = GetParam();
  run.transport = "mpi";
  const auto batches = some_batches(run, 3, 2 * run.B);
  const Outcome cpu = train(run, batches, Deal::split);
  Engine engine = make_engine(run);
  const double tolerance = GetParam() == DType::f32    ? 1e-5
                           : GetParam() == DType::fp16 ? 5e-4
                                                       : 4e-3;
  for (size_t s = 0; s < batches.size(); ++s) {
    const StepResult r = engine.step(deal(batches[s], run.B, Deal::split), run.lr);
    EXPECT_NEAR(r.loss, cpu.losses[s], tolerance * cpu.losses[s]) << s;
    EXPECT_NEAR(r.grad_norm, cpu.norms[s], 2 * tolerance * cpu.norms[s]) << s;
  }
}

// A save in the background reads the weights while the next step is computed. Here the update comes
// at once, so that the simulator draws which of both would be first.
TEST_P(CudaEngine, AnUpdateWaitsForDownloads) {
  TinyRun run;
  run.fsdp.param_dtype = GetParam();
  Engine engine = make_engine(run);
  Device& device = *cuda_backend().device;
  const GlobalBatch batch(0, run.B, run.T, run.config.vocab_size);
  const Tensor weight = engine.model().unit(0).master(0);
  const Buffer copy(device.host(), DType::f32, weight.shape, Segment::workspace, "copy");
  for (int i = 0; i < 6; ++i) {
    const StepResult result = engine.compute_gradients({batch.from(0)});
    std::vector<float> before(weight.numel());
    device.copy(before.data(), weight.data, weight.bytes());
    device.download_start(copy->data, weight.data, weight.bytes());
    engine.update(result, run.lr);
    device.download_wait();
    const float* values = copy->as<float>();
    EXPECT_EQ(std::vector<float>(values, values + weight.numel()), before);
  }
}

// Skipped on the GPU as on the CPU, where engine_test looks closer.
TEST(CudaLossScale, OverflowSkipsTheStepAndHalvesTheScale) {
  TinyRun run;
  run.fsdp.param_dtype = run.fsdp.reduce_dtype = DType::fp16;
  Engine engine = make_engine(run);
  Device& device = *cuda_backend().device;
  const GlobalBatch batch(0, run.B, run.T, run.config.vocab_size);
  const auto values = [&](const Tensor& t) {
    std::vector<float> copy(t.numel());
    device.copy(copy.data(), t.data, t.bytes());
    return copy;
  };
  const Tensor weight = engine.model().unit(1).master(1),
               moment = engine.model().unit(1).exp_avg(1);
  const std::vector<float> before = values(weight);
  engine.scaler()->restore(0x1p40, 7);
  StepResult r = engine.step({batch.from(0)}, run.lr);
  int skipped = 0;
  for (; r.overflow; r = engine.step({batch.from(0)}, run.lr)) {
    ++skipped;
    EXPECT_EQ(engine.scaler()->scale(), std::ldexp(0x1p40, -skipped));
    EXPECT_EQ(values(weight), before);
    EXPECT_EQ(values(moment), std::vector<float>(moment.numel()));
    EXPECT_EQ(engine.updates(), 0);
  }
  EXPECT_GE(skipped, 10);
  EXPECT_EQ(engine.updates(), 1);
  EXPECT_TRUE(std::isfinite(r.grad_norm));
  EXPECT_NE(values(weight), before);
}

}  // namespace
}  // namespace qshard
