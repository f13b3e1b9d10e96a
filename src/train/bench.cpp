#include "train/bench.h"

#include <ctime>

#include "base/build_info.h"
#include "base/config.h"
#include "io/hdf5_file.h"
#include "train/stopwatch.h"

namespace qshard {

Document provenance(const BenchOptions& o, const World& world, const Backend& backend) {
  char now[32];
  const std::time_t seconds = std::time(nullptr);
  std::strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&seconds));
  return {{"time", now},
          {"commit", build_commit()},
          {"compiler", build_compiler()},
          {"host", world.host()},
          {"cpu", cpu_model()},
          {"device", backend.device->name()},
          {"libraries", {world.mpi_version(), hdf5_version()}},
          {"ranks", world.size()},
          {"nodes", world.nodes()},
          {"threads_per_rank", world.threads_per_rank()},
          {"model", o.model},
          {"batch_per_rank", o.batch},
          {"seq", o.seq},
          {"param_dtype", o.param_dtype},
          {"reduce_dtype", o.reduce_dtype},
          {"backend", o.backend},
          {"warm_up", o.warm_up},
          {"repeats", o.repeats}};
}

Qwen3Config bench_model(const BenchOptions& o) {
  return Qwen3Config::from_json(parse_json(read_file(o.model), o.model), o.model);
}

Ceilings measure_ceilings(const BenchOptions& o, const World& world, Backend& backend) {
  constexpr int64_t kElements = int64_t{16} << 20;  // 64 MiB each way: no cache holds it
  Ceilings found;
  world.barrier();
  found.flops_per_s = backend.ops->measure_peak(parse_dtype(o.param_dtype), 0.2);
  Device& device = *backend.device;
  const Buffer from(device, DType::f32, {kElements}, Segment::workspace, "copied");
  const Buffer to(device, DType::f32, {kElements}, Segment::workspace, "copy");
  Stopwatch watch(world, device, o.warm_up, o.repeats);
  const Times times = watch.time_short([&] { backend.ops->cast(from, to); });
  found.bytes_per_s = static_cast<double>(from->bytes() + to->bytes()) / times.lowest;
  double lowest = -found.flops_per_s;  // the slowest rank's, on all ranks
  world.all_reduce_max(&lowest, 1);
  found.flops_per_s = -lowest;
  return found;
}

}  // namespace qshard
