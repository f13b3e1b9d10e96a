// NCCL's collectives over MPI. A group of calls on one communicator is one operation of its stream:
// it starts by comparing what the ranks are about to do, then moves bytes by non-blocking MPI calls
// that are polled, then reduces in the order of a ring, rounding to the element type after each hop
// as NCCL does.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "memory.h"
#include "mpi_progress.h"
#include "report.h"
#include "scheduler.h"
#include "stream.h"
#include "tracker.h"

struct ncclComm {
  MPI_Comm data = MPI_COMM_NULL;  // operations of streams; null in a world of one rank
  MPI_Comm host = MPI_COMM_NULL;  // collective calls of the host: split, window registration
  int rank = 0, size = 1;
  cudasim::Chain chain = std::make_shared<cudasim::OperationRef>();  // in call order
  ncclResult_t async_error = ncclSuccess;
  bool aborted = false;
  std::shared_ptr<const char> graphs = std::make_shared<const char>();  // its users beside this one
};

struct ncclWindow_vidmem {
  ncclComm* comm;
  char* base;
  size_t bytes;
  bool symmetric;
};

namespace cudasim {
namespace {

using CommRef = ncclComm*;

enum class Kind : uint8_t { all_gather, reduce_scatter, all_reduce, broadcast };
constexpr const char* KIND_NAMES[] = {"AllGather", "ReduceScatter", "AllReduce", "Broadcast"};

struct Collective {
  Kind kind;
  const char* send;
  char* receive;
  size_t count;  // as in the call
  ncclDataType_t type;
  ncclRedOp_t op;
  int root;
};

int64_t nccl_version() { return environment("CUDASIM_NCCL_VERSION", NCCL_VERSION_CODE); }

int world_rank() {
  int rank = 0;
  if (control_comm() != MPI_COMM_NULL) PMPI_Comm_rank(control_comm(), &rank);
  return rank;
}

std::set<ncclWindow_vidmem*>& windows() {
  static auto* instance = new std::set<ncclWindow_vidmem*>;
  return *instance;
}

std::set<const void*>& nccl_memory() {  // that ncclMemAlloc gave out
  static auto* instance = new std::set<const void*>;
  return *instance;
}

// Where an address lies in a symmetric window of the communicator: the same on all ranks, or what
// NCCL does with it is undefined.
std::string place_in_window(const ncclComm* comm, const char* address) {
  for (const ncclWindow_vidmem* window : windows())
    if (window->comm == comm && window->symmetric && address >= window->base &&
        address < window->base + window->bytes)
      return std::to_string(address - window->base);
  return "no";
}

struct TypeInfo {
  ncclDataType_t type;
  size_t bytes;
  const char* name;
  bool floating;
};
constexpr TypeInfo TYPES[] = {
    {ncclInt8, 1, "int8", false},   {ncclUint8, 1, "uint8", false},
    {ncclInt32, 4, "int32", false}, {ncclUint32, 4, "uint32", false},
    {ncclInt64, 8, "int64", false}, {ncclUint64, 8, "uint64", false},
    {ncclFloat16, 2, "fp16", true}, {ncclBfloat16, 2, "bf16", true},
    {ncclFloat32, 4, "f32", true},  {ncclFloat64, 8, "f64", true},
};

const TypeInfo& info_of(ncclDataType_t type) {
  for (const TypeInfo& info : TYPES)
    if (info.type == type) return info;
  fail("NCCL: data type %d is not modelled", static_cast<int>(type));
}

// --- reductions
template <class T>
T from_double(double value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __double2bfloat16(value);
  else if constexpr (std::is_same_v<T, __half>)
    return __double2half(value);
  else
    return static_cast<T>(value);
}

template <class T>
double to_double(T value) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>)
    return static_cast<double>(static_cast<float>(value));
  else
    return static_cast<double>(value);
}

// Floating types: exact in double (at most f32 is added), rounded to T: T's own addition.
template <class T>
T combine(T a, T b, ncclRedOp_t op) {
  if constexpr (std::is_integral_v<T>) {
    if (op == ncclMax) return std::max(a, b);
    if (op == ncclMin) return std::min(a, b);
    return static_cast<T>(a + b);
  } else {
    const double x = to_double(a), y = to_double(b);
    if (op == ncclMax) return from_double<T>(std::max(x, y));
    if (op == ncclMin) return from_double<T>(std::min(x, y));
    return from_double<T>(x + y);
  }
}

// An average scales before the sum, as NCCL does for floating types.
template <class T>
T prepare(T value, ncclRedOp_t op, int ranks) {
  if constexpr (!std::is_integral_v<T>)
    if (op == ncclAvg) return from_double<T>(to_double(value) / ranks);
  return value;
}

// parts: one contribution a rank, `stride` bytes apart. The sum begins behind `owner` and ends with
// it, the order in which a ring passes the chunk of that rank.
template <class T>
void reduce_as(char* out, const char* parts, size_t stride, size_t count, ncclRedOp_t op, int ranks,
               int owner) {
  for (size_t i = 0; i < count; ++i) {
    T sum{};
    for (int hop = 0; hop < ranks; ++hop) {
      const auto rank = static_cast<size_t>((owner + 1 + hop) % ranks);
      T value;
      std::memcpy(&value, parts + rank * stride + i * sizeof(T), sizeof(T));
      value = prepare(value, op, ranks);
      sum = hop == 0 ? value : combine(sum, value, op);
    }
    if constexpr (std::is_integral_v<T>)
      if (op == ncclAvg) sum = static_cast<T>(sum / static_cast<T>(ranks));
    std::memcpy(out + i * sizeof(T), &sum, sizeof(T));
  }
}

struct Reduction {
  char* out;
  const char* parts;
  size_t stride, count;
};

void reduce(const Reduction& r, const Collective& c, int ranks, int owner) {
  const auto run = [&]<class T>(T) {
    reduce_as<T>(r.out, r.parts, r.stride, r.count, c.op, ranks, owner);
  };
  switch (c.type) {
    case ncclInt8:
      return run(int8_t{});
    case ncclUint8:
      return run(uint8_t{});
    case ncclInt32:
      return run(int32_t{});
    case ncclUint32:
      return run(uint32_t{});
    case ncclInt64:
      return run(int64_t{});
    case ncclUint64:
      return run(uint64_t{});
    case ncclFloat16:
      return run(__half{});
    case ncclBfloat16:
      return run(__nv_bfloat16{});
    case ncclFloat32:
      return run(float{});
    case ncclFloat64:
      return run(double{});
    default:
      fail("NCCL: data type %d is not modelled", static_cast<int>(c.type));
  }
}

// --- one operation: all calls of a group on one communicator
struct Header {
  uint64_t hash;
  char text[248];
};

std::string describe(const ncclComm* comm, const std::vector<Collective>& calls) {
  std::string text;
  for (const Collective& c : calls)
    text += std::string(text.empty() ? "" : ", ") + KIND_NAMES[static_cast<int>(c.kind)] + " " +
            std::to_string(c.count) + " " + info_of(c.type).name + " op " + std::to_string(c.op) +
            " root " + std::to_string(c.root) + " window offsets " + place_in_window(comm, c.send) +
            " " + place_in_window(comm, c.receive);
  return text;
}

// The process's n-th operation fails and never ends, on one rank or on all.
bool failure_is_due() {
  static int64_t started = 0;
  const int64_t rank = environment("CUDASIM_NCCL_ERROR_RANK", -1);
  return ++started == environment("CUDASIM_NCCL_ERROR", 0) && (rank < 0 || rank == world_rank());
}

class GroupOperation {
 public:
  GroupOperation(CommRef comm, std::vector<Collective> calls)
      : comm_(comm), calls_(std::move(calls)) {}

  void start();
  bool started() const { return started_; }
  bool poll();

 private:
  enum class Phase : uint8_t { compare, move, stalled };
  struct Staging {
    std::vector<char> send, receive;
  };

  void compare_headers() const;
  void start_moving();
  void finish();
  size_t send_bytes(const Collective& c) const;
  size_t receive_bytes(const Collective& c) const;
  bool all_done();

  CommRef comm_;
  std::vector<Collective> calls_;
  std::vector<Staging> staging_;
  std::vector<MPI_Request> requests_;
  Header mine_{};
  std::vector<Header> headers_;
  Phase phase_ = Phase::compare;
  bool started_ = false;
};

// CUDASIM_NCCL_EXCLUSIVE: an operation takes the whole GPU until it ends, as kernels of NCCL may.
// Then two ranks that start two communicators' operations in different orders wait for ever.
class WholeDevice {
 public:
  static bool wanted() { return environment("CUDASIM_NCCL_EXCLUSIVE", 0) != 0; }

  bool take(const GroupOperation* operation) {
    if (!holder_) holder_ = operation;
    return holder_ == operation;
  }
  void release(const GroupOperation* operation) {
    if (holder_ == operation) holder_ = nullptr;
  }

 private:
  const GroupOperation* holder_ = nullptr;
};

WholeDevice& whole_device() {
  static auto* instance = new WholeDevice;
  return *instance;
}

// Launches in the order of the host's calls, whichever their communicator is.
bool implicit_order() {
  static const bool set =
      nccl_version() >= NCCL_VERSION(2, 26, 0) && environment("NCCL_LAUNCH_ORDER_IMPLICIT", 0) == 1;
  return set;
}

size_t GroupOperation::send_bytes(const Collective& c) const {
  const size_t chunk = c.count * info_of(c.type).bytes;
  return c.kind == Kind::reduce_scatter ? chunk * static_cast<size_t>(comm_->size) : chunk;
}

size_t GroupOperation::receive_bytes(const Collective& c) const {
  const size_t chunk = c.count * info_of(c.type).bytes;
  return c.kind == Kind::all_gather ? chunk * static_cast<size_t>(comm_->size) : chunk;
}

void GroupOperation::start() {
  started_ = true;
  if (failure_is_due()) {
    comm_->async_error =
        environment("CUDASIM_NCCL_ERROR_RANK", -1) < 0 ? ncclRemoteError : ncclSystemError;
    phase_ = Phase::stalled;
    return;
  }
  for (const Collective& c : calls_)
    if (c.kind != Kind::broadcast || c.root == comm_->rank)
      track_operation_read(c.send, send_bytes(c));
  const std::string text = describe(comm_, calls_);
  mine_.hash = std::hash<std::string>()(text);
  std::strncpy(mine_.text, text.c_str(), sizeof mine_.text - 1);
  headers_.assign(static_cast<size_t>(comm_->size), mine_);
  if (comm_->size > 1) {
    requests_.emplace_back();
    PMPI_Iallgather(&mine_, sizeof(Header), MPI_BYTE, headers_.data(), sizeof(Header), MPI_BYTE,
                    comm_->data, &requests_.back());
  }
}

bool GroupOperation::all_done() {
  int done = 1;
  if (!requests_.empty())
    PMPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE);
  if (done) requests_.clear();
  return done != 0;
}

bool GroupOperation::poll() {
  if (phase_ == Phase::stalled || !all_done()) return false;
  open_device_memory();
  if (phase_ == Phase::compare) {
    compare_headers();
    start_moving();
    phase_ = Phase::move;
    if (comm_->size > 1) return false;
  }
  finish();
  return true;
}

void GroupOperation::compare_headers() const {
  for (int rank = 0; rank < comm_->size; ++rank) {
    const Header& theirs = headers_[static_cast<size_t>(rank)];
    if (theirs.hash != mine_.hash)
      fail(
          "NCCL: the ranks of a communicator call different operations:\n  rank %d: %s\n  rank %d: "
          "%s",
          comm_->rank, mine_.text, rank, theirs.text);
  }
}

void GroupOperation::start_moving() {
  for (const Collective& c : calls_) {
    const size_t size = static_cast<size_t>(comm_->size), bytes = send_bytes(c);
    const size_t chunk = c.count * info_of(c.type).bytes;
    if (chunk * size > INT_MAX) fail("NCCL: more than 2 GiB in one call");
    Staging& s = staging_.emplace_back();
    s.send.assign(c.send, c.send + bytes);
    s.receive.resize(chunk * size);
    if (size == 1) {
      s.receive = s.send;
      continue;
    }
    requests_.emplace_back();
    const int n = static_cast<int>(chunk);
    if (c.kind == Kind::reduce_scatter)
      PMPI_Ialltoall(s.send.data(), n, MPI_BYTE, s.receive.data(), n, MPI_BYTE, comm_->data,
                     &requests_.back());
    else
      PMPI_Iallgather(s.send.data(), n, MPI_BYTE, s.receive.data(), n, MPI_BYTE, comm_->data,
                      &requests_.back());
  }
}

void GroupOperation::finish() {
  for (size_t i = 0; i < calls_.size(); ++i) {
    const Collective& c = calls_[i];
    const size_t element = info_of(c.type).bytes, chunk = c.count * element;
    const char* received = staging_[i].receive.data();
    track_operation_write(c.receive, receive_bytes(c));
    switch (c.kind) {
      case Kind::all_gather:
        std::memcpy(c.receive, received, receive_bytes(c));
        break;
      case Kind::broadcast:
        std::memcpy(c.receive, received + static_cast<size_t>(c.root) * chunk, chunk);
        break;
      case Kind::reduce_scatter:
        reduce({c.receive, received, chunk, c.count}, c, comm_->size, comm_->rank);
        break;
      case Kind::all_reduce:  // a reduce-scatter and an all-gather: chunk r ends at rank r
        for (int rank = 0; rank < comm_->size; ++rank) {
          const auto n = static_cast<size_t>(comm_->size), r = static_cast<size_t>(rank);
          const size_t begin = c.count * r / n, end = c.count * (r + 1) / n;
          reduce({c.receive + begin * element, received + begin * element, chunk, end - begin}, c,
                 comm_->size, rank);
        }
        break;
    }
  }
}

// --- groups
struct PendingCall {
  CommRef comm;
  cudaStream_t stream;
  Collective collective;
};

thread_local int group_depth = 0;
thread_local std::vector<PendingCall> group_calls;

void enqueue_group(CommRef comm, cudaStream_t stream_handle, const std::vector<Collective>& calls) {
  const std::string name = calls.size() == 1
                               ? std::string("nccl") + KIND_NAMES[static_cast<int>(calls[0].kind)]
                               : "NCCL group of " + std::to_string(calls.size());
  Stream& stream = stream_of(stream_handle, name.c_str());
  const bool captured = stream.capture != nullptr;
  // In a graph events alone order operations.
  const bool in_one_order = WholeDevice::wanted() && implicit_order() && !captured;
  const auto in_graph = captured ? comm->graphs : nullptr;
  const auto begin = [comm, calls, in_one_order, in_graph](const OperationRef& previous) -> Begin {
    const bool changes = WholeDevice::wanted() && !in_one_order && previous != *comm->chain;
    return [comm, calls, last = changes ? previous : nullptr, in_graph]() -> Poll {
      if (last && !ordered_before_running(last->id))
        fail(
            "NCCL: nothing orders this operation after \"%s\" of another communicator, which the "
            "host called before it: the ranks may start them in different orders and wait for ever",
            last->name.c_str());
      auto operation = std::make_shared<GroupOperation>(comm, calls);
      if (!WholeDevice::wanted()) operation->start();
      return [operation, comm] {
        // MPI may still write to the staging memory of an aborted operation: it is kept for ever.
        static std::vector<std::shared_ptr<GroupOperation>> abandoned;
        if (comm->aborted) abandoned.push_back(operation);
        bool done = comm->aborted;
        if (!done && !operation->started()) {
          if (!whole_device().take(operation.get())) return false;
          operation->start();
        }
        done = done || operation->poll();
        if (done) whole_device().release(operation.get());
        return done;
      };
    };
  };
  static const Chain launches = std::make_shared<OperationRef>();
  enqueue(stream, name, begin, in_one_order ? launches : comm->chain);
  if (in_one_order) *comm->chain = *launches;
}

void flush_group() {
  const std::vector<PendingCall> calls = std::move(group_calls);
  group_calls.clear();
  std::vector<CommRef> comms;
  for (const PendingCall& call : calls)
    if (std::find(comms.begin(), comms.end(), call.comm) == comms.end()) comms.push_back(call.comm);
  for (CommRef comm : comms) {
    std::vector<Collective> of_comm;
    cudaStream_t stream = nullptr;
    for (const PendingCall& call : calls) {
      if (call.comm != comm) continue;
      if (!of_comm.empty() && call.stream != stream)
        fail("NCCL: a group uses one communicator on two streams, which is not modelled");
      stream = call.stream;
      of_comm.push_back(call.collective);
    }
    enqueue_group(comm, stream, of_comm);
  }
}

bool valid_op(ncclRedOp_t op) {
  return op == ncclSum || op == ncclAvg || op == ncclMax || op == ncclMin;
}

bool overlap(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// In-place calls have their buffers where NCCL expects them; any other overlap is an error.
void check_buffers(const Collective& c, const ncclComm& comm, const char* name) {
  const size_t chunk = c.count * info_of(c.type).bytes, n = static_cast<size_t>(comm.size);
  const size_t send = chunk * (c.kind == Kind::reduce_scatter ? n : 1);
  const size_t receive = chunk * (c.kind == Kind::all_gather ? n : 1);
  check_device_range(c.send, send, name);
  check_device_range(c.receive, receive, name);
  const size_t offset = static_cast<size_t>(comm.rank) * chunk;
  const bool in_place = c.kind == Kind::all_gather       ? c.send == c.receive + offset
                        : c.kind == Kind::reduce_scatter ? c.receive == c.send + offset
                                                         : c.send == c.receive;
  if (!in_place && overlap(c.send, send, c.receive, receive))
    fail("%s: the buffers overlap, but are not where an in-place call has them", name);
  const size_t alignment = info_of(c.type).bytes;
  if (reinterpret_cast<uintptr_t>(c.send) % alignment ||
      reinterpret_cast<uintptr_t>(c.receive) % alignment)
    fail("%s: a buffer is not aligned to its element type", name);
}

ncclResult_t add_call(CommRef comm, cudaStream_t stream, const Collective& collective) {
  ApiCall call;
  const std::string name = std::string("nccl") + KIND_NAMES[static_cast<int>(collective.kind)];
  if (!comm) return ncclInvalidArgument;
  if (comm->aborted) fail("%s on a communicator after ncclCommAbort", name.c_str());
  if (!valid_op(collective.op)) return ncclInvalidArgument;
  check_buffers(collective, *comm, name.c_str());
  group_calls.push_back({comm, stream, collective});
  if (group_depth == 0) flush_group();
  return ncclSuccess;
}

// --- communicators from a unique id
struct UniqueId {
  char magic[8];
  int root;  // rank in MPI_COMM_WORLD that made it
  int number;
};
constexpr char ID_MAGIC[8] = "cudasim";

// Tells every member the world ranks of all, by way of the rank that made the id.
std::vector<int> exchange_members(const UniqueId& id, int size, int rank) {
  const MPI_Comm control = control_comm();
  const int to_root = 2 * id.number, from_root = 2 * id.number + 1;
  std::vector<int> members(static_cast<size_t>(size));
  int self[2] = {rank, world_rank()};
  MPI_Request request;
  if (world_rank() != id.root) {
    PMPI_Isend(self, 2, MPI_INT, id.root, to_root, control, &request);
    progress_until(&request);
    PMPI_Irecv(members.data(), size, MPI_INT, id.root, from_root, control, &request);
    progress_until(&request);
    return members;
  }
  members[static_cast<size_t>(rank)] = world_rank();
  for (int i = 1; i < size; ++i) {
    int other[2];
    PMPI_Irecv(other, 2, MPI_INT, MPI_ANY_SOURCE, to_root, control, &request);
    progress_until(&request);
    if (other[0] < 0 || other[0] >= size || other[0] == rank)
      fail("ncclCommInitRank: two members of the communicator call themselves rank %d", other[0]);
    members[static_cast<size_t>(other[0])] = other[1];
  }
  for (int member : members)
    if (member != world_rank()) {
      PMPI_Isend(members.data(), size, MPI_INT, member, from_root, control, &request);
      progress_until(&request);
    }
  return members;
}

void make_communicators(ncclComm& comm, const UniqueId& id, const std::vector<int>& members) {
  MPI_Group world, group;
  PMPI_Comm_group(control_comm(), &world);
  PMPI_Group_incl(world, comm.size, members.data(), &group);
  PMPI_Comm_create_group(control_comm(), group, id.number, &comm.data);
  PMPI_Comm_dup(comm.data, &comm.host);
  PMPI_Group_free(&group);
  PMPI_Group_free(&world);
}

}  // namespace
}  // namespace cudasim

using namespace cudasim;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = static_cast<int>(nccl_version());
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* result) {
  static int number = 0;
  static_assert(sizeof(UniqueId) <= sizeof(ncclUniqueId));
  UniqueId id{};
  std::memcpy(id.magic, ID_MAGIC, sizeof id.magic);
  id.root = world_rank();
  id.number = ++number;
  *result = {};
  std::memcpy(result, &id, sizeof id);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int size, ncclUniqueId bytes, int rank,
                                    ncclConfig_t*) {
  UniqueId id;
  std::memcpy(&id, &bytes, sizeof id);
  if (std::memcmp(id.magic, ID_MAGIC, sizeof id.magic) != 0 || rank < 0 || rank >= size)
    return ncclInvalidArgument;
  if (group_depth > 0) fail("ncclCommInitRank in a group is not modelled");
  if (size > 1 && control_comm() == MPI_COMM_NULL) fail("ncclCommInitRank before MPI_Init");
  auto* comm = new ncclComm;
  comm->rank = rank;
  comm->size = size;
  if (size > 1) make_communicators(*comm, id, exchange_members(id, size, rank));
  *result = comm;
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* result,
                           ncclConfig_t*) {
  *result = nullptr;
  if (parent->size == 1) {
    if (color != NCCL_SPLIT_NOCOLOR) *result = new ncclComm;
    return ncclSuccess;
  }
  progress_barrier(parent->host);
  MPI_Comm data;
  PMPI_Comm_split(parent->host, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key, &data);
  if (data == MPI_COMM_NULL) return ncclSuccess;
  auto* comm = new ncclComm;
  comm->data = data;
  PMPI_Comm_dup(data, &comm->host);
  PMPI_Comm_rank(data, &comm->rank);
  PMPI_Comm_size(data, &comm->size);
  *result = comm;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  ApiCall call;
  if (!comm->aborted) wait_for(*comm->chain);
  return ncclSuccess;
}

// The MPI communicators are left to MPI_Finalize: freeing them is collective, this call is not.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ApiCall call;
  if (comm->graphs.use_count() > 1 && !comm->aborted)
    fail("ncclCommDestroy of a communicator whose operations are in a graph: it waits for ever");
  for (const ncclWindow_vidmem* window : windows())
    if (window->comm == comm) fail("ncclCommDestroy of a communicator that still has windows");
  const OperationRef last = *comm->chain;
  if (last && !last->done && !comm->aborted) wait_for(last);
  delete comm;
  return ncclSuccess;
}

// Operations that have not completed end without result. The object stays: they still refer to it.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (environment("CUDASIM_NCCL_ABORT_HANGS", 0) != 0)
    for (;;) pause();
  ApiCall call;
  comm->aborted = true;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  ApiCall call;
  run_some();
  *error = comm->async_error;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t, int* device) {
  return cudaGetDevice(device) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// --- memory and windows
ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  ApiCall call;
  refuse_in_capture("ncclMemAlloc");
  *pointer = allocate(Space::device, bytes, NCCL_WIN_REQUIRED_ALIGNMENT);
  if (*pointer) nccl_memory().insert(*pointer);
  return *pointer ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* pointer) {
  for (const ncclWindow_vidmem* window : windows())
    if (window->base == pointer) fail("ncclMemFree of memory that is still a window");
  if (nccl_memory().erase(pointer) == 0) fail("ncclMemFree: %p is not of ncclMemAlloc", pointer);
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* base, size_t bytes, ncclWindow_t* window,
                                    int flags) {
  ApiCall call;
  if (flags & ~NCCL_WIN_COLL_SYMMETRIC) return ncclInvalidArgument;
  if (reinterpret_cast<uintptr_t>(base) % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
    fail("ncclCommWindowRegister: %p is not aligned to %d bytes", base,
         NCCL_WIN_REQUIRED_ALIGNMENT);
  check_device_range(base, bytes, "ncclCommWindowRegister");
  const Allocation* allocation = find_allocation(base);
  if (nccl_memory().count(allocation->base) == 0)
    fail("ncclCommWindowRegister: %p is not of ncclMemAlloc", base);
  if (comm->size > 1) {
    progress_barrier(comm->host);
    uint64_t range[2] = {bytes, ~uint64_t(bytes)};
    PMPI_Allreduce(MPI_IN_PLACE, range, 2, MPI_UINT64_T, MPI_MAX, comm->host);
    if (range[0] != ~range[1])
      fail("ncclCommWindowRegister: the ranks register windows of %zu and %zu bytes",
           static_cast<size_t>(range[0]), static_cast<size_t>(~range[1]));
  }
  *window = nullptr;  // as where the GPUs cannot map each other's memory
  if (environment("CUDASIM_NCCL_WINDOWS", 1) == 0) return ncclSuccess;
  *window = new ncclWindow_vidmem{comm, static_cast<char*>(base), bytes,
                                  (flags & NCCL_WIN_COLL_SYMMETRIC) != 0};
  windows().insert(*window);
  return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  if (window->comm != comm) return ncclInvalidArgument;
  windows().erase(window);
  delete window;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }

// --- collectives
ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  ApiCall call;
  if (group_depth == 0) return ncclInvalidUsage;
  if (--group_depth == 0) flush_group();
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return add_call(comm, stream,
                  {Kind::all_gather, static_cast<const char*>(send), static_cast<char*>(receive),
                   count, type, ncclSum, 0});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add_call(comm, stream,
                  {Kind::reduce_scatter, static_cast<const char*>(send),
                   static_cast<char*>(receive), count, type, op, 0});
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add_call(comm, stream,
                  {Kind::all_reduce, static_cast<const char*>(send), static_cast<char*>(receive),
                   count, type, op, 0});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  const void* source = comm && comm->rank == root ? send : receive;  // only the root's is read
  return add_call(comm, stream,
                  {Kind::broadcast, static_cast<const char*>(source), static_cast<char*>(receive),
                   count, type, ncclSum, root});
}

}  // extern "C"
