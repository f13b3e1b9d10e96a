#include "report.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "block.h"
#include "scheduler.h"

namespace cudasim {
namespace {

uint64_t initial_state() {
  uint64_t rank = 0;
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (std::getenv(name)) {
      rank = static_cast<uint64_t>(environment(name, 0));
      break;
    }
  return static_cast<uint64_t>(environment("CUDASIM_SEED", 1)) * 1000003 + rank;
}

uint64_t& state() {
  static uint64_t value = initial_state();
  return value;
}

}  // namespace

int64_t environment(const char* name, int64_t fallback) {
  const char* text = std::getenv(name);
  if (!text || !*text) return fallback;
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  if (*end) fail("%s=%s is not an integer", name, text);
  return value;
}

void set_seed(uint64_t seed) { state() = seed * 1000003; }

uint32_t random_below(uint32_t bound) {  // splitmix64
  uint64_t z = state() += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<uint32_t>(((z >> 32) * bound) >> 32);
}

std::string describe_code(const void* address) {
  char text[64];
  std::snprintf(text, sizeof text, "code %p", address);
  Dl_info info{};
  if (!address || !dladdr(address, &info) || !info.dli_fbase) return text;
  // addr2line wants addresses relative to the load address (this program is position-independent).
  char command[512];
  std::snprintf(command, sizeof command,
                "timeout 10 addr2line -f -C -s -e /proc/%d/exe 0x%zx 2>/dev/null",
                static_cast<int>(getpid()),
                static_cast<size_t>(static_cast<const char*>(address) -
                                    static_cast<const char*>(info.dli_fbase)));
  FILE* pipe = popen(command, "r");
  if (!pipe) return text;
  char function[512] = "", line[256] = "";
  const bool both =
      std::fgets(function, sizeof function, pipe) && std::fgets(line, sizeof line, pipe);
  pclose(pipe);
  if (!both || function[0] == '?') return text;
  std::string name(function), place(line);
  name.resize(name.find_last_not_of("\n") + 1);
  place.resize(place.find_last_not_of("\n") + 1);
  return name + " at " + place;
}

void fail(const char* format, ...) {
  static bool failing = false;
  if (failing) _exit(FAILURE_STATUS);
  failing = true;
  std::fflush(stdout);
  std::fprintf(stderr, "cudasim: ");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "\n");
  print_current_operation();
  print_current_thread();
  std::fprintf(stderr, "  seed: CUDASIM_SEED=%lld\n",
               static_cast<long long>(environment("CUDASIM_SEED", 1)));
  std::fflush(stderr);
  _exit(FAILURE_STATUS);
}

}  // namespace cudasim
