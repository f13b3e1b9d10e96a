// Plans a step: memory, traffic, arithmetic and time for any number of ranks, without making it.

#include "base/config.h"
#include "cli/cli.h"
#include "io/file.h"
#include "train/plan_report.h"

namespace qshard {
namespace {

constexpr const char* kFooter =
    R"(The step's own code runs on a backend that only counts, so memory and traffic are those of the
run, whatever the number of ranks. Times need a hardware profile: data/hardware/*.json are made from
public data sheets and assumed shares of them; --calibrate measures this machine under the ranks it
runs on.

Examples:
  qshard plan --model data/configs/qwen3-32b.json --ranks 64 --seq 4096 \
      --activation-checkpoint full --hardware data/hardware/h100.json --tokens 1e12
  qshard plan --model data/configs/qwen3-8b.json --ranks 16 --batch 4 --seq 4096 --search \
      --hardware data/hardware/h200.json
  mpirun -n 2 qshard plan --model data/configs/small30m.json --seq 256 --calibrate here.json
  qshard plan --model data/configs/small30m.json --ranks 2 --seq 512 --hardware here.json)";

struct Options {
  std::string model, hardware, calibrate, format = "text";
  std::string param_dtype = "bf16", reduce_dtype = "f32", checkpoint = "none", transport = "auto";
  std::string mesh = "full", offload = "none";
  int ranks = 0, ranks_per_node = 0;
  int64_t batch = 1, seq = 1024, accumulation = 1;
  bool reshard_after_forward = true, search = false;
  int layers_per_unit = 1, prefetch = 1;
  double memory_gb = 0, tokens = 0;
};

PlanRequest request_of(const Options& o, const Hardware* hardware, const World& world) {
  PlanRequest r;
  r.config = Qwen3Config::from_json(parse_json(read_file(o.model), o.model), o.model);
  r.fsdp.param_dtype = parse_dtype(o.param_dtype);
  r.fsdp.reduce_dtype = parse_dtype(o.reduce_dtype);
  r.fsdp.reshard_after_forward = o.reshard_after_forward;
  r.fsdp.layers_per_unit = o.layers_per_unit;
  r.fsdp.prefetch = o.prefetch;
  r.fsdp.mesh = o.mesh;
  r.fsdp.offload_optimizer = o.offload == "optimizer";
  r.fsdp.activation_checkpoint = parse_activation_checkpoint(o.checkpoint);
  r.ranks = o.ranks ? o.ranks : world.size();
  r.ranks_per_node = o.ranks_per_node ? o.ranks_per_node
                     : hardware       ? hardware->ranks_per_node
                                      : r.ranks;
  r.ranks_per_node = std::min(r.ranks, r.ranks_per_node);
  r.transport = o.transport;
  if (r.transport == "auto") r.transport = hardware && hardware->overlaps ? "nccl" : "shm";
  r.B = o.batch;
  r.T = o.seq;
  r.set_accumulation(o.accumulation);
  return r;
}

int run_calibration(const Options& o, World& world) {
  PlanRequest request;
  collectively(world, [&] { request = request_of(o, nullptr, world); });
  Backend backend = make_backend("cpu", world);
  const nlohmann::ordered_json profile = calibrate(request, world, backend);
  collectively(world, [&] {
    if (world.rank() != 0) return;
    const std::string text = profile.dump(2) + "\n";
    AtomicFile file(o.calibrate);
    file.write(text.data(), text.size());
    file.commit();
  });
  if (world.rank() == 0) fmt::print("{}: {}\n", o.calibrate, profile["name"].get<std::string>());
  return kExitDone;
}

int run_plan(const Options& o, World& world) {
  if (!o.calibrate.empty()) return run_calibration(o, world);
  std::string text;
  collectively(world, [&] {
    std::optional<Hardware> hardware;
    if (!o.hardware.empty())
      hardware = Hardware::from_json(parse_json(read_file(o.hardware), o.hardware), o.hardware);
    const PlanRequest request = request_of(o, hardware ? &*hardware : nullptr, world);
    const bool json = o.format == "json";
    if (!o.search) {
      const auto report = plan_report(request, hardware, o.tokens);
      text = json ? report.dump(2) + "\n" : plan_text(report);
      return;
    }
    if (!hardware) fail_usage("--search compares times: it needs --hardware FILE");
    const int64_t limit =
        o.memory_gb > 0 ? static_cast<int64_t>(o.memory_gb * 1e9) : hardware->memory_bytes;
    if (limit == 0) fail_usage("{} has no memory_gb: give --memory-gb", o.hardware);
    const auto reports = search_plans(request, *hardware, limit, o.tokens);
    if (reports.empty())
      fail("no setting fits into {:.1f} GB a rank: use more ranks or fewer sequences a step",
           static_cast<double>(limit) / 1e9);
    text = json ? nlohmann::ordered_json(reports).dump(2) + "\n" : search_text(reports);
  });
  if (world.rank() == 0) fmt::print("{}", text);
  return kExitDone;
}

}  // namespace

void add_plan(CLI::App& app, Command& run) {
  auto o = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("plan", "memory, traffic and time of a step on any ranks");
  sub->footer(kFooter);
  auto add = [&](const char* name, auto& value, const char* doc) {
    return sub->add_option(name, value, doc)->capture_default_str();
  };
  const CLI::Range at_least_one(1, 1 << 24);
  const CLI::IsMember dtypes({"f32", "bf16", "fp16"});
  sub->add_option("--model", o->model, "a config.json, see data/configs")->required();
  sub->add_option("--ranks", o->ranks, "data-parallel ranks; default: those it runs on")
      ->check(at_least_one);
  sub->add_option("--ranks-per-node", o->ranks_per_node, "default: the hardware's, or all")
      ->check(at_least_one);
  add("--batch", o->batch, "sequences of a rank's micro-batch")->check(at_least_one);
  add("--seq", o->seq, "tokens of a sequence")->check(at_least_one);
  add("--accumulation", o->accumulation, "micro-batches of a step")->check(at_least_one);
  add("--param-dtype", o->param_dtype, "what is gathered and computed in")->check(dtypes);
  add("--reduce-dtype", o->reduce_dtype, "what gradients travel in")->check(dtypes);
  add("--activation-checkpoint", o->checkpoint, "what backward computes anew")
      ->check(CLI::IsMember({"none", "selective", "full"}));
  add("--mesh", o->mesh, "fsdp.mesh of `qshard train`: full, RxS or auto");
  add("--reshard-after-forward", o->reshard_after_forward, "true or false");
  add("--layers-per-unit", o->layers_per_unit, "fsdp.layers_per_unit of `qshard train`")
      ->check(at_least_one);
  add("--offload", o->offload, "fsdp.offload of `qshard train`; its time is bytes / host_gb_per_s")
      ->check(CLI::IsMember({"none", "optimizer"}));
  add("--prefetch", o->prefetch, "units gathered ahead")->check(CLI::Range(0, 64));
  add("--transport", o->transport, "whose buffers are planned; auto: nccl for GPUs, else shm")
      ->check(CLI::IsMember({"auto", "shm", "mpi", "nccl", "mpi-cuda"}));
  sub->add_option("--hardware", o->hardware, "profile for times, data/hardware/*.json");
  sub->add_flag("--search", o->search, "the fastest settings that fit, with as many tokens a step");
  sub->add_option("--memory-gb", o->memory_gb, "of a rank, for --search; default: the hardware's");
  sub->add_option("--tokens", o->tokens, "of the whole training, for the days it takes");
  sub->add_option("--calibrate", o->calibrate, "measures this machine and writes a profile");
  add("--format", o->format, "text or json")->check(CLI::IsMember({"text", "json"}));
  sub->callback([o, &run] { run = [o](World& world) { return run_plan(*o, world); }; });
}

}  // namespace qshard
