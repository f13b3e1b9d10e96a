#include <algorithm>
#include <bit>
#include <chrono>
#include <ctime>
#include <filesystem>

#include "io/checkpoint_format.h"
#include "io/file.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kWriteBytes = 2 << 20;  // of one independent write

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
  CheckpointHeader header;
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
// more calls than bytes, which are made while the disk takes in the large ones. meanwhile() is
// called before this rank waits for the disk.
void write_own_rows(Hdf5File& file, const SaveOptions& options,
                    std::vector<CheckpointTensor> tensors, Staging& staging,
                    const std::function<void()>& meanwhile) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.shape.numel() > b.shape.numel(); });
  WriteBehind disk(file.path());
  for (const CheckpointTensor& t : tensors)
    for_each_piece(t, std::min(options.piece_bytes, kWriteBytes),
                   [&](int64_t first, const Tensor& rows) {
                     file.write(t.dataset, first, staging.read(rows));
                     disk.wrote(rows.bytes());
                   });
  meanwhile();
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

// meanwhile: see write_own_rows(); not called where transfers are collective.
void write_all_rows(const World& world, const std::string& path,
                    const std::vector<CheckpointTensor>& tensors, const SaveOptions& options,
                    Staging& staging, const std::function<void()>& meanwhile) {
  collectively(world, [&] {
    const std::string reason = reason_not_writable(path);
    if (!reason.empty()) fail("cannot write {}: {}", path, reason);
  });
  Hdf5File file = Hdf5File::open_parallel(path, world.comm(), options.hints, options.collective);
  for (const CheckpointTensor& t : tensors) file.keep_open(t.dataset);
  Attempts attempt;
  const auto write = [&] {
    attempt([&] { write_own_rows(file, options, tensors, staging, meanwhile); });
  };
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

std::string not_saved(int64_t step, const Error& error) {
  return fmt::format("checkpoint of step {} not saved, older ones are intact: {}", step,
                     error.what());
}

}  // namespace

SaveReport save_checkpoint(const World& world, const std::string& folder,
                           const CheckpointState& state,
                           const std::vector<CheckpointTensor>& tensors, const SaveOptions& options,
                           Staging staging) {
  const auto begin = std::chrono::steady_clock::now();
  SaveReport report;
  report.step = state.step;
  report.path = (fs::path(folder) / checkpoint_file_name(state.step)).string();
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

}  // namespace qshard
