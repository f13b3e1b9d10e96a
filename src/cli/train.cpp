#include <optional>

#include "backends.h"
#include "cli/cli.h"
#include "train/stop_signals.h"
#include "train/trainer.h"

namespace qshard {
namespace {

constexpr const char* kFooter =
    R"(Values come from, in this order: the defaults above, the --config file, the command line.
Paths are relative to the working folder.

Examples:
  mpirun -n 4 qshard train --config data/configs/demo.json
  mpirun -n 2 qshard train --config data/configs/demo.json --train.steps 100 --optim.lr 1e-3
  mpirun -n 4 qshard train --config run.json --train.out runs/a --checkpoint.every 500 --resume auto
  mpirun -n 4 qshard train --config run.json --init hf:Qwen3-0.6B
  mpirun -n 8 qshard train --config run.json --fsdp.mesh 2x4
  mpirun -n 8 qshard train --model.config qwen3-0.6b/config.json --data.train tokens.h5 \
      --train.seq 2048 --train.global_batch 32 --train.micro_batch 1)";

struct TrainCommand {
  std::string config_path;
  bool print_config = false;
  std::string trace;
  int64_t trace_steps = 10;
  TrainConfig config;
  OptionTable table;
};

int run_train(TrainCommand& command, World& world) {
  watch_stop_signals();
  if (!command.config_path.empty()) {
    // Rank 0 reads the file, so that all ranks run with the same settings.
    std::string text;
    collectively(world, [&] {
      if (world.rank() == 0) text = read_file(command.config_path);
    });
    text = world.broadcast(text, 0);
    collectively(world, [&] {
      command.table.load_json(parse_json(text, command.config_path), command.config_path);
    });
  }
  if (command.print_config) {
    if (world.rank() == 0) fmt::print("{}\n", command.table.to_json().dump(2));
    return kExitDone;
  }
  Backend backend = make_backend(command.config.backend, world);
  std::optional<TracedRun> traced;
  if (!command.trace.empty()) traced.emplace(backend, command.trace, command.trace_steps);
  Trainer trainer(command.config, command.table.to_json(), command.table.to_table(), world, backend,
                  traced ? &*traced : nullptr);
  return trainer.run();
}

}  // namespace

void add_train(CLI::App& app, Command& run) {
  auto command = std::make_shared<TrainCommand>();
  CLI::App* sub = app.add_subcommand("train", "train a Qwen3 decoder on token files");
  sub->footer(kFooter);
  sub->add_option("--config", command->config_path,
                  "JSON file with any of the options below, nested by section");
  sub->add_flag("--print-config", command->print_config, "print all settings as JSON and stop");
  sub->add_option("--resume", command->config.resume,
                  "none; auto: the newest complete checkpoint of train.out, if there is one; or a "
                  "checkpoint file or folder")
      ->capture_default_str();
  sub->add_option(
      "--init", command->config.init,
      "hf:DIR: weights and, without model.config, config.json of a Hugging Face folder; "
      "weights-only: take only the weights from --resume and begin at step 1");
  sub->add_flag("--allow-changes", command->config.allow_changes,
                "resume although options that change the mathematics differ from the saved run's");
  sub->add_option(
      "--trace", command->trace,
      "file for a Chrome trace (ui.perfetto.dev): what every rank computed, moved and held, when");
  sub->add_option("--trace-steps", command->trace_steps,
                  "steps of this launch that --trace records")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->config.describe(command->table);
  command->table.add_to(*sub);
  sub->callback(
      [command, &run] { run = [command](World& world) { return run_train(*command, world); }; });
}

}  // namespace qshard
