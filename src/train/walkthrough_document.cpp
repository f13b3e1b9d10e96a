#include "train/walkthrough_document.h"

#include "model/qwen3_params.h"
#include "train/walkthrough_steps.h"

namespace qshard {
namespace {

Document setting(const WalkthroughOptions& o, const std::vector<RankRecord>& ranks) {
  const Qwen3Config& c = o.config;
  return {{"model", o.model},
          {"num_hidden_layers", c.num_hidden_layers},
          {"hidden_size", c.hidden_size},
          {"num_attention_heads", c.num_attention_heads},
          {"num_key_value_heads", c.num_key_value_heads},
          {"head_dim", c.head_dim},
          {"intermediate_size", c.intermediate_size},
          {"vocab_size", c.vocab_size},
          {"tie_word_embeddings", c.tie_word_embeddings},
          {"parameters", c.num_parameters()},
          {"ranks", ranks.size()},
          {"replicas", ranks[0].mesh.replicas},
          {"shards", ranks[0].mesh.shards},
          {"reshard_ranks", ranks[0].mesh.group},
          {"batch", o.batch},
          {"seq", o.seq},
          {"accumulation", o.accumulation},
          {"param_dtype", dtype_name(o.fsdp.param_dtype)},
          {"reduce_dtype", dtype_name(o.fsdp.reduce_dtype)},
          {"reshard_after_forward", o.fsdp.reshard_after_forward},
          {"reshard_after_backward", o.fsdp.reshard_after_backward},
          {"layers_per_unit", o.fsdp.layers_per_unit},
          {"forward_prefetch", o.fsdp.forward_depth()},
          {"backward_prefetch", o.fsdp.backward_depth()},
          {"reduce_every_microbatch", o.fsdp.reduce_every_microbatch},
          {"backend", o.backend},
          {"transport", o.transport},
          {"seed", o.seed},
          {"layer", o.layer},
          {"unit", o.unit()}};
}

Document describe_unit(size_t u, const WalkthroughOptions& o,
                       const std::vector<RankRecord>& ranks) {
  const auto size = static_cast<int64_t>(dtype_size(o.fsdp.param_dtype));
  Document params = Document::array();
  int64_t total = 0;
  std::vector<int64_t> of_rank(ranks.size()), shard_bytes(ranks.size());
  for (size_t p = 0; p < ranks[0].units[u].params.size(); ++p) {
    const ParamRecord& first = ranks[0].units[u].params[p];
    int64_t elements = 1;
    for (int64_t n : first.shape) elements *= n;
    Document shards = Document::array();
    for (size_t r = 0; r < ranks.size(); ++r) {
      const ParamRecord& own = ranks[r].units[u].params[p];
      std::vector<int64_t> shape = own.shape;
      shape[0] = own.rows;
      shards.push_back({{"rank", r},
                        {"replica", ranks[r].replica},
                        {"first_row", own.first_row},
                        {"shape", shape},
                        {"elements", own.elements},
                        {"bytes", own.elements * size},
                        {"buffer_elements", own.shard_elements},
                        {"buffer_bytes", own.shard_bytes}});
      of_rank[r] += own.elements;
      shard_bytes[r] += own.shard_bytes;
    }
    total += elements;
    params.push_back({{"name", first.name},
                      {"shape", first.shape},
                      {"elements", elements},
                      {"bytes", elements * size},
                      {"shards", shards}});
  }
  return {{"name", ranks[0].units[u].name},
          {"elements", total},
          {"bytes", total * size},
          {"elements_of_rank", of_rank},
          {"buffer_bytes_of_rank", shard_bytes},
          {"parameters", params}};
}

Document initial_state(const std::vector<RankRecord>& ranks) {
  Document state = Document::array();
  for (const RankRecord& rank : ranks) {
    Document memory;
    for (const auto& [segment, bytes] : rank.memory) memory[segment] = bytes;
    state.push_back({{"rank", rank.rank},
                     {"replica", rank.replica},
                     {"place", rank.place},
                     {"host", rank.host},
                     {"parameters_held", rank.spans.empty() ? 0 : rank.spans.front().held_before},
                     {"allocated", memory}});
  }
  return state;
}

// The columns of a rank: gathers and reductions among the ranks that share a copy of the weights,
// and the sums over replicas.
void add_columns(Document& row, const StepTraffic& t) {
  Traffic own = t.shards;
  own += t.group;
  const Traffic& sums = t.replicas;
  row["gathers"].push_back(own.gathers);
  row["gather_logical_bytes"].push_back(own.gather_logical_bytes);
  row["gather_copied_bytes"].push_back(own.gather_copied_bytes);
  row["reduces"].push_back(own.reduces);
  row["reduce_logical_bytes"].push_back(own.reduce_logical_bytes);
  row["reduce_copied_bytes"].push_back(own.reduce_copied_bytes);
  row["all_reduces"].push_back(sums.reduces);
  row["all_reduce_logical_bytes"].push_back(sums.reduce_logical_bytes + sums.gather_logical_bytes);
  row["all_reduce_copied_bytes"].push_back(sums.reduce_copied_bytes + sums.gather_copied_bytes);
}

// What the spans of a unit on a rank add up to.
StepTraffic traffic_of(const UnitRecord& unit, const RankRecord& rank) {
  StepTraffic sums;
  for (const Span& span : rank.spans) {
    if (!is_transport(span) || rank.unit_of(span).name != unit.name) continue;
    const Among ranks = among(span, rank.mesh);
    Traffic& sum = ranks == Among::shards  ? sums.shards
                   : ranks == Among::group ? sums.group
                                           : sums.replicas;
    const bool gather = span.lane == Lane::gather;
    (gather ? sum.gather_logical_bytes : sum.reduce_logical_bytes) += span.logical_bytes;
    (gather ? sum.gather_copied_bytes : sum.reduce_copied_bytes) += span.copied_bytes;
    sum.gathers += span.name == "all-gather start";
    sum.reduces += span.name == "reduce-scatter start";
  }
  return sums;
}

Document communication(const std::vector<RankRecord>& ranks) {
  Document units = Document::array(), total;
  for (const UnitRecord& unit : ranks[0].units) {
    Document row = {{"unit", unit.name}};
    for (const RankRecord& rank : ranks) add_columns(row, traffic_of(unit, rank));
    units.push_back(row);
  }
  for (const RankRecord& rank : ranks) add_columns(total, rank.traffic);
  return {{"units", units}, {"total", total}};
}

// What happens between the last operator of a layer and the first of what follows, on rank 0; and
// how far ahead the next layer's gather began, where it is of another unit.
Document transition(const WalkthroughOptions& o, const std::vector<UnitRecord>& units,
                    const std::vector<Span>& spans) {
  const std::string from = layers_name(o.layer, o.layer + 1);
  const bool last = o.layer + 1 == o.config.num_hidden_layers;
  const std::string to = last ? "root" : layers_name(o.layer + 1, o.layer + 2);
  const bool gathers = !last && (o.layer + 1) % o.fsdp.layers_per_unit == 0;
  auto computes = [](const Span& s, const std::string& unit, const char* step) {
    return !is_transport(s) && s.lane == Lane::compute && s.micro_batch == 0 &&
           s.phase == "forward" && s.unit == unit && (!*step || s.step == step);
  };
  const Span *first = nullptr, *out = nullptr, *next = nullptr, *started = nullptr;
  for (const Span& s : spans) {
    if (!first && computes(s, from, "")) first = &s;
    if (!out && computes(s, from, "10 residual")) out = &s;
    if (out && !next && computes(s, to, "")) next = &s;
    if (gathers && !started && s.unit == units[o.unit() + 1].name && s.name == "all-gather start")
      started = &s;
  }
  Document doc = {
      {"from", from}, {"to", to}, {"output", Document()}, {"events", Document::array()}};
  if (!first || !out || !next) return doc;
  doc["output"] = Document(*out).at("tensors").back();
  doc["next_gather_began_ns_before_layer"] =
      started ? Document(first->begin_ns - started->begin_ns) : Document();
  for (const Span& s : spans)
    if (is_transport(s) && s.begin_ns >= out->end_ns && s.end_ns <= next->begin_ns)
      doc["events"].push_back({{"name", s.name},
                               {"unit", s.unit},
                               {"time_ns", s.end_ns - s.begin_ns},
                               {"logical_bytes", s.logical_bytes},
                               {"copied_bytes", s.copied_bytes},
                               {"held_before", s.held_before},
                               {"held_after", s.held_after}});
  return doc;
}

// Every span, with the step that it belongs to and the ranks that it moves between.
Document timeline(const RankRecord& rank, const Told& told_layer) {
  Document spans = Document::array();
  for (const Span& span : rank.spans) {
    Document& told = spans.emplace_back(span);
    told["told"] = step_of(span, told_layer, rank.mesh);
    told["among"] = is_transport(span) ? Document(among_name(among(span, rank.mesh))) : Document();
  }
  return {{"rank", rank.rank}, {"host", rank.host}, {"spans", spans}};
}

}  // namespace

Document walkthrough_document(const WalkthroughOptions& options,
                              const std::vector<RankRecord>& ranks) {
  const Told told{layers_name(options.layer, options.layer + 1),
                  ranks[0].units[options.unit()].name};
  Document doc = {{"format", "qshard-walkthrough"}, {"version", 1}};
  doc["setting"] = setting(options, ranks);
  for (size_t u = 0; u < ranks[0].units.size(); ++u)
    doc["units"].push_back(describe_unit(u, options, ranks));
  doc["initial_state"] = initial_state(ranks);
  doc["steps"] = describe_steps(told, ranks);
  doc["transition"] = transition(options, ranks[0].units, ranks[0].spans);
  doc["communication"] = communication(ranks);
  for (const RankRecord& rank : ranks) doc["timeline"].push_back(timeline(rank, told));
  return doc;
}

}  // namespace qshard
