// Fatal reports and the seeded random choices of the simulator.
//
// Whatever the simulator refuses or catches ends the process: a report on stderr whose first line
// begins with "cudasim:", then exit status 70. Nothing can be continued safely after a race.
#pragma once

#include <cstdint>
#include <string>

namespace cudasim {

constexpr int FAILURE_STATUS = 70;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// "function at file:line" of an address in this program; the address in hexadecimal when addr2line
// or the debug information is missing.
std::string describe_code(const void* address);

// A number in [0, bound). Every choice of the simulator comes from here, so that CUDASIM_SEED (and
// the rank under MPI) names the whole schedule.
uint32_t random_below(uint32_t bound);
inline bool coin() { return random_below(2) != 0; }
void set_seed(uint64_t seed);

// Integer value of an environment variable.
int64_t environment(const char* name, int64_t fallback);

}  // namespace cudasim
