// safetensors files: read with full validation, write any tensors of the host.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "io/file.h"
#include "tensor/tensor.h"

namespace qshard {

// A memory-mapped file. Opening checks the header: length, JSON, known dtypes, shape·dtype = bytes,
// offsets inside the file, no overlap or gap, file size exactly as the header says. Errors name
// file, tensor, expected, found ("incomplete download?" when the file is short).
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const { return tensors_.count(name) != 0; }
  const Shape& shape(const std::string& name) const { return entry(name).tensor.shape; }
  const std::string& dtype(const std::string& name) const { return entry(name).dtype; }  // "BF16"
  // View of the mapping. Throws when the tensor is absent, has a dtype without a DType (I64, BOOL
  // …) or does not lie at a multiple of its element size, as in files of old writers.
  const Tensor& operator[](const std::string& name) const;
  // Elements [first, first + n) of a floating-point tensor (F32, BF16, F16), converted to f32.
  void read_f32(const std::string& name, int64_t first, int64_t n, float* to) const;

 private:
  struct Entry {
    Tensor tensor;
    std::string dtype;  // as the file names it
    bool has_dtype;     // tensor.dtype is that of the file
  };
  const Entry& entry(const std::string& name) const;
  int64_t read_header();
  void check_extents(int64_t data_begin) const;
  MappedFile file_;
  std::map<std::string, Entry> tensors_;
};

// n values of f32, bf16 or fp16 as f32; `from` may be unaligned.
void to_f32(DType dtype, const void* from, int64_t n, float* to);

struct SafetensorsEntry {
  std::string name;
  DType dtype;
  Shape shape;
};

// Writes a file tensor by tensor, so that one at a time is in memory, under a temporary name that
// commit() renames. The metadata gets format = "pt" unless it says otherwise: transformers insists
// on it.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                    std::map<std::string, std::string> metadata = {});
  // The values of the next entry (host memory, contiguous). f32 values of a bf16 entry are rounded
  // to nearest, ties to even.
  void append(const Tensor& values);
  void commit();  // after the last entry

 private:
  void append_rounded(const Tensor& values);
  std::vector<SafetensorsEntry> entries_;
  size_t next_ = 0;
  AtomicFile file_;
};

// All tensors at once, in the given order.
void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, Tensor>>& tensors,
                       std::map<std::string, std::string> metadata = {});

}  // namespace qshard
