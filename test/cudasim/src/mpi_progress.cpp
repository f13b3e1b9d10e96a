#include "mpi_progress.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include "memory.h"
#include "report.h"
#include "scheduler.h"
#include "tracker.h"

namespace cudasim {
namespace {

MPI_Comm control = MPI_COMM_NULL;

// Whether MPI may be handed device pointers.
bool cuda_aware() {
  static const bool aware = environment("CUDASIM_CUDA_AWARE", 0) != 0;
  return aware;
}

// Calls with device memory that the host has not seen the end of: MPI touches it in any call.
std::set<MPI_Request>& device_requests() {
  static auto* instance = new std::set<MPI_Request>;
  return *instance;
}

// Blocking calls with device memory that have not returned.
int device_calls = 0;

// Held around a blocking MPI call. Other threads go on meanwhile: two of them may be in calls of
// two communicators, on another rank in the other order.
class BlockingMpiCall {
 public:
  BlockingMpiCall(const void* send, const void* receive)
      : device_(is_device_address(send) || is_device_address(receive)) {
    if (!device_) return;
    ApiCall call;
    ++device_calls;
    open_device_memory();
  }
  ~BlockingMpiCall() {
    if (!device_) return;
    ApiCall call;
    --device_calls;
  }

 private:
  const bool device_;
};

size_t bytes_of(int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  return static_cast<size_t>(count) * static_cast<size_t>(size);
}

void check_device_buffer(const char* name, const void* buffer, size_t bytes) {
  if (buffer == MPI_IN_PLACE || !is_device_address(buffer)) return;
  if (!cuda_aware())
    fail("%s with device memory, but this MPI is not CUDA-aware (CUDASIM_CUDA_AWARE=1 makes it so)",
         name);
  check_device_range(buffer, bytes, name);
  open_device_memory();
}

// The program hands MPI a buffer: device memory only where MPI is CUDA-aware; device and pinned
// memory only after the host has waited for whatever wrote or reads it.
void note_buffers(const char* name, const void* send, size_t send_bytes, void* receive,
                  size_t receive_bytes) {
  check_device_buffer(name, send, send_bytes);
  check_device_buffer(name, receive, receive_bytes);
  run_on_host_lane(name, [&] {
    if (send != MPI_IN_PLACE) track_operation_read(send, send_bytes);
    if (receive != MPI_IN_PLACE) track_operation_write(receive, receive_bytes);
  });
}

// What MPI writes by itself until the host sees that a call is complete.
struct Receive {
  std::string name;
  void* buffer;
  size_t bytes;
};

std::map<MPI_Request, Receive>& receives() {
  static auto* instance = new std::map<MPI_Request, Receive>;
  return *instance;
}

void note_start(MPI_Request request, const char* name, const void* send, void* buffer,
                size_t bytes) {
  if (request == MPI_REQUEST_NULL) return;
  if (is_device_address(send) || is_device_address(buffer)) device_requests().insert(request);
  if (in_arena(buffer)) receives()[request] = {name, buffer, bytes};
}

// The host has seen the end of these requests: what reads their buffers comes after this.
void note_completion(const std::vector<MPI_Request>& requests) {
  for (MPI_Request request : requests) {
    device_requests().erase(request);
    const auto found = receives().find(request);
    if (found == receives().end()) continue;
    const Receive receive = found->second;
    receives().erase(found);
    run_on_host_lane(receive.name, [&] { track_operation_write(receive.buffer, receive.bytes); });
  }
}

// Blocking calls that name no communicator: nothing may be left that another rank could wait for.
void drain() {
  ApiCall call;
  wait_for_all();
}

int size_of(MPI_Comm comm) {
  int size = 1;
  PMPI_Comm_size(comm, &size);
  return size;
}

int after_init(int error) {
  if (error == MPI_SUCCESS) PMPI_Comm_dup(MPI_COMM_WORLD, &control);
  return error;
}

}  // namespace

MPI_Comm control_comm() { return control; }

bool mpi_holds_device_memory() { return device_calls > 0 || !device_requests().empty(); }

void check_receives(const void* address, size_t bytes, const char* user) {
  const auto* begin = static_cast<const char*>(address);
  for (const auto& [request, receive] : receives()) {
    const auto* buffer = static_cast<const char*>(receive.buffer);
    if (begin < buffer + receive.bytes && buffer < begin + bytes)
      fail("%s touches what %s may still be receiving: the host has not seen its end; %s", user,
           receive.name.c_str(), describe_address(address));
  }
}

int progress_until(MPI_Request* request, MPI_Status* status) {
  for (;;) {
    ApiCall call;
    int done = 0;
    const MPI_Request tested = *request;
    const int error = PMPI_Test(request, &done, status);
    if (done) note_completion({tested});
    if (error != MPI_SUCCESS || done) return error;
    step();
    pause_between_polls();
  }
}

int progress_barrier(MPI_Comm comm) {
  int inter = 0;
  PMPI_Comm_test_inter(comm, &inter);
  if (inter) fail("intercommunicators are not modelled");
  if (size_of(comm) == 1) return MPI_SUCCESS;
  MPI_Request request;
  const int error = PMPI_Ibarrier(comm, &request);
  return error != MPI_SUCCESS ? error : progress_until(&request);
}

}  // namespace cudasim

using namespace cudasim;

// A collective call: when all ranks have entered it, none waits for a device any more.
#define COLLECTIVE(name, comm, parameters, arguments) \
  int MPI_##name parameters {                         \
    const int error = progress_barrier(comm);         \
    if (error != MPI_SUCCESS) return error;           \
    return PMPI_##name arguments;                     \
  }

#define DRAINED(name, parameters, arguments) \
  int MPI_##name parameters {                \
    drain();                                 \
    return PMPI_##name arguments;            \
  }

extern "C" {

int MPI_Init(int* argc, char*** argv) { return after_init(PMPI_Init(argc, argv)); }
int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  return after_init(PMPI_Init_thread(argc, argv, required, provided));
}
int MPI_Finalize() {
  progress_barrier(control);
  PMPI_Comm_free(&control);
  return PMPI_Finalize();
}

int MPIX_Query_cuda_support() { return cuda_aware(); }

// --- collective calls
COLLECTIVE(Barrier, comm, (MPI_Comm comm), (comm))
COLLECTIVE(Bcast, comm, (void* data, int n, MPI_Datatype t, int root, MPI_Comm comm),
           (data, n, t, root, comm))
COLLECTIVE(Reduce, comm,
           (const void* s, void* r, int n, MPI_Datatype t, MPI_Op op, int root, MPI_Comm comm),
           (s, r, n, t, op, root, comm))
COLLECTIVE(Gather, comm,
           (const void* s, int sn, MPI_Datatype st, void* r, int rn, MPI_Datatype rt, int root,
            MPI_Comm comm),
           (s, sn, st, r, rn, rt, root, comm))
COLLECTIVE(Gatherv, comm,
           (const void* s, int sn, MPI_Datatype st, void* r, const int* rn, const int* at,
            MPI_Datatype rt, int root, MPI_Comm comm),
           (s, sn, st, r, rn, at, rt, root, comm))
COLLECTIVE(Scatter, comm,
           (const void* s, int sn, MPI_Datatype st, void* r, int rn, MPI_Datatype rt, int root,
            MPI_Comm comm),
           (s, sn, st, r, rn, rt, root, comm))
COLLECTIVE(Scatterv, comm,
           (const void* s, const int* sn, const int* at, MPI_Datatype st, void* r, int rn,
            MPI_Datatype rt, int root, MPI_Comm comm),
           (s, sn, at, st, r, rn, rt, root, comm))
COLLECTIVE(Allgatherv, comm,
           (const void* s, int sn, MPI_Datatype st, void* r, const int* rn, const int* at,
            MPI_Datatype rt, MPI_Comm comm),
           (s, sn, st, r, rn, at, rt, comm))
COLLECTIVE(Alltoall, comm,
           (const void* s, int sn, MPI_Datatype st, void* r, int rn, MPI_Datatype rt,
            MPI_Comm comm),
           (s, sn, st, r, rn, rt, comm))
COLLECTIVE(Alltoallv, comm,
           (const void* s, const int* sn, const int* sat, MPI_Datatype st, void* r, const int* rn,
            const int* rat, MPI_Datatype rt, MPI_Comm comm),
           (s, sn, sat, st, r, rn, rat, rt, comm))
COLLECTIVE(Reduce_scatter, comm,
           (const void* s, void* r, const int* n, MPI_Datatype t, MPI_Op op, MPI_Comm comm),
           (s, r, n, t, op, comm))
COLLECTIVE(Scan, comm, (const void* s, void* r, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm),
           (s, r, n, t, op, comm))
COLLECTIVE(Exscan, comm, (const void* s, void* r, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm),
           (s, r, n, t, op, comm))
COLLECTIVE(Comm_dup, comm, (MPI_Comm comm, MPI_Comm* result), (comm, result))
COLLECTIVE(Comm_split, comm, (MPI_Comm comm, int color, int key, MPI_Comm* result),
           (comm, color, key, result))
COLLECTIVE(Comm_split_type, comm,
           (MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* result),
           (comm, type, key, info, result))
COLLECTIVE(Comm_create, comm, (MPI_Comm comm, MPI_Group group, MPI_Comm* result),
           (comm, group, result))
COLLECTIVE(Win_allocate, comm,
           (MPI_Aint bytes, int unit, MPI_Info info, MPI_Comm comm, void* base, MPI_Win* win),
           (bytes, unit, info, comm, base, win))
COLLECTIVE(Win_allocate_shared, comm,
           (MPI_Aint bytes, int unit, MPI_Info info, MPI_Comm comm, void* base, MPI_Win* win),
           (bytes, unit, info, comm, base, win))
COLLECTIVE(Win_create, comm,
           (void* base, MPI_Aint bytes, int unit, MPI_Info info, MPI_Comm comm, MPI_Win* win),
           (base, bytes, unit, info, comm, win))
COLLECTIVE(File_open, comm,
           (MPI_Comm comm, const char* path, int mode, MPI_Info info, MPI_File* file),
           (comm, path, mode, info, file))

int MPI_Allgather(const void* s, int sn, MPI_Datatype st, void* r, int rn, MPI_Datatype rt,
                  MPI_Comm comm) {
  const int error = progress_barrier(comm);
  if (error != MPI_SUCCESS) return error;
  {
    ApiCall call;
    note_buffers("MPI_Allgather", s, bytes_of(sn, st), r,
                 bytes_of(rn, rt) * static_cast<size_t>(size_of(comm)));
  }
  const BlockingMpiCall blocking(s, r);
  return PMPI_Allgather(s, sn, st, r, rn, rt, comm);
}

int MPI_Reduce_scatter_block(const void* s, void* r, int n, MPI_Datatype t, MPI_Op op,
                             MPI_Comm comm) {
  const int error = progress_barrier(comm);
  if (error != MPI_SUCCESS) return error;
  {
    ApiCall call;
    note_buffers("MPI_Reduce_scatter_block", s, bytes_of(n, t) * static_cast<size_t>(size_of(comm)),
                 r, bytes_of(n, t));
  }
  const BlockingMpiCall blocking(s, r);
  return PMPI_Reduce_scatter_block(s, r, n, t, op, comm);
}

int MPI_Allreduce(const void* s, void* r, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm) {
  const int error = progress_barrier(comm);
  if (error != MPI_SUCCESS) return error;
  {
    ApiCall call;
    note_buffers("MPI_Allreduce", s, bytes_of(n, t), r, bytes_of(n, t));
  }
  const BlockingMpiCall blocking(s, r);
  return PMPI_Allreduce(s, r, n, t, op, comm);
}

// --- calls that start something. They do not block; device buffers are checked.
int MPI_Iallgather(const void* s, int sn, MPI_Datatype st, void* r, int rn, MPI_Datatype rt,
                   MPI_Comm comm, MPI_Request* request) {
  ApiCall call;
  note_buffers("MPI_Iallgather", s, bytes_of(sn, st), r,
               bytes_of(rn, rt) * static_cast<size_t>(size_of(comm)));
  const int error = PMPI_Iallgather(s, sn, st, r, rn, rt, comm, request);
  note_start(*request, "MPI_Iallgather", s, r,
             bytes_of(rn, rt) * static_cast<size_t>(size_of(comm)));
  return error;
}

int MPI_Ialltoall(const void* s, int sn, MPI_Datatype st, void* r, int rn, MPI_Datatype rt,
                  MPI_Comm comm, MPI_Request* request) {
  ApiCall call;
  const auto ranks = static_cast<size_t>(size_of(comm));
  note_buffers("MPI_Ialltoall", s, bytes_of(sn, st) * ranks, r, bytes_of(rn, rt) * ranks);
  const int error = PMPI_Ialltoall(s, sn, st, r, rn, rt, comm, request);
  note_start(*request, "MPI_Ialltoall", s, r, bytes_of(rn, rt) * ranks);
  return error;
}

int MPI_Ireduce_scatter_block(const void* s, void* r, int n, MPI_Datatype t, MPI_Op op,
                              MPI_Comm comm, MPI_Request* request) {
  ApiCall call;
  note_buffers("MPI_Ireduce_scatter_block", s, bytes_of(n, t) * static_cast<size_t>(size_of(comm)),
               r, bytes_of(n, t));
  const int error = PMPI_Ireduce_scatter_block(s, r, n, t, op, comm, request);
  note_start(*request, "MPI_Ireduce_scatter_block", s, r, bytes_of(n, t));
  return error;
}

int MPI_Iallreduce(const void* s, void* r, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm,
                   MPI_Request* request) {
  ApiCall call;
  note_buffers("MPI_Iallreduce", s, bytes_of(n, t), r, bytes_of(n, t));
  const int error = PMPI_Iallreduce(s, r, n, t, op, comm, request);
  note_start(*request, "MPI_Iallreduce", s, r, bytes_of(n, t));
  return error;
}

int MPI_Isend(const void* data, int n, MPI_Datatype t, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  ApiCall call;
  note_buffers("MPI_Isend", data, bytes_of(n, t), MPI_IN_PLACE, 0);
  const int error = PMPI_Isend(data, n, t, to, tag, comm, request);
  note_start(*request, "MPI_Isend", data, nullptr, 0);
  return error;
}

int MPI_Irecv(void* data, int n, MPI_Datatype t, int from, int tag, MPI_Comm comm,
              MPI_Request* request) {
  ApiCall call;
  note_buffers("MPI_Irecv", MPI_IN_PLACE, 0, data, bytes_of(n, t));
  const int error = PMPI_Irecv(data, n, t, from, tag, comm, request);
  note_start(*request, "MPI_Irecv", nullptr, data, bytes_of(n, t));
  return error;
}

int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
  ApiCall call;
  step();
  const MPI_Request tested = *request;
  const int error = PMPI_Test(request, done, status);
  if (*done)
    note_completion({tested});
  else
    pause_between_polls();
  return error;
}

int MPI_Testall(int n, MPI_Request* requests, int* done, MPI_Status* statuses) {
  ApiCall call;
  step();
  const std::vector<MPI_Request> tested(requests, requests + n);
  const int error = PMPI_Testall(n, requests, done, statuses);
  if (*done)
    note_completion(tested);
  else
    pause_between_polls();
  return error;
}

// --- point-to-point calls and waits
int MPI_Send(const void* data, int n, MPI_Datatype t, int to, int tag, MPI_Comm comm) {
  MPI_Request request;
  const int error = MPI_Isend(data, n, t, to, tag, comm, &request);
  return error != MPI_SUCCESS ? error : progress_until(&request);
}

int MPI_Recv(void* data, int n, MPI_Datatype t, int from, int tag, MPI_Comm comm,
             MPI_Status* status) {
  MPI_Request request;
  const int error = MPI_Irecv(data, n, t, from, tag, comm, &request);
  return error != MPI_SUCCESS ? error : progress_until(&request, status);
}

int MPI_Sendrecv(const void* s, int sn, MPI_Datatype st, int to, int stag, void* r, int rn,
                 MPI_Datatype rt, int from, int rtag, MPI_Comm comm, MPI_Status* status) {
  MPI_Request sending, receiving;
  int error = MPI_Irecv(r, rn, rt, from, rtag, comm, &receiving);
  if (error == MPI_SUCCESS) error = MPI_Isend(s, sn, st, to, stag, comm, &sending);
  if (error == MPI_SUCCESS) error = progress_until(&sending);
  return error != MPI_SUCCESS ? error : progress_until(&receiving, status);
}

int MPI_Probe(int from, int tag, MPI_Comm comm, MPI_Status* status) {
  for (;;) {
    ApiCall call;
    int found = 0;
    const int error = PMPI_Iprobe(from, tag, comm, &found, status);
    if (error != MPI_SUCCESS || found) return error;
    step();
    pause_between_polls();
  }
}

int MPI_Wait(MPI_Request* request, MPI_Status* status) { return progress_until(request, status); }

int MPI_Waitall(int n, MPI_Request* requests, MPI_Status* statuses) {
  for (int i = 0; i < n; ++i) {
    MPI_Status* status = statuses == MPI_STATUSES_IGNORE ? MPI_STATUS_IGNORE : &statuses[i];
    const int error = progress_until(&requests[i], status);
    if (error != MPI_SUCCESS) return error;
  }
  return MPI_SUCCESS;
}

int MPI_Waitany(int n, MPI_Request* requests, int* index, MPI_Status* status) {
  for (;;) {
    ApiCall call;
    const std::vector<MPI_Request> tested(requests, requests + n);
    int done = 0;
    const int error = PMPI_Testany(n, requests, index, &done, status);
    if (done && *index != MPI_UNDEFINED) note_completion({tested[static_cast<size_t>(*index)]});
    if (error != MPI_SUCCESS || done) return error;
    step();
    pause_between_polls();
  }
}

// --- windows and files
DRAINED(Win_fence, (int assertion, MPI_Win win), (assertion, win))
DRAINED(Win_free, (MPI_Win * win), (win))
DRAINED(File_close, (MPI_File * file), (file))
DRAINED(File_set_size, (MPI_File file, MPI_Offset bytes), (file, bytes))
DRAINED(File_write_at_all,
        (MPI_File file, MPI_Offset at, const void* data, int n, MPI_Datatype t, MPI_Status* status),
        (file, at, data, n, t, status))
DRAINED(File_read_at_all,
        (MPI_File file, MPI_Offset at, void* data, int n, MPI_Datatype t, MPI_Status* status),
        (file, at, data, n, t, status))
}
