// A reference case of PyTorch FSDP2 as one rank of a replay needs it; test/reference/README.md
// describes the folder.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/world.h"
#include "model/qwen3_config.h"

namespace qshard {

struct ReferenceCase {
  nlohmann::json train;  // train.json
  Qwen3Config config;
  int64_t ranks, B, T, accum, steps;    // of this replay
  std::vector<int32_t> inputs, labels;  // [steps, accum, B, T] of this rank
};

// Not collective: throws an Error that names file and field. ranks_any: the global batch may be
// dealt out over another number of ranks than the case's.
ReferenceCase load_reference_case(const std::string& folder, const World& world, bool ranks_any);

}  // namespace qshard
