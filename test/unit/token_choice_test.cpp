#include "train/token_choice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace qshard {
namespace {

// Probabilities 0.1, 0.4, 0.2, 0.3, up to a constant.
const std::vector<float> kLogits = {std::log(1.f) + 5, std::log(4.f) + 5, std::log(2.f) + 5,
                                    std::log(3.f) + 5};

void expect_candidates(const ChoiceOptions& options, const std::vector<Candidate>& expected,
                       const std::vector<float>& logits = kLogits) {
  const std::vector<Candidate> found = candidates(logits, options);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].id, expected[i].id);
    EXPECT_NEAR(found[i].probability, expected[i].probability, 1e-6);
  }
}

TEST(TokenChoice, SoftmaxOfTheLogits) {
  expect_candidates({}, {{1, 0.4}, {3, 0.3}, {2, 0.2}, {0, 0.1}});
}

TEST(TokenChoice, TemperatureIsAPower) {
  // p^(1/T): squares at T = 1/2, roots at T = 2.
  expect_candidates({.temperature = 0.5},
                    {{1, 16 / 30.}, {3, 9 / 30.}, {2, 4 / 30.}, {0, 1 / 30.}});
  const double sum = 2 + std::sqrt(3) + std::sqrt(2) + 1;
  expect_candidates({.temperature = 2},
                    {{1, 2 / sum}, {3, std::sqrt(3) / sum}, {2, std::sqrt(2) / sum}, {0, 1 / sum}});
}

TEST(TokenChoice, TinyTemperatureIsGreedyAndFinite) {
  expect_candidates({.temperature = 1e-9}, {{1, 1}, {3, 0}, {2, 0}, {0, 0}});
}

TEST(TokenChoice, TopK) {
  expect_candidates({.top_k = 2}, {{1, 4 / 7.}, {3, 3 / 7.}});
  expect_candidates({.top_k = 9}, {{1, 0.4}, {3, 0.3}, {2, 0.2}, {0, 0.1}});
}

TEST(TokenChoice, TopPTakesTheTokenThatReachesIt) {
  expect_candidates({.top_p = 0.35}, {{1, 1}});
  expect_candidates({.top_p = 0.65}, {{1, 4 / 7.}, {3, 3 / 7.}});
  expect_candidates({.top_p = 0.75}, {{1, 4 / 9.}, {3, 3 / 9.}, {2, 2 / 9.}});
  expect_candidates({.top_p = 1e-9}, {{1, 1}});
}

TEST(TokenChoice, TemperatureThenTopKThenTopP) {
  // Squares 16, 9, 4 of the three most likely: 0.55, 0.31, 0.14.
  expect_candidates({.temperature = 0.5, .top_k = 3, .top_p = 0.8}, {{1, 16 / 25.}, {3, 9 / 25.}});
}

TEST(TokenChoice, GreedyTakesTheFirstOfEqualOnes) {
  expect_candidates({.greedy = true}, {{1, 1}});
  expect_candidates({.greedy = true}, {{2, 1}}, {0, 1, 7, 7, 3});
  expect_candidates({.top_k = 1}, {{2, 1}}, {0, 1, 7, 7, 3});
}

TEST(TokenChoice, ChooseCutsTheUnitInterval) {
  const std::vector<Candidate> from = {{7, 0.5}, {2, 0.25}, {9, 0.25}};
  for (const auto& [u, id] :
       {std::pair{0.0, 7}, {0.4999, 7}, {0.5, 2}, {0.7499, 2}, {0.75, 9}, {0.9999, 9}})
    EXPECT_EQ(choose(from, u), id) << u;
  EXPECT_EQ(choose(std::vector<Candidate>{{7, 0.3}, {2, 0.3}}, 0.9), 2);  // rounding lost the rest
}

// Counts of 40000 draws are within 4 standard deviations of the exact probabilities.
TEST(TokenChoice, FrequenciesAreTheProbabilities) {
  const std::vector<Candidate> from = candidates(kLogits, {.temperature = 0.5, .top_k = 3});
  constexpr int kDraws = 40000;
  std::vector<int> counts(kLogits.size());
  for (int i = 0; i < kDraws; ++i) ++counts[choose(from, uniform(3, i % 7, i / 7))];
  EXPECT_EQ(counts[0], 0);
  for (const Candidate& c : from) {
    const double deviation = std::sqrt(kDraws * c.probability * (1 - c.probability));
    EXPECT_NEAR(counts[c.id], kDraws * c.probability, 4 * deviation) << c.id;
  }
}

TEST(TokenChoice, UniformDependsOnEachOfItsArguments) {
  std::set<double> seen;
  for (uint64_t seed : {0ull, 1ull, 1ull << 40})
    for (uint64_t sample : {0, 1})
      for (uint64_t position : {0, 1, 2}) {
        const double u = uniform(seed, sample, position);
        EXPECT_GE(u, 0);
        EXPECT_LT(u, 1);
        EXPECT_EQ(u, uniform(seed, sample, position));
        seen.insert(u);
      }
  EXPECT_EQ(seen.size(), 18);
}

}  // namespace
}  // namespace qshard
