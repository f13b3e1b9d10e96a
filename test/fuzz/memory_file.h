// A file in memory with a path, so that a run of millions writes nothing to a disk.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <string>

#include "base/check.h"

namespace qshard::fuzz {

class MemoryFile {
 public:
  explicit MemoryFile(const char* name) : id_(::memfd_create(name, 0)) {
    if (id_ < 0) fail("cannot create a file in memory");
  }
  ~MemoryFile() { ::close(id_); }
  MemoryFile(const MemoryFile&) = delete;
  std::string path() const { return fmt::format("/proc/self/fd/{}", id_); }
  void assign(const void* data, size_t size) {
    if (::ftruncate(id_, 0) != 0 || ::pwrite(id_, data, size, 0) != static_cast<ssize_t>(size))
      fail("cannot write a file in memory");
  }

 private:
  int id_;
};

}  // namespace qshard::fuzz
