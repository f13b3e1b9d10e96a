#include "io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/config.h"

namespace qshard {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr int64_t kLengthBytes = 8;               // of the header's length field
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

struct FileDType {
  const char* name;
  int64_t size;  // bytes of one element
  std::optional<DType> dtype;
};
constexpr FileDType kFileDTypes[] = {
    {"F32", 4, DType::f32},    {"BF16", 2, DType::bf16},     {"F16", 2, DType::fp16},
    {"F64", 8, DType::f64},    {"I32", 4, DType::i32},       {"U32", 4, DType::u32},
    {"U16", 2, DType::u16},    {"U8", 1, DType::u8},         {"I64", 8, std::nullopt},
    {"U64", 8, std::nullopt},  {"I16", 2, std::nullopt},     {"I8", 1, std::nullopt},
    {"BOOL", 1, std::nullopt}, {"F8_E4M3", 1, std::nullopt}, {"F8_E5M2", 1, std::nullopt}};

const FileDType* find_file_dtype(const std::string& name) {
  for (const FileDType& known : kFileDTypes)
    if (name == known.name) return &known;
  return nullptr;
}

const char* file_name_of(DType dtype) {
  for (const FileDType& known : kFileDTypes)
    if (known.dtype == dtype) return known.name;
  fail("safetensors files cannot hold {}", dtype_name(dtype));
}

// One tensor of the header, checked as far as that is possible without the others.
struct HeaderEntry {
  std::string dtype;
  const FileDType* file_dtype;
  Shape shape;
  int64_t begin, end;  // bytes, from the end of the header
};

int64_t natural(const json& value, const std::string& what) {
  constexpr double kMax = 9007199254740992.0;  // 2^53, far beyond any file
  if (!value.is_number_integer() || value.get<double>() < 0 || value.get<double>() > kMax)
    fail("{}: expected a number ≥ 0, found {}", what, value.dump());
  return value.get<int64_t>();
}

HeaderEntry parse_entry(const json& value, const std::string& what) {
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets"))
    fail("{}: expected an object with dtype, shape and data_offsets, found {}", what, value.dump());
  const json &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
  HeaderEntry entry{};
  if (dtype.is_string()) entry.dtype = dtype.get<std::string>();
  entry.file_dtype = find_file_dtype(entry.dtype);
  if (!entry.file_dtype) fail("{}: unknown dtype {}", what, dtype.dump());
  if (!shape.is_array() || shape.size() > 4)
    fail("{}: expected a shape of at most 4 dimensions, found {}", what, shape.dump());
  if (!offsets.is_array() || offsets.size() != 2)
    fail("{}: expected data_offsets [begin, end], found {}", what, offsets.dump());
  int64_t bytes = entry.file_dtype->size;
  for (const json& dim : shape) {
    entry.shape.push_back(natural(dim, what + ": shape"));
    // As if a 0 were a 1, so that no product of some dimensions overflows either.
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(1, dim.get<int64_t>()), &bytes))
      fail("{}: shape {} is larger than any file", what, shape.dump());
  }
  if (entry.shape.numel() == 0) bytes = 0;
  entry.begin = natural(offsets[0], what + ": data_offsets");
  entry.end = natural(offsets[1], what + ": data_offsets");
  if (entry.end - entry.begin != bytes)
    fail("{}: shape {} of {} takes {} bytes, but data_offsets [{}, {}] hold {}", what,
         entry.shape.str(), entry.dtype, bytes, entry.begin, entry.end, entry.end - entry.begin);
  return entry;
}

// IEEE half to single, every value exactly.
float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa · 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;  // bias 127 − bias 15
  return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

// Nearest, ties to even; NaN stays NaN.
uint16_t bf16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <typename Convert>
void convert_16bit(const std::byte* from, int64_t n, float* to, Convert convert) {
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof bits);  // may be unaligned
    to[i] = convert(bits);
  }
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  check_extents(read_header());
}

// Fills tensors_; returns where their data begins.
int64_t SafetensorsFile::read_header() {
  if (file_.size() < kLengthBytes)
    fail("{}: {} bytes are too short for a safetensors file (incomplete download?)", path(),
         file_.size());
  uint64_t length;
  std::memcpy(&length, file_.data(), sizeof length);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes))
    fail(
        "{}: header length {} in bytes 0–7 exceeds the format's limit of {}: not a safetensors "
        "file",
        path(), length, kMaxHeaderBytes);
  const int64_t data_begin = kLengthBytes + static_cast<int64_t>(length);
  if (data_begin > file_.size())
    fail("{}: header of {} bytes does not fit into a file of {} bytes (incomplete download?)",
         path(), length, file_.size());
  const std::string text(reinterpret_cast<const char*>(file_.data()) + kLengthBytes, length);
  const json header = parse_json(text, path() + ": safetensors header", kExitFailed);
  if (!header.is_object())
    fail("{}: safetensors header: expected an object, found {}", path(), header.type_name());
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    const HeaderEntry e = parse_entry(value, fmt::format("{}: tensor {}", path(), name));
    std::byte* data = const_cast<std::byte*>(file_.data()) + data_begin + e.begin;
    const DType dtype = e.file_dtype->dtype.value_or(DType::u8);
    tensors_[name] = {Tensor(data, dtype, e.shape), e.dtype, e.file_dtype->dtype.has_value()};
  }
  return data_begin;
}

// Tensors follow each other from the header to the last byte of the file.
void SafetensorsFile::check_extents(int64_t data_begin) const {
  struct Extent {
    int64_t begin, end;
    const std::string* name;
  };
  std::vector<Extent> extents;
  for (const auto& [name, e] : tensors_) {
    const int64_t begin = static_cast<const std::byte*>(e.tensor.data) - file_.data();
    const int64_t bytes = e.tensor.numel() * find_file_dtype(e.dtype)->size;
    extents.push_back({begin, begin + bytes, &name});
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t end = data_begin;
  for (const Extent& extent : extents) {
    if (extent.begin != end)
      fail("{}: tensor {} begins at byte {} of the file, the data before it end{} at {}", path(),
           *extent.name, extent.begin, extent.begin < end ? " later," : "", end);
    end = extent.end;
  }
  if (end > file_.size())
    fail("{}: expected {} bytes as the header says, found {} (incomplete download?)", path(), end,
         file_.size());
  if (end < file_.size())
    fail("{}: expected {} bytes as the header says, found {}: data without a tensor", path(), end,
         file_.size());
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> all;
  for (const auto& [name, entry] : tensors_) all.push_back(name);
  return all;
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end())
    fail("{}: tensor {} is missing (the file holds {} tensors)", path(), name, tensors_.size());
  return it->second;
}

const Tensor& SafetensorsFile::operator[](const std::string& name) const {
  const Entry& e = entry(name);
  if (!e.has_dtype)
    fail("{}: tensor {} has dtype {}, which is not supported", path(), name, e.dtype);
  if (e.tensor.numel() > 0 &&
      reinterpret_cast<uintptr_t>(e.tensor.data) % dtype_size(e.tensor.dtype) != 0)
    fail(
        "{}: tensor {} does not lie at a multiple of {} bytes; save the file again with a current "
        "safetensors library",
        path(), name, dtype_size(e.tensor.dtype));
  return e.tensor;
}

void SafetensorsFile::read_f32(const std::string& name, int64_t first, int64_t n, float* to) const {
  const Entry& e = entry(name);
  QS_CHECK(first >= 0 && n >= 0 && first + n <= e.tensor.numel(),
           "{}: tensor {}: elements [{}, {}) of {}", path(), name, first, first + n,
           e.tensor.numel());
  if (e.dtype != "F32" && e.dtype != "BF16" && e.dtype != "F16")
    fail("{}: tensor {} has dtype {}; expected F32, BF16 or F16", path(), name, e.dtype);
  const std::byte* from = static_cast<const std::byte*>(e.tensor.data) +
                          first * static_cast<int64_t>(dtype_size(e.tensor.dtype));
  to_f32(e.tensor.dtype, from, n, to);
}

void to_f32(DType dtype, const void* source, int64_t n, float* to) {
  const auto* from = static_cast<const std::byte*>(source);
  switch (dtype) {
    case DType::f32:
      if (n > 0) std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::bf16:
      return convert_16bit(from, n, to, [](uint16_t b) {
        return std::bit_cast<float>(static_cast<uint32_t>(b) << 16);
      });
    case DType::fp16:
      return convert_16bit(from, n, to, half_to_float);
    default:
      fail("{} values cannot be read as f32", dtype_name(dtype));
  }
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                                     std::map<std::string, std::string> metadata)
    : entries_(std::move(entries)), file_(path) {
  metadata.emplace("format", "pt");
  json header = {{"__metadata__", metadata}};
  int64_t offset = 0;
  for (const SafetensorsEntry& e : entries_) {
    QS_CHECK(!header.contains(e.name), "{}: tensor {} is given twice", path, e.name);
    const int64_t end = offset + e.shape.numel() * static_cast<int64_t>(dtype_size(e.dtype));
    header[e.name] = {{"dtype", file_name_of(e.dtype)},
                      {"shape", std::vector<int64_t>(e.shape.begin(), e.shape.end())},
                      {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data are 8-byte aligned
  const uint64_t length = text.size();
  file_.write(&length, sizeof length);
  file_.write(text.data(), text.size());
}

void SafetensorsWriter::append(const Tensor& values) {
  QS_CHECK(next_ < entries_.size(), "more values than the {} entries", entries_.size());
  const SafetensorsEntry& e = entries_[next_++];
  QS_CHECK(values.contiguous(), "tensor {} is not contiguous", e.name);
  QS_CHECK(values.numel() == e.shape.numel(), "tensor {} has {} elements, expected {}", e.name,
           values.numel(), e.shape.numel());
  if (e.dtype == DType::bf16 && values.dtype == DType::f32) return append_rounded(values);
  QS_CHECK(values.dtype == e.dtype, "tensor {} holds {}, expected {}", e.name,
           dtype_name(values.dtype), dtype_name(e.dtype));
  file_.write(values.data, values.bytes());
}

void SafetensorsWriter::append_rounded(const Tensor& values) {
  constexpr int64_t kPiece = 1 << 16;  // elements
  std::vector<bf16_t> rounded(static_cast<size_t>(std::min(kPiece, values.numel())));
  for (int64_t at = 0; at < values.numel(); at += kPiece) {
    const int64_t n = std::min(kPiece, values.numel() - at);
    for (int64_t i = 0; i < n; ++i) rounded[i].bits = bf16_bits(values.as<float>()[at + i]);
    file_.write(rounded.data(), static_cast<size_t>(n) * sizeof(bf16_t));
  }
}

void SafetensorsWriter::commit() {
  QS_CHECK(next_ == entries_.size(), "{} of {} entries have values", next_, entries_.size());
  file_.commit();
}

void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, Tensor>>& tensors,
                       std::map<std::string, std::string> metadata) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back({name, tensor.dtype, tensor.shape});
  SafetensorsWriter writer(path, std::move(entries), std::move(metadata));
  for (const auto& [name, tensor] : tensors) writer.append(tensor);
  writer.commit();
}

}  // namespace qshard
