// qshard: Qwen3 training with fully sharded data parallelism on MPI ranks.

#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/cli.h"
#include "comm/world.h"

namespace qshard {
namespace {

constexpr const char* kFooter = R"(Examples:
  qshard data tokenize --tokenizer bytes --out train.h5 /usr/include
  mpirun -n 4 qshard train --config data/configs/demo.json --train.steps 200
  mpirun -n 4 qshard verify --reference test/reference/tiny-tied --param-dtype bf16

Exit codes: 0 done · 1 failed · 2 wrong usage)";

void print_error(const World& world, const Error& error, bool agreed) {
  const std::string where = agreed ? "" : fmt::format(" (rank {} on {})", world.rank(), world.host());
  std::fprintf(stderr, "qshard: error%s: %s\n", where.c_str(), error.what());
}

// Every rank parses the same command line, so that help and usage errors need no communication
// beyond the agreement on the outcome.
int run(int argc, char** argv, World& world) {
  CLI::App app("Trains Qwen3 decoders with fully sharded data parallelism (FSDP2's scheme) on MPI ranks.", "qshard");
  app.footer(kFooter);
  app.require_subcommand(1);
  Command command;
  add_train(app, command);
  add_verify(app, command);
  add_data(app, command);

  int code = kExitDone;
  bool finished = false;  // help or a usage error
  collectively(world, [&] {
    try {
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
  world->finalize();
  return code;
}
