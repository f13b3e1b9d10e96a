#include "io/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <sstream>

#include "base/config.h"
#include "io/checkpoint_format.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kReadBytes = 64 << 20;  // of one read: enough for the full rate of a disk

Shape shape_of(const Hdf5Dataset& d) { return Shape(d.shape.begin(), d.shape.end()); }

int64_t stored_checksum(const Hdf5File& file, const std::string& name) {
  if (!file.has_attribute(kChecksum, name)) fail("{}: {} has no checksum", file.path(), name);
  return file.int_attribute(kChecksum, name);
}

// Strict: exactly these datasets.
void check_structure(const Hdf5File& file, const std::vector<CheckpointTensor>& tensors,
                     bool model_only) {
  std::set<std::string> wanted;
  for (const CheckpointTensor& t : tensors) {
    wanted.insert(t.dataset);
    require_tensor(file, t.dataset, t.shape);
  }
  for (const std::string& name : file.datasets())
    if (!wanted.count(name) && (!model_only || name.starts_with(kModelGroup)))
      fail("{}: dataset {} does not belong to this model", file.path(), name);
}

// Reads what this rank holds of a tensor. Returns its part of the checksum.
uint64_t read_rows(const Hdf5File& file, const CheckpointTensor& t, Staging& staging) {
  uint64_t sum = 0;
  for_each_piece(t, kReadBytes, [&](int64_t first, const Tensor& rows) {
    staging.write(rows, [&](std::span<float> values) {
      file.read(t.dataset, first, values);
      sum += hash_rows(values, first, t.shape.row_numel());
    });
  });
  return sum;
}

// What can be said without the model: there are as many datasets as were written. Weights and
// moments are of the same tensors, which tells the missing one's name.
void require_all_present(const Hdf5File& file, const std::vector<std::string>& names) {
  const int64_t written = CheckpointHeader::read(file).numbers["datasets"];
  if (static_cast<int64_t>(names.size()) == written) return;
  std::set<std::string> missing;
  for (const std::string& name : names)
    for (const std::string_view group : kCheckpointGroups)
      if (name.starts_with(group))
        for (const std::string_view other : kCheckpointGroups)
          missing.insert(std::string(other) + name.substr(group.size()));
  for (const std::string& name : names) missing.erase(name);
  fail("{}: {} datasets expected, {} found{}{}", file.path(), written, names.size(),
       missing.empty() ? "" : "; missing: ", fmt::join(missing, ", "));
}

}  // namespace

Shape require_tensor(const Hdf5File& file, const std::string& name,
                     const std::optional<Shape>& expected) {
  if (!file.contains(name)) fail("{}: dataset {} is missing", file.path(), name);
  const Hdf5Dataset d = file.dataset(name);
  if (d.type != Hdf5Type::f32)
    fail("{}: {} expected f32, found {}", file.path(), name, d.type_text);
  if (d.shape.empty() || d.shape.size() > 4)
    fail("{}: {} expected 1 to 4 dimensions, found {}", file.path(), name, d.shape.size());
  if (expected && !(shape_of(d) == *expected))
    fail("{}: {} expected shape {}, found {}", file.path(), name, expected->str(),
         shape_of(d).str());
  int64_t bytes = sizeof(float);
  for (int64_t n : d.shape)
    if (n < 1 || __builtin_mul_overflow(bytes, n, &bytes))
      fail("{}: {} has a dimension of {}", file.path(), name, n);
  const auto size = static_cast<int64_t>(fs::file_size(file.path()));
  if (!d.contiguous || d.file_offset == 0 || bytes > size - d.file_offset)
    fail("{}: {} expected {} contiguous bytes, found {} at byte {} of a file of {}", file.path(),
         name, bytes, d.layout, d.file_offset, size);
  return shape_of(d);
}

void load_checkpoint(const World& world, const std::string& path,
                     const std::vector<CheckpointTensor>& tensors, bool model_only,
                     Staging staging) {
  std::vector<uint64_t> own;
  std::vector<int64_t> stored;
  collectively(world, [&] {
    read_checkpoint_state(path);
    const Hdf5File file = Hdf5File::open(path);
    check_structure(file, tensors, model_only);
    for (const CheckpointTensor& t : tensors) {
      own.push_back(read_rows(file, t, staging));
      stored.push_back(stored_checksum(file, t.dataset));
    }
  });
  const std::vector<int64_t> found = wrapping_sum(world, own);
  collectively(world, [&] {
    for (size_t i = 0; i < tensors.size(); ++i)
      if (found[i] != stored[i])
        fail(
            "{}: {} is damaged: checksum {:016x} expected, {:016x} found; use an earlier "
            "checkpoint",
            path, tensors[i].dataset, static_cast<uint64_t>(stored[i]),
            static_cast<uint64_t>(found[i]));
  });
}

CheckpointState read_checkpoint_state(const std::string& path) {
  CheckpointHeader header = CheckpointHeader::read(Hdf5File::open(path));
  CheckpointState state;
  state.step = header.numbers["step"];
  state.updates = header.numbers["updates"];
  state.samples = header.numbers["samples"];
  state.epoch = header.numbers["epoch"];
  state.seed = static_cast<uint64_t>(header.numbers["seed"]);
  state.world_size = static_cast<int>(header.numbers["world_size"]);
  if (header.texts.contains(kLossScale)) {
    state.loss_scale = header.loss_scale(path);
    state.growth_tracker = header.numbers[kGrowthTracker];
  }
  state.model = parse_json(header.texts["model_config"], path + ": model_config");
  state.run = parse_json(header.texts["run_config"], path + ": run_config");
  return state;
}

std::vector<CheckpointEntry> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointEntry> entries;
  std::error_code error;
  if (!fs::is_directory(folder, error)) return entries;
  for (const fs::directory_entry& item : fs::directory_iterator(folder)) {
    const std::string name = item.path().filename().string();
    const bool temporary = is_temporary_name(name);
    if ((item.path().extension() != ".h5" && !temporary) || !item.is_regular_file(error)) continue;
    const auto bytes = item.file_size(error);
    if (error) continue;  // it has gone since
    CheckpointEntry entry{item.path().string(), -1, static_cast<int64_t>(bytes), ""};
    try {
      if (temporary) fail("{}: an unfinished save, it may be deleted", entry.path);
      entry.step = read_checkpoint_state(entry.path).step;
    } catch (const std::exception& reason) {
      entry.problem = reason.what();
    }
    entries.push_back(entry);
  }
  std::sort(entries.begin(), entries.end(), [](const CheckpointEntry& a, const CheckpointEntry& b) {
    return a.step != b.step ? a.step > b.step : a.path < b.path;
  });
  return entries;
}

std::vector<std::string> verify_checkpoint(const World& world, const std::string& path) {
  std::vector<std::string> names, damaged;
  std::vector<uint64_t> own;
  std::vector<int64_t> stored;
  collectively(world, [&] {
    const Hdf5File file = Hdf5File::open(path);
    names = file.datasets();
    require_all_present(file, names);
    std::vector<float> values;
    for (const std::string& name : names) {
      const Shape shape = require_tensor(file, name);
      const int64_t begin = shape[0] * world.rank() / world.size();
      const int64_t end = shape[0] * (world.rank() + 1) / world.size();
      const int64_t row = shape.row_numel(), step = piece_rows(shape, kReadBytes);
      uint64_t sum = 0;
      for (int64_t at = begin; at < end; at += step) {
        values.resize(static_cast<size_t>(std::min(step, end - at) * row));
        file.read(name, at, std::span<float>(values));
        sum += hash_rows(values, at, row);
      }
      own.push_back(sum);
      stored.push_back(stored_checksum(file, name));
    }
  });
  const std::vector<int64_t> sums = wrapping_sum(world, own);
  for (size_t i = 0; i < names.size(); ++i)
    if (sums[i] != stored[i]) damaged.push_back(names[i]);
  return damaged;
}

std::string find_checkpoint(const World& world, const std::string& folder,
                            const std::function<void(const std::string&)>& warn) {
  std::string candidates;  // as rank 0 sees them, newest first, one a line
  int64_t seen = 0;        // damaged ones included, unfinished saves not
  auto skip = [&](const std::string& problem) {
    if (world.rank() == 0) warn("skipped: " + problem);
  };
  collectively(world, [&] {
    if (world.rank() != 0) return;
    for (const CheckpointEntry& entry : list_checkpoints(folder)) {
      if (!entry.path.ends_with(".tmp")) ++seen;
      if (entry.problem.empty())
        candidates += entry.path + "\n";
      else
        skip(entry.problem);
    }
  });
  world.all_reduce_sum(&seen, 1);
  std::istringstream lines(world.broadcast(candidates, 0));
  for (std::string path; std::getline(lines, path);) {
    // A rank that cannot see the file stops the job; damage leads to the one before.
    collectively(world, [&] {
      std::error_code error;
      if (!fs::exists(path, error))
        fail("{} is not visible here, rank 0 sees it: use a shared folder", path);
    });
    try {
      const std::vector<std::string> damaged = verify_checkpoint(world, path);
      if (damaged.empty()) return path;
      skip(fmt::format("{}: wrong checksum of {}", path, fmt::join(damaged, ", ")));
    } catch (const AgreedError& error) {
      skip(error.what());
    }
  }
  if (seen > 0)
    throw AgreedError(
        fmt::format("{} has {} checkpoint file(s), none of them usable: restore one, "
                    "or remove them to start anew",
                    folder, seen));
  return "";
}

}  // namespace qshard
