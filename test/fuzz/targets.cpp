#include "targets.h"

#include <filesystem>
#include <string>

#include "../unit/tiny_checkpoint.h"
#include "base/config.h"
#include "hdf5_edits.h"
#include "io/dataset.h"
#include "io/hf_weights.h"
#include "memory_file.h"
#include "model/qwen3_config.h"
#include "train/ckpt_tools.h"

namespace qshard::fuzz {
namespace {

// Runs fn, which may refuse its input.
template <typename Fn>
void may_refuse(Fn fn) {
  try {
    fn();
  } catch (const Error&) {
  }
}

std::string text_of(const uint8_t* data, size_t size) {
  return std::string(reinterpret_cast<const char*>(data), size);
}

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "qshard-fuzz-XXXXXX").string();
    if (!::mkdtemp(name.data())) fail("cannot create {}", name);
    path_ = name;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string good_checkpoint(const World& world) {
  TempFolder folder;
  CheckpointState state;
  state.model = tiny_config().to_json();
  state.run = nlohmann::json::object();
  const TinyTensors tensors(0.25f);
  return read_file(save_checkpoint(world, folder.path(), state, tensors.list, {}).path);
}

std::string good_token_file() {
  TempFolder folder;
  TokenFileWriter writer(folder / "tokens.h5", "bytes", 257, "test");
  const std::vector<uint32_t> ids = {1, 2, 3, 256};
  writer.add_document(ids);
  writer.add_document(ids);
  writer.finish();
  return read_file(folder / "tokens.h5");
}

void read_tokens(const std::string& path, const char* format) {
  may_refuse([&] {
    const TokenFile file(path, format);
    (void)file.document_offsets();
    std::vector<int32_t> ids(static_cast<size_t>(std::min<int64_t>(file.info().tokens, 4096)));
    const auto n = static_cast<int64_t>(ids.size());
    file.read(0, n, 1000, ids.data());
    file.read(file.info().tokens - n, n, 1000, ids.data());
  });
}

void save_shard(const std::string& path, const char* name, std::vector<float> values) {
  const auto n = static_cast<int64_t>(values.size());
  write_safetensors(path, {{name, Tensor::of(values.data(), {n})}});
}

}  // namespace

void safetensors(const World&, const uint8_t* data, size_t size) {
  static MemoryFile memory("fuzz.safetensors");
  memory.assign(data, size);
  may_refuse([&] {
    const SafetensorsFile file(memory.path());
    for (const std::string& name : file.names()) {
      std::vector<float> values(static_cast<size_t>(file.shape(name).numel()));
      may_refuse(
          [&] { file.read_f32(name, 0, static_cast<int64_t>(values.size()), values.data()); });
      may_refuse([&] { (void)file[name]; });
    }
  });
}

void index(const World&, const uint8_t* data, size_t size) {
  static const TempFolder folder;
  static const bool made = [] {
    save_shard(folder / "a.safetensors", "x", {1, 2, 3});
    save_shard(folder / "b.safetensors", "y", {4});
    return true;
  }();
  (void)made;
  std::ofstream(folder / kHfIndex, std::ios::binary) << text_of(data, size);
  may_refuse([&] {
    const HfWeights weights(folder.path());
    float values[3];
    weights.read_f32("x", 0, 3, values);
    weights.read_f32("y", 0, 1, values);
    weights.require({{"x", {3}}, {"y", {1}}});
  });
}

void config(const World&, const uint8_t* data, size_t size) {
  may_refuse([&] {
    const Qwen3Config c = Qwen3Config::from_json(parse_json(text_of(data, size), "fuzz"), "fuzz");
    const Qwen3Config again = Qwen3Config::from_json(c.to_json(), "again");
    QS_CHECK(again.to_json() == c.to_json() && c.num_parameters() > 0, "the config changed");
    (void)c.train_flops_per_token(c.max_position_embeddings);
    (void)layer_params(c, c.num_hidden_layers - 1);
  });
}

void tokens(const World&, const uint8_t* data, size_t size) {
  static MemoryFile memory("fuzz-tokens");
  static const std::string good = good_token_file();
  if (size == 0) return;
  const int mode = data[0] % 4;
  const std::string rest = text_of(data + 1, size - 1);
  if (mode == 3) {
    memory.assign(good.data(), good.size());
    edit_hdf5(memory.path(), data + 1, size - 1);
    return read_tokens(memory.path(), "auto");
  }
  if (rest.starts_with("\x89HDF")) return;
  memory.assign(rest.data(), rest.size());
  const char* formats[] = {"auto", "raw-u16", "raw-u32"};
  read_tokens(memory.path(), formats[mode]);
}

void checkpoint(const World& world, const uint8_t* data, size_t size) {
  static MemoryFile memory("fuzz.h5");
  static const std::string good = good_checkpoint(world);
  memory.assign(good.data(), good.size());
  edit_hdf5(memory.path(), data, size);
  may_refuse([&] { (void)describe_checkpoint(memory.path()).dump(); });
  may_refuse([&] { (void)check_checkpoint(world, memory.path()); });
  may_refuse([&] { (void)diff_checkpoints(world, memory.path(), memory.path()); });
  const TinyTensors tensors(0.25f);
  may_refuse([&] { load_checkpoint(world, memory.path(), tensors.list, false); });
  may_refuse([&] { load_checkpoint(world, memory.path(), tensors.list, true); });
}

}  // namespace qshard::fuzz
