// Files of the host: read by mapping, written under a temporary name and renamed when complete, so
// that a file that exists under its own name is whole. Errors throw with path and errno text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace qshard {

// Read-only mapping of a whole file; an empty file maps to no bytes.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  const std::string& path() const { return path_; }
  const std::byte* data() const { return static_cast<const std::byte*>(map_); }
  int64_t size() const { return size_; }

 private:
  std::string path_;
  void* map_ = nullptr;
  int64_t size_ = 0;
};

// A name beside `path` that no other process of this host uses.
std::string temporary_name(const std::string& path);

// Waits until the file's (or folder's) contents are on the disk.
void flush_to_disk(const std::string& path);

// The errno text of an attempt to write the file's last byte again, or an empty text: before a
// library writes that does not say why it could not, and after. Throws when the file cannot be
// opened.
std::string reason_not_writable(const std::string& path);

// Gives a sparse file its blocks now, so that a full disk is an error here and not in the middle of
// writing. File systems that cannot do it are left alone.
void reserve_space(const std::string& path);

// Sends what a process writes to a file to the disk while it goes on writing, so that the disk does
// not wait for the last byte. The writing itself is the caller's, through any library.
class WriteBehind {
 public:
  explicit WriteBehind(const std::string& path);
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  void wrote(int64_t bytes);  // starts the disk when enough has come together
  void finish();              // waits until all of the file is on the disk

 private:
  std::string path_;
  int id_;
  int64_t waiting_ = 0;  // bytes
};

// Takes the file's name away now. Its blocks, which take a disk as long as many small files, are
// freed by a thread of their own.
void delete_behind(const std::string& path);

// Flushes `temporary` to the disk, renames it to `path` and flushes the directory entry.
void publish_file(const std::string& temporary, const std::string& path);

// Sequential writer of a new file; commit() publishes it. Without commit nothing remains.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  void commit();

 private:
  std::string path_, temporary_;
  std::FILE* file_ = nullptr;
};

}  // namespace qshard
