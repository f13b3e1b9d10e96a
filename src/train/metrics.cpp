#include "train/metrics.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

namespace qshard {

void say_line(const std::string& text) {
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

std::string human_bytes(double bytes) {
  constexpr const char* units[] = {"B", "kB", "MB", "GB", "TB"};
  int i = 0;
  for (; bytes >= 1000 && i < 4; ++i) bytes /= 1000;
  return fmt::format("{:.{}f} {}", bytes, i ? 2 : 0, units[i]);
}

std::string human_time(double seconds) {
  const int64_t s = std::llround(seconds);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

// Why a step changed nothing, or "".
static std::string reason_to_skip(const StepResult& result) {
  if (result.overflow)
    return fmt::format("a gradient overflowed at loss scale {}", result.loss_scale);
  return result.updated ? "" : "no label was kept";
}

Metrics::Metrics(const Run& run)
    : run_(run),
      file_(run.folder + "/metrics.jsonl", std::ios::app),
      begin_(std::chrono::steady_clock::now()) {
  if (!file_) fail("cannot write {}/metrics.jsonl", run.folder);
  if (run.resumed_from.empty()) return;
  read_earlier_steps();
  write_line(
      nlohmann::ordered_json{{"resumed_from", run.resumed_from}, {"step", run.first_step - 1}}
          .dump());
}

// What earlier launches of this run wrote, for the loss curve.
void Metrics::read_earlier_steps() {
  std::ifstream lines(run_.folder + "/metrics.jsonl");
  std::map<int64_t, double> train, val;  // where a step appears twice, the later line counts
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json j = nlohmann::json::parse(line, nullptr, false);
    if (j.is_discarded() || !j.contains("step") || j["step"] >= run_.first_step) continue;
    if (j.contains("loss") && !j.contains("skipped")) train[j["step"]] = j["loss"];
    if (j.contains("val_loss")) val[j["step"]] = j["val_loss"];
  }
  for (const auto& [step, loss] : train) train_.push_back({step, loss});
  for (const auto& [step, loss] : val) val_.push_back({step, loss});
}

void Metrics::write_line(const std::string& json) {
  file_ << json << '\n' << std::flush;
  if (!file_) fail("cannot write {}/metrics.jsonl: is the disk full?", run_.folder);
}

void Metrics::step(int64_t step, const StepResult& result, double lr, const StepTiming& timing) {
  const double seconds = timing.seconds;
  const double flops = run_.flops_per_step / seconds;
  nlohmann::ordered_json line = {
      {"step", step},
      {"loss", result.loss},
      {"grad_norm", result.grad_norm},
      {"lr", lr},
      {"tokens", step * run_.tokens_per_step},
      {"tokens_per_s", static_cast<double>(run_.tokens_per_step) / seconds},
      {"step_ms", seconds * 1e3},
      {"model_flops_per_s", flops},
      {"peak_share", flops / run_.peak_flops},
      {"memory_bytes", timing.memory_bytes}};
  const std::string skipped = reason_to_skip(result);
  if (result.loss_scale > 0) line["loss_scale"] = result.loss_scale;
  if (!skipped.empty()) line["skipped"] = skipped;
  write_line(line.dump());
  if (result.updated) train_.push_back({step, result.loss});
  interval_seconds_ += seconds;
  step_seconds_ += seconds;
  interval_steps_ += 1;
  steps_run_ += 1;
  if (result.updated) {
    interval_loss_ += result.loss;
    interval_updates_ += 1;
  }
  overflows_ += result.overflow;
  memory_bytes_ = timing.memory_bytes;
  if (step == run_.first_step || step % run_.log_every == 0 || step == run_.steps ||
      !result.updated)
    console_line(step, result, lr, skipped);
}

void Metrics::console_line(int64_t step, const StepResult& result, double lr,
                           const std::string& skipped) {
  const double n = static_cast<double>(interval_steps_);
  const double step_s = interval_seconds_ / n;
  const double flops = run_.flops_per_step / step_s;
  // Steps so far, evaluations included, tell how long the rest takes.
  const double elapsed = step_seconds_ + eval_seconds_;
  const double eta = elapsed / static_cast<double>(step - run_.first_step + 1) *
                     static_cast<double>(run_.steps - step);
  const int width = static_cast<int>(std::to_string(run_.steps).size());
  fmt::print(
      "step {:>{}}/{}  loss {:.4f}  norm {:.3f}  lr {:.2e}  {:.0f} tok/s  {:.1f} GFLOP/s ({:.0f} % "
      "of peak)"
      "  {:.1f} ms/step  ETA {}{}\n",
      step, width, run_.steps,
      interval_loss_ / std::max(1.0, static_cast<double>(interval_updates_)), result.grad_norm, lr,
      static_cast<double>(run_.tokens_per_step) / step_s, flops / 1e9,
      100 * flops / run_.peak_flops, step_s * 1e3, human_time(eta),
      skipped.empty() ? "" : "  skipped: " + skipped);
  std::fflush(stdout);
  interval_seconds_ = interval_loss_ = 0;
  interval_steps_ = interval_updates_ = 0;
}

void Metrics::evaluation(int64_t step, double val_loss, int64_t val_tokens, double seconds) {
  const nlohmann::ordered_json line = {{"step", step},
                                       {"val_loss", val_loss},
                                       {"val_tokens", val_tokens},
                                       {"val_ms", seconds * 1e3}};
  write_line(line.dump());
  val_.push_back({step, val_loss});
  eval_seconds_ += seconds;
  fmt::print("eval at step {}: held-out loss {:.4f} nats per token ({} tokens, {:.1f} s)\n", step,
             val_loss, val_tokens, seconds);
  std::fflush(stdout);
}

void Metrics::checkpoint(int64_t step, const std::string& path, int64_t bytes, double seconds) {
  write_line(nlohmann::ordered_json{{"step", step},
                                    {"checkpoint", path},
                                    {"checkpoint_bytes", bytes},
                                    {"checkpoint_ms", seconds * 1e3}}
                 .dump());
  say("saved step {}: {}, {} in {:.2f} s, {:.2f} GB/s", step, path,
      human_bytes(static_cast<double>(bytes)), seconds, static_cast<double>(bytes) / seconds / 1e9);
}

void Metrics::finish() {
  const double total =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  std::vector<double> steps, losses, val_steps, val_losses;
  for (const Point& p : train_)
    steps.push_back(static_cast<double>(p.step)), losses.push_back(p.loss);
  for (const Point& p : val_)
    val_steps.push_back(static_cast<double>(p.step)), val_losses.push_back(p.loss);
  fmt::print("\n{}\n", plot_losses(steps, losses, val_steps, val_losses));
  fmt::print(
      "{} steps, {} tokens in {} ({} training, {} evaluation): {:.0f} tokens/s, largest rank {} of "
      "memory\n",
      steps_run_, steps_run_ * run_.tokens_per_step, human_time(total), human_time(step_seconds_),
      human_time(eval_seconds_),
      static_cast<double>(steps_run_ * run_.tokens_per_step) / step_seconds_,
      human_bytes(static_cast<double>(memory_bytes_)));
  if (overflows_ > 0) fmt::print("{} step(s) skipped: a gradient overflowed in fp16\n", overflows_);
  if (!val_.empty()) fmt::print("held-out loss {:.4f} nats per token\n", val_.back().loss);
}

std::string plot_losses(const std::vector<double>& train_steps,
                        const std::vector<double>& train_losses,
                        const std::vector<double>& val_steps,
                        const std::vector<double>& val_losses) {
  constexpr int kColumns = 72, kRows = 14;
  if (train_steps.empty()) return "";
  double low = INFINITY, high = -INFINITY;
  for (const auto* losses : {&train_losses, &val_losses})
    for (double loss : *losses) low = std::min(low, loss), high = std::max(high, loss);
  if (high - low < 1e-12) high = low + 1;
  const double first = train_steps.front(), last = std::max(train_steps.back(), first + 1);

  std::vector<std::string> grid(kRows, std::string(kColumns, ' '));
  auto put = [&](double step, double loss, char mark) {
    const int column =
        static_cast<int>(std::lround((step - first) / (last - first) * (kColumns - 1)));
    const int row = static_cast<int>(std::lround((high - loss) / (high - low) * (kRows - 1)));
    grid[row][std::clamp(column, 0, kColumns - 1)] = mark;
  };
  for (size_t i = 0; i < train_steps.size(); ++i) put(train_steps[i], train_losses[i], '.');
  for (size_t i = 0; i < val_steps.size(); ++i) put(val_steps[i], val_losses[i], 'o');

  std::string text = "loss (nats per token)   . training   o held-out\n";
  for (int row = 0; row < kRows; ++row) {
    const double value = high - (high - low) * row / (kRows - 1);
    text += fmt::format("{:>8} |{}\n",
                        row % 3 == 0 || row == kRows - 1 ? fmt::format("{:.3f}", value) : "",
                        grid[row]);
  }
  text += fmt::format("{:>8} +{}\n{:>8}  step {:<{}}{:>8}", "", std::string(kColumns, '-'), "",
                      first, kColumns - 13, last);
  return text;
}

}  // namespace qshard
