#include "comm/placement.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
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
  p.narrowest = world.own_cpus();
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

}  // namespace qshard
