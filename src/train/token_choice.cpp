#include "train/token_choice.h"

#include <Random123/philox.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace qshard {
namespace {

void normalize(std::vector<Candidate>& all) {
  double sum = 0;
  for (const Candidate& c : all) sum += c.probability;
  for (Candidate& c : all) c.probability /= sum;
}

}  // namespace

std::vector<Candidate> candidates(std::span<const float> logits, const ChoiceOptions& options) {
  QS_CHECK(!logits.empty(), "no logits to choose from");
  std::vector<Candidate> all;
  all.reserve(logits.size());
  const double highest = *std::max_element(logits.begin(), logits.end());
  for (size_t i = 0; i < logits.size(); ++i)
    all.push_back({static_cast<int32_t>(i), std::exp((logits[i] - highest) / options.temperature)});
  // By logit: probabilities of unlike logits may round to the same number.
  const auto before = [&](const Candidate& a, const Candidate& b) {
    return logits[a.id] != logits[b.id] ? logits[a.id] > logits[b.id] : a.id < b.id;
  };
  const auto size = static_cast<int64_t>(all.size());
  int64_t keep = options.greedy ? 1 : size;
  if (options.top_k > 0) keep = std::min(keep, options.top_k);
  std::partial_sort(all.begin(), all.begin() + keep, all.end(), before);
  all.resize(static_cast<size_t>(keep));
  normalize(all);
  if (options.top_p < 1) {
    double sum = 0;
    const auto last = std::find_if(all.begin(), all.end(), [&](const Candidate& c) {
      return (sum += c.probability) >= options.top_p;
    });
    if (last != all.end()) all.erase(last + 1, all.end());
    normalize(all);
  }
  return all;
}

int32_t choose(std::span<const Candidate> from, double u) {
  QS_CHECK(!from.empty(), "no candidate to choose");
  double sum = 0;
  for (const Candidate& c : from)
    if (u < (sum += c.probability)) return c.id;
  return from.back().id;  // the sum may end a rounding below 1
}

double uniform(uint64_t seed, uint64_t sample, uint64_t position) {
  const r123::Philox4x32::key_type key{
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}};
  const r123::Philox4x32::ctr_type counter{
      {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
       static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32)}};
  const auto random = r123::Philox4x32()(counter, key);
  const uint64_t bits = (uint64_t{random[0]} << 32 | random[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace qshard
