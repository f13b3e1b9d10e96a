#include "train/walkthrough.h"

#include <optional>

#include "backends.h"
#include "model/qwen3_params.h"
#include "train/export.h"
#include "train/metrics.h"
#include "train/reference_case.h"
#include "train/trace_file.h"
#include "train/value_stages.h"
#include "train/walkthrough_checks.h"
#include "train/walkthrough_document.h"

namespace qshard {
namespace {

constexpr double kLearningRate = 1e-3;

// This rank's tokens of the step.
struct StepTokens {
  std::vector<int32_t> ids, labels;  // [accumulation, batch, seq]
  std::vector<TokenBatch> batches;

  void cut(int64_t tokens) {
    for (size_t at = 0; at < ids.size(); at += static_cast<size_t>(tokens))
      batches.push_back({&ids[at], &labels[at]});
  }
};

// A function of the seed and the place in the global batch alone.
int32_t some_token(uint64_t seed, int64_t sequence, int64_t position, int64_t vocab) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(sequence) * 0xBF58476D1CE4E5B9u +
               static_cast<uint64_t>(position) * 0x94D049BB133111EBu;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  return static_cast<int32_t>((x ^ (x >> 31)) % static_cast<uint64_t>(vocab));
}

void make_tokens(const WalkthroughOptions& o, const World& world, StepTokens& tokens) {
  for (int64_t a = 0; a < o.accumulation; ++a)
    for (int64_t b = 0; b < o.batch; ++b)
      for (int64_t t = 0; t < o.seq; ++t) {
        const int64_t sequence = (a * world.size() + world.rank()) * o.batch + b;
        tokens.ids.push_back(some_token(o.seed, sequence, t, o.config.vocab_size));
        tokens.labels.push_back(some_token(o.seed, sequence, t + 1, o.config.vocab_size));
      }
}

// Step 1 of the reference case.
void read_tokens(const WalkthroughOptions& o, const World& world, StepTokens& tokens) {
  const ReferenceCase c = load_reference_case(o.reference, world, true);
  const int64_t n = o.accumulation * o.batch * o.seq;
  tokens.ids.assign(c.inputs.begin(), c.inputs.begin() + n);
  tokens.labels.assign(c.labels.begin(), c.labels.begin() + n);
}

// A whole step at rate 0, so that code and memory are warm and rows are published as in training;
// weights keep their values, moments and counts are set back.
void warm_up(Engine& engine, Device& device, const std::vector<TokenBatch>& batches) {
  while (engine.step(batches, 0).overflow) continue;  // until the scale of the loss fits
  for (int u = 0; u < engine.model().num_units(); ++u)
    for (int i = 0; i < engine.model().unit(u).size(); ++i)
      for (const Tensor& moment :
           {engine.model().unit(u).exp_avg(i), engine.model().unit(u).exp_avg_sq(i)})
        device.zero(moment.data, moment.bytes());
  engine.restore(0, 0);
}

// --- the step

class Walk {
 public:
  Walk(const WalkthroughOptions& options, World& world, Backend& backend)
      : o_(options), world_(world), backend_(backend), recorder_(*backend.device) {
    collectively(world_, [&] {
      if (o_.reference.empty())
        make_tokens(o_, world_, tokens_);
      else
        read_tokens(o_, world_, tokens_);
    });
    if (!o_.trace.empty()) create_trace(world_, o_.trace);
    tokens_.cut(o_.batch * o_.seq);
    record_.rank = world_.rank();
    record_.host = world_.host();
  }

  WalkthroughReport run() {
    take_step();
    checks_.push_back(check_single_process(o_, world_, backend_, tokens_.batches[0], recorder_));
    if (!o_.trace.empty()) write_trace(world_, trace_, o_.trace);
    record_.spans = trace_.spans();
    return report();
  }

 private:
  int unit_id() const { return static_cast<int>(o_.unit()); }

  void take_step() {
    const TracedBackend traced(backend_, trace_, &recorder_);
    const WrapTransport wrap = [&](std::unique_ptr<Collectives> transport, const World& ranks) {
      if (o_.wrap_transport) transport = o_.wrap_transport(std::move(transport));
      return make_traced_collectives(std::move(transport), ranks, trace_, &recorder_);
    };
    Engine engine(o_.config, o_.fsdp, AdamWOptions(),
                  make_sharding(o_.transport, o_.fsdp, world_, backend_, wrap), o_.batch, o_.seq,
                  backend_);
    Unit& unit = engine.model().unit(unit_id());
    int watched = -1;
    collectively(world_, [&] {
      if (!o_.tensor.empty()) watched = find_parameter(unit.layout(), o_.layer, o_.tensor);
    });
    record_.mesh = engine.mesh().shape();
    record_.replica = engine.mesh().replica();
    record_.place = engine.mesh().shards().rank();
    set_weights(o_, world_, engine.model());
    trace_.record(false);
    warm_up(engine, *backend_.device, tokens_.batches);
    trace_.record(true);
    recorder_.start(layers_name(o_.layer, o_.layer + 1), unit.name(), unit.layout(),
                    o_.fsdp.param_dtype, engine.applied_loss_scale());
    record_.units = record_units(engine);
    record_.memory = record_memory(*backend_.device);

    const StepTraffic before = record_traffic(engine.sharding());
    begin_values(unit, watched);
    const StepResult result = engine.compute_gradients(tokens_.batches);
    checks_.push_back(check_mean_gradient(o_, engine.mesh(), *backend_.device, unit, recorder_));
    middle_values(unit, watched);
    engine.update(result, kLearningRate);
    end_values(unit, watched);
    record_.traffic = record_traffic(engine.sharding(), before);
    record_.weights = hash_weights(engine, *backend_.device);
    result_ = {{"loss", result.loss},
               {"grad_norm", result.grad_norm},
               {"labels", result.kept},
               {"lr", kLearningRate}};
    if (result.loss_scale > 0) result_["loss_scale"] = result.loss_scale;
    if (!o_.reference.empty())
      for (const WalkthroughCheck& check :
           check_activations(o_, world_, engine.model().shape(), recorder_))
        checks_.push_back(check);
  }

  bool shows(int i) const { return i >= 0 && world_.rank() == o_.rank; }
  std::vector<float> host(const Tensor& t) { return host_values(*backend_.device, t); }

  void begin_values(const Unit& unit, int i) {
    if (!shows(i)) return;
    stages_.emplace(unit.layout().params()[i], unit.rows(i));
    stages_->add("shard", "own rows of the f32 master weight", host(unit.master(i)), false);
  }
  void middle_values(const Unit& unit, int i) {
    if (!shows(i)) return;
    stages_->add("gathered", "all rows, as the operators read them", recorder_.parameter(i), true);
    stages_->add("gradient", "of this rank's tokens, all rows", recorder_.gradient(i), true);
    stages_->add("reduced", "own rows of the mean over ranks", host(unit.grad_shard(i)), false);
  }
  void end_values(const Unit& unit, int i) {
    if (!shows(i)) return;
    stages_->add("updated", "own rows after AdamW", host(unit.master(i)), false);
    values_ = {{"tensor", unit.layout().params()[i].name},
               {"rank", o_.rank},
               {"shape", std::vector<int64_t>(unit.layout().params()[i].shape.begin(),
                                              unit.layout().params()[i].shape.end())},
               {"stages", stages_->take()}};
  }

  WalkthroughReport report() {
    const std::vector<std::string> texts = world_.gather(Document(record_).dump());
    const std::string values =
        world_.broadcast(values_.is_null() ? "" : values_.dump(), static_cast<int>(o_.rank));
    WalkthroughReport report;
    collectively(world_, [&] {
      if (world_.rank() != 0) return;
      std::vector<RankRecord> ranks;
      for (const std::string& text : texts)
        ranks.push_back(Document::parse(text).get<RankRecord>());
      std::vector<WalkthroughCheck> checks = check_records(o_, ranks);
      checks.insert(checks.end(), checks_.begin(), checks_.end());
      Document list = Document::array();
      report.ok = true;
      for (const WalkthroughCheck& c : checks) {
        list.push_back(
            {{"name", c.name}, {"ok", c.ok}, {"expected", c.expected}, {"found", c.found}});
        report.ok = report.ok && c.ok;
      }
      report.document = walkthrough_document(o_, ranks);
      report.document["result"] = result_;
      report.document["checks"] = list;
      report.document["ok"] = report.ok;
      if (!values.empty()) report.document["values"] = Document::parse(values);
    });
    report.ok = world_.broadcast(report.ok ? "ok" : "", 0) == "ok";
    return report;
  }

  const WalkthroughOptions& o_;
  World& world_;
  Backend& backend_;
  StepTokens tokens_;
  Trace trace_;
  StepRecorder recorder_;
  RankRecord record_;
  Document result_, values_;
  std::optional<ValueStages> stages_;
  std::vector<WalkthroughCheck> checks_;
};

}  // namespace

Qwen3Config walkthrough_config() {
  Qwen3Config c;
  c.vocab_size = 512;
  c.hidden_size = 512;
  c.intermediate_size = 1024;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 8;
  c.num_key_value_heads = 4;
  c.head_dim = 64;
  c.max_position_embeddings = 4096;
  c.rope_theta = 1e6;
  c.rms_norm_eps = 1e-6;
  c.initializer_range = 0.02;
  c.tie_word_embeddings = true;
  return c;
}

WalkthroughReport run_walkthrough(const WalkthroughOptions& options, World& world,
                                  Backend& backend) {
  return Walk(options, world, backend).run();
}

}  // namespace qshard
