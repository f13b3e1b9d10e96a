// What a rank did and when: spans with bytes and FLOPs, for `--trace` files and the walkthrough.
//
// [Note: Tracing] No layer, unit or transport asks whether it is traced. To trace, the backend's
// operators and the transport are wrapped (device/traced_ops.h, comm/traced_collectives.h) and the
// wrappers record a span a call; without them nothing is there to cost anything. The model only
// names what comes next, by Ops::mark(). Bytes moved are differences of the transport's own count.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

namespace qshard {

enum class Lane : uint8_t { compute, gather, reduce, io };
std::string lane_name(Lane lane);

struct TraceTensor {
  std::string role, name, dtype;  // role: in, weight, out
  std::vector<int64_t> shape;
};

struct Span {
  Lane lane = Lane::compute;
  std::string name;               // operator or verb: "linear", "all-gather start"
  std::string unit, phase, step;  // "layers.0", "forward", "6 o_proj"; no step: the transport's
  int64_t micro_batch = 0;        // of its step, from 0
  int64_t begin_ns = 0, end_ns = 0;
  int64_t logical_bytes = 0,
          copied_bytes = 0;      // moved meanwhile, see Traffic in comm/collectives.h
  int ranks = 1, nodes = 1;      // that the transport connects, of its spans
  int64_t flops = 0, bytes = 0;  // bytes: least memory traffic of an operator, see traced_ops.h
  int64_t held_before = 0, held_after = 0;  // parameters and full gradients of all units, bytes
  int64_t unit_before = 0, unit_after = 0;  // parameters of `unit`, of spans of the transport
  std::vector<TraceTensor> tensors;
};

// Told of every span where it begins and ends, recorded or not: for a profiler's marks.
class SpanMarks {
 public:
  virtual ~SpanMarks() = default;
  virtual void begin(const Span& span) = 0;  // lane, name, unit, phase and step are there
  virtual void end() = 0;                    // of the last that began
};

class Trace {
 public:
  // `marks` may be null and outlives the trace.
  explicit Trace(SpanMarks* marks = nullptr) : marks_(marks) {}

  // Between record(false) and record(true) calls pass unrecorded; memory is counted all the same.
  void record(bool on) { recording_ = on; }
  bool recording() const { return recording_; }

  // What the spans that follow belong to. A forward after anything else begins a micro-batch; the
  // optimizer ends the step.
  void mark(const std::string& unit, const char* phase, const char* step);

  Span begin(Lane lane, std::string name) const { return begin(lane, std::move(name), unit_); }
  Span begin(Lane lane, std::string name, const std::string& unit) const;
  void end(Span& span);  // completes it and keeps a copy

  // Counted by the wrapped transport.
  int64_t logical_bytes = 0, copied_bytes = 0, held = 0;

  const std::vector<Span>& spans() const { return spans_; }

 private:
  SpanMarks* marks_;
  bool recording_ = true;
  std::string unit_, phase_, step_;
  int64_t micro_batch_ = -1;
  std::vector<Span> spans_;
};

// Records from its construction to its destruction; nothing without a trace.
class TraceScope {
 public:
  TraceScope(Trace* trace, Lane lane, const char* name) : trace_(trace) {
    if (trace_) span_ = trace_->begin(lane, name);
  }
  ~TraceScope() {
    if (trace_) trace_->end(span_);
  }
  TraceScope(const TraceScope&) = delete;

 private:
  Trace* trace_;
  Span span_;
};

int64_t trace_clock_ns();  // monotonic, the same for all processes of a node

void to_json(nlohmann::ordered_json& json, const Span& span);
void from_json(const nlohmann::ordered_json& json, Span& span);

// The events of one rank for a Chrome trace file (chrome://tracing, ui.perfetto.dev), separated by
// commas: the rank as process, lanes as threads, gathers and reductions in flight, held bytes as a
// counter. Times count from `origin_ns`.
std::string chrome_events(const std::vector<Span>& spans, int rank, const std::string& host,
                          int64_t origin_ns);

}  // namespace qshard
