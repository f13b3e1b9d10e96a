// The training step on a GPU: how often the host waits for it, and its states in the host's memory.
#include "../cudasim/src/scheduler.h"
#include "../mpi/tiny_model.h"
#include "cuda_ops_reference.h"
#include "train/plan.h"

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

// Waits of each of 3 calls, also those for what a fast device had done before the host asked.
template <typename Fn>
std::vector<int64_t> waits_of(Fn fn) {
  std::vector<int64_t> waits;
  for (int i = 0; i < 3; ++i) {
    const int64_t before = cudasim::host_waits();
    fn();
    waits.push_back(cudasim::host_waits() - before);
  }
  return waits;
}

const std::vector<int64_t> kOnce(3, 1);

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
  EXPECT_EQ(waits_of([&] { engine.step(pinned, run.lr); }), kOnce);
  EXPECT_EQ(waits_of([&] { engine.evaluate(pinned); }), kOnce);
  // The count sees others: four copies of tokens that lie elsewhere.
  const std::vector<int64_t> copies(3, 5);
  EXPECT_EQ(waits_of([&] { engine.step(pageable, run.lr); }), copies);
}

TEST_P(CudaEngine, AStepAsGraphsWaitsOnce) {
  TinyRun run;
  run.fsdp.param_dtype = GetParam();
  Engine engine = make_engine(run);
  engine.use_graphs();
  const GlobalBatch batch(0, run.B, run.T, run.config.vocab_size);
  const std::vector<TokenBatch> batches(2, batch.from(0));
  engine.step(batches, run.lr);
  // The first of these records the graphs.
  EXPECT_EQ(waits_of([&] { engine.step(batches, run.lr); }), kOnce);
  EXPECT_EQ(engine.take_graph_reports().size(), 2u);
  EXPECT_EQ(waits_of([&] { engine.step(batches, run.lr); }), kOnce);
}

// Pieces so small that a unit has many, and that cut through parameters at any element.
TinyRun offloaded(TinyRun run) {
  run.fsdp.offload_optimizer = true;
  run.fsdp.offload_piece = 997;
  return run;
}

TEST_P(CudaEngine, AStepWithOffloadedStatesWaitsOnce) {
  TinyRun run;
  run.fsdp.param_dtype = GetParam();
  run = offloaded(run);
  Engine engine = make_engine(run);
  const GlobalBatch batch(0, run.B, run.T, run.config.vocab_size);
  const PinnedTokens tokens(batch);
  engine.step({tokens.batch()}, run.lr);
  EXPECT_EQ(waits_of([&] { engine.step({tokens.batch()}, run.lr); }), kOnce);
}

std::vector<float> values_of(const Tensor& t) {
  std::vector<float> values(t.numel());
  cuda_backend().device->copy(values.data(), t.data, t.bytes());
  return values;
}

// Losses and norms of some steps, then every state and the rows that are gathered next.
std::vector<std::vector<float>> outcome_of(const TinyRun& run) {
  Engine engine = make_engine(run);
  std::vector<std::vector<float>> values(1);
  for (const GlobalBatch& batch : some_batches(run, 3, run.B * test_world().size())) {
    const StepResult r = engine.step(deal(batch, run.B, Deal::split), run.lr);
    values[0].push_back(static_cast<float>(r.loss));
    values[0].push_back(static_cast<float>(r.grad_norm));
  }
  values.emplace_back();
  const GlobalBatch next(3, run.B, run.T, run.config.vocab_size);
  values[1].push_back(static_cast<float>(engine.evaluate({next.from(0)})));
  for (int u = 0; u < engine.model().num_units(); ++u) {
    const Unit& unit = engine.model().unit(u);
    for (int i = 0; i < unit.size(); ++i)
      for (const Tensor& t : {unit.master(i), unit.exp_avg(i), unit.exp_avg_sq(i)})
        values.push_back(values_of(t));
  }
  return values;
}

TEST_P(CudaEngine, OffloadedStatesGiveTheSameBits) {
  TinyRun run;
  run.fsdp.param_dtype = GetParam();
  const auto expected = outcome_of(run);
  for (const int64_t elements : {int64_t{997}, FsdpOptions{}.offload_piece}) {
    TinyRun offload = offloaded(run);
    offload.fsdp.offload_piece = elements;
    const auto found = outcome_of(offload);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].size(), expected[i].size());
      EXPECT_EQ(std::memcmp(found[i].data(), expected[i].data(), found[i].size() * 4), 0)
          << "values " << i << ", pieces of " << elements << ", expected the same bits";
    }
  }
}

// Byte for byte; the operators' scratch is no part of a plan, and what products take is there
// before.
TEST_P(CudaEngine, MemoryIsAsPlanned) {
  Device& device = *cuda_backend().device;
  for (const bool offload : {false, true}) {
    TinyRun run;
    run.fsdp.param_dtype = GetParam();
    run.transport = "nccl";
    if (offload) run = offloaded(run);
    MemoryUse before = memory_use(device);
    before.device[static_cast<size_t>(Segment::workspace)] -= kGpuProductBytes;
    const Engine engine = make_engine(run);
    const MemoryUse after = memory_use(device);
    const Plan plan = plan_step({run.config, run.fsdp, run.transport, test_world().size(),
                                 test_world().node_size(), run.B, run.T, 1});
    for (const Segment segment : kSegments) {
      const auto s = static_cast<size_t>(segment);
      EXPECT_EQ(after.device[s] - before.device[s], plan.memory.device[s])
          << segment_name(segment) << ", offloaded: " << offload;
      EXPECT_EQ(after.host[s] - before.host[s], plan.memory.host[s])
          << "host " << segment_name(segment) << ", offloaded: " << offload;
    }
    EXPECT_EQ(plan.host_total() > 0, offload);
  }
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
  TinyRun on_device;
  on_device.fsdp.param_dtype = GetParam();
  for (const TinyRun& run : {on_device, offloaded(on_device)}) {
    Engine engine = make_engine(run);
    Device& device = *cuda_backend().device;
    const GlobalBatch batch(0, run.B, run.T, run.config.vocab_size);
    const Unit& unit = engine.model().unit(0);
    for (const Tensor& state : {unit.master(0), unit.exp_avg(0)}) {
      const Buffer copy(device.host(), DType::f32, state.shape, Segment::workspace, "copy");
      for (int i = 0; i < 4; ++i) {
        const StepResult result = engine.compute_gradients({batch.from(0)});
        const std::vector<float> before = values_of(state);
        device.download_start(copy->data, state.data, state.bytes());
        engine.update(result, run.lr);
        device.download_wait();
        const float* values = copy->as<float>();
        EXPECT_EQ(std::vector<float>(values, values + state.numel()), before);
        EXPECT_NE(values_of(state), before);
      }
    }
  }
}

// Skipped on the GPU as on the CPU, where engine_test looks closer.
TEST(CudaLossScale, OverflowSkipsTheStepAndHalvesTheScale) {
  TinyRun run;
  run.fsdp.param_dtype = run.fsdp.reduce_dtype = DType::fp16;
  Engine engine = make_engine(run);
  const GlobalBatch batch(0, run.B, run.T, run.config.vocab_size);
  const Tensor weight = engine.model().unit(1).master(1),
               moment = engine.model().unit(1).exp_avg(1);
  const std::vector<float> before = values_of(weight);
  engine.scaler()->restore(0x1p40, 7);
  StepResult r = engine.step({batch.from(0)}, run.lr);
  int skipped = 0;
  for (; r.overflow; r = engine.step({batch.from(0)}, run.lr)) {
    ++skipped;
    EXPECT_EQ(engine.scaler()->scale(), std::ldexp(0x1p40, -skipped));
    EXPECT_EQ(values_of(weight), before);
    EXPECT_EQ(values_of(moment), std::vector<float>(moment.numel()));
    EXPECT_EQ(engine.updates(), 0);
  }
  EXPECT_GE(skipped, 10);
  EXPECT_EQ(engine.updates(), 1);
  EXPECT_TRUE(std::isfinite(r.grad_norm));
  EXPECT_NE(values_of(weight), before);
}

}  // namespace
}  // namespace qshard
