// A run's checkpoints: when they are written, in the foreground or behind training, and what a
// resumed run takes from one.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <thread>

#include "io/checkpoint.h"
#include "train/engine.h"

namespace qshard {

struct CheckpointOptions {
  int64_t every = 0;  // steps; 0: only at the end and when the run is stopped
  bool at_end = true;
  bool async = false;  // written by a thread from a copy while training goes on, see save()
  int64_t piece_mb = 512, alignment_kb = 4;
  SaveOptions save;
};

// The model's and optimizer's tensors as this rank holds them: views, valid as long as the model,
// of memory of model.device().
std::vector<CheckpointTensor> checkpoint_tensors(Qwen3Model& model, bool model_only);

class Checkpointer {
 public:
  // Collective. `folder` is made at the first save. The first replica of the mesh writes.
  Checkpointer(const CheckpointOptions& options, const std::string& folder, const Mesh& mesh,
               Backend& backend, Qwen3Model& model);
  ~Checkpointer();

  // Collective. Waits for an earlier save in the background. With async it returns once the copy to
  // host memory is started, which is made beside the next step up to its update (Engine::update
  // comes after it). Weights or moments that are not finite are refused (see save_checkpoint): they
  // never replace good ones.
  void save(const CheckpointState& state);
  // Waits for a save in the background; its failure is an AgreedError. Collective.
  void finish();
  // Whether a save in the background has failed on this rank: finish() then tells.
  bool failed() const { return failed_; }
  // The report of a save that has ended since the last call. Rank 0 asks, for the log.
  std::optional<SaveReport> take_report();
  int64_t last_step() const { return last_step_; }  // of the last save begun; -1: none

 private:
  void make_room();
  std::vector<CheckpointTensor> start_snapshot();

  CheckpointOptions options_;
  std::string folder_;
  const Mesh& mesh_;
  Backend& backend_;
  Qwen3Model& model_;
  std::unique_ptr<World> background_world_;
  Buffer snapshot_;  // of all tensors, one after the other; kept from save to save
  std::thread thread_;
  std::exception_ptr failure_;
  SaveReport report_;
  std::atomic<bool> report_ready_{false}, failed_{false};
  int64_t last_step_ = -1;
};

}  // namespace qshard
