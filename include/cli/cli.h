// One function a subcommand. Each adds its options to `app` and sets `run`, called after parsing.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace qshard {

class World;

// Returns the exit code. Runs on every rank; only rank 0 may print.
using Command = std::function<int(World&)>;

void add_train(CLI::App& app, Command& run);
void add_verify(CLI::App& app, Command& run);
void add_walkthrough(CLI::App& app, Command& run);
void add_plan(CLI::App& app, Command& run);
void add_data(CLI::App& app, Command& run);
void add_ckpt(CLI::App& app, Command& run);
void add_sample(CLI::App& app, Command& run);
void add_bench(CLI::App& app, Command& run);

}  // namespace qshard
