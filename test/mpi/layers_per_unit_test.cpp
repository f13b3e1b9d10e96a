// Units of several layers against units of one: the same bits, other transfers.
#include <cmath>

#include "../unit/files.h"
#include "forwarding.h"
#include "model/qwen3_params.h"
#include "tiny_model.h"
#include "train/timeline.h"

namespace qshard {
namespace {

constexpr int kLayers = 5;

int ranks() { return test_world().size(); }

int units_of_layers(int k) { return (kLayers + k - 1) / k; }

class LayersPerUnit : public TinyRunOn<kLayers> {};
INSTANTIATE_TEST_SUITE_P(Transports, LayersPerUnit, testing::Values("shm", "mpi"));

// Two steps of two micro-batches.
Outcome outcome(const TinyRun& run) {
  return train(run, some_batches(run, 2, 2 * run.B * ranks()), Deal::split);
}

void expect_same_for_all_k(TinyRun run) {
  run.fsdp.layers_per_unit = 1;
  const Outcome expected = outcome(run);
  for (int k : {2, 3, kLayers}) {
    SCOPED_TRACE(fmt::format("{} layers a unit", k));
    run.fsdp.layers_per_unit = k;
    expect_same_bits(outcome(run), expected);
  }
}

TEST_P(LayersPerUnit, DoesNotChangeABit) {
  for (int prefetch : {0, 1, 2})
    for (bool tied : {true, false}) {
      SCOPED_TRACE(fmt::format("prefetch {} tied {}", prefetch, tied));
      TinyRun run = tiny();
      run.config.tie_word_embeddings = tied;
      run.fsdp.prefetch = prefetch;
      run.fsdp.reduce_every_microbatch = tied;
      expect_same_for_all_k(run);
    }
}

TEST_P(LayersPerUnit, DoesNotChangeABitOfCheckpointedActivationsIn16Bits) {
  for (const auto& [mode, dtype] : {std::pair(ActivationCheckpoint::selective, DType::bf16),
                                    {ActivationCheckpoint::full, DType::fp16}}) {
    TinyRun run = tiny();
    run.fsdp.param_dtype = run.fsdp.reduce_dtype = dtype;
    run.fsdp.activation_checkpoint = mode;
    expect_same_for_all_k(run);
  }
}

TEST_P(LayersPerUnit, DoesNotChangeABitOfAnyMesh) {
  for (int replicas = 2; replicas <= ranks(); ++replicas) {
    if (ranks() % replicas) continue;
    TinyRun run = tiny();
    run.fsdp.mesh = fmt::format("{}x{}", replicas, ranks() / replicas);
    SCOPED_TRACE(run.fsdp.mesh);
    expect_same_for_all_k(run);
  }
}

TEST_P(LayersPerUnit, DoesNotChangeABitOfUnitsThatStayGathered) {
  for (const auto& [forward, backward] : {std::pair(false, true), {true, false}, {false, false}}) {
    TinyRun run = tiny();
    run.fsdp.reshard_after_forward = forward;
    run.fsdp.reshard_after_backward = backward;
    expect_same_for_all_k(run);
  }
  if (ranks() % 2 || ranks() == 2 || GetParam() != std::string("mpi")) return;
  TinyRun run = tiny();
  run.fsdp.reshard_ranks = 2;
  expect_same_for_all_k(run);
}

// With 8 ranks some hold padding alone.
TEST_P(LayersPerUnit, DoesNotChangeABitOfEmptyShards) {
  TinyRun run = tiny();
  run.config.vocab_size = 5;
  run.config.num_attention_heads = run.config.num_key_value_heads = 1;
  run.config.head_dim = 2;
  run.config.hidden_size = 3;
  run.config.intermediate_size = 3;
  expect_same_for_all_k(run);
}

TEST_P(LayersPerUnit, EvaluatesTheSame) {
  TinyRun run = tiny();
  const GlobalBatch batch(0, run.B * ranks(), run.T, run.config.vocab_size);
  const double expected = run.engine()->evaluate(deal(batch, run.B, Deal::split));
  run.fsdp.layers_per_unit = 2;
  EXPECT_EQ(run.engine()->evaluate(deal(batch, run.B, Deal::split)), expected);
}

// --- units

TEST_P(LayersPerUnit, UnitsHoldTheirLayersParameters) {
  for (int k = 1; k <= kLayers; ++k) {
    TinyRun run = tiny();
    run.fsdp.layers_per_unit = k;
    auto engine = run.engine();
    Qwen3Model& model = engine->model();
    ASSERT_EQ(model.num_units(), 1 + units_of_layers(k));
    std::vector<std::string> names;
    for (int u = 0; u < model.num_units(); ++u)
      for (const ParamSpec& p : model.unit(u).layout().params()) names.push_back(p.name);
    std::vector<std::string> expected;
    for (const ParamSpec& p : all_params(run.config)) expected.push_back(p.name);
    EXPECT_EQ(names, expected);
    EXPECT_EQ(model.unit(1).size(), k * kLayerParams);
    EXPECT_EQ(model.unit(model.num_units() - 1).size(),
              (kLayers - (units_of_layers(k) - 1) * k) * kLayerParams);
  }
}

TEST(Units, OfThreeOf28Layers) {
  TinyRun run;
  run.config.num_hidden_layers = 28;
  run.fsdp.layers_per_unit = 3;
  auto engine = run.engine();
  ASSERT_EQ(engine->model().num_units(), 1 + 10);
  EXPECT_EQ(engine->model().unit(1).name(), "layers.0-2");
  EXPECT_EQ(engine->model().unit(9).name(), "layers.24-26");
  EXPECT_EQ(engine->model().unit(10).name(), "layers.27");
}

TEST(Units, OfNoOrTooManyLayersAreOneUsageError) {
  for (int k : {0, 3}) {
    TinyRun run;  // of two layers
    run.fsdp.layers_per_unit = k;
    std::string message;
    try {
      run.engine();
    } catch (const AgreedError& error) {
      EXPECT_EQ(error.code, kExitUsage);
      message = error.what();
    }
    EXPECT_TRUE(has(message, {fmt::format("fsdp.layers_per_unit {}", k), "1 to 2"})) << message;
  }
}

// --- transfers

TEST_P(LayersPerUnit, EachUnitIsOneGatherAndOneReduction) {
  constexpr int64_t A = 3;
  TinyRun run = tiny();
  run.fsdp.layers_per_unit = 1;
  std::vector<Traffic> traffic;
  for (int k : {1, 2, 3}) {
    run.fsdp.layers_per_unit = k;
    auto engine = run.engine();
    const GlobalBatch batch(0, A * run.B * ranks(), run.T, run.config.vocab_size);
    engine->step(deal(batch, run.B, Deal::split), run.lr);
    const Traffic& t = engine->collectives().traffic();
    EXPECT_EQ(t.gathers, A * (1 + 2 * units_of_layers(k)));
    EXPECT_EQ(t.reduces, A * (1 + units_of_layers(k)));
    int64_t root = 0, layers = 0;  // bytes of the other ranks' rows, in f32
    for (int u = 0; u < engine->model().num_units(); ++u)
      for (const Piece& piece : engine->model().unit(u).layout().pieces())
        (u ? layers : root) += (ranks() - 1) * piece.count * 4;
    EXPECT_EQ(t.gather_logical_bytes, A * (root + 2 * layers));
    EXPECT_EQ(t.reduce_logical_bytes, A * (root + layers));
    EXPECT_EQ(t.gather_copied_bytes, GetParam() == std::string("shm") ? 0 : t.gather_logical_bytes);
    traffic.push_back(t);
  }
  for (const Traffic& t : traffic)  // of the same bytes
    EXPECT_EQ(t.gather_logical_bytes, traffic.front().gather_logical_bytes);
}

TEST(Units, FullBuffersAreAsLargeAsTheLargestUnit) {
  TinyRun run;
  run.config.num_hidden_layers = kLayers;
  run.transport = "mpi";
  run.fsdp.prefetch = 2;
  for (int k : {1, 2, 4}) {
    run.fsdp.layers_per_unit = k;
    const int64_t before = test_backend().device->bytes_held(Segment::params);
    auto engine = run.engine();
    const int64_t root = 4 * engine->model().unit(0).layout().elements(),
                  unit = 4 * engine->model().unit(1).layout().elements();
    EXPECT_EQ(test_backend().device->bytes_held(Segment::params) - before, root + 3 * unit);
  }
}

TEST(Units, SpansNameTheUnitThatMovesAndTheLayerThatComputes) {
  TinyRun run;
  run.config.num_hidden_layers = 3;
  run.fsdp.layers_per_unit = 2;
  std::vector<std::string> gathered, computed;
  for (const Span& span : spans_of_a_step(run)) {
    if (span.name == "all-gather start") gathered.push_back(span.unit);
    if (span.step == "5 attention") computed.push_back(span.phase + " " + span.unit);
  }
  EXPECT_EQ(gathered,
            (std::vector<std::string>{"root", "layers.0-1", "layers.2", "layers.2", "layers.0-1"}));
  EXPECT_EQ(computed, (std::vector<std::string>{"forward layers.0", "forward layers.1",
                                                "forward layers.2", "backward layers.2",
                                                "backward layers.1", "backward layers.0"}));
}

// --- plans

// Without overlap a step is its operators and transfers in a row: fewer of them save latency alone.
TEST(Units, APlanSavesTheLatencyOfTheTransfersThatAreGone) {
  Hardware hardware;
  hardware.peak_flops = {{"f32", 1e12}};
  hardware.memory_bytes_per_s = 1e11;
  hardware.in_node = hardware.between_nodes = {1e9, 1e-3};
  hardware.overlaps = false;
  PlanRequest request;
  request.config = tiny_config();
  request.config.num_hidden_layers = 28;
  request.ranks = request.ranks_per_node = 4;
  request.T = 8;
  std::map<int, double> step;
  for (int k : {1, 3}) {
    request.fsdp.layers_per_unit = k;
    step[k] = simulate(plan_step(request), hardware).step;
  }
  EXPECT_NEAR(step[1] - step[3], 3 * (28 - 10) * 1e-3, 1e-9);  // two gathers and a reduction
}

// --- what a mistake would look like

// Loses the gradient of a unit's second layer on the last rank.
class LosesALayer final : public Forwarding {
 public:
  using Forwarding::Forwarding;
  int add_unit(const UnitSpec& spec) override {
    specs_.push_back(spec);
    return Forwarding::add_unit(spec);
  }
  void reduce_start(int unit) override {
    const std::vector<Piece>& pieces = specs_[unit].pieces;
    if (pieces.size() > kLayerParams && test_world().rank() == ranks() - 1)
      std::fill(inner_->grad_buffer(unit) + pieces[kLayerParams].offset,
                inner_->grad_buffer(unit) + specs_[unit].elements, 0.0f);
    Forwarding::reduce_start(unit);
  }

 private:
  std::vector<UnitSpec> specs_;
};

TEST(Units, ComparisonsFindALostLayer) {
  TinyRun run;
  const GlobalBatch batch = some_batches(run, 1, run.B * ranks())[0];
  auto plain = run.engine();
  const StepResult expected = plain->compute_gradients(deal(batch, run.B, Deal::split));
  run.fsdp.layers_per_unit = 2;
  Engine engine(run.config, run.fsdp, run.adamw,
                make_sharding(run.transport, run.fsdp, test_world(), test_backend(),
                              [](std::unique_ptr<Collectives> inner, const World&) {
                                return std::make_unique<LosesALayer>(std::move(inner));
                              }),
                run.B, run.T, test_backend());
  engine.model().init_parameters(run.seed);
  const StepResult found = engine.compute_gradients(deal(batch, run.B, Deal::split));
  EXPECT_EQ(found.loss, expected.loss);
  EXPECT_GT(std::abs(found.grad_norm - expected.grad_norm), 1e-3 * expected.grad_norm);
  EXPECT_GT(relative_difference(gradients_of(engine), gradients_of(*plain)), 1e-2);
}

}  // namespace
}  // namespace qshard
