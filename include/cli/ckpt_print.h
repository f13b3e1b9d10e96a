// What `qshard ckpt` prints: a table, or with `json` one JSON document. On rank 0.
#pragma once

#include <string>

#include "train/ckpt_tools.h"

namespace qshard {

void print_folder(const std::string& folder, bool json);
void print_checkpoint(const std::string& path, bool json);
// `problem`: why the check could not be made, or empty.
void print_check(const std::string& path, const CheckResult& result, const std::string& problem,
                 bool json);
// The `top` largest differences; 0: all.
void print_differences(const std::string& a, const std::string& b,
                       const CheckpointDifferences& found, int64_t top, bool json);

}  // namespace qshard
