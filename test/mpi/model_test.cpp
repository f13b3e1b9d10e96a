// Gradients of the whole sharded model against finite differences of its loss.
#include <cmath>

#include "model/qwen3_params.h"
#include "tiny_model.h"

namespace qshard {
namespace {

struct Element {
  int unit = 0, param = 0;
  int64_t index = 0;  // in the full parameter
};

// Index of the element of [begin, end) with the largest gradient, over all ranks; and its gradient.
std::pair<int64_t, double> largest_gradient(Engine& engine, Element e, int64_t begin, int64_t end) {
  const Unit& unit = engine.model().unit(e.unit);
  const ParamLayout& layout = unit.layout()[e.param];
  const int64_t first = layout.rows_of(test_world().rank()).begin * layout.row_numel;
  const Tensor grad = unit.grad_shard(e.param);
  double best = -1;
  int64_t at = 0;
  for (int64_t j = 0; j < grad.numel(); ++j)
    if (first + j >= begin && first + j < end && std::abs(grad.as<float>()[j]) > best) {
      best = std::abs(grad.as<float>()[j]);
      at = j;
    }
  double highest = best;
  test_world().all_reduce_max(&highest, 1);
  double owner = best == highest ? test_world().rank() : -1;
  test_world().all_reduce_max(&owner, 1);
  const bool mine = owner == test_world().rank();
  double found[2] = {mine ? static_cast<double>(first + at) : 0,
                     mine ? double{grad.as<float>()[at]} : 0};
  test_world().all_reduce_sum(found, 2);
  return {static_cast<int64_t>(found[0]), found[1]};
}

// Loss with one weight, wherever it lives, moved by h.
double loss_at(Engine& engine, const std::vector<TokenBatch>& batches, Element e, double h) {
  Unit& unit = engine.model().unit(e.unit);
  const ParamLayout& layout = unit.layout()[e.param];
  const bool mine = layout.owner_of(e.index / layout.row_numel) == test_world().rank();
  const int64_t first = layout.rows_of(test_world().rank()).begin * layout.row_numel;
  float* weight = mine ? unit.master(e.param).as<float>() + (e.index - first) : nullptr;
  const float saved = mine ? *weight : 0;
  if (mine) *weight = static_cast<float>(saved + h);
  unit.publish();
  const double loss = engine.evaluate(batches);  // ends in an all-reduce: shards may be written
  if (mine) *weight = saved;
  unit.publish();
  return loss;
}

// Fourth order in h: truncation and f32 rounding of the loss are both near 1e-6.
double numeric_gradient(Engine& engine, const std::vector<TokenBatch>& batches, Element e) {
  constexpr double h = 1e-2;
  auto loss = [&](double k) { return loss_at(engine, batches, e, k * h); };
  return (8 * (loss(1) - loss(-1)) - (loss(2) - loss(-2))) / (12 * h);
}

bool agrees(double gradient, double numeric) {
  return std::abs(gradient - numeric) < 5e-5 + 3e-3 * std::abs(numeric);
}

struct Case {
  const char* name;
  int64_t H, K, D, C, B, T;
  bool tied;
  int layers;
};

Qwen3Config config_of(const Case& c) {
  Qwen3Config config = tiny_config();
  config.num_attention_heads = c.H;
  config.num_key_value_heads = c.K;
  config.head_dim = c.D;
  config.hidden_size = c.C;
  config.num_hidden_layers = c.layers;
  config.tie_word_embeddings = c.tied;
  return config;
}

TinyRun run_of(const Case& c) {
  TinyRun run;
  run.config = config_of(c);
  run.B = c.B;
  run.T = c.T;
  return run;
}

class GradientCheck : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Shapes, GradientCheck,
                         testing::Values(Case{"TiedOddBatchWideHeads", 3, 1, 8, 20, 3, 5, true, 2},
                                         Case{"UntiedEqualHeads", 4, 4, 6, 24, 1, 7, false, 1},
                                         Case{"UntiedOneToken", 4, 1, 6, 20, 5, 1, false, 1},
                                         Case{"TiedFourToOne", 4, 1, 10, 28, 2, 4, true, 1}),
                         [](const auto& test) { return test.param.name; });

TEST_P(GradientCheck, EveryKindOfParameter) {
  const TinyRun run = run_of(GetParam());
  auto engine = run.engine();
  GlobalBatch batch(0, run.B * test_world().size(), run.T, run.config.vocab_size);
  batch.ignore_row(0, run.T / 2 + 1);
  const auto batches = deal(batch, run.B, Deal::split);
  engine->compute_gradients(batches);
  const int kinds = kLayerParams + (run.config.tie_word_embeddings ? 2 : 3);
  int checked = 0, not_zero = 0;
  for (int u = 0; u < 2; ++u)  // root and the first layer, whose gradient has come all the way
    for (int i = 0; i < engine->model().unit(u).size(); ++i) {
      Element e{u, i};
      const auto [index, gradient] = largest_gradient(*engine, e, 0, INT64_MAX);
      e.index = index;
      const double numeric = numeric_gradient(*engine, batches, e);
      EXPECT_TRUE(agrees(gradient, numeric))
          << engine->model().unit(u).layout().params()[i].name << " element " << index << ": "
          << gradient << ", numeric " << numeric;
      ++checked;
      not_zero += std::abs(gradient) > 1e-3;
    }
  EXPECT_EQ(checked, kinds);
  // Alone in its sequence a token attends to itself: q and k have no influence.
  EXPECT_EQ(not_zero, run.T == 1 ? kinds - 4 : kinds);
}

// One row that is looked up as an input and predicted as a target: both uses add up.
TEST(TiedEmbedding, RowThatIsInputAndTarget) {
  TinyRun run;
  auto engine = run.engine();
  GlobalBatch batch(0, run.B * test_world().size(), run.T, run.config.vocab_size);
  const int32_t id = batch.ids[1];
  batch.labels[3] = id;
  const auto batches = deal(batch, run.B, Deal::split);
  engine->compute_gradients(batches);
  Element e{0, kEmbedTokens};
  const int64_t C = run.config.hidden_size;
  const auto [index, gradient] = largest_gradient(*engine, e, id * C, (id + 1) * C);
  EXPECT_EQ(index / C, id);
  e.index = index;
  const double numeric = numeric_gradient(*engine, batches, e);
  EXPECT_TRUE(agrees(gradient, numeric)) << gradient << ", numeric " << numeric;
  // The check itself: one use alone, or two updates, are far outside of it.
  EXPECT_FALSE(agrees(gradient * 1.02 + 1e-3, numeric));
  EXPECT_FALSE(agrees(gradient * 2, numeric));
}

// Gradients as with the whole logits at once, also when the last chunk is shorter.
class HeadChunks : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, HeadChunks, testing::Values(DType::f32, DType::bf16, DType::fp16));

TEST_P(HeadChunks, GiveTheSameLossAndGradients) {
  for (bool tied : {true, false})
    for (bool every : {true, false}) {
      TinyRun run;
      run.fsdp.param_dtype = GetParam();
      run.fsdp.reduce_every_microbatch = every;
      run.config.tie_word_embeddings = tied;
      const GlobalBatch batch(0, 2 * run.B * test_world().size(), run.T, run.config.vocab_size);
      const auto batches = deal(batch, run.B, Deal::split);
      auto whole = run.engine();
      ASSERT_EQ(whole->model().head_chunk(), run.B * run.T);
      const StepResult expected = whole->compute_gradients(batches);
      for (int64_t rows : {1, 4, 5}) {
        auto chunked = run.engine();
        chunked->model().limit_head_chunk(rows);
        ASSERT_EQ(chunked->model().head_chunk(), rows);
        const StepResult found = chunked->compute_gradients(batches);
        EXPECT_NEAR(found.loss, expected.loss, 1e-6 * expected.loss);
        const double tolerance = GetParam() == DType::f32 ? 2e-6 : 1e-3;
        EXPECT_LT(relative_difference(gradients_of(*chunked), gradients_of(*whole)), tolerance)
            << rows << " rows, tied " << tied << ", reduced every micro-batch " << every;
      }
    }
}

TEST(Model, LargeVocabularyIsCutIntoChunks) {
  TinyRun run;
  run.config.vocab_size = 151936;
  run.config.hidden_size = 2;
  run.config.num_hidden_layers = 1;
  run.B = 1;
  run.T = 4;
  auto engine = run.engine();
  EXPECT_EQ(engine->model().head_chunk(), 4);
  engine->model().limit_head_chunk(1000);  // no more than there is memory for
  EXPECT_EQ(engine->model().head_chunk(), 4);
}

TEST(Model, ParametersOfAllUnitsAreTheConfigsNumber) {
  for (bool tied : {true, false}) {
    TinyRun run;
    run.config.tie_word_embeddings = tied;
    auto engine = run.engine();
    int64_t own = 0;
    for (int u = 0; u < engine->model().num_units(); ++u)
      own += engine->model().unit(u).layout().shard_numel(test_world().rank());
    test_world().all_reduce_sum(&own, 1);
    EXPECT_EQ(own, run.config.num_parameters());
    EXPECT_EQ(own, static_cast<int64_t>(tied ? 0 : 37 * 20) + 37 * 20 + 20 +
                       2 * (20 + (32 + 16 + 16) * 20 + 8 + 8 + 20 * 32 + 20 + 3 * 28 * 20));
  }
}

}  // namespace
}  // namespace qshard
