#include "base/trace.h"

#include <nlohmann/json.hpp>

#include "../test_main.h"

namespace qshard {
namespace {

using Json = nlohmann::ordered_json;

TEST(Trace, SpanHoldsWhatWasCountedMeanwhile) {
  Trace trace;
  trace.logical_bytes = 100, trace.copied_bytes = 10, trace.held = 7;
  Span span = trace.begin(Lane::gather, "all-gather start");
  trace.logical_bytes += 30, trace.copied_bytes += 3, trace.held = 28;
  trace.end(span);
  ASSERT_EQ(trace.spans().size(), 1u);
  const Span& s = trace.spans()[0];
  EXPECT_EQ(s.logical_bytes, 30);
  EXPECT_EQ(s.copied_bytes, 3);
  EXPECT_EQ(s.held_before, 7);
  EXPECT_EQ(s.held_after, 28);
  EXPECT_LE(s.begin_ns, s.end_ns);
}

TEST(Trace, RecordsOnlyWhileOn) {
  Trace trace;
  for (bool on : {true, false, true}) {
    trace.record(on);
    Span span = trace.begin(Lane::compute, on ? "kept" : "lost");
    trace.end(span);
  }
  ASSERT_EQ(trace.spans().size(), 2u);
  for (const Span& span : trace.spans()) EXPECT_EQ(span.name, "kept");
}

TEST(Trace, MicroBatchesBeginWithForwardAndEndWithTheOptimizer) {
  Trace trace;
  std::vector<int64_t> found;
  for (const char* phase :
       {"forward", "forward", "backward", "forward", "backward", "optimizer", "forward"}) {
    trace.mark("layers.0", phase, "a step");
    Span span = trace.begin(Lane::compute, "add");
    trace.end(span);
    EXPECT_EQ(span.step, "a step");
    if (phase != std::string("optimizer")) found.push_back(span.micro_batch);
  }
  EXPECT_EQ(found, (std::vector<int64_t>{0, 0, 0, 1, 1, 0}));
}

TEST(Trace, ScopeWithoutATraceDoesNothing) {
  { const TraceScope scope(nullptr, Lane::io, "read"); }
  Trace trace;
  { const TraceScope scope(&trace, Lane::io, "read"); }
  ASSERT_EQ(trace.spans().size(), 1u);
  EXPECT_EQ(trace.spans()[0].name, "read");
}

TEST(Trace, SpansSurviveJson) {
  Span span;
  span.lane = Lane::reduce;
  span.name = "n", span.unit = "u", span.phase = "p", span.step = "s";
  int64_t next = 1;
  for (int64_t* value :
       {&span.micro_batch, &span.begin_ns, &span.end_ns, &span.logical_bytes, &span.copied_bytes,
        &span.flops, &span.held_before, &span.held_after, &span.unit_before, &span.unit_after})
    *value = next++;
  span.tensors = {{"in", "x", "bf16", {16, 512}}};
  const Json json = span;
  EXPECT_EQ(Json(Json::parse(json.dump()).get<Span>()), json);
  EXPECT_EQ(json["lane"], "reduce");
  EXPECT_EQ(json["unit_after"], 10);
  EXPECT_EQ(json["tensors"][0]["shape"], Json({16, 512}));
}

TEST(Trace, ChromeEventsAreJsonWithLanesAndFlights) {
  Trace trace;
  for (const char* name : {"all-gather start", "all-gather wait"}) {
    Span span = trace.begin(Lane::gather, name);
    span.unit = "layers.0";
    trace.logical_bytes += 5;
    trace.end(span);
  }
  Span op = trace.begin(Lane::compute, "linear");
  op.flops = 12;
  op.tensors = {{"in", "x", "f32", {2, 3}}};
  trace.end(op);
  const Json events = Json::parse(
      "[" + chrome_events(trace.spans(), 3, "a \"host\"", trace.spans()[0].begin_ns) + "]");
  std::map<std::string, int> kinds;
  for (const Json& e : events) {
    ++kinds[e["ph"]];
    EXPECT_EQ(e["pid"], 3);
    if (e["ph"] == "X") {
      EXPECT_GE(e["ts"], 0.0);
      const bool gather = e["name"].get<std::string>().starts_with("all-gather");
      EXPECT_EQ(e["tid"], static_cast<int>(gather ? Lane::gather : Lane::compute));
      if (gather) {
        EXPECT_EQ(e["args"]["logical_bytes"], 5);
      } else {
        EXPECT_EQ(e["args"]["in"][0], "x [2, 3] f32");
      }
    }
  }
  EXPECT_EQ(kinds["X"], 3);
  EXPECT_EQ(kinds["b"], 1);
  EXPECT_EQ(kinds["e"], 1);
  EXPECT_EQ(kinds["M"], 5);  // the process and four lanes
}

}  // namespace
}  // namespace qshard
