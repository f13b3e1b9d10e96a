#include "io/dataset.h"

#include <Random123/philox.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "base/check.h"
#include "io/hdf5_file.h"

namespace qshard {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr char kFormatName[] = "qshard-tokens";
constexpr int64_t kFormatVersion = 1;
constexpr char kTokens[] = "/tokens", kOffsets[] = "/document_offsets";
constexpr int64_t kPiece = 1 << 20;  // elements that pass through memory at once
constexpr unsigned char kHdf5Signature[] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};

// llm.c: 256 int32, of which magic, version and number of tokens are used.
constexpr int64_t kLlmcHeaderBytes = 1024;
struct LlmcFormat {
  int32_t magic, version;
  const char* name;
  int width;
};
constexpr LlmcFormat kLlmcFormats[] = {{20240520, 1, "llmc-gpt2", 2},
                                       {20240801, 7, "llmc-llama3", 4}};

constexpr char kTokenizeHint[] = "make it again with `qshard data` or scripts/prepare_data.py";

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);  // tokens may be unaligned in the file
  return value;
}

uint32_t max_id(std::span<const uint32_t> ids) {
  uint32_t largest = 0;
  for (uint32_t id : ids) largest = std::max(largest, id);
  return largest;
}

// The first bytes in hexadecimal, for a message about a file that is not recognised.
std::string first_bytes(const MappedFile& file) {
  std::string text;
  for (int64_t i = 0; i < std::min<int64_t>(8, file.size()); ++i)
    text += fmt::format("{}{:02x}", i ? " " : "", std::to_integer<int>(file.data()[i]));
  return text;
}

std::string detect_format(const MappedFile& file) {
  if (file.size() >= 8 && std::memcmp(file.data(), kHdf5Signature, 8) == 0) return "hdf5";
  if (file.size() >= 4)
    for (const LlmcFormat& known : kLlmcFormats)
      if (load<int32_t>(file.data()) == known.magic) return known.name;
  fail(
      "{}: not a token file: expected HDF5 or llm.c's magic {} or {} first, found the bytes {}; a "
      "file without a header is read with format raw-u16 or raw-u32 only",
      file.path(), kLlmcFormats[0].magic, kLlmcFormats[1].magic, first_bytes(file));
}

// Ascending, starting at 0, all inside the file.
void check_offsets(const std::string& path, const Hdf5File& file, int64_t documents,
                   int64_t tokens) {
  std::vector<uint64_t> piece;
  uint64_t next_allowed = 0;
  for (int64_t first = 0; first < documents; first += kPiece) {
    piece.resize(static_cast<size_t>(std::min(kPiece, documents - first)));
    file.read<uint64_t>(kOffsets, first, piece);
    for (size_t i = 0; i < piece.size(); ++i) {
      const int64_t d = first + static_cast<int64_t>(i);
      if (piece[i] < next_allowed || (d == 0 && piece[i] != 0) ||
          piece[i] >= static_cast<uint64_t>(tokens))
        fail("{}: document {} of {} begins at token {}: expected {} and less than {} tokens; {}",
             path, d, documents, piece[i], d == 0 ? "0" : fmt::format("at least {}", next_allowed),
             tokens, kTokenizeHint);
      next_allowed = piece[i] + 1;
    }
  }
}

void check_dataset(const std::string& path, const char* name, const Hdf5Dataset& dataset,
                   Hdf5Type type, const char* type_text) {
  if (dataset.type != type || dataset.shape.size() != 1)
    fail("{}: dataset {} has type {} and {} dimension(s), expected {} and 1; {}", path, name,
         dataset.type_text, dataset.shape.size(), type_text, kTokenizeHint);
}

}  // namespace

TokenFile::TokenFile(const std::string& path, const std::string& format) : file_(path) {
  info_.path = path;
  if (file_.size() == 0) fail("{}: empty file, expected tokens; {}", path, kTokenizeHint);
  info_.format = format == "auto" ? detect_format(file_) : format;
  if (info_.format == "hdf5") {
    read_hdf5_header();
  } else if (info_.format == "raw-u16" || info_.format == "raw-u32") {
    read_raw_size();
  } else if (info_.format == "llmc-gpt2" || info_.format == "llmc-llama3") {
    read_llmc_header();
  } else {
    fail_usage(
        "unknown token file format {}: expected auto, hdf5, llmc-gpt2, llmc-llama3, raw-u16 or "
        "raw-u32",
        format);
  }
}

void TokenFile::read_hdf5_header() {
  const std::string& path = file_.path();
  const Hdf5File file = Hdf5File::open(path);
  for (const char* name : {"format", "version", "vocab_size"})
    if (!file.has_attribute(name))
      fail("{}: root attribute {} is missing: not a token file; {}", path, name, kTokenizeHint);
  if (const std::string format = file.text_attribute("format"); format != kFormatName)
    fail("{}: format = \"{}\", expected \"{}\"", path, format, kFormatName);
  if (const int64_t version = file.int_attribute("version"); version != kFormatVersion)
    fail("{}: version = {}, this program reads version {}; {}", path, version, kFormatVersion,
         kTokenizeHint);
  info_.vocab_size = file.int_attribute("vocab_size");
  if (info_.vocab_size < 1 || info_.vocab_size > std::numeric_limits<int32_t>::max())
    fail("{}: vocab_size = {}, expected 1 to {}", path, info_.vocab_size,
         std::numeric_limits<int32_t>::max());
  if (file.has_attribute("tokenizer")) info_.tokenizer = file.text_attribute("tokenizer");
  if (file.has_attribute("source")) info_.source = file.text_attribute("source");
  for (const char* name : {kTokens, kOffsets})
    if (!file.contains(name)) fail("{}: dataset {} is missing; {}", path, name, kTokenizeHint);

  const Hdf5Dataset tokens = file.dataset(kTokens), offsets = file.dataset(kOffsets);
  check_dataset(path, kTokens, tokens, Hdf5Type::u32, "u32");
  check_dataset(path, kOffsets, offsets, Hdf5Type::u64, "u64");
  if (!tokens.contiguous)
    fail(
        "{}: dataset {} is stored {}, which cannot be mapped; copy it with `h5repack -l "
        "tokens:CONTI "
        "-f tokens:NONE IN OUT`",
        path, kTokens, tokens.layout);
  info_.tokens = tokens.shape[0];
  info_.documents = offsets.shape[0];
  info_.data_offset = tokens.file_offset;
  if (info_.tokens == 0) fail("{}: dataset {} has no elements", path, kTokens);
  if (info_.documents == 0) fail("{}: dataset {} has no elements", path, kOffsets);
  const int64_t end = info_.data_offset + info_.tokens * info_.width;
  if (info_.data_offset == 0 || end > file_.size())
    fail("{}: {} tokens at byte {} need {} bytes, the file has {} (incomplete copy?)", path,
         info_.tokens, info_.data_offset, end, file_.size());
  check_offsets(path, file, info_.documents, info_.tokens);
}

void TokenFile::read_llmc_header() {
  const std::string& path = file_.path();
  const auto& expected = *std::find_if(std::begin(kLlmcFormats), std::end(kLlmcFormats),
                                       [&](const LlmcFormat& f) { return info_.format == f.name; });
  if (file_.size() < kLlmcHeaderBytes)
    fail("{}: {} bytes are too short for llm.c's header of {}", path, file_.size(),
         kLlmcHeaderBytes);
  const auto field = [&](int i) { return load<int32_t>(file_.data() + 4 * i); };
  if (field(0) != expected.magic)
    fail("{}: magic {} at byte 0, expected {} ({})", path, field(0), expected.magic, expected.name);
  if (field(1) != expected.version)
    fail("{}: version {} at byte 4, this program reads version {} ({})", path, field(1),
         expected.version, expected.name);
  info_.width = expected.width;
  info_.tokens = field(2);
  info_.data_offset = kLlmcHeaderBytes;
  if (info_.tokens <= 0)
    fail("{}: number of tokens {} at byte 8, expected > 0", path, info_.tokens);
  const int64_t bytes = kLlmcHeaderBytes + info_.tokens * info_.width;
  if (file_.size() != bytes)
    fail("{}: header says {} tokens of {} bytes, so expected a file of {} bytes, found {}{}", path,
         info_.tokens, info_.width, bytes, file_.size(),
         file_.size() < bytes ? " (incomplete copy?)" : "");
}

void TokenFile::read_raw_size() {
  info_.width = info_.format == "raw-u16" ? 2 : 4;
  if (file_.size() % info_.width != 0)
    fail("{}: {} bytes are not a multiple of the {} bytes of a token in format {}", file_.path(),
         file_.size(), info_.width, info_.format);
  info_.tokens = file_.size() / info_.width;
}

std::vector<int64_t> TokenFile::document_offsets() const {
  if (info_.format != "hdf5") return {};
  std::vector<uint64_t> offsets(static_cast<size_t>(info_.documents));
  Hdf5File::open(info_.path).read<uint64_t>(kOffsets, 0, offsets);
  return {offsets.begin(), offsets.end()};
}

const std::byte* TokenFile::bytes_of(int64_t token) const {
  return file_.data() + info_.data_offset + token * info_.width;
}

uint32_t TokenFile::token(int64_t i) const {
  return info_.width == 2 ? load<uint16_t>(bytes_of(i)) : load<uint32_t>(bytes_of(i));
}

void TokenFile::read(int64_t first, int64_t n, int64_t vocab, int32_t* to) const {
  QS_CHECK(first >= 0 && n >= 0 && n <= info_.tokens - first,
           "{}: tokens [{}, {}) asked for, the file has {}", info_.path, first, first + n,
           info_.tokens);
  QS_CHECK(vocab >= 1 && vocab <= std::numeric_limits<int32_t>::max(), "a vocabulary of {} entries",
           vocab);
  // Two plain loops, which the compiler turns into vector code: copy, then the largest id.
  uint32_t largest = 0;
  if (info_.width == 2) {
    const std::byte* from = bytes_of(first);
    for (int64_t i = 0; i < n; ++i) to[i] = load<uint16_t>(from + 2 * i);
  } else if (n > 0) {
    std::memcpy(to, bytes_of(first), static_cast<size_t>(n) * sizeof *to);
  }
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, static_cast<uint32_t>(to[i]));
  if (static_cast<int64_t>(largest) >= vocab) refuse_id(first, n, vocab);
}

void TokenFile::refuse_id(int64_t first, int64_t n, int64_t vocab) const {
  int64_t i = first;
  while (i < first + n - 1 && token(i) < vocab) ++i;
  fail(
      "{}: token {} (byte {} of the file) is {}, the vocabulary has the ids 0 to {}; the file "
      "belongs to another tokenizer, or its width or offset is wrong{}",
      info_.path, i, info_.data_offset + i * info_.width, token(i), vocab - 1,
      info_.vocab_size ? fmt::format(" (it says vocab_size {})", info_.vocab_size) : "");
}

Permutation::Permutation(int64_t n, uint64_t seed, uint64_t epoch)
    : n_(n), half_bits_(1), seed_(seed), epoch_(epoch) {
  QS_CHECK(n >= 1 && n <= int64_t{1} << 62, "a permutation of {} elements", n);
  while ((int64_t{1} << (2 * half_bits_)) < n) ++half_bits_;
}

// Balanced Feistel network. Each round is a bijection whatever its function is; Philox keyed by the
// seed, with round and epoch in the counter, makes rounds and epochs unrelated.
uint64_t Permutation::encrypt(uint64_t x) const {
  constexpr uint32_t kRounds = 8;
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  const r123::Philox4x32::key_type key{
      {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)}};
  uint64_t left = x >> half_bits_, right = x & mask;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const r123::Philox4x32::ctr_type counter{{static_cast<uint32_t>(right), round,
                                              static_cast<uint32_t>(epoch_),
                                              static_cast<uint32_t>(epoch_ >> 32)}};
    const uint64_t mixed = r123::Philox4x32()(counter, key)[0];
    left = std::exchange(right, left ^ (mixed & mask));
  }
  return left << half_bits_ | right;
}

int64_t Permutation::operator()(int64_t i) const {
  QS_CHECK(i >= 0 && i < n_, "element {} of a permutation of {}", i, n_);
  // Cycle walking: results past n are permuted on; the walk ends, because i < n is on its cycle.
  uint64_t x = static_cast<uint64_t>(i);
  do x = encrypt(x);
  while (x >= static_cast<uint64_t>(n_));
  return static_cast<int64_t>(x);
}

Sampler::Sampler(const TokenFile& file, int64_t T, int64_t global_batch, bool shuffle,
                 uint64_t seed)
    : samples_(0), global_batch_(global_batch), shuffle_(shuffle), seed_(seed) {
  QS_CHECK(T >= 1 && global_batch >= 1, "samples of {} tokens, {} a step", T, global_batch);
  samples_ = (file.info().tokens - 1) / T;
  if (samples_ < global_batch)
    fail_usage(
        "{}: {} tokens are {} samples of {} tokens (and one more token for the last label), one "
        "step needs {}; use more data, a shorter sequence or a smaller global batch",
        file.info().path, file.info().tokens, samples_, T, global_batch);
}

int64_t Sampler::sample(int64_t s, int64_t k) const {
  QS_CHECK(s >= 0 && k >= 0 && k < global_batch_, "sample {} of step {} with {} a step", k, s,
           global_batch_);
  const int64_t epoch = s / steps_per_epoch();
  const int64_t i = (s % steps_per_epoch()) * global_batch_ + k;
  return shuffle_ ? Permutation(samples_, seed_, static_cast<uint64_t>(epoch))(i) : i;
}

struct TokenFileWriter::Impl {
  std::string path, temporary, tokenizer, source;
  int64_t vocab_size;
  std::FILE* spool = nullptr;  // uint32 tokens so far; has no name, so it cannot be left behind
  int64_t tokens = 0;
  std::vector<uint64_t> offsets;  // of the documents that have ended
  uint64_t document_begin = 0;

  ~Impl() {
    if (spool) std::fclose(spool);
    if (!temporary.empty()) ::unlink(temporary.c_str());
  }
  void open_spool();
  void write_hdf5();
};

void TokenFileWriter::Impl::open_spool() {
  std::string name = path + ".spool-XXXXXX";
  const int id = ::mkstemp(name.data());
  if (id < 0) fail("cannot create a file beside {}: {}", path, std::strerror(errno));
  ::unlink(name.c_str());
  spool = ::fdopen(id, "w+b");
  if (!spool) fail("cannot write beside {}: {}", path, std::strerror(errno));
}

void TokenFileWriter::Impl::write_hdf5() {
  temporary = temporary_name(path);
  Hdf5File file = Hdf5File::create(temporary);
  file.write_attribute("format", std::string(kFormatName));
  file.write_attribute("version", kFormatVersion);
  file.write_attribute("vocab_size", vocab_size);
  file.write_attribute("tokenizer", tokenizer);
  file.write_attribute("source", source);
  file.create_dataset(kOffsets, Hdf5Type::u64, {static_cast<int64_t>(offsets.size())});
  file.create_dataset(kTokens, Hdf5Type::u32, {tokens});
  file.write<uint64_t>(kOffsets, 0, offsets);
  if (std::fflush(spool) != 0)
    fail("cannot write tokens beside {}: {}", path, std::strerror(errno));
  std::rewind(spool);
  std::vector<uint32_t> piece;
  for (int64_t first = 0; first < tokens; first += kPiece) {
    piece.resize(static_cast<size_t>(std::min(kPiece, tokens - first)));
    if (std::fread(piece.data(), sizeof(uint32_t), piece.size(), spool) != piece.size())
      fail("cannot read back the tokens for {}: {}", path, std::strerror(errno));
    file.write<uint32_t>(kTokens, first, piece);
  }
  file.close();
  publish_file(temporary, path);
  temporary.clear();
}

TokenFileWriter::TokenFileWriter(const std::string& path, const std::string& tokenizer,
                                 int64_t vocab_size, const std::string& source)
    : impl_(std::make_unique<Impl>()) {
  if (vocab_size < 1 || vocab_size > std::numeric_limits<int32_t>::max())
    fail_usage("{}: vocabulary size {}, expected 1 to {}", path, vocab_size,
               std::numeric_limits<int32_t>::max());
  impl_->path = path;
  impl_->tokenizer = tokenizer;
  impl_->vocab_size = vocab_size;
  impl_->source = source;
  impl_->open_spool();
}

TokenFileWriter::~TokenFileWriter() = default;

void TokenFileWriter::append(std::span<const uint32_t> tokens) {
  if (tokens.empty()) return;
  Impl& w = *impl_;
  if (max_id(tokens) >= w.vocab_size) {
    const auto at =
        std::find_if(tokens.begin(), tokens.end(), [&](uint32_t id) { return id >= w.vocab_size; });
    fail("{}: token {} to be written is {}, but the vocabulary has the ids 0 to {}", w.path,
         w.tokens + (at - tokens.begin()), *at, w.vocab_size - 1);
  }
  if (std::fwrite(tokens.data(), sizeof(uint32_t), tokens.size(), w.spool) != tokens.size())
    fail("cannot write tokens beside {}: {}", w.path, std::strerror(errno));
  w.tokens += static_cast<int64_t>(tokens.size());
}

void TokenFileWriter::end_document() {
  Impl& w = *impl_;
  const uint64_t end = static_cast<uint64_t>(w.tokens);
  if (end > w.document_begin) w.offsets.push_back(std::exchange(w.document_begin, end));
}

void TokenFileWriter::add_document(std::span<const uint32_t> tokens) {
  append(tokens);
  end_document();
}

int64_t TokenFileWriter::tokens() const { return impl_->tokens; }

TokenFileInfo TokenFileWriter::finish() {
  end_document();
  if (impl_->tokens == 0) fail("{}: there are no tokens to write", impl_->path);
  impl_->write_hdf5();
  return TokenFile(impl_->path).info();
}

}  // namespace qshard
