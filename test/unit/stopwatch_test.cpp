#include "train/stopwatch.h"

#include <gtest/gtest.h>

#include "../test_main.h"

namespace qshard {
namespace {

TEST(Stopwatch, WarmUpIsLeftOut) {
  // A first step that makes kernels and files that takes a hundred times as long.
  const std::vector<double> steps = {100, 50, 3, 1, 2};
  EXPECT_EQ(times_of(steps, 2).median, 2);
  EXPECT_EQ(times_of(steps, 2).lowest, 1);
  EXPECT_EQ(times_of(steps, 2).highest, 3);
  EXPECT_EQ(times_of(steps, 1).highest, 50);
  EXPECT_EQ(times_of(steps, 0).highest, 100);
}

TEST(Stopwatch, MedianOfAnEvenNumberLiesBetween) {
  EXPECT_EQ(times_of({4, 1, 3, 2}, 0).median, 2.5);
  EXPECT_EQ(times_of({7}, 0).median, 7);
}

TEST(Stopwatch, NothingLeftIsAnError) {
  EXPECT_THROW(times_of({1, 2}, 2), Error);
  EXPECT_THROW(times_of({}, 0), Error);
}

TEST(Stopwatch, CallsAndPreparesAsOftenAsItSays) {
  Stopwatch watch(test_world(), *test_backend().device, 2, 3);
  int calls = 0, prepared = 0;
  const std::vector<double> seconds = watch.time(
      [&] {
        EXPECT_EQ(prepared, calls + 1);
        ++calls;
      },
      [&] { ++prepared; });
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(seconds.size(), 5);
  for (double s : seconds) EXPECT_GT(s, 0);
}

// Many calls are one time: that of a call.
TEST(Stopwatch, ShortWorkIsRepeated) {
  Stopwatch watch(test_world(), *test_backend().device, 1, 2);
  int64_t calls = 0;
  const Times times = watch.time_short([&] { ++calls; });
  EXPECT_GT(calls, 100);
  EXPECT_LT(times.lowest, 2e-3);
}

}  // namespace
}  // namespace qshard
