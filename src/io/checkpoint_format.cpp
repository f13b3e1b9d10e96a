#include "io/checkpoint_format.h"

#include <xxhash.h>

#include <algorithm>
#include <cfloat>
#include <charconv>

namespace qshard {
namespace {

constexpr const char* kFormat = "qshard-checkpoint";
constexpr int64_t kVersion = 1;
constexpr const char* kHeaderChecksum = "xxh3_header";

// Rows [begin, end) of those that this rank holds.
Tensor own_rows(const CheckpointTensor& t, int64_t begin, int64_t end) {
  return t.rows.row_range(begin * t.shape.row_numel(), end * t.shape.row_numel());
}

}  // namespace

std::string checkpoint_file_name(int64_t step) { return fmt::format("step-{:08}.h5", step); }

bool is_temporary_name(const std::string& name) {
  const std::string prefix = "step-", suffix = ".h5.tmp";
  if (!name.starts_with(prefix) || !name.ends_with(suffix)) return false;
  const size_t digits = name.size() - std::min(name.size(), prefix.size() + suffix.size());
  return digits >= 8 &&
         name.find_first_not_of("0123456789", prefix.size()) == prefix.size() + digits;
}

CheckpointHeader::CheckpointHeader()
    : numbers{{"version", kVersion}, {"step", 0}, {"updates", 0},    {"samples", 0},
              {"epoch", 0},          {"seed", 0}, {"world_size", 0}, {"datasets", 0}},
      texts{{"format", kFormat},
            {"model_config", ""},
            {"run_config", ""},
            {"libraries", ""},
            {"written_at", ""}} {}

CheckpointHeader CheckpointHeader::read(const Hdf5File& file) {
  if (!file.has_attribute("format") || file.text_attribute("format") != kFormat)
    fail("{}: not a checkpoint: expected attribute format = {}", file.path(), kFormat);
  if (const int64_t version = file.int_attribute("version"); version != kVersion)
    fail("{}: checkpoint version {}, this program reads {}", file.path(), version, kVersion);
  CheckpointHeader header;
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

void CheckpointHeader::write(Hdf5File& file) const {
  for (const auto& [name, value] : numbers) file.write_attribute(name, value);
  for (const auto& [name, value] : texts) file.write_attribute(name, value);
  file.write_attribute(kHeaderChecksum, checksum());
}

int64_t CheckpointHeader::checksum() const {
  std::string all;
  for (const auto& [name, value] : numbers) all += fmt::format("{}={}\n", name, value);
  for (const auto& [name, value] : texts) all += fmt::format("{}={}\n", name, value);
  return static_cast<int64_t>(XXH3_64bits(all.data(), all.size()));
}

double CheckpointHeader::loss_scale(const std::string& path) const {
  const std::string& text = texts.at(kLossScale);
  double scale = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), scale).ptr;
  if (end != text.data() + text.size() || !(scale >= 1 && scale <= FLT_MAX))
    fail("{}: {} is '{}', expected a number from 1 to {:g}", path, kLossScale, text, FLT_MAX);
  return scale;
}

uint64_t hash_rows(std::span<const float> values, int64_t first_row, int64_t row_numel) {
  const auto row = static_cast<size_t>(row_numel);
  uint64_t sum = 0, index = static_cast<uint64_t>(first_row);
  for (size_t at = 0; at < values.size(); at += row)
    sum += XXH3_64bits_withSeed(values.data() + at, row * sizeof(float), index++);
  return sum;
}

// In two halves they do not overflow on the way.
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

int64_t piece_count(const CheckpointTensor& t, int64_t piece_bytes) {
  const int64_t own = t.rows.numel() / t.shape.row_numel(), step = piece_rows(t.shape, piece_bytes);
  return (own + step - 1) / step;
}

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

}  // namespace qshard
