// How the next token is chosen from a model's logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace qshard {

struct ChoiceOptions {
  double temperature = 1;  // > 0; divides the logits
  int64_t top_k = 0;       // only the k most likely tokens; 0: all
  double top_p = 1;        // then only the most likely ones that together reach this share
  bool greedy = false;     // the most likely token
};

struct Candidate {
  int32_t id;
  double probability;
};

// The tokens that may be chosen, most likely first (of equal ones the smaller id), with
// probabilities that add up to 1. Logits are finite and at least one.
std::vector<Candidate> candidates(std::span<const float> logits, const ChoiceOptions& options);

// The candidate in whose part of [0, 1) u lies.
int32_t choose(std::span<const Candidate> from, double u);

// In [0, 1), 53 bits; a pure function (Philox 4×32-10).
double uniform(uint64_t seed, uint64_t sample, uint64_t position);

}  // namespace qshard
