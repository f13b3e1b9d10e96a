// What is measured where: for the record of a benchmark.
#pragma once

#include <string>

namespace qshard {

std::string build_commit();  // "0a1b2c3d4e5f", "…-dirty" with changes, "unknown" outside of git
std::string build_compiler();
std::string cpu_model();  // as /proc/cpuinfo names it; "unknown" elsewhere

}  // namespace qshard
