#include "train/lr_schedule.h"

#include <gtest/gtest.h>

#include "files.h"

namespace qshard {
namespace {

ScheduleOptions schedule(const std::string& kind) {
  ScheduleOptions s;
  s.kind = kind;
  s.lr = 1e-2;
  s.min_lr = 1e-3;
  s.warmup_steps = 4;
  s.total_steps = 24;
  return s;
}

TEST(LrSchedule, WarmUpIsLinearAndReachesThePeak) {
  for (const char* kind : {"constant", "linear", "cosine", "wsd"}) {
    const ScheduleOptions s = schedule(kind);
    EXPECT_DOUBLE_EQ(learning_rate(s, 1), 2.5e-3) << kind;
    EXPECT_DOUBLE_EQ(learning_rate(s, 3), 7.5e-3) << kind;
    EXPECT_DOUBLE_EQ(learning_rate(s, 4), 1e-2) << kind;
  }
}

TEST(LrSchedule, Constant) {
  const ScheduleOptions s = schedule("constant");
  for (int64_t step : {5, 24, 1000}) EXPECT_DOUBLE_EQ(learning_rate(s, step), 1e-2);
}

TEST(LrSchedule, Linear) {
  const ScheduleOptions s = schedule("linear");
  EXPECT_DOUBLE_EQ(learning_rate(s, 14), 5.5e-3);  // halfway from step 4 to 24
  EXPECT_DOUBLE_EQ(learning_rate(s, 19), 3.25e-3);
  EXPECT_DOUBLE_EQ(learning_rate(s, 24), 1e-3);
}

TEST(LrSchedule, Cosine) {
  const ScheduleOptions s = schedule("cosine");
  EXPECT_DOUBLE_EQ(learning_rate(s, 14), 5.5e-3);
  EXPECT_NEAR(learning_rate(s, 9), 1e-3 + 9e-3 * 0.5 * (1 + std::sqrt(0.5)), 1e-15);
  EXPECT_NEAR(learning_rate(s, 24), 1e-3, 1e-15);
}

TEST(LrSchedule, WarmUpStableDecay) {
  ScheduleOptions s = schedule("wsd");
  s.decay_steps = 10;
  EXPECT_DOUBLE_EQ(learning_rate(s, 5), 1e-2);
  EXPECT_DOUBLE_EQ(learning_rate(s, 14), 1e-2);
  EXPECT_DOUBLE_EQ(learning_rate(s, 19), 5.5e-3);
  EXPECT_DOUBLE_EQ(learning_rate(s, 24), 1e-3);
}

// Also where the last step is not at min_lr: no decay at all, or nothing but warm-up.
TEST(LrSchedule, StaysAtItsLastValue) {
  for (const char* kind : {"constant", "linear", "cosine", "wsd"})
    for (int64_t warmup : {0, 4, 24}) {
      ScheduleOptions s = schedule(kind);
      s.warmup_steps = warmup;
      for (int64_t step : {25, 26, 1000000})
        EXPECT_DOUBLE_EQ(learning_rate(s, step), learning_rate(s, 24)) << kind << " " << warmup;
    }
}

TEST(LrSchedule, OneStepWithoutWarmUp) {
  for (const char* kind : {"linear", "cosine", "constant", "wsd"}) {
    ScheduleOptions s = schedule(kind);
    s.warmup_steps = 0;
    s.total_steps = 1;
    EXPECT_GT(learning_rate(s, 1), 0) << kind;
  }
}

TEST(LrSchedule, UnknownKindIsNamed) {
  const ScheduleOptions s = schedule("cosin");
  EXPECT_TRUE(has(error_of([&] { learning_rate(s, 10); }, kExitUsage), {"cosin", "cosine", "wsd"}));
}

}  // namespace
}  // namespace qshard
