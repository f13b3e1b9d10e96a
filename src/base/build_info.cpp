#include "base/build_info.h"

#include <fstream>

namespace qshard {

std::string build_commit() {
#ifdef QSHARD_COMMIT
  const std::string commit = QSHARD_COMMIT;
  if (!commit.empty()) return commit;
#endif
  return "unknown";
}

std::string build_compiler() {
#ifdef __clang__
  return __VERSION__;
#else
  return std::string("gcc ") + __VERSION__;
#endif
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

}  // namespace qshard
