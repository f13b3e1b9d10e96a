// The training step: what must not change when ranks, micro-batches or transports do.
#include <cmath>

#include "forwarding.h"
#include "model/qwen3_params.h"
#include "tiny_model.h"

namespace qshard {
namespace {

int ranks() { return test_world().size(); }

// --- the same global batch, dealt out differently

TEST(Engine, LossNormAndClippedWeightsAreThoseOfOneRank) {
  TinyRun split;
  split.adamw.clip = 0.5;
  TinyRun whole = split;
  const int64_t rows = split.B * ranks();
  whole.B = rows;
  const auto batches = some_batches(split, 20, rows);
  const Outcome a = train(split, batches, Deal::split), b = train(whole, batches, Deal::replicate);
  expect_close(a, b, 1e-5);
  for (double norm : a.norms) EXPECT_GT(norm, 0.5);  // every step was clipped
  const std::string norm = fmt::format("{}", a.norms[0]);
  EXPECT_EQ(test_world().broadcast(norm, 0), norm);
}

TEST(Engine, LabelsWeighEquallyWhateverTheirRank) {
  TinyRun split;
  TinyRun whole = split;
  const int64_t rows = split.B * ranks();
  whole.B = rows;
  auto batches = some_batches(split, 5, rows);
  for (GlobalBatch& batch : batches)
    for (int64_t row = 0; row < split.B; ++row) batch.ignore_row(row, 1);  // rank 0's
  expect_close(train(split, batches, Deal::split), train(whole, batches, Deal::replicate), 1e-5);
}

TEST(Engine, MicroBatchesAreTheLargeBatch) {
  TinyRun large;
  large.B = 4;
  auto batches = some_batches(large, 5, 4 * ranks());
  for (GlobalBatch& batch : batches)
    for (int64_t row = 0; row < batch.rows; ++row) batch.ignore_row(row, 1 + row * row % large.T);
  const Outcome expected = train(large, batches, Deal::split);
  for (int64_t B : {2, 1})
    for (bool every : {true, false}) {
      TinyRun run = large;
      run.B = B;
      run.fsdp.reduce_every_microbatch = every;
      expect_close(train(run, batches, Deal::split), expected, 1e-5);
    }
}

// --- ignored labels

TEST(Engine, RankWithoutLabelsContributesNothing) {
  TinyRun split;
  TinyRun whole = split;
  const int64_t rows = split.B * ranks();
  whole.B = rows;
  auto batches = some_batches(split, 3, rows);
  if (ranks() > 1)
    for (GlobalBatch& batch : batches)
      for (int64_t row = rows - split.B; row < rows; ++row) batch.ignore_row(row, 0);
  const Outcome a = train(split, batches, Deal::split);
  for (double loss : a.losses) EXPECT_TRUE(std::isfinite(loss));
  expect_close(a, train(whole, batches, Deal::replicate), 1e-5);
}

TEST(Engine, StepWithoutLabelsChangesNothing) {
  const TinyRun run;
  const int64_t rows = run.B * ranks();
  auto batches = some_batches(run, 3, rows);
  auto engine = run.engine();
  engine->step(deal(batches[0], run.B, Deal::split), run.lr);
  const std::vector<float> before = weights_of(*engine);
  GlobalBatch empty = batches[1];
  empty.ignore_all();
  const StepResult r = engine->step(deal(empty, run.B, Deal::split), run.lr);
  EXPECT_FALSE(r.updated);
  EXPECT_EQ(r.kept, 0);
  EXPECT_EQ(r.loss, 0);
  EXPECT_EQ(weights_of(*engine), before);
  EXPECT_EQ(engine->steps_done(), 2);
  // Moments and bias correction go on as if the step had not been.
  engine->step(deal(batches[2], run.B, Deal::split), run.lr);
  const Outcome without = train(run, {batches[0], batches[2]}, Deal::split);
  EXPECT_EQ(weights_of(*engine), without.weights);
}

TEST(Engine, EvaluationIsTheMeanOverKeptLabelsAndTouchesNothing) {
  const TinyRun run;
  GlobalBatch batch(0, 2 * run.B * ranks(), run.T, run.config.vocab_size);
  batch.ignore_row(0, 2);
  const auto micro = deal(batch, run.B, Deal::split);
  auto engine = run.engine();
  const std::vector<float> before = weights_of(*engine);
  const double loss = engine->evaluate(micro);
  EXPECT_EQ(weights_of(*engine), before);
  EXPECT_NEAR(loss, engine->compute_gradients(micro).loss, 1e-6 * loss);
  batch.ignore_all();
  EXPECT_EQ(engine->evaluate(deal(batch, run.B, Deal::split)), 0);
}

// --- memory that gradients and activations share

TEST(Engine, GradientsOverActivationsAreTheSameBits) {
  for (const char* transport : {"shm", "mpi"})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const auto mode : {ActivationCheckpoint::none, ActivationCheckpoint::selective,
                              ActivationCheckpoint::full})
        for (const bool every : {true, false}) {
          TinyRun run;
          run.config.num_hidden_layers = 5;
          run.transport = transport;
          run.fsdp.param_dtype = dtype;
          run.fsdp.activation_checkpoint = mode;
          run.fsdp.layers_per_unit = dtype == DType::f32 ? 1 : 2;
          run.fsdp.reduce_every_microbatch = every;
          if (ranks() % 2 == 0 && mode == ActivationCheckpoint::none)
            run.fsdp.mesh = fmt::format("2x{}", ranks() / 2);
          const int64_t micro_batches = every ? 1 : 2;
          const auto batches = some_batches(run, 3, micro_batches * run.B * ranks());
          const Outcome apart = train(run, batches, Deal::split);
          run.fsdp.gradients_over_activations = true;
          expect_same_bits(train(run, batches, Deal::split), apart);
        }
}

TEST(Engine, GradientsOverActivationsAreRefusedWhenTheyWouldBeLost) {
  TinyRun run;
  run.fsdp.gradients_over_activations = true;
  auto engine = run.engine();
  const auto batch = some_batches(run, 1, 2 * run.B * ranks()).front();
  EXPECT_THROW(engine->compute_gradients(deal(batch, run.B, Deal::split)), Error);
}

// --- activation checkpointing

TEST(Engine, WhatBackwardComputesAnewIsTheSameBits) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const bool reshard : {true, false}) {
      TinyRun run;
      run.config.num_hidden_layers = 4;
      run.fsdp.param_dtype = dtype;
      run.fsdp.reshard_after_forward = reshard;
      const auto batches = some_batches(run, 3, 2 * run.B * ranks());  // two micro-batches
      const Outcome kept = train(run, batches, Deal::split);
      for (const auto mode : {ActivationCheckpoint::selective, ActivationCheckpoint::full}) {
        run.fsdp.activation_checkpoint = mode;
        expect_same_bits(train(run, batches, Deal::split), kept);
      }
    }
}

// Per token of a layer that is not the one whose buffers all share; statistics are 4 bytes a head.
TEST(Engine, ActivationCheckpointingHoldsWhatItsNoteSays) {
  TinyRun run;
  run.fsdp.param_dtype = DType::bf16;
  auto held = [&](ActivationCheckpoint mode, int64_t layers) {
    run.fsdp.activation_checkpoint = mode;
    run.config.num_hidden_layers = layers;
    const auto engine = run.engine();
    return test_backend().device->bytes_held(Segment::activations);
  };
  const Qwen3Config& c = run.config;
  const int64_t C = c.hidden_size, F = c.intermediate_size, D = c.head_dim,
                H = c.num_attention_heads, K = c.num_key_value_heads, R = 4, P = 2;
  const int64_t statistics = 4 * (2 + (H + K) + H);
  const int64_t none = 2 * C * R + (2 * C + 2 * (H + 2 * K) * D - K * D + H * D + 3 * F) * P;
  const std::pair<ActivationCheckpoint, int64_t> expected[] = {
      {ActivationCheckpoint::none, none + statistics},
      {ActivationCheckpoint::selective, 2 * C * R + ((H + 2 * K) * D + 2 * F) * P},
      {ActivationCheckpoint::full, C * R}};
  for (const auto& [mode, bytes] : expected)
    EXPECT_EQ(held(mode, 5) - held(mode, 2), 3 * run.B * run.T * bytes)
        << activation_checkpoint_name(mode);
}

// An evaluation between steps leaves no trace in what follows.
TEST(Engine, EvaluationsBetweenStepsDoNotChangeTheRun) {
  for (bool reshard : {true, false}) {
    TinyRun run;
    run.fsdp.reshard_after_forward = reshard;
    const auto batches = some_batches(run, 3, run.B * ranks());
    auto engine = run.engine();
    for (const GlobalBatch& batch : batches) {
      engine->evaluate(deal(batch, run.B, Deal::split));
      engine->step(deal(batch, run.B, Deal::split), run.lr);
    }
    EXPECT_EQ(weights_of(*engine), train(run, batches, Deal::split).weights);
  }
}

// --- ways to do the same

TEST(Engine, ReshardAndPrefetchDoNotChangeABit) {
  TinyRun run;
  run.config.num_hidden_layers = 3;
  const auto batches = some_batches(run, 3, 2 * run.B * ranks());
  const Outcome expected = train(run, batches, Deal::split);
  for (const char* transport : {"shm", "mpi"})
    for (bool reshard : {true, false})
      for (int prefetch : {0, 1, 2}) {
        TinyRun other = run;
        other.transport = transport;
        other.fsdp.reshard_after_forward = reshard;
        other.fsdp.prefetch = prefetch;
        SCOPED_TRACE(fmt::format("{} reshard {} prefetch {}", transport, reshard, prefetch));
        expect_same_bits(train(other, batches, Deal::split), expected);
      }
}

TEST(Engine, TransportsAgreeBitByBitIn16Bits) {
  TinyRun run;
  const auto batches = some_batches(run, 3, 2 * run.B * ranks());
  for (auto [param, reduce] :
       {std::pair{DType::bf16, DType::f32}, std::pair{DType::bf16, DType::bf16},
        std::pair{DType::fp16, DType::f32}, std::pair{DType::fp16, DType::fp16}})
    for (bool every : {true, false}) {
      run.fsdp.param_dtype = param;
      run.fsdp.reduce_dtype = reduce;
      run.fsdp.reduce_every_microbatch = every;
      run.transport = "shm";
      const Outcome shm = train(run, batches, Deal::split);
      run.transport = "mpi";
      expect_same_bits(train(run, batches, Deal::split), shm);
    }
}

TEST(Engine, RunsAreRepeatable) {
  TinyRun run;
  run.fsdp.param_dtype = DType::bf16;
  const auto batches = some_batches(run, 4, run.B * ranks());
  const Outcome first = train(run, batches, Deal::split);
  expect_same_bits(train(run, batches, Deal::split), first);
  run.seed = 6;
  EXPECT_NE(train(run, batches, Deal::split).losses[0], first.losses[0]);
}

// Half a unit in the last place is 2^-9 in bf16 and 2^-12 in fp16.
TEST(Engine, ReductionIn16BitsIsCloseAndNotTheSame) {
  TinyRun run;
  const auto batches = some_batches(run, 1, run.B * ranks());
  const auto micro = deal(batches[0], run.B, Deal::split);
  auto exact = run.engine();
  const StepResult a = exact->compute_gradients(micro);
  for (auto [dtype, rounding] : {std::pair{DType::bf16, 0x1p-9}, std::pair{DType::fp16, 0x1p-12}}) {
    run.fsdp.reduce_dtype = dtype;
    auto rounded = run.engine();
    const StepResult b = rounded->compute_gradients(micro);
    EXPECT_EQ(a.loss, b.loss);
    const double difference = relative_difference(gradients_of(*rounded), gradients_of(*exact));
    EXPECT_LT(difference, rounding) << dtype_name(dtype);
    EXPECT_GT(difference, rounding / 100) << dtype_name(dtype);
  }
}

// --- numbers

// Updates far below half a step of bf16 must reach the f32 master weights.
TEST(Engine, SmallUpdatesMoveBf16Weights) {
  TinyRun run;
  run.fsdp.param_dtype = DType::bf16;
  run.lr = 1e-6;
  auto engine = run.engine();
  const std::vector<float> before = weights_of(*engine);
  for (const GlobalBatch& batch : some_batches(run, 50, run.B * ranks()))
    engine->step(deal(batch, run.B, Deal::split), run.lr);
  const std::vector<float> after = weights_of(*engine);
  int64_t counts[2] = {0, static_cast<int64_t>(after.size())};
  for (size_t i = 0; i < after.size(); ++i) counts[0] += after[i] != before[i];
  test_world().all_reduce_sum(counts, 2);
  EXPECT_GT(static_cast<double>(counts[0]), 0.99 * static_cast<double>(counts[1]));
}

// Padding rows of a vocabulary that does not divide never enter the softmax: equal logits give ln
// V.
TEST(Engine, VocabularyThatDoesNotDivide) {
  for (int64_t vocab : {515, 151936}) {
    TinyRun run;
    run.config.vocab_size = vocab;
    run.config.hidden_size = 8;
    run.config.num_hidden_layers = 1;
    run.config.initializer_range = 1e-8;
    run.B = 1;
    run.T = 3;
    auto engine = run.engine();
    const GlobalBatch batch(0, ranks(), run.T, vocab);
    const auto micro = deal(batch, 1, Deal::split);
    // One row of padding would add 1/V: 1.9e-3 and 6.6e-6.
    const double expected = std::log(static_cast<double>(vocab));
    EXPECT_NEAR(engine->evaluate(micro), expected, 3e-6);
    const StepResult r = engine->step(micro, run.lr);
    EXPECT_NEAR(r.loss, expected, 3e-6);
    EXPECT_TRUE(std::isfinite(r.grad_norm));
    EXPECT_TRUE(std::isfinite(engine->evaluate(micro)));  // updated rows included
  }
}

// --- scale of the loss

TEST(LossScale, IsForFp16Alone) {
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    TinyRun run;
    run.fsdp.param_dtype = dtype;
    auto engine = run.engine();
    EXPECT_EQ(engine->scaler().has_value(), dtype == DType::fp16);
    const auto batches = some_batches(run, 1, run.B * ranks());
    const StepResult r = engine->step(deal(batches[0], run.B, Deal::split), run.lr);
    EXPECT_EQ(r.loss_scale, dtype == DType::fp16 ? 65536 : 0);
    EXPECT_TRUE(r.updated && !r.overflow);
  }
}

// fp16 is f32 to its rounding, loss, norm and gradients without the scale in them.
TEST(LossScale, IsNotInTheResults) {
  TinyRun run;
  const auto batches = some_batches(run, 1, 2 * run.B * ranks());
  const auto micro = deal(batches[0], run.B, Deal::split);
  auto exact = run.engine();
  const StepResult truth = exact->compute_gradients(micro);
  run.fsdp.param_dtype = DType::fp16;
  for (bool every : {true, false})
    for (double scale : {256.0, 65536.0}) {
      run.fsdp.reduce_every_microbatch = every;
      auto engine = run.engine();
      engine->scaler()->restore(scale, 0);
      const StepResult r = engine->compute_gradients(micro);
      EXPECT_EQ(r.loss_scale, scale);
      EXPECT_NEAR(r.loss, truth.loss, 1e-3 * truth.loss);
      EXPECT_NEAR(r.grad_norm, truth.grad_norm, 3e-3 * truth.grad_norm);
      EXPECT_LT(relative_difference(gradients_of(*engine), gradients_of(*exact)), 5e-3);
    }
}

std::vector<float> moments_of(Engine& engine) {
  std::vector<float> all = own_rows(engine, [](Unit& unit, int i) { return unit.exp_avg(i); });
  const auto squares = own_rows(engine, [](Unit& unit, int i) { return unit.exp_avg_sq(i); });
  all.insert(all.end(), squares.begin(), squares.end());
  return all;
}

// A save in the background copies weights and moments while the next step is computed; here nobody
// has begun to when the update comes.
TEST(Engine, AnUpdateComesAfterTheCopiesOfASave) {
  TinyRun run;
  const auto batches = some_batches(run, 1, run.B * ranks());
  auto engine = run.engine();
  Device& device = *test_backend().device;
  std::vector<Tensor> states;
  std::vector<Buffer> copies;
  for (int u = 0; u < engine->model().num_units(); ++u)
    for (const Tensor& state :
         {engine->model().unit(u).master(0), engine->model().unit(u).exp_avg(0)})
      states.push_back(state);
  const auto values = [](const Tensor& t) {
    return std::vector<float>(t.as<float>(), t.as<float>() + t.numel());
  };
  std::vector<std::vector<float>> before;
  const StepResult result = engine->compute_gradients(deal(batches[0], run.B, Deal::split));
  for (const Tensor& state : states) {
    before.push_back(values(state));
    copies.emplace_back(device, DType::f32, state.shape, Segment::workspace, "copy");
    device.download_start(copies.back()->data, state.data, state.bytes());
  }
  engine->update(result, run.lr);
  device.download_wait();
  for (size_t i = 0; i < states.size(); ++i) {
    EXPECT_EQ(values(copies[i]), before[i]) << i;
    if (states[i].numel() > 0) {
      EXPECT_NE(values(states[i]), before[i]) << i;
    }
  }
}

class LossScaleOn : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, LossScaleOn, testing::Values("shm", "mpi"));

// A scale that every gradient overflows with: skipped until it fits, then as if it had begun there.
TEST_P(LossScaleOn, OverflowSkipsTheStepAndHalvesTheScale) {
  for (DType reduce : {DType::f32, DType::fp16}) {
    TinyRun run;
    run.transport = GetParam();
    run.fsdp.param_dtype = DType::fp16;
    run.fsdp.reduce_dtype = reduce;
    const auto batches = some_batches(run, 2, run.B * ranks());
    const auto step = [&](Engine& engine, int s) {
      return engine.step(deal(batches[s], run.B, Deal::split), run.lr);
    };
    auto engine = run.engine();
    step(*engine, 0);  // moments and AdamW's count are no longer zero
    const std::vector<float> weights = weights_of(*engine), moments = moments_of(*engine);
    double scale = 0x1p40;
    engine->scaler()->restore(scale, 7);
    int skipped = 0;
    StepResult r = step(*engine, 1);
    for (; r.overflow; r = step(*engine, 1)) {
      ++skipped;
      EXPECT_FALSE(r.updated);
      EXPECT_EQ(r.loss_scale, scale);
      scale /= 2;
      EXPECT_EQ(engine->scaler()->scale(), scale);
      EXPECT_EQ(engine->scaler()->growth_tracker(), 0);
      EXPECT_EQ(engine->updates(), 1);
      EXPECT_EQ(engine->steps_done(), 1 + skipped);
      EXPECT_EQ(weights_of(*engine), weights);
      EXPECT_EQ(moments_of(*engine), moments);
    }
    EXPECT_GE(skipped, 10);
    EXPECT_TRUE(r.updated);
    EXPECT_EQ(engine->updates(), 2);

    auto straight = run.engine();
    step(*straight, 0);
    straight->scaler()->restore(scale, 0);
    const StepResult expected = step(*straight, 1);
    EXPECT_EQ(r.loss, expected.loss);
    EXPECT_EQ(r.grad_norm, expected.grad_norm);
    EXPECT_EQ(weights_of(*engine), weights_of(*straight));
    EXPECT_EQ(moments_of(*engine), moments_of(*straight));
  }
}

// Puts a value into the last rank's gradient of the first layer, once.
class PlantedGradient final : public Forwarding {
 public:
  PlantedGradient(std::unique_ptr<Collectives> inner, float value)
      : Forwarding(std::move(inner)), value_(value) {}
  void reduce_start(int unit) override {
    const bool here = unit == 1 && test_world().rank() == ranks() - 1;
    if (here && !planted_) inner_->grad_buffer(unit)[0] = value_;
    planted_ = planted_ || unit == 1;
    Forwarding::reduce_start(unit);
  }

 private:
  float value_;
  bool planted_ = false;
};

Sharding planted(const TinyRun& run, const char* transport, float value) {
  return make_sharding(TransportOptions(transport), run.fsdp, test_world(), test_backend(),
                       [&](std::unique_ptr<Collectives> inner, const World&) {
                         return std::make_unique<PlantedGradient>(std::move(inner), value);
                       });
}

TEST_P(LossScaleOn, OneGradientOfOneRankIsEnough) {
  for (float value : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    TinyRun run;
    run.fsdp.param_dtype = DType::fp16;
    const auto batches = some_batches(run, 2, run.B * ranks());
    Engine engine(run.config, run.fsdp, run.adamw, planted(run, GetParam(), value), run.B, run.T,
                  test_backend());
    engine.model().init_parameters(run.seed);
    const std::vector<float> before = weights_of(engine);
    const StepResult bad = engine.step(deal(batches[0], run.B, Deal::split), run.lr);
    EXPECT_TRUE(bad.overflow && !bad.updated);
    EXPECT_TRUE(std::isfinite(bad.loss));
    EXPECT_EQ(weights_of(engine), before);
    EXPECT_EQ(engine.scaler()->scale(), 32768);
    const StepResult good = engine.step(deal(batches[1], run.B, Deal::split), run.lr);
    EXPECT_TRUE(good.updated);
    EXPECT_NE(weights_of(engine), before);
  }
}

TEST_P(LossScaleOn, OtherDtypesStillEndTheRun) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    TinyRun run;
    run.fsdp.param_dtype = dtype;
    const auto batches = some_batches(run, 1, run.B * ranks());
    Engine engine(run.config, run.fsdp, run.adamw, planted(run, GetParam(), std::nanf("")), run.B,
                  run.T, test_backend());
    engine.model().init_parameters(run.seed);
    EXPECT_THROW(engine.step(deal(batches[0], run.B, Deal::split), run.lr), AgreedError);
  }
}

// --- values that are not finite

// Poisons one element of the first parameter that this rank owns rows of; returns its name.
std::string poison(Engine& engine) {
  for (int u = 0; u < engine.model().num_units(); ++u) {
    Unit& unit = engine.model().unit(u);
    for (int i = 0; i < unit.size(); ++i)
      if (unit.master(i).numel() > 0) {
        unit.master(i).as<float>()[0] = std::nanf("");
        unit.cast_to_compute();
        return unit.layout().params()[i].name;
      }
  }
  return "";
}

class NotFinite : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, NotFinite, testing::Values("shm", "mpi"));

TEST_P(NotFinite, OneRanksWeightStopsAllRanksWithOneMessage) {
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    TinyRun run;
    run.transport = GetParam();
    run.fsdp.param_dtype = dtype;
    auto engine = run.engine();
    if (engine->scaler()) engine->scaler()->restore(1, 0);  // which no step is skipped for
    const auto batches = some_batches(run, 2, run.B * ranks());
    engine->step(deal(batches[0], run.B, Deal::split), run.lr);
    // The last rank that owns something: with 8 ranks and 37 rows all do.
    const int bad = ranks() - 1;
    std::string name = test_world().rank() == bad ? poison(*engine) : "";
    name = test_world().broadcast(name, bad);
    for (int u = 0; u < engine->model().num_units(); ++u) engine->model().unit(u).publish();
    const std::vector<float> before = weights_of(*engine);
    std::string message;
    try {
      engine->step(deal(batches[1], run.B, Deal::split), run.lr);
    } catch (const AgreedError& error) {
      message = error.what();
    }
    EXPECT_NE(message.find("step 2:"), std::string::npos) << message;
    EXPECT_NE(message.find(fmt::format("rank {} ", bad)), std::string::npos) << message;
    EXPECT_NE(message.find(name), std::string::npos) << message;
    EXPECT_EQ(test_world().broadcast(message, 0), message);
    const std::vector<float> after = weights_of(*engine);
    EXPECT_EQ(std::memcmp(after.data(), before.data(), after.size() * sizeof(float)), 0);
    EXPECT_EQ(engine->steps_done(), 1);
    EXPECT_THROW(engine->evaluate(deal(batches[1], run.B, Deal::split)), AgreedError);
  }
}

// Sets this rank's rows of a parameter of the root unit; all other values stay.
template <typename Fn>
void set_root(Engine& engine, int param, Fn value) {
  Unit& root = engine.model().unit(0);
  const ParamLayout& layout = root.layout()[param];
  const RowRange rows = layout.rows_of(test_world().rank());
  float* weights = root.master(param).as<float>();
  for (int64_t i = 0; i < rows.size() * layout.row_numel; ++i)
    value(rows.begin + i / layout.row_numel, i % layout.row_numel, weights[i]);
}

// Finite weights whose product overflows for one token, which the last rank alone reads.
TEST_P(NotFinite, OverflowOnOneRankNamesThatRank) {
  TinyRun run;
  run.transport = GetParam();
  run.config.tie_word_embeddings = false;
  run.config.initializer_range = 1e-3;
  auto engine = run.engine();
  const int bad = ranks() - 1;
  const int32_t rare = 36;
  GlobalBatch batch(0, run.B * ranks(), run.T, run.config.vocab_size);
  for (int32_t& id : batch.ids) id %= rare;
  // Column 0 of the residual stream is large for that token only, and blows up one logit.
  set_root(*engine, kEmbedTokens, [&](int64_t row, int64_t column, float& w) {
    if (column == 0) w = row == rare ? 1e3f : 0.0f;
  });
  set_root(*engine, kLmHead, [](int64_t row, int64_t column, float& w) {
    if (row == 5 && column == 0) w = 1e38f;
  });
  engine->model().unit(0).publish();
  EXPECT_NO_THROW(engine->evaluate(deal(batch, run.B, Deal::split)));
  batch.ids[bad * run.B * run.T] = rare;
  std::string message;
  try {
    engine->compute_gradients(deal(batch, run.B, Deal::split));
  } catch (const AgreedError& error) {
    message = error.what();
  }
  EXPECT_NE(message.find("step 1: the loss is not finite"), std::string::npos) << message;
  EXPECT_NE(message.find(fmt::format("first on rank {},", bad)), std::string::npos) << message;
  EXPECT_EQ(test_world().broadcast(message, 0), message);
}

}  // namespace
}  // namespace qshard
