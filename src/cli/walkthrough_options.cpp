#include "cli/walkthrough_options.h"

#include "backends.h"
#include "base/config.h"
#include "cli/walkthrough_topics.h"
#include "train/reference_case.h"

namespace qshard {
namespace {

// Rank 0's file on every rank.
nlohmann::json read_json(const World& world, const std::string& path) {
  std::string text;
  collectively(world, [&] {
    if (world.rank() == 0) text = read_file(path);
  });
  text = world.broadcast(text, 0);
  nlohmann::json json;
  collectively(world, [&] { json = parse_json(text, path); });
  return json;
}

void use_reference(WalkthroughOptions& o, const World& world) {
  collectively(world, [&] {
    const ReferenceCase c = load_reference_case(o.reference, world, true);
    o.seq = c.T, o.batch = c.B, o.accumulation = c.accum;
  });
  if (o.layer != 0) throw AgreedError("--reference holds the activations of layer 0", kExitUsage);
}

void choose_model(WalkthroughOptions& o, const World& world) {
  o.config = walkthrough_config();
  if (!o.reference.empty() && !o.model.empty())
    throw AgreedError("--reference and --model both give the model: keep one", kExitUsage);
  if (!o.reference.empty()) {
    use_reference(o, world);
    o.model = o.reference + "/config.json";
  }
  if (o.model.empty()) {
    o.model = "built in";
    return;
  }
  const nlohmann::json json = read_json(world, o.model);
  collectively(world, [&] { o.config = Qwen3Config::from_json(json, o.model); });
}

void choose_numbers(WalkthroughCommand& c, const World& world) {
  WalkthroughOptions& o = c.options;
  if (c.reduce_dtype == "auto") c.reduce_dtype = c.param_dtype;
  if (!c.topic.empty() && (c.format == "json" || !c.html.empty()))
    fail_usage("--topic {} is text: use --format text or md, without --html", c.topic);
  o.fsdp.param_dtype = parse_dtype(c.param_dtype);
  o.fsdp.reduce_dtype = parse_dtype(c.reduce_dtype);
  o.transport = choose_transport(c.transport, o.backend).name;
  if (o.layer >= o.config.num_hidden_layers)
    fail_usage("--layer {}: the model has layers 0 to {}", o.layer, o.config.num_hidden_layers - 1);
  if (o.rank >= world.size())
    fail_usage("--rank {}: this run has ranks 0 to {}", o.rank, world.size() - 1);
  if (c.values != !o.tensor.empty())
    fail_usage("--values and --tensor NAME go together: the values of a parameter on its way");
}

void add_model_options(CLI::App& sub, WalkthroughCommand& c) {
  WalkthroughOptions& o = c.options;
  sub.add_option("--model", o.model, "config.json of a Qwen3; weights and tokens are random");
  sub.add_option("--reference", o.reference,
                 "folder of a reference case with activations.safetensors: its weights and tokens, "
                 "and every operator of layer 0 compared");
  for (auto [name, value, doc] :
       {std::tuple{"--batch", &o.batch, "sequences a rank and micro-batch"},
        {"--seq", &o.seq, "tokens a sequence"},
        {"--accumulate", &o.accumulation, "micro-batches of the step"}})
    sub.add_option(name, *value, doc)->check(CLI::Range(1, 1 << 20))->capture_default_str();
  sub.add_option("--layer", o.layer, "that is told")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  sub.add_option("--seed", o.seed, "of weights and tokens")->capture_default_str();
}

void add_sharding_options(CLI::App& sub, WalkthroughCommand& c) {
  WalkthroughOptions& o = c.options;
  auto one_of = [&](const char* name, std::string& value, const char* doc,
                    std::vector<std::string> values) {
    sub.add_option(name, value, doc)->check(CLI::IsMember(values))->capture_default_str();
  };
  one_of("--param-dtype", c.param_dtype, "what is gathered and computed in",
         {"f32", "bf16", "fp16"});
  one_of("--reduce-dtype", c.reduce_dtype, "what gradients travel in; auto: as parameters",
         {"auto", "f32", "bf16", "fp16"});
  one_of("--transport", c.transport,
         "shm or mpi on the CPU, nccl or mpi-cuda on GPUs; auto: shm or nccl",
         {"auto", "shm", "mpi", "nccl", "mpi-cuda"});
  one_of("--backend", o.backend, "cpu, or cuda in a build by `make CUDA=1`", {"cpu", "cuda"});
  sub.add_option("--mesh,--fsdp.mesh", o.fsdp.mesh,
                 "full, auto, or RxS: R replicas of S ranks that share the weights")
      ->capture_default_str();
  sub.add_option("--reshard-ranks,--fsdp.reshard_ranks", o.fsdp.reshard_ranks,
                 "ranks over which a layer stays sharded from forward to backward; 0: all of them")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  for (auto [name, value] :
       {std::pair{"--reshard-after-forward,--fsdp.reshard_after_forward",
                  &o.fsdp.reshard_after_forward},
        {"--reshard-after-backward,--fsdp.reshard_after_backward", &o.fsdp.reshard_after_backward}})
    sub.add_option(name, *value, "true or false")->capture_default_str();
  sub.add_option("--layers-per-unit,--fsdp.layers_per_unit", o.fsdp.layers_per_unit,
                 "gathered and reduced together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub.add_option("--prefetch,--fsdp.prefetch", o.fsdp.prefetch, "units gathered ahead")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  for (auto [name, value, doc] :
       {std::tuple{"--forward-prefetch,--fsdp.forward_prefetch", &o.fsdp.forward_prefetch,
                   "the same in forward alone; -1: as --prefetch"},
        {"--backward-prefetch,--fsdp.backward_prefetch", &o.fsdp.backward_prefetch,
         "the same in backward alone; -1: as --prefetch"}})
    sub.add_option(name, *value, doc)->check(CLI::Range(-1, 64))->capture_default_str();
  sub.add_option("--reduce-every-microbatch,--fsdp.reduce_every_microbatch",
                 o.fsdp.reduce_every_microbatch, "true or false")
      ->capture_default_str();
}

void add_output_options(CLI::App& sub, WalkthroughCommand& c) {
  sub.add_option("--tensor", c.options.tensor,
                 "a parameter of the layer, e.g. q_proj, for --values");
  sub.add_option("--rank", c.options.rank, "where --values looks")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  sub.add_flag("--values", c.values,
               "values of --tensor: shard, gathered, gradient, reduced, updated");
  sub.add_option("--format", c.format,
                 "text, md, or one JSON document with every span of every rank")
      ->check(CLI::IsMember({"text", "md", "json"}))
      ->capture_default_str();
  sub.add_option("--topic", c.topic, "one idea instead of a step: ring, rope, mesh, two-by-two")
      ->check(CLI::IsMember(topic_names()));
  sub.add_option("--html", c.html, "file for a page with the same as pictures; needs no network");
  sub.add_option("--trace", c.options.trace, "file for a Chrome trace (ui.perfetto.dev)");
}

}  // namespace

void add_options(CLI::App& sub, WalkthroughCommand& command) {
  add_model_options(sub, command);
  add_sharding_options(sub, command);
  add_output_options(sub, command);
}

void settle(WalkthroughCommand& command, const World& world) {
  choose_model(command.options, world);
  collectively(world, [&] { choose_numbers(command, world); });
}

}  // namespace qshard
