#include "train/trainer.h"

#include <sys/resource.h>

#include <ctime>
#include <filesystem>

#include "comm/gather.h"
#include "train/export.h"

namespace qshard {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::string timestamp() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y%m%d-%H%M%S", std::localtime(&now));
  return text;
}

// T inputs and T labels of the sample that starts at token `first`.
void read_sample(const TokenFile& file, int64_t first, int64_t T, int64_t vocab, int32_t* ids, int32_t* labels) {
  file.read(first, T, vocab, ids);
  file.read(first + 1, T, vocab, labels);
}

}  // namespace

Trainer::Trainer(TrainConfig config, const nlohmann::json& settings, const std::string& table, World& world,
                 Backend& backend)
    : config_(std::move(config)), world_(world), backend_(backend) {
  collectively(world_, [&] {
    config_.finish(world_.size());
    model_config_ = config_.load_model();
    open_data();
  });
  prepare_outputs(settings);
  print_start(table);

  engine_ = std::make_unique<Engine>(model_config_, config_.fsdp, config_.adamw, config_.transport,
                                     config_.train.micro_batch, config_.train.seq, world_, backend_);
  engine_->model().init_parameters(config_.train.seed);

  world_.barrier();
  double peak = config_.train.peak_gflops > 0 ? config_.train.peak_gflops * 1e9
                                              : backend_.ops->measure_peak(config_.fsdp.param_dtype, 0.1);
  world_.all_reduce_sum(&peak, 1);
  const double flops = model_config_.train_flops_per_token(config_.train.seq) * static_cast<double>(config_.tokens_per_step());
  if (world_.rank() == 0) {
    fmt::print("product rate of all ranks together: {:.1f} GFLOP/s ({}); a step is {:.2f} GFLOP of model arithmetic\n\n",
               peak / 1e9, config_.train.peak_gflops > 0 ? "given" : "measured now", flops / 1e9);
    metrics_ = std::make_unique<Metrics>(Metrics::Run{config_.train.out, config_.train.steps, config_.train.log_every,
                                                      config_.tokens_per_step(), flops, peak});
  }
}

void Trainer::open_data() {
  const int64_t V = model_config_.vocab_size;
  auto open = [&](const std::string& path) {
    auto file = std::make_unique<TokenFile>(path, config_.data.format);
    if (file->info().vocab_size > V)
      fail("{}: tokenized for a vocabulary of {}, the model has vocab_size {}: use the model's tokenizer or a model "
           "with at least {} rows", path, file->info().vocab_size, V, file->info().vocab_size);
    return file;
  };
  train_file_ = open(config_.data.train);
  sampler_ = std::make_unique<Sampler>(*train_file_, config_.train.seq, config_.train.global_batch,
                                       config_.data.shuffle, config_.train.seed);
  if (!config_.data.val.empty()) {
    val_file_ = open(config_.data.val);
    if (val_file_->info().tokens <= config_.train.seq)
      fail("{}: {} tokens, an evaluation needs at least train.seq + 1 = {}", config_.data.val,
           val_file_->info().tokens, config_.train.seq + 1);
  }
}

void Trainer::prepare_outputs(const nlohmann::json& settings) {
  if (config_.train.out.empty()) config_.train.out = "runs/" + timestamp();
  config_.train.out = world_.broadcast(config_.train.out, 0);
  collectively(world_, [&] {
    if (world_.rank() != 0) return;
    const std::filesystem::path folder = config_.train.out;
    if (std::filesystem::exists(folder / "metrics.jsonl") && !config_.train.overwrite)
      fail("{} holds an earlier run: choose another --train.out, or --train.overwrite true", folder.string());
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) fail("cannot create {}: {}", folder.string(), error.message());
    std::ofstream file(folder / "run.json");
    file << settings.dump(2) << '\n';
    if (!file.flush()) fail("cannot write {}/run.json", folder.string());
  });
}

void Trainer::print_start(const std::string& table) {
  const auto ranks = world_.gather(fmt::format("{} cpus {} threads {} on {}", world_.rank(), world_.cpus(),
                                               world_.threads_per_rank(), world_.host()));
  if (world_.rank() != 0) return;
  const TrainOptions& t = config_.train;
  fmt::print("{}\n", table);
  fmt::print("model    {} parameters, {} layers; a rank holds 1/{} of each\n", model_config_.num_parameters(),
             model_config_.num_hidden_layers, world_.size());
  fmt::print("data     {}: {} tokens, {} samples of {} tokens, {} steps an epoch ({} samples left out of each)\n",
             config_.data.train, train_file_->info().tokens, sampler_->samples(), t.seq, sampler_->steps_per_epoch(),
             sampler_->dropped_per_epoch());
  fmt::print("step     {} sequences = {} ranks × {} micro-batches × {} sequences of {} tokens\n", t.global_batch,
             world_.size(), config_.accumulation(world_.size()), t.micro_batch, t.seq);
  fmt::print("numbers  parameters {}, gradients reduced as {}, sums and master weights f32\n", t.param_dtype, t.reduce_dtype);
  fmt::print("ranks    {} on {} node(s), {}, {} thread(s) a rank, {}, transport {}\n", world_.size(), world_.nodes(),
             backend_.device->name(), world_.threads_per_rank(), world_.mpi_version(), config_.transport);
  if (world_.cpus() < world_.node_size())
    fmt::print("warning  {} cpu(s) for {} ranks on this node: ranks take turns\n", world_.cpus(), world_.node_size());
  for (const std::string& rank : ranks)
    if (world_.nodes() > 1) fmt::print("rank     {}\n", rank);
  fmt::print("output   {}\n", t.out);
  std::fflush(stdout);
}

void Trainer::run() {
  for (int64_t step = 1; step <= config_.train.steps; ++step) {
    train_step(step);
    const bool last = step == config_.train.steps;
    const bool due = config_.train.eval_every && step % config_.train.eval_every == 0;
    if (val_file_ && (last || due)) evaluate(step);
  }
  if (metrics_) metrics_->finish();
  if (config_.train.save_model) save_model();
}

void Trainer::train_step(int64_t step) {
  const Clock::time_point begin = Clock::now();
  const std::vector<TokenBatch> batches = read_step(step);
  const double lr = learning_rate(config_.schedule, step);
  const StepResult result = engine_->step(batches, lr);
  double memory = static_cast<double>(peak_memory());
  world_.all_reduce_max(&memory, 1);
  if (metrics_) metrics_->step(step, result, lr, {seconds_since(begin), static_cast<int64_t>(memory)});
}

// This rank's share of the step, see [Note: Sample order] in io/dataset.h.
std::vector<TokenBatch> Trainer::read_step(int64_t step) {
  const int64_t T = config_.train.seq, B = config_.train.micro_batch, ranks = world_.size();
  const int64_t micro_batches = config_.accumulation(world_.size());
  ids_.resize(micro_batches * B * T);
  labels_.resize(ids_.size());
  std::vector<TokenBatch> batches;
  for (int64_t a = 0; a < micro_batches; ++a) {
    batches.push_back({ids_.data() + a * B * T, labels_.data() + a * B * T});
    for (int64_t b = 0; b < B; ++b) {
      const int64_t sample = sampler_->sample(step - 1, a * (ranks * B) + world_.rank() * B + b);
      const int64_t at = (a * B + b) * T;
      read_sample(*train_file_, sample * T, T, model_config_.vocab_size, &ids_[at], &labels_[at]);
    }
  }
  return batches;
}

// The first eval_samples samples of the file, in order, dealt out row by row; the last batch is filled
// up with ignored labels so that every rank runs the same number of batches.
void Trainer::evaluate(int64_t step) {
  const Clock::time_point begin = Clock::now();
  const int64_t T = config_.train.seq, B = config_.train.micro_batch, ranks = world_.size();
  const int64_t samples = std::min(config_.train.eval_samples, (val_file_->info().tokens - 1) / T);
  const int64_t n = (samples + ranks * B - 1) / (ranks * B);
  val_ids_.assign(n * B * T, 0);
  val_labels_.assign(n * B * T, -100);
  std::vector<TokenBatch> batches;
  for (int64_t i = 0; i < n; ++i) {
    batches.push_back({val_ids_.data() + i * B * T, val_labels_.data() + i * B * T});
    for (int64_t b = 0; b < B; ++b) {
      const int64_t sample = i * (ranks * B) + world_.rank() * B + b, at = (i * B + b) * T;
      if (sample < samples)
        read_sample(*val_file_, sample * T, T, model_config_.vocab_size, &val_ids_[at], &val_labels_[at]);
    }
  }
  const double loss = engine_->evaluate(batches);
  if (metrics_) metrics_->evaluation(step, loss, samples * T, seconds_since(begin));
}

void Trainer::save_model() {
  const std::string path = config_.train.out + "/model.safetensors";
  export_model(world_, engine_->model(), ExportWhat::weights, path);
  collectively(world_, [&] {
    if (world_.rank() != 0) return;
    std::ofstream file(config_.train.out + "/config.json");
    file << model_config_.to_json().dump(2) << '\n';
    if (!file.flush()) fail("cannot write {}/config.json", config_.train.out);
  });
  if (world_.rank() == 0)
    fmt::print("outputs in {}: metrics.jsonl, run.json, and config.json + model.safetensors for Hugging Face\n",
               config_.train.out);
}

int64_t Trainer::peak_memory() const {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace qshard
