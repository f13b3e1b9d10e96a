// What the machine, or the control group that Slurm or a container put this process into, has left.
#pragma once

#include <cstdint>
#include <string>

namespace qshard {

// Bytes; cached files count as free. 0: not known. `root`: "" or, for tests, what stands before
// /proc and /sys.
int64_t host_bytes_available(const std::string& root = "");

}  // namespace qshard
