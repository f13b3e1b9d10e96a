// Benchmarks of the parts of a step.
#include <memory>

#include "backends.h"
#include "cli/bench_print.h"
#include "cli/cli.h"

namespace qshard {
namespace {

constexpr const char* kFooter =
    R"(Times are medians of --repeats after --warm-up, of the slowest rank, with the lowest and the highest.
GB are 10^9 bytes. With --format json stdout is one document with commit, host, libraries and settings.

Examples:
  qshard bench gemm --model data/configs/qwen3-0.6b.json --seq 1024
  mpirun -n 4 qshard bench ops --model data/configs/small30m.json --format json > ops.json
  mpirun -n 4 qshard bench collectives --from 1024 --to 67108864
  mpirun -n 4 qshard bench step --breakdown --batch 2 --seq 512
  mpirun -n 4 qshard bench checkpoint --dir /scratch/me      # scripts/bench_checkpoint.py adds PyTorch

Exit codes: 0 done · 1 failed, or a transport moved wrong values (collectives))";

struct BenchCommand {
  BenchOptions options;
  SweepOptions sweep;
  bool breakdown = false, graph = false;
  std::string folder = ".";
  std::string format = "text";
};

using Bench = Document (*)(const BenchCommand&, World&, Backend&);

int run_bench(BenchCommand& c, const char* name, Bench bench, World& world) {
  collectively(world, [&] {
    choose_transport(c.options.transport, c.options.backend);  // or a message; auto stays
    if (c.options.param_dtype == "fp16" && c.options.backend == "cpu")
      fail_usage("--param-dtype fp16 needs --backend cuda: the CPU backend takes f32 and bf16");
    bench_model(c.options);  // or a message at once
  });
  Backend backend = make_backend(c.options.backend, world);
  Document document = {{"bench", name}, {"provenance", provenance(c.options, world, backend)}};
  document.update(bench(c, world, backend));
  const int code = document.value("wrong", 0) > 0 ? kExitFailed : kExitDone;
  if (world.rank() != 0) return code;
  if (c.format == "json")
    fmt::print("{}\n", document.dump(1, ' ', false, Document::error_handler_t::replace));
  else
    fmt::print("{}", bench_table(document));
  return code;
}

// The subcommands with the options that they share.
class Subcommands {
 public:
  Subcommands(CLI::App& bench, Command& run) : bench_(bench), run_(run) {}
  BenchCommand& values() { return *c_; }
  CLI::App& add(const char* name, const char* doc, Bench action);

 private:
  void one_of(CLI::App& sub, const char* name, std::string& value, const char* doc,
              std::vector<std::string> values) {
    sub.add_option(name, value, doc)->check(CLI::IsMember(values))->capture_default_str();
  }
  CLI::App& bench_;
  Command& run_;
  std::shared_ptr<BenchCommand> c_ = std::make_shared<BenchCommand>();
};

CLI::App& Subcommands::add(const char* name, const char* doc, Bench action) {
  CLI::App& sub = *bench_.add_subcommand(name, doc);
  BenchOptions& o = c_->options;
  auto count = [&](const char* option, int64_t& value, int64_t least, const char* text) {
    sub.add_option(option, value, text)
        ->check(CLI::Range(least, int64_t{1} << 30))
        ->capture_default_str();
  };
  sub.add_option("--model", o.model, "config.json of the model")->capture_default_str();
  count("--batch", o.batch, 1, "sequences a rank");
  count("--seq", o.seq, 1, "tokens of a sequence");
  count("--warm-up", o.warm_up, 0, "repeats that are not counted");
  count("--repeats", o.repeats, 1, "measured repeats");
  one_of(sub, "--param-dtype", o.param_dtype, "what is gathered and computed in",
         {"f32", "bf16", "fp16"});
  one_of(sub, "--reduce-dtype", o.reduce_dtype, "what gradients travel in", {"f32", "bf16"});
  one_of(sub, "--backend", o.backend, "cpu, or cuda in a build by `make CUDA=1`", {"cpu", "cuda"});
  one_of(sub, "--transport", o.transport.name, "as comm.transport of `qshard train`",
         {"auto", "shm", "mpi", "nccl", "mpi-cuda"});
  one_of(sub, "--format", c_->format, "text, or one JSON document", {"text", "json"});
  sub.callback([c = c_, name, action, &run = run_] {
    run = [c, name, action](World& world) { return run_bench(*c, name, action, world); };
  });
  return sub;
}

}  // namespace

void add_bench(CLI::App& app, Command& run) {
  CLI::App* bench =
      app.add_subcommand("bench", "measure products, operators, transports and steps");
  bench->require_subcommand(1);
  bench->footer(kFooter);
  Subcommands subs(*bench, run);
  subs.values().options.model = "data/configs/small30m.json";
  subs.add("gemm", "matrix products of a layer and the head, against the best measured rate",
           [](const BenchCommand& c, World& w, Backend& b) { return bench_gemm(c.options, w, b); });
  subs.add("ops", "every operator, against the measured rates of products and of a copy",
           [](const BenchCommand& c, World& w, Backend& b) { return bench_ops(c.options, w, b); });
  BenchCommand& values = subs.values();
  CLI::App& moves =
      subs.add("collectives", "all-gather and reduce-scatter, columns as in nccl-tests",
               [](const BenchCommand& c, World& w, Backend& b) {
                 return bench_collectives(c.options, c.sweep, w, b);
               });
  auto bytes = [&](const char* name, int64_t& value, int64_t least, const char* doc) {
    moves.add_option(name, value, doc)
        ->check(CLI::Range(least, int64_t{1} << 40))
        ->capture_default_str();
  };
  bytes("--from", values.sweep.from_bytes, 1,
        "smallest size of the sweep, bytes of all ranks together");
  bytes("--to", values.sweep.to_bytes, 0, "largest size; 0: no sweep");
  bytes("--factor", values.sweep.factor, 2, "from one size to the next");
  moves.add_flag("--spoil", values.sweep.spoil,
                 "change a value after each transfer: must exit with 1");
  CLI::App& step =
      subs.add("step", "training steps", [](const BenchCommand& c, World& w, Backend& b) {
        return bench_step(c.options, c.breakdown, c.graph, w, b);
      });
  step.add_flag("--breakdown", values.breakdown, "by operator, from traced steps");
  step.add_flag("--graph", values.graph, "as device.graph of `qshard train`; traced steps are not");
  CLI::App& saves =
      subs.add("checkpoint", "saves, in the foreground and behind training, and loads",
               [](const BenchCommand& c, World& w, Backend& b) {
                 return bench_checkpoint(c.options, c.folder, w, b);
               });
  saves.add_option("--dir", values.folder, "a folder on the disk to be measured")
      ->capture_default_str();
}

}  // namespace qshard
