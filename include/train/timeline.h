// How long a planned step takes on some hardware: its spans in order, on a compute stream and two
// lanes of communication that run beside it.
//
// [Note: Timeline] A product or attention takes FLOPs / rate, every other operator bytes / memory
// rate, where bytes are those of its tensors, each once. An all-gather starts when it is called and
// its lane is free; the wait for it holds the compute stream until it has ended; a reduction
// likewise. Where a transport sums with the rank's own core (shm), its time is the rank's. A ring
// moves (N-1)/N of a unit through every rank; over several nodes the nodes' share of it goes
// through their network links together, and the slower of both is the time. Offloaded states come
// from the host and go back at the same time, beside the update's operators: what that takes longer
// than these holds the compute stream at the end of the step.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/trace.h"
#include "train/plan.h"

namespace qshard {

struct Link {
  double bytes_per_s = 0, latency_s = 0;  // of one rank, one direction; of a collective's start
};

// data/hardware/*.json; fields there have their units in their names.
struct Hardware {
  std::string name, source;
  int ranks_per_node = 1;
  int64_t memory_bytes = 0;                  // of a rank; 0: not known
  std::map<std::string, double> peak_flops;  // by dtype of the operands, dense
  double product_share = 1, attention_share = 1, memory_share = 1;  // reached of peak and bandwidth
  double memory_bytes_per_s = 0;
  Link in_node, between_nodes;
  double host_bytes_per_s = 0;  // between a GPU and the host, one direction; 0: not known
  bool overlaps = true;         // communication beside compute
  double other_s = 0;           // of a step, whatever it is
  // Measured rates, before all shares: "bf16/linear" → FLOP/s, "rms_norm" → bytes/s,
  // "all-gather" and "reduce-scatter" → logical bytes/s.
  std::map<std::string, double> measured;

  static Hardware from_json(const nlohmann::json& json, const std::string& where);
};

struct StepTime {
  double step = 0, compute = 0;             // s; compute: of all operators
  double gather_wait = 0, reduce_wait = 0;  // s that compute waited: exposed communication
  double gathers = 0, reductions = 0;       // s that the lanes were busy
  double offload_wait = 0;                  // s that the update waited for offloaded states
  double other = 0;
  std::map<std::string, double> by_operator;  // s
};

double operator_seconds(const Span& span, const Hardware& hardware);
StepTime simulate(const Plan& plan, const Hardware& hardware);

// The rate that a span's work is measured in: its key in Hardware::measured, and the amount.
std::string rate_key(const Span& span);
double rate_work(const Span& span);

}  // namespace qshard
