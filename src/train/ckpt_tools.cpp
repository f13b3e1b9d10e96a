#include "train/ckpt_tools.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <set>

#include "fsdp/shard_layout.h"
#include "io/hdf5_file.h"
#include "model/qwen3_params.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

// All datasets that the file's own config asks for, and no others.
CheckResult check_structure(const std::string& path) {
  const Qwen3Config config =
      Qwen3Config::from_json(read_checkpoint_state(path).model, path + ": model_config");
  const Hdf5File file = Hdf5File::open(path);
  CheckResult result;
  std::set<std::string> wanted;
  for (const ParamSpec& p : all_params(config)) {
    for (const std::string_view group : kCheckpointGroups) {
      const std::string name = std::string(group) + p.name;
      require_tensor(file, name, p.shape);
      wanted.insert(name);
      result.bytes += p.shape.numel() * int64_t{sizeof(float)};
    }
  }
  for (const std::string& name : file.datasets())
    if (!wanted.count(name)) fail("{}: dataset {} does not belong to this model", path, name);
  result.datasets = static_cast<int64_t>(wanted.size());
  return result;
}

Document describe_entry(const CheckpointEntry& entry) {
  if (!entry.problem.empty())
    return {{"file", entry.path},
            {"complete", false},
            {"bytes", entry.bytes},
            {"problem", entry.problem}};
  return {{"file", entry.path},
          {"complete", true},
          {"step", entry.step},
          {"bytes", entry.bytes},
          {"written_at", Hdf5File::open(entry.path).text_attribute("written_at")},
          {"ranks", read_checkpoint_state(entry.path).world_size}};
}

void compare_attributes(const CheckpointState& a, const CheckpointState& b,
                        CheckpointDifferences& found) {
  auto compare = [&](const char* name, const auto& x, const auto& y) {
    if (x != y) found.attributes.push_back(fmt::format("{}: {} → {}", name, x, y));
  };
  compare("step", a.step, b.step);
  compare("updates", a.updates, b.updates);
  compare("samples", a.samples, b.samples);
  compare("epoch", a.epoch, b.epoch);
  compare("seed", a.seed, b.seed);
  compare("loss_scale", a.loss_scale, b.loss_scale);
  compare("growth_tracker", a.growth_tracker, b.growth_tracker);
  compare("model_config", a.model.dump(), b.model.dump());
}

// Datasets of the same shape in both files.
std::vector<std::string> compare_structure(const Hdf5File& a, const Hdf5File& b,
                                           CheckpointDifferences& found) {
  const std::vector<std::string> names_a = a.datasets(), names_b = b.datasets();
  std::vector<std::string> common;
  for (const std::string& name : names_a) {
    if (!b.contains(name)) {
      found.structure.push_back(fmt::format("{} is only in {}", name, a.path()));
      continue;
    }
    const Shape x = require_tensor(a, name), y = require_tensor(b, name);
    if (x == y)
      common.push_back(name);
    else
      found.structure.push_back(fmt::format("{}: {} → {}", name, x.str(), y.str()));
  }
  for (const std::string& name : names_b)
    if (!a.contains(name))
      found.structure.push_back(fmt::format("{} is only in {}", name, b.path()));
  return common;
}

// Sums over this rank's rows; the squares are those of a − b and of a.
struct RowDifferences {
  double max_abs = 0, difference_sq = 0, a_sq = 0, elements = 0;
};

RowDifferences compare_rows(const World& world, const Hdf5File& a, const Hdf5File& b,
                            const std::string& name) {
  const Shape shape = require_tensor(a, name);
  const UnitLayout layout({{name, shape}}, world.size());
  const RowRange rows = layout[0].rows_of(world.rank());
  std::vector<float> x(rows.size() * layout[0].row_numel), y(x.size());
  a.read(name, rows.begin, std::span<float>(x));
  b.read(name, rows.begin, std::span<float>(y));
  RowDifferences sums;
  for (size_t i = 0; i < x.size(); ++i) {
    const double difference = double{x[i]} - y[i];
    sums.a_sq += double{x[i]} * x[i];
    if (std::bit_cast<uint32_t>(x[i]) == std::bit_cast<uint32_t>(y[i])) continue;
    ++sums.elements;
    sums.difference_sq += difference * difference;
    sums.max_abs =
        std::isfinite(difference) ? std::max(sums.max_abs, std::abs(difference)) : INFINITY;
  }
  return sums;
}

}  // namespace

Document list_folder(const std::string& folder) {
  if (!fs::is_directory(folder)) fail("{}: No such folder", folder);
  Document all = Document::array();
  for (const CheckpointEntry& entry : list_checkpoints(folder))
    all.push_back(describe_entry(entry));
  return all;
}

Document describe_checkpoint(const std::string& path) {
  const CheckpointState state = read_checkpoint_state(path);
  const Hdf5File file = Hdf5File::open(path);
  Document doc = {{"file", path},
                  {"bytes", fs::file_size(path)},
                  {"step", state.step},
                  {"updates", state.updates},
                  {"samples", state.samples},
                  {"epoch", state.epoch},
                  {"seed", state.seed},
                  {"written_at", file.text_attribute("written_at")},
                  {"ranks", state.world_size},
                  {"libraries", file.text_attribute("libraries")},
                  {"model_config", Document(state.model)},
                  {"run_config", Document(state.run)},
                  {"datasets", Document::array()}};
  if (state.loss_scale > 0)
    doc["loss_scale"] = state.loss_scale, doc["growth_tracker"] = state.growth_tracker;
  for (const std::string& name : file.datasets()) {
    const Hdf5Dataset d = file.dataset(name);
    doc["datasets"].push_back({{"name", name}, {"dtype", d.type_text}, {"shape", d.shape}});
  }
  return doc;
}

CheckResult check_checkpoint(const World& world, const std::string& path) {
  CheckResult result;
  collectively(world, [&] { result = check_structure(path); });
  result.damaged = verify_checkpoint(world, path);
  return result;
}

CheckpointDifferences diff_checkpoints(const World& world, const std::string& a,
                                       const std::string& b) {
  CheckpointDifferences found;
  std::vector<std::string> common;
  std::vector<double> sums, highest;
  collectively(world, [&] {
    compare_attributes(read_checkpoint_state(a), read_checkpoint_state(b), found);
    const Hdf5File file_a = Hdf5File::open(a), file_b = Hdf5File::open(b);
    common = compare_structure(file_a, file_b, found);
    for (const std::string& name : common) {
      const RowDifferences own = compare_rows(world, file_a, file_b, name);
      sums.insert(sums.end(), {own.difference_sq, own.a_sq, own.elements});
      highest.push_back(own.max_abs);
    }
  });
  world.all_reduce_sum(sums.data(), static_cast<int>(sums.size()));
  world.all_reduce_max(highest.data(), static_cast<int>(highest.size()));
  for (size_t i = 0; i < common.size(); ++i) {
    const double elements = sums[3 * i + 2];
    if (elements == 0) continue;
    double rel_l2 = std::sqrt(sums[3 * i]) / std::sqrt(sums[3 * i + 1]);
    if (std::isnan(rel_l2)) rel_l2 = sums[3 * i] == 0 ? 0 : INFINITY;  // 0/0: the signs of zeros
    found.tensors.push_back({common[i], static_cast<int64_t>(elements), highest[i], rel_l2});
  }
  std::stable_sort(found.tensors.begin(), found.tensors.end(),
                   [](const auto& x, const auto& y) { return x.rel_l2 > y.rel_l2; });
  found.compared = static_cast<int64_t>(common.size());
  return found;
}

}  // namespace qshard
