#include "train/walkthrough_steps.h"

#include <algorithm>

namespace qshard {
namespace {

// What the program says about a step; all numbers beside it are measured.
struct StepText {
  const char *phase, *number, *title, *formula;
  const char* label;  // of the operators, or "" for the transport's verbs
  std::vector<std::string> verbs;
  const char* same_pass_as = nullptr;  // the number of the step whose operators do this one as well
  const char* unit_suffix = "";        // of the transport's unit behind the layer's name
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
      {"backward",
       "12+",
       "all-reduce the own rows over the replicas",
       "mean over all ranks = Σ over replicas of their sums / ranks",
       "",
       {"gradient buffer", "reduce-scatter start", "reduce-scatter wait", "all-gather start",
        "all-gather wait", "reshard"},
       nullptr,
       ReplicaSum::kNameSuffix},
      {"optimizer",
       "13",
       "AdamW on the own rows",
       "m, v, master weights f32; shard = rounded master",
       "AdamW",
       {}},
  };
  return texts;
}

// One replica has nothing to sum.
bool is_told(const StepText& text, const MeshShape& mesh) {
  return mesh.replicas > 1 || !*text.unit_suffix;
}

bool belongs(const Span& span, const StepText& text, const Told& told) {
  const bool named =
      span.unit == told.unit + text.unit_suffix || (!*text.unit_suffix && span.unit == told.layer);
  if (!named || span.phase != text.phase) return false;
  if (*text.label) return !is_transport(span) && span.step == text.label;
  return std::find(text.verbs.begin(), text.verbs.end(), span.name) != text.verbs.end();
}

// The operators of a step in order; equal calls, as those of micro-batches, once with a count.
Document operators(const std::vector<const Span*>& spans) {
  Document list = Document::array();
  for (const Span* span : spans) {
    if (is_transport(*span)) continue;
    const Document tensors = Document(*span).at("tensors");
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

// The ranks that the first call of a step moves between, or null.
Document among_of(const StepText& text, const Told& told, const RankRecord& rank) {
  for (const Span& span : rank.spans)
    if (is_transport(span) && belongs(span, text, told)) return among_name(among(span, rank.mesh));
  return nullptr;
}

Document describe_step(const StepText& text, const Told& told,
                       const std::vector<RankRecord>& ranks) {
  const Lane lane = *text.label                          ? Lane::compute
                    : text.verbs[0] == "gradient buffer" ? Lane::reduce
                                                         : Lane::gather;
  Document step = {{"phase", text.phase},
                   {"number", text.number},
                   {"lane", lane_name(lane)},
                   {"title", text.title},
                   {"formula", text.formula},
                   {"same_pass_as", text.same_pass_as ? Document(text.same_pass_as) : Document()},
                   {"among", among_of(text, told, ranks[0])}};
  for (const RankRecord& rank : ranks) {
    std::vector<const Span*> spans;
    for (const Span& span : rank.spans)
      if (belongs(span, text, told)) spans.push_back(&span);
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

}  // namespace

Document describe_steps(const Told& told, const std::vector<RankRecord>& ranks) {
  Document steps = Document::array();
  for (const StepText& text : step_texts())
    if (is_told(text, ranks[0].mesh)) steps.push_back(describe_step(text, told, ranks));
  return steps;
}

Document step_of(const Span& span, const Told& told, const MeshShape& mesh) {
  size_t index = 0;
  for (const StepText& text : step_texts()) {
    if (!is_told(text, mesh)) continue;
    if (!text.same_pass_as && belongs(span, text, told)) return index;
    ++index;
  }
  return nullptr;
}

}  // namespace qshard
