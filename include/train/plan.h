// A training step as it will be, without making it: the trainer's own code runs on a backend and a
// transport that only count (device/counting_backend.h, comm/counting_collectives.h), for any
// number of ranks. Nothing here is a formula of its own, so plan and run cannot drift apart.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/trace.h"
#include "comm/collectives.h"
#include "fsdp/unit.h"
#include "model/qwen3_config.h"

namespace qshard {

constexpr std::array kSegments = {Segment::shards,       Segment::moments,     Segment::params,
                                  Segment::gradients,    Segment::activations, Segment::workspace,
                                  Segment::communication};

using SegmentBytes = std::array<int64_t, kSegments.size()>;
SegmentBytes bytes_held(const Device& device);

// Of a rank, by segment. host: memory of Device::host() that offloaded states take.
struct MemoryUse {
  SegmentBytes device{}, host{};
};
MemoryUse memory_use(Device& device);

struct PlanRequest {
  Qwen3Config config;
  FsdpOptions fsdp;
  std::string transport = "shm";  // shm, mpi, nccl, mpi-cuda
  int ranks = 1, ranks_per_node = 1;
  int64_t B = 1, T = 1;  // sequences and tokens of a rank's micro-batch
  int64_t accumulation = 1;

  void set_accumulation(int64_t micro_batches) {  // and what depends on it
    accumulation = micro_batches;
    fsdp.gradients_over_activations = fsdp.reduces_once(micro_batches);
  }
};

// Of one rank. All memory of a run is allocated before its first step, except for the operators'
// scratch (a few MB on CPUs).
struct Plan {
  MemoryUse memory;
  Traffic traffic;          // of a step
  std::vector<Span> spans;  // of a step, in order; their times mean nothing

  int64_t total() const;       // on the device
  int64_t host_total() const;  // offloaded; an update reads and writes it once
  int64_t operator[](Segment segment) const { return memory.device[static_cast<size_t>(segment)]; }
};

Plan plan_step(const PlanRequest& request);

// As lines of text: by segment what a rank and a node need, and with `measured`, what the rank that
// held most has held.
std::string memory_table(const Plan& plan, int ranks_per_node, const MemoryUse* measured = nullptr);

}  // namespace qshard
