#include "comm/placement.h"

#include <gtest/gtest.h>

namespace qshard {
namespace {

Placement placement(int ranks, int allowed, int narrowest, int machine, int job = 0) {
  Placement p;
  p.ranks = ranks, p.allowed = allowed, p.narrowest = narrowest, p.machine = machine, p.job = job;
  return p;
}

void expect_warning(const Placement& p, std::initializer_list<const char*> parts) {
  const std::string text = placement_warning(p);
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Placement, SilentWhereAllIsWell) {
  EXPECT_EQ(placement_warning(placement(4, 4, 1, 4)), "");
  EXPECT_EQ(placement_warning(placement(4, 64, 64, 64)), "") << "not bound at all";
  EXPECT_EQ(placement_warning(placement(4, 64, 16, 64, 64)), "");
  EXPECT_EQ(placement_warning(placement(3, 64, 21, 64, 64)), "");
  EXPECT_EQ(placement_warning(placement(4, 32, 8, 64, 64)), "") << "one of two threads a core";
  EXPECT_EQ(placement_warning(placement(1, 1, 1, 64, 1)), "") << "asked for one, got one";
}

TEST(Placement, AllRanksOnOneCpuOfMany) {
  expect_warning(placement(8, 1, 1, 64), {"1 CPU(s) for 8 ranks", "64", "--cpu-bind=cores"});
}

TEST(Placement, MoreRanksThanTheMachineHasCpus) {
  expect_warning(placement(8, 2, 2, 2), {"2 CPU(s) for 8 ranks", "--ntasks-per-node=2"});
}

TEST(Placement, OneCpuARankOfAJobWithMany) {
  expect_warning(placement(4, 4, 1, 64, 64), {"4 of the 64 CPUs", "--cpus-per-task=16"});
}

TEST(Placement, BindingsThatOverlap) {
  expect_warning(placement(4, 16, 1, 16), {"1 CPU(s)", "is 4", "--cpus-per-task=4"});
}

TEST(Placement, CpusOfANodeOfTheJob) {
  EXPECT_EQ(job_cpus_of_node("8", 0), 8);
  EXPECT_EQ(job_cpus_of_node("36(x2),20", 0), 36);
  EXPECT_EQ(job_cpus_of_node("36(x2),20", 1), 36);
  EXPECT_EQ(job_cpus_of_node("36(x2),20", 2), 20);
  EXPECT_EQ(job_cpus_of_node("36(x2),20", 3), 0);
  EXPECT_EQ(job_cpus_of_node("", 0), 0);
  EXPECT_EQ(job_cpus_of_node("nonsense", 0), 0);
}

}  // namespace
}  // namespace qshard
