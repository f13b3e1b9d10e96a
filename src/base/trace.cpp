#include "base/trace.h"

#include <fmt/format.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

namespace qshard {

using Json = nlohmann::ordered_json;

std::string lane_name(Lane lane) {
  constexpr const char* names[] = {"compute", "gather", "reduce", "io"};
  return names[static_cast<int>(lane)];
}

int64_t trace_clock_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void Trace::mark(const std::string& unit, const char* phase, const char* step) {
  const std::string before = std::exchange(phase_, phase);
  if (phase_ == "forward" && before != "forward") ++micro_batch_;
  if (phase_ == "optimizer") micro_batch_ = -1;
  unit_ = unit;
  step_ = step;
}

// Holds the counters as they are, for end() to take the differences.
Span Trace::begin(Lane lane, std::string name, const std::string& unit) const {
  Span span;
  span.lane = lane;
  span.name = std::move(name);
  span.unit = unit;
  span.phase = phase_;
  if (lane == Lane::compute) span.step = step_;
  span.micro_batch = micro_batch_;
  span.logical_bytes = logical_bytes;
  span.copied_bytes = copied_bytes;
  span.held_before = held;
  if (marks_) marks_->begin(span);
  span.begin_ns = trace_clock_ns();
  return span;
}

void Trace::end(Span& span) {
  span.end_ns = trace_clock_ns();
  if (marks_) marks_->end();
  span.logical_bytes = logical_bytes - span.logical_bytes;
  span.copied_bytes = copied_bytes - span.copied_bytes;
  span.held_after = held;
  if (recording_) spans_.push_back(span);
}

void to_json(Json& json, const Span& s) {
  Json tensors = Json::array();
  for (const TraceTensor& t : s.tensors)
    tensors.push_back({{"role", t.role}, {"name", t.name}, {"dtype", t.dtype}, {"shape", t.shape}});
  json = {{"lane", lane_name(s.lane)},
          {"name", s.name},
          {"unit", s.unit},
          {"phase", s.phase},
          {"step", s.step},
          {"micro_batch", s.micro_batch},
          {"begin_ns", s.begin_ns},
          {"end_ns", s.end_ns},
          {"logical_bytes", s.logical_bytes},
          {"copied_bytes", s.copied_bytes},
          {"ranks", s.ranks},
          {"nodes", s.nodes},
          {"flops", s.flops},
          {"bytes", s.bytes},
          {"held_before", s.held_before},
          {"held_after", s.held_after},
          {"unit_before", s.unit_before},
          {"unit_after", s.unit_after},
          {"tensors", tensors}};
}

void from_json(const Json& json, Span& s) {
  for (Lane lane : {Lane::compute, Lane::gather, Lane::reduce, Lane::io})
    if (json.at("lane") == lane_name(lane)) s.lane = lane;
  for (auto [name, text] :
       {std::pair{"name", &s.name}, {"unit", &s.unit}, {"phase", &s.phase}, {"step", &s.step}})
    json.at(name).get_to(*text);
  json.at("ranks").get_to(s.ranks);
  json.at("nodes").get_to(s.nodes);
  for (auto [name, value] : {std::pair{"micro_batch", &s.micro_batch},
                             {"begin_ns", &s.begin_ns},
                             {"end_ns", &s.end_ns},
                             {"logical_bytes", &s.logical_bytes},
                             {"copied_bytes", &s.copied_bytes},
                             {"flops", &s.flops},
                             {"bytes", &s.bytes},
                             {"held_before", &s.held_before},
                             {"held_after", &s.held_after},
                             {"unit_before", &s.unit_before},
                             {"unit_after", &s.unit_after}})
    json.at(name).get_to(*value);
  for (const Json& t : json.at("tensors"))
    s.tensors.push_back({t.at("role"), t.at("name"), t.at("dtype"), t.at("shape")});
}

namespace {

// Appends events of one rank.
class ChromeWriter {
 public:
  ChromeWriter(int rank, int64_t origin_ns) : rank_(rank), origin_ns_(origin_ns) {}

  void name_process(const std::string& host) {
    add({{"ph", "M"},
         {"name", "process_name"},
         {"pid", rank_},
         {"args", {{"name", fmt::format("rank {} on {}", rank_, host)}}}});
    for (Lane lane : {Lane::compute, Lane::gather, Lane::reduce, Lane::io})
      add({{"ph", "M"},
           {"name", "thread_name"},
           {"pid", rank_},
           {"tid", static_cast<int>(lane)},
           {"args", {{"name", lane_name(lane)}}}});
  }

  void span(const Span& s) {
    Json args = {
        {"unit", s.unit}, {"phase", s.phase}, {"step", s.step}, {"micro_batch", s.micro_batch}};
    if (s.flops) args["flops"] = s.flops;
    if (s.lane == Lane::gather || s.lane == Lane::reduce) {
      args["logical_bytes"] = s.logical_bytes;
      args["copied_bytes"] = s.copied_bytes;
    }
    args["held_bytes"] = {s.held_before, s.held_after};
    for (const TraceTensor& t : s.tensors)
      args[t.role].push_back(fmt::format("{} [{}] {}", t.name, fmt::join(t.shape, ", "), t.dtype));
    const bool moves = s.lane == Lane::gather || s.lane == Lane::reduce;
    add({{"ph", "X"},
         {"name", moves ? s.name + " " + s.unit : s.name},
         {"cat", lane_name(s.lane)},
         {"pid", rank_},
         {"tid", static_cast<int>(s.lane)},
         {"ts", us(s.begin_ns)},
         {"dur", static_cast<double>(s.end_ns - s.begin_ns) / 1e3},
         {"args", args}});
    if (moves) in_flight(s);
    counter(s.begin_ns, s.held_before);
    counter(s.end_ns, s.held_after);
  }

  std::string text() const { return text_; }

 private:
  // From the start to the end of the wait, as an asynchronous event: they may overlap.
  void in_flight(const Span& s) {
    const bool starts = s.name.ends_with(" start"), waits = s.name.ends_with(" wait");
    if (!starts && !waits) return;
    const std::string what = s.name.substr(0, s.name.rfind(' ')) + " " + s.unit;
    if (starts) started_[what] = s.begin_ns;
    if (waits && started_.count(what)) {
      const std::string id = fmt::format("{}.{}", rank_, next_id_++);
      asynchronous("b", what, id, started_[what]);
      asynchronous("e", what, id, s.end_ns);
      started_.erase(what);
    }
  }
  void asynchronous(const char* kind, const std::string& what, const std::string& id, int64_t ns) {
    add({{"ph", kind},
         {"cat", "in flight"},
         {"name", what},
         {"id2", {{"local", id}}},
         {"pid", rank_},
         {"tid", 0},
         {"ts", us(ns)}});
  }
  void counter(int64_t ns, int64_t bytes) {
    if (bytes == last_held_) return;
    last_held_ = bytes;
    add({{"ph", "C"},
         {"name", "parameters and full gradients held"},
         {"pid", rank_},
         {"ts", us(ns)},
         {"args", {{"bytes", bytes}}}});
  }
  double us(int64_t ns) const { return static_cast<double>(ns - origin_ns_) / 1e3; }
  void add(const Json& event) {
    if (!text_.empty()) text_ += ",\n";
    text_ += event.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

  int rank_, next_id_ = 0;
  int64_t origin_ns_, last_held_ = -1;
  std::map<std::string, int64_t> started_;
  std::string text_;
};

}  // namespace

std::string chrome_events(const std::vector<Span>& spans, int rank, const std::string& host,
                          int64_t origin_ns) {
  ChromeWriter writer(rank, origin_ns);
  writer.name_process(host);
  for (const Span& span : spans) writer.span(span);
  return writer.text();
}

}  // namespace qshard
