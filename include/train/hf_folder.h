// Hugging Face folders (config.json and safetensors) out of checkpoints, and checkpoints out of
// them.
#pragma once

#include <functional>
#include <string>

#include "comm/world.h"
#include "io/checkpoint.h"
#include "io/hf_weights.h"
#include "model/qwen3_config.h"

namespace qshard {

struct HfExportOptions {
  DType dtype = DType::f32;                 // or bf16
  int64_t max_shard_bytes = 5'000'000'000;  // of one file; a larger tensor has a file to itself
  bool overwrite = false;                   // replace the weights of a folder that is not empty
};

struct HfExportReport {
  int64_t tensors = 0, bytes = 0, files = 0;  // bytes and files of weights; on every rank
};

// Checks the checkpoint's checksums on all ranks; then rank 0 writes, with one tensor in memory,
// beside the folder under a temporary name that it renames at the end. A tied head is not stored.
// Collective.
HfExportReport export_checkpoint(const World& world, const std::string& checkpoint,
                                 const std::string& folder, const HfExportOptions& options);

// A checkpoint of step 0 with zero moments, for `train --resume FILE --init weights-only`. Every
// rank reads its rows. `warn`: see warn_of_tied_head(). Collective.
void import_checkpoint(const World& world, const std::string& folder, const std::string& checkpoint,
                       bool overwrite, const std::function<void(const std::string&)>& warn);

// A config.json that transformers reads; `dtype`: of the weights beside it. `tokenizer`: that of
// the token file which the model was trained on, kept as "qshard_tokenizer"; empty: not known.
void write_hf_config(const std::string& path, const Qwen3Config& config, DType dtype,
                     const std::string& tokenizer);

// The config.json of a folder.
Qwen3Config read_hf_config(const std::string& folder);
std::string read_hf_tokenizer(const std::string& folder);  // as written above; empty: not known

// The same of a checkpoint, from the settings of the run that it keeps.
std::string tokenizer_of(const CheckpointState& state);

}  // namespace qshard
