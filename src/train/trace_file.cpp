#include "train/trace_file.h"

#include <fstream>

namespace qshard {
namespace {

// One rank's clock is as good as another's on the same node.
int64_t common_origin(const World& world) {
  world.barrier();
  const int64_t now = trace_clock_ns();
  if (world.nodes() > 1) return now;
  return std::stoll(world.broadcast(fmt::format("{}", now), 0));
}

}  // namespace

void create_trace(const World& world, const std::string& path) {
  collectively(world, [&] {
    if (world.rank() == 0 && !std::ofstream(path)) fail("cannot write {}", path);
  });
}

void write_trace(const World& world, const Trace& trace, const std::string& path) {
  const int64_t now = common_origin(world);
  // The origin is the first span of any rank, counted back from the common moment.
  double longest = 0;
  for (const Span& span : trace.spans())
    longest = std::max(longest, static_cast<double>(now - span.begin_ns));
  world.all_reduce_max(&longest, 1);
  const std::vector<std::string> events = world.gather(chrome_events(
      trace.spans(), world.rank(), world.host(), now - static_cast<int64_t>(longest)));
  collectively(world, [&] {
    if (world.rank() != 0) return;
    std::ofstream file(path);
    file << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
    for (size_t r = 0; r < events.size(); ++r) file << (r ? ",\n" : "") << events[r];
    file << "\n]}\n";
    if (!file.flush()) fail("cannot write {}", path);
  });
}

}  // namespace qshard
