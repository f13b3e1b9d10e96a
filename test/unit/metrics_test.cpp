#include "train/metrics.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "files.h"

namespace qshard {
namespace {

using nlohmann::json;

Metrics::Run small_run(const TempDir& dir) {
  Metrics::Run run;
  run.folder = dir / "";
  run.steps = 3;
  run.log_every = 2;
  run.tokens_per_step = 64;
  run.flops_per_step = 1e6;
  run.peak_flops = 1e9;
  return run;
}

StepResult result_of(double loss) {
  StepResult r;
  r.loss = loss;
  r.grad_norm = 0.5;
  r.kept = 60;
  return r;
}

std::vector<json> lines_of(const TempDir& dir) {
  std::vector<json> lines;
  std::istringstream text(read_text(dir / "metrics.jsonl"));
  for (std::string line; std::getline(text, line);) lines.push_back(json::parse(line));
  return lines;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(Metrics, StepLineHasItsFieldsAndTheIntervalsOwnSpeed) {
  const TempDir dir;
  Metrics metrics(small_run(dir));
  testing::internal::CaptureStdout();
  metrics.step(1, result_of(2.5), 1e-3, {0.5, 1000});
  metrics.step(2, result_of(2.0), 2e-3, {0.02, 2000});  // much faster than the first
  const std::string console = testing::internal::GetCapturedStdout();
  const std::vector<json> lines = lines_of(dir);
  ASSERT_EQ(lines.size(), 2u);
  std::set<std::string> names;
  for (const auto& [name, value] : lines[0].items()) names.insert(name);
  const std::set<std::string> expected = {
      "step",         "loss",    "grad_norm",         "lr",         "tokens",
      "tokens_per_s", "step_ms", "model_flops_per_s", "peak_share", "memory_bytes"};
  EXPECT_EQ(names, expected);
  EXPECT_EQ(lines[1]["step"], 2);
  EXPECT_EQ(lines[1]["loss"], 2.0);
  EXPECT_EQ(lines[1]["lr"], 2e-3);
  EXPECT_EQ(lines[1]["tokens"], 128);
  EXPECT_EQ(lines[1]["memory_bytes"], 2000);
  for (const json& line : lines) {
    const double ms = line["step_ms"], rate = line["tokens_per_s"];
    EXPECT_NEAR(rate * ms / 1e3, 64, 0.01);
    const double flops = line["model_flops_per_s"], share = line["peak_share"];
    EXPECT_NEAR(flops * ms / 1e3, 1e6, 1);
    EXPECT_NEAR(share, flops / 1e9, 1e-12);
  }
  EXPECT_EQ(split_lines(console).size(), 2u) << console;
  EXPECT_TRUE(has(console, {"step 1/3", "step 2/3", "3200 tok/s", "20.0 ms/step"}));
}

// A skipped step is said to be one, and its 0 is in no mean and no curve.
TEST(Metrics, SkippedStepDoesNotCountAsLossZero) {
  const TempDir dir;
  Metrics::Run run = small_run(dir);
  run.log_every = 3;
  Metrics metrics(run);
  StepResult skipped;
  skipped.updated = false;
  testing::internal::CaptureStdout();
  metrics.step(1, result_of(4.0), 1e-3, {0.1, 1});
  metrics.step(2, skipped, 1e-3, {0.1, 1});
  metrics.step(3, result_of(4.0), 1e-3, {0.1, 1});
  metrics.finish();
  const std::string console = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(has(console, {"step 3/3  loss 4.0000", "skipped: no label was kept"}));
  EXPECT_TRUE(has(lines_of(dir)[1].dump(), {"skipped"}));
  EXPECT_FALSE(has(lines_of(dir)[0].dump(), {"skipped"}));
  EXPECT_FALSE(has(console, {"   0.000 |"})) << console;
}

TEST(Metrics, OverflowIsSaidAndCounted) {
  const TempDir dir;
  Metrics metrics(small_run(dir));
  StepResult good = result_of(4.0), bad = good;
  good.loss_scale = 32768, bad.loss_scale = 65536;
  bad.updated = false, bad.overflow = true;
  bad.grad_norm = HUGE_VAL, bad.loss = std::nan("");
  testing::internal::CaptureStdout();
  metrics.step(1, bad, 1e-3, {0.1, 1});
  metrics.step(2, good, 1e-3, {0.1, 1});
  metrics.step(3, good, 1e-3, {0.1, 1});
  metrics.finish();
  const std::string console = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(has(console, {"skipped: a gradient overflowed at loss scale 65536\n",
                            "\n1 step(s) skipped: a gradient overflowed in fp16\n"}));
  const std::vector<json> lines = lines_of(dir);
  EXPECT_TRUE(lines[0]["loss"].is_null() && lines[0]["grad_norm"].is_null());
  EXPECT_EQ(lines[0]["loss_scale"], 65536);
  EXPECT_TRUE(lines[0].contains("skipped"));
  EXPECT_EQ(lines[1]["loss_scale"], 32768);
  EXPECT_FALSE(lines[1].contains("skipped"));
  EXPECT_FALSE(has(console, {"nan |"})) << console;
}

TEST(Metrics, EvaluationLine) {
  const TempDir dir;
  Metrics metrics(small_run(dir));
  testing::internal::CaptureStdout();
  metrics.evaluation(2, 1.75, 320, 0.25);
  EXPECT_TRUE(has(testing::internal::GetCapturedStdout(), {"step 2", "1.7500", "320 tokens"}));
  const json line = lines_of(dir).at(0);
  EXPECT_EQ(line, json({{"step", 2}, {"val_loss", 1.75}, {"val_tokens", 320}, {"val_ms", 250.0}}));
}

TEST(Metrics, FolderThatIsNotThere) {
  const TempDir dir;
  Metrics::Run run = small_run(dir);
  run.folder = dir / "absent";
  EXPECT_TRUE(has(error_of([&] { Metrics metrics(run); }), {"absent/metrics.jsonl"}));
}

TEST(PlotLosses, FallingCurveGoesFromTopLeftToBottomRight) {
  const auto lines = split_lines(plot_losses({1, 2, 3, 4}, {4, 3, 2, 1}, {4}, {1.5}));
  ASSERT_EQ(lines.size(), 1 + 14 + 2u);
  const size_t axis = lines[1].find('|') + 1;
  EXPECT_EQ(lines[1].find("4.000"), lines[1].find_first_not_of(' '));
  EXPECT_EQ(lines[1][axis], '.');
  EXPECT_EQ(lines[14][axis + 71], '.');
  EXPECT_NE(lines[14].find("1.000"), std::string::npos);
  EXPECT_EQ(lines[12][axis + 71], 'o');  // 1.5 lies 13 · 2.5 / 3 = 10.8 rows below the top
  for (const std::string& line : lines) EXPECT_LE(line.size(), 90u);
}

TEST(PlotLosses, DegenerateInputs) {
  EXPECT_EQ(plot_losses({}, {}, {}, {}), "");
  EXPECT_NE(plot_losses({1}, {2.5}, {}, {}).find('.'), std::string::npos);
  EXPECT_EQ(split_lines(plot_losses({1, 2}, {3, 3}, {}, {})).size(), 17u);
}

TEST(Metrics, HumanUnits) {
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1.5e9), "1.50 GB");
  EXPECT_EQ(human_bytes(2e15), "2000.00 TB");
  EXPECT_EQ(human_time(125), "0:02:05");
  EXPECT_EQ(human_time(3600 * 27 + 59.6), "27:01:00");
}

}  // namespace
}  // namespace qshard
