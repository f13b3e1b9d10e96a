#!/usr/bin/env bash
# Runs a program on CPU ranks of this machine: scripts/mpirun.sh -n 4 build/qshard train …
#
# All arguments go to mpirun as they are. Settings are made in the environment, so that they hold
# for Open MPI 4 (OMPI_*) and 5 (PRTE_*) and mean nothing to MPICH; one that is already set is kept.
# MPIRUN names another launcher. Not for GPU or multi-node runs: those want binding and real slots.
set -euo pipefail

default() { [ -n "${!1+set}" ] || export "$1=$2"; }

ranks=1
for ((i = 1; i < $#; i++)); do
  case "${!i}" in
    -n | -np | -c | --np)
      next=$((i + 1))
      ranks=${!next}
      break
      ;;
  esac
done

# Allowed for any number of ranks: the slots that Open MPI counts are cores, or the tasks of a Slurm
# allocation, which may be one on a machine with many cores.
default OMPI_MCA_rmaps_base_oversubscribe 1
default PRTE_MCA_rmaps_default_mapping_policy :oversubscribe

# Open MPI binds 1 or 2 ranks to one core each, whatever their threads, and launches that run side
# by side to the same cores. The program gives each rank its share of the allowed CPUs as threads.
default OMPI_MCA_hwloc_base_binding_policy none
default PRTE_MCA_hwloc_default_binding_policy none

# Between ranks of one node Open MPI 5 asks for routes that it does not find, and says so once a pair
# (Debian 13). It needs none of them here: compare addresses instead.
default OMPI_MCA_reachable weighted

# A rank that spins while it waits takes the core from the rank it waits for.
[[ $ranks =~ ^[0-9]+$ ]] && [ "$ranks" -gt "$(nproc)" ] && default OMPI_MCA_mpi_yield_when_idle 1

# mpirun refuses uid 0 unless told twice; in containers there is often no other user.
if [ "$(id -u)" = 0 ]; then
  default OMPI_ALLOW_RUN_AS_ROOT 1
  default OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
fi

# Large messages are read from the other process's memory. Containers and hardened kernels often
# forbid that call, and Open MPI then prints an error for each: copy through shared memory instead.
read_denied() {
  [ -e /.dockerenv ] || [ -e /run/.containerenv ] ||
    grep -q '^Seccomp:[[:space:]]*2' /proc/self/status ||
    grep -q '^[23]' /proc/sys/kernel/yama/ptrace_scope
} 2>/dev/null
if read_denied; then
  default OMPI_MCA_btl_vader_single_copy_mechanism none
  default OMPI_MCA_smsc ^cma
fi

# Containers give /dev/shm 64 MB by default, and a window that does not fit ends in a bus error.
shm_kib=$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1 || true)
if [ "${shm_kib:-0}" -lt 1048576 ]; then
  default OMPI_MCA_osc_sm_backing_directory "${TMPDIR:-/tmp}"
  default OMPI_MCA_btl_vader_backing_directory "${TMPDIR:-/tmp}"
fi

# mpirun answers SIGTERM by killing the ranks a second later, too soon to save anything; what it
# passes on as it is, is SIGUSR1. The program takes both as "stop after this step, save".
"${MPIRUN:-mpirun}" "$@" <&0 &
child=$!
pass_on() { signalled=1; kill -s "$1" "$child" 2>/dev/null || true; }
trap 'pass_on USR1' TERM USR1
trap 'pass_on USR2' USR2
trap 'pass_on INT' INT
while :; do
  signalled=0
  wait "$child" && code=0 || code=$?
  [ "$signalled" = 1 ] || exit "$code"  # a signal ends the waiting as well
done
