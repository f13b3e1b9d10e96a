#include "device/host_memory.h"

#include <filesystem>
#include <fstream>

#include "files.h"

namespace qshard {
namespace {

class HostMemory : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file(dir / path.substr(1));
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  int64_t found() { return host_bytes_available(dir / "."); }
  TempDir dir;
};

constexpr const char* kInfo = "MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:   8000 kB\n";

TEST_F(HostMemory, IsTheMachines) {
  write("/proc/meminfo", kInfo);
  EXPECT_EQ(found(), 8000 * 1024);
}

TEST_F(HostMemory, IsWhatTheControlGroupLeaves) {
  write("/proc/meminfo", kInfo);
  write("/proc/self/cgroup", "0::/slurm/job_1/step_0\n");
  write("/sys/fs/cgroup/slurm/job_1/step_0/memory.max", "max\n");
  write("/sys/fs/cgroup/slurm/job_1/step_0/memory.current", "70000\n");
  EXPECT_EQ(found(), 8000 * 1024);
  // The limit stands at the job; of what it has used, 20000 bytes are cached files.
  write("/sys/fs/cgroup/slurm/job_1/memory.max", "1000000\n");
  write("/sys/fs/cgroup/slurm/job_1/memory.current", "90000\n");
  write("/sys/fs/cgroup/slurm/job_1/memory.stat", "anon 70000\ninactive_file 20000\n");
  EXPECT_EQ(found(), 1000000 - 90000 + 20000);
}

TEST_F(HostMemory, IsWhatAnOldControlGroupLeaves) {
  write("/proc/meminfo", kInfo);
  write("/proc/self/cgroup", "5:cpu:/other\n4:memory:/box\n0::/\n");
  write("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", "500000\n");
  write("/sys/fs/cgroup/memory/box/memory.usage_in_bytes", "600000\n");
  write("/sys/fs/cgroup/memory/box/memory.stat", "total_inactive_file 150000\n");
  EXPECT_EQ(found(), 50000);
}

TEST_F(HostMemory, MayBeUnknown) {
  EXPECT_EQ(found(), 0);
  write("/proc/meminfo", "nothing of use\n");
  write("/proc/self/cgroup", "text\n1:memory\n2:memory:relative\n");
  EXPECT_EQ(found(), 0);
}

TEST_F(HostMemory, IsKnownHere) { EXPECT_GT(host_bytes_available(), 0); }

}  // namespace
}  // namespace qshard
