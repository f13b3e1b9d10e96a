#include "comm/placement.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

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

// --- NUMA nodes
const std::map<int, std::vector<int>> kTwoNodes = {{0, {0, 1, 2, 3}}, {1, {4, 5, 6, 7}}};

TEST(Numa, SilentWhereAllIsWell) {
  EXPECT_EQ(numa_warning({0, 1}, kTwoNodes, -1), "");
  EXPECT_EQ(numa_warning({4, 5, 6, 7}, kTwoNodes, 1), "");
  EXPECT_EQ(numa_warning({0, 1, 2, 3, 4, 5, 6, 7}, kTwoNodes, -1), "") << "not bound";
  EXPECT_EQ(numa_warning({0, 1, 2, 3, 4, 5, 6, 7}, kTwoNodes, 1), "") << "not bound";
  EXPECT_EQ(numa_warning({0, 1, 2, 3, 4, 5}, kTwoNodes, -1), "") << "more than a node has";
  EXPECT_EQ(numa_warning({0}, {}, 1), "") << "Linux does not tell";
}

TEST(Numa, CpusFarFromTheGpu) {
  const std::string text = numa_warning({0, 1}, kTwoNodes, 1);
  for (const char* part : {"GPU is at NUMA node 1", "CPUs are at 0", "--gpu-bind=closest"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Numa, CpusOfTwoNodesThoughOneIsEnough) {
  const std::string text = numa_warning({3, 4}, kTwoNodes, -1);
  for (const char* part : {"2 CPUs are at the NUMA nodes 0,1", "one has 4", "slot:PE=2"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(Numa, ReadFromTheSystem) {
  EXPECT_EQ(parse_cpu_list("0-2,8,10-11"), (std::vector<int>{0, 1, 2, 8, 10, 11}));
  EXPECT_EQ(parse_cpu_list("none"), std::vector<int>());
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "numa";
  for (const auto& [node, list] : {std::pair{"node0", "0-3"}, std::pair{"node1", "4-7"}}) {
    std::filesystem::create_directories(folder / node);
    std::ofstream(folder / node / "cpulist") << list << '\n';
  }
  std::ofstream(folder / "online") << "0-1\n";
  EXPECT_EQ(find_numa_nodes(folder), kTwoNodes);
  std::filesystem::remove_all(folder);
  EXPECT_TRUE(find_numa_nodes(folder).empty());
}

}  // namespace
}  // namespace qshard
