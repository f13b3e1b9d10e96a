#include "train/generate.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>

#include "io/checkpoint.h"
#include "model/qwen3_model.h"
#include "model/qwen3_params.h"
#include "train/checkpointer.h"
#include "train/engine.h"
#include "train/export.h"
#include "train/hf_folder.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

void describe_checkpoint_model(TrainedModel& model) {
  const CheckpointState state = read_checkpoint_state(model.path);
  model.config = Qwen3Config::from_json(state.model, model.path);
  model.tokenizer = tokenizer_of(state);
  const nlohmann::json::json_pointer seq("/train/seq");
  model.context = state.run.contains(seq) ? state.run[seq].get<int64_t>()
                                          : model.config.max_position_embeddings;
}

void describe_folder_model(TrainedModel& model) {
  model.config = read_hf_config(model.path);
  model.tokenizer = read_hf_tokenizer(model.path);
  model.context = model.config.max_position_embeddings;
}

std::string newest_checkpoint(const World& world, const std::string& folder, const Warn& warn) {
  for (const std::string& place : {folder, (fs::path(folder) / "checkpoints").string()})
    if (std::string found = find_checkpoint(world, place, warn); !found.empty()) return found;
  throw AgreedError(
      fmt::format("{} holds neither a config.json (a Hugging Face folder) nor checkpoints (*.h5)",
                  folder),
      kExitUsage);
}

void require_usable(const TrainedModel& from, const GenerateOptions& o) {
  const int64_t V = from.config.vocab_size;
  if (o.prompt.empty()) fail_usage("the prompt is empty: at least one token has to come first");
  for (size_t i = 0; i < o.prompt.size(); ++i)
    if (o.prompt[i] < 0 || o.prompt[i] >= V)
      fail_usage("token {} of the prompt is {}, expected 0 to {}: the model {} has vocab_size {}",
                 i, o.prompt[i], V - 1, from.path, V);
}

void load_weights(const TrainedModel& from, const World& world, Backend& backend, Qwen3Model& model,
                  const HfWeights* folder, const Warn& warn) {
  if (folder) return import_weights(world, model, *folder, warn);
  load_checkpoint(world, from.path, checkpoint_tensors(model, true), true,
                  Staging(*backend.device));
  model.masters_written();
}

// The model with its window of tokens, and this rank's part of the samples.
class Sampling {
 public:
  Sampling(const GenerateOptions& options, const World& world, Qwen3Model& model)
      : o_(options),
        world_(world),
        model_(model),
        ids_(model.device().host(), DType::i32, {model.shape().T}, Segment::workspace, "tokens"),
        logits_(static_cast<size_t>(model.config().vocab_size)) {}

  // All ranks run until the last of their samples has ended. A rank without one only takes part.
  std::vector<int32_t> run(int64_t sample, const std::function<void(int32_t)>& use) {
    const bool mine = sample < o_.samples;
    std::vector<int32_t> history = o_.prompt;
    for (int64_t t = 0; t < o_.tokens; ++t) {
      const bool active = mine && (t == 0 || history.back() != o_.end);
      double any = active;
      world_.all_reduce_max(&any, 1);
      if (any == 0) break;
      const Tensor logits = model_.next_logits(ids_->as<int32_t>(), fill_window(history));
      model_.device().copy(logits_.data(), logits.data, logits.bytes());
      collectively(world_, [&] {
        if (!active) return;
        require_finite();
        history.push_back(next(sample, t));
      });
      if (active) use(history.back());
    }
    history.erase(history.begin(), history.begin() + static_cast<int64_t>(o_.prompt.size()));
    return history;
  }

 private:
  // The last tokens; returns the position of the very last one.
  int64_t fill_window(const std::vector<int32_t>& history) {
    const auto n = static_cast<int64_t>(history.size());
    const int64_t count = std::min(n, model_.shape().T);
    std::copy(history.end() - count, history.end(), ids_->as<int32_t>());
    return count - 1;
  }

  void require_finite() const {
    if (!std::all_of(logits_.begin(), logits_.end(), [](float x) { return std::isfinite(x); }))
      fail("the model's logits are not finite: its weights are damaged or too large for {}",
           dtype_name(o_.param_dtype));
  }

  int32_t next(int64_t sample, int64_t t) const {
    std::span<const float> open(logits_);
    if (o_.choices > 0) open = open.first(std::min(open.size(), static_cast<size_t>(o_.choices)));
    const double u = uniform(o_.seed, static_cast<uint64_t>(sample), static_cast<uint64_t>(t));
    return choose(candidates(open, o_.choice), u);
  }

  const GenerateOptions& o_;
  const World& world_;
  Qwen3Model& model_;
  Buffer ids_;
  std::vector<float> logits_;
};

std::vector<int32_t> parse_ids(const std::string& text) {
  std::istringstream words(text);
  std::vector<int32_t> ids;
  for (int32_t id; words >> id;) ids.push_back(id);
  return ids;
}

}  // namespace

TrainedModel find_trained_model(const World& world, const std::string& from, const Warn& warn) {
  TrainedModel model;
  std::string kind;
  collectively(world, [&] {
    if (world.rank() != 0) return;
    kind = fs::exists(fs::path(from) / "config.json") ? "folder"
           : fs::is_directory(from)                   ? "checkpoints"
           : fs::exists(from)                         ? "checkpoint"
                                                      : "";
    if (kind.empty()) fail_usage("{}: no such checkpoint or folder", from);
  });
  kind = world.broadcast(kind, 0);
  model.is_checkpoint = kind != "folder";
  model.path = kind == "checkpoints" ? newest_checkpoint(world, from, warn) : from;
  collectively(world, [&] {
    if (model.is_checkpoint)
      describe_checkpoint_model(model);
    else
      describe_folder_model(model);
  });
  return model;
}

void generate(const TrainedModel& from, const GenerateOptions& options, World& world,
              Backend& backend, const Warn& warn,
              const std::function<void(int64_t sample, int32_t id)>& use) {
  std::unique_ptr<HfWeights> folder;
  collectively(world, [&] {
    require_usable(from, options);
    if (from.is_checkpoint) return;
    folder = std::make_unique<HfWeights>(from.path);
    folder->require(all_params(from.config));
  });
  FsdpOptions fsdp;
  fsdp.param_dtype = options.param_dtype;
  fsdp.forward_only = true;
  const int64_t needed = static_cast<int64_t>(options.prompt.size()) + options.tokens - 1;
  const int64_t T = std::min(options.window > 0 ? options.window : from.context, needed);
  Sharding sharding = make_sharding(options.transport, fsdp, world, backend);
  Qwen3Model model(from.config, fsdp, 1, T, sharding, backend);
  load_weights(from, world, backend, model, folder.get(), warn);

  Sampling sampling(options, world, model);
  for (int64_t first = 0; first < options.samples; first += world.size()) {
    const std::vector<int32_t> own = sampling.run(first + world.rank(), [&](int32_t id) {
      if (world.rank() == 0) use(first, id);
    });
    const auto all = world.gather(fmt::format("{}", fmt::join(own, " ")));  // empty but on rank 0
    for (size_t rank = 1; rank < all.size(); ++rank)
      for (int32_t id : parse_ids(all[rank])) use(first + static_cast<int64_t>(rank), id);
  }
}

}  // namespace qshard
