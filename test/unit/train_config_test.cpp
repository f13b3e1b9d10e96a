#include "train/train_config.h"

#include <gtest/gtest.h>

#include "files.h"

namespace qshard {
namespace {

using nlohmann::json;

// A configuration from JSON, as `train --config` makes it.
TrainConfig configured(const json& values, int ranks) {
  TrainConfig config;
  config.data.train = "tokens.h5";
  OptionTable table;
  config.describe(table);
  table.load_json(values, "test.json");
  config.finish(ranks);
  return config;
}

std::string refusal(const json& values, int ranks = 4) {
  return error_of([&] { configured(values, ranks); }, kExitUsage);
}

json train_with(const char* key, const json& value) { return {{"train", {{key, value}}}}; }

TEST(TrainConfig, DerivedValues) {
  const TrainConfig c = configured(
      {{"train", {{"global_batch", 24}, {"micro_batch", 2}, {"seq", 10}, {"steps", 7}}}}, 4);
  EXPECT_EQ(c.accumulation(4), 3);
  EXPECT_EQ(c.tokens_per_step(), 240);
  EXPECT_EQ(c.schedule.total_steps, 7);
  EXPECT_EQ(c.fsdp.param_dtype, DType::bf16);
  EXPECT_EQ(c.fsdp.reduce_dtype, DType::f32);
  EXPECT_TRUE(c.adamw.decay_matrices_only);
  const TrainConfig d = configured(
      {{"train", {{"global_batch", 24}, {"param_dtype", "f32"}, {"reduce_dtype", "bf16"}}},
       {"optim", {{"decay", "all"}}}},
      3);
  EXPECT_EQ(d.train.micro_batch, 8);
  EXPECT_EQ(d.accumulation(3), 1);
  EXPECT_EQ(d.fsdp.param_dtype, DType::f32);
  EXPECT_EQ(d.fsdp.reduce_dtype, DType::bf16);
  EXPECT_FALSE(d.adamw.decay_matrices_only);
}

TEST(TrainConfig, GlobalBatchThatDoesNotDivideIsRefusedWithTheNearestOnes) {
  EXPECT_TRUE(has(refusal(train_with("global_batch", 6)), {"6", "4 ranks", "4 and 8"}));
  EXPECT_TRUE(has(refusal(train_with("global_batch", 3)), {"nearest are 4"}));
  EXPECT_TRUE(has(refusal({{"train", {{"global_batch", 12}, {"micro_batch", 2}}}}),
                  {"12", "4 ranks", "micro_batch 2", "= 8", "8 and 16"}));
}

// Checkpoints of versions that did not record it can be gone on with.
TEST(TrainConfig, AnotherTokenizerChangesTheMathematics) {
  const json none = {{"derived", {{"samples", 5}}}};
  const json bytes = {{"derived", {{"samples", 5}, {"tokenizer", "bytes"}}}};
  const json other = {{"derived", {{"samples", 5}, {"tokenizer", "qwen"}}}};
  EXPECT_EQ(compare_runs(bytes, other).mathematics.size(), 1);
  EXPECT_TRUE(compare_runs(bytes, bytes).mathematics.empty());
  EXPECT_TRUE(compare_runs(none, bytes).mathematics.empty());
  EXPECT_TRUE(compare_runs(bytes, none).mathematics.empty());
}

TEST(TrainConfig, SchedulesThatDoNotFit) {
  const json steps = {{"steps", 10}, {"global_batch", 8}};
  EXPECT_TRUE(has(refusal({{"train", steps}, {"schedule", {{"warmup_steps", 11}}}}), {"11", "10"}));
  EXPECT_TRUE(
      has(refusal({{"train", steps},
                   {"schedule", {{"kind", "wsd"}, {"warmup_steps", 6}, {"decay_steps", 5}}}}),
          {"6", "5", "10"}));
  EXPECT_TRUE(
      has(refusal({{"train", steps}, {"schedule", {{"min_lr", 1}}}}), {"min_lr", "optim.lr"}));
}

// 1 - 1^t = 0 would divide the moments by zero.
TEST(TrainConfig, BetaOfOneIsRefused) {
  for (const char* beta : {"beta1", "beta2"})
    EXPECT_TRUE(has(refusal({{"optim", {{beta, 1.0}}}}), {"optim.beta1", "below 1"}));
}

TEST(TrainConfig, MissingDataIsRefused) {
  TrainConfig config;
  EXPECT_TRUE(has(error_of([&] { config.finish(1); }, kExitUsage), {"data.train"}));
}

TEST(TrainConfig, LimitsOfTheTable) {
  EXPECT_TRUE(has(refusal(train_with("steps", 0)), {"train.steps", "test.json"}));
  EXPECT_TRUE(has(refusal(train_with("steps", "many")), {"train.steps", "many"}));
  EXPECT_TRUE(has(refusal(train_with("param_dtype", "fp8")), {"fp8", "bf16", "fp16"}));
  EXPECT_TRUE(has(refusal({{"grad_scaler", {{"init_scale", 0.5}}}}), {"grad_scaler.init_scale"}));
  EXPECT_TRUE(has(refusal({{"grad_scaler", {{"backoff_factor", 1}}}}), {"backoff_factor"}));
  EXPECT_TRUE(has(refusal(train_with("step", 5)), {"train.step", "train.steps"}));
  EXPECT_TRUE(has(refusal({{"fsdp", {{"prefetch", -1}}}}), {"fsdp.prefetch"}));
  EXPECT_TRUE(has(refusal({{"comm", {{"transport", "smoke"}}}}), {"smoke", "shm", "mpi"}));
}

// Of a run whose loss has no scale they say nothing, and older runs did not know them.
TEST(TrainConfig, ScalesOfTheLossAreComparedInFp16Alone) {
  const auto changes = [](const char* dtype, const json& saved, const json& now) {
    const auto run = [&](const json& scaler) {
      json settings = train_with("param_dtype", dtype);
      if (!scaler.is_null()) settings["grad_scaler"] = scaler;
      return settings;
    };
    return compare_runs(run(saved), run(now)).mathematics.size();
  };
  const json a = {{"growth_interval", 2000}}, b = {{"growth_interval", 100}};
  EXPECT_EQ(changes("bf16", nullptr, a), 0u);
  EXPECT_EQ(changes("bf16", a, b), 0u);
  EXPECT_EQ(changes("fp16", a, a), 0u);
  EXPECT_EQ(changes("fp16", a, b), 1u);
}

const char* const kModel = R"({"model_type": "qwen3", "vocab_size": 97, "hidden_size": 64,
  "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": true,
  "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})";

TEST(TrainConfig, OptionsOverrideTheModelFile) {
  const TempDir dir;
  write_text(dir / "config.json", kModel);
  TrainConfig config;
  config.model.config = dir / "config.json";
  EXPECT_EQ(config.load_model().vocab_size, 97);
  EXPECT_EQ(config.load_model().rope_theta, 10000);
  config.model.vocab_size = 515;
  config.model.rope_theta = 5000;
  config.model.tie_word_embeddings = "false";
  const Qwen3Config model = config.load_model();
  EXPECT_EQ(model.vocab_size, 515);
  EXPECT_EQ(model.hidden_size, 64);
  EXPECT_EQ(model.rope_theta, 5000);
  EXPECT_FALSE(model.tie_word_embeddings);
}

TEST(TrainConfig, AnotherThetaDoesNotHideRopeScaling) {
  const TempDir dir;
  json model = json::parse(kModel);
  model["rope_parameters"]["rope_type"] = "yarn";
  write_text(dir / "config.json", model.dump());
  TrainConfig config;
  config.model.config = dir / "config.json";
  config.model.rope_theta = 5000;
  EXPECT_TRUE(has(error_of([&] { config.load_model(); }, kExitUsage), {"rope_type", "yarn"}));
}

TEST(TrainConfig, ModelFromOptionsAlone) {
  TrainConfig config;
  EXPECT_TRUE(has(error_of([&] { config.load_model(); }, kExitUsage), {"the options model.*"}));
  config.model.vocab_size = 257;
  config.model.hidden_size = 32;
  config.model.intermediate_size = 48;
  config.model.num_hidden_layers = 1;
  config.model.num_attention_heads = 4;
  config.model.rope_theta = 10000;
  EXPECT_EQ(config.load_model().head_dim, 8);
}

TEST(TrainConfig, MissingModelFileIsNamed) {
  TrainConfig config;
  config.model.config = "/nowhere/config.json";
  int code = 0;
  try {
    config.load_model();
  } catch (const Error& error) {
    code = error.code;
    EXPECT_TRUE(has(error.what(), {"/nowhere/config.json", "No such file"}));
  }
  EXPECT_NE(code, 0);
}

}  // namespace
}  // namespace qshard
