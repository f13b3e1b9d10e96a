// Token files and the order in which samples are read.
//
// [Note: Token file] HDF5: dataset /tokens (uint32, contiguous), dataset /document_offsets (uint64,
// first token of each document, ascending, the first one 0), attributes on the root: format
// "qshard-tokens", version 1, vocab_size, tokenizer, source. Also read: .bin with llm.c's headers
// (magic 20240520 version 1: uint16, GPT-2; magic 20240801 version 7: uint32, Llama 3) and
// headerless raw files when asked for by format. Tokens are read by mmap at the dataset's file
// offset: no HDF5 call between steps.
//
// [Note: Sample order] Sample i is tokens [i·T, i·T + T] of the file: T inputs and, shifted by one,
// T labels; a file of n tokens has floor((n − 1) / T) samples. Attention and labels cross document
// ends: a token sees the end of the document before its own when both lie in one sample. An epoch
// visits the samples in the order of a permutation that is a pure function of (seed, epoch): a
// Feistel network over Philox with cycle walking, no state. Steps per epoch = floor(samples /
// global batch); the remainder of an epoch is dropped (with shuffling another part each epoch). The
// k-th sample of global step s does not depend on the number of ranks: micro-batch a, rank r, row b
// is k = a·(ranks·micro_batch) + r·micro_batch + b.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/file.h"

namespace qshard {

struct TokenFileInfo {
  std::string path;
  std::string format;             // "hdf5", "llmc-gpt2", "llmc-llama3", "raw-u16", "raw-u32"
  std::string tokenizer, source;  // as recorded; empty: not known
  int64_t tokens = 0;
  int64_t documents = 0;    // 0: not known
  int64_t vocab_size = 0;   // 0: not known
  int width = 4;            // bytes of a token in the file
  int64_t data_offset = 0;  // of the first token in the file, bytes
};

// Read-only mapping of a token file. Opening checks size, header and offsets; errors name the file,
// what was expected, what was found and the fix. Reading is safe from several threads.
class TokenFile {
 public:
  // format "auto" takes HDF5 or an llm.c header by its magic; raw-u16 and raw-u32 must be asked
  // for.
  explicit TokenFile(const std::string& path, const std::string& format = "auto");
  TokenFile(TokenFile&& other) noexcept = default;

  const TokenFileInfo& info() const { return info_; }
  std::vector<int64_t> document_offsets() const;  // empty when not known
  // Tokens [first, first + n) as i32. Throws with file, token index, byte offset and id when an id
  // is ≥ vocab; `to` then holds what was read.
  void read(int64_t first, int64_t n, int64_t vocab, int32_t* to) const;

 private:
  void read_hdf5_header();
  void read_llmc_header();
  void read_raw_size();
  [[noreturn]] void refuse_id(int64_t first, int64_t n, int64_t vocab) const;
  uint32_t token(int64_t i) const;
  const std::byte* bytes_of(int64_t token) const;
  MappedFile file_;
  TokenFileInfo info_;
};

// A bijection of [0, n), a pure function of (seed, epoch).
class Permutation {
 public:
  Permutation(int64_t n, uint64_t seed, uint64_t epoch);
  int64_t operator()(int64_t i) const;

 private:
  uint64_t encrypt(uint64_t x) const;
  int64_t n_;
  int half_bits_;  // the network permutes [0, 2^(2·half_bits)), at most 4 times n
  uint64_t seed_, epoch_;
};

class Sampler {
 public:
  // Throws with both numbers when the file has fewer samples than one global batch.
  Sampler(const TokenFile& file, int64_t T, int64_t global_batch, bool shuffle, uint64_t seed);
  int64_t samples() const { return samples_; }
  int64_t steps_per_epoch() const { return samples_ / global_batch_; }
  int64_t dropped_per_epoch() const { return samples_ % global_batch_; }
  // Sample index of position k of step s (s = 0 for the first step of the run).
  int64_t sample(int64_t s, int64_t k) const;

 private:
  int64_t samples_, global_batch_;
  bool shuffle_;
  uint64_t seed_;
};

// Writes an HDF5 token file. Tokens are collected in an unnamed temporary file in the folder of
// `path`, because a contiguous dataset needs its size first: memory stays bounded, the disk holds
// the tokens twice until finish() returns. Serial. Without finish() nothing remains.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& path, const std::string& tokenizer, int64_t vocab_size,
                  const std::string& source);
  ~TokenFileWriter();

  void append(
      std::span<const uint32_t> tokens);  // to the current document; checks ids < vocab_size
  void end_document();                    // a document without tokens is not recorded
  void add_document(std::span<const uint32_t> tokens);  // append, then end_document

  int64_t tokens() const;
  // Ends the last document, writes the file under a temporary name and renames it. Throws when
  // there are no tokens.
  TokenFileInfo finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qshard
