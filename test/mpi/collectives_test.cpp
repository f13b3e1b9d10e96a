// The transports on any number of ranks. Data is chosen as small integers, so that every sum is
// exact in every dtype and results are compared for equality (the way of nccl-tests).
#include "comm/collectives.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <tuple>

#include "../unit/ops_reference.h"
#include "comm/transports.h"
#include "forwarding.h"
#include "fsdp/shard_layout.h"

namespace qshard {
namespace {

float value_of(const Tensor& t, int64_t i) {
  if (t.dtype == DType::f32) return t.as<float>()[i];
  if (t.dtype == DType::fp16) return static_cast<float>(fp16_value(t.as<fp16_t>()[i].bits));
  const uint32_t bits = uint32_t{t.as<bf16_t>()[i].bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void set_value(const Tensor& t, int64_t i,
               float value) {  // of a value that the dtype holds exactly
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (t.dtype == DType::f32)
    t.as<float>()[i] = value;
  else if (t.dtype == DType::fp16)
    t.as<fp16_t>()[i].bits = fp16_nearest(value);
  else
    t.as<bf16_t>()[i].bits = static_cast<uint16_t>(bits >> 16);
}

// What rank `rank` holds or contributes: integers that bf16 (8 bits) and sums over ranks keep
// exact.
float param_value(int unit, int piece, int rank, int64_t i, int step) {
  return static_cast<float>((unit * 7 + piece * 31 + rank * 3 + i * 5 + step * 11) % 251 - 125);
}
float grad_value(int unit, int piece, int rank, int64_t i, int step) {
  return static_cast<float>((unit * 5 + piece * 3 + rank * 7 + i + step) % 17 - 8);
}

UnitSpec make_spec(const std::string& name, const std::vector<Shape>& shapes, DType param_dtype,
                   DType reduce_dtype = DType::f32) {
  std::vector<ParamSpec> params;
  for (const Shape& shape : shapes) params.push_back({name, shape});
  const UnitLayout layout(params, test_world().size());
  return {name, layout.pieces(), layout.elements(), param_dtype, reduce_dtype, false, false};
}

// A root unit and three layers of different size. With up to 8 ranks [7, 5], [3] and [1] leave some
// ranks with padding alone, and the others' last rows are uneven.
std::vector<UnitSpec> model_units(DType param_dtype, DType reduce_dtype = DType::f32) {
  std::vector<UnitSpec> units = {
      make_spec("root", {{37, 24}, {64}}, param_dtype, reduce_dtype),
      make_spec("layers.0", {{7, 5}, {3}, {64, 96}}, param_dtype, reduce_dtype),
      make_spec("layers.1", {{1}, {129, 33}}, param_dtype, reduce_dtype),
      make_spec("layers.2", {{16, 16}}, param_dtype, reduce_dtype)};
  units[0].own_full_buffer = units[0].own_grad_buffer = true;
  return units;
}

// "shm", "mpi", or "shm_by_K": shm with this machine split into nodes of K ranks.
std::unique_ptr<Collectives> make_transport(const std::string& name) {
  if (name.starts_with("shm_by_"))
    return make_shm_collectives(test_world(), test_backend(), std::stoi(name.substr(7)));
  return make_collectives(name, test_world(), test_backend(), 2);
}

int nodes_of(const std::string& transport) {
  if (!transport.starts_with("shm_by_")) return 1;
  const int per_node = std::stoi(transport.substr(7));
  return (test_world().size() + per_node - 1) / per_node;
}

// A transport with its units and the destinations of their reductions.
struct Harness {
  std::unique_ptr<Collectives> comm;
  std::vector<UnitSpec> units;
  std::vector<std::vector<Buffer>> reduced;  // [unit][piece]

  Harness(std::unique_ptr<Collectives> transport, std::vector<UnitSpec> specs)
      : comm(std::move(transport)), units(std::move(specs)) {
    for (const UnitSpec& spec : units) {
      comm->add_unit(spec);
      auto& pieces = reduced.emplace_back();
      for (const Piece& piece : spec.pieces)
        pieces.emplace_back(*test_backend().device, DType::f32, Shape{piece.count},
                            Segment::gradients, "reduced");
    }
    comm->finish_setup();
  }

  Harness(const std::string& transport, const std::vector<UnitSpec>& specs)
      : Harness(make_transport(transport), specs) {}

  int size() const { return static_cast<int>(units.size()); }
  int pieces(int u) const { return static_cast<int>(units[u].pieces.size()); }

  void write_shards(int u, int step) {
    for (int p = 0; p < pieces(u); ++p) {
      const Tensor shard = comm->shard(u, p);
      for (int64_t i = 0; i < shard.numel(); ++i)
        set_value(shard, i, param_value(u, p, test_world().rank(), i, step));
    }
  }

  void write_grad(int u, int step) {
    float* grad = comm->grad_buffer(u);
    for (int p = 0; p < pieces(u); ++p) {
      const Piece& piece = units[u].pieces[p];
      for (int64_t i = 0; i < piece.count * test_world().size(); ++i)
        grad[piece.offset + i] = grad_value(u, p, test_world().rank(), i, step);
    }
  }

  void reduce_wait(int u, float scale = 1, bool accumulate = false) {
    const std::vector<Tensor> dst(reduced[u].begin(), reduced[u].end());
    comm->reduce_wait(u, dst, scale, accumulate);
  }

  // The first wrong element of the gathered unit, or an empty text.
  std::string wrong_gather(int u, void* full, int step) const {
    const UnitSpec& spec = units[u];
    const Tensor all(full, spec.param_dtype, {spec.elements});
    for (int p = 0; p < pieces(u); ++p)
      for (int r = 0; r < test_world().size(); ++r)
        for (int64_t i = 0; i < spec.pieces[p].count; ++i) {
          const int64_t at = spec.pieces[p].offset + r * spec.pieces[p].count + i;
          const float expected = param_value(u, p, r, i, step);
          if (value_of(all, at) != expected)
            return fmt::format("{} piece {}, row element {} of rank {}: {}, expected {}", spec.name,
                               p, i, r, value_of(all, at), expected);
        }
    return {};
  }

  // The same for the reduced gradient: the sum of `steps`, times scale.
  std::string wrong_reduction(int u, const std::vector<int>& steps, float scale = 1) const {
    const int rank = test_world().rank();
    for (int p = 0; p < pieces(u); ++p)
      for (int64_t i = 0; i < reduced[u][p]->numel(); ++i) {
        const int64_t at = rank * units[u].pieces[p].count + i;
        float expected = 0;
        for (int step : steps)
          for (int r = 0; r < test_world().size(); ++r)
            expected += scale * grad_value(u, p, r, at, step);
        const float found = value_of(reduced[u][p], i);
        if (found != expected)
          return fmt::format("{} piece {}, element {}: {}, expected {}", units[u].name, p, i, found,
                             expected);
      }
    return {};
  }
};

class Transport : public testing::TestWithParam<std::tuple<std::string, DType>> {
 protected:
  std::string transport() const { return std::get<0>(GetParam()); }
  DType param_dtype() const { return std::get<1>(GetParam()); }
  std::vector<UnitSpec> units() const { return model_units(param_dtype()); }
};

INSTANTIATE_TEST_SUITE_P(All, Transport,
                         testing::Combine(testing::Values("shm", "mpi", "shm_by_1", "shm_by_2",
                                                          "shm_by_3"),
                                          testing::Values(DType::f32, DType::bf16, DType::fp16)),
                         [](const auto& test) {
                           return std::get<0>(test.param) + "_" +
                                  std::string(dtype_name(std::get<1>(test.param)));
                         });

// Steps in the trainer's order, each rank at its own pace.
class SkewedTrainer {
 public:
  explicit SkewedTrainer(Harness& h) : h_(h), random_(test_world().rank() + 1) {}

  // Returns whether all checks of all ranks have held.
  bool step(int step) {
    update(step);
    h_.comm->gather_start(0);
    h_.comm->gather_start(1);
    check(0, step);
    for (int l = 1; l < h_.size(); ++l) enter(l, l + 1, step);
    h_.comm->gather_start(h_.size() - 1);
    h_.write_grad(0, step);
    for (int l = h_.size() - 1; l > 0; --l) backward(l, step);
    h_.comm->reshard(0);
    h_.comm->reduce_start(0);
    finish(1, step);
    finish(0, step);
    int64_t failed = testing::Test::HasFailure();
    test_world().all_reduce_sum(&failed, 1);  // after it no rank reads parameters
    return failed == 0;
  }

 private:
  void pause() {
    if (random_() % 3 == 0) usleep(random_() % 300);
  }

  void update(int step) {
    for (int u = 0; u < h_.size(); ++u) {
      pause();
      h_.write_shards(u, step);
      h_.comm->publish(u);
    }
  }

  void check(int u, int step) { EXPECT_EQ(h_.wrong_gather(u, h_.comm->gather_wait(u), step), ""); }

  void enter(int l, int next, int step) {
    check(l, step);
    if (next > 0 && next < h_.size()) h_.comm->gather_start(next);
    pause();
    h_.comm->reshard(l);
  }

  void backward(int l, int step) {
    check(l, step);
    if (l > 1) h_.comm->gather_start(l - 1);
    pause();
    h_.write_grad(l, step);
    h_.comm->reshard(l);
    h_.comm->reduce_start(l);
    if (l + 1 < h_.size()) finish(l + 1, step);
  }

  void finish(int u, int step) {
    h_.reduce_wait(u, 0.5f);
    EXPECT_EQ(h_.wrong_reduction(u, {step}, 0.5f), "");
  }

  Harness& h_;
  std::minstd_rand random_;
};

TEST_P(Transport, TrainsWithRandomSkew) {
  Harness h(transport(), units());
  SkewedTrainer trainer(h);
  for (int step = 1; step <= 50 && trainer.step(step); ++step) continue;
}

TEST_P(Transport, ShardsAreZeroAtFirst) {
  Harness h(transport(), units());
  for (int u = 0; u < h.size(); ++u)
    for (int p = 0; p < h.pieces(u); ++p) {
      const Tensor shard = h.comm->shard(u, p);
      EXPECT_EQ(shard.dtype, param_dtype());
      for (int64_t i = 0; i < shard.numel(); ++i) ASSERT_EQ(value_of(shard, i), 0.0f);
    }
}

TEST_P(Transport, AccumulatesMicroBatchesWithScale) {
  Harness h(transport(), units());
  for (int micro = 0; micro < 3; ++micro)
    for (int u = 0; u < h.size(); ++u) {
      h.write_grad(u, micro);
      h.comm->reduce_start(u);
      h.reduce_wait(u, 0.25f, micro > 0);
    }
  for (int u = 0; u < h.size(); ++u) EXPECT_EQ(h.wrong_reduction(u, {0, 1, 2}, 0.25f), "");
}

// Gradients that pile up in own buffers over micro-batches and are reduced once, in any order.
TEST_P(Transport, OwnGradientBuffersOutliveOthers) {
  auto specs = units();
  for (UnitSpec& spec : specs) spec.own_grad_buffer = true;
  Harness h(transport(), specs);
  for (int round = 0; round < 2; ++round) {
    std::vector<float*> first;
    for (int u = 0; u < h.size(); ++u) {
      first.push_back(h.comm->grad_buffer(u));
      h.write_grad(u, round);
    }
    for (int u = 0; u < h.size(); ++u) {
      float* grad = h.comm->grad_buffer(u);
      ASSERT_EQ(grad, first[u]) << "the same buffer until reduce_start";
      for (int64_t i = 0; i < h.units[u].elements; ++i) grad[i] *= 2;
    }
    for (int u = h.size() - 1; u >= 0; --u) h.comm->reduce_start(u);
    for (int u = 0; u < h.size(); ++u) h.reduce_wait(u);
    for (int u = 0; u < h.size(); ++u) EXPECT_EQ(h.wrong_reduction(u, {round, round}), "");
  }
}

// A gather that starts after publish waits for the slowest rank's.
TEST_P(Transport, GatherSeesTheValuesOfASlowRank) {
  Harness h(transport(), units());
  for (int step = 1; step <= 3; ++step) {
    if (test_world().rank() == step % test_world().size()) usleep(20000);
    h.write_shards(1, step);
    h.comm->publish(1);
    h.comm->gather_start(1);
    EXPECT_EQ(h.wrong_gather(1, h.comm->gather_wait(1), step), "");
    h.comm->reshard(1);
    test_world().barrier();
  }
}

TEST_P(Transport, CountsTraffic) {
  Harness h(transport(), units());
  int64_t shard_elements = 0;
  for (int u = 0; u < h.size(); ++u) {
    for (const Piece& piece : h.units[u].pieces) shard_elements += piece.count;
    h.comm->publish(u);
    for (int gather = 0; gather < 2; ++gather) {
      h.comm->gather_start(u);
      h.comm->gather_wait(u);
      h.comm->reshard(u);
    }
    h.write_grad(u, 0);
    h.comm->reduce_start(u);
    h.reduce_wait(u);
  }
  const int64_t received = (test_world().size() - 1) * shard_elements;
  const int64_t param_bytes = param_dtype() == DType::f32 ? 4 : 2;
  const Traffic& traffic = h.comm->traffic();
  EXPECT_EQ(traffic.gathers, 2 * h.size());
  EXPECT_EQ(traffic.reduces, h.size());
  EXPECT_EQ(traffic.gather_logical_bytes, 2 * received * param_bytes);
  EXPECT_EQ(traffic.reduce_logical_bytes, received * 4);
  // Between nodes the rows move once after a publish, and sums of a node's gradients once.
  const int64_t once_per_node = (nodes_of(transport()) - 1) * shard_elements * param_bytes;
  EXPECT_EQ(traffic.gather_copied_bytes,
            transport() == "mpi" ? 2 * received * param_bytes : once_per_node);
  if (nodes_of(transport()) == 1) {
    EXPECT_EQ(traffic.reduce_copied_bytes, received * 4);
  }
}

// Numbers of the table in the documentation: one layer of hidden 512 on 4 ranks in 16 bits.
TEST(Traffic, OfADocumentedLayer) {
  if (test_world().size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const std::vector<Shape> layer = {{512},       {512, 512},  {256, 512}, {256, 512},
                                    {64},        {64},        {512, 512}, {512},
                                    {1024, 512}, {1024, 512}, {512, 1024}};
  Harness h("mpi", {make_spec("layers.0", layer, DType::bf16, DType::bf16)});
  h.comm->gather_start(0);
  h.comm->gather_wait(0);
  h.comm->grad_buffer(0);
  h.comm->reduce_start(0);
  h.reduce_wait(0);
  EXPECT_EQ(h.comm->traffic().gather_logical_bytes, 3 * 590112 * 2);
  EXPECT_EQ(h.comm->traffic().reduce_logical_bytes, 3 * 590112 * 2);
}

TEST_P(Transport, AccountsItsMemory) {
  Device& device = *test_backend().device;
  const int64_t before = device.bytes_held();
  {
    const int64_t shards = device.bytes_held(Segment::shards);
    const int64_t gradients = device.bytes_held(Segment::gradients);
    Harness h(transport(), units());
    int64_t shard_bytes = 0;
    for (const UnitSpec& spec : h.units)
      for (const Piece& piece : spec.pieces)
        shard_bytes += piece.count * static_cast<int64_t>(dtype_size(spec.param_dtype));
    EXPECT_GE(device.bytes_held(Segment::shards), shards + shard_bytes);
    EXPECT_GT(device.bytes_held(Segment::gradients), gradients);
  }
  EXPECT_EQ(device.bytes_held(), before);
}

TEST_P(Transport, RefusesCallsOutOfOrder) {
  Harness h(transport(), units());
  Collectives& comm = *h.comm;
  EXPECT_THROW(comm.add_unit(h.units[0]), Error);
  EXPECT_THROW(comm.finish_setup(), Error);
  EXPECT_THROW(comm.shard(h.size(), 0), Error);
  EXPECT_THROW(comm.shard(0, h.pieces(0)), Error);
  EXPECT_THROW(comm.gather_start(-1), Error);
  EXPECT_THROW(comm.gather_wait(1), Error);
  EXPECT_THROW(comm.reshard(1), Error);
  EXPECT_THROW(comm.reduce_start(1), Error);
  EXPECT_THROW(h.reduce_wait(1), Error);

  comm.gather_start(1);
  EXPECT_THROW(comm.gather_start(1), Error);
  EXPECT_THROW(comm.reshard(1), Error);
  EXPECT_THROW(comm.publish(1), Error);
  comm.gather_wait(1);
  EXPECT_THROW(comm.gather_wait(1), Error);
  EXPECT_THROW(comm.publish(1), Error);
  comm.reshard(1);

  h.write_grad(1, 0);
  EXPECT_THROW(h.reduce_wait(1), Error);
  h.write_grad(2, 0);
  EXPECT_THROW(comm.grad_buffer(3), Error) << "both buffers of the ring are held";
  comm.reduce_start(1);
  EXPECT_THROW(comm.reduce_start(1), Error);
  EXPECT_THROW(comm.grad_buffer(1), Error);
  EXPECT_THROW(comm.grad_buffer(3), Error);
  EXPECT_THROW(comm.reduce_wait(1, {}, 1, false), Error) << "a destination per piece";
  h.reduce_wait(1);
  EXPECT_THROW(h.reduce_wait(1), Error);
  h.write_grad(3, 0);  // the ring goes on after the refusals
  for (int u : {2, 3}) comm.reduce_start(u);
  for (int u : {2, 3}) {
    h.reduce_wait(u);
    EXPECT_EQ(h.wrong_reduction(u, {0}), "");
  }
}

TEST_P(Transport, RefusesBadUnits) {
  auto comm = make_transport(transport());
  EXPECT_THROW(comm->shard(0, 0), Error) << "before finish_setup";
  const UnitSpec good = units()[1];
  UnitSpec bad = good;
  bad.pieces[1].offset += 1;
  EXPECT_THROW(comm->add_unit(bad), Error) << "unaligned";
  bad = good;
  bad.pieces[1].offset = 0;
  EXPECT_THROW(comm->add_unit(bad), Error) << "overlapping";
  bad = good;
  bad.elements = bad.pieces.back().offset;
  EXPECT_THROW(comm->add_unit(bad), Error) << "too short";
  bad = good;
  bad.reduce_dtype = DType::i32;
  EXPECT_THROW(comm->add_unit(bad), Error) << "reduce_dtype";
  EXPECT_EQ(comm->add_unit(good), 0);
  comm->finish_setup();
}

TEST(MpiTransport, NamesTheUnitThatFindsNoFullBuffer) {
  Harness h("mpi", model_units(DType::f32));
  for (int u : {0, 1, 2}) h.comm->gather_start(u);  // root's own, and both of the pool
  try {
    h.comm->gather_start(3);
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("layers.2"), std::string::npos) << error.what();
  }
  for (int u : {0, 1, 2}) h.comm->gather_wait(u);
}

TEST(ShmTransport, NoticesAPublishWhileAnotherRankReads) {
  if (test_world().size() < 2) GTEST_SKIP() << "needs 2 ranks";
  Harness h("shm", model_units(DType::f32));
  h.comm->gather_start(1);
  h.comm->gather_wait(1);
  const bool still_reads = test_world().rank() == 1;
  if (!still_reads) {
    h.comm->reshard(1);
    EXPECT_THROW(h.comm->publish(1), Error);
  }
  test_world().barrier();
  if (still_reads) h.comm->reshard(1);
  test_world().barrier();
  EXPECT_NO_THROW(h.comm->publish(1));
}

// A counter in shared memory: ranks can tell each other something without a call of MPI.
class Counter {
 public:
  Counter() {
    MPI_Win_allocate_shared(test_world().rank() == 0 ? sizeof(std::atomic<int>) : 0, 1,
                            MPI_INFO_NULL, test_world().machine_comm(), &own_, &window_);
    MPI_Aint bytes;
    int unit;
    MPI_Win_shared_query(window_, 0, &bytes, &unit, &value_);
    if (test_world().rank() == 0) new (value_) std::atomic<int>(0);
    test_world().barrier();
  }
  ~Counter() { MPI_Win_free(&window_); }
  void add() { ++*value_; }
  int value() const { return *value_; }

 private:
  MPI_Win window_;
  std::atomic<int>*own_, *value_;
};

// What was started goes on while other ranks compute, that is, call nothing but Device::poll().
TEST(Progress, PollingMovesWhatOtherRanksWaitFor) {
  if (test_world().size() < 2) GTEST_SKIP() << "needs 2 ranks";
  for (const char* transport : {"mpi", "shm_by_1"})
    for (bool polls : {true, false}) {
      SCOPED_TRACE(fmt::format("{} polls {}", transport, polls));
      Harness h(transport, {make_spec("layer", {{1 << 20}}, DType::f32)});  // beyond eager messages
      Counter arrived;
      h.write_shards(0, 1);
      h.write_grad(0, 1);
      h.comm->publish(0);
      h.comm->gather_start(0);
      h.comm->reduce_start(0);
      const int others = test_world().size() - 1;
      if (test_world().rank() == 0) {
        // Long enough to see that without polls nothing arrives; with them it ends at once.
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(polls ? 30 : 1);
        while (arrived.value() < others && std::chrono::steady_clock::now() < end) {
          if (polls) test_backend().device->poll();
          usleep(1000);
        }
        EXPECT_EQ(arrived.value(), polls ? others : 0);
      }
      EXPECT_EQ(h.wrong_gather(0, h.comm->gather_wait(0), 1), "");
      h.reduce_wait(0);
      EXPECT_EQ(h.wrong_reduction(0, {1}), "");
      arrived.add();
      h.comm->reshard(0);
      test_world().barrier();
    }
}

TEST(Transports, UnknownNameIsAUsageError) {
  try {
    make_collectives("tcp", test_world(), test_backend(), 2);
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code, kExitUsage);
    EXPECT_NE(std::string(error.what()).find("shm or mpi"), std::string::npos) << error.what();
  }
}

// --- shm and mpi against each other and against plain loops, on values that round

class ReduceDType : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, ReduceDType, testing::Values(DType::f32, DType::bf16, DType::fp16),
                         [](const auto& test) { return std::string(dtype_name(test.param)); });

// Element i of a rank's gradient of unit u; any rank can compute any other's.
float rough_value(int u, int rank, int64_t i, int round) {
  std::minstd_rand random(static_cast<unsigned>(1 + u * 1000003 + rank * 7919 + i * 31 + round));
  random.discard(3);
  const float mantissa = static_cast<float>(random()) / static_cast<float>(random.max()) - 0.5f;
  return std::ldexp(mantissa, static_cast<int>(random() % 12) - 6);
}

void reduce_rough_values(Harness& h, int round, bool accumulate) {
  for (int u = 0; u < h.size(); ++u) {
    float* grad = h.comm->grad_buffer(u);
    for (int64_t i = 0; i < h.units[u].elements; ++i)
      grad[i] = rough_value(u, test_world().rank(), i, round);
    h.comm->reduce_start(u);
    h.reduce_wait(u, 1.0f / 3, accumulate);
  }
}

TEST_P(ReduceDType, ShmAndMpiGiveTheSameBits) {
  const auto specs = model_units(DType::f32, GetParam());
  Harness shm("shm", specs), mpi("mpi", specs);
  for (int round = 0; round < 2; ++round) {
    reduce_rough_values(shm, round, round > 0);
    reduce_rough_values(mpi, round, round > 0);
  }
  for (int u = 0; u < shm.size(); ++u)
    for (int p = 0; p < shm.pieces(u); ++p)
      if (const Tensor& a = shm.reduced[u][p]; a.numel() > 0) {
        EXPECT_EQ(std::memcmp(a.data, mpi.reduced[u][p]->data, a.bytes()), 0) << u << " " << p;
      }
}

// Each contribution is rounded once; sums are in f32, over ranks of a node, then over nodes.
void check_rounding_and_order(const std::string& transport, DType reduce_dtype, int per_node) {
  Harness h(transport, model_units(DType::f32, reduce_dtype));
  reduce_rough_values(h, 0, false);
  const Piece& piece = h.units[2].pieces[1];
  for (int64_t i = 0; i < piece.count; ++i) {
    const int64_t at = piece.offset + test_world().rank() * piece.count + i;
    float sum = 0;
    for (int first = 0; first < test_world().size(); first += per_node) {
      float node = 0;
      for (int r = first; r < std::min(first + per_node, test_world().size()); ++r)
        node += static_cast<float>(rounded(reduce_dtype, rough_value(2, r, at, 0)));
      sum += node;
    }
    const float scaled = sum * (1.0f / 3);
    ASSERT_EQ(value_of(h.reduced[2][1], i), scaled) << transport << " element " << i;
  }
}

TEST_P(ReduceDType, RoundsOnceAndSumsInOrder) {
  check_rounding_and_order("shm", GetParam(), test_world().size());
  check_rounding_and_order("mpi", GetParam(), test_world().size());
  for (int per_node : {1, 2, 3})
    check_rounding_and_order(fmt::format("shm_by_{}", per_node), GetParam(), per_node);
}

// --- the checks above are not blind

// Passes everything on, but one element of what arrives is wrong, on the last rank.
class OffByOne final : public Forwarding {
 public:
  using Forwarding::Forwarding;
  int add_unit(const UnitSpec& spec) override {
    bytes_.push_back(spec.elements * static_cast<int64_t>(dtype_size(spec.param_dtype)));
    return Forwarding::add_unit(spec);
  }
  void* gather_wait(int unit) override {
    const char* full = static_cast<char*>(Forwarding::gather_wait(unit));
    wrong_.assign(full, full + bytes_[unit]);
    if (last()) wrong_[1] ^= 0x40;  // byte 1 is part of the first element in any dtype
    return wrong_.data();
  }
  void reduce_wait(int unit, std::span<const Tensor> dst, Factor scale, bool accumulate) override {
    Forwarding::reduce_wait(unit, dst, scale, accumulate);
    if (last()) dst.back().as<float>()[dst.back().numel() - 1] += 1;
  }

 private:
  static bool last() { return test_world().rank() == test_world().size() - 1; }
  std::vector<int64_t> bytes_;
  std::vector<char> wrong_;
};

TEST_P(Transport, ChecksFindAWrongElement) {
  auto inner = make_transport(transport());
  Harness h(std::make_unique<OffByOne>(std::move(inner)), units());
  h.write_shards(3, 1);
  h.comm->publish(3);
  h.comm->gather_start(3);
  const std::string gathered = h.wrong_gather(3, h.comm->gather_wait(3), 1);
  h.write_grad(3, 1);
  h.comm->reduce_start(3);
  h.reduce_wait(3);
  const bool planted = test_world().rank() == test_world().size() - 1;
  EXPECT_EQ(!gathered.empty(), planted) << gathered;
  EXPECT_EQ(!h.wrong_reduction(3, {1}).empty(), planted);
}

}  // namespace
}  // namespace qshard
