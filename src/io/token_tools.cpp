#include "io/token_tools.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "io/corpus.h"

namespace qshard {
namespace {

constexpr int64_t kPiece = 1 << 20;  // tokens in memory at once
constexpr int64_t kAnyId = std::numeric_limits<int32_t>::max();

template <typename Use>
void for_each_piece(const TokenFile& file, int64_t vocab, Use use) {
  const int64_t tokens = file.info().tokens;
  std::vector<int32_t> piece;
  for (int64_t first = 0; first < tokens; first += kPiece) {
    piece.resize(static_cast<size_t>(std::min(kPiece, tokens - first)));
    file.read(first, static_cast<int64_t>(piece.size()), vocab, piece.data());
    use(std::span<const int32_t>(piece));
  }
}

void copy_tokens(const TokenFile& from, const ImportOptions& options, TokenFileWriter& to) {
  std::vector<uint32_t> ids;
  for_each_piece(from, options.vocab_size, [&](std::span<const int32_t> piece) {
    ids.assign(piece.begin(), piece.end());
    std::span<const uint32_t> rest(ids);
    while (options.document_start && !rest.empty()) {
      const auto start = static_cast<uint32_t>(*options.document_start);
      if (rest[0] == start) to.end_document();
      const auto next = std::find(rest.begin() + 1, rest.end(), start);
      to.append({rest.begin(), next});
      rest = {next, rest.end()};
    }
    to.append(rest);
  });
}

}  // namespace

DocumentLengths document_lengths(const TokenFile& file) {
  std::vector<int64_t> offsets = file.document_offsets();
  if (offsets.empty()) return {};
  offsets.push_back(file.info().tokens);
  DocumentLengths lengths;
  lengths.shortest = file.info().tokens;
  for (size_t d = 0; d + 1 < offsets.size(); ++d) {
    lengths.shortest = std::min(lengths.shortest, offsets[d + 1] - offsets[d]);
    lengths.longest = std::max(lengths.longest, offsets[d + 1] - offsets[d]);
  }
  lengths.mean =
      static_cast<double>(file.info().tokens) / static_cast<double>(file.info().documents);
  return lengths;
}

int64_t largest_id(const TokenFile& file) {
  int32_t largest = 0;
  for_each_piece(file, kAnyId, [&](std::span<const int32_t> ids) {
    for (int32_t id : ids) largest = std::max(largest, id);
  });
  return largest;
}

std::string first_tokens(const TokenFile& file, int64_t n) {
  std::vector<int32_t> ids(static_cast<size_t>(std::min(n, file.info().tokens)));
  file.read(0, static_cast<int64_t>(ids.size()), kAnyId, ids.data());
  if (file.info().tokenizer != kByteTokenizer) return fmt::format("{}", fmt::join(ids, " "));
  std::string text;
  for (int32_t id : ids) {
    if (id > 255) break;  // the end of the document
    text += static_cast<char>(id);
  }
  // JSON's quoting shows line ends and bytes that are no UTF-8 in one line.
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

nlohmann::ordered_json describe_tokens(const TokenFile& file, int64_t seq, bool scan) {
  const TokenFileInfo& info = file.info();
  const DocumentLengths lengths = document_lengths(file);
  nlohmann::ordered_json fields = {{"path", info.path},
                                   {"format", info.format},
                                   {"tokenizer", info.tokenizer},
                                   {"source", info.source},
                                   {"vocab_size", info.vocab_size},
                                   {"tokens", info.tokens},
                                   {"bytes_per_token", info.width},
                                   {"data_offset_bytes", info.data_offset},
                                   {"documents", info.documents},
                                   {"document_tokens_min", lengths.shortest},
                                   {"document_tokens_mean", lengths.mean},
                                   {"document_tokens_max", lengths.longest},
                                   {"seq", seq},
                                   {"samples", (info.tokens - 1) / seq}};
  if (scan) fields["largest_id"] = largest_id(file);
  fields["first_tokens"] = first_tokens(file, info.tokenizer == kByteTokenizer ? 80 : 16);
  return fields;
}

TokenFileInfo import_tokens(const std::string& path, const std::string& format,
                            ImportOptions options, const std::string& out) {
  const TokenFile from(path, format == "llmc" ? "auto" : format);
  const TokenFileInfo& info = from.info();
  if (info.format == "hdf5") fail_usage("{} is an HDF5 token file already", path);
  // llm.c puts GPT-2's end-of-text or Llama 3's begin-of-text before each document.
  const bool gpt2 = info.format == "llmc-gpt2", llama3 = info.format == "llmc-llama3";
  if (options.vocab_size == 0) options.vocab_size = gpt2 ? 50257 : llama3 ? 128256 : 0;
  if (!options.document_start && gpt2) options.document_start = 50256;
  if (!options.document_start && llama3) options.document_start = 128000;
  if (options.vocab_size == 0)
    fail_usage("{}: format {} does not say its vocabulary: give --vocab-size", path, format);
  TokenFileWriter to(out, info.format, options.vocab_size, path);
  copy_tokens(from, options, to);
  return to.finish();
}

}  // namespace qshard
