// Everything a training run can be told, described once: see describe().
#pragma once

#include <string>

#include "base/config.h"
#include "comm/transport_options.h"
#include "fsdp/unit.h"
#include "model/qwen3_config.h"
#include "train/adamw.h"
#include "train/checkpointer.h"
#include "train/grad_scaler.h"
#include "train/lr_schedule.h"

namespace qshard {

// Fields of a Hugging Face config.json given one by one; 0 or "" = not given.
struct ModelOptions {
  std::string config;  // path of a config.json; the fields below override it
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, num_hidden_layers = 0;
  int64_t num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0;
  double rope_theta = 0, rms_norm_eps = 0, initializer_range = 0;
  std::string tie_word_embeddings;
};

struct DataOptions {
  std::string train, val, format = "auto";
  bool shuffle = true;
};

struct TrainOptions {
  int64_t steps = 1000, seq = 256, global_batch = 16, micro_batch = 0;
  uint64_t seed = 1;
  std::string param_dtype = "bf16", reduce_dtype = "f32", activation_checkpoint = "none";
  int64_t log_every = 10, eval_every = 100, eval_samples = 64;
  std::string out;
  int64_t stop_after = 0;
  bool overwrite = false, save_model = true;
  double peak_gflops = 0, memory_gb = 0;
};

struct TrainConfig {
  ModelOptions model;
  DataOptions data;
  TrainOptions train;
  AdamWOptions adamw;
  GradScalerOptions grad_scaler;
  std::string decay = "matrices", offload = "none";
  ScheduleOptions schedule;
  FsdpOptions fsdp;
  CheckpointOptions checkpoint;
  TransportOptions transport;
  std::string backend = "cpu";
  bool graph = false;

  // Where a run begins, from the command line.
  std::string resume =
      "none";        // none, auto (newest in train.out, if any), or a checkpoint or folder
  std::string init;  // "": random; hf:DIR; weights-only: the weights of --resume, step 0
  bool allow_changes = false;  // resume although options that change the mathematics differ

  // Registers every option with its doc, unit and limits.
  void describe(OptionTable& table);
  // After all values are known: fills what follows from others (dtypes, schedule.total_steps) and
  // refuses combinations that cannot work, with numbers.
  void finish(int ranks);

  // Reads model.config, or without it the config.json of --init hf:DIR, on this rank. With both,
  // all that shapes the model or changes its mathematics has to agree.
  Qwen3Config load_model() const;
  std::string hf_folder() const;  // of --init hf:DIR, or ""
  std::string checkpoint_folder() const { return train.out + "/checkpoints"; }
  int64_t accumulation(int ranks) const { return train.global_batch / (train.micro_batch * ranks); }
  int64_t tokens_per_step() const { return train.global_batch * train.seq; }
};

// Options in which two runs' settings (as JSON) differ, "key: saved → now". Those that only say
// where and how the run computes are left out.
struct ConfigChanges {
  std::vector<std::string> mathematics, others;
};
ConfigChanges compare_runs(const nlohmann::json& saved, const nlohmann::json& now);

}  // namespace qshard
