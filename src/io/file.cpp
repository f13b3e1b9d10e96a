#include "io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "base/check.h"

namespace qshard {
namespace {

// Closes on every path; -1 is no file.
class Descriptor {
 public:
  Descriptor(const std::string& path, int flags) : id_(::open(path.c_str(), flags | O_CLOEXEC)) {
    if (id_ < 0) fail("cannot open {}: {}", path, std::strerror(errno));
  }
  ~Descriptor() { ::close(id_); }
  Descriptor(const Descriptor&) = delete;
  int id() const { return id_; }

 private:
  int id_;
};

void flush(int id, const std::string& path) {
  // Some file systems cannot flush a directory and say EINVAL.
  if (::fsync(id) != 0 && errno != EINVAL)
    fail("cannot flush {} to the disk: {}", path, std::strerror(errno));
}

}  // namespace

void flush_to_disk(const std::string& path) {
  const Descriptor file(path, O_RDONLY);
  flush(file.id(), path);
}

WriteBehind::WriteBehind(const std::string& path)
    : path_(path), id_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) {
  if (id_ < 0) fail("cannot open {}: {}", path, std::strerror(errno));
}

WriteBehind::~WriteBehind() { ::close(id_); }

void WriteBehind::wrote(int64_t bytes) {
  constexpr int64_t kEnough = 8 << 20;
  waiting_ += bytes;
  if (waiting_ < kEnough) return;
  waiting_ = 0;
#ifdef __linux__
  // Only a start: a file system that cannot do it, or a disk that fails, shows in finish().
  ::sync_file_range(id_, 0, 0, SYNC_FILE_RANGE_WRITE);
#endif
}

void WriteBehind::finish() { flush(id_, path_); }

void delete_behind(const std::string& path) {
  const int id = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    const int reason = errno;
    if (id >= 0) ::close(id);
    fail("{} cannot be deleted: {}", path, std::strerror(reason));
  }
  if (id >= 0) std::thread([id] { ::close(id); }).detach();
}

std::string reason_not_writable(const std::string& path) {
  const Descriptor file(path, O_RDWR);
  const off_t last = ::lseek(file.id(), 0, SEEK_END) - 1;
  char byte = 0;
  if (last < 0 || ::pread(file.id(), &byte, 1, last) < 0 || ::pwrite(file.id(), &byte, 1, last) < 0)
    return std::strerror(errno);
  return "";
}

void reserve_space(const std::string& path) {
  const Descriptor file(path, O_RDWR);
  struct stat status {};
  if (::fstat(file.id(), &status) != 0) fail("cannot stat {}: {}", path, std::strerror(errno));
  if (status.st_size == 0 || ::fallocate(file.id(), 0, 0, status.st_size) == 0) return;
  if (errno == ENOSPC || errno == EFBIG || errno == EDQUOT)
    fail("cannot reserve {} bytes for {}: {}", status.st_size, path, std::strerror(errno));
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const Descriptor file(path, O_RDONLY);
  struct stat status {};
  if (::fstat(file.id(), &status) != 0) fail("cannot stat {}: {}", path, std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("{} is not a regular file", path);
  size_ = status.st_size;
  if (size_ == 0) return;
  void* map = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, file.id(), 0);
  if (map == MAP_FAILED) fail("cannot map {} ({} bytes): {}", path, size_, std::strerror(errno));
  map_ = map;
}

MappedFile::~MappedFile() {
  if (map_) ::munmap(map_, static_cast<size_t>(size_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      map_(std::exchange(other.map_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

std::string temporary_name(const std::string& path) {
  return fmt::format("{}.tmp-{}", path, ::getpid());
}

void publish_file(const std::string& temporary, const std::string& path) {
  flush_to_disk(temporary);
  if (std::rename(temporary.c_str(), path.c_str()) != 0)
    fail("cannot rename {} to {}: {}", temporary, path, std::strerror(errno));
  const std::string directory = std::filesystem::path(path).parent_path().string();
  flush_to_disk(directory.empty() ? "." : directory);
}

AtomicFile::AtomicFile(const std::string& path) : path_(path), temporary_(temporary_name(path)) {
  file_ = std::fopen(temporary_.c_str(), "wb");
  if (!file_) fail("cannot create {}: {}", temporary_, std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (!file_) return;
  std::fclose(file_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  if (bytes > 0 && std::fwrite(data, 1, bytes, file_) != bytes)
    fail("cannot write {} bytes to {}: {}", bytes, temporary_, std::strerror(errno));
}

void AtomicFile::commit() {
  if (std::fflush(file_) != 0) fail("cannot write {}: {}", temporary_, std::strerror(errno));
  publish_file(temporary_, path_);
  std::fclose(std::exchange(file_, nullptr));
}

}  // namespace qshard
