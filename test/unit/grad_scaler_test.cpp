#include "train/grad_scaler.h"

#include <gtest/gtest.h>

#include <limits>

namespace qshard {
namespace {

GradScalerOptions quick() {
  GradScalerOptions o;
  o.init_scale = 1024;
  o.growth_interval = 3;
  return o;
}

TEST(GradScaler, DefaultsArePyTorchs) {
  const GradScalerOptions o;
  EXPECT_EQ(o.init_scale, 65536);
  EXPECT_EQ(o.growth_factor, 2);
  EXPECT_EQ(o.backoff_factor, 0.5);
  EXPECT_EQ(o.growth_interval, 2000);
}

TEST(GradScaler, GrowsAfterStepsInARowWithoutOverflow) {
  GradScaler scaler(quick());
  // Overflow or not, scale after it, steps since.
  const struct {
    bool overflow;
    double scale;
    int64_t tracker;
  } steps[] = {{false, 1024, 1}, {false, 1024, 2}, {false, 2048, 0}, {false, 2048, 1},
               {false, 2048, 2}, {true, 1024, 0},  {true, 512, 0},   {false, 512, 1},
               {false, 512, 2},  {false, 1024, 0}, {true, 512, 0}};
  for (const auto& step : steps) {
    scaler.update(step.overflow);
    EXPECT_EQ(scaler.scale(), step.scale);
    EXPECT_EQ(scaler.growth_tracker(), step.tracker);
  }
}

TEST(GradScaler, StaysBetweenOneAndTheLargestF32) {
  GradScaler scaler(quick());
  for (int i = 0; i < 30; ++i) scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1);
  for (int i = 0; i < 3 * 200; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 0x1p127);
  EXPECT_LE(scaler.scale(), std::numeric_limits<float>::max());
}

TEST(GradScaler, GoesOnWhereItWas) {
  GradScaler straight(quick()), resumed(quick());
  for (int i = 0; i < 5; ++i) straight.update(false);
  resumed.restore(straight.scale(), straight.growth_tracker());
  for (int i = 0; i < 5; ++i) {
    straight.update(false);
    resumed.update(false);
    EXPECT_EQ(resumed.scale(), straight.scale()) << i;
  }
  // A shorter interval than the tracker has counted: it grows with the next good step.
  resumed.restore(8, 100);
  resumed.update(false);
  EXPECT_EQ(resumed.scale(), 16);
}

}  // namespace
}  // namespace qshard
