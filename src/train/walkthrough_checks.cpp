#include "train/walkthrough_checks.h"

#include <algorithm>
#include <cmath>

namespace qshard {
namespace {

// --- sizes

// Rows r·ceil(D/N) … of D on N ranks, worked out here and not by the layout that is checked.
int64_t expected_rows(int64_t rows, int64_t ranks, int64_t rank) {
  const int64_t chunk = (rows + ranks - 1) / ranks;
  return std::clamp<int64_t>(rows - rank * chunk, 0, chunk);
}

int64_t numel(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

// Own rows and the transport's padded rows of every parameter, on every rank.
WalkthroughCheck check_shards(const WalkthroughOptions& o, const std::vector<RankRecord>& ranks) {
  const int64_t N = ranks[0].mesh.shards, replicas = ranks[0].mesh.replicas;
  const auto size = static_cast<int64_t>(dtype_size(o.fsdp.param_dtype));
  WalkthroughCheck check{"shard sizes, read from the buffers",
                         replicas == 1
                             ? "ceil(rows / ranks) rows a rank; together every element once"
                             : "ceil(rows / shards) rows a rank; every element once a replica",
                         "", true};
  int64_t buffers = 0;
  for (size_t u = 0; u < ranks[0].units.size(); ++u)
    for (size_t p = 0; p < ranks[0].units[u].params.size(); ++p) {
      int64_t all = 0;
      for (const RankRecord& rank : ranks) {
        const ParamRecord& own = rank.units[u].params[p];
        const int64_t row = numel(own.shape) / own.shape[0];
        const int64_t elements = expected_rows(own.shape[0], N, rank.place) * row;
        const int64_t padded = (own.shape[0] + N - 1) / N * row;
        all += own.elements;
        ++buffers;
        const bool right = own.elements == elements && own.shard_elements == padded &&
                           own.shard_bytes == padded * size;
        if (!right && check.ok)
          check.found =
              fmt::format("{} on rank {}: {} elements of {} in a buffer of {} of {}", own.name,
                          rank.rank, own.elements, elements, own.shard_elements, padded);
        check.ok = check.ok && right;
      }
      const ParamRecord& any = ranks[0].units[u].params[p];
      const int64_t whole = replicas * numel(any.shape);
      if (all != whole && check.ok)
        check.found = fmt::format("{}: {} elements on all ranks of {}", any.name, all, whole);
      check.ok = check.ok && all == whole;
    }
  if (check.ok) check.found = fmt::format("{} buffers", buffers);
  return check;
}

// --- bytes

// The bytes of a rank's own part of what a call moves, from the sizes of its buffers.
int64_t own_part(const WalkthroughOptions& o, const RankRecord& rank, const Span& span) {
  const UnitRecord& unit = rank.unit_of(span);
  const auto reduce_size = static_cast<int64_t>(dtype_size(o.fsdp.reduce_dtype));
  switch (among(span, rank.mesh)) {
    case Among::replicas: {
      const int64_t R = rank.mesh.replicas;
      return (unit.buffer_elements() + R - 1) / R * reduce_size;
    }
    case Among::group:
      return unit.buffer_bytes() * rank.mesh.shards / rank.mesh.group;
    default:
      return span.lane == Lane::reduce ? unit.buffer_elements() * reduce_size : unit.buffer_bytes();
  }
}

bool sends(const Span& span) { return is_transport(span) && span.name.ends_with(" start"); }

// Every gather and reduction against what a ring sends for buffers of the size found.
WalkthroughCheck check_logical_bytes(const WalkthroughOptions& o,
                                     const std::vector<RankRecord>& ranks) {
  WalkthroughCheck check{"bytes of every gather and reduction, counted by the transport",
                         "(ranks − 1) × the bytes of a rank's buffer", "", true};
  int64_t calls = 0, total = 0;
  for (const RankRecord& rank : ranks)
    for (const Span& span : rank.spans) {
      if (!is_transport(span) || among(span, rank.mesh) == Among::replicas) continue;
      const int64_t others = ranks_among(among(span, rank.mesh), rank.mesh) - 1;
      const int64_t expected = sends(span) ? others * own_part(o, rank, span) : 0;
      calls += expected > 0;
      total += span.logical_bytes;
      if (span.logical_bytes != expected && check.ok)
        check.found = fmt::format("{} of {} on rank {}: {} bytes, expected {}", span.name,
                                  span.unit, rank.rank, span.logical_bytes, expected);
      check.ok = check.ok && span.logical_bytes == expected;
    }
  if (check.ok) check.found = fmt::format("{} calls on all ranks, {} bytes", calls, total);
  return check;
}

// A reduce-scatter and an all-gather of every unit's gradient shard, once a step.
WalkthroughCheck check_replica_sums(const WalkthroughOptions& o,
                                    const std::vector<RankRecord>& ranks) {
  const int64_t R = ranks[0].mesh.replicas;
  WalkthroughCheck check{"bytes of the all-reduce over replicas, counted by the transport",
                         "once a unit: 2 · (replicas − 1) × ceil(shard / replicas)", "", true};
  int64_t sums = 0, total = 0;
  for (const RankRecord& rank : ranks)
    for (const UnitRecord& unit : rank.units) {
      int64_t calls = 0, bytes = 0, expected = 0;
      for (const Span& span : rank.spans) {
        if (!is_transport(span) || among(span, rank.mesh) != Among::replicas) continue;
        if (rank.unit_of(span).name != unit.name) continue;
        calls += sends(span);
        bytes += span.logical_bytes;
        expected = 2 * (R - 1) * own_part(o, rank, span);
      }
      ++sums;
      total += bytes;
      const bool right = calls == 2 && bytes == expected;
      if (!right && check.ok)
        check.found = fmt::format("{} on rank {}: {} bytes in {} calls, expected {} in 2",
                                  unit.name, rank.rank, bytes, calls, expected);
      check.ok = check.ok && right;
    }
  if (check.ok) check.found = fmt::format("{} sums on all ranks, {} bytes", sums, total);
  return check;
}

// Ranks with the same rows have made the same update.
WalkthroughCheck check_replicas(const std::vector<RankRecord>& ranks) {
  WalkthroughCheck check{"replicas after the step", "the same weights bit for bit", "", true};
  for (const RankRecord& rank : ranks) {
    const bool same = rank.weights == ranks[rank.place].weights;
    if (!same && check.ok)
      check.found = fmt::format("rank {} has other weights than rank {}", rank.rank, rank.place);
    check.ok = check.ok && same;
  }
  if (check.ok) check.found = fmt::format("the same on {} replicas", ranks[0].mesh.replicas);
  return check;
}

// The spans of a rank together are what its transport has counted over the step.
WalkthroughCheck check_sums(const std::vector<RankRecord>& ranks) {
  WalkthroughCheck check{"the steps add up", "spans together = the transports' totals", "", true};
  for (const RankRecord& rank : ranks) {
    int64_t logical = 0, copied = 0;
    for (const Span& span : rank.spans)
      if (is_transport(span)) logical += span.logical_bytes, copied += span.copied_bytes;
    const Traffic t = rank.traffic.sum();
    const int64_t counted = t.gather_logical_bytes + t.reduce_logical_bytes;
    const int64_t really = t.gather_copied_bytes + t.reduce_copied_bytes;
    check.ok = check.ok && logical == counted && copied == really;
    if (rank.rank == 0 || !check.ok)
      check.found = fmt::format("rank {}: {} bytes logical of {}, {} copied of {}", rank.rank,
                                logical, counted, copied, really);
    if (!check.ok) break;
  }
  return check;
}

// Copied bytes follow from how the transport works; on several nodes it depends on the nodes.
WalkthroughCheck check_copied_bytes(const WalkthroughOptions& o,
                                    const std::vector<RankRecord>& ranks) {
  const bool in_place = o.transport == "shm";
  const bool one_node = std::all_of(ranks.begin(), ranks.end(),
                                    [&](const RankRecord& r) { return r.host == ranks[0].host; });
  WalkthroughCheck check{"bytes really copied", "", "", true};
  if (in_place && !one_node) {
    check.expected = "only the rows of other nodes move, once a step";
    for (const RankRecord& rank : ranks)
      check.ok = check.ok &&
                 rank.traffic.sum().gather_copied_bytes <= rank.traffic.sum().gather_logical_bytes;
  } else {
    check.expected = in_place ? "gathers 0: rows are read in place; reductions as logical"
                              : "as logical: buffers are private";
    for (const RankRecord& rank : ranks) {
      const Traffic t = rank.traffic.sum();
      check.ok = check.ok && t.reduce_copied_bytes == t.reduce_logical_bytes &&
                 t.gather_copied_bytes == (in_place ? 0 : t.gather_logical_bytes);
    }
  }
  const Traffic t = ranks[0].traffic.sum();
  check.found = fmt::format("rank 0: gathers {}, reductions {} bytes", t.gather_copied_bytes,
                            t.reduce_copied_bytes);
  return check;
}

// --- a layer is local

bool computes(const Span& s, const std::string& unit, const char* phase, int64_t micro_batch) {
  return !is_transport(s) && s.lane == Lane::compute && s.unit == unit && s.phase == phase &&
         s.micro_batch == micro_batch;
}

// Calls and bytes of the transport between the first and the last operator of each pass of a layer.
WalkthroughCheck check_local(const WalkthroughOptions& o, const std::vector<RankRecord>& ranks,
                             const char* phase, const char* name) {
  int64_t calls = 0, bytes = 0, passes = 0;
  for (const RankRecord& rank : ranks)
    for (int64_t l = 0; l < o.config.num_hidden_layers; ++l)
      for (int64_t m = 0; m < o.accumulation; ++m) {
        int64_t begin = INT64_MAX, end = 0;
        for (const Span& s : rank.spans)
          if (computes(s, fmt::format("layers.{}", l), phase, m)) {
            begin = std::min(begin, s.begin_ns);
            end = std::max(end, s.end_ns);
            bytes += s.logical_bytes + s.copied_bytes;
          }
        passes += end > begin;
        for (const Span& s : rank.spans)
          if (is_transport(s) && s.end_ns > begin && s.begin_ns < end) {
            ++calls;
            bytes += s.logical_bytes + s.copied_bytes;
          }
      }
  const auto expected =
      static_cast<int64_t>(ranks.size()) * o.config.num_hidden_layers * o.accumulation;
  return {name, fmt::format("0 calls, 0 bytes in {} passes", expected),
          fmt::format("{} calls, {} bytes in {} passes", calls, bytes, passes),
          calls == 0 && bytes == 0 && passes == expected};
}

// --- memory

WalkthroughCheck check_memory(const WalkthroughOptions& o, const std::vector<RankRecord>& ranks) {
  WalkthroughCheck check{"memory of a unit's parameters after every reshard",
                         "the bytes of the rank's own buffer again", "", true};
  int64_t reshards = 0;
  for (const RankRecord& rank : ranks)
    for (const Span& s : rank.spans) {
      if (s.name != "reshard" && s.name != "all-gather start") continue;
      const int64_t N = ranks_among(among(s, rank.mesh), rank.mesh), own = own_part(o, rank, s);
      const bool back = s.name == "reshard";
      reshards += back;
      const bool right = back ? s.unit_before == N * own && s.unit_after == own
                              : s.unit_before == own && s.unit_after == N * own;
      if (!right && check.ok)
        check.found = fmt::format("{} of {} on rank {}: {} → {} bytes, own buffer {}", s.name,
                                  s.unit, rank.rank, s.unit_before, s.unit_after, own);
      check.ok = check.ok && right;
    }
  for (const RankRecord& rank : ranks) {
    const int64_t before = rank.spans.front().held_before, after = rank.spans.back().held_after;
    if (before != after && check.ok)
      check.found = fmt::format("rank {} held {} bytes before the step and {} after it", rank.rank,
                                before, after);
    check.ok = check.ok && before == after;
  }
  if (check.ok)
    check.found = fmt::format("{} reshards; a rank holds {} bytes before and after the step",
                              reshards, ranks[0].spans.back().held_after);
  return check;
}

// --- arithmetic

WalkthroughCheck check_flops(const WalkthroughOptions& o, const std::vector<RankRecord>& ranks) {
  int64_t counted = 0;
  for (const RankRecord& rank : ranks)
    for (const Span& s : rank.spans)
      if (s.name.starts_with("linear") || s.name.starts_with("attention")) counted += s.flops;
  const double tokens =
      static_cast<double>(ranks.size()) * static_cast<double>(o.accumulation * o.batch * o.seq);
  const auto expected =
      static_cast<int64_t>(std::llround(o.config.train_flops_per_token(o.seq) * tokens));
  return {"FLOPs of products and attention, from the operators' shapes",
          fmt::format("{}: the model's per token × tokens", expected), fmt::format("{}", counted),
          counted == expected};
}

}  // namespace

std::vector<WalkthroughCheck> check_records(const WalkthroughOptions& o,
                                            const std::vector<RankRecord>& ranks) {
  std::vector<WalkthroughCheck> checks = {
      check_shards(o, ranks),
      check_logical_bytes(o, ranks),
      check_copied_bytes(o, ranks),
      check_sums(ranks),
      check_local(o, ranks, "forward", "no communication in forward steps 1–10"),
      check_local(o, ranks, "backward", "no communication while a layer's backward computes"),
      check_memory(o, ranks),
      check_flops(o, ranks)};
  if (ranks[0].mesh.replicas > 1) {
    checks.push_back(check_replica_sums(o, ranks));
    checks.push_back(check_replicas(ranks));
  }
  return checks;
}

}  // namespace qshard
