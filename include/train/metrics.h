// What a run reports: metrics.jsonl and the only console output of training. Rank 0 owns one.
//
// [Note: Metrics] One JSON object a line. A step: step, loss (nats per kept label, all ranks),
// grad_norm (before clipping), lr, tokens (input tokens of all steps so far), tokens_per_s (all
// ranks, this step), step_ms, model_flops_per_s (all ranks; see train_flops_per_token), peak_share
// (of ranks × measured product rate), memory_bytes (largest peak of resident memory of a rank); in
// a step without a kept label loss and grad_norm are 0 and `skipped` says so. With fp16 parameters
// loss_scale (of this step), and in a step whose gradient overflowed `skipped`; loss and grad_norm
// are null there where they are not finite. An evaluation: step,
// val_loss, val_tokens, val_ms. A save: step, checkpoint, checkpoint_bytes, checkpoint_ms. A
// restart: resumed_from, step; where a step appears twice, after a crash, the later line counts.
// Times and memory apart, equal runs write equal bytes.
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
    int64_t first_step = 1;             // of this launch; later ones append to the file
    std::string resumed_from;           // checkpoint, or empty
  };
  explicit Metrics(const Run& run);

  void step(int64_t step, const StepResult& result, double lr, const StepTiming& timing);
  void evaluation(int64_t step, double val_loss, int64_t val_tokens, double seconds);
  void checkpoint(int64_t step, const std::string& path, int64_t bytes, double seconds);
  void finish();  // loss curve of the whole run, summary of this launch

 private:
  void read_earlier_steps();
  void write_line(const std::string& json);
  void console_line(int64_t step, const StepResult& result, double lr, const std::string& skipped);

  struct Point {
    int64_t step;
    double loss;
  };
  Run run_;
  std::ofstream file_;
  std::chrono::steady_clock::time_point begin_;
  std::vector<Point> train_, val_;
  double interval_seconds_ = 0, interval_loss_ = 0, step_seconds_ = 0, eval_seconds_ = 0;
  int64_t steps_run_ = 0, interval_steps_ = 0, interval_updates_ = 0, overflows_ = 0,
          memory_bytes_ = 0;
};

// 72 columns × 14 rows: training loss as dots, evaluations as o. Empty when there are no points.
std::string plot_losses(const std::vector<double>& train_steps,
                        const std::vector<double>& train_losses,
                        const std::vector<double>& val_steps,
                        const std::vector<double>& val_losses);

// One line on the console, at once: call it on rank 0.
void say_line(const std::string& text);
template <typename... A>
void say(fmt::format_string<A...> format, A&&... args) {
  say_line(fmt::format(format, std::forward<A>(args)...));
}

std::string human_bytes(double bytes);   // "1.50 GB" (powers of 1000)
std::string human_time(double seconds);  // "0:02:05"

}  // namespace qshard
