#include "train/hf_folder.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/config.h"
#include "fsdp/shard_layout.h"
#include "io/hdf5_file.h"
#include "model/qwen3_params.h"
#include "train/ckpt_tools.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfig = "config.json";
constexpr const char* kTokenizer = "qshard_tokenizer";

int64_t bytes_of(const SafetensorsEntry& e) {
  return e.shape.numel() * static_cast<int64_t>(dtype_size(e.dtype));
}

// Consecutive tensors share a file as long as they fit.
std::vector<std::vector<SafetensorsEntry>> plan_shards(const std::vector<ParamSpec>& params,
                                                       const HfExportOptions& options) {
  std::vector<std::vector<SafetensorsEntry>> shards;
  int64_t bytes = 0;  // of the last shard
  for (const ParamSpec& p : params) {
    const SafetensorsEntry entry{p.name, options.dtype, p.shape};
    if (shards.empty() || bytes + bytes_of(entry) > options.max_shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(entry);
    bytes += bytes_of(entry);
  }
  return shards;
}

std::string shard_name(size_t i, size_t n) {
  return n == 1 ? kHfWeights : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, n);
}

bool is_weight_file(const fs::path& path) {
  const std::string name = path.filename().string();
  return name == kHfWeights || name == kHfIndex ||
         (name.starts_with("model-") && name.ends_with(".safetensors"));
}

// A folder under a temporary name that goes away unless it is published.
class StagedFolder {
 public:
  explicit StagedFolder(std::string path) : path_(std::move(path)) {
    fs::create_directories(path_);
  }
  ~StagedFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  StagedFolder(const StagedFolder&) = delete;
  std::string operator/(const std::string& name) const { return (fs::path(path_) / name).string(); }

  // As `folder`; into it when it holds files, whose weights are replaced and the rest kept.
  void publish(const std::string& folder) {
    if (!fs::exists(folder) || fs::is_empty(folder)) return publish_file(path_, folder);
    for (const fs::directory_entry& old : fs::directory_iterator(folder))
      if (is_weight_file(old.path())) fs::remove(old.path());
    for (const fs::directory_entry& made : fs::directory_iterator(path_))
      fs::rename(made.path(), fs::path(folder) / made.path().filename());
    flush_to_disk(folder);
  }

 private:
  std::string path_;
};

// Without the slash at the end that makes a name inside of it a neighbour's.
std::string folder_name(const std::string& folder) {
  const fs::path path = fs::path(folder).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).string();
}

void require_free(const std::string& folder, bool overwrite) {
  if (!fs::exists(folder)) return;
  if (!fs::is_directory(folder)) fail("{} exists and is not a folder", folder);
  if (!overwrite && !fs::is_empty(folder))
    fail("{} is not empty: choose another folder, or --overwrite to replace the weights in it",
         folder);
}

void write_index(const std::string& path, const nlohmann::ordered_json& weight_map, int64_t bytes) {
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}},
                                        {"weight_map", weight_map}};
  const std::string text = index.dump(2) + "\n";
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

HfExportReport write_folder(const std::string& checkpoint, const std::string& folder,
                            const HfExportOptions& options) {
  require_free(folder, options.overwrite);
  const CheckpointState state = read_checkpoint_state(checkpoint);
  const Qwen3Config config = Qwen3Config::from_json(state.model, checkpoint);
  const auto shards = plan_shards(all_params(config), options);
  const Hdf5File from = Hdf5File::open(checkpoint);
  StagedFolder staged(temporary_name(folder));
  HfExportReport report;
  report.files = static_cast<int64_t>(shards.size());
  nlohmann::ordered_json weight_map;
  std::vector<float> values;
  for (size_t s = 0; s < shards.size(); ++s) {
    const std::string name = shard_name(s, shards.size());
    SafetensorsWriter to(staged / name, shards[s]);
    for (const SafetensorsEntry& entry : shards[s]) {
      values.resize(static_cast<size_t>(entry.shape.numel()));
      from.read(kModelGroup + entry.name, 0, std::span<float>(values));
      to.append(Tensor::of(values.data(), entry.shape));
      weight_map[entry.name] = name;
      report.bytes += bytes_of(entry);
      ++report.tensors;
    }
    to.commit();
  }
  if (shards.size() > 1) write_index(staged / kHfIndex, weight_map, report.bytes);
  write_hf_config(staged / kConfig, config, options.dtype, tokenizer_of(state));
  staged.publish(folder);
  return report;
}

// This rank's rows of the weights, and one buffer of zeros that serves as every moment.
struct ImportedRows {
  std::vector<std::vector<float>> weights;
  std::vector<float> zeros;
  std::vector<CheckpointTensor> tensors;
};

ImportedRows read_rows(const World& world, const HfWeights& weights, const UnitLayout& layout) {
  ImportedRows own;
  int64_t largest = 0;
  for (int i = 0; i < layout.size(); ++i)
    largest = std::max(largest, layout[i].numel_of(world.rank()));
  own.zeros.resize(static_cast<size_t>(largest));
  for (int i = 0; i < layout.size(); ++i) {
    const ParamSpec& p = layout.params()[i];
    const int64_t first = layout[i].rows_of(world.rank()).begin;
    const int64_t n = layout[i].numel_of(world.rank());
    std::vector<float>& values = own.weights.emplace_back(n);
    weights.read_f32(p.name, first * layout[i].row_numel, n, values.data());
    if (!std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }))
      fail("{}: {} has values that are not finite", weights.folder(), p.name);
    const Tensor zeros = Tensor::of(own.zeros.data(), {n});
    own.tensors.push_back({kModelGroup + p.name, p.shape, first, Tensor::of(values.data(), {n})});
    own.tensors.push_back({kExpAvgGroup + p.name, p.shape, first, zeros});
    own.tensors.push_back({kExpAvgSqGroup + p.name, p.shape, first, zeros});
  }
  return own;
}

}  // namespace

HfExportReport export_checkpoint(const World& world, const std::string& checkpoint,
                                 const std::string& folder, const HfExportOptions& options) {
  const CheckResult check = check_checkpoint(world, checkpoint);
  if (!check.damaged.empty())
    throw AgreedError(fmt::format("{}: {} is damaged: nothing is exported from it", checkpoint,
                                  fmt::join(check.damaged, ", ")));
  HfExportReport report;
  collectively(world, [&] {
    if (world.rank() == 0) report = write_folder(checkpoint, folder_name(folder), options);
  });
  int64_t numbers[] = {report.tensors, report.bytes, report.files};  // 0 but on rank 0
  world.all_reduce_sum(numbers, 3);
  return {numbers[0], numbers[1], numbers[2]};
}

void import_checkpoint(const World& world, const std::string& folder, const std::string& checkpoint,
                       bool overwrite, const std::function<void(const std::string&)>& warn) {
  std::unique_ptr<HfWeights> weights;
  std::unique_ptr<StagedFolder> staged;  // on rank 0
  Qwen3Config config;
  std::string tokenizer;
  ImportedRows own;
  const std::string stage = world.broadcast(temporary_name(checkpoint), 0);
  collectively(world, [&] {
    if (fs::exists(checkpoint) && !overwrite)
      fail("{} exists: choose another name, or --overwrite", checkpoint);
    config = read_hf_config(folder);
    tokenizer = read_hf_tokenizer(folder);
    const std::vector<ParamSpec> params = all_params(config);
    weights = std::make_unique<HfWeights>(folder);
    weights->require(params);
    own = read_rows(world, *weights, UnitLayout(params, world.size()));
    if (world.rank() == 0) staged = std::make_unique<StagedFolder>(stage);
  });
  if (config.tie_word_embeddings) warn_of_tied_head(world, *weights, warn);
  CheckpointState state;
  state.model = config.to_json();
  state.run = nlohmann::json::object();
  if (!tokenizer.empty()) state.run["derived"]["tokenizer"] = tokenizer;
  SaveOptions save;
  save.keep_last = 0;
  const SaveReport report = save_checkpoint(world, stage, state, own.tensors, save);
  collectively(world, [&] {
    if (world.rank() == 0) publish_file(report.path, checkpoint);
  });
}

void write_hf_config(const std::string& path, const Qwen3Config& config, DType dtype,
                     const std::string& tokenizer) {
  nlohmann::json fields = config.to_json();
  fields["torch_dtype"] = dtype == DType::bf16 ? "bfloat16" : "float32";
  if (!tokenizer.empty()) fields[kTokenizer] = tokenizer;
  const std::string text = fields.dump(2) + "\n";
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

Qwen3Config read_hf_config(const std::string& folder) {
  const std::string path = (fs::path(folder) / kConfig).string();
  return Qwen3Config::from_json(parse_json(read_file(path), path), path);
}

std::string read_hf_tokenizer(const std::string& folder) {
  const std::string path = (fs::path(folder) / kConfig).string();
  const nlohmann::json fields = parse_json(read_file(path), path);
  if (!fields.contains(kTokenizer)) return "";
  if (!fields[kTokenizer].is_string())
    fail_usage("{}: {}: expected a text, found {}", path, kTokenizer, fields[kTokenizer].dump());
  return fields[kTokenizer].get<std::string>();
}

std::string tokenizer_of(const CheckpointState& state) {
  const nlohmann::json::json_pointer at("/derived/tokenizer");
  return state.run.contains(at) ? state.run[at].get<std::string>() : "";
}

}  // namespace qshard
