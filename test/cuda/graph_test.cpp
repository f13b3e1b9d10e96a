// Steps as graphs of the device: the same bits as without, on one rank.
#include "../mpi/tiny_model.h"
#include "cuda_ops_reference.h"

namespace qshard {
namespace {

using Values = std::vector<std::vector<float>>;

std::vector<float> values_of(const Tensor& t) {
  std::vector<float> values(t.numel());
  cuda_backend().device->copy(values.data(), t.data, t.bytes());
  return values;
}

void expect_same(const Values& found, const Values& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].size(), expected[i].size());
    EXPECT_EQ(std::memcmp(found[i].data(), expected[i].data(), found[i].size() * 4), 0)
        << "values " << i << ", expected the same bits";
  }
}

Engine make_engine(const TinyRun& run, bool graphs) {
  Engine engine(run.config, run.fsdp, run.adamw, "nccl", run.B, run.T, test_world(),
                cuda_backend());
  engine.model().init_parameters(run.seed);
  if (graphs) engine.use_graphs();
  return engine;
}

// All that changes from step to step does: tokens, their number, the rate, what clips.
std::vector<GlobalBatch> changing_batches(const TinyRun& run, int64_t micro_batches) {
  std::vector<GlobalBatch> batches = some_batches(run, 5, run.B * micro_batches);
  batches[1].ignore_row(0, 2);
  batches[3].ignore_row(1, 5);
  return batches;
}

void add_step(Engine& engine, const TinyRun& run, const GlobalBatch& batch, double lr,
              Values& values) {
  const StepResult r = engine.step(deal(batch, run.B, Deal::split), lr);
  values.push_back({static_cast<float>(r.loss), static_cast<float>(r.grad_norm),
                    static_cast<float>(r.loss_scale), r.updated ? 1.f : 0.f});
}

void add_states(Engine& engine, Values& values) {
  for (int u = 0; u < engine.model().num_units(); ++u) {
    const Unit& unit = engine.model().unit(u);
    for (int i = 0; i < unit.size(); ++i)
      for (const Tensor& t : {unit.master(i), unit.exp_avg(i), unit.exp_avg_sq(i)})
        values.push_back(values_of(t));
  }
}

// Of tokens in page-locked memory, so that the host does not wait for the update before it.
float evaluate(Engine& engine, const TinyRun& run, const GlobalBatch& batch) {
  const auto pinned = [&](const std::vector<int32_t>& values) {
    const int64_t n = run.B * run.T;
    Buffer copy(cuda_backend().device->host(), DType::i32, {n}, Segment::workspace, "tokens");
    std::copy_n(values.begin(), n, copy->as<int32_t>());
    return copy;
  };
  const Buffer ids = pinned(batch.ids), labels = pinned(batch.labels);
  return static_cast<float>(engine.evaluate({{ids->as<int32_t>(), labels->as<int32_t>()}}));
}

// Losses and norms of steps and of evaluations between them, then all states.
Values outcome_of(const TinyRun& run, int64_t micro_batches, bool graphs) {
  Engine engine = make_engine(run, graphs);
  Values values;
  double lr = run.lr;
  for (const GlobalBatch& batch : changing_batches(run, micro_batches)) {
    add_step(engine, run, batch, lr *= 0.7, values);
    values.push_back({evaluate(engine, run, batch)});
  }
  add_states(engine, values);
  const auto reports = engine.take_graph_reports();
  EXPECT_EQ(reports.size(), graphs ? 2u : 0u);
  for (const StepGraphs::Report& report : reports) EXPECT_GT(report.nodes, 10) << report.what;
  return values;
}

class CudaGraphs : public testing::TestWithParam<DType> {
 protected:
  TinyRun tiny() const {
    TinyRun run;
    run.fsdp.param_dtype = GetParam();
    run.adamw.clip = 0.5;
    return run;
  }
};
INSTANTIATE_TEST_SUITE_P(Dtypes, CudaGraphs, testing::Values(DType::f32, DType::bf16, DType::fp16));

TEST_P(CudaGraphs, GiveTheSameBits) {
  for (const int64_t micro_batches : {1, 3})
    expect_same(outcome_of(tiny(), micro_batches, true), outcome_of(tiny(), micro_batches, false));
}

TEST_P(CudaGraphs, GiveTheSameBitsWithOtherOptions) {
  TinyRun run = tiny();
  run.config.num_hidden_layers = 3;
  run.fsdp.reduce_dtype = GetParam();
  run.fsdp.activation_checkpoint = ActivationCheckpoint::full;
  run.fsdp.reduce_every_microbatch = run.fsdp.reshard_after_backward = false;
  run.fsdp.layers_per_unit = 2;
  expect_same(outcome_of(run, 2, true), outcome_of(run, 2, false));
}

// Those of another number are done without.
TEST_P(CudaGraphs, TakeStepsOfOneNumberOfMicroBatches) {
  const TinyRun run = tiny();
  Values outcomes[2];
  for (const bool graphs : {false, true}) {
    Engine engine = make_engine(run, graphs);
    Values& values = outcomes[graphs];
    for (const int64_t micro_batches : {2, 2, 1, 2, 3, 2})
      add_step(engine, run, GlobalBatch(1, micro_batches * run.B, run.T, run.config.vocab_size),
               run.lr, values);
    add_states(engine, values);
  }
  expect_same(outcomes[1], outcomes[0]);
}

// Larger scratch memory is got while a graph has the addresses of the smaller one.
TEST_P(CudaGraphs, SurviveAnotherModelOnTheDevice) {
  const TinyRun run = tiny();
  TinyRun larger = run;
  larger.T = 40;
  Values outcomes[2];
  for (const bool graphs : {false, true}) {
    Engine engine = make_engine(run, graphs);
    const auto batches = some_batches(run, 5, run.B);
    for (size_t s = 0; s < batches.size(); ++s) {
      if (s == 3) {
        larger.T += 40;
        Engine other = make_engine(larger, graphs);
        Values ignored;
        for (const GlobalBatch& batch : some_batches(larger, 3, run.B))
          add_step(other, larger, batch, run.lr, ignored);
      }
      add_step(engine, run, batches[s], run.lr, outcomes[graphs]);
    }
    add_states(engine, outcomes[graphs]);
  }
  expect_same(outcomes[1], outcomes[0]);
}

// The scale falls until nothing overflows: at first there are no updates, then they are recorded.
TEST(CudaGraphsLossScale, SkipTheSameSteps) {
  TinyRun run;
  run.fsdp.param_dtype = run.fsdp.reduce_dtype = DType::fp16;
  Values outcomes[2];
  for (const bool graphs : {false, true}) {
    Engine engine = make_engine(run, graphs);
    const GlobalBatch batch(0, run.B, run.T, run.config.vocab_size);
    engine.scaler()->restore(0x1p24, 7);
    while (engine.updates() < 4 && outcomes[graphs].size() < 40)
      add_step(engine, run, batch, run.lr, outcomes[graphs]);
    EXPECT_GT(outcomes[graphs].size(), 6u) << "nothing overflowed";
    engine.scaler()->restore(0x1p40, 7);  // once more, with both graphs there
    add_step(engine, run, batch, run.lr, outcomes[graphs]);
    EXPECT_EQ(outcomes[graphs].back()[3], 0);
    add_states(engine, outcomes[graphs]);
  }
  expect_same(outcomes[1], outcomes[0]);
}

// Work that is only recorded is not done; it reads what it is given when it runs.
TEST(CudaRecording, RunsWithTheNumbersInMemory) {
  Device& device = *cuda_backend().device;
  const auto buffer = [&](Device& where, int64_t n) {
    return Buffer(where, DType::f32, {n}, Segment::workspace, "test");
  };
  const int64_t n = 1000;
  const Buffer x = buffer(device, n), sum = buffer(device, n), factor = buffer(device, 1);
  const Buffer host = buffer(device.host(), 1);
  cuda_ops().fill(x, 2);
  const auto work = [&] {
    const Tensor part = x;
    cuda_ops().sum_parts({&part, 1}, Factor::of(factor->as<float>()), sum, true);
  };
  const std::unique_ptr<Recording> recording = device.record(work);
  EXPECT_EQ(recording->nodes(), 1);
  EXPECT_EQ(values_of(sum), std::vector<float>(n, 0));
  float expected = 0;
  for (const float f : {0.5f, 3.f}) {
    *host->as<float>() = f;
    device.enqueue_copy(factor->data, host->data, sizeof f);
    recording->run();
    expected += 2 * f;
    EXPECT_EQ(values_of(sum), std::vector<float>(n, expected));
  }
}

TEST(CudaRecording, IsOfTheGpuAlone) {
  EXPECT_THROW(test_backend().device->record([] {}), Error);
}

TEST(CudaGraphsRefusal, NamesTheFix) {
  const auto text = [](const std::string& transport, bool offload) -> std::string {
    try {
      require_graphs(transport, offload);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(text("nccl", false), "");
  for (const char* transport : {"shm", "mpi", "mpi-cuda"})
    EXPECT_NE(text(transport, false).find(std::string("here is ") + transport), std::string::npos);
  EXPECT_NE(text("nccl", true).find("fsdp.offload none"), std::string::npos);
}

}  // namespace
}  // namespace qshard
