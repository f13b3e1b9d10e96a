// `--trace FILE`: what all ranks did, as a Chrome trace for ui.perfetto.dev or chrome://tracing.
#pragma once

#include <memory>
#include <string>

#include "comm/world.h"
#include "device/traced_ops.h"

namespace qshard {

// Makes the file, so that a path that cannot be written is known before the run. Collective.
void create_trace(const World& world, const std::string& path);

// Rank 0 writes the spans of all ranks. Times of ranks on one node share a clock; between nodes
// they are aligned at a barrier, to the microseconds that it takes. Collective.
void write_trace(const World& world, const Trace& trace, const std::string& path);

// The trace of a run, with the backend traced from construction to destruction.
struct TracedRun {
  TracedRun(Backend& backend, std::string file, int64_t limit)
      : path(std::move(file)), steps(limit), traced_backend(backend, trace) {}
  std::string path;
  int64_t steps;  // the first of the launch are recorded
  Trace trace;
  TracedBackend traced_backend;
};

}  // namespace qshard
