// qshard: Qwen3 training with fully sharded data parallelism on MPI ranks.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>

#include "cli/cli.h"
#include "comm/world.h"

namespace qshard {
namespace {

constexpr const char* kFooter = R"(Examples:
  qshard data tokenize --tokenizer bytes --out train.h5 /usr/include
  mpirun -n 4 qshard train --config data/configs/demo.json --train.steps 200
  qshard sample --from runs/a --prompt "#include <"
  mpirun -n 4 qshard walkthrough
  mpirun -n 4 qshard verify --reference test/reference/tiny-tied --param-dtype bf16

Exit codes: 0 done · 1 failed · 2 wrong usage · 75 stopped by a signal, saved, resume me)";

void print_error(const World& world, const Error& error, bool agreed) {
  const std::string where =
      agreed ? "" : fmt::format(" (rank {} on {})", world.rank(), world.host());
  std::fprintf(stderr, "qshard: error%s: %s\n", where.c_str(), error.what());
}

// Ranks that were started with different options would wait for each other in different places.
void require_same_command(int argc, char** argv, World& world) {
  std::string own;
  for (int i = 1; i < argc; ++i) own += fmt::format("{}{}", i > 1 ? " " : "", argv[i]);
  const std::string first = world.broadcast(own, 0);
  collectively(world, [&] {
    if (own != first)
      fail_usage("this rank was started as `qshard {}`, rank 0 as `qshard {}`", own, first);
  });
}

// CLI11 would say that a command is required and not which word it did not know.
void require_known_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  if (std::find(names.begin(), names.end(), argv[1]) == names.end())
    fail_usage("unknown command '{}': expected {} (see `qshard --help`)", argv[1],
               fmt::join(names, ", "));
}

// Every rank parses the same command line, so that help and usage errors need no communication
// beyond the agreement on the outcome.
int run(int argc, char** argv, World& world) {
  CLI::App app(
      "Trains Qwen3 decoders with fully sharded data parallelism (FSDP2's scheme) on MPI ranks.",
      "qshard");
  app.footer(kFooter);
  app.require_subcommand(1);
  Command command;
  add_train(app, command);
  add_verify(app, command);
  add_walkthrough(app, command);
  add_plan(app, command);
  add_data(app, command);
  add_ckpt(app, command);
  add_sample(app, command);
  add_bench(app, command);

  require_same_command(argc, argv, world);
  int code = kExitDone;
  bool finished = false;  // help or a usage error
  collectively(world, [&] {
    try {
      require_known_command(app, argc, argv);
      app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
      finished = true;
      if (e.get_exit_code() != 0) fail_usage("{} (see `qshard --help`)", e.what());
      if (world.rank() == 0) app.exit(e);
    }
  });
  if (!finished) code = command(world);
  return code;
}

}  // namespace
}  // namespace qshard

int main(int argc, char** argv) {
  using namespace qshard;
  std::unique_ptr<World> world;
  try {
    world = std::make_unique<World>(&argc, &argv);
  } catch (const Error& error) {
    std::fprintf(stderr, "qshard: error: %s\n", error.what());
    return error.code;
  }
  // A file that reaches a size limit is an error with its name, like a full disk, not a signal.
  std::signal(SIGXFSZ, SIG_IGN);
  int code = kExitDone;
  try {
    code = run(argc, argv, *world);
  } catch (const AgreedError& error) {
    if (world->rank() == 0) print_error(*world, error, true);
    code = error.code;
  } catch (const Error& error) {
    print_error(*world, error, false);
    world->abort(error.code);
  } catch (const std::exception& error) {
    print_error(*world, Error(error.what()), false);
    world->abort(kExitFailed);
  }
  // Before any rank can leave with an error: mpirun ends the others at the first that does.
  std::fflush(nullptr);
  world->finalize();
  return code;
}
