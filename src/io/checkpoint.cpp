#include "io/checkpoint.h"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <set>

#include "base/config.h"
#include "io/file.h"
#include "io/hdf5_file.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "qshard-checkpoint";
constexpr int64_t kVersion = 1;
constexpr const char* kChecksum = "xxh3_rows";

std::string file_name(int64_t step) { return fmt::format("step-{:08}.h5", step); }

// Σ of the hashes of rows [first_row, …); unsigned arithmetic wraps, which is what is wanted.
uint64_t hash_rows(const float* values, int64_t first_row, int64_t rows, int64_t row_numel) {
  uint64_t sum = 0;
  for (int64_t r = 0; r < rows; ++r)
    sum += XXH3_64bits_withSeed(values + r * row_numel, row_numel * sizeof(float),
                                static_cast<uint64_t>(first_row + r));
  return sum;
}

// Sums over ranks modulo 2^64; in two halves they do not overflow on the way.
std::vector<int64_t> wrapping_sum(const World& world, const std::vector<int64_t>& own) {
  std::vector<int64_t> halves, sums;
  for (int64_t value : own) {
    halves.push_back(static_cast<int64_t>(static_cast<uint64_t>(value) >> 32));
    halves.push_back(value & 0xffffffff);
  }
  world.all_reduce_sum(halves.data(), static_cast<int>(halves.size()));
  for (size_t i = 0; i < own.size(); ++i)
    sums.push_back(static_cast<int64_t>((static_cast<uint64_t>(halves[2 * i]) << 32) +
                                        static_cast<uint64_t>(halves[2 * i + 1])));
  return sums;
}

// One checksum a tensor, over all ranks.
std::vector<int64_t> checksums(const World& world, const std::vector<CheckpointTensor>& tensors) {
  std::vector<int64_t> own;
  for (const CheckpointTensor& t : tensors) {
    const int64_t row = t.shape.row_numel();
    const int64_t rows = t.rows.numel() / row;
    own.push_back(static_cast<int64_t>(hash_rows(t.rows.as<float>(), t.first_row, rows, row)));
  }
  return wrapping_sum(world, own);
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

void create_structure(const World& world, const std::string& path, const CheckpointState& state,
                      const std::vector<CheckpointTensor>& tensors, const std::vector<int64_t>& sums,
                      int64_t alignment) {
  Hdf5File file = Hdf5File::create_aligned(path, alignment);
  file.write_attribute("format", kFormat);
  file.write_attribute("version", kVersion);
  file.write_attribute("step", state.step);
  file.write_attribute("updates", state.updates);
  file.write_attribute("samples", state.samples);
  file.write_attribute("epoch", state.epoch);
  file.write_attribute("seed", static_cast<int64_t>(state.seed));
  file.write_attribute("model_config", state.model.dump());
  file.write_attribute("run_config", state.run.dump());
  file.write_attribute("libraries", fmt::format("{}, {}", hdf5_version(), world.mpi_version()));
  file.write_attribute("world_size", int64_t{world.size()});
  file.write_attribute("written_at", now_text());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const CheckpointTensor& t = tensors[i];
    file.create_dataset(t.dataset, Hdf5Type::f32, {t.shape.begin(), t.shape.end()});
    file.write_attribute(kChecksum, sums[i], t.dataset);
  }
  file.close();
}

// Independent transfers: this rank's rows in pieces. Collective ones: every rank makes as many calls.
void write_rows(Hdf5File& file, const CheckpointTensor& t, int64_t piece_rows, int64_t pieces) {
  const int64_t row = t.shape.row_numel(), rows = t.rows.numel() / row;
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t begin = std::min(p * piece_rows, rows), end = std::min(begin + piece_rows, rows);
    const Tensor piece = t.rows.row_range(begin * row, end * row);
    file.write(t.dataset, t.first_row + begin, std::span<const float>(piece.as<float>(), piece.numel()));
  }
}

// The collective close must be reached by all ranks, also by one that could not write.
void write_all_rows(const World& world, const std::string& path, const std::vector<CheckpointTensor>& tensors,
                    const SaveOptions& options) {
  std::string problem;
  {
    Hdf5File file = Hdf5File::open_parallel(path, world.comm(), options.hints, options.collective);
    try {
      for (const CheckpointTensor& t : tensors) {
        const int64_t row = t.shape.row_numel(), chunk = (t.shape[0] + world.size() - 1) / world.size();
        const int64_t piece_rows = std::max<int64_t>(1, options.piece_bytes / (row * int64_t{sizeof(float)}));
        const int64_t rows = options.collective ? chunk : t.rows.numel() / row;
        write_rows(file, t, piece_rows, (rows + piece_rows - 1) / piece_rows);
      }
    } catch (const std::exception& error) {
      problem = error.what();
    }
    try {
      file.close();
    } catch (const std::exception& error) {
      if (problem.empty()) problem = error.what();
    }
  }
  collectively(world, [&] {
    if (!problem.empty()) fail("{}", problem);
  });
}

// Complete checkpoints beyond the newest keep_last go, unless their step is a multiple of keep_every.
// Only files that this program would resume from count, and nothing else is touched.
void delete_old(const std::string& folder, const SaveOptions& options) {
  if (options.keep_last == 0) return;
  int64_t kept = 0;
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    if (!entry.problem.empty()) continue;
    if (options.keep_every > 0 && entry.step % options.keep_every == 0) continue;
    if (++kept > options.keep_last) fs::remove(entry.path);
  }
}

// What is wrong with a dataset for a tensor of this shape; empty: nothing.
std::string mismatch(const Hdf5File& file, const CheckpointTensor& t) {
  if (!file.contains(t.dataset)) return fmt::format("dataset {} is missing", t.dataset);
  const Hdf5Dataset found = file.dataset(t.dataset);
  const Shape shape(found.shape.begin(), found.shape.end());
  if (!(shape == t.shape))
    return fmt::format("{} expected shape {}, found {}", t.dataset, t.shape.str(), shape.str());
  if (found.type != Hdf5Type::f32) return fmt::format("{} expected f32, found {}", t.dataset, found.type_text);
  if (!file.has_attribute(kChecksum, t.dataset)) return fmt::format("{} has no checksum", t.dataset);
  return "";
}

void check_structure(const Hdf5File& file, const std::vector<CheckpointTensor>& tensors, bool model_only) {
  std::set<std::string> wanted;
  for (const CheckpointTensor& t : tensors) {
    wanted.insert(t.dataset);
    if (const std::string problem = mismatch(file, t); !problem.empty()) fail("{}: {}", file.path(), problem);
  }
  for (const std::string& name : file.datasets())
    if (!wanted.count(name) && (!model_only || name.starts_with("/model/")))
      fail("{}: dataset {} does not belong to this model", file.path(), name);
}

}  // namespace

SaveReport save_checkpoint(const World& world, const std::string& folder, const CheckpointState& state,
                           const std::vector<CheckpointTensor>& tensors, const SaveOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  SaveReport report;
  report.step = state.step;
  report.path = (fs::path(folder) / file_name(state.step)).string();
  const std::string temporary = report.path + ".tmp";
  for (const CheckpointTensor& t : tensors) report.bytes += t.shape.numel() * int64_t{sizeof(float)};
  const std::vector<int64_t> sums = checksums(world, tensors);
  try {
    collectively(world, [&] {
      if (world.rank() != 0) return;
      fs::create_directories(folder);
      create_structure(world, temporary, state, tensors, sums, options.alignment);
      reserve_space(temporary);
    });
    write_all_rows(world, temporary, tensors, options);
    collectively(world, [&] { flush_to_disk(temporary); });
    collectively(world, [&] {
      if (world.rank() != 0) return;
      publish_file(temporary, report.path);
      delete_old(folder, options);
    });
  } catch (const AgreedError& error) {
    std::error_code ignored;
    if (world.rank() == 0) fs::remove(temporary, ignored);
    throw AgreedError(fmt::format("checkpoint of step {} not saved, older ones are intact: {}", state.step, error.what()),
                      error.code);
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

void load_checkpoint(const World& world, const std::string& path, const std::vector<CheckpointTensor>& tensors,
                     bool model_only) {
  std::vector<int64_t> stored;
  collectively(world, [&] {
    read_checkpoint_state(path);
    const Hdf5File file = Hdf5File::open(path);
    check_structure(file, tensors, model_only);
    for (const CheckpointTensor& t : tensors) {
      file.read(t.dataset, t.first_row, std::span<float>(t.rows.as<float>(), t.rows.numel()));
      stored.push_back(file.int_attribute(kChecksum, t.dataset));
    }
  });
  const std::vector<int64_t> found = checksums(world, tensors);
  collectively(world, [&] {
    for (size_t i = 0; i < tensors.size(); ++i)
      if (found[i] != stored[i])
        fail("{}: {} is damaged: checksum {:016x} expected, {:016x} found; use an earlier checkpoint", path,
             tensors[i].dataset, stored[i], found[i]);
  });
}

CheckpointState read_checkpoint_state(const std::string& path) {
  const Hdf5File file = Hdf5File::open(path);
  if (!file.has_attribute("format") || file.text_attribute("format") != kFormat)
    fail("{}: not a checkpoint: expected attribute format = {}", path, kFormat);
  if (const int64_t version = file.int_attribute("version"); version != kVersion)
    fail("{}: checkpoint version {}, this program reads {}", path, version, kVersion);
  CheckpointState state;
  state.step = file.int_attribute("step");
  state.updates = file.int_attribute("updates");
  state.samples = file.int_attribute("samples");
  state.epoch = file.int_attribute("epoch");
  state.seed = static_cast<uint64_t>(file.int_attribute("seed"));
  state.world_size = static_cast<int>(file.int_attribute("world_size"));
  state.model = parse_json(file.text_attribute("model_config"), path + ": model_config");
  state.run = parse_json(file.text_attribute("run_config"), path + ": run_config");
  return state;
}

std::vector<CheckpointEntry> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointEntry> entries;
  if (!fs::is_directory(folder)) return entries;
  for (const fs::directory_entry& item : fs::directory_iterator(folder)) {
    if (item.path().extension() != ".h5" || !item.is_regular_file()) continue;
    CheckpointEntry entry{item.path().string(), -1, static_cast<int64_t>(item.file_size()), ""};
    try {
      entry.step = read_checkpoint_state(entry.path).step;
    } catch (const std::exception& error) {
      entry.problem = error.what();
    }
    entries.push_back(entry);
  }
  std::sort(entries.begin(), entries.end(), [](const CheckpointEntry& a, const CheckpointEntry& b) {
    return a.step != b.step ? a.step > b.step : a.path < b.path;
  });
  return entries;
}

std::vector<std::string> verify_checkpoint(const World& world, const std::string& path) {
  std::vector<CheckpointTensor> tensors;
  std::vector<std::vector<float>> memory;
  std::vector<std::string> damaged;
  std::vector<int64_t> sums, stored;
  collectively(world, [&] {
    read_checkpoint_state(path);
    const Hdf5File file = Hdf5File::open(path);
    for (const std::string& name : file.datasets()) {
      const Hdf5Dataset info = file.dataset(name);
      CheckpointTensor t{name, Shape(info.shape.begin(), info.shape.end()), 0, {}};
      if (const std::string problem = mismatch(file, t); !problem.empty()) fail("{}: {}", path, problem);
      const int64_t row = t.shape.row_numel(), chunk = (t.shape[0] + world.size() - 1) / world.size();
      const int64_t begin = std::min(world.rank() * chunk, t.shape[0]), end = std::min(begin + chunk, t.shape[0]);
      memory.assign(1, std::vector<float>((end - begin) * row));
      file.read(name, begin, std::span<float>(memory[0]));
      sums.push_back(static_cast<int64_t>(hash_rows(memory[0].data(), begin, end - begin, row)));
      stored.push_back(file.int_attribute(kChecksum, name));
      tensors.push_back(t);
    }
  });
  sums = wrapping_sum(world, sums);
  for (size_t i = 0; i < tensors.size(); ++i)
    if (sums[i] != stored[i]) damaged.push_back(tensors[i].dataset);
  return damaged;
}

std::string find_checkpoint(const World& world, const std::string& folder,
                            const std::function<void(const std::string&)>& warn) {
  std::vector<CheckpointEntry> entries;
  std::string joined;  // candidates as rank 0 sees them, newest first, one a line
  if (world.rank() == 0) {
    entries = list_checkpoints(folder);
    for (const CheckpointEntry& entry : entries) {
      if (entry.problem.empty())
        joined += entry.path + "\n";
      else
        warn(fmt::format("skipped: {}", entry.problem));
    }
  }
  int64_t seen = static_cast<int64_t>(entries.size());
  world.all_reduce_sum(&seen, 1);
  joined = world.broadcast(joined, 0);
  for (size_t at = 0; at < joined.size();) {
    const size_t end = joined.find('\n', at);
    const std::string path = joined.substr(at, end - at);
    at = end + 1;
    // A rank that cannot see the file stops the job; damage leads to the one before.
    collectively(world, [&] {
      if (!fs::exists(path)) fail("{} is not visible here, rank 0 sees it: use a shared folder", path);
    });
    std::string problem;
    try {
      const std::vector<std::string> damaged = verify_checkpoint(world, path);
      if (damaged.empty()) return path;
      problem = fmt::format("{}: wrong checksum of {}", path, fmt::join(damaged, ", "));
    } catch (const AgreedError& error) {
      problem = error.what();
    }
    if (world.rank() == 0) warn(fmt::format("skipped: {}", problem));
  }
  if (seen > 0)
    throw AgreedError(fmt::format("{} has {} checkpoint file(s), none of them usable: restore one, or remove them to "
                                  "start anew", folder, seen));
  return "";
}

}  // namespace qshard
