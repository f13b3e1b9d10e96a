#include "backends.h"

#include "cpu/backend_cpu.h"

namespace qshard {

Backend make_backend(const std::string& name, const World& world) {
  if (name == "cpu") return make_cpu_backend(world.threads_per_rank());
  fail_usage("backend '{}' is not in this build: it has cpu", name);
}

}  // namespace qshard
