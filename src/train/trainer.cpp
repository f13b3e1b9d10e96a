#include "train/trainer.h"

#include <sys/resource.h>

#include <ctime>
#include <filesystem>

#include "backends.h"
#include "comm/gather.h"
#include "comm/placement.h"
#include "comm/traced_collectives.h"
#include "io/hdf5_file.h"
#include "model/qwen3_params.h"
#include "train/export.h"
#include "train/hf_folder.h"
#include "train/stop_signals.h"

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
void read_sample(const TokenFile& file, int64_t first, int64_t T, int64_t vocab, int32_t* ids,
                 int32_t* labels) {
  file.read(first, T, vocab, ids);
  file.read(first + 1, T, vocab, labels);
}

// The first warning and how many others have one: on a cluster they are mostly alike.
void print_placement(const std::vector<std::string>& warnings, const char* who) {
  const auto warned = [](const std::string& text) { return !text.empty(); };
  const auto first = std::find_if(warnings.begin(), warnings.end(), warned);
  if (first == warnings.end()) return;
  const auto others = std::count_if(first + 1, warnings.end(), warned);
  say("warning     {}{}", *first,
      others ? fmt::format(" (and so on {} more {}(s))", others, who) : "");
}

std::string describe_rank(const World& world, Device& device) {
  std::string gpu;
  if (!device.is_host()) {
    gpu = device.name();
    if (device.numa_node() >= 0) gpu += fmt::format(" at NUMA node {}", device.numa_node());
    gpu += ' ';
  }
  return fmt::format("{} cpus {} threads {} {}on {}", world.rank(), world.cpus(),
                     world.threads_per_rank(), gpu, world.host());
}

}  // namespace

Trainer::Trainer(TrainConfig config, const nlohmann::json& settings, const std::string& table,
                 World& world, Backend& backend, TracedRun* traced)
    : config_(std::move(config)),
      world_(world),
      backend_(backend),
      traced_(traced),
      settings_(settings) {
  collectively(world_, [&] {
    config_.finish(world_.size());
    if (config_.graph && traced_)
      fail_usage(
          "--trace times each operator on the host, which launches graphs of them with "
          "device.graph: leave that false for the traced run");
    model_config_ = config_.load_model();
    open_data();
  });
  require_same_inputs();
  settings_["derived"] = {{"samples", sampler_->samples()}};
  if (const std::string& tokenizer = train_file_->info().tokenizer; !tokenizer.empty())
    settings_["derived"]["tokenizer"] = tokenizer;
  choose_checkpoint();
  if (nothing_to_do()) return;
  std::unique_ptr<HfWeights> weights;
  collectively(world_, [&] {
    if (!checkpoint_.empty() || config_.hf_folder().empty()) return;
    weights = std::make_unique<HfWeights>(config_.hf_folder());
    weights->require(all_params(model_config_));
  });
  plan_memory();
  prepare_outputs(settings);
  print_start(table);

  make_engine();
  if (world_.rank() == 0) print_sharding();
  checkpointer_ = std::make_unique<Checkpointer>(config_.checkpoint, config_.checkpoint_folder(),
                                                 engine_->mesh(), backend_, engine_->model());
  if (!checkpoint_.empty())
    restore();
  else if (weights)
    start_from(*weights);
  else
    engine_->model().init_parameters(config_.train.seed);
  open_metrics();
}

// Ids and labels of a step and of an evaluation, and the copy that a save in the background makes.
int64_t Trainer::own_host_bytes(const PlanRequest& request) const {
  const int64_t batch = request.B * world_.size();
  int64_t batches = request.accumulation;
  if (val_file_) batches += (evaluation_samples() + batch - 1) / batch;
  const int64_t tokens = 2 * batches * request.B * request.T * int64_t{sizeof(int32_t)};
  return tokens + snapshot_bytes(request);
}

int64_t Trainer::snapshot_bytes(const PlanRequest& request) const {
  if (!config_.checkpoint.async) return 0;
  const auto moments = static_cast<size_t>(Segment::moments);
  const MemoryUse memory = plan_step(request).memory;
  return (memory.device[moments] + memory.host[moments]) / 2 * 3;
}

// Sets plan_, and the activation checkpointing if it is to be chosen.
void Trainer::plan_memory() {
  const TrainOptions& t = config_.train;
  PlanRequest request{model_config_, config_.fsdp,       config_.transport.name,
                      world_.size(), world_.node_size(), t.micro_batch,
                      t.seq};
  request.set_accumulation(config_.accumulation(world_.size()));
  MemoryOptions options{t.memory_gb, t.activation_checkpoint == "auto"};
  Device& device = *backend_.device;
  const int64_t budget = memory_budget(world_, device, t.memory_gb);
  if (!device.is_host()) options.host_budget = memory_budget(world_, device.host(), 0);
  collectively(world_, [&] {
    if (device.is_host())
      options.others = own_host_bytes(request);
    else
      options.host_others = snapshot_bytes(request);
    plan_ = fit_memory(request, options, budget);
  });
  config_.fsdp = request.fsdp;
}

void Trainer::make_engine() {
  if (traced_) create_trace(world_, traced_->path);
  const WrapTransport trace = [&](std::unique_ptr<Collectives> transport, const World& ranks) {
    return make_traced_collectives(std::move(transport), ranks, traced_->trace);
  };
  engine_ = std::make_unique<Engine>(
      model_config_, config_.fsdp, config_.adamw,
      make_sharding(config_.transport, config_.fsdp, world_, backend_, traced_ ? trace : nullptr),
      config_.train.micro_batch, config_.train.seq, backend_);
  if (engine_->scaler()) engine_->scaler().emplace(config_.grad_scaler);
  if (config_.graph) engine_->use_graphs();
}

// Sets checkpoint_, saved_ and first_step_.
void Trainer::choose_checkpoint() {
  const bool weights_only = config_.init == "weights-only";
  if (config_.resume == "none") {
    if (weights_only)
      throw AgreedError(
          "--init weights-only takes the weights of --resume PATH, which is not given", kExitUsage);
    return;
  }
  const bool automatic = config_.resume == "auto";
  if (!automatic && !config_.hf_folder().empty())
    throw AgreedError(fmt::format("--init {} and --resume {} both give the weights: keep one",
                                  config_.init, config_.resume),
                      kExitUsage);
  if (automatic && config_.train.out.empty())
    throw AgreedError(
        "--resume auto looks in <train.out>/checkpoints: name the folder with --train.out",
        kExitUsage);
  checkpoint_ = automatic ? config_.checkpoint_folder() : config_.resume;
  std::error_code ignored;
  const bool is_file = std::filesystem::is_regular_file(checkpoint_, ignored);
  if (world_.broadcast(is_file ? "file" : "", 0).empty()) {
    const std::string folder = checkpoint_;
    checkpoint_ = find_checkpoint(world_, folder,
                                  [](const std::string& text) { say("warning     {}", text); });
    if (checkpoint_.empty() && !automatic)
      throw AgreedError(fmt::format("no checkpoint in {}", folder));
  }
  if (checkpoint_.empty()) {
    if (world_.rank() == 0)
      say("no checkpoint in {}: starting at step 1", config_.checkpoint_folder());
    return;
  }
  collectively(world_, [&] {
    saved_ = read_checkpoint_state(checkpoint_);
    if (!weights_only) require_compatible(saved_);
  });
  first_step_ = weights_only ? 1 : saved_.step + 1;
  if (nothing_to_do() && world_.rank() == 0)
    say("nothing to do: {} holds step {}, train.steps is {}", checkpoint_, saved_.step,
        config_.train.steps);
}

void Trainer::require_compatible(const CheckpointState& saved) const {
  ConfigChanges changes = compare_runs(saved.run, settings_);
  const ConfigChanges model = compare_runs(saved.model, model_config_.to_json());
  changes.mathematics.insert(changes.mathematics.end(), model.mathematics.begin(),
                             model.mathematics.end());
  if (world_.rank() == 0)
    for (const auto* list : {&changes.others, &changes.mathematics})
      for (const std::string& change : *list)
        say("warning     differs from the saved run: {}", change);
  if (!changes.mathematics.empty() && !config_.allow_changes)
    fail_usage(
        "{}: options that change the mathematics differ: {}; use the saved values, or "
        "--allow-changes",
        checkpoint_, fmt::join(changes.mathematics, ", "));
}

void Trainer::restore() {
  const bool weights_only = config_.init == "weights-only";
  const auto begin = Clock::now();
  engine_->mesh().in_parts([&] {
    load_checkpoint(engine_->mesh().shards(), checkpoint_,
                    checkpoint_tensors(engine_->model(), weights_only), weights_only,
                    Staging(*backend_.device));
  });
  engine_->model().masters_written();
  if (!weights_only) engine_->restore(saved_.step, saved_.updates);
  if (!weights_only && engine_->scaler() && saved_.loss_scale > 0)
    engine_->scaler()->restore(saved_.loss_scale, saved_.growth_tracker);
  if (world_.rank() == 0)
    say("resumed     {} written by {} rank(s) in {:.2f} s: {}", checkpoint_, saved_.world_size,
        seconds_since(begin),
        weights_only ? "weights only, starting at step 1"
                     : fmt::format("going on with step {}", first_step_));
}

void Trainer::start_from(const HfWeights& weights) {
  import_weights(world_, engine_->model(), weights,
                 [](const std::string& text) { say("warning     {}", text); });
  if (world_.rank() == 0) say("weights     {}", weights.folder());
}

void Trainer::save(int64_t step) {
  const TraceScope scope(trace(), Lane::io, "save checkpoint");
  CheckpointState state;
  state.step = step;
  state.updates = engine_->updates();
  state.samples = step * config_.train.global_batch;
  state.epoch = step / sampler_->steps_per_epoch();
  state.seed = config_.train.seed;
  if (engine_->scaler()) {
    state.loss_scale = engine_->scaler()->scale();
    state.growth_tracker = engine_->scaler()->growth_tracker();
  }
  state.model = model_config_.to_json();
  state.run = settings_;
  checkpointer_->save(state);
  log_save();
}

void Trainer::log_save() {
  if (!metrics_) return;
  const auto report = checkpointer_->take_report();
  if (!report) return;
  metrics_->checkpoint(report->step, report->path, report->bytes, report->seconds);
  if (!report->warning.empty()) say("warning     {}", report->warning);
}

void Trainer::open_metrics() {
  world_.barrier();
  double peak = config_.train.peak_gflops > 0
                    ? config_.train.peak_gflops * 1e9
                    : backend_.ops->measure_peak(config_.fsdp.param_dtype, 0.1);
  world_.all_reduce_sum(&peak, 1);
  const double flops = model_config_.train_flops_per_token(config_.train.seq) *
                       static_cast<double>(config_.tokens_per_step());
  collectively(world_, [&] {
    if (world_.rank() != 0) return;
    say("product rate of all ranks together: {:.1f} GFLOP/s ({}); a step is {:.2f} GFLOP of model "
        "arithmetic\n",
        peak / 1e9, config_.train.peak_gflops > 0 ? "given" : "measured now", flops / 1e9);
    metrics_ = std::make_unique<Metrics>(
        Metrics::Run{config_.train.out, config_.train.steps, config_.train.log_every,
                     config_.tokens_per_step(), flops, peak, first_step_, checkpoint_});
  });
}

void Trainer::open_data() {
  const int64_t V = model_config_.vocab_size;
  auto open = [&](const std::string& path) {
    auto file = std::make_unique<TokenFile>(path, config_.data.format);
    if (file->info().vocab_size > V)
      fail(
          "{}: tokenized for a vocabulary of {}, the model has vocab_size {}: use the model's "
          "tokenizer or a model "
          "with at least {} rows",
          path, file->info().vocab_size, V, file->info().vocab_size);
    return file;
  };
  train_file_ = open(config_.data.train);
  sampler_ = std::make_unique<Sampler>(*train_file_, config_.train.seq, config_.train.global_batch,
                                       config_.data.shuffle, config_.train.seed);
  if (!config_.data.val.empty()) {
    val_file_ = open(config_.data.val);
    if (val_file_->info().tokens <= config_.train.seq)
      fail_usage("{}: {} tokens, an evaluation needs at least train.seq + 1 = {}", config_.data.val,
                 val_file_->info().tokens, config_.train.seq + 1);
  }
}

// A relative path or a file system may show each rank another file: ranks with different shapes or
// samples would train nonsense or wait for each other.
void Trainer::require_same_inputs() const {
  auto describe = [](const TokenFile* file) {
    if (!file) return std::string("none");
    const TokenFileInfo& i = file->info();
    return fmt::format("{} tokens, vocabulary {}, tokenizer '{}'", i.tokens, i.vocab_size,
                       i.tokenizer);
  };
  const std::pair<const char*, std::string> inputs[] = {{"model", model_config_.to_json().dump()},
                                                        {"data.train", describe(train_file_.get())},
                                                        {"data.val", describe(val_file_.get())}};
  for (const auto& [name, own] : inputs) {
    const std::string first = world_.broadcast(own, 0);
    collectively(world_, [&, &what = name, &here = own] {
      if (here != first)
        fail("{} is not the same here as on rank 0: {}; rank 0: {}", what, here, first);
    });
  }
}

void Trainer::prepare_outputs(const nlohmann::json& settings) {
  if (config_.train.out.empty()) config_.train.out = "runs/" + timestamp();
  config_.train.out = world_.broadcast(config_.train.out, 0);
  collectively(world_, [&] {
    if (world_.rank() != 0) return;
    const std::filesystem::path folder = config_.train.out;
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) fail("cannot create {}: {}", folder.string(), error.message());
    // A run that was killed before its first checkpoint is gone on with as well.
    const std::filesystem::path from = std::filesystem::path(checkpoint_).parent_path();
    const bool goes_on =
        config_.resume == "auto" ||
        (first_step_ > 1 && std::filesystem::equivalent(from, config_.checkpoint_folder(), error));
    for (const char* name : {"run.json", "metrics.jsonl", "config.json", "model.safetensors"}) {
      if (goes_on || !std::filesystem::exists(folder / name)) continue;
      if (!config_.train.overwrite)
        fail("{} exists: choose another --train.out, or --train.overwrite true",
             (folder / name).string());
      std::filesystem::remove(folder / name);
    }
    std::ofstream file(folder / "run.json");
    file << settings.dump(2) << '\n';
    if (!file.flush()) fail("cannot write {}/run.json", folder.string());
  });
}

void Trainer::print_start(const std::string& table) {
  const auto ranks = world_.gather(describe_rank(world_, *backend_.device));
  const std::string warning = placement_warning(find_placement(world_));
  const auto warnings = world_.gather(
      world_.node_rank() == 0 && !warning.empty() ? world_.host() + ": " + warning : "");
  const std::string far =
      numa_warning(world_.own_cpus(), find_numa_nodes(), backend_.device->numa_node());
  const auto far_ranks = world_.gather(
      far.empty() ? "" : fmt::format("rank {} on {}: {}", world_.rank(), world_.host(), far));
  if (world_.rank() != 0) return;
  const TrainOptions& t = config_.train;
  say("settings    * = not the default; all of them in run.json, what they mean: qshard train "
      "--help\n{}",
      table);
  say("model       {} parameters, {} layers", model_config_.num_parameters(),
      model_config_.num_hidden_layers);
  say("data        {}: {} tokens, {} samples of {} tokens, {} steps an epoch ({} samples left out "
      "of each)",
      config_.data.train, train_file_->info().tokens, sampler_->samples(), t.seq,
      sampler_->steps_per_epoch(), sampler_->dropped_per_epoch());
  say("step        {} sequences = {} ranks × {} micro-batches × {} sequences of {} tokens",
      t.global_batch, world_.size(), config_.accumulation(world_.size()), t.micro_batch, t.seq);
  say("numbers     parameters {}, products in {}, gradients reduced as {}, sums and master weights "
      "f32",
      t.param_dtype, backend_.ops->products(config_.fsdp.param_dtype), t.reduce_dtype);
  say("ranks       {} on {} node(s), {}, {} thread(s) a rank, {}", world_.size(), world_.nodes(),
      backend_.device->name(), world_.threads_per_rank(),
      fmt::format("{}, {}", world_.mpi_version(), hdf5_version()));
  print_placement(warnings, "node");
  print_placement(far_ranks, "rank");
  say("memory      activation checkpointing: {}\n{}",
      activation_checkpoint_name(config_.fsdp.activation_checkpoint),
      memory_table(plan_, world_.node_size()));
  for (const std::string& rank : ranks)
    if (world_.nodes() > 1 || !backend_.device->is_host()) say("rank        {}", rank);
  say("output      {}", t.out);
}

// What the options have become; on rank 0.
void Trainer::print_sharding() const {
  const MeshShape& mesh = engine_->mesh().shape();
  const FsdpOptions& fsdp = config_.fsdp;
  say("mesh        {} of fsdp.mesh {}{}: {} replica(s), a rank holds 1/{} of each parameter",
      mesh.str(), fsdp.mesh, mesh.why.empty() ? "" : fmt::format(" ({})", mesh.why), mesh.replicas,
      mesh.shards);
  if (fsdp.layers_per_unit > 1)
    say("units       {} of {} layers each, the last may have fewer",
        engine_->model().num_units() - 1, fsdp.layers_per_unit);
  say("transport   {}", engine_->collectives().name());
  if (mesh.replicas > 1)
    say("replicas    gradients are added up once a step over {}",
        engine_->sharding().replica_sums->name());
  if (config_.graph)
    say("graph       on: the first step runs without, then one is recorded and launched each time");
  if (mesh.group > 0)
    say("groups      layers stay on {} ranks from forward to backward, over {}", mesh.group,
        engine_->sharding().group_gathers->name());
}

int Trainer::run() {
  if (nothing_to_do()) return kExitDone;
  const int64_t steps = config_.train.steps, every = config_.checkpoint.every;
  for (int64_t step = first_step_; step <= steps; ++step) {
    train_step(step);
    if (traced_ && step - first_step_ + 1 == traced_->steps) traced_->trace.record(false);
    log_save();
    const bool last = step == steps;
    if (val_file_ && (last || (config_.train.eval_every && step % config_.train.eval_every == 0)))
      evaluate(step);
    const bool leave = stop_ && !last;
    if (leave || (last && config_.checkpoint.at_end) || (every && step % every == 0)) save(step);
    if (leave) {
      checkpointer_->finish();
      log_save();
      end_of_trace();
      if (world_.rank() == 0)
        say("stopped after step {}, saved: go on with --resume auto --train.out {}", step,
            config_.train.out);
      return kExitResume;
    }
  }
  checkpointer_->finish();
  log_save();
  end_of_trace();
  if (metrics_) metrics_->finish();
  report_memory();
  if (config_.train.save_model) save_model();
  return kExitDone;
}

// The largest of all ranks by segment.
void Trainer::report_memory() const {
  MemoryUse largest = memory_use(*backend_.device);
  for (SegmentBytes* bytes : {&largest.device, &largest.host}) {
    std::vector<double> values(bytes->begin(), bytes->end());
    world_.all_reduce_max(values.data(), static_cast<int>(values.size()));
    std::copy(values.begin(), values.end(), bytes->begin());
  }
  if (world_.rank() == 0) say("memory\n{}", memory_table(plan_, world_.node_size(), &largest));
}

void Trainer::train_step(int64_t step) {
  const Clock::time_point begin = Clock::now();
  std::vector<TokenBatch> batches;
  {
    const TraceScope scope(trace(), Lane::io, "read samples");
    collectively(world_, [&] { batches = read_step(step); });
  }
  const double lr = learning_rate(config_.schedule, step);
  const StepResult result = engine_->step(batches, lr);
  for (const StepGraphs::Report& graph : engine_->take_graph_reports())
    if (world_.rank() == 0)
      say("graph       {} of a step: {} nodes, recorded in {:.3f} s at step {}", graph.what,
          graph.nodes, graph.seconds, step);
  const bool limit = config_.train.stop_after && step - first_step_ + 1 >= config_.train.stop_after;
  double highest[3] = {static_cast<double>(peak_memory()), stop_requested() || limit ? 1.0 : 0.0,
                       checkpointer_->failed() ? 1.0 : 0.0};
  world_.all_reduce_max(highest, 3);
  stop_ = highest[1] > 0;
  if (metrics_)
    metrics_->step(step, result, lr, {seconds_since(begin), static_cast<int64_t>(highest[0])});
  if (highest[2] > 0) checkpointer_->finish();  // throws on all ranks
}

// Of this rank, from which copies to the device need no waiting.
Buffer Trainer::token_buffer(int64_t tokens) const {
  return Buffer(backend_.device->host(), DType::i32, {tokens}, Segment::workspace, "tokens");
}

// This rank's share of the step, see [Note: Sample order] in io/dataset.h.
std::vector<TokenBatch> Trainer::read_step(int64_t step) {
  const int64_t T = config_.train.seq, B = config_.train.micro_batch, ranks = world_.size();
  const int64_t micro_batches = config_.accumulation(world_.size());
  if (!ids_.tensor()) {
    ids_ = token_buffer(micro_batches * B * T);
    labels_ = token_buffer(micro_batches * B * T);
  }
  int32_t* const ids = ids_->as<int32_t>();
  int32_t* const labels = labels_->as<int32_t>();
  std::vector<TokenBatch> batches;
  for (int64_t a = 0; a < micro_batches; ++a) {
    batches.push_back({ids + a * B * T, labels + a * B * T});
    for (int64_t b = 0; b < B; ++b) {
      const int64_t sample = sampler_->sample(step - 1, a * (ranks * B) + world_.rank() * B + b);
      const int64_t at = (a * B + b) * T;
      read_sample(*train_file_, sample * T, T, model_config_.vocab_size, ids + at, labels + at);
    }
  }
  return batches;
}

int64_t Trainer::evaluation_samples() const {
  return std::min(config_.train.eval_samples, (val_file_->info().tokens - 1) / config_.train.seq);
}

void Trainer::evaluate(int64_t step) {
  const Clock::time_point begin = Clock::now();
  const int64_t samples = evaluation_samples();
  std::vector<TokenBatch> batches;
  collectively(world_, [&] { batches = read_evaluation(samples); });
  const double loss = engine_->evaluate(batches);
  if (metrics_) metrics_->evaluation(step, loss, samples * config_.train.seq, seconds_since(begin));
}

// The first samples of the file, in order, dealt out row by row; the last batch is filled up with
// ignored labels so that every rank runs the same number of batches.
std::vector<TokenBatch> Trainer::read_evaluation(int64_t samples) {
  const int64_t T = config_.train.seq, B = config_.train.micro_batch, ranks = world_.size();
  const int64_t n = (samples + ranks * B - 1) / (ranks * B);
  if (!val_ids_.tensor()) {
    val_ids_ = token_buffer(n * B * T);
    val_labels_ = token_buffer(n * B * T);
  }
  int32_t* const ids = val_ids_->as<int32_t>();
  int32_t* const labels = val_labels_->as<int32_t>();
  std::fill_n(ids, n * B * T, 0);
  std::fill_n(labels, n * B * T, -100);
  std::vector<TokenBatch> batches;
  for (int64_t i = 0; i < n; ++i) {
    batches.push_back({ids + i * B * T, labels + i * B * T});
    for (int64_t b = 0; b < B; ++b) {
      const int64_t sample = i * (ranks * B) + world_.rank() * B + b, at = (i * B + b) * T;
      if (sample < samples)
        read_sample(*val_file_, sample * T, T, model_config_.vocab_size, ids + at, labels + at);
    }
  }
  return batches;
}

void Trainer::end_of_trace() {
  if (!traced_) return;
  write_trace(world_, traced_->trace, traced_->path);
  if (world_.rank() == 0)
    say("trace of the first {} step(s) in {}: open it in ui.perfetto.dev", traced_->steps,
        traced_->path);
}

void Trainer::save_model() {
  const std::string path = config_.train.out + "/model.safetensors";
  export_model(engine_->mesh(), engine_->model(), ExportWhat::weights, path);
  collectively(world_, [&] {
    if (world_.rank() == 0)
      write_hf_config(config_.train.out + "/config.json", model_config_, DType::f32,
                      train_file_->info().tokenizer);
  });
  if (world_.rank() == 0)
    say("outputs in {}: metrics.jsonl, run.json, and config.json + model.safetensors for Hugging "
        "Face",
        config_.train.out);
}

int64_t Trainer::peak_memory() const {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace qshard
