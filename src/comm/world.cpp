#include "comm/world.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "comm/duplicate.h"
#include "comm/placement.h"

namespace qshard {
namespace {

// Linux kernels are built for at most 8192 CPUs (NR_CPUS on x86-64); a smaller mask is refused.
constexpr size_t kMaxCpus = 8192;
constexpr size_t kMaskBytes = kMaxCpus / 8;

std::vector<uint8_t> affinity_mask() {
  std::vector<uint8_t> mask(kMaskBytes);
  if (sched_getaffinity(0, kMaskBytes, reinterpret_cast<cpu_set_t*>(mask.data())) != 0)
    fail("sched_getaffinity failed: {}", std::strerror(errno));
  return mask;
}

std::map<std::string, std::string> launch_environment() {
  std::map<std::string, std::string> found;
  for (const char* name : {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_PROCID",
                           "SLURM_JOB_CPUS_PER_NODE", "SLURM_NODEID", "OMPI_COMM_WORLD_SIZE",
                           "PMI_SIZE", "QSHARD_ALLOW_SINGLETON", "QSHARD_RANKS_PER_NODE"})
    if (const char* value = std::getenv(name)) found[name] = value;
  return found;
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  if (gethostname(name, sizeof name - 1) != 0) return "unknown-host";
  return name;
}

int ranks_per_node_of(const std::map<std::string, std::string>& environment) {
  const auto found = environment.find("QSHARD_RANKS_PER_NODE");
  if (found == environment.end()) return 0;
  const int ranks = std::atoi(found->second.c_str());
  if (ranks < 1) fail_usage("QSHARD_RANKS_PER_NODE={}: expected 1 or more", found->second);
  return ranks;
}

MPI_Comm split_comm(MPI_Comm comm, int color, int key) {
  MPI_Comm part = MPI_COMM_NULL;
  QS_MPI(MPI_Comm_split(comm, color, key, &part));
  QS_MPI(MPI_Comm_set_errhandler(part, MPI_ERRORS_RETURN));
  return part;
}

// values[i] = the combination, in rank order, of element i of each rank's n values.
template <typename T, typename Combine>
void combine_in_rank_order(const std::vector<T>& all, T* values, int n, Combine combine) {
  for (int i = 0; i < n; ++i) {
    T total = all[i];
    for (size_t at = n + i; at < all.size(); at += n) total = combine(total, all[at]);
    values[i] = total;
  }
}

}  // namespace

std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return fmt::format("error {}", code);
  return std::string(text, length);
}

std::string broken_launch(const std::map<std::string, std::string>& environment, int mpi_size) {
  auto number = [&](const char* name) {
    auto it = environment.find(name);
    return it == environment.end() ? -1 : std::atoi(it->second.c_str());
  };
  if (mpi_size > 1 || number("QSHARD_ALLOW_SINGLETON") == 1) return {};
  // mpirun's children: in an allocation SLURM_* describe the job or mpirun's own daemons. srun's
  // PMI-2 plug-in sets PMI_SIZE too, but to the number of tasks.
  if (number("OMPI_COMM_WORLD_SIZE") >= 1 || number("PMI_SIZE") == 1) return {};
  // A batch script has SLURM_NTASKS and SLURM_PROCID=0 but no step: started by hand in there, one
  // rank is what was asked for.
  const bool in_step = environment.count("SLURM_STEP_ID") || number("SLURM_PROCID") > 0;
  int tasks = number("SLURM_STEP_NUM_TASKS");
  if (tasks < 0 && in_step) tasks = number("SLURM_NTASKS");
  if (tasks <= 1) return {};
  return fmt::format(
      "Slurm started {} tasks (this is task {}), but MPI sees a world of 1: each task would run "
      "alone. srun and the MPI library do not speak the same start protocol. List srun's with "
      "`srun --mpi=list` and choose one, e.g. `srun --mpi=pmix`, or use mpirun inside the "
      "allocation. QSHARD_ALLOW_SINGLETON=1 runs independent copies on purpose.",
      tasks, std::max(0, number("SLURM_PROCID")));
}

World::World(int* argc, char*** argv) : host_(host_name()) {
  const auto environment =
      launch_environment();  // before MPI_Init, which sets variables of its own
  int provided = MPI_THREAD_SINGLE;
  QS_MPI(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided));
  QS_CHECK(provided >= MPI_THREAD_FUNNELED,
           "MPI offers thread level {}, expected at least MPI_THREAD_FUNNELED ({}): use an MPI "
           "library built with thread support",
           provided, static_cast<int>(MPI_THREAD_FUNNELED));
  threads_may_call_ = provided >= MPI_THREAD_MULTIPLE;
  comm_ = qshard::duplicate(MPI_COMM_WORLD);
  QS_MPI(MPI_Comm_rank(comm_, &rank_));
  QS_MPI(MPI_Comm_size(comm_, &size_));
  const std::string wrong = broken_launch(environment, size_);
  if (!wrong.empty()) fail_usage("{}", wrong);
  if (environment.count("SLURM_JOB_CPUS_PER_NODE") && environment.count("SLURM_NODEID"))
    job_cpus_ = job_cpus_of_node(environment.at("SLURM_JOB_CPUS_PER_NODE"),
                                 std::atoi(environment.at("SLURM_NODEID").c_str()));
  find_machine();
  const int per_node = ranks_per_node_of(environment);
  find_node(machine_comm_, per_node > 0 ? machine_rank_ / per_node : 0);
}

void World::find_machine() {
  QS_MPI(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine_comm_));
  QS_MPI(MPI_Comm_set_errhandler(machine_comm_, MPI_ERRORS_RETURN));
  QS_MPI(MPI_Comm_rank(machine_comm_, &machine_rank_));
  QS_MPI(MPI_Comm_size(machine_comm_, &machine_size_));
  std::vector<uint8_t> mask = affinity_mask();
  for (size_t cpu = 0; cpu < kMaxCpus; ++cpu)
    if (CPU_ISSET_S(cpu, kMaskBytes, reinterpret_cast<cpu_set_t*>(mask.data())))
      own_cpus_.push_back(static_cast<int>(cpu));
  QS_MPI(MPI_Allreduce(MPI_IN_PLACE, mask.data(), static_cast<int>(mask.size()), MPI_UINT8_T,
                       MPI_BOR, machine_comm_));
  cpus_ = CPU_COUNT_S(kMaskBytes, reinterpret_cast<cpu_set_t*>(mask.data()));
}

// The ranks of this world on this node: those of `within` that give this color.
void World::find_node(MPI_Comm within, int color) {
  node_comm_ = split_comm(within, color, rank_);
  QS_MPI(MPI_Comm_rank(node_comm_, &node_rank_));
  QS_MPI(MPI_Comm_size(node_comm_, &node_size_));
  int64_t leaders = node_rank_ == 0;
  all_reduce_sum(&leaders, 1);
  nodes_ = static_cast<int>(leaders);
}

std::vector<int> World::nodes_by_rank() const {
  int lowest = rank_;  // of this rank's node
  QS_MPI(MPI_Bcast(&lowest, 1, MPI_INT, 0, node_comm_));
  const int64_t own = lowest;
  std::map<int64_t, int> number;
  std::vector<int> nodes;
  for (const int64_t first : all_gather(&own, 1))
    nodes.push_back(number.emplace(first, static_cast<int>(number.size())).first->second);
  return nodes;
}

std::unique_ptr<World> World::duplicate() const {
  auto copy = std::unique_ptr<World>(new World(*this));
  copy->in_background_ = true;
  copy->comm_ = qshard::duplicate(comm_);
  copy->node_comm_ = qshard::duplicate(node_comm_);
  copy->machine_comm_ = MPI_COMM_NULL;
  return copy;
}

std::unique_ptr<World> World::split(int color) const {
  auto part = std::unique_ptr<World>(new World(*this));
  part->comm_ = split_comm(comm_, color, rank_);
  QS_MPI(MPI_Comm_rank(part->comm_, &part->rank_));
  QS_MPI(MPI_Comm_size(part->comm_, &part->size_));
  part->find_node(node_comm_, color);
  return part;
}

std::unique_ptr<World> World::alone() {
  auto world = std::unique_ptr<World>(new World);
  world->host_ = host_name();
  int provided = MPI_THREAD_SINGLE;
  QS_MPI(MPI_Query_thread(&provided));
  world->threads_may_call_ = provided >= MPI_THREAD_MULTIPLE;
  QS_MPI(MPI_Comm_dup(MPI_COMM_SELF, &world->comm_));
  QS_MPI(MPI_Comm_set_errhandler(world->comm_, MPI_ERRORS_RETURN));
  world->find_machine();
  world->find_node(world->machine_comm_, 0);
  return world;
}

std::unique_ptr<World> World::imagined(int ranks, int ranks_per_node) {
  auto world = std::unique_ptr<World>(new World);
  world->size_ = ranks;
  world->node_size_ = world->machine_size_ = std::min(ranks, ranks_per_node);
  world->nodes_ = (ranks + ranks_per_node - 1) / ranks_per_node;
  return world;
}

void World::finalize() {
  QS_MPI(MPI_Comm_free(&node_comm_));
  QS_MPI(MPI_Comm_free(&machine_comm_));
  QS_MPI(MPI_Comm_free(&comm_));
  QS_MPI(MPI_Finalize());
}

void World::abort(int code) noexcept {
  MPI_Abort(MPI_COMM_WORLD, code);
  std::_Exit(code);
}

std::string World::mpi_version() const {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  QS_MPI(MPI_Get_library_version(text, &length));
  std::string version(text, length);  // "Open MPI v4.1.4, package: …" or "MPICH Version:\t4.0\n…"
  version.resize(std::min(version.find_first_of(",\n"), version.size()));
  std::replace(version.begin(), version.end(), '\t', ' ');
  return version;
}

void World::complete(MPI_Request request) const {
  if (!in_background_) {
    QS_MPI(MPI_Wait(&request, MPI_STATUS_IGNORE));
    return;
  }
  for (int done = 0;;) {
    QS_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    if (done) return;
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
}

void World::barrier() const {
  MPI_Request request;
  QS_MPI(MPI_Ibarrier(comm_, &request));
  complete(request);
}

template <typename T>
std::vector<T> World::all_gather(const T* values, int n) const {
  const MPI_Datatype type = std::is_same_v<T, double> ? MPI_DOUBLE : MPI_INT64_T;
  std::vector<T> all(static_cast<size_t>(n) * size_);
  MPI_Request request;
  QS_MPI(MPI_Iallgather(values, n, type, all.data(), n, type, comm_, &request));
  complete(request);
  return all;
}

void World::all_reduce_sum(double* values, int n) const {
  combine_in_rank_order(all_gather(values, n), values, n, std::plus<double>());
}

void World::all_reduce_sum(int64_t* values, int n) const {
  combine_in_rank_order(all_gather(values, n), values, n, std::plus<int64_t>());
}

void World::all_reduce_max(double* values, int n) const {
  combine_in_rank_order(all_gather(values, n), values, n, [](double a, double b) {
    return std::isnan(a) || std::isnan(b) ? std::nan("") : std::max(a, b);
  });
}

void World::broadcast(void* data, int64_t bytes, int root) const {
  constexpr int64_t kPart = int64_t{1} << 30;  // MPI counts are int
  for (int64_t done = 0; done < bytes; done += kPart) {
    MPI_Request request;
    QS_MPI(MPI_Ibcast(static_cast<char*>(data) + done,
                      static_cast<int>(std::min(kPart, bytes - done)), MPI_CHAR, root, comm_,
                      &request));
    complete(request);
  }
}

std::string World::broadcast(const std::string& text, int root) const {
  int64_t length = static_cast<int64_t>(text.size());
  broadcast(&length, sizeof length, root);
  std::string result = rank_ == root ? text : std::string(length, '\0');
  broadcast(result.data(), length, root);
  return result;
}

std::vector<std::string> World::gather(const std::string& text) const {
  const int64_t length = static_cast<int64_t>(text.size());
  std::vector<int> counts, starts;
  int64_t total = 0;
  for (int64_t n : all_gather(&length, 1)) {
    starts.push_back(static_cast<int>(total));
    counts.push_back(static_cast<int>(n));
    total += n;
    QS_CHECK(total <= INT_MAX, "gathering {} bytes of text from {} ranks: at most {}", total, size_,
             INT_MAX);
  }
  std::string all(rank_ == 0 ? total : 0, '\0');
  MPI_Request request;
  QS_MPI(MPI_Igatherv(text.data(), static_cast<int>(length), MPI_CHAR, all.data(), counts.data(),
                      starts.data(), MPI_CHAR, 0, comm_, &request));
  complete(request);
  std::vector<std::string> texts;
  if (rank_ == 0)
    for (int r = 0; r < size_; ++r) texts.push_back(all.substr(starts[r], counts[r]));
  return texts;
}

// The texts that are not empty, up to four of them.
static std::string failures_of_ranks(const std::vector<std::string>& texts) {
  constexpr int kShown = 4;
  std::string all;
  int failures = 0;
  for (const std::string& text : texts)
    if (!text.empty() && ++failures <= kShown) all += (all.empty() ? "" : "; ") + text;
  if (failures > kShown) all += fmt::format("; and {} more ranks", failures - kShown);
  return all;
}

void collectively(const World& world, const std::function<void()>& fn) {
  std::string message;
  int code = kExitFailed;
  bool failed = true;
  try {
    fn();
    failed = false;
  } catch (const Error& error) {
    message = error.what();
    code = error.code;
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "an exception of unknown type";
  }
  double first = failed ? -world.rank() : -world.size();  // its maximum: the lowest failing rank
  world.all_reduce_max(&first, 1);
  const int root = static_cast<int>(-first);
  if (root == world.size()) return;

  const std::string agreed = world.broadcast(message, root);
  int64_t counts[2] = {world.rank() == root ? code : 0, failed && message == agreed};
  world.all_reduce_sum(counts, 2);
  const auto [agreed_code, alike] = counts;
  if (alike == world.size()) throw AgreedError(agreed, static_cast<int>(agreed_code));
  const auto texts = world.gather(
      failed ? fmt::format("rank {} on {}: {}", world.rank(), world.host(), message) : "");
  throw AgreedError(world.broadcast(failures_of_ranks(texts), 0), static_cast<int>(agreed_code));
}

}  // namespace qshard
