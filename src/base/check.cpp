#include "base/check.h"

#include <cstring>

namespace qshard {

void fail_check(const char* expression, const char* file, int line, const std::string& message) {
  const char* slash = std::strrchr(file, '/');
  throw Error(fmt::format("{} [{}:{}: {} does not hold]", message, slash ? slash + 1 : file, line,
                          expression));
}

}  // namespace qshard
