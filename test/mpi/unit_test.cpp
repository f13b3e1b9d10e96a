#include "fsdp/unit.h"

#include <xxhash.h>

#include <cmath>
#include <cstring>

#include "../test_main.h"
#include "fsdp/prefetch.h"
#include "train/engine.h"

namespace qshard {
namespace {

std::vector<ParamSpec> small_params() {
  return {{"embed", {11, 3}}, {"norm", {4}, Init::ones}, {"proj", {6, 5}}, {"last", {1, 33}}};
}

Sharding all_ranks(std::unique_ptr<Collectives> transport) {
  Sharding sharding;
  sharding.mesh = std::make_unique<Mesh>(test_world(), MeshShape{1, test_world().size(), "", 0});
  sharding.collectives = std::move(transport);
  return sharding;
}

// One or more units of a transport, ready for use. Destroyed units before transport.
struct Fixture {
  Sharding sharding;
  std::vector<std::unique_ptr<Unit>> units;

  explicit Fixture(const std::string& transport, FsdpOptions options = {}, int count = 1,
                   const std::vector<ParamSpec>& params = small_params())
      : sharding(all_ranks(make_collectives(transport, test_world(), test_backend(), 2))) {
    for (int u = 0; u < count; ++u)
      units.push_back(std::make_unique<Unit>(fmt::format("unit{}", u), params, true, true, options,
                                             sharding, test_backend()));
    sharding.finish_setup();
    for (auto& unit : units) unit->attach();
  }
  Unit& operator*() { return *units[0]; }
  Unit* operator->() { return units[0].get(); }
};

// Calls fn on every rank and returns what it threw; "" if nothing.
template <typename Fn>
std::string thrown(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

class UnitTest : public testing::TestWithParam<const char*> {
 protected:
  std::string transport() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Transports, UnitTest, testing::Values("shm", "mpi"));

TEST_P(UnitTest, ForwardOnlyHoldsNoMomentsAndRefusesBackward) {
  FsdpOptions options;
  options.forward_only = true;
  const Device& device = *test_backend().device;
  const int64_t moments = device.bytes_held(Segment::moments);
  Fixture unit(transport(), options);
  EXPECT_EQ(device.bytes_held(Segment::moments), moments);
  unit->init_parameters(1, 0.5f);
  unit->wait();
  EXPECT_NE(unit->param(0).as<float>()[0], 0);
  EXPECT_NE(thrown([&] { unit->begin_grad(); }).find("forward only"), std::string::npos);
  unit->reshard();
  Fixture trains(transport());
  EXPECT_GT(device.bytes_held(Segment::moments), moments);
}

TEST_P(UnitTest, StatesFollowTheLifeCycle) {
  Fixture unit(transport());
  unit->init_parameters(1, 0.5f);
  EXPECT_EQ(unit->state(), Unit::State::sharded);
  unit->gather();
  EXPECT_EQ(unit->state(), Unit::State::gathering);
  unit->gather();  // no-op
  EXPECT_EQ(unit->state(), Unit::State::gathering);
  unit->wait();
  unit->wait();
  unit->gather();
  EXPECT_EQ(unit->state(), Unit::State::unsharded);
  unit->reshard();
  EXPECT_EQ(unit->state(), Unit::State::sharded);
  unit->wait();  // gathers by itself
  EXPECT_EQ(unit->state(), Unit::State::unsharded);
  unit->reshard();
}

TEST_P(UnitTest, MisuseThrowsAndNamesUnitAndParameter) {
  Fixture unit(transport());
  unit->init_parameters(1, 0.5f);
  EXPECT_NE(thrown([&] { unit->param(2); }).find("proj"), std::string::npos);
  EXPECT_NE(thrown([&] { unit->reshard(); }).find("unit0"), std::string::npos);
  unit->gather();
  EXPECT_NE(thrown([&] { unit->param(0); }), "");  // not before wait
  EXPECT_NE(thrown([&] { unit->reshard(); }), "");
  unit->wait();
  EXPECT_EQ(thrown([&] { unit->param(0); }), "");
  EXPECT_NE(thrown([&] { unit->grad(0); }), "");
  EXPECT_NE(thrown([&] { unit->keep_grad(); }), "");
  EXPECT_NE(thrown([&] { unit->reduce(); }), "");
  EXPECT_NE(thrown([&] { unit->advance_reduction(false, true); }), "");
  unit->reshard();
  EXPECT_NE(thrown([&] { unit->param(0); }), "");
}

// Each rank's rows, and the gathered whole, are what one rank alone draws for the whole tensor.
TEST_P(UnitTest, InitialWeightsDoNotDependOnRanks) {
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    FsdpOptions options;
    options.param_dtype = dtype;
    Fixture unit(transport(), options);
    unit->init_parameters(7, 0.5f);
    unit->wait();
    for (int i = 0; i < unit->size(); ++i) {
      const ParamSpec& spec = unit->layout().params()[i];
      std::vector<float> whole(spec.shape.numel(), 1.0f);
      const Tensor all = Tensor::of(whole.data(), spec.shape);
      const uint64_t stream = XXH3_64bits(spec.name.data(), spec.name.size());
      if (spec.init == Init::normal) test_backend().ops->init_normal(all, 7, stream, 0, 0.5f);
      const RowRange rows = unit->layout()[i].rows_of(test_world().rank());
      const Tensor own = unit->master(i);
      ASSERT_EQ(own.numel(), rows.size() * spec.shape.row_numel());
      EXPECT_EQ(
          std::memcmp(own.data, whole.data() + rows.begin * spec.shape.row_numel(), own.bytes()), 0)
          << spec.name;
      std::vector<char> rounded(unit->param(i).bytes());
      test_backend().ops->cast(all, Tensor(rounded.data(), dtype, spec.shape));
      EXPECT_EQ(std::memcmp(unit->param(i).data, rounded.data(), rounded.size()), 0) << spec.name;
    }
    unit->reshard();
  }
}

uint64_t gathered_hash(Unit& unit) {
  unit.wait();
  uint64_t hash = 0;
  for (int i = 0; i < unit.size(); ++i)
    hash = XXH3_64bits_withSeed(unit.param(i).data, unit.param(i).bytes(), hash);
  unit.reshard();
  test_world().barrier();  // before the next write of a shard
  return hash;
}

TEST_P(UnitTest, AnotherSeedAndAnotherNameGiveOtherWeights) {
  Fixture unit(transport(), {}, 2);
  unit->init_parameters(7, 0.5f);
  const uint64_t first = gathered_hash(*unit);
  unit->init_parameters(8, 0.5f);
  EXPECT_NE(gathered_hash(*unit), first);
  unit->init_parameters(7, 0.5f);
  EXPECT_EQ(gathered_hash(*unit), first);
  // Two parameters of one shape in one unit differ.
  const std::string own = std::to_string(first);
  EXPECT_EQ(test_world().broadcast(own, 0), own);
}

float gradient_value(int rank, int param, int64_t j) {
  return static_cast<float>(std::sin(1.0 + rank * 13.7 + param * 3.1 + j * 0.37));
}

// Writes this rank's full gradient, reduces, and returns the relative error of the mean of the own
// rows against a sum in double.
// cancellation: ‖mean of the ranks' magnitudes‖ / ‖mean‖, by which errors of the values grow.
double reduce_error(Unit& unit, bool accumulate, double* cancellation = nullptr) {
  unit.wait();
  unit.begin_grad();
  for (int i = 0; i < unit.size(); ++i)
    for (int64_t j = 0; j < unit.grad(i).numel(); ++j)
      unit.grad(i).as<float>()[j] = gradient_value(test_world().rank(), i, j);
  unit.reshard();
  unit.reduce();
  unit.advance_reduction(accumulate, true);
  const int ranks = test_world().size();
  double sums[3] = {0, 0, 0};
  for (int i = 0; i < unit.size(); ++i) {
    const ParamLayout& layout = unit.layout()[i];
    const int64_t first = layout.rows_of(test_world().rank()).begin * layout.row_numel;
    for (int64_t j = 0; j < unit.grad_shard(i).numel(); ++j) {
      double mean = 0, magnitude = 0;
      for (int r = 0; r < ranks; ++r) {
        const double value = gradient_value(r, i, first + j);
        mean += value / ranks;
        magnitude += std::abs(value) / ranks;
      }
      if (accumulate) mean *= 2;
      sums[0] += std::pow(unit.grad_shard(i).as<float>()[j] - mean, 2);
      sums[1] += mean * mean;
      sums[2] += magnitude * magnitude;
    }
  }
  test_world().all_reduce_sum(sums, 3);
  if (cancellation) *cancellation = std::sqrt(sums[2] / sums[1]);
  return std::sqrt(sums[0] / sums[1]);
}

TEST_P(UnitTest, ReducedGradientIsTheMeanOverRanks) {
  Fixture unit(transport());
  unit->init_parameters(1, 0.5f);
  EXPECT_LT(reduce_error(*unit, false), 3e-7);
  EXPECT_LT(reduce_error(*unit, true), 3e-7);  // the same once more on top
  EXPECT_LT(reduce_error(*unit, false), 3e-7);
}

TEST_P(UnitTest, ReductionIn16BitsIsOnlyByOption) {
  for (DType dtype : {DType::bf16, DType::fp16}) {
    FsdpOptions options;
    options.param_dtype = dtype;
    Fixture exact(transport(), options);
    exact->init_parameters(1, 0.5f);
    EXPECT_LT(reduce_error(*exact, false), 3e-7);
    options.reduce_dtype = dtype;
    Fixture rounded(transport(), options);
    rounded->init_parameters(1, 0.5f);
    double cancellation = 0;
    const double error = reduce_error(*rounded, false, &cancellation);
    EXPECT_LT(error, (dtype == DType::bf16 ? 0x1p-9 : 0x1p-12) * cancellation);  // half a unit each
    EXPECT_GT(error, 1e-5);  // it really travels in 16 bits
  }
}

// The scale of the loss is in the full gradient and not in the reduced one.
TEST_P(UnitTest, ReductionDividesByTheLossScale) {
  Fixture unit(transport());
  unit->init_parameters(1, 0.5f);
  for (float scale : {1.0f, 1024.0f}) {
    unit->wait();
    unit->begin_grad();
    for (int i = 0; i < unit->size(); ++i) test_backend().ops->fill(unit->grad(i), 3 * scale);
    unit->reshard();
    unit->reduce();
    while (!unit->advance_reduction(false, true, scale)) continue;
    for (int i = 0; i < unit->size(); ++i)
      for (int64_t j = 0; j < unit->grad_shard(i).numel(); ++j)
        EXPECT_FLOAT_EQ(unit->grad_shard(i).as<float>()[j], 3.0f);
  }
}

// Sums over replicas that travel in fp16 do so times the loss scale, all the way.
TEST_P(UnitTest, ReplicaSumsKeepWhatFp16WouldFlushToZero) {
  constexpr float kScale = 65536, kGradient = 3 * 0x1p-27f;
  FsdpOptions options;
  options.param_dtype = options.reduce_dtype = DType::fp16;
  Sharding sharding = make_sharding(
      {test_world().size(), 1, "", 0}, options, test_world(), [&](World& ranks, int full_buffers) {
        return make_collectives(transport(), ranks, test_backend(), full_buffers);
      });
  Unit unit("unit", small_params(), true, true, options, sharding, test_backend());
  sharding.finish_setup();
  unit.attach();
  unit.init_parameters(1, 0.5f);
  unit.wait();
  unit.begin_grad();
  for (int i = 0; i < unit.size(); ++i) test_backend().ops->fill(unit.grad(i), kGradient * kScale);
  unit.reshard();
  unit.reduce();
  while (!unit.advance_reduction(false, true, kScale)) continue;
  for (int i = 0; i < unit.size(); ++i)
    for (int64_t j = 0; j < unit.grad_shard(i).numel(); ++j)
      EXPECT_NEAR(unit.grad_shard(i).as<float>()[j], kGradient, 0x1p-11f * kGradient);
}

TEST_P(UnitTest, KeptGradientsPileUpUntilTheReduction) {
  Fixture unit(transport());
  unit->init_parameters(1, 0.5f);
  for (int micro = 0; micro < 3; ++micro) {
    unit->wait();
    unit->begin_grad();
    EXPECT_EQ(unit->grad_accumulates(), micro > 0);
    for (int i = 0; i < unit->size(); ++i)
      for (int64_t j = 0; j < unit->grad(i).numel(); ++j) {
        float& g = unit->grad(i).as<float>()[j];
        const float value = static_cast<float>(micro + 1 + test_world().rank());
        g = unit->grad_accumulates() ? g + value : value;
      }
    unit->reshard();
    if (micro < 2) unit->keep_grad();
  }
  unit->reduce();
  unit->advance_reduction(false, true);
  const double mean = 1 + 2 + 3 + 3 * 0.5 * (test_world().size() - 1);
  for (int i = 0; i < unit->size(); ++i)
    for (int64_t j = 0; j < unit->grad_shard(i).numel(); ++j)
      EXPECT_FLOAT_EQ(unit->grad_shard(i).as<float>()[j], static_cast<float>(mean));
  unit->wait();
  unit->begin_grad();
  EXPECT_FALSE(unit->grad_accumulates());
  unit->reshard();
}

// What training exists for: an update on one rank's rows reaches the others with the next gather.
TEST_P(UnitTest, PublishedRowsReachTheOthers) {
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    FsdpOptions options;
    options.param_dtype = dtype;
    Fixture unit(transport(), options);
    unit->init_parameters(1, 0.5f);
    for (int round = 0; round < 3; ++round) {
      unit->wait();
      unit->reshard();
      test_world().barrier();  // [Note: Writing a shard]
      for (int i = 0; i < unit->size(); ++i) {
        const int64_t first = unit->layout()[i].rows_of(test_world().rank()).begin;
        const int64_t columns = unit->layout()[i].row_numel;
        for (int64_t j = 0; j < unit->master(i).numel(); ++j)
          unit->master(i).as<float>()[j] = static_cast<float>(first + j / columns + 16 * round);
      }
      unit->cast_to_compute();
      unit->publish();
      unit->wait();
      for (int i = 0; i < unit->size(); ++i) {
        const Shape& shape = unit->param(i).shape;
        std::vector<float> values(shape.numel());
        test_backend().ops->cast(unit->param(i), Tensor::of(values.data(), shape));
        for (int64_t j = 0; j < shape.numel(); ++j)
          ASSERT_EQ(values[j], static_cast<float>(j / shape.row_numel() + 16 * round))
              << unit->layout().params()[i].name << " element " << j << " round " << round;
      }
      unit->reshard();
      test_world().barrier();
    }
  }
}

// Master weights, moments and reduced gradients take a rank's share of the padded elements, and
// nothing of their size is held in full.
TEST_P(UnitTest, MemoryOfARankIsItsShare) {
  Device& device = *test_backend().device;
  for (DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    const int64_t shards = device.bytes_held(Segment::shards);
    const int64_t moments = device.bytes_held(Segment::moments);
    const int64_t gradients = device.bytes_held(Segment::gradients);
    FsdpOptions options;
    options.param_dtype = dtype;
    Fixture unit(transport(), options, 1, {{"matrix", {1001, 64}}, {"norm", {515}}});
    int64_t count = 0;
    for (const Piece& piece : unit->layout().pieces()) count += piece.count;
    const int64_t copies = dtype == DType::f32 ? 4 : 4 + 2;  // f32 master, and its 16-bit copy
    constexpr double kAlignment = 2 * 2 * 64;  // of two parameters in two buffers, bytes
    EXPECT_NEAR(device.bytes_held(Segment::shards) - shards, copies * count, kAlignment);
    EXPECT_NEAR(device.bytes_held(Segment::moments) - moments, 2 * 4 * count, kAlignment);
    // The shard, and the full gradient that backward writes.
    EXPECT_NEAR(device.bytes_held(Segment::gradients) - gradients,
                4 * count + 4 * unit->layout().elements(), kAlignment);
  }
}

TEST_P(UnitTest, MemoryIsReturned) {
  Device& device = *test_backend().device;
  const int64_t before = device.bytes_held();
  { Fixture unit(transport(), {}, 3); }
  EXPECT_EQ(device.bytes_held(), before);
}

// The order of gathers, reshards and reductions of a step for several depths.
TEST_P(UnitTest, PrefetchKeepsUnitsShardedOutsideTheirTime) {
  for (int depth : {0, 1}) {
    FsdpOptions options;
    options.prefetch = depth;
    Sharding sharding =
        all_ranks(make_collectives(transport(), test_world(), test_backend(), depth + 1));
    Unit root("root", small_params(), true, true, options, sharding, test_backend());
    std::vector<std::unique_ptr<Unit>> layers;
    std::vector<Unit*> order;
    for (int l = 0; l < 3; ++l) {
      layers.push_back(std::make_unique<Unit>(fmt::format("layers.{}", l), small_params(), false,
                                              false, options, sharding, test_backend()));
      order.push_back(layers.back().get());
    }
    sharding.finish_setup();
    root.attach();
    for (Unit* layer : order) layer->attach();
    root.init_parameters(1, 1);
    for (Unit* layer : order) layer->init_parameters(1, 1);
    auto in_flight = [&] {
      int n = 0;
      for (Unit* layer : order) n += layer->state() != Unit::State::sharded;
      return n;
    };
    Prefetch prefetch(root, order, options);
    prefetch.begin_forward();
    EXPECT_EQ(in_flight(), depth);
    for (int l = 0; l < 3; ++l) {
      prefetch.enter_forward(l);
      EXPECT_EQ(order[l]->state(), Unit::State::unsharded);
      EXPECT_EQ(in_flight(), std::min(1 + depth, 3 - l));
      prefetch.leave_forward(l, true);
    }
    EXPECT_EQ(in_flight(), 0);
    EXPECT_EQ(root.state(), Unit::State::unsharded);
    prefetch.begin_backward({});
    for (int l = 2; l >= 0; --l) {
      prefetch.enter_backward(l);
      EXPECT_EQ(order[l]->state(), Unit::State::unsharded);
      EXPECT_EQ(in_flight(), std::min(1 + depth, l + 1));
      for (int i = 0; i < order[l]->size(); ++i)
        test_backend().ops->fill(order[l]->grad(i), static_cast<float>(l + 1));
      prefetch.leave_backward(l);
    }
    for (int i = 0; i < root.size(); ++i) test_backend().ops->fill(root.grad(i), 9.0f);
    prefetch.end_backward();
    EXPECT_EQ(root.state(), Unit::State::sharded);
    EXPECT_EQ(in_flight(), 0);
    for (int l = 0; l < 3; ++l)
      for (int i = 0; i < order[l]->size(); ++i)
        for (int64_t j = 0; j < order[l]->grad_shard(i).numel(); ++j)
          // The mean over 3, 5, 6 or 7 ranks is a product with a rounded 1/ranks.
          EXPECT_FLOAT_EQ(order[l]->grad_shard(i).as<float>()[j], static_cast<float>(l + 1));
    const Tensor first = root.grad_shard(0);
    if (first.numel() > 0) {
      EXPECT_FLOAT_EQ(first.as<float>()[0], 9.0f);
    }
  }
}

}  // namespace
}  // namespace qshard
