#include "io/corpus.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <tuple>

#include "base/check.h"
#include "io/file.h"

namespace qshard {
namespace {

namespace fs = std::filesystem;

bool has_suffix(const std::string& name, const std::vector<std::string>& suffixes) {
  return suffixes.empty() || std::any_of(suffixes.begin(), suffixes.end(), [&](const auto& suffix) {
           return name.ends_with(suffix);
         });
}

void search_folder(const fs::path& folder, const fs::path& root, const CorpusOptions& options,
                   std::vector<CorpusFile>& files, CorpusSkips& skips) {
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code stat_error;
    const fs::file_status status = entry->symlink_status(stat_error);
    const fs::path& path = entry->path();
    if (stat_error) {
      ++skips.unreadable;
    } else if (fs::is_directory(status)) {
      search_folder(path, root, options, files, skips);
    } else if (has_suffix(path.filename().string(), options.suffixes)) {
      if (fs::is_regular_file(status)) {
        files.push_back({path.string(), path.lexically_relative(root).string()});
      } else {
        ++skips.not_regular;
      }
    }
  }
  if (error) ++skips.unreadable;
}

// The first `size` bytes of the file as one document.
void append_bytes(const MappedFile& file, int64_t size, TokenFileWriter& writer) {
  constexpr int64_t kPiece = 1 << 20;
  const auto* bytes = reinterpret_cast<const unsigned char*>(file.data());
  std::vector<uint32_t> tokens;
  for (int64_t first = 0; first < size; first += kPiece) {
    tokens.assign(bytes + first, bytes + std::min(first + kPiece, size));
    writer.append(tokens);
  }
  writer.append(std::span(&kByteEndOfDocument, 1));
  writer.end_document();
}

}  // namespace

std::vector<CorpusFile> list_corpus(const CorpusOptions& options, CorpusSkips& skips) {
  std::vector<CorpusFile> files;
  for (const std::string& path : options.paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (!fs::exists(status)) fail_usage("{}: no such file or folder", path);
    if (fs::is_directory(status)) {
      search_folder(path, path, options, files, skips);
    } else if (fs::is_regular_file(status)) {
      files.push_back({path, fs::path(path).filename().string()});
    } else {
      ++skips.not_regular;
    }
  }
  std::sort(files.begin(), files.end(), [](const CorpusFile& a, const CorpusFile& b) {
    return std::tie(a.name, a.path) < std::tie(b.name, b.path);
  });
  std::set<std::string> seen;
  std::erase_if(files, [&](const CorpusFile& file) {
    std::error_code error;
    return !seen.insert(fs::weakly_canonical(file.path, error).string()).second;
  });
  return files;
}

bool is_validation(const std::string& name, double fraction) {
  const uint64_t hash = XXH3_64bits(name.data(), name.size());
  return static_cast<double>(hash >> 11) * 0x1p-53 < fraction;
}

CorpusCounts tokenize_bytes(const CorpusOptions& options, TokenFileWriter& train,
                            TokenFileWriter* val) {
  CorpusCounts counts;
  const int64_t limit =
      options.max_bytes > 0 ? options.max_bytes : std::numeric_limits<int64_t>::max();
  for (const CorpusFile& document : list_corpus(options, counts.skips)) {
    if (counts.bytes == limit) break;
    std::optional<MappedFile> file;
    try {
      file.emplace(document.path);
    } catch (const Error&) {
      ++counts.skips.unreadable;
      continue;
    }
    if (file->size() == 0) {
      ++counts.skips.empty;
      continue;
    }
    if (std::memchr(file->data(), 0, static_cast<size_t>(file->size()))) {
      ++counts.skips.binary;
      continue;
    }
    const int64_t size = std::min(file->size(), limit - counts.bytes);
    counts.bytes += size;
    const bool to_val = val && is_validation(document.name, options.val_fraction);
    ++(to_val ? counts.val_files : counts.files);
    append_bytes(*file, size, to_val ? *val : train);
  }
  return counts;
}

std::string summary(const CorpusCounts& c, double seconds) {
  return fmt::format(
      "{} files, {} bytes in {:.2f} s ({:.0f} MB/s)\n"
      "skipped: {} unreadable, {} not regular files, {} empty, {} binary (with a NUL byte)\n",
      c.files + c.val_files, c.bytes, seconds, static_cast<double>(c.bytes) / 1e6 / seconds,
      c.skips.unreadable, c.skips.not_regular, c.skips.empty, c.skips.binary);
}

TokenizedCorpus write_byte_tokens(const CorpusOptions& options, const std::string& out,
                                  const std::string& val_out) {
  const std::string source = fmt::format("{}", fmt::join(options.paths, " "));
  TokenFileWriter train(out, kByteTokenizer, kByteVocabSize, source);
  std::optional<TokenFileWriter> val;
  if (!val_out.empty()) val.emplace(val_out, kByteTokenizer, kByteVocabSize, source);
  TokenizedCorpus result;
  result.counts = tokenize_bytes(options, train, val ? &*val : nullptr);
  const int64_t files = result.counts.files + result.counts.val_files;
  if (files == 0) fail("{}: no text files found (suffixes, empty and binary files?)", source);
  if (result.counts.files == 0 || (val && result.counts.val_files == 0))
    fail("validation fraction {} leaves none of {} documents for {}; change it or use more files",
         options.val_fraction, files, result.counts.files == 0 ? out : val_out);
  result.train = train.finish();
  if (val) result.val = val->finish();
  return result;
}

}  // namespace qshard
