#include "train/walkthrough_document.h"

#include <algorithm>
#include <string_view>

namespace qshard {
namespace {

// What the program says about a step; all numbers beside it are measured.
struct StepText {
  const char *phase, *number, *title, *formula;
  const char* label;  // of the operators, or "" for the transport's verbs
  std::vector<std::string> verbs;
  const char* same_pass_as = nullptr;  // the number of the step whose operators do this one as well
};

const std::vector<StepText>& step_texts() {
  static const std::vector<StepText> texts = {
      {"forward",
       "0",
       "all-gather the parameters",
       "full = the rows of all ranks, one batch",
       "",
       {"all-gather start", "all-gather wait"}},
      {"forward", "1", "input RMSNorm", "n = x / sqrt(mean(x²) + eps) · w", "1 input RMSNorm", {}},
      {"forward", "2", "q/k/v projections", "q = n·Wqᵀ, k = n·Wkᵀ, v = n·Wvᵀ", "2 q/k/v", {}},
      {"forward",
       "3",
       "q-norm, k-norm",
       "RMSNorm of every head over head_dim",
       "3+4 q-norm, k-norm, RoPE",
       {}},
      {"forward",
       "4",
       "RoPE",
       "a' = a·cos − b·sin, b' = b·cos + a·sin; b = a's half head_dim on",
       "3+4 q-norm, k-norm, RoPE",
       {},
       "3"},
      {"forward",
       "5",
       "causal attention, grouped kv heads",
       "o = softmax(q·kᵀ / sqrt(D), causal)·v",
       "5 attention",
       {}},
      {"forward", "6", "o_proj", "y = o·Woᵀ", "6 o_proj", {}},
      {"forward", "7", "residual", "m = x + y", "7+8 residual, RMSNorm", {}},
      {"forward",
       "8",
       "post-attention RMSNorm",
       "n = m / sqrt(mean(m²) + eps) · w",
       "7+8 residual, RMSNorm",
       {},
       "7"},
      {"forward", "9", "SwiGLU MLP", "z = (silu(n·Wgᵀ) ⊙ n·Wuᵀ)·Wdᵀ", "9 SwiGLU MLP", {}},
      {"forward", "10", "residual", "out = m + z", "10 residual", {}},
      {"forward", "11", "reshard", "give up the other ranks' rows", "", {"reshard"}},
      {"backward",
       "0",
       "all-gather again",
       "full = the rows of all ranks, one batch",
       "",
       {"all-gather start", "all-gather wait"}},
      {"backward",
       "9",
       "SwiGLU MLP (and residual 10)",
       "dWd, dWu, dWg and dn from dout",
       "9 SwiGLU MLP",
       {}},
      {"backward",
       "8+7",
       "RMSNorm, residual",
       "dm += gradient through the norm; dw = Σ dn·m/rms",
       "8+7 RMSNorm, residual",
       {}},
      {"backward", "6", "o_proj", "dWo = dyᵀ·o, do = dy·Wo", "6 o_proj", {}},
      {"backward",
       "5",
       "causal attention",
       "dq, dk, dv from do and the kept row sums",
       "5 attention",
       {}},
      {"backward",
       "4+3",
       "RoPE, q-norm, k-norm",
       "rotate back, then through the norm of each head",
       "4+3 RoPE, q-norm, k-norm",
       {}},
      {"backward", "2", "q/k/v projections", "dWq, dWk, dWv and dn", "2 q/k/v", {}},
      {"backward",
       "1",
       "input RMSNorm, residual",
       "dx += gradient through the norm",
       "1 input RMSNorm, residual",
       {}},
      {"backward", "11", "reshard", "give up the other ranks' rows", "", {"reshard"}},
      {"backward",
       "12",
       "reduce-scatter the gradient",
       "own rows of the mean over ranks",
       "",
       {"gradient buffer", "reduce-scatter start", "reduce-scatter wait"}},
      {"optimizer",
       "13",
       "AdamW on the own rows",
       "m, v, master weights f32; shard = rounded master",
       "AdamW",
       {}},
  };
  return texts;
}

bool belongs(const Span& span, const StepText& text, const std::string& unit) {
  if (span.unit != unit || span.phase != text.phase) return false;
  if (*text.label) return !is_transport(span) && span.step == text.label;
  return std::find(text.verbs.begin(), text.verbs.end(), span.name) != text.verbs.end();
}

Document tensors_of(const Span& span) { return Document(span).at("tensors"); }

// The operators of a step in order; equal calls, as those of micro-batches, once with a count.
Document operators(const std::vector<const Span*>& spans) {
  Document list = Document::array();
  for (const Span* span : spans) {
    if (is_transport(*span)) continue;
    const Document tensors = tensors_of(*span);
    bool known = false;
    for (Document& op : list)
      if (op["name"] == span->name && op["tensors"] == tensors) {
        op["calls"] = op["calls"].get<int64_t>() + 1;
        op["flops"] = op["flops"].get<int64_t>() + span->flops;
        known = true;
      }
    if (!known)
      list.push_back(
          {{"name", span->name}, {"calls", 1}, {"flops", span->flops}, {"tensors", tensors}});
  }
  return list;
}

// From the beginning of each start to the end of its wait.
int64_t in_flight_ns(const std::vector<const Span*>& spans) {
  int64_t total = 0, begin = -1;
  for (const Span* span : spans) {
    if (span->name.ends_with(" start")) begin = span->begin_ns;
    if (span->name.ends_with(" wait") && begin >= 0) total += span->end_ns - begin;
  }
  return total;
}

Document describe_step(const StepText& text, const std::string& unit,
                       const std::vector<RankRecord>& ranks) {
  const Lane lane = *text.label                          ? Lane::compute
                    : text.verbs[0] == "gradient buffer" ? Lane::reduce
                                                         : Lane::gather;
  Document step = {{"phase", text.phase},
                   {"number", text.number},
                   {"lane", lane_name(lane)},
                   {"title", text.title},
                   {"formula", text.formula},
                   {"same_pass_as", text.same_pass_as ? Document(text.same_pass_as) : Document()}};
  for (const RankRecord& rank : ranks) {
    std::vector<const Span*> spans;
    for (const Span& span : rank.spans)
      if (belongs(span, text, unit)) spans.push_back(&span);
    int64_t flops = 0, ns = 0, logical = 0, copied = 0;
    for (const Span* span : spans) {
      flops += span->flops;
      ns += span->end_ns - span->begin_ns;
      logical += span->logical_bytes;
      copied += span->copied_bytes;
    }
    if (rank.rank == 0) {
      step["calls"] = spans.size();
      step["operators"] = operators(spans);
      step["flops"] = flops;
    }
    step["time_ns"].push_back(ns);
    step["in_flight_ns"].push_back(in_flight_ns(spans));
    step["logical_bytes"].push_back(logical);
    step["copied_bytes"].push_back(copied);
    step["held_before"].push_back(spans.empty() ? 0 : spans.front()->held_before);
    step["held_after"].push_back(spans.empty() ? 0 : spans.back()->held_after);
    if (lane != Lane::gather) continue;
    step["unit_before"].push_back(spans.empty() ? 0 : spans.front()->unit_before);
    step["unit_after"].push_back(spans.empty() ? 0 : spans.back()->unit_after);
  }
  return step;
}

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
          {"batch", o.batch},
          {"seq", o.seq},
          {"accumulation", o.accumulation},
          {"param_dtype", dtype_name(o.fsdp.param_dtype)},
          {"reduce_dtype", dtype_name(o.fsdp.reduce_dtype)},
          {"reshard_after_forward", o.fsdp.reshard_after_forward},
          {"prefetch", o.fsdp.prefetch},
          {"reduce_every_microbatch", o.fsdp.reduce_every_microbatch},
          {"backend", o.backend},
          {"transport", o.transport},
          {"seed", o.seed},
          {"layer", o.layer}};
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
                     {"host", rank.host},
                     {"parameters_held", rank.spans.empty() ? 0 : rank.spans.front().held_before},
                     {"allocated", memory}});
  }
  return state;
}

Document communication(const std::vector<RankRecord>& ranks) {
  Document units = Document::array();
  for (const UnitRecord& unit : ranks[0].units) {
    Document row = {{"unit", unit.name}};
    for (const RankRecord& rank : ranks) {
      Traffic sum;
      for (const Span& span : rank.spans) {
        if (span.unit != unit.name || !is_transport(span)) continue;
        const bool gather = span.lane == Lane::gather;
        (gather ? sum.gather_logical_bytes : sum.reduce_logical_bytes) += span.logical_bytes;
        (gather ? sum.gather_copied_bytes : sum.reduce_copied_bytes) += span.copied_bytes;
        sum.gathers += span.name == "all-gather start";
        sum.reduces += span.name == "reduce-scatter start";
      }
      row["gathers"].push_back(sum.gathers);
      row["gather_logical_bytes"].push_back(sum.gather_logical_bytes);
      row["gather_copied_bytes"].push_back(sum.gather_copied_bytes);
      row["reduces"].push_back(sum.reduces);
      row["reduce_logical_bytes"].push_back(sum.reduce_logical_bytes);
      row["reduce_copied_bytes"].push_back(sum.reduce_copied_bytes);
    }
    units.push_back(row);
  }
  Document total;
  for (const RankRecord& rank : ranks) {
    const Traffic& t = rank.traffic;
    total["gathers"].push_back(t.gathers);
    total["gather_logical_bytes"].push_back(t.gather_logical_bytes);
    total["gather_copied_bytes"].push_back(t.gather_copied_bytes);
    total["reduces"].push_back(t.reduces);
    total["reduce_logical_bytes"].push_back(t.reduce_logical_bytes);
    total["reduce_copied_bytes"].push_back(t.reduce_copied_bytes);
  }
  return {{"units", units}, {"total", total}};
}

// What happens between the last operator of a layer and the first of what follows, on rank 0; and
// how far ahead the next layer's gather began.
Document transition(const WalkthroughOptions& o, const std::vector<Span>& spans) {
  const std::string from = fmt::format("layers.{}", o.layer);
  const bool last = o.layer + 1 == o.config.num_hidden_layers;
  const std::string to = last ? "root" : fmt::format("layers.{}", o.layer + 1);
  auto computes = [](const Span& s, const std::string& unit, const char* step) {
    return !is_transport(s) && s.lane == Lane::compute && s.micro_batch == 0 &&
           s.phase == "forward" && s.unit == unit && (!*step || s.step == step);
  };
  const Span *first = nullptr, *out = nullptr, *next = nullptr, *started = nullptr;
  for (const Span& s : spans) {
    if (!first && computes(s, from, "")) first = &s;
    if (!out && computes(s, from, "10 residual")) out = &s;
    if (out && !next && computes(s, to, "")) next = &s;
    if (!last && !started && s.unit == to && s.name == "all-gather start") started = &s;
  }
  Document doc = {
      {"from", from}, {"to", to}, {"output", Document()}, {"events", Document::array()}};
  if (!first || !out || !next) return doc;
  doc["output"] = tensors_of(*out).back();
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

}  // namespace

bool is_transport(const Span& span) {
  return span.lane == Lane::gather || span.lane == Lane::reduce;
}

Document walkthrough_document(const WalkthroughOptions& options,
                              const std::vector<RankRecord>& ranks) {
  const std::string unit = fmt::format("layers.{}", options.layer);
  Document doc = {{"format", "qshard-walkthrough"}, {"version", 1}};
  doc["setting"] = setting(options, ranks);
  for (size_t u = 0; u < ranks[0].units.size(); ++u)
    doc["units"].push_back(describe_unit(u, options, ranks));
  doc["initial_state"] = initial_state(ranks);
  for (const StepText& text : step_texts())
    doc["steps"].push_back(describe_step(text, unit, ranks));
  doc["transition"] = transition(options, ranks[0].spans);
  doc["communication"] = communication(ranks);
  for (const RankRecord& rank : ranks)
    doc["timeline"].push_back({{"rank", rank.rank}, {"host", rank.host}, {"spans", rank.spans}});
  return doc;
}

void to_json(Document& json, const RankRecord& record) {
  json = {{"rank", record.rank},
          {"host", record.host},
          {"spans", record.spans},
          {"memory", record.memory}};
  const Traffic& t = record.traffic;
  json["traffic"] = {t.gathers, t.gather_logical_bytes, t.gather_copied_bytes,
                     t.reduces, t.reduce_logical_bytes, t.reduce_copied_bytes};
  for (const UnitRecord& unit : record.units) {
    Document params = Document::array();
    for (const ParamRecord& p : unit.params)
      params.push_back(
          {p.name, p.shape, p.first_row, p.rows, p.elements, p.shard_elements, p.shard_bytes});
    json["units"].push_back({{"name", unit.name}, {"params", params}});
  }
}

void from_json(const Document& json, RankRecord& record) {
  json.at("rank").get_to(record.rank);
  json.at("host").get_to(record.host);
  json.at("spans").get_to(record.spans);
  json.at("memory").get_to(record.memory);
  Traffic& t = record.traffic;
  int i = 0;
  for (int64_t* value : {&t.gathers, &t.gather_logical_bytes, &t.gather_copied_bytes, &t.reduces,
                         &t.reduce_logical_bytes, &t.reduce_copied_bytes})
    json.at("traffic").at(i++).get_to(*value);
  for (const Document& u : json.at("units")) {
    UnitRecord& unit = record.units.emplace_back();
    u.at("name").get_to(unit.name);
    for (const Document& p : u.at("params"))
      unit.params.push_back({p[0], p[1], p[2], p[3], p[4], p[5], p[6]});
  }
}

}  // namespace qshard
