// safetensors files: read with full validation, write f32.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace qshard {

// A memory-mapped file. Opening checks the header: length, JSON, known dtypes, shape·dtype = bytes,
// offsets inside the file, no overlap or gap, file size exactly as the header says. Errors name
// file, tensor, expected, found ("incomplete download?" when the file is short).
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const { return tensors_.count(name) != 0; }
  const Tensor& operator[](const std::string& name) const;  // view of the mapping; throws when absent
  // Elements [first, first + n) of a floating-point tensor (F32, BF16, F16), converted to f32.
  void read_f32(const std::string& name, int64_t first, int64_t n, float* to) const;

 private:
  std::string path_;
  void* map_ = nullptr;
  size_t size_ = 0;
  std::map<std::string, Tensor> tensors_;
};

// Writes the tensors (host memory) in the given order under a temporary name, then renames.
void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace qshard
