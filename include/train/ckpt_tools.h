// Looking at checkpoints: what `qshard ckpt ls|show|verify|diff` report.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/world.h"
#include "io/checkpoint.h"

namespace qshard {

using Document = nlohmann::ordered_json;

// The checkpoints of a folder by their headers, newest first, then the files that are none:
// [{file, complete, step, bytes, written_at, ranks} or {file, complete: false, bytes, problem}].
Document list_folder(const std::string& folder);

// Attributes and datasets of one checkpoint.
Document describe_checkpoint(const std::string& path);

struct CheckResult {
  int64_t datasets = 0, bytes = 0;
  std::vector<std::string> damaged;  // datasets whose checksum is wrong
};

// Collective; the rows are dealt out over the ranks. A file that lacks a dataset of its own model
// config, or has another one, or whose data lie outside of the file, is an AgreedError.
CheckResult check_checkpoint(const World& world, const std::string& path);

struct TensorDifference {
  std::string dataset;
  int64_t elements = 0;  // that differ in a bit
  double max_abs = 0;    // infinite when one of both is not finite
  double rel_l2 = 0;     // ‖a − b‖₂ / ‖a‖₂; infinite when a is 0 and b is not
};

struct CheckpointDifferences {
  std::vector<std::string> attributes;    // "step: 10 → 20"
  std::vector<std::string> structure;     // datasets that only one has, or of another shape
  std::vector<TensorDifference> tensors;  // those that differ, by rel_l2, largest first
  int64_t compared = 0;                   // datasets
  bool same() const { return attributes.empty() && structure.empty() && tensors.empty(); }
};

// Collective; the rows are dealt out over the ranks, which all get the result. Attributes that say
// who wrote the file, when and with which settings are not compared.
CheckpointDifferences diff_checkpoints(const World& world, const std::string& a,
                                       const std::string& b);

}  // namespace qshard
