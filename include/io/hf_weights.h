// The weights of a Hugging Face folder: model.safetensors, or the shards that
// model.safetensors.index.json lists; the former when both are there, as transformers reads it.
//
// Opening checks every file (see SafetensorsFile) and, for shards, the index in both directions:
// each file that it names exists and holds the tensors it names, no shard holds a tensor that it
// gives to another shard or does not name. Errors name the files and tensors and say what to do
// ("incomplete download?"). Files are mapped: what is not read costs no memory.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/world.h"
#include "io/safetensors.h"
#include "tensor/param_spec.h"

namespace qshard {

constexpr const char* kHfWeights = "model.safetensors";
constexpr const char* kHfIndex = "model.safetensors.index.json";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

class HfWeights {
 public:
  explicit HfWeights(const std::string& folder);

  const std::string& folder() const { return folder_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const { return holder_.count(name) != 0; }
  const Shape& shape(const std::string& name) const { return holder(name).shape(name); }
  // Elements [first, first + n), converted to f32.
  void read_f32(const std::string& name, int64_t first, int64_t n, float* to) const {
    holder(name).read_f32(name, first, n, to);
  }

  // Throws unless the folder holds exactly these parameters, with these shapes, as F32, BF16 or
  // F16. A tied model (params without a head) may have a head of the embedding's shape as well: see
  // warn_of_tied_head().
  void require(const std::vector<ParamSpec>& params) const;

 private:
  void open_shards();
  void add_shard(const std::string& file, const std::map<std::string, std::string>& weight_map);
  [[noreturn]] void refuse_folder() const;
  const SafetensorsFile& holder(const std::string& name) const;
  std::string folder_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*> holder_;  // of each tensor
};

// For a tied model, which uses the embedding as head: calls `warn` on rank 0 when the folder holds
// a head of other values. Collective; each rank compares its share of the rows.
void warn_of_tied_head(const World& world, const HfWeights& weights,
                       const std::function<void(const std::string&)>& warn);

}  // namespace qshard
