// From text files to byte-level tokens: token = byte, and token 256 ends each document (= file).
//
// Files are taken in the order of their names, so the result depends on nothing but the files.
// Whether a document is validation data is decided by a hash of its name: adding files moves none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/dataset.h"

namespace qshard {

constexpr const char* kByteTokenizer = "bytes";
constexpr int64_t kByteVocabSize = 257;
constexpr uint32_t kByteEndOfDocument = 256;

struct CorpusOptions {
  std::vector<std::string> paths;     // files, and folders to search
  std::vector<std::string> suffixes;  // of files in folders, e.g. ".h"; empty: all files
  double val_fraction = 0;            // share of the documents, chosen by hash
  int64_t max_bytes = 0;              // bytes to take, the last file is cut; 0: all
};

struct CorpusFile {
  std::string path;
  std::string name;  // relative to the folder it was found in; of a single file its file name
};

// What was left out; the counts are of files, `unreadable` also of folders.
struct CorpusSkips {
  int64_t unreadable = 0, not_regular = 0, empty = 0, binary = 0;
};

// Files of the paths, sorted by name, none twice. Symbolic links in folders are not followed and
// count as not regular. Throws when one of the paths does not exist.
std::vector<CorpusFile> list_corpus(const CorpusOptions& options, CorpusSkips& skips);

bool is_validation(const std::string& name, double fraction);

struct CorpusCounts {
  int64_t files = 0, val_files = 0;  // val_files are not among files
  int64_t bytes = 0;                 // of both
  CorpusSkips skips;
};

// Skips and counts empty files and files with a NUL byte. `val` may be null: then all is training
// data.
CorpusCounts tokenize_bytes(const CorpusOptions& options, TokenFileWriter& train,
                            TokenFileWriter* val);

struct TokenizedCorpus {
  TokenFileInfo train, val;
  CorpusCounts counts;
};

// Files, bytes, speed and what was skipped, in two lines.
std::string summary(const CorpusCounts& counts, double seconds);

// tokenize_bytes into the files `out` and, unless it is empty, `val_out`. Throws when one of them
// would hold no document; then neither is written.
TokenizedCorpus write_byte_tokens(const CorpusOptions& options, const std::string& out,
                                  const std::string& val_out);

}  // namespace qshard
