// Token files and the order in which samples are read.
//
// [Note: Token file] HDF5: dataset /tokens (uint32, contiguous), dataset /document_offsets (uint64,
// start of each document, ascending, first 0), attributes on the root: format "qshard-tokens",
// version 1, vocab_size, tokenizer, source. Also read: .bin with llm.c's headers (magic 20240520
// version 1: uint16 GPT-2; magic 20240801 version 7: uint32 Llama-3) and headerless raw files when
// asked for by format. Tokens are read by mmap at the dataset's file offset: no HDF5 call between steps.
//
// [Note: Sample order] Sample i is tokens [i·T, i·T + T] of the file: T inputs and, shifted by one,
// T labels; a file of n tokens has floor((n − 1) / T) samples. Attention and labels cross document
// ends. An epoch visits the samples in the order of a permutation that is a pure function of (seed,
// epoch): a Feistel network over Philox with cycle walking, no state. Steps per epoch =
// floor(samples / global batch); the remainder of an epoch is dropped (another part each epoch).
// The k-th sample of global step s does not depend on the number of ranks: micro-batch a, rank r,
// row b is k = a·(ranks·micro_batch) + r·micro_batch + b.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace qshard {

struct TokenFileInfo {
  std::string path, format, tokenizer;  // format: "hdf5", "llmc-gpt2", "llmc-llama3", "raw-u16", "raw-u32"
  int64_t tokens = 0, documents = 0;
  int64_t vocab_size = 0;  // 0: not known
  int width = 4;           // bytes of a token in the file
  int64_t data_offset = 0; // of the first token in the file, bytes
};

// Read-only mapping of a token file. Opening checks size, header and offsets; errors name the file,
// what was expected and what was found.
class TokenFile {
 public:
  // format "auto" takes HDF5 or an llm.c header by its magic; raw-u16 and raw-u32 must be asked for.
  explicit TokenFile(const std::string& path, const std::string& format = "auto");
  ~TokenFile();
  TokenFile(TokenFile&& other) noexcept;
  const TokenFileInfo& info() const { return info_; }
  std::vector<int64_t> document_offsets() const;
  // Tokens [first, first + n) as i32. Throws with file, offset, id when an id ≥ vocab.
  void read(int64_t first, int64_t n, int64_t vocab, int32_t* to) const;

 private:
  TokenFileInfo info_;
  void* map_ = nullptr;
  size_t size_ = 0;
};

// A bijection of [0, n), a pure function of (seed, epoch).
class Permutation {
 public:
  Permutation(int64_t n, uint64_t seed, uint64_t epoch);
  int64_t operator()(int64_t i) const;

 private:
  int64_t n_;
  int half_bits_;
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

// HDF5 token file from tokens in memory; temporary name, then rename. Serial.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& path, const std::string& tokenizer, int64_t vocab_size, const std::string& source);
  ~TokenFileWriter();
  void add_document(std::span<const uint32_t> tokens);  // checks ids < vocab_size
  TokenFileInfo finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qshard
