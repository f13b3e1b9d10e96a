// Replicas, groups and the other ways to shard, against the plain one: one replica over all ranks.
#include <cmath>
#include <optional>

#include "../unit/files.h"
#include "base/config.h"
#include "comm/gather.h"
#include "forwarding.h"
#include "fsdp/prefetch.h"
#include "io/checkpoint.h"
#include "tiny_model.h"
#include "train/checkpointer.h"
#include "train/export.h"

namespace qshard {
namespace {

int ranks() { return test_world().size(); }

// Every mesh of these ranks.
std::vector<MeshShape> shapes() {
  std::vector<MeshShape> all;
  for (int r = 1; r <= ranks(); ++r)
    if (ranks() % r == 0) all.push_back({r, ranks() / r, "", 0});
  return all;
}

// Where rows divide by all shard counts, weights that are one product lie next to each other in
// every layout, and products have the same bits.
bool same_products() { return ranks() == 1 || ranks() == 2 || ranks() == 4; }

// A small number of layers that fills the two stages of the replicas' sums.
constexpr int kLayers = 3;

// Values of all parameters one after the other, of every row; on rank 0, as its replica has them.
template <typename Get>
std::vector<float> whole(Engine& engine, Get get) {
  std::vector<float> values;
  for (int u = 0; u < engine.model().num_units(); ++u)
    for (int i = 0; i < engine.model().unit(u).size(); ++i) {
      const Tensor t = get(engine.model().unit(u), i);
      const auto all = gather_to_rank0(engine.mesh().shards(), t.as<float>(), t.numel());
      if (test_world().rank() == 0) values.insert(values.end(), all.begin(), all.end());
    }
  return values;
}
std::vector<float> whole_weights(Engine& engine) {
  return whole(engine, [](Unit& unit, int i) { return unit.master(i); });
}
std::vector<float> whole_gradients(Engine& engine) {
  return whole(engine, [](Unit& unit, int i) { return unit.grad_shard(i); });
}

void expect_equal_replicas(Engine& engine, const std::vector<float>& own) {
  if (engine.mesh().shape().replicas == 1) return;
  const std::string bytes(reinterpret_cast<const char*>(own.data()), own.size() * sizeof(float));
  EXPECT_TRUE(engine.mesh().replicas().broadcast(bytes, 0) == bytes) << "replicas differ";
}

struct WholeRun {
  std::vector<double> losses, norms;
  std::vector<float> gradients, weights;  // the last step's; on rank 0
};

WholeRun run_steps(Engine& engine, const TinyRun& run, const std::vector<GlobalBatch>& batches) {
  WholeRun outcome;
  for (const GlobalBatch& batch : batches) {
    const StepResult r = engine.compute_gradients(deal(batch, run.B, Deal::split));
    expect_equal_replicas(engine, gradients_of(engine));
    outcome.gradients = whole_gradients(engine);
    engine.update(r, run.lr);
    outcome.losses.push_back(r.loss);
    outcome.norms.push_back(r.grad_norm);
  }
  expect_equal_replicas(engine, weights_of(engine));
  outcome.weights = whole_weights(engine);
  return outcome;
}

WholeRun run_steps(const TinyRun& run, const std::vector<GlobalBatch>& batches) {
  return run_steps(*run.engine(), run, batches);
}

void expect_close_runs(const WholeRun& a, const WholeRun& b, double tolerance) {
  for (size_t s = 0; s < b.losses.size(); ++s) {
    EXPECT_NEAR(a.losses[s], b.losses[s], tolerance * b.losses[s]) << "step " << s + 1;
    EXPECT_NEAR(a.norms[s], b.norms[s], tolerance * b.norms[s]) << "step " << s + 1;
  }
  EXPECT_LT(relative_difference(a.weights, b.weights), tolerance);
  EXPECT_LT(relative_difference(a.gradients, b.gradients), tolerance);
}

void expect_same_runs(const WholeRun& a, const WholeRun& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(a.gradients, b.gradients);
  EXPECT_EQ(a.weights, b.weights);
}

class MeshOn : public TinyRunOn<kLayers> {};
INSTANTIATE_TEST_SUITE_P(Transports, MeshOn, testing::Values("shm", "mpi"));

// --- replicas

TEST_P(MeshOn, TrainsAsOneReplica) {
  TinyRun run = tiny();
  const auto batches = some_batches(run, 3, 2 * run.B * ranks());
  for (bool every : {true, false}) {
    run.fsdp.mesh = "full";
    run.fsdp.reduce_every_microbatch = every;
    const WholeRun plain = run_steps(run, batches);
    for (const MeshShape& shape : shapes()) {
      SCOPED_TRACE(fmt::format("{} every {}", shape.str(), every));
      run.fsdp.mesh = shape.str();
      const WholeRun found = run_steps(run, batches);
      if (shape.replicas == 1)
        expect_same_runs(found, plain);
      else
        expect_close_runs(found, plain, 1e-5);
      expect_same_runs(run_steps(run, batches), found);  // repeatable
    }
  }
}

// With one rank a replica, the replicas are summed in the order in which the ranks would be.
TEST_P(MeshOn, OneRankAReplicaHasTheBitsOfOneReplica) {
  if (!same_products()) return;
  TinyRun run = tiny();
  const auto batches = some_batches(run, 1, run.B * ranks());
  const WholeRun plain = run_steps(run, batches);
  run.fsdp.mesh = fmt::format("{}x1", ranks());
  const WholeRun found = run_steps(run, batches);
  EXPECT_EQ(found.losses, plain.losses);
  EXPECT_EQ(found.gradients, plain.gradients);
}

TEST_P(MeshOn, ReducesInBf16) {
  TinyRun run = tiny();
  run.fsdp.param_dtype = DType::bf16;
  const auto batches = some_batches(run, 1, 2 * run.B * ranks());
  for (DType reduce : {DType::f32, DType::bf16}) {
    run.fsdp.reduce_dtype = reduce;
    run.fsdp.mesh = "full";
    const WholeRun plain = run_steps(run, batches);
    for (const MeshShape& shape : shapes()) {
      SCOPED_TRACE(fmt::format("{} reduce {}", shape.str(), dtype_name(reduce)));
      run.fsdp.mesh = shape.str();
      const WholeRun found = run_steps(run, batches);
      EXPECT_NEAR(found.losses[0], plain.losses[0], same_products() ? 0 : 1e-3);
      const double difference = relative_difference(found.gradients, plain.gradients);
      EXPECT_LT(difference, !same_products() ? 2e-2 : reduce == DType::f32 ? 1e-6 : 5e-3);
    }
  }
}

float rough(int rank, int param, int64_t i) {
  return static_cast<float>(std::sin(1.0 + rank * 13.7 + param * 3.1 + static_cast<double>(i)) *
                            std::pow(10.0, rank % 3));
}

// Own rows of the sum of all ranks' rough() gradients, by the units' way.
std::vector<float> reduced(const std::string& transport, const FsdpOptions& fsdp,
                           const std::vector<ParamSpec>& params, RowRange* rows) {
  Sharding sharding = make_sharding(transport, fsdp, test_world(), test_backend());
  Unit unit("unit", params, true, true, fsdp, sharding, test_backend());
  sharding.finish_setup();
  unit.attach();
  unit.init_parameters(1, 1);
  unit.begin_grad();
  for (int i = 0; i < unit.size(); ++i)
    for (int64_t j = 0; j < unit.grad(i).numel(); ++j)
      unit.grad(i).as<float>()[j] = rough(test_world().rank(), i, j);
  unit.reduce();
  while (!unit.advance_reduction(false, true)) continue;
  std::vector<float> values;
  for (int i = 0; i < unit.size(); ++i) {
    rows[i] = unit.rows(i);
    const float* own = unit.grad_shard(i).as<float>();
    values.insert(values.end(), own, own + unit.grad_shard(i).numel());
  }
  return values;
}

// Over the ranks of a replica in their order, then over replicas in theirs: on any number of ranks,
// with uneven and empty shards.
TEST_P(MeshOn, SumsInTheOrderOfRanksThenReplicas) {
  const std::vector<ParamSpec> params = {{"a", {11, 3}}, {"b", {4}}, {"c", {1, 33}}};
  for (const MeshShape& shape : shapes()) {
    FsdpOptions fsdp;
    fsdp.mesh = shape.str();
    RowRange rows[3];
    const std::vector<float> found = reduced(GetParam(), fsdp, params, rows);
    std::vector<float> expected;
    for (int p = 0; p < 3; ++p) {
      const int64_t row = params[p].shape.row_numel();
      for (int64_t i = rows[p].begin * row; i < rows[p].end * row; ++i) {
        float sum = 0;
        for (int r = 0; r < shape.replicas; ++r) {
          float part = 0;
          for (int s = 0; s < shape.shards; ++s) part += rough(r * shape.shards + s, p, i);
          sum += part;
        }
        expected.push_back(sum * (1.0f / static_cast<float>(ranks())));
      }
    }
    EXPECT_EQ(found, expected) << shape.str();
  }
}

TEST_P(MeshOn, ClipsByTheNormOfOneReplica) {
  TinyRun run = tiny();
  run.adamw.clip = 0.1;
  const auto batches = some_batches(run, 3, run.B * ranks());
  const WholeRun plain = run_steps(run, batches);
  for (const MeshShape& shape : shapes()) {
    run.fsdp.mesh = shape.str();
    expect_close_runs(run_steps(run, batches), plain, 1e-5);
  }
}

// Few rows: with 8 ranks a replica's last ranks hold padding alone.
TEST_P(MeshOn, EmptyShards) {
  TinyRun run = tiny();
  run.config.vocab_size = 5;
  run.config.num_hidden_layers = 1;
  run.config.num_attention_heads = run.config.num_key_value_heads = 1;
  run.config.head_dim = 2;
  run.config.hidden_size = 3;
  run.config.intermediate_size = 3;
  const auto batches = some_batches(run, 3, run.B * ranks());
  const WholeRun plain = run_steps(run, batches);
  for (const MeshShape& shape : shapes()) {
    SCOPED_TRACE(shape.str());
    run.fsdp.mesh = shape.str();
    expect_close_runs(run_steps(run, batches), plain, 1e-4);
  }
}

TEST_P(MeshOn, EvaluatesAsOneReplica) {
  TinyRun run = tiny();
  const GlobalBatch batch(0, 2 * run.B * ranks(), run.T, run.config.vocab_size);
  const double expected = run.engine()->evaluate(deal(batch, run.B, Deal::split));
  for (const MeshShape& shape : shapes()) {
    run.fsdp.mesh = shape.str();
    EXPECT_NEAR(run.engine()->evaluate(deal(batch, run.B, Deal::split)), expected, 1e-6 * expected);
  }
}

// --- bytes

int64_t shard_elements(Engine& engine, int u) {
  int64_t n = 0;
  for (const Piece& piece : engine.model().unit(u).layout().pieces()) n += piece.count;
  return n;
}

struct Gathers {  // of a step of A micro-batches: of the root and of a layer, by which transport
  int64_t root, layer, in_group;
};

// What a step of A micro-batches sends in f32, by formula.
void expect_traffic(Engine& engine, const Gathers& gathers, int64_t reduces) {
  const MeshShape& mesh = engine.mesh().shape();
  const int64_t R = mesh.replicas, S = mesh.shards, k = mesh.group;
  int64_t gathered = 0, reduced = 0, summed = 0, in_group = 0;
  for (int u = 0; u < engine.model().num_units(); ++u) {
    const int64_t n = shard_elements(engine, u);
    gathered += (u == 0 ? gathers.root : gathers.layer) * (S - 1) * n * 4;
    reduced += reduces * (S - 1) * n * 4;
    summed += (R - 1) * ((n + R - 1) / R) * 4;
    if (u > 0 && k > 0) in_group += gathers.in_group * (k - 1) * (S / k) * n * 4;
  }
  const Traffic& t = engine.collectives().traffic();
  EXPECT_EQ(t.gather_logical_bytes, gathered);
  EXPECT_EQ(t.reduce_logical_bytes, reduced);
  if (R > 1) {
    const Traffic& sums = engine.sharding().replica_sums->traffic();
    EXPECT_EQ(sums.reduce_logical_bytes, summed);  // once a step, whatever the micro-batches
    EXPECT_EQ(sums.gather_logical_bytes, summed);
  }
  if (k > 0) {
    EXPECT_EQ(engine.sharding().group_gathers->traffic().gather_logical_bytes, in_group);
    EXPECT_EQ(engine.sharding().group_gathers->traffic().reduces, 0);
  }
  if (engine.collectives().name().starts_with("mpi")) {
    EXPECT_EQ(t.gather_copied_bytes, gathered);
    EXPECT_EQ(t.reduce_copied_bytes, reduced);
  } else {
    EXPECT_EQ(t.gather_copied_bytes, 0) << "gathers in a node copy nothing";
  }
}

TEST_P(MeshOn, BytesFollowTheFormula) {
  for (const MeshShape& shape : shapes())
    for (const auto& [A, every] : {std::pair(1, true), {3, true}, {3, false}}) {
      SCOPED_TRACE(fmt::format("{} micro-batches {} every {}", shape.str(), A, every));
      TinyRun run = tiny();
      run.fsdp.mesh = shape.str();
      run.fsdp.reduce_every_microbatch = every;
      auto engine = run.engine();
      const GlobalBatch batch(0, A * run.B * ranks(), run.T, run.config.vocab_size);
      engine->step(deal(batch, run.B, Deal::split), run.lr);
      expect_traffic(*engine, {A, 2 * A, 0}, every ? A : 1);
    }
}

TEST_P(MeshOn, BytesOfLayersThatStayGathered) {
  constexpr int64_t A = 3;
  for (bool forward : {true, false})
    for (bool backward : {true, false}) {
      SCOPED_TRACE(fmt::format("after forward {} after backward {}", forward, backward));
      TinyRun run = tiny();
      run.fsdp.reshard_after_forward = forward;
      run.fsdp.reshard_after_backward = backward;
      auto engine = run.engine();
      const GlobalBatch batch(0, A * run.B * ranks(), run.T, run.config.vocab_size);
      engine->step(deal(batch, run.B, Deal::split), run.lr);
      const int64_t in_backward = forward ? A : 0, in_forward = backward ? A : 1;
      expect_traffic(*engine, {in_forward, in_forward + in_backward, 0}, A);
    }
}

// --- ways to do the same

TEST_P(MeshOn, WhatStaysGatheredAndDepthsDoNotChangeABit) {
  TinyRun run = tiny();
  const auto batches = some_batches(run, 2, 2 * run.B * ranks());
  struct Way {
    bool after_forward, after_backward;
    int forward_prefetch, backward_prefetch;
  };
  for (const MeshShape& shape : shapes()) {
    run.fsdp = {};
    run.fsdp.mesh = shape.str();
    const WholeRun expected = run_steps(run, batches);
    for (const Way& way : {Way{true, true, 0, 2}, Way{true, true, 3, 0}, Way{true, false, 2, 1},
                           Way{false, true, 1, 0}, Way{false, false, 0, 3}}) {
      SCOPED_TRACE(fmt::format("{} reshard {} {} prefetch {} {}", shape.str(), way.after_forward,
                               way.after_backward, way.forward_prefetch, way.backward_prefetch));
      run.fsdp.reshard_after_forward = way.after_forward;
      run.fsdp.reshard_after_backward = way.after_backward;
      run.fsdp.forward_prefetch = way.forward_prefetch;
      run.fsdp.backward_prefetch = way.backward_prefetch;
      expect_same_runs(run_steps(run, batches), expected);
    }
  }
}

TEST_P(MeshOn, MemoryOfGatheredLayersFollowsTheDepth) {
  if (GetParam() == std::string("shm")) return;  // holds all layers once in a window
  TinyRun run = tiny();
  run.config.num_hidden_layers = 6;
  const auto params = [&](int forward, int backward) {
    run.fsdp.forward_prefetch = forward;
    run.fsdp.backward_prefetch = backward;
    const int64_t before = test_backend().device->bytes_held(Segment::params);
    auto engine = run.engine();
    return test_backend().device->bytes_held(Segment::params) - before;
  };
  auto engine = run.engine();
  const int64_t layer = 4 * engine->model().unit(1).layout().elements();
  const int64_t none = params(0, 0);
  EXPECT_EQ(params(1, 1), none + layer);
  EXPECT_EQ(params(0, 3), none + 3 * layer);
  EXPECT_EQ(params(4, 1), none + 4 * layer);
}

// --- groups

TEST(Groups, GatherInBackwardWithTheSameBits) {
  TinyRun run;
  run.config.num_hidden_layers = kLayers;
  run.transport = "mpi";
  const auto batches = some_batches(run, 2, 2 * run.B * ranks());
  for (const MeshShape& shape : shapes()) {
    run.fsdp = {};
    run.fsdp.mesh = shape.str();
    const WholeRun expected = run_steps(run, batches);
    for (int k = 2; k <= shape.shards; ++k) {
      if (shape.shards % k) continue;
      for (const auto& [backward, depth] : {std::pair(true, 0), {true, 2}, {false, 1}}) {
        SCOPED_TRACE(fmt::format("{} groups of {} after backward {} prefetch {}", shape.str(), k,
                                 backward, depth));
        run.fsdp.reshard_ranks = k;
        run.fsdp.reshard_after_backward = backward;
        run.fsdp.prefetch = depth;
        expect_same_runs(run_steps(run, batches), expected);
      }
    }
  }
}

TEST(Groups, BytesFollowTheFormula) {
  constexpr int64_t A = 3;
  for (const MeshShape& shape : shapes())
    for (int k = 2; k < shape.shards; ++k)
      for (bool backward : {true, false}) {
        if (shape.shards % k) continue;
        SCOPED_TRACE(fmt::format("{} groups of {} after backward {}", shape.str(), k, backward));
        TinyRun run;
        run.transport = "mpi";
        run.fsdp.mesh = shape.str();
        run.fsdp.reshard_ranks = k;
        run.fsdp.reshard_after_backward = backward;
        auto engine = run.engine();
        const GlobalBatch batch(0, A * run.B * ranks(), run.T, run.config.vocab_size);
        engine->step(deal(batch, run.B, Deal::split), run.lr);
        expect_traffic(*engine, {backward ? A : 1, backward ? A : 1, A}, A);
      }
}

TEST(Groups, EvaluationsBetweenStepsDoNotChangeTheRun) {
  if (ranks() != 4 && ranks() != 8) return;
  TinyRun run;
  run.transport = "mpi";
  run.fsdp.reshard_ranks = 2;
  const auto batches = some_batches(run, 3, 2 * run.B * ranks());
  const WholeRun expected = run_steps(run, batches);
  auto engine = run.engine();
  for (const GlobalBatch& batch : batches) {
    engine->evaluate(deal(batch, run.B, Deal::split));
    engine->step(deal(batch, run.B, Deal::split), run.lr);
  }
  EXPECT_EQ(whole_weights(*engine), expected.weights);
}

std::string refused(const TinyRun& run) {
  try {
    run.engine();
  } catch (const AgreedError& error) {
    EXPECT_EQ(error.code, kExitUsage);
    EXPECT_EQ(test_world().broadcast(error.what(), 0), error.what());
    return error.what();
  }
  return "";
}

TEST(Groups, RefusesWhatDoesNotDivideOrMakesNoSense) {
  TinyRun run;
  run.transport = "mpi";
  run.fsdp.reshard_ranks = ranks() + 1;
  EXPECT_TRUE(has(refused(run), {"fsdp.reshard_ranks", fmt::format("{} ranks", ranks())}));
  if (ranks() > 1) {
    run.fsdp.reshard_ranks = 1;
    EXPECT_TRUE(has(refused(run), {"at least 2", "fsdp.reshard_after_forward false"}));
  }
  if (ranks() != 4 && ranks() != 8) return;
  run.fsdp.reshard_ranks = 3;
  EXPECT_TRUE(has(refused(run), {"fsdp.reshard_ranks 3", "divisor"}));
  run.fsdp.reshard_ranks = 2;
  run.transport = "shm";
  EXPECT_TRUE(has(refused(run), {"shm", "a node holds each layer once", "mpi"}));
}

TEST(Mesh, ABadOneIsOneUsageError) {
  TinyRun run;
  run.fsdp.mesh = fmt::format("{}x2", ranks());
  EXPECT_TRUE(has(refused(run), {"fsdp.mesh", fmt::format("{} ranks", ranks())}));
}

// --- gradient divide factor

TEST(DivideFactor, DividesTheSumOverAllLabels) {
  TinyRun run;
  const GlobalBatch batch(0, 2 * run.B * ranks(), run.T, run.config.vocab_size);
  for (const MeshShape& shape : shapes()) {
    run.fsdp.mesh = shape.str();
    run.fsdp.gradient_divide_factor = 0;
    auto plain = run.engine();
    const StepResult expected = plain->compute_gradients(deal(batch, run.B, Deal::split));
    std::vector<float> gradients = gradients_of(*plain);
    for (double times : {1.0, 2.0, 0.25}) {
      run.fsdp.gradient_divide_factor = times * static_cast<double>(expected.kept);
      auto engine = run.engine();
      const StepResult found = engine->compute_gradients(deal(batch, run.B, Deal::split));
      EXPECT_EQ(found.loss, expected.loss);  // stays the mean
      EXPECT_NEAR(found.grad_norm * times, expected.grad_norm, 1e-6 * expected.grad_norm);
      std::vector<float> scaled = gradients_of(*engine);
      for (float& g : scaled) g *= static_cast<float>(times);
      if (ranks() == 1 || ranks() == 2 || ranks() == 4 || ranks() == 8) {
        EXPECT_EQ(scaled, gradients);  // a power of two changes no digit
      } else {
        EXPECT_LT(relative_difference(scaled, gradients), 1e-6);
      }
    }
  }
}

// --- checkpoints and exports

// A folder of this test, the same on all ranks.
struct SharedFolder {
  SharedFolder() {
    if (test_world().rank() == 0) own.emplace();
    path = test_world().broadcast(own ? *own / "" : "", 0);
  }
  ~SharedFolder() { test_world().barrier(); }
  std::string checkpoint(int step) const { return fmt::format("{}step-{:08}.h5", path, step); }
  std::optional<TempDir> own;
  std::string path;
};

CheckpointState state_of(const Engine& engine, int64_t step) {
  CheckpointState state;
  state.step = step;
  state.updates = engine.updates();
  state.model = nlohmann::json::object();
  state.run = nlohmann::json::object();
  return state;
}

void save(Engine& engine, const std::string& folder, int64_t step, bool async) {
  CheckpointOptions options;
  options.async = async;
  options.save.keep_last = 0;
  Checkpointer checkpointer(options, folder, engine.mesh(), test_backend(), engine.model());
  checkpointer.save(state_of(engine, step));
  checkpointer.finish();
  EXPECT_FALSE(checkpointer.failed());
}

void load(Engine& engine, const std::string& path) {
  engine.mesh().in_parts([&] {
    load_checkpoint(engine.mesh().shards(), path, checkpoint_tensors(engine.model(), false), false);
  });
  engine.model().masters_written();
  const CheckpointState state = read_checkpoint_state(path);
  engine.restore(state.step, state.updates);
}

TEST_P(MeshOn, CheckpointsPassBetweenAllMeshes) {
  TinyRun run = tiny();
  const auto batches = some_batches(run, 2, run.B * ranks()),
             later = some_batches(run, 4, run.B * ranks());
  std::vector<int64_t> sums;
  for (const MeshShape& from : shapes()) {
    SharedFolder folder;
    run.fsdp.mesh = from.str();
    run.seed = 5;
    auto engine = run.engine();
    run_steps(*engine, run, batches);
    save(*engine, folder.path, 2, false);
    save(*engine, folder.path, 3, true);
    const std::vector<float> saved = whole_weights(*engine);
    const Hdf5File now = Hdf5File::open(folder.checkpoint(2));
    const Hdf5File behind = Hdf5File::open(folder.checkpoint(3));
    for (const std::string& name : now.datasets())
      EXPECT_EQ(now.int_attribute("xxh3_rows", name), behind.int_attribute("xxh3_rows", name));
    EXPECT_TRUE(verify_checkpoint(test_world(), folder.checkpoint(2)).empty());
    const WholeRun straight = run_steps(*engine, run, later);
    for (const MeshShape& to : shapes()) {
      SCOPED_TRACE(from.str() + " to " + to.str());
      run.fsdp.mesh = to.str();
      run.seed = 6;
      auto resumed = run.engine();
      load(*resumed, folder.checkpoint(2));
      EXPECT_EQ(whole_weights(*resumed), saved);
      const WholeRun found = run_steps(*resumed, run, later);
      if (to.replicas == from.replicas)
        expect_same_runs(found, straight);
      else
        expect_close_runs(found, straight, 1e-5);
    }
  }
}

TEST(Checkpoints, ADamagedOneIsRefusedByAllReplicas) {
  TinyRun run;
  run.fsdp.mesh = fmt::format("{}x1", ranks());
  SharedFolder folder;
  auto engine = run.engine();
  save(*engine, folder.path, 1, false);
  if (test_world().rank() == 0) {
    // The last byte of the file is the last dataset's.
    std::fstream file(folder.checkpoint(1), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\x7f');
  }
  test_world().barrier();
  std::string message;
  try {
    load(*engine, folder.checkpoint(1));
  } catch (const AgreedError& error) {
    message = error.what();
  }
  EXPECT_TRUE(has(message, {"step-00000001.h5"})) << message;
}

TEST(Checkpoints, AFailedSaveIsAnErrorOfAllReplicas) {
  for (bool async : {false, true})
    for (const MeshShape& shape : shapes()) {
      TinyRun run;
      run.fsdp.mesh = shape.str();
      SharedFolder folder;
      auto engine = run.engine();
      const std::string nowhere = folder.path + "file";
      if (test_world().rank() == 0) std::ofstream(nowhere) << "not a folder";
      test_world().barrier();
      std::string message;
      try {
        save(*engine, nowhere, 1, async);
      } catch (const AgreedError& error) {
        message = error.what();
      }
      EXPECT_TRUE(has(message, {"step 1", "not saved"})) << message;
    }
}

TEST_P(MeshOn, ExportsAreThoseOfOneReplica) {
  TinyRun run = tiny();
  SharedFolder folder;
  std::string expected;
  for (const MeshShape& shape : shapes()) {
    run.fsdp.mesh = shape.str();
    auto engine = run.engine();
    const std::string path = folder.path + shape.str();
    export_model(engine->mesh(), engine->model(), ExportWhat::weights, path);
    if (test_world().rank() != 0) continue;
    const std::string bytes = read_file(path);
    if (expected.empty()) expected = bytes;
    EXPECT_TRUE(bytes == expected) << shape.str();
  }
}

// --- what a wrong sum of replicas would look like

// Forgets the last replica's gradients, as a transport with an error would.
class LosesAReplica final : public Forwarding {
 public:
  LosesAReplica(std::unique_ptr<Collectives> inner, const World& replicas)
      : Forwarding(std::move(inner)), last_(replicas.rank() == replicas.size() - 1) {}
  int add_unit(const UnitSpec& spec) override {
    elements_.push_back(spec.elements);
    return Forwarding::add_unit(spec);
  }
  void reduce_start(int unit) override {
    if (last_) std::fill_n(inner_->grad_buffer(unit), elements_[unit], 0.0f);
    Forwarding::reduce_start(unit);
  }

 private:
  bool last_;
  std::vector<int64_t> elements_;
};

TEST(Mesh, ComparisonsFindALostReplica) {
  if (ranks() == 1) return;
  TinyRun run;
  const auto batches = some_batches(run, 1, run.B * ranks());
  const WholeRun plain = run_steps(run, batches);
  run.fsdp.mesh = fmt::format("{}x1", ranks());
  Sharding sharding = make_sharding(run.transport, run.fsdp, test_world(), test_backend());
  sharding.replica_sums =
      std::make_unique<LosesAReplica>(std::move(sharding.replica_sums), sharding.mesh->replicas());
  Engine engine(run.config, run.fsdp, run.adamw, std::move(sharding), run.B, run.T, test_backend());
  engine.model().init_parameters(run.seed);
  const WholeRun found = run_steps(engine, run, batches);
  EXPECT_GT(relative_difference(found.gradients, plain.gradients), 1e-2);
  EXPECT_GT(std::abs(found.norms[0] - plain.norms[0]), 1e-3 * plain.norms[0]);
}

}  // namespace
}  // namespace qshard
