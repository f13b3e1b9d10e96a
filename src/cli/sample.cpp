// Text from a trained model.
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <iterator>
#include <memory>

#include "backends.h"
#include "cli/cli.h"
#include "cli/sample_text.h"

namespace qshard {
namespace {

constexpr const char* kFooter =
    R"(Each token is chosen by: logits / temperature, then the --top-k most likely, then the most likely that
together reach --top-p. The same seed gives the same tokens, on any number of ranks. Text needs a model
trained on bytes (`qshard data tokenize`): a sample begins as a document does and stops where one ends.
Other models take and give token ids.

Examples:
  qshard sample --from runs/demo/a --prompt '#include <'
  qshard sample --from runs/a/checkpoints/step-00005000.h5 --temperature 0.7 --top-p 0.9 --samples 3
  qshard sample --from Qwen3-0.6B --prompt-ids 785,6722,315,9625,374 --tokens 8 --greedy
  mpirun -n 8 qshard sample --from Qwen3-32B --param-dtype bf16 --prompt-ids - < ids.txt)";

struct SampleCommand {
  std::string from, prompt, prompt_ids, tokenizer = "auto", format = "text";
  std::string param_dtype = "f32", backend = "cpu";
  GenerateOptions options;
};

// Standard input of rank 0.
std::string read_input(const World& world) {
  std::string text;
  if (world.rank() == 0) text.assign(std::istreambuf_iterator<char>(std::cin), {});
  return world.broadcast(text, 0);
}

int run_sample(SampleCommand& c, World& world) {
  GenerateOptions& o = c.options;
  collectively(world, [&] {
    o.transport = choose_transport(o.transport, c.backend);
    o.param_dtype = parse_dtype(c.param_dtype);
    if (o.param_dtype == DType::fp16 && c.backend == "cpu")
      fail_usage("--param-dtype fp16 needs --backend cuda: the CPU backend takes f32 and bf16");
  });
  const Warn warn = [](const std::string& text) { fmt::print(stderr, "warning: {}\n", text); };
  const TrainedModel model = find_trained_model(world, c.from, warn);
  if (c.prompt_ids == "-") c.prompt_ids = read_input(world);
  bool bytes = false;
  collectively(world, [&] {
    bytes = samples_text(model, c.tokenizer, !c.prompt_ids.empty());
    o.prompt = bytes ? byte_prompt(c.prompt) : id_prompt(model, c.prompt, c.prompt_ids);
    if (bytes) o.choices = kByteVocabSize;
    if (bytes) o.end = static_cast<int32_t>(kByteEndOfDocument);
  });
  Backend backend = make_backend(c.backend, world);
  const auto begin = std::chrono::steady_clock::now();
  SampleOutput output(c.format == "json", bytes, c.prompt, o);
  generate(model, o, world, backend, warn,
           [&](int64_t sample, int32_t id) { output.token(sample, id); });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  if (world.rank() == 0) output.finish(model, world.size(), seconds.count());
  return kExitDone;
}

void add_choice(CLI::App& sub, GenerateOptions& o) {
  const CLI::Range positive(std::numeric_limits<double>::min(), 1e9);
  CLI::Option* greedy = sub.add_flag("--greedy", o.choice.greedy, "always the most likely token");
  sub.add_option("--temperature", o.choice.temperature, "above 0; below 1: more likely tokens")
      ->check(positive)
      ->excludes(greedy)
      ->capture_default_str();
  sub.add_option("--top-k", o.choice.top_k, "choose among so many tokens; 0: all")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()))
      ->excludes(greedy)
      ->capture_default_str();
  sub.add_option("--top-p", o.choice.top_p, "choose among the tokens of this share, up to 1")
      ->check(CLI::Range(std::numeric_limits<double>::min(), 1.0))
      ->excludes(greedy)
      ->capture_default_str();
  sub.add_option("--seed", o.seed, "of the choices")->capture_default_str();
}

}  // namespace

void add_sample(CLI::App& app, Command& run) {
  auto c = std::make_shared<SampleCommand>();
  GenerateOptions& o = c->options;
  CLI::App* sub = app.add_subcommand("sample", "text or tokens from a trained model");
  sub->footer(kFooter);
  const CLI::Range count(int64_t{1}, int64_t{1} << 30);
  auto one_of = [&](const char* name, std::string& value, const char* doc,
                    std::vector<std::string> values) {
    sub->add_option(name, value, doc)->check(CLI::IsMember(values))->capture_default_str();
  };
  sub->add_option("--from", c->from,
                  "a checkpoint, a Hugging Face folder, or a run's folder (its newest checkpoint)")
      ->required();
  CLI::Option* prompt = sub->add_option("--prompt", c->prompt, "text that the samples continue");
  sub->add_option("--prompt-ids", c->prompt_ids, "token ids 1,2,3 instead; -: from standard input")
      ->excludes(prompt);
  sub->add_option("--tokens", o.tokens, "of a sample, at most")
      ->check(count)
      ->capture_default_str();
  sub->add_option("--samples", o.samples, "how many")->check(count)->capture_default_str();
  add_choice(*sub, o);
  sub->add_option("--window", o.window,
                  "tokens that the next one may depend on; default: a training sequence, or the "
                  "folder's max_position_embeddings")
      ->check(count);
  one_of("--tokenizer", c->tokenizer, "what tokens are; auto: as the model says, else ids",
         {"auto", "bytes", "ids"});
  one_of("--format", c->format, "text, or one JSON document", {"text", "json"});
  one_of("--param-dtype", c->param_dtype, "what is gathered and computed in",
         {"f32", "bf16", "fp16"});
  one_of("--backend", c->backend, "cpu, or cuda in a build by `make CUDA=1`", {"cpu", "cuda"});
  one_of("--transport", o.transport.name, "as comm.transport of `qshard train`",
         {"auto", "shm", "mpi", "nccl", "mpi-cuda"});
  sub->callback([c, &run] { run = [c](World& world) { return run_sample(*c, world); }; });
}

}  // namespace qshard
