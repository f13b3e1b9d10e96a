#include "train/train_config.h"

#include <algorithm>
#include <set>

#include "backends.h"
#include "train/hf_folder.h"
#include "train/step_graphs.h"

namespace qshard {

namespace {

void require_same_model(const Qwen3Config& here, const Qwen3Config& there,
                        const std::string& folder) {
  // How new weights are drawn and what others advertise.
  const std::set<std::string> ignored = {"initializer_range", "max_position_embeddings"};
  std::vector<std::string> differences;
  const nlohmann::json a = here.to_json(), b = there.to_json();
  for (const auto& [name, value] : a.items())
    if (value != b[name] && !ignored.count(name))
      differences.push_back(
          fmt::format("{}: {} here, {} there", name, value.dump(), b[name].dump()));
  if (!differences.empty())
    fail_usage("{}/config.json is of another model than the options model.*: {}", folder,
               fmt::join(differences, ", "));
}

nlohmann::json default_settings() {
  TrainConfig config;
  OptionTable table;
  config.describe(table);
  return table.to_json();
}

}  // namespace

void TrainConfig::describe(OptionTable& t) {
  t.section("model", "shape, as in a Hugging Face config.json");
  t.add("model.config", model.config, "path of a config.json; the fields below override it");
  t.add("model.vocab_size", model.vocab_size, "rows of the embedding; 0: as in the file")
      .at_least(0);
  t.add("model.hidden_size", model.hidden_size, "0: as in the file").at_least(0);
  t.add("model.intermediate_size", model.intermediate_size, "0: as in the file").at_least(0);
  t.add("model.num_hidden_layers", model.num_hidden_layers, "0: as in the file").at_least(0);
  t.add("model.num_attention_heads", model.num_attention_heads, "0: as in the file").at_least(0);
  t.add("model.num_key_value_heads", model.num_key_value_heads, "0: as in the file").at_least(0);
  t.add("model.head_dim", model.head_dim, "0: as in the file").at_least(0);
  t.add("model.rope_theta", model.rope_theta, "0: as in the file").at_least(0);
  t.add("model.rms_norm_eps", model.rms_norm_eps, "0: as in the file").at_least(0);
  t.add("model.initializer_range", model.initializer_range,
        "std of the initial weights; 0: as in the file")
      .at_least(0);
  t.add("model.tie_word_embeddings", model.tie_word_embeddings, "empty: as in the file")
      .one_of({"", "true", "false"});

  t.section("data", "token files, see `qshard data --help`");
  t.add("data.train", data.train, "token file to train on");
  t.add("data.val", data.val, "token file to evaluate on; empty: no evaluation");
  t.add("data.format", data.format, "auto reads HDF5 and llm.c headers")
      .one_of({"auto", "raw-u16", "raw-u32"});
  t.add("data.shuffle", data.shuffle, "visit samples in a random order, another one each epoch");

  t.section("train", "the run");
  t.add("train.steps", train.steps, "optimizer steps in all").at_least(1).unit("steps");
  t.add("train.seq", train.seq, "sequence length").at_least(1).unit("tokens");
  t.add("train.global_batch", train.global_batch, "sequences of a step, all ranks together")
      .at_least(1)
      .unit("sequences");
  t.add("train.micro_batch", train.micro_batch, "sequences a rank runs at once; 0: no accumulation")
      .at_least(0)
      .unit("sequences");
  t.add("train.seed", train.seed, "of the initial weights and of the sample order");
  t.add("train.param_dtype", train.param_dtype,
        "what is gathered and computed in; master weights are f32")
      .one_of({"f32", "bf16", "fp16"});
  t.add("train.reduce_dtype", train.reduce_dtype, "what gradients travel in; sums are f32")
      .one_of({"f32", "bf16", "fp16"});
  t.add("train.activation_checkpoint", train.activation_checkpoint,
        "what backward computes anew to save memory: selective: all but matrix products; full: a "
        "whole layer from its input; auto: as little as fits. The results are the same bits")
      .one_of({"none", "selective", "full", "auto"});
  t.add("train.memory_gb", train.memory_gb,
        "what a rank may take, a run that needs more is refused; 0: what the machine has free")
      .at_least(0)
      .unit("GB");
  t.add("train.log_every", train.log_every, "console line").at_least(1).unit("steps");
  t.add("train.eval_every", train.eval_every, "evaluation on data.val; 0: only at the end")
      .at_least(0)
      .unit("steps");
  t.add("train.eval_samples", train.eval_samples, "sequences of an evaluation")
      .at_least(1)
      .unit("sequences");
  t.add("train.out", train.out, "folder of the outputs; empty: runs/<date>-<time>");
  t.add("train.overwrite", train.overwrite, "replace the outputs of an earlier run in train.out");
  t.add("train.stop_after", train.stop_after,
        "leave after this many steps of this launch, saved, as after a signal; 0: never")
      .at_least(0)
      .unit("steps");
  t.add("train.save_model", train.save_model, "write config.json and model.safetensors at the end");
  t.add("train.peak_gflops", train.peak_gflops,
        "peak of one rank for the share shown; 0: measured at start")
      .at_least(0)
      .unit("GFLOP/s");

  t.section("optim", "AdamW, decoupled decay, as in PyTorch");
  t.add("optim.lr", schedule.lr, "peak learning rate").at_least(0);
  t.add("optim.beta1", adamw.beta1, "decay of the first moment").at_least(0).at_most(1);
  t.add("optim.beta2", adamw.beta2, "decay of the second moment").at_least(0).at_most(1);
  t.add("optim.eps", adamw.eps, "added to the root of the second moment").at_least(0);
  t.add("optim.weight_decay", adamw.weight_decay, "times the learning rate").at_least(0);
  t.add("optim.decay", decay, "which parameters decay; matrices include the embedding")
      .one_of({"matrices", "all"});
  t.add("optim.clip", adamw.clip, "global gradient norm; 0: no clipping").at_least(0);

  t.section("grad_scaler", "scale of the loss with fp16 parameters, as PyTorch's GradScaler");
  t.add("grad_scaler.init_scale", grad_scaler.init_scale, "of the first step")
      .at_least(1)
      .at_most(0x1p127);
  t.add("grad_scaler.growth_factor", grad_scaler.growth_factor, "after growth_interval good steps")
      .at_least(1);
  t.add("grad_scaler.backoff_factor", grad_scaler.backoff_factor,
        "after a gradient that is not finite; its step is skipped; down to scale 1")
      .at_least(0)
      .at_most(1);
  t.add("grad_scaler.growth_interval", grad_scaler.growth_interval,
        "without a skipped step between")
      .at_least(1)
      .unit("steps");

  t.section("schedule", "learning rate as a function of the step");
  t.add("schedule.kind", schedule.kind, "after the warm-up")
      .one_of({"cosine", "linear", "wsd", "constant"});
  t.add("schedule.warmup_steps", schedule.warmup_steps, "linear rise from 0")
      .at_least(0)
      .unit("steps");
  t.add("schedule.min_lr", schedule.min_lr, "rate of the last step").at_least(0);
  t.add("schedule.decay_steps", schedule.decay_steps, "wsd: length of the final decay")
      .at_least(0)
      .unit("steps");

  t.section("fsdp", "sharding");
  t.add(
      "fsdp.mesh", fsdp.mesh,
      "RxS: R replicas, each split over S successive ranks, 2x4 on 8 ranks; full: 1xN, split over "
      "all; auto: a replica on each node where there are several with equally many ranks, else "
      "full");
  t.add("fsdp.reshard_after_forward", fsdp.reshard_after_forward,
        "free other ranks' rows of a layer after its forward; false: keep them for backward");
  t.add(
       "fsdp.reshard_ranks", fsdp.reshard_ranks,
       "with reshard_after_forward: ranks over which a layer stays split from forward to backward, "
       "e.g. 4 of a node; a divisor of S; 0: all S")
      .at_least(0);
  t.add("fsdp.reshard_after_backward", fsdp.reshard_after_backward,
        "false: keep layers gathered from one micro-batch's backward to the next one's forward");
  t.add("fsdp.layers_per_unit", fsdp.layers_per_unit,
        "successive layers gathered, freed and reduced together: fewer, larger transfers, which "
        "pays where layers are small and latency is high; full parameters and gradients take as "
        "many times the memory. The results are the same bits")
      .at_least(1)
      .unit("layers");
  t.add("fsdp.prefetch", fsdp.prefetch, "units gathered ahead; each needs memory for one unit")
      .at_least(0)
      .at_most(64)
      .unit("units");
  t.add("fsdp.forward_prefetch", fsdp.forward_prefetch,
        "the same in forward alone; -1: as fsdp.prefetch")
      .at_least(-1)
      .at_most(64)
      .unit("units");
  t.add("fsdp.backward_prefetch", fsdp.backward_prefetch,
        "the same in backward alone; -1: as fsdp.prefetch")
      .at_least(-1)
      .at_most(64)
      .unit("units");
  t.add("fsdp.reduce_every_microbatch", fsdp.reduce_every_microbatch,
        "false: keep full gradients and reduce-scatter at a step's last micro-batch only");
  t.add("fsdp.offload", offload,
        "optimizer: f32 master weights (if parameters are 16 bits wide) and both moments are in "
        "page-locked memory of the host; the update takes them through the GPU in pieces. GPUs "
        "only; the results are the same bits")
      .one_of({"none", "optimizer"});
  t.add("fsdp.gradient_divide_factor", fsdp.gradient_divide_factor,
        "what divides a step's gradient, summed over all kept labels of all ranks; 0: their number")
      .at_least(0);

  t.section("checkpoint", "sharded HDF5 files in <train.out>/checkpoints");
  t.add("checkpoint.every", checkpoint.every, "0: only at the end and when the run is stopped")
      .at_least(0)
      .unit("steps");
  t.add("checkpoint.at_end", checkpoint.at_end, "save after the last step");
  t.add("checkpoint.async", checkpoint.async, "write behind training, from a copy in host memory");
  t.add("checkpoint.keep_last", checkpoint.save.keep_last, "newest checkpoints that stay; 0: all")
      .at_least(0);
  t.add("checkpoint.keep_every", checkpoint.save.keep_every,
        "steps at multiples of this stay as well; 0: none")
      .at_least(0)
      .unit("steps");
  t.add("checkpoint.collective", checkpoint.save.collective,
        "collective MPI-IO transfers instead of independent ones");
  t.add("checkpoint.piece_mb", checkpoint.piece_mb,
        "largest single transfer; from a GPU by way of as much host memory")
      .at_least(1)
      .at_most(2047)
      .unit("MiB");
  t.add("checkpoint.alignment_kb", checkpoint.alignment_kb,
        "of large datasets in the file, a stripe on Lustre")
      .at_least(1)
      .unit("KiB");
  t.add("checkpoint.hints", checkpoint.save.hints,
        "MPI-IO hints, striping_factor=8,striping_unit=4194304");

  t.section("comm", "what moves between ranks");
  t.add("comm.transport", transport.name,
        "shm: shared memory in a node; mpi: plain MPI calls; nccl, mpi-cuda: GPUs; auto: shm or "
        "nccl")
      .one_of({"auto", "shm", "mpi", "nccl", "mpi-cuda"});
  t.add("comm.nccl_buffers", transport.nccl_buffers,
        "nccl: windows registers them symmetrically; copy-engine: and gathers take no "
        "multiprocessor where NCCL can")
      .one_of({"plain", "windows", "copy-engine"});
  t.add(
       "comm.mpi_memory", transport.mpi_memory,
       "mpi-cuda: what MPI gets, GPU memory or pinned copies; auto: as the MPI library says it can")
      .one_of({"auto", "device", "pinned"});
  t.section("device", "what computes");
  t.add("device.backend", backend, "what runs the operators; cuda needs a build by `make CUDA=1`")
      .one_of({"cpu", "cuda"});
  t.add(
      "device.graph", graph,
      "record a step as CUDA graphs and launch these, which spares the host the calls; nccl only, "
      "the results are the same bits");
}

void TrainConfig::finish(int ranks) {
  if (!init.empty() && init != "weights-only" && hf_folder().empty())
    fail_usage("--init {}: expected hf:DIR or weights-only", init);
  transport = choose_transport(transport, backend);
  fsdp.param_dtype = parse_dtype(train.param_dtype);
  fsdp.reduce_dtype = parse_dtype(train.reduce_dtype);
  if (train.activation_checkpoint != "auto")
    fsdp.activation_checkpoint = parse_activation_checkpoint(train.activation_checkpoint);
  adamw.decay_matrices_only = decay == "matrices";
  fsdp.offload_optimizer = offload == "optimizer";
  if (graph) require_graphs(transport.name, fsdp.offload_optimizer);
  schedule.total_steps = train.steps;
  if (data.train.empty())
    fail_usage("data.train is not set: name a token file (`qshard data tokenize` makes one)");
  if (grad_scaler.backoff_factor >= 1)
    fail_usage("grad_scaler.backoff_factor must be below 1, found {}", grad_scaler.backoff_factor);
  for (double beta : {adamw.beta1, adamw.beta2})
    if (beta >= 1) fail_usage("optim.beta1 and optim.beta2 must be below 1, found {}", beta);
  if (schedule.warmup_steps > train.steps)
    fail_usage("schedule.warmup_steps {} is more than train.steps {}", schedule.warmup_steps,
               train.steps);
  if (schedule.min_lr > schedule.lr)
    fail_usage("schedule.min_lr {} is more than optim.lr {}", schedule.min_lr, schedule.lr);
  if (schedule.kind == "wsd" && schedule.warmup_steps + schedule.decay_steps > train.steps)
    fail_usage("schedule.warmup_steps {} + schedule.decay_steps {} is more than train.steps {}",
               schedule.warmup_steps, schedule.decay_steps, train.steps);
  const int64_t step = train.micro_batch ? train.micro_batch * ranks : ranks;
  if (train.global_batch % step) {
    const int64_t below = train.global_batch / step * step;
    const std::string by = train.micro_batch ? fmt::format("{} ranks × micro_batch {} = {}", ranks,
                                                           train.micro_batch, step)
                                             : fmt::format("{} ranks", ranks);
    fail_usage("train.global_batch {} does not divide by {}: nearest are {}{}", train.global_batch,
               by, below ? fmt::format("{} and ", below) : "", below + step);
  }
  if (train.micro_batch == 0) train.micro_batch = train.global_batch / ranks;
}

std::string TrainConfig::hf_folder() const { return init.starts_with("hf:") ? init.substr(3) : ""; }

Qwen3Config TrainConfig::load_model() const {
  const std::string folder = hf_folder();
  const std::string path =
      model.config.empty() && !folder.empty() ? folder + "/config.json" : model.config;
  nlohmann::json json = nlohmann::json::object();
  if (!path.empty()) json = parse_json(read_file(path), path);
  auto override_with = [&](const char* field, const auto& value) {
    if (value != std::decay_t<decltype(value)>{}) json[field] = value;
  };
  override_with("vocab_size", model.vocab_size);
  override_with("hidden_size", model.hidden_size);
  override_with("intermediate_size", model.intermediate_size);
  override_with("num_hidden_layers", model.num_hidden_layers);
  override_with("num_attention_heads", model.num_attention_heads);
  override_with("num_key_value_heads", model.num_key_value_heads);
  override_with("head_dim", model.head_dim);
  override_with("rope_theta", model.rope_theta);
  override_with("rms_norm_eps", model.rms_norm_eps);
  override_with("initializer_range", model.initializer_range);
  if (!model.tie_word_embeddings.empty())
    json["tie_word_embeddings"] = model.tie_word_embeddings == "true";
  // One theta, wherever the file has it; the rest of these fields stays, to be checked.
  for (const char* field : {"rope_parameters", "rope_scaling"})
    if (model.rope_theta != 0 && json.contains(field) && json[field].is_object())
      json[field].erase("rope_theta");
  const Qwen3Config config =
      Qwen3Config::from_json(json, path.empty() ? "the options model.*" : path);
  if (!folder.empty()) require_same_model(config, read_hf_config(folder), folder);
  return config;
}

ConfigChanges compare_runs(const nlohmann::json& saved, const nlohmann::json& now) {
  // What changes rounding at most, or only what is reported and kept; the model is compared as it
  // is after its file and these options were put together.
  static const std::vector<std::string> ignored = {"/train/micro_batch",
                                                   "/train/activation_checkpoint",
                                                   "/train/memory_gb",
                                                   "/train/log_every",
                                                   "/train/eval_every",
                                                   "/train/eval_samples",
                                                   "/train/out",
                                                   "/train/overwrite",
                                                   "/train/save_model",
                                                   "/train/peak_gflops",
                                                   "/train/stop_after",
                                                   "/data/val",
                                                   "/fsdp/mesh",
                                                   "/fsdp/reshard_",
                                                   "/fsdp/layers_per_unit",
                                                   "/fsdp/prefetch",
                                                   "/fsdp/forward_prefetch",
                                                   "/fsdp/backward_prefetch",
                                                   "/fsdp/reduce_every_microbatch",
                                                   "/fsdp/offload",
                                                   "/comm",
                                                   "/device",
                                                   "/checkpoint",
                                                   "/model/"};
  auto starts_with_any = [](const std::string& path, const std::vector<std::string>& prefixes) {
    return std::any_of(prefixes.begin(), prefixes.end(),
                       [&](const std::string& p) { return path.starts_with(p); });
  };
  ConfigChanges changes;
  // An option that the saved run did not know yet counts as its default.
  nlohmann::json a = default_settings().flatten();
  const nlohmann::json b = now.flatten();
  a.update(saved.flatten());
  const bool scales_loss = b.value("/train/param_dtype", "") == "fp16";
  for (const auto& [path, value] : b.items()) {
    const nlohmann::json old = a.contains(path) ? a[path] : nlohmann::json();
    if (old == value || starts_with_any(path, ignored)) continue;
    if (path == "/derived/tokenizer" && old.is_null()) continue;  // not known then
    if (path.starts_with("/grad_scaler/") && !scales_loss) continue;
    std::string key = path.substr(1);
    std::replace(key.begin(), key.end(), '/', '.');
    const std::string text = fmt::format("{}: {} → {}", key, old.dump(), value.dump());
    // Where the data lie may change, and a longer run follows the schedule of its new length.
    const bool harmless = path == "/data/train" || path == "/data/format" || path == "/train/steps";
    (harmless ? changes.others : changes.mathematics).push_back(text);
  }
  return changes;
}

}  // namespace qshard
