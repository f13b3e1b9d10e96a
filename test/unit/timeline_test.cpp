// The timeline of hand-made spans, whose times are worked out here by hand.
#include "train/timeline.h"

#include <nlohmann/json.hpp>

#include "files.h"

namespace qshard {
namespace {

// 1 FLOP and 1 byte take a second each.
Hardware slow() {
  Hardware h;
  h.name = "slow";
  h.peak_flops = {{"f32", 1}, {"bf16", 2}};
  h.memory_bytes_per_s = 1;
  h.in_node = {1, 0};
  h.between_nodes = {1, 0};
  return h;
}

Span product(int64_t flops, const char* dtype = "f32") {
  Span span;
  span.name = "linear";
  span.flops = flops;
  span.tensors = {{"in", "x", dtype, {1}}};
  return span;
}
Span norm(int64_t elements) {
  Span span;
  span.name = "rms_norm";
  span.tensors = {{"in", "x", "bf16", {elements}}, {"out", "y", "f32", {elements}}};
  return span;
}
Span moved(Lane lane, const char* name, int64_t bytes = 0) {
  Span span;
  span.lane = lane;
  span.name = name;
  span.unit = "layers.0";
  span.logical_bytes = bytes;
  return span;
}
Span gather_start(int64_t bytes) { return moved(Lane::gather, "all-gather start", bytes); }
Span gather_wait() { return moved(Lane::gather, "all-gather wait"); }

StepTime times(std::vector<Span> spans, const Hardware& h, int ranks = 2, int nodes = 1) {
  Plan plan;
  plan.spans = std::move(spans);
  for (Span& span : plan.spans) span.ranks = ranks, span.nodes = nodes;
  return simulate(plan, h);
}

TEST(Timeline, OperatorsTakeTheirFlopsOrTheirBytes) {
  EXPECT_DOUBLE_EQ(operator_seconds(product(10), slow()), 10);
  EXPECT_DOUBLE_EQ(operator_seconds(product(10, "bf16"), slow()), 5);
  EXPECT_DOUBLE_EQ(operator_seconds(norm(3), slow()), 3 * (2 + 4));
  Hardware h = slow();
  h.product_share = 0.5;
  h.memory_share = 0.25;
  EXPECT_DOUBLE_EQ(operator_seconds(product(10), h), 20);
  EXPECT_DOUBLE_EQ(operator_seconds(norm(3), h), 72);
  h.measured = {{"f32/linear", 5}, {"rms_norm", 2}};
  EXPECT_DOUBLE_EQ(operator_seconds(product(10), h), 2);
  EXPECT_DOUBLE_EQ(operator_seconds(product(10, "bf16"), h), 10);  // not measured
  EXPECT_DOUBLE_EQ(operator_seconds(norm(3), h), 9);
  EXPECT_NE(error_of([&] { operator_seconds(product(1, "fp16"), slow()); }).find("fp16"),
            std::string::npos);
}

TEST(Timeline, OffloadedStatesHideUnderTheUpdateAlone) {
  Plan plan;
  plan.spans = {product(10), norm(3)};
  plan.spans.back().phase = "optimizer";  // 18 s
  Hardware h = slow();
  h.host_bytes_per_s = 2;
  EXPECT_DOUBLE_EQ(simulate(plan, h).step, 28);
  plan.memory.host[static_cast<size_t>(Segment::moments)] = 30;
  EXPECT_DOUBLE_EQ(simulate(plan, h).step, 28);
  plan.memory.host[static_cast<size_t>(Segment::shards)] = 16;
  EXPECT_DOUBLE_EQ(simulate(plan, h).step, 33);
  EXPECT_DOUBLE_EQ(simulate(plan, h).offload_wait, 5);
  h.host_bytes_per_s = 0;
  EXPECT_NE(error_of([&] { simulate(plan, h); }).find("host_gb_per_s"), std::string::npos);
}

TEST(Timeline, AGatherHidesUnderCompute) {
  const StepTime t = times({gather_start(4), product(10), gather_wait(), product(1)}, slow());
  EXPECT_DOUBLE_EQ(t.step, 11);
  EXPECT_DOUBLE_EQ(t.gather_wait, 0);
  EXPECT_DOUBLE_EQ(t.gathers, 4);
}

TEST(Timeline, WhatIsNotHiddenIsWaitedFor) {
  const StepTime t = times({gather_start(14), product(10), gather_wait(), product(1)}, slow());
  EXPECT_DOUBLE_EQ(t.step, 15);
  EXPECT_DOUBLE_EQ(t.gather_wait, 4);
  EXPECT_DOUBLE_EQ(t.compute, 11);
}

TEST(Timeline, GathersQueueAndReductionsHaveALaneOfTheirOwn) {
  const StepTime t = times({gather_start(4), gather_start(5), gather_wait(),
                            moved(Lane::reduce, "reduce-scatter start", 3), product(1),
                            moved(Lane::reduce, "reduce-scatter wait")},
                           slow());
  EXPECT_DOUBLE_EQ(t.gather_wait, 9);
  EXPECT_DOUBLE_EQ(t.reduce_wait, 2);
  EXPECT_DOUBLE_EQ(t.step, 9 + 3);
}

TEST(Timeline, WithoutOverlapEverythingIsInARow) {
  Hardware h = slow();
  h.overlaps = false;
  h.other_s = 100;
  const StepTime t = times({gather_start(4), product(10), gather_wait()}, h);
  EXPECT_DOUBLE_EQ(t.step, 114);
  EXPECT_DOUBLE_EQ(t.gather_wait, 4);
}

// 4 ranks on 2 nodes: of a unit of 8 bytes a ring brings 6 through each rank; a node receives the
// other's 4 bytes through two links, 2 each.
TEST(Timeline, BetweenNodesTheSlowerLinkDecides) {
  const std::vector<Span> spans = {gather_start(6), gather_wait()};
  Hardware h = slow();
  EXPECT_DOUBLE_EQ(times(spans, h, 4, 2).step, 6);
  h.between_nodes.bytes_per_s = 0.1;
  EXPECT_DOUBLE_EQ(times(spans, h, 4, 2).step, 20);
  h.in_node.latency_s = 1000;
  h.between_nodes.latency_s = 100;
  EXPECT_DOUBLE_EQ(times(spans, h, 4, 2).step, 1120);
  // One rank a node has no use for links inside of it.
  h.in_node = {0.001, 0};
  h.between_nodes = {2, 0};
  EXPECT_DOUBLE_EQ(times(spans, h, 4, 4).step, 3);
  EXPECT_DOUBLE_EQ(times({gather_start(0), gather_wait()}, h, 1, 1).step, 0);
}

TEST(Hardware, ProfilesSayWhatTheyLack) {
  nlohmann::json good = {{"name", "x"},
                         {"ranks_per_node", 8},
                         {"product_share", 0.7},
                         {"attention_share", 0.5},
                         {"memory_share", 0.8},
                         {"memory_gb_per_s", 100},
                         {"peak_tflops", {{"bf16", 3}}},
                         {"in_node", {{"gb_per_s", 9}, {"latency_us", 5}}},
                         {"between_nodes", {{"gb_per_s", 2}}}};
  const Hardware h = Hardware::from_json(good, "x.json");
  EXPECT_DOUBLE_EQ(h.peak_flops.at("bf16"), 3e12);
  EXPECT_DOUBLE_EQ(h.in_node.bytes_per_s, 9e9);
  EXPECT_DOUBLE_EQ(h.in_node.latency_s, 5e-6);
  EXPECT_TRUE(h.overlaps);
  for (const char* field :
       {"name", "ranks_per_node", "memory_gb_per_s", "peak_tflops", "in_node"}) {
    nlohmann::json bad = good;
    bad.erase(field);
    const std::string error = error_of([&] { Hardware::from_json(bad, "x.json"); });
    EXPECT_NE(error.find("x.json"), std::string::npos) << error;
    EXPECT_NE(error.find(field), std::string::npos) << error;
  }
  good["in_node"]["gb_per_s"] = 0;
  EXPECT_NE(error_of([&] { Hardware::from_json(good, "x.json"); }).find("gb_per_s"),
            std::string::npos);
}

}  // namespace
}  // namespace qshard
