// The place of a call in the source: barriers and warp collectives are identified by it.
#pragma once

// Default arguments `file` and `line` of a function: the place of its caller.
#define CUDASIM_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace cudasim {
struct Site {
  const char* file = "";
  int line = 0;
};
}  // namespace cudasim
