// The options of `qshard walkthrough` and what follows from them.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "train/walkthrough.h"

namespace qshard {

struct WalkthroughCommand {
  WalkthroughOptions options;
  std::string param_dtype = "fp16", reduce_dtype = "auto", transport = "auto", format = "text";
  std::string html, topic;
  bool values = false;
};

void add_options(CLI::App& sub, WalkthroughCommand& command);

// Reads the model or the reference case, chooses what is "auto", and refuses what cannot work.
// Collective.
void settle(WalkthroughCommand& command, const World& world);

}  // namespace qshard
