// A training run: data, engine, schedule, metrics, evaluation, outputs.
#pragma once

#include "io/dataset.h"
#include "io/hf_weights.h"
#include "train/checkpointer.h"
#include "train/engine.h"
#include "train/memory_fit.h"
#include "train/metrics.h"
#include "train/trace_file.h"
#include "train/train_config.h"

namespace qshard {

class Trainer {
 public:
  // Collective. Refuses at once what cannot work (data smaller than a step, vocabulary, outputs of
  // an earlier run) before anything large is allocated. `settings`: the run's settings as JSON,
  // kept with the outputs; `table`: the same for people. `traced`: the run's trace, or null;
  // outlives it.
  Trainer(TrainConfig config, const nlohmann::json& settings, const std::string& table,
          World& world, Backend& backend, TracedRun* traced = nullptr);
  // Returns the exit code: done, or stopped by a signal (or train.stop_after), saved, to be
  // resumed.
  int run();

 private:
  void open_data();
  void choose_checkpoint();
  void restore();
  void start_from(const HfWeights& weights);
  void require_compatible(const CheckpointState& saved) const;
  void save(int64_t step);
  void log_save();
  bool nothing_to_do() const { return first_step_ > config_.train.steps; }
  void require_same_inputs() const;
  void prepare_outputs(const nlohmann::json& settings);
  void open_metrics();
  void print_start(const std::string& table);
  void print_sharding() const;
  void train_step(int64_t step);
  void evaluate(int64_t step);
  void save_model();
  Buffer token_buffer(int64_t tokens) const;
  std::vector<TokenBatch> read_step(int64_t step);
  std::vector<TokenBatch> read_evaluation(int64_t samples);
  int64_t peak_memory() const;
  void make_engine();
  void plan_memory();
  int64_t own_host_bytes(const PlanRequest& request) const;
  int64_t snapshot_bytes(const PlanRequest& request) const;  // of checkpoint.async
  int64_t evaluation_samples() const;
  void report_memory() const;
  Trace* trace() { return traced_ ? &traced_->trace : nullptr; }
  void end_of_trace();

  TrainConfig config_;
  World& world_;
  Qwen3Config model_config_;
  std::unique_ptr<TokenFile> train_file_, val_file_;
  std::unique_ptr<Sampler> sampler_;
  Backend& backend_;
  TracedRun* traced_;
  Plan plan_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Metrics> metrics_;  // rank 0
  std::unique_ptr<Checkpointer> checkpointer_;
  nlohmann::json settings_;
  std::string checkpoint_;  // to resume from, or empty
  CheckpointState saved_;   // its header
  int64_t first_step_ = 1;  // of this launch
  bool stop_ = false;       // agreed by all ranks
  Buffer ids_, labels_, val_ids_, val_labels_;
};

}  // namespace qshard
