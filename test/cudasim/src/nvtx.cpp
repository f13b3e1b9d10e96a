// A profiler that takes NVTX: each range that begins is a line of its depth and name in the file
// CUDASIM_NVTX.PID, at the end of the process a line "end OPEN PUSHES POPS".
#include <nvtx3/nvToolsExt.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "report.h"

struct nvtxDomainRegistration_st {
  std::string name;
};

namespace cudasim {
namespace {

struct Profiler {
  FILE* file;
  std::mutex mutex;
  long pushes = 0, pops = 0;

  explicit Profiler(const char* path)
      : file(std::fopen((std::string(path) + "." + std::to_string(getpid())).c_str(), "w")) {
    if (!file) fail("nvtx: cannot write CUDASIM_NVTX=%s", path);
  }
  ~Profiler() {
    std::fprintf(file, "end %ld %ld %ld\n", pushes - pops, pushes, pops);
    std::fclose(file);
  }
};

thread_local int depth = 0;

Profiler* profiler() {
  static const char* const path = std::getenv("CUDASIM_NVTX");
  if (!path) return nullptr;
  static Profiler attached(path);
  return &attached;
}

Profiler& attached(nvtxDomainHandle_t domain) {
  if (!domain || !profiler()) fail("nvtx: not a domain of nvtxDomainCreateA");
  return *profiler();
}

}  // namespace
}  // namespace cudasim

using namespace cudasim;

nvtxDomainHandle_t nvtxDomainCreateA(const char* name) {
  return profiler() ? new nvtxDomainRegistration_st{name} : nullptr;
}

int nvtxDomainRangePushEx(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* range) {
  Profiler& p = attached(domain);
  if (range->version != NVTX_VERSION || range->size != NVTX_EVENT_ATTRIB_STRUCT_SIZE ||
      range->messageType != NVTX_MESSAGE_TYPE_ASCII || !range->message.ascii)
    fail("nvtx: a range without version, size or ASCII name");
  const std::lock_guard lock(p.mutex);
  std::fprintf(p.file, "%d %s: %s\n", depth, domain->name.c_str(), range->message.ascii);
  ++p.pushes;
  return depth++;
}

int nvtxDomainRangePop(nvtxDomainHandle_t domain) {
  Profiler& p = attached(domain);
  if (depth == 0) fail("nvtx: no range of this thread is open");
  const std::lock_guard lock(p.mutex);
  ++p.pops;
  return --depth;
}
