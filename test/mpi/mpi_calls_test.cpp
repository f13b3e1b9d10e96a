// Messages of a unit: MPI's calls counted through its profiling interface, whatever the transports
// say about themselves.
#include <mpi.h>

#include "comm/transports.h"
#include "fsdp/shard_layout.h"
#include "model/qwen3_params.h"
#include "tiny_model.h"
#include "train/walkthrough.h"

namespace {
struct Calls {
  int allgather = 0, alltoallw = 0, send = 0, recv = 0;
  bool operator==(const Calls&) const = default;
};
Calls calls;
}  // namespace

extern "C" {
int MPI_Iallgather(const void* from, int n, MPI_Datatype type, void* to, int m,
                   MPI_Datatype to_type, MPI_Comm comm, MPI_Request* request) {
  ++calls.allgather;
  return PMPI_Iallgather(from, n, type, to, m, to_type, comm, request);
}
int MPI_Ialltoallw(const void* from, const int n[], const int at[], const MPI_Datatype types[],
                   void* to, const int m[], const int to_at[], const MPI_Datatype to_types[],
                   MPI_Comm comm, MPI_Request* request) {
  ++calls.alltoallw;
  return PMPI_Ialltoallw(from, n, at, types, to, m, to_at, to_types, comm, request);
}
int MPI_Isend(const void* from, int n, MPI_Datatype type, int rank, int tag, MPI_Comm comm,
              MPI_Request* request) {
  ++calls.send;
  return PMPI_Isend(from, n, type, rank, tag, comm, request);
}
int MPI_Irecv(void* to, int n, MPI_Datatype type, int rank, int tag, MPI_Comm comm,
              MPI_Request* request) {
  ++calls.recv;
  return PMPI_Irecv(to, n, type, rank, tag, comm, request);
}
}

namespace qshard {
namespace {

int ranks() { return test_world().size(); }

// A transport of one unit, whose calls are counted from here on.
class OneUnit {
 public:
  OneUnit(std::unique_ptr<Collectives> transport, const std::vector<ParamSpec>& params, DType dtype)
      : transport_(std::move(transport)), layout_(params, ranks()) {
    transport_->add_unit({"layers.0", layout_.pieces(), layout_.elements(), dtype, DType::f32,
                          /*own_full_buffer=*/false, /*own_grad_buffer=*/false});
    transport_->finish_setup();
  }
  // Gathers values that say where they belong, and counts; wrong: elements that are not as written.
  Calls gather(int64_t* wrong) {
    for (int p = 0; p < layout_.size(); ++p) {
      const Tensor shard = transport_->shard(0, p);
      for (int64_t i = 0; i < shard.numel(); ++i)
        shard.as<float>()[i] = value(p, test_world().rank() * shard.numel() + i);
    }
    transport_->publish(0);
    calls = {};
    transport_->gather_start(0);
    const float* full = static_cast<float*>(transport_->gather_wait(0));
    const Calls counted = calls;
    *wrong = 0;
    for (int p = 0; p < layout_.size(); ++p)
      for (int64_t i = 0; i < layout_[p].padded_numel(); ++i)
        *wrong += full[layout_[p].offset + i] != value(p, i);
    transport_->reshard(0);
    return counted;
  }
  Calls reduce() {
    std::vector<Buffer> sums;
    for (const Piece& piece : layout_.pieces())
      sums.emplace_back(*test_backend().device, DType::f32, Shape{piece.count}, Segment::gradients,
                        "sum");
    std::fill_n(transport_->grad_buffer(0), layout_.elements(), 1.0f);
    calls = {};
    transport_->reduce_start(0);
    transport_->reduce_wait(0, std::vector<Tensor>(sums.begin(), sums.end()), 1, false);
    return calls;
  }

 private:
  static float value(int piece, int64_t i) {  // below 2^24, so exact
    return static_cast<float>((piece * 1000003 + i) % 16777213);
  }
  std::unique_ptr<Collectives> transport_;
  UnitLayout layout_;
};

std::unique_ptr<Collectives> mpi() { return make_mpi_collectives(test_world(), test_backend(), 1); }

// The layer of the README: 7 matrices of 64 KB and more a rank, and 4 norms, which are one message.
TEST(MpiCalls, OfALayer) {
  const Qwen3Config config = walkthrough_config();
  for (int layers : {1, 3}) {
    OneUnit unit(mpi(), layers_params(config, 0, layers), DType::f32);
    int64_t wrong = -1;
    EXPECT_EQ(unit.gather(&wrong), (Calls{7 * layers, 1, 0, 0}));
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(unit.reduce(), (Calls{0, 1, 0, 0}));
  }
}

TEST(MpiCalls, OfSmallLayersAreOneForAllOfThem) {
  const Qwen3Config config = tiny_config();
  for (int layers : {1, 2}) {
    OneUnit unit(mpi(), layers_params(config, 0, layers), DType::f32);
    int64_t wrong = -1;
    EXPECT_EQ(unit.gather(&wrong), (Calls{0, 1, 0, 0}));
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(unit.reduce(), (Calls{0, 1, 0, 0}));
  }
}

// A rank's part of 16 KiB is small, 4 bytes more are not.
TEST(MpiCalls, OfPiecesAtTheLimit) {
  constexpr int64_t kElements = 4096;
  const int64_t n = ranks();
  OneUnit unit(mpi(), {{"a", {n, kElements + 1}}, {"b", {n, kElements}}, {"c", {n, kElements + 1}}},
               DType::f32);
  int64_t wrong = -1;
  EXPECT_EQ(unit.gather(&wrong), (Calls{2, 1, 0, 0}));
  EXPECT_EQ(wrong, 0);
}

// Inside a node rows are read in place. Between nodes a rank's rows of all pieces are one message
// to each, and so are their sums on the way back.
TEST(MpiCalls, OfSharedMemoryAreOneBetweenTwoNodes) {
  for (int ranks_per_node : {ranks(), 1, 2}) {
    const int nodes = (ranks() + ranks_per_node - 1) / ranks_per_node;
    if (ranks() % ranks_per_node) continue;  // equal nodes: every rank has one ward on each other
    OneUnit unit(make_shm_collectives(test_world(), test_backend(), ranks_per_node),
                 layers_params(walkthrough_config(), 0, 2), DType::f32);
    int64_t wrong = -1;
    EXPECT_EQ(unit.gather(&wrong), (Calls{0, 0, nodes - 1, nodes - 1}));
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(unit.reduce(), (Calls{0, 0, nodes - 1, nodes - 1}));
  }
}

}  // namespace
}  // namespace qshard
