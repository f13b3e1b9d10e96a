// What `qshard data info` and `qshard data import` do with an open token file.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "io/dataset.h"

namespace qshard {

struct DocumentLengths {
  int64_t shortest = 0, longest = 0;  // tokens
  double mean = 0;
};
// All zero when the documents are not known.
DocumentLengths document_lengths(const TokenFile& file);

// The largest id of the whole file; reads all of it.
int64_t largest_id(const TokenFile& file);

// The first n tokens: as quoted text of a byte-level file, otherwise as numbers.
std::string first_tokens(const TokenFile& file, int64_t n);

// All header fields, document lengths, samples of `seq` tokens and the first tokens; with `scan`
// also the largest id. Names carry the units.
nlohmann::ordered_json describe_tokens(const TokenFile& file, int64_t seq, bool scan);

struct ImportOptions {
  int64_t vocab_size = 0;                 // ids have to be below it; 0: as the format implies
  std::optional<int32_t> document_start;  // id with which each document begins
};
// Copies a file of format "llmc", "raw-u16" or "raw-u32" to the HDF5 file `out` in bounded pieces.
// Where the options say nothing, llm.c's files have the vocabulary and the document start of their
// tokenizers; raw files are one document and need a vocab_size.
TokenFileInfo import_tokens(const std::string& path, const std::string& format,
                            ImportOptions options, const std::string& out);

}  // namespace qshard
