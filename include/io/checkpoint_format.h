// What saving and loading a checkpoint share; see io/checkpoint.h for the file itself.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/checkpoint.h"

namespace qshard {

inline constexpr const char* kChecksum = "xxh3_rows";  // attribute of a dataset
inline constexpr const char *kLossScale = "loss_scale", *kGrowthTracker = "growth_tracker";

std::string checkpoint_file_name(int64_t step);  // "step-00000100.h5"
// Whether this is the name of a file that save_checkpoint() was writing.
bool is_temporary_name(const std::string& name);

// The root attributes, with a checksum over them all: HDF5's own protect its structures against a
// bad disk, not one attribute against an edit.
struct CheckpointHeader {
  std::map<std::string, int64_t> numbers;
  std::map<std::string, std::string> texts;

  CheckpointHeader();  // all names but those of a loss scale
  // Throws unless the file is a checkpoint of this version with an intact header.
  static CheckpointHeader read(const Hdf5File& file);
  void write(Hdf5File& file) const;
  int64_t checksum() const;
  double loss_scale(const std::string& path) const;
};

// Σ of the hashes of rows [first_row, …); unsigned arithmetic wraps, which is what is wanted.
uint64_t hash_rows(std::span<const float> values, int64_t first_row, int64_t row_numel);
// Sums over ranks modulo 2^64.
std::vector<int64_t> wrapping_sum(const World& world, const std::vector<uint64_t>& own);

int64_t piece_rows(const Shape& shape, int64_t piece_bytes);          // at least one
int64_t piece_count(const CheckpointTensor& t, int64_t piece_bytes);  // of what this rank holds

using PieceFn = std::function<void(int64_t first_row, const Tensor& rows)>;
// Calls fn for one piece after the other of what this rank holds, of `pieces` in all; those beyond
// this rank's are empty.
void for_each_piece(const CheckpointTensor& t, int64_t piece_bytes, int64_t pieces,
                    const PieceFn& fn);
void for_each_piece(const CheckpointTensor& t, int64_t piece_bytes, const PieceFn& fn);

}  // namespace qshard
