// `qshard walkthrough --topic NAME`: one idea at a time, computed while you read.
#pragma once

#include <string>
#include <vector>

#include "cli/page.h"
#include "train/walkthrough.h"

namespace qshard {

const std::vector<std::string>& topic_names();  // ring, rope, mesh, two-by-two

struct TopicText {
  std::string text;  // on rank 0
  bool ok = false;   // what the topic says was found true, on every rank
};

// Collective.
TopicText tell_topic(const std::string& name, const WalkthroughOptions& options,
                     const PrintStyle& style, World& world, Backend& backend);

}  // namespace qshard
