#include <algorithm>

#include "comm/traced_collectives.h"
#include "device/traced_ops.h"
#include "train/engine.h"
#include "train/plan_report.h"

namespace qshard {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSteps = 4;  // measured, after one that is not

struct Work {
  double amount = 0, seconds = 0;
};

// Work and time by rate_key() of some real steps, and the time that is in no span. Times are this
// rank's means, made those of all ranks.
class Calibration {
 public:
  Calibration(World& world, Backend& backend) : world_(world), backend_(backend) {}

  void run(PlanRequest r) {
    Trace trace;
    trace.record(false);
    const TracedBackend traced(backend_, trace);
    const WrapTransport wrap = [&](std::unique_ptr<Collectives> transport, const World& ranks) {
      return make_traced_collectives(std::move(transport), ranks, trace);
    };
    Engine engine(r.config, r.fsdp, {},
                  make_sharding({r.transport}, r.fsdp, world_, backend_, wrap), r.B, r.T, backend_);
    engine.model().init_parameters(1);
    std::vector<int32_t> ids(r.B * r.T, 1);
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<int32_t>(i * 7919 % static_cast<size_t>(r.config.vocab_size));
    const std::vector<TokenBatch> batches(r.accumulation, {ids.data(), ids.data()});
    engine.step(batches, 1e-4);
    trace.record(true);
    world_.barrier();
    const int64_t begin = trace_clock_ns();
    for (int i = 0; i < kSteps; ++i) engine.step(batches, 1e-4);
    double rest = static_cast<double>(trace_clock_ns() - begin);
    for (const Span& span : trace.spans()) {
      const double nanoseconds = static_cast<double>(span.end_ns - span.begin_ns);
      rest -= nanoseconds;
      Work& work = works_[rate_key(span)];
      work.amount += rate_work(span);
      work.seconds += nanoseconds * 1e-9;
    }
    rests_.push_back(rest * 1e-9 / kSteps);
  }

  Json rates() {
    Json rates = Json::object();
    for (auto& [key, work] : works_) {
      double sums[2] = {work.amount, work.seconds};
      world_.all_reduce_sum(sums, 2);
      if (sums[0] > 0 && sums[1] > 0) rates[key] = sums[0] / sums[1];
    }
    return rates;
  }
  double rest() {
    double rest = *std::min_element(rests_.begin(), rests_.end());
    world_.all_reduce_sum(&rest, 1);
    return rest / world_.size();
  }

 private:
  World& world_;
  Backend& backend_;
  std::map<std::string, Work> works_;
  std::vector<double> rests_;
};

}  // namespace

Json calibrate(const PlanRequest& request, World& world, Backend& backend) {
  Calibration calibration(world, backend);
  Json peaks = Json::object();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    PlanRequest r = request;
    r.fsdp.param_dtype = dtype;
    calibration.run(r);
    double peak = backend.ops->measure_peak(dtype, 0.5);
    world.all_reduce_sum(&peak, 1);
    peaks[dtype_name(dtype)] = peak / world.size() / 1e12;
  }
  const Json rates = calibration.rates();
  return {
      {"name", fmt::format("{} ranks on {}", world.size(), world.host())},
      {"source", fmt::format("measured with {}, {}", backend.device->name(), world.mpi_version())},
      {"ranks_per_node", world.node_size()},
      {"peak_tflops", peaks},
      {"product_share", 1},
      {"attention_share", 1},
      {"memory_share", 1},
      {"memory_gb_per_s", rates.at("rms_norm").get<double>() / 1e9},
      {"in_node", {{"gb_per_s", rates.at("rms_norm").get<double>() / 1e9}}},
      {"between_nodes", {{"gb_per_s", rates.at("rms_norm").get<double>() / 1e9}}},
      {"overlaps", request.transport != "shm"},
      {"other_ms", calibration.rest() * 1e3},
      {"measured", rates}};
}

}  // namespace qshard
