#include "io/hf_weights.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "base/config.h"
#include "fsdp/shard_layout.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

// At most four, then a count.
std::string list(const std::vector<std::string>& names) {
  constexpr size_t kShown = 4;
  const size_t shown = std::min(names.size(), kShown);
  const std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  return names.size() <= shown ? text : fmt::format("{} and {} more", text, names.size() - shown);
}

std::string join(const std::string& folder, const std::string& file) {
  return (fs::path(folder) / file).string();
}

// Tensor → file. File names are plain, so that nothing outside of the folder is opened.
std::map<std::string, std::string> read_index(const std::string& path) {
  const nlohmann::json index = parse_json(read_file(path), path, kExitFailed);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    fail("{}: expected an object with weight_map = {{tensor: file, …}}", path);
  std::map<std::string, std::string> weight_map;
  for (const auto& [name, file] : index["weight_map"].items()) {
    if (!file.is_string() ||
        fs::path(file.get<std::string>()).filename() != file.get<std::string>())
      fail("{}: weight_map: {}: expected the name of a file in this folder, found {}", path, name,
           file.dump());
    weight_map[name] = file.get<std::string>();
  }
  if (weight_map.empty()) fail("{}: weight_map names no tensor", path);
  return weight_map;
}

}  // namespace

HfWeights::HfWeights(const std::string& folder) : folder_(folder) {
  if (fs::exists(join(folder, kHfWeights))) {
    files_.push_back(std::make_unique<SafetensorsFile>(join(folder, kHfWeights)));
    for (const std::string& name : files_[0]->names()) holder_[name] = files_[0].get();
  } else if (fs::exists(join(folder, kHfIndex))) {
    open_shards();
  } else {
    refuse_folder();
  }
}

void HfWeights::open_shards() {
  const std::string path = join(folder_, kHfIndex);
  const std::map<std::string, std::string> weight_map = read_index(path);
  std::set<std::string> files;
  for (const auto& [name, file] : weight_map) files.insert(file);
  std::vector<std::string> absent;
  for (const std::string& file : files)
    if (!fs::exists(join(folder_, file))) absent.push_back(file);
  if (!absent.empty())
    fail("{}: {} of {} files are not there: {} (incomplete download?)", path, absent.size(),
         files.size(), list(absent));
  for (const std::string& file : files) add_shard(file, weight_map);
  std::vector<std::string> missing;
  for (const auto& [name, file] : weight_map)
    if (!contains(name)) missing.push_back(fmt::format("{} in {}", name, file));
  if (!missing.empty())
    fail("{}: {} tensor(s) are not where weight_map says: {} (files of another revision?)", path,
         missing.size(), list(missing));
}

void HfWeights::add_shard(const std::string& file,
                          const std::map<std::string, std::string>& weight_map) {
  files_.push_back(std::make_unique<SafetensorsFile>(join(folder_, file)));
  for (const std::string& name : files_.back()->names()) {
    const auto entry = weight_map.find(name);
    if (entry == weight_map.end())
      fail("{}: tensor {} is not in {} (files of another revision?)", files_.back()->path(), name,
           kHfIndex);
    if (entry->second != file)
      fail("{}: tensor {} belongs into {} as {} says (files of another revision?)",
           files_.back()->path(), name, entry->second, kHfIndex);
    holder_[name] = files_.back().get();
  }
}

void HfWeights::refuse_folder() const {
  if (!fs::is_directory(folder_)) fail("{}: No such folder", folder_);
  std::vector<std::string> shards, pickles;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string(), suffix = entry.path().extension();
    if (suffix == ".safetensors" && name.starts_with("model-")) shards.push_back(name);
    if (suffix == ".bin" || suffix == ".pth" || suffix == ".pt") pickles.push_back(name);
  }
  std::string hint;
  if (!shards.empty()) {
    hint = fmt::format("; it has {} shard(s) but not their index (incomplete download?)",
                       shards.size());
  } else if (!pickles.empty()) {
    std::sort(pickles.begin(), pickles.end());
    hint = fmt::format(
        "; {} is in PyTorch's pickle format, which is not read: save the model "
        "again as safetensors",
        list(pickles));
  }
  fail("{}: No such file, nor {}{}", join(folder_, kHfWeights), kHfIndex, hint);
}

std::vector<std::string> HfWeights::names() const {
  std::vector<std::string> all;
  for (const auto& [name, file] : holder_) all.push_back(name);
  return all;
}

const SafetensorsFile& HfWeights::holder(const std::string& name) const {
  const auto found = holder_.find(name);
  if (found == holder_.end()) fail("{}: tensor {} is missing", folder_, name);
  return *found->second;
}

void HfWeights::require(const std::vector<ParamSpec>& params) const {
  std::map<std::string, Shape> expected;
  for (const ParamSpec& p : params) expected[p.name] = p.shape;
  std::vector<std::string> missing, unknown;
  for (const ParamSpec& p : params)
    if (!contains(p.name)) missing.push_back(fmt::format("{} {}", p.name, p.shape.str()));
  if (!missing.empty())
    fail("{}: {} tensor(s) that the config asks for are missing: {}", folder_, missing.size(),
         list(missing));
  if (!expected.count(kHead) && expected.count(kEmbedding)) expected[kHead] = expected[kEmbedding];
  for (const auto& [name, file] : holder_) {
    if (!expected.count(name)) {
      unknown.push_back(name);
      continue;
    }
    if (!(file->shape(name) == expected[name]))
      fail("{}: {} expected {} (from the config), found {}", file->path(), name,
           expected[name].str(), file->shape(name).str());
    if (const std::string& dtype = file->dtype(name);
        dtype != "F32" && dtype != "BF16" && dtype != "F16")
      fail("{}: {} has dtype {}; expected F32, BF16 or F16", file->path(), name, dtype);
  }
  if (!unknown.empty())
    fail("{}: {} tensor(s) do not belong to this model: {}", folder_, unknown.size(),
         list(unknown));
}

void warn_of_tied_head(const World& world, const HfWeights& weights,
                       const std::function<void(const std::string&)>& warn) {
  if (!weights.contains(kHead)) return;
  const UnitLayout layout({{kEmbedding, weights.shape(kEmbedding)}}, world.size());
  const RowRange rows = layout[0].rows_of(world.rank());
  const int64_t row = layout[0].row_numel;
  std::vector<float> embedding(row), head(row);
  int64_t differ = 0;  // rows
  collectively(world, [&] {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      weights.read_f32(kEmbedding, r * row, row, embedding.data());
      weights.read_f32(kHead, r * row, row, head.data());
      differ += embedding != head;
    }
  });
  world.all_reduce_sum(&differ, 1);
  if (differ && world.rank() == 0)
    warn(fmt::format("{}: the config ties {} to {}, but {} of {} rows differ: the latter is used",
                     weights.folder(), kHead, kEmbedding, differ, layout[0].rows));
}

}  // namespace qshard
