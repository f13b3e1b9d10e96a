#include "comm/placement.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace qshard {

int job_cpus_of_node(const std::string& cpus_per_node, int node) {
  std::istringstream parts(cpus_per_node);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t times = part.find("(x");
    const int nodes = times == std::string::npos ? 1 : std::atoi(part.c_str() + times + 2);
    if (node < nodes) return std::max(0, std::atoi(part.c_str()));
    node -= nodes;
  }
  return 0;
}

Placement find_placement(const World& world) {
  Placement p;
  p.ranks = world.machine_size();
  p.allowed = world.cpus();
  p.machine = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  p.narrowest = static_cast<int>(world.own_cpus().size());
  QS_MPI(MPI_Allreduce(MPI_IN_PLACE, &p.narrowest, 1, MPI_INT, MPI_MIN, world.machine_comm()));
  p.job = world.job_cpus();
  return p;
}

std::string placement_warning(const Placement& p) {
  const int share = std::max(1, std::max(p.allowed, p.job) / p.ranks);
  if (p.allowed < p.ranks && p.machine > p.allowed)
    return fmt::format(
        "{} CPU(s) for {} ranks, which take turns, on a machine with {}: ask for more with sbatch "
        "--cpus-per-task and spread the ranks with srun --cpu-bind=cores (mpirun: --bind-to none)",
        p.allowed, p.ranks, p.machine);
  if (p.allowed < p.ranks)
    return fmt::format("{} CPU(s) for {} ranks, which take turns: sbatch --ntasks-per-node={}",
                       p.allowed, p.ranks, p.allowed);
  // Slurm may count two threads a core where ranks are bound to one.
  if (p.job > 2 * p.allowed)
    return fmt::format(
        "{} ranks may use {} of the {} CPUs that the job has on this machine: srun "
        "--cpus-per-task={}, which it does not take from sbatch (mpirun: --bind-to none)",
        p.ranks, p.allowed, p.job, share);
  if (p.narrowest < p.allowed / p.ranks)
    return fmt::format(
        "a rank may use {} CPU(s), its share of this node's {} is {}: bindings overlap, try srun "
        "--cpu-bind=cores --cpus-per-task={}",
        p.narrowest, p.allowed, share, share);
  return {};
}

std::vector<int> parse_cpu_list(const std::string& list) {
  std::vector<int> cpus;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0, last = 0;
    const int numbers = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (numbers == 1) last = first;
    if (numbers < 1 || first < 0 || last > 1 << 16) return {};
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

std::map<int, std::vector<int>> find_numa_nodes(const std::string& folder) {
  std::map<int, std::vector<int>> nodes;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    int node = 0;
    std::string list;
    if (std::sscanf(entry.path().filename().c_str(), "node%d", &node) == 1 &&
        std::getline(std::ifstream(entry.path() / "cpulist"), list))
      nodes[node] = parse_cpu_list(list);
  }
  return nodes;
}

std::string numa_warning(const std::vector<int>& cpus, const std::map<int, std::vector<int>>& nodes,
                         int gpu_node) {
  std::vector<int> used;
  size_t largest = 0;
  for (const auto& [node, its_cpus] : nodes) {
    largest = std::max(largest, its_cpus.size());
    if (std::find_first_of(cpus.begin(), cpus.end(), its_cpus.begin(), its_cpus.end()) !=
        cpus.end())
      used.push_back(node);
  }
  if (used.empty()) return {};
  if (gpu_node >= 0 && std::find(used.begin(), used.end(), gpu_node) == used.end())
    return fmt::format(
        "its GPU is at NUMA node {}, its CPUs are at {}: srun --gpu-bind=closest, or --cpu-bind="
        "map_ldom:… with the NUMA node of each rank's GPU (nvidia-smi topo -m)",
        gpu_node, fmt::join(used, ","));
  size_t all = 0;
  for (const auto& [node, its_cpus] : nodes) all += its_cpus.size();
  if (gpu_node < 0 && used.size() > 1 && cpus.size() <= largest && cpus.size() < all)
    return fmt::format(
        "its {} CPUs are at the NUMA nodes {}, of which one has {}: srun --cpu-bind=cores "
        "--distribution=block:block (mpirun: --map-by slot:PE={} --bind-to core)",
        cpus.size(), fmt::join(used, ","), largest, cpus.size());
  return {};
}

}  // namespace qshard
