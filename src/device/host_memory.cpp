#include "device/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace qshard {
namespace {

// The number after `key` at the start of a line, or of the whole file for an empty key; -1: none.
int64_t number_in(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    int64_t number = 0;
    if (!key.empty() && (!(words >> word) || word != key)) continue;
    if (words >> number) return number;
  }
  return -1;
}

struct GroupFiles {
  const char *limit, *usage, *cached;
};
constexpr GroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                  "total_inactive_file"};
constexpr GroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file"};

// A group's limit holds for what is inside of it, so that of the groups around it does too.
int64_t left_in_groups(const std::string& top, std::string group, const GroupFiles& files) {
  int64_t left = std::numeric_limits<int64_t>::max();
  for (;;) {
    const std::string folder = top + group + "/";
    const int64_t limit = number_in(folder + files.limit, "");  // "max" is no number
    const int64_t usage = number_in(folder + files.usage, "");
    const int64_t cached = number_in(folder + "memory.stat", files.cached);
    if (limit >= 0 && usage >= 0)
      left = std::min(left, std::max<int64_t>(0, limit - usage + std::max<int64_t>(0, cached)));
    if (group.empty()) return left;
    group.resize(group.find_last_of('/'));
  }
}

}  // namespace

int64_t host_bytes_available(const std::string& root) {
  const int64_t kilobytes = number_in(root + "/proc/meminfo", "MemAvailable:");
  int64_t left = kilobytes < 0 ? std::numeric_limits<int64_t>::max() : kilobytes * int64_t{1024};
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:memory:/path" or "0::/path"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (!group.empty() && group[0] != '/') continue;
    if (controllers == "memory")
      left = std::min(left, left_in_groups(root + "/sys/fs/cgroup/memory", group, kVersion1));
    if (controllers.empty())
      left = std::min(left, left_in_groups(root + "/sys/fs/cgroup", group, kVersion2));
  }
  return left == std::numeric_limits<int64_t>::max() ? 0 : left;
}

}  // namespace qshard
