// What a run reports: metrics.jsonl and the only console output of training. Rank 0 owns one.
//
// [Note: Metrics] One JSON object a line. A step: step, loss (nats per kept label, all ranks), grad_norm
// (before clipping), lr, tokens (input tokens of all steps so far), tokens_per_s (all ranks, this step),
// step_ms, model_flops_per_s (all ranks; see train_flops_per_token), peak_share (of ranks × measured
// product rate), memory_bytes (largest peak of resident memory of a rank). An evaluation: step, val_loss,
// val_tokens, val_ms. Times apart, equal runs write equal bytes.
#pragma once

#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "train/engine.h"

namespace qshard {

struct StepTiming {
  double seconds;
  int64_t memory_bytes;
};

class Metrics {
 public:
  struct Run {
    std::string folder;
    int64_t steps, log_every, tokens_per_step;
    double flops_per_step, peak_flops;  // peak of all ranks together
  };
  explicit Metrics(const Run& run);

  void step(int64_t step, const StepResult& result, double lr, const StepTiming& timing);
  void evaluation(int64_t step, double val_loss, int64_t val_tokens, double seconds);
  void finish();  // loss curve and summary

 private:
  void write_line(const std::string& json);
  void console_line(int64_t step, const StepResult& result, double lr);

  struct Point {
    int64_t step;
    double loss;
  };
  Run run_;
  std::ofstream file_;
  std::chrono::steady_clock::time_point begin_;
  std::vector<Point> train_, val_;
  double interval_seconds_ = 0, interval_loss_ = 0, step_seconds_ = 0, eval_seconds_ = 0;
  int64_t interval_steps_ = 0, memory_bytes_ = 0;
};

// 72 columns × 14 rows: training loss as dots, evaluations as o. Empty when there are no points.
std::string plot_losses(const std::vector<double>& train_steps, const std::vector<double>& train_losses,
                        const std::vector<double>& val_steps, const std::vector<double>& val_losses);

std::string human_bytes(double bytes);  // "1.50 GB" (powers of 1000)
std::string human_time(double seconds);  // "0:02:05"

}  // namespace qshard
