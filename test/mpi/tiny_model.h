// A tiny Qwen3, batches and runs of it: what tests of the training path share.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "../test_main.h"
#include "comm/traced_collectives.h"
#include "device/traced_ops.h"
#include "train/engine.h"

namespace qshard {

inline Qwen3Config tiny_config() {
  Qwen3Config c;
  c.vocab_size = 37;
  c.hidden_size = 20;
  c.intermediate_size = 28;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 8;  // heads · head_dim = 32, not hidden
  c.max_position_embeddings = 64;
  c.rope_theta = 10000;
  c.rms_norm_eps = 1e-6;
  c.initializer_range = 0.2;
  c.tie_word_embeddings = true;
  return c;
}

// The global batch of a step: `rows` sequences. Ids follow from (step, row, position) alone.
struct GlobalBatch {
  int64_t rows, T, vocab;
  std::vector<int32_t> ids, labels;

  GlobalBatch(int64_t step, int64_t rows_, int64_t T_, int64_t vocab_)
      : rows(rows_), T(T_), vocab(vocab_) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t t = 0; t < T; ++t) {
        ids.push_back(token(step, row, t));
        labels.push_back(token(step, row, t + 1));
      }
  }
  int32_t token(int64_t step, int64_t row, int64_t t) const {
    const uint64_t x = (static_cast<uint64_t>(step * 1000 + row) * 1000 + t) * 0x9E3779B97F4A7C15u;
    return static_cast<int32_t>((x >> 33) % static_cast<uint64_t>(vocab));
  }
  void ignore_row(int64_t row, int64_t keep) {  // all but the first `keep` labels
    for (int64_t t = keep; t < T; ++t) labels[row * T + t] = -100;
  }
  void ignore_all() { std::fill(labels.begin(), labels.end(), -100); }
  TokenBatch from(int64_t row) const { return {&ids[row * T], &labels[row * T]}; }
};

struct TinyRun {
  Qwen3Config config = tiny_config();
  FsdpOptions fsdp;
  AdamWOptions adamw;
  std::string transport = "shm";
  int64_t B = 2, T = 7;  // of a micro-batch
  double lr = 1e-2;
  uint64_t seed = 5;

  std::unique_ptr<Engine> engine() const {
    auto made = std::make_unique<Engine>(config, fsdp, adamw, transport, B, T, test_world(),
                                         test_backend());
    made->model().init_parameters(seed);
    return made;
  }
};

// This rank's micro-batches: its share of the rows, or every row on every rank, which must give the
// same loss and mean gradient as one rank alone.
enum class Deal { split, replicate };

inline std::vector<TokenBatch> deal(const GlobalBatch& batch, int64_t B, Deal how) {
  const World& world = test_world();
  const int64_t ranks = how == Deal::split ? world.size() : 1;
  const int64_t rank = how == Deal::split ? world.rank() : 0;
  std::vector<TokenBatch> micro;
  for (int64_t row = 0; row < batch.rows; row += ranks * B)
    micro.push_back(batch.from(row + rank * B));
  return micro;
}

// This rank's rows of all master weights or reduced gradients, one after the other.
template <typename Get>
std::vector<float> own_rows(Engine& engine, Get get) {
  std::vector<float> values;
  for (int u = 0; u < engine.model().num_units(); ++u)
    for (int i = 0; i < engine.model().unit(u).size(); ++i) {
      const Tensor t = get(engine.model().unit(u), i);
      values.insert(values.end(), t.as<float>(), t.as<float>() + t.numel());
    }
  return values;
}
inline std::vector<float> weights_of(Engine& engine) {
  return own_rows(engine, [](Unit& unit, int i) { return unit.master(i); });
}
inline std::vector<float> gradients_of(Engine& engine) {
  return own_rows(engine, [](Unit& unit, int i) { return unit.grad_shard(i); });
}

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<float> weights;  // this rank's
};

inline Outcome train(const TinyRun& run, const std::vector<GlobalBatch>& batches, Deal how) {
  auto engine = run.engine();
  Outcome outcome;
  for (const GlobalBatch& batch : batches) {
    const StepResult r = engine->step(deal(batch, run.B, how), run.lr);
    outcome.losses.push_back(r.loss);
    outcome.norms.push_back(r.grad_norm);
  }
  outcome.weights = weights_of(*engine);
  return outcome;
}

// Runs of so many layers on the transport that is the parameter.
template <int kLayers>
class TinyRunOn : public testing::TestWithParam<const char*> {
 protected:
  TinyRun tiny() const {
    TinyRun run;
    run.config.num_hidden_layers = kLayers;
    run.transport = GetParam();
    return run;
  }
};

inline std::vector<GlobalBatch> some_batches(const TinyRun& run, int steps, int64_t rows) {
  std::vector<GlobalBatch> batches;
  for (int s = 0; s < steps; ++s) batches.emplace_back(s, rows, run.T, run.config.vocab_size);
  return batches;
}

// What a trace has of this rank's first step, of one micro-batch.
inline std::vector<Span> spans_of_a_step(const TinyRun& run) {
  Trace trace;
  const TracedBackend traced(test_backend(), trace);
  const WrapTransport wrap = [&](std::unique_ptr<Collectives> transport, const World& ranks) {
    return make_traced_collectives(std::move(transport), ranks, trace);
  };
  Engine engine(run.config, run.fsdp, run.adamw,
                make_sharding(run.transport, run.fsdp, test_world(), test_backend(), wrap), run.B,
                run.T, test_backend());
  engine.model().init_parameters(run.seed);
  const auto batch = some_batches(run, 1, run.B * test_world().size()).front();
  engine.step(deal(batch, run.B, Deal::split), run.lr);
  return trace.spans();
}

// ‖a−b‖₂ / ‖b‖₂ over the rows of all ranks; the same on every rank.
inline double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double sums[2] = {0, 0};
  for (size_t i = 0; i < a.size(); ++i) {
    sums[0] += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    sums[1] += double{b[i]} * b[i];
  }
  test_world().all_reduce_sum(sums, 2);
  return std::sqrt(sums[0] / sums[1]);
}

inline void expect_close(const Outcome& a, const Outcome& b, double tolerance) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (size_t s = 0; s < a.losses.size(); ++s) {
    EXPECT_NEAR(a.losses[s], b.losses[s], tolerance * b.losses[s]) << "step " << s + 1;
    EXPECT_NEAR(a.norms[s], b.norms[s], tolerance * b.norms[s]) << "step " << s + 1;
  }
  EXPECT_LT(relative_difference(a.weights, b.weights), tolerance);
}

inline void expect_same_bits(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  ASSERT_EQ(a.weights.size(), b.weights.size());
  EXPECT_EQ(std::memcmp(a.weights.data(), b.weights.data(), a.weights.size() * sizeof(float)), 0);
}

}  // namespace qshard
