// Benchmarks of the parts of a step, at the shapes of a model. `qshard bench` prints what they
// return: fields of the whole measurement, and `rows`, an object a line of the table. The unit of a
// number is in its name; times are medians of the repeats with the lowest and the highest, each of
// the slowest rank. All are collective; every rank gets the document.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "comm/transport_options.h"
#include "comm/world.h"
#include "device/ops.h"
#include "model/qwen3_config.h"

namespace qshard {

using Document = nlohmann::ordered_json;

struct BenchOptions {
  std::string model;  // path of a config.json
  int64_t batch = 1, seq = 256;
  std::string param_dtype = "bf16", reduce_dtype = "f32", backend = "cpu";
  TransportOptions transport;
  int64_t warm_up = 3, repeats = 10;
};

// Commit, host, CPU, libraries and settings of a measurement.
Document provenance(const BenchOptions& options, const World& world, const Backend& backend);
Qwen3Config bench_model(const BenchOptions& options);  // reads options.model

// Highest rates measured now, of one rank while all ranks measure.
struct Ceilings {
  double flops_per_s = 0;  // of matrix products
  double bytes_per_s = 0;  // of a copy, a read and a write counted each
};
Ceilings measure_ceilings(const BenchOptions& options, const World& world, Backend& backend);

// The matrix products of a layer and of the head, forward and backward.
Document bench_gemm(const BenchOptions& options, World& world, Backend& backend);
// Every operator of device/ops.h. Bytes are the least traffic: each operand read or written once.
Document bench_ops(const BenchOptions& options, World& world, Backend& backend);

struct SweepOptions {
  int64_t from_bytes = 1 << 10, to_bytes = 16 << 20, factor = 4;
  bool spoil = false;  // change one value after each transfer: it has to be counted as wrong
};
// All-gather and reduce-scatter of the model's units and of a sweep of sizes, by each transport of
// the backend or by options.transport. Columns as in nccl-tests: bytes are those of all ranks'
// parts, algbw = bytes / time, busbw = algbw · (ranks − 1) / ranks. Data are whole numbers whose
// sums are exact; `wrong` counts elements of all ranks that differ.
Document bench_collectives(const BenchOptions& options, const SweepOptions& sweep, World& world,
                           Backend& backend);

// Training steps on tokens made up; with_breakdown: also traced ones, by phase and operator, of
// rank 0; graphs: the others as in [Note: Graphs of a step]. Ceiling of an operator: what it would
// take at the measured rates of products and copies. Memory: what rank 0's device held at most, as
// `qshard plan` counts it.
Document bench_step(const BenchOptions& options, bool with_breakdown, bool graphs, World& world,
                    Backend& backend);

// Saves and loads of the model with its moments in a folder made in `parent` and removed at the
// end.
Document bench_checkpoint(const BenchOptions& options, const std::string& parent, World& world,
                          Backend& backend);

}  // namespace qshard
