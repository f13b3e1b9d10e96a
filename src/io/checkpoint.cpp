#include "io/checkpoint.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <charconv>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "base/config.h"
#include "io/file.h"
#include "io/hdf5_file.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "qshard-checkpoint";
constexpr int64_t kVersion = 1;
constexpr const char* kChecksum = "xxh3_rows";
const std::string kGroups[] = {"/model/", "/optim/exp_avg/", "/optim/exp_avg_sq/"};
constexpr const char* kHeaderChecksum = "xxh3_header";
constexpr const char *kLossScale = "loss_scale", *kGrowthTracker = "growth_tracker";
constexpr int64_t kReadBytes = 64 << 20;  // of one read: enough for the full rate of a disk
constexpr int64_t kWriteBytes = 2 << 20;  // of one independent write

std::string file_name(int64_t step) { return fmt::format("step-{:08}.h5", step); }

// Whether this is the name of a file that save_checkpoint() was writing.
bool is_temporary_name(const std::string& name) {
  const std::string prefix = "step-", suffix = ".h5.tmp";
  if (!name.starts_with(prefix) || !name.ends_with(suffix)) return false;
  const size_t digits = name.size() - std::min(name.size(), prefix.size() + suffix.size());
  return digits >= 8 &&
         name.find_first_not_of("0123456789", prefix.size()) == prefix.size() + digits;
}

// The root attributes, with a checksum over them all: HDF5's own protect its structures against a
// bad disk, not one attribute against an edit.
struct Header {
  std::map<std::string, int64_t> numbers = {{"version", kVersion}, {"step", 0},    {"updates", 0},
                                            {"samples", 0},        {"epoch", 0},   {"seed", 0},
                                            {"world_size", 0},     {"datasets", 0}};
  std::map<std::string, std::string> texts = {{"format", kFormat},
                                              {"model_config", ""},
                                              {"run_config", ""},
                                              {"libraries", ""},
                                              {"written_at", ""}};

  int64_t checksum() const {
    std::string all;
    for (const auto& [name, value] : numbers) all += fmt::format("{}={}\n", name, value);
    for (const auto& [name, value] : texts) all += fmt::format("{}={}\n", name, value);
    return static_cast<int64_t>(XXH3_64bits(all.data(), all.size()));
  }
  void write(Hdf5File& file) const {
    for (const auto& [name, value] : numbers) file.write_attribute(name, value);
    for (const auto& [name, value] : texts) file.write_attribute(name, value);
    file.write_attribute(kHeaderChecksum, checksum());
  }
  double loss_scale(const std::string& path) const;
  // Throws unless the file is a checkpoint of this version with an intact header.
  static Header read(const Hdf5File& file);
};

double Header::loss_scale(const std::string& path) const {
  const std::string& text = texts.at(kLossScale);
  double scale = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), scale).ptr;
  if (end != text.data() + text.size() || !(scale >= 1 && scale <= FLT_MAX))
    fail("{}: {} is '{}', expected a number from 1 to {:g}", path, kLossScale, text, FLT_MAX);
  return scale;
}

Header Header::read(const Hdf5File& file) {
  if (!file.has_attribute("format") || file.text_attribute("format") != kFormat)
    fail("{}: not a checkpoint: expected attribute format = {}", file.path(), kFormat);
  if (const int64_t version = file.int_attribute("version"); version != kVersion)
    fail("{}: checkpoint version {}, this program reads {}", file.path(), version, kVersion);
  Header header;
  if (file.has_attribute(kLossScale))
    header.texts[kLossScale] = "", header.numbers[kGrowthTracker] = 0;
  for (auto& [name, value] : header.numbers) value = file.int_attribute(name);
  for (auto& [name, value] : header.texts) value = file.text_attribute(name);
  if (const int64_t stored = file.int_attribute(kHeaderChecksum); stored != header.checksum())
    fail(
        "{}: the header is damaged: checksum {:016x} expected, {:016x} found; use an earlier "
        "checkpoint",
        file.path(), static_cast<uint64_t>(stored), static_cast<uint64_t>(header.checksum()));
  return header;
}

// Σ of the hashes of rows [first_row, …); unsigned arithmetic wraps, which is what is wanted.
uint64_t hash_rows(std::span<const float> values, int64_t first_row, int64_t row_numel) {
  const auto row = static_cast<size_t>(row_numel);
  uint64_t sum = 0, index = static_cast<uint64_t>(first_row);
  for (size_t at = 0; at < values.size(); at += row)
    sum += XXH3_64bits_withSeed(values.data() + at, row * sizeof(float), index++);
  return sum;
}

// Sums over ranks modulo 2^64; in two halves they do not overflow on the way.
std::vector<int64_t> wrapping_sum(const World& world, const std::vector<uint64_t>& own) {
  std::vector<int64_t> halves, sums;
  for (const uint64_t value : own) {
    halves.push_back(static_cast<int64_t>(value >> 32));
    halves.push_back(static_cast<int64_t>(value & 0xffffffff));
  }
  world.all_reduce_sum(halves.data(), static_cast<int>(halves.size()));
  for (size_t i = 0; i < own.size(); ++i)
    sums.push_back(static_cast<int64_t>((static_cast<uint64_t>(halves[2 * i]) << 32) +
                                        static_cast<uint64_t>(halves[2 * i + 1])));
  return sums;
}

int64_t piece_rows(const Shape& shape, int64_t piece_bytes) {
  return std::max<int64_t>(1, piece_bytes / (shape.row_numel() * int64_t{sizeof(float)}));
}

// Rows [begin, end) of those that this rank holds.
Tensor own_rows(const CheckpointTensor& t, int64_t begin, int64_t end) {
  return t.rows.row_range(begin * t.shape.row_numel(), end * t.shape.row_numel());
}

int64_t piece_count(const CheckpointTensor& t, int64_t piece_bytes) {
  const int64_t own = t.rows.numel() / t.shape.row_numel(), step = piece_rows(t.shape, piece_bytes);
  return (own + step - 1) / step;
}

using PieceFn = std::function<void(int64_t first_row, const Tensor& rows)>;

// Calls fn for one piece after the other of what this rank holds, of `pieces` in all; those beyond
// this rank's are empty.
void for_each_piece(const CheckpointTensor& t, int64_t piece_bytes, int64_t pieces,
                    const PieceFn& fn) {
  const int64_t own = t.rows.numel() / t.shape.row_numel(), step = piece_rows(t.shape, piece_bytes);
  for (int64_t p = 0; p < pieces; ++p) {
    const int64_t begin = std::min(p * step, own), end = std::min(begin + step, own);
    fn(t.first_row + begin, own_rows(t, begin, end));
  }
}

void for_each_piece(const CheckpointTensor& t, int64_t piece_bytes, const PieceFn& fn) {
  for_each_piece(t, piece_bytes, piece_count(t, piece_bytes), fn);
}

bool all_finite(std::span<const float> values) {
  uint32_t bad = 0;  // an exponent of ones: infinite or NaN
  for (const float value : values)
    bad |= (std::bit_cast<uint32_t>(value) & 0x7f800000u) == 0x7f800000u;
  return bad == 0;
}

// This rank's part of each tensor's checksum. Throws where values are not finite.
std::vector<uint64_t> checksums(const std::vector<CheckpointTensor>& tensors, int64_t piece_bytes,
                                Staging& staging) {
  std::vector<uint64_t> own(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const CheckpointTensor& t = tensors[i];
    for_each_piece(t, piece_bytes, [&](int64_t first, const Tensor& rows) {
      const std::span<const float> values = staging.read(rows);
      if (!all_finite(values)) fail("{} has values that are not finite", t.dataset);
      own[i] += hash_rows(values, first, t.shape.row_numel());
    });
  }
  return own;
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

void create_structure(const World& world, const std::string& path, const CheckpointState& state,
                      const std::vector<CheckpointTensor>& tensors, int64_t alignment) {
  Header header;
  header.numbers["step"] = state.step;
  header.numbers["updates"] = state.updates;
  header.numbers["samples"] = state.samples;
  header.numbers["epoch"] = state.epoch;
  header.numbers["seed"] = static_cast<int64_t>(state.seed);
  header.numbers["world_size"] = world.size();
  header.numbers["datasets"] = static_cast<int64_t>(tensors.size());
  header.texts["model_config"] = state.model.dump();
  header.texts["run_config"] = state.run.dump();
  header.texts["libraries"] = fmt::format("{}, {}", hdf5_version(), world.mpi_version());
  header.texts["written_at"] = now_text();
  if (state.loss_scale > 0) {
    header.texts[kLossScale] = fmt::format("{}", state.loss_scale);
    header.numbers[kGrowthTracker] = state.growth_tracker;
  }
  Hdf5File file = Hdf5File::create_aligned(path, alignment);
  header.write(file);
  for (const CheckpointTensor& t : tensors) {
    file.create_dataset(t.dataset, Hdf5Type::f32, {t.shape.begin(), t.shape.end()});
    file.write_attribute(kChecksum, 0, t.dataset);  // its place; see write_checksums()
  }
  file.close();
}

void write_checksums(const std::string& path, const std::vector<CheckpointTensor>& tensors,
                     const std::vector<int64_t>& sums) {
  Hdf5File file = Hdf5File::open_for_change(path);
  for (size_t i = 0; i < tensors.size(); ++i)
    file.set_attribute(kChecksum, sums[i], tensors[i].dataset);
  file.close();
}

// The first failure of several attempts.
class Attempts {
 public:
  void operator()(const std::function<void()>& fn) {
    try {
      fn();
    } catch (const std::exception& error) {
      if (problem_.empty()) problem_ = error.what();
    }
  }
  bool failed() const { return !problem_.empty(); }
  const std::string& problem() const { return problem_; }

 private:
  std::string problem_;
};

// The number of pieces of each tensor, the same on all ranks.
std::vector<int64_t> count_pieces(const World& world, const std::vector<CheckpointTensor>& tensors,
                                  int64_t piece_bytes) {
  std::vector<double> pieces;
  for (const CheckpointTensor& t : tensors)
    pieces.push_back(static_cast<double>(piece_count(t, piece_bytes)));
  world.all_reduce_max(pieces.data(), static_cast<int>(pieces.size()));
  return {pieces.begin(), pieces.end()};
}

std::string with_reason(const std::string& problem, const std::string& path) {
  const std::string reason = reason_not_writable(path);
  return reason.empty() ? problem : fmt::format("{}: {}", problem, reason);
}

// All ranks make the same calls, however few rows they hold.
void write_collectively(const World& world, Hdf5File& file, const SaveOptions& options,
                        const std::vector<CheckpointTensor>& tensors, Staging& staging) {
  const std::vector<int64_t> pieces = count_pieces(world, tensors, options.piece_bytes);
  try {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const CheckpointTensor& t = tensors[i];
      for_each_piece(t, options.piece_bytes, pieces[i], [&](int64_t first, const Tensor& rows) {
        file.write(t.dataset, first, staging.read(rows));
      });
    }
  } catch (const std::exception& error) {
    if (world.size() == 1) throw;
    // This rank has missed exchanges inside of the transfer, in which the others wait for ever: it
    // cannot agree with them on an error, only end the job.
    file.abandon();
    fail("{}; the other ranks wait in the same collective transfer, so the job ends here",
         with_reason(error.what(), file.path()));
  }
}

// In pieces that keep the disk busy from the first one on. Large tensors first: small ones cost
// more calls than bytes, which are made while the disk takes in the large ones. fn is called before
// this rank waits for the disk.
void write_own_rows(Hdf5File& file, const SaveOptions& options,
                    std::vector<CheckpointTensor> tensors, Staging& staging,
                    const std::function<void()>& fn) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.shape.numel() > b.shape.numel(); });
  WriteBehind disk(file.path());
  for (const CheckpointTensor& t : tensors)
    for_each_piece(t, std::min(options.piece_bytes, kWriteBytes),
                   [&](int64_t first, const Tensor& rows) {
                     file.write(t.dataset, first, staging.read(rows));
                     disk.wrote(rows.bytes());
                   });
  fn();
  disk.finish();
}

// Calls fn on one rank of each node after the other.
void in_turns(const World& world, const std::function<void()>& fn) {
  double turns = world.node_size();
  world.all_reduce_max(&turns, 1);
  for (int turn = 0; turn < static_cast<int>(turns); ++turn) {
    if (turn == world.node_rank()) fn();
    world.barrier();
  }
}

// fn: see write_own_rows(); not called where transfers are collective.
void write_all_rows(const World& world, const std::string& path,
                    const std::vector<CheckpointTensor>& tensors, const SaveOptions& options,
                    Staging& staging, const std::function<void()>& fn) {
  collectively(world, [&] {
    const std::string reason = reason_not_writable(path);
    if (!reason.empty()) fail("cannot write {}: {}", path, reason);
  });
  Hdf5File file = Hdf5File::open_parallel(path, world.comm(), options.hints, options.collective);
  for (const CheckpointTensor& t : tensors) file.keep_open(t.dataset);
  Attempts attempt;
  const auto write = [&] { attempt([&] { write_own_rows(file, options, tensors, staging, fn); }); };
  // A file system lets one process write to a file at a time: behind training, the others are not
  // to spend the cores on waiting for it.
  if (options.collective)
    write_collectively(world, file, options, tensors, staging);
  else if (world.in_background())
    in_turns(world, write);
  else
    write();
  attempt([&] { file.close(); });
  collectively(world, [&] {
    if (attempt.failed()) fail("{}", with_reason(attempt.problem(), path));
  });
}

// Deletes complete checkpoints beyond the newest keep_last, of which `saved` is one whatever its
// step, unless their step is a multiple of keep_every; and what killed saves have left. Nothing
// else is touched. Returns what could not be deleted, or an empty text.
std::string delete_old(const std::string& folder, const std::string& saved,
                       const SaveOptions& options) {
  std::string problem;
  auto remove = [&](const std::string& path) {
    try {
      delete_behind(path);
    } catch (const Error& error) {
      problem = error.what();
    }
  };
  try {
    int64_t kept = 1;
    for (const CheckpointEntry& entry : list_checkpoints(folder)) {
      const bool complete = entry.problem.empty(), own = entry.path == saved;
      if (is_temporary_name(fs::path(entry.path).filename().string())) remove(entry.path);
      if (!complete || own || options.keep_last == 0) continue;
      if (options.keep_every > 0 && entry.step % options.keep_every == 0) continue;
      if (++kept > options.keep_last) remove(entry.path);
    }
  } catch (const std::exception& error) {
    problem = error.what();
  }
  return problem;
}

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
    if (!wanted.count(name) && (!model_only || name.starts_with(kGroups[0])))
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

std::string not_saved(int64_t step, const Error& error) {
  return fmt::format("checkpoint of step {} not saved, older ones are intact: {}", step,
                     error.what());
}

// What can be said without the model: there are as many datasets as were written. Weights and
// moments are of the same tensors, which tells the missing one's name.
void require_all_present(const Hdf5File& file, const std::vector<std::string>& names) {
  const int64_t written = Header::read(file).numbers["datasets"];
  if (static_cast<int64_t>(names.size()) == written) return;
  std::set<std::string> missing;
  for (const std::string& name : names)
    for (const std::string& group : kGroups)
      if (name.starts_with(group))
        for (const std::string& other : kGroups) missing.insert(other + name.substr(group.size()));
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

SaveReport save_checkpoint(const World& world, const std::string& folder,
                           const CheckpointState& state,
                           const std::vector<CheckpointTensor>& tensors, const SaveOptions& options,
                           Staging staging) {
  const auto begin = std::chrono::steady_clock::now();
  SaveReport report;
  report.step = state.step;
  report.path = (fs::path(folder) / file_name(state.step)).string();
  const std::string temporary = report.path + ".tmp";
  for (const CheckpointTensor& t : tensors)
    report.bytes += t.shape.numel() * int64_t{sizeof(float)};
  try {
    std::vector<uint64_t> own;
    const auto work_out_checksums = [&] {
      if (own.empty()) own = checksums(tensors, options.piece_bytes, staging);
    };
    collectively(world, [&] {
      if (world.rank() == 0) {
        fs::create_directories(folder);
        create_structure(world, temporary, state, tensors, options.alignment);
        reserve_space(temporary);
      }
      // The others wait for rank 0 here, and rank 0 for the disk later.
      if (world.rank() > 0 || options.collective) work_out_checksums();
    });
    write_all_rows(world, temporary, tensors, options, staging, work_out_checksums);
    const std::vector<int64_t> sums = wrapping_sum(world, own);
    collectively(world, [&] { flush_to_disk(temporary); });
    collectively(world, [&] {
      if (world.rank() != 0) return;
      write_checksums(temporary, tensors, sums);
      publish_file(temporary, report.path);
      report.warning = delete_old(folder, report.path, options);
    });
  } catch (const AgreedError& error) {
    std::error_code ignored;
    if (world.rank() == 0) fs::remove(temporary, ignored);
    throw AgreedError(not_saved(state.step, error), error.code);
  } catch (const Error& error) {
    throw Error(not_saved(state.step, error), error.code);
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
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
  Header header = Header::read(Hdf5File::open(path));
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
