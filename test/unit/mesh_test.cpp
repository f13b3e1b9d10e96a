#include "comm/mesh.h"

#include "../test_main.h"
#include "files.h"

namespace qshard {
namespace {

std::string chosen(const std::string& text, const std::vector<int>& nodes) {
  return choose_mesh(text, nodes).str();
}
std::string refused(const std::string& text, int ranks) {
  return error_of([&] { choose_mesh(text, std::vector<int>(ranks, 0)); }, kExitUsage);
}

TEST(ChooseMesh, FullIsOneReplica) {
  EXPECT_EQ(chosen("full", {0}), "1x1");
  EXPECT_EQ(chosen("full", {0, 0, 1, 1}), "1x4");
}

TEST(ChooseMesh, AsGiven) {
  EXPECT_EQ(chosen("2x2", {0, 0, 0, 0}), "2x2");
  EXPECT_EQ(chosen("1x4", {0, 0, 0, 0}), "1x4");
  EXPECT_EQ(chosen("4x1", {0, 1, 0, 1}), "4x1");
}

TEST(ChooseMesh, AutoIsAReplicaOnEachNodeOrSaysWhyNot) {
  EXPECT_EQ(chosen("auto", {0, 0, 1, 1, 2, 2}), "3x2");
  EXPECT_EQ(choose_mesh("auto", {0, 0, 1, 1}).why, "2 nodes of 2 ranks");
  EXPECT_EQ(chosen("auto", {0, 1}), "2x1");
  EXPECT_EQ(chosen("auto", {0, 0, 0}), "1x3");
  EXPECT_EQ(choose_mesh("auto", {0, 0, 0}).why, "one node");
  EXPECT_EQ(chosen("auto", {0, 0, 1}), "1x3");
  EXPECT_TRUE(has(choose_mesh("auto", {0, 0, 1}).why, {"different numbers of ranks"}));
  EXPECT_EQ(chosen("auto", {0, 1, 0, 1}), "1x4");
  EXPECT_TRUE(has(choose_mesh("auto", {0, 1, 0, 1}).why, {"different nodes"}));
}

TEST(ChooseMesh, BadOnesAreRefusedWithThoseThatFit) {
  EXPECT_TRUE(has(refused("2x3", 4), {"fsdp.mesh 2x3", "4 ranks", "1x4, 2x2, 4x1"}));
  EXPECT_TRUE(has(refused("0x4", 4), {"fsdp.mesh 0x4", "at least 1", "1x4, 2x2, 4x1"}));
  for (const char* text : {"", "x", "2", "2x", "x2", "-2x-2", "2x2x1", "2 x 2", "2X2", "two",
                           "2.0x2", "99999999999999999999x1"})
    EXPECT_TRUE(has(refused(text, 4), {"fsdp.mesh", "full, auto, or RxS"})) << text;
  EXPECT_TRUE(has(refused("4294967297x4", 4), {"4294967297", "4 ranks"}));  // 1 in 32 bits
}

}  // namespace
}  // namespace qshard
