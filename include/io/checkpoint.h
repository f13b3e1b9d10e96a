// Sharded checkpoints: one HDF5 file a step, written by all ranks, read by any number of ranks.
//
// [Note: Checkpoint file] `step-00000100.h5`. Datasets of the full global shape, f32, contiguous:
//   /model/<name>, /optim/exp_avg/<name>, /optim/exp_avg_sq/<name>   Hugging Face names
// each with an attribute `xxh3_rows`: Σ over rows of XXH3-64(bytes of the row, seed = row index),
// modulo 2^64, so that ranks with any rows can compute and check it together. Root attributes:
// format "qshard-checkpoint", version 1, step (optimizer steps completed: a resumed run starts with
// step+1), updates (AdamW's step count), samples (consumed so far), epoch, seed, datasets (their
// number), model_config, run_config (JSON), libraries, world_size, written_at; `xxh3_header`:
// XXH3-64 of all these, one "name=value\n" after the other, integers first, each kind in
// alphabetical order. The first rank creates the structure, so that it does not depend on the
// ranks; all ranks then write their rows. Padding never enters the file. No random state is needed:
// initial values and sample order are functions of seed, name, epoch and index. A run with fp16
// parameters also has `loss_scale`, a number as text, and `growth_tracker` ([Note: Loss scaling]);
// they are optional.
//
// [Note: Saving] structure under a temporary name, while all ranks but rank 0, whose turn is while
// the disk is busy, work out checksums → rows, which the disk takes in while more are written →
// close → checksums → fsync → all ranks agree → rename → fsync of the folder → only then older
// ones, and what killed saves have left, are deleted. A file under its own name is complete; a
// failed save leaves the older ones alone and removes its temporary file. The space of deleted
// files is freed behind training.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "comm/world.h"
#include "device/staging.h"
#include "io/hdf5_file.h"
#include "tensor/tensor.h"

namespace qshard {

// Of the datasets: a group and a parameter's name.
inline constexpr const char *kModelGroup = "/model/", *kExpAvgGroup = "/optim/exp_avg/",
                            *kExpAvgSqGroup = "/optim/exp_avg_sq/";
inline constexpr std::string_view kCheckpointGroups[] = {kModelGroup, kExpAvgGroup, kExpAvgSqGroup};

// What this rank holds of one tensor: rows [first_row, first_row + n) of dimension 0, f32, in the
// host's memory or that of the device whose Staging goes with them.
struct CheckpointTensor {
  std::string dataset;  // "/model/model.norm.weight"
  Shape shape;          // global
  int64_t first_row = 0;
  Tensor rows;  // [n · elements of a row]
};

struct CheckpointState {
  int64_t step = 0, updates = 0, samples = 0, epoch = 0;
  uint64_t seed = 0;
  double loss_scale = 0;       // 0: the run has none
  int64_t growth_tracker = 0;  // goes with it
  nlohmann::json model, run;   // Hugging Face config; settings of the run
  int world_size = 0;          // that wrote it
};

struct SaveOptions {
  bool collective = false;          // MPI-IO transfers; scripts/bench_checkpoint.py compares
  int64_t piece_bytes = 512 << 20;  // of one transfer, below MPI-IO's 2 GiB; at least one row
  int64_t alignment = 4096;         // of large datasets in the file, bytes; a stripe on Lustre
  std::string hints;                // MPI-IO hints, "striping_factor=8,striping_unit=4194304"
  int64_t keep_last = 2;            // this one and the newest of the others stay; 0: all
  int64_t keep_every = 0;           // and every step that is a multiple of this
};

struct SaveReport {
  std::string path;
  int64_t step = 0;
  int64_t bytes = 0;  // of tensors
  double seconds = 0;
  std::string warning;  // on rank 0: an old file that could not be deleted
};

// Collective over `world`, whose communicators nothing else uses meanwhile. A failure on any rank
// is one AgreedError that lists ranks and reasons; values that are not finite are one. Only a
// collective transfer that fails on some ranks of several is an Error of those: the job has to end.
// Stages one transfer at a time.
SaveReport save_checkpoint(const World& world, const std::string& folder,
                           const CheckpointState& state,
                           const std::vector<CheckpointTensor>& tensors, const SaveOptions& options,
                           Staging staging = {});

// Collective: every rank reads its rows of all tensors. Strict: a missing, extra, renamed or
// reshaped dataset, another dtype or a wrong checksum is an AgreedError that names it. model_only:
// just /model.
void load_checkpoint(const World& world, const std::string& path,
                     const std::vector<CheckpointTensor>& tensors, bool model_only,
                     Staging staging = {});

// Header only; throws when the file is not a complete checkpoint of this version.
CheckpointState read_checkpoint_state(const std::string& path);

// The shape of a checkpoint's dataset. Throws unless it is f32, of the expected shape if one is
// given, and its bytes all lie in the file: whatever that says, memory for it is worth having.
Shape require_tensor(const Hdf5File& file, const std::string& name,
                     const std::optional<Shape>& expected = std::nullopt);

struct CheckpointEntry {
  std::string path;
  int64_t step = -1;  // from inside the file; -1: not usable
  int64_t bytes = 0;
  std::string problem;  // empty: the header is good
};

// Files *.h5 of a folder, by step, newest first; then unusable ones, among them the step-*.h5.tmp
// of saves that were killed. Throws when the folder cannot be read; one that does not exist is
// empty.
std::vector<CheckpointEntry> list_checkpoints(const std::string& folder);

// What a checkpoint's checksums say. Collective; rows are dealt out over the ranks. Returns the
// names of damaged datasets.
std::vector<std::string> verify_checkpoint(const World& world, const std::string& path);

// The newest complete checkpoint of a folder whose checksums hold, decided by rank 0's listing and
// confirmed by all ranks; damaged ones are reported through `warn` on rank 0 and skipped. Empty
// when the folder has none, or only unfinished saves; an AgreedError when all it has are damaged.
std::string find_checkpoint(const World& world, const std::string& folder,
                            const std::function<void(const std::string&)>& warn);

}  // namespace qshard
