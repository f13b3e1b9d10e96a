// HDF5 files. Handles close themselves, every call is checked, and an error carries the file, the
// object, what was tried and HDF5's own words, which end in the operating system's errno text.
//
// Memory type = file type: an element type that differs is refused, so nothing is converted inside
// HDF5. Datasets are contiguous, allocated when they are created and not filled, so that others can
// map them at their file offset. HDF5 is entered by one thread at a time.
//
// No file lock is taken: readers never need one, and files are written under a temporary name.
// Where the library is older than 1.10.7 / 1.12.1, set HDF5_USE_FILE_LOCKING=FALSE on file systems
// without locks.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace qshard {

enum class Hdf5Type : uint8_t { f32, f64, u16, u32, u64, i64, other };

template <typename T>
constexpr Hdf5Type hdf5_type_of();
template <>
constexpr Hdf5Type hdf5_type_of<float>() {
  return Hdf5Type::f32;
}
template <>
constexpr Hdf5Type hdf5_type_of<uint32_t>() {
  return Hdf5Type::u32;
}
template <>
constexpr Hdf5Type hdf5_type_of<uint64_t>() {
  return Hdf5Type::u64;
}

struct Hdf5Dataset {
  Hdf5Type type = Hdf5Type::other;
  std::string type_text;  // e.g. "u32", or what HDF5 knows of another type
  std::vector<int64_t> shape;
  bool contiguous = false;  // one piece of this file, without filters
  std::string layout;       // "contiguous", "chunked", "chunked, compressed", …
  int64_t file_offset = 0;  // bytes, of a contiguous dataset with elements
};

std::string hdf5_version();  // "HDF5 1.10.8"

// MPI-IO hints from "key=value,key=value"; a usage error says what does not fit.
std::vector<std::pair<std::string, std::string>> parse_hints(const std::string& text);

class Hdf5File {
 public:
  static Hdf5File open(const std::string& path);             // read only
  static Hdf5File open_for_change(const std::string& path);  // by this process alone
  static Hdf5File create(const std::string& path);           // replaces an existing file
  // Datasets of `alignment` bytes and more begin at a multiple of it.
  static Hdf5File create_aligned(const std::string& path, int64_t alignment);
  // For writing by all ranks of `comm` through MPI-IO, each its own rows. Opening, keep_open(),
  // write() and close() are collective: every rank makes the same calls with the same names, if
  // need be without values; except for write() after keep_open(). collective: the transfers too, so
  // that MPI-IO may exchange data between ranks. hints: see parse_hints().
  static Hdf5File open_parallel(const std::string& path, MPI_Comm comm, const std::string& hints,
                                bool collective);
  ~Hdf5File();
  Hdf5File(Hdf5File&& other) noexcept;
  Hdf5File& operator=(Hdf5File&&) = delete;
  // Writes what HDF5 still holds and closes; the errors of a full disk may only appear here. The
  // destructor closes without a word.
  void close();
  // Leaves the file open: closing is collective, and after a failed collective transfer the others
  // do not come.
  void abandon();

  const std::string& path() const { return path_; }
  bool contains(const std::string& name) const;  // "/group/name"

  // Attributes of the root group, or of another object.
  void write_attribute(const std::string& name, int64_t value, const std::string& object = "/");
  void write_attribute(const std::string& name, const std::string& value);
  // Another value for an attribute that is there.
  void set_attribute(const std::string& name, int64_t value, const std::string& object);
  bool has_attribute(const std::string& name, const std::string& object = "/") const;
  int64_t int_attribute(const std::string& name, const std::string& object = "/") const;
  std::string text_attribute(const std::string& name) const;

  std::vector<std::string> datasets() const;  // all names, "/group/name", sorted

  Hdf5Dataset dataset(const std::string& name) const;
  void create_dataset(const std::string& name, Hdf5Type type, const std::vector<int64_t>& shape);
  // Opens a dataset and keeps it open until close(): what is collective about it is done then, and
  // an independent write() of it involves no other rank.
  void keep_open(const std::string& name);

  // Rows [first, first + n) of dimension 0, n = values.size() / elements of a row.
  template <typename T>
  void write(const std::string& name, int64_t first, std::span<const T> values) {
    write_rows(name, hdf5_type_of<T>(), first, static_cast<int64_t>(values.size()), values.data());
  }
  template <typename T>
  void read(const std::string& name, int64_t first, std::span<T> values) const {
    read_rows(name, hdf5_type_of<T>(), first, static_cast<int64_t>(values.size()), values.data());
  }

 private:
  Hdf5File(std::string path, int64_t id) : path_(std::move(path)), id_(id) {}
  void write_rows(const std::string& name, Hdf5Type type, int64_t first, int64_t numel,
                  const void* from);
  void read_rows(const std::string& name, Hdf5Type type, int64_t first, int64_t numel,
                 void* to) const;
  int64_t open_dataset(const std::string& name) const;  // to be closed, kept or not
  void close_datasets();
  std::string path_;
  int64_t id_;                           // hid_t
  std::map<std::string, int64_t> kept_;  // of datasets
  bool parallel_ = false, collective_ = false;
};

}  // namespace qshard
