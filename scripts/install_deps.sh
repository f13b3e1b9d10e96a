#!/usr/bin/env bash
# Installs what a build of qshard lacks on Debian 12 or Ubuntu 22.04 and newer; lists it elsewhere.
#
#   scripts/install_deps.sh           say what is missing, install that and nothing else
#   scripts/install_deps.sh --check   only say it
#   scripts/install_deps.sh --force   install inside a Slurm job as well
#   scripts/install_deps.sh cluster   what `make test-cluster` needs as well: Slurm's daemons, munge
#
# What counts is what the Makefile's own compiler and flags find, so libraries from modules, conda
# or a home folder are as good as packages. Exit code 0: nothing is missing (any more), 1: something
# is.
set -euo pipefail
cd "$(dirname "$0")/.."

mpicxx=${MPICXX:-mpicxx}

programs=(  # program, package
  "g++         g++"
  "make        make"
  "pkg-config  pkg-config"
  "python3     python3"
  "$mpicxx     libopenmpi-dev"
  "${MPIRUN:-mpirun}  openmpi-bin"
)
libraries=(  # header, library to link or -, package or its names on different distributions
  "mpi.h                  -          libopenmpi-dev"
  "hdf5.h                 hdf5       libhdf5-openmpi-dev"
  "dnnl.hpp               dnnl       libdnnl-dev|libonednn-dev|onednn-dev"
  "CLI/CLI.hpp            -          libcli11-dev"
  "nlohmann/json.hpp      -          nlohmann-json3-dev"
  "fmt/format.h           fmt        libfmt-dev"
  "xxhash.h               xxhash     libxxhash-dev"
  "Random123/philox.h     -          librandom123-dev"
  "gtest/gtest.h          gtest      libgtest-dev"
  "benchmark/benchmark.h  benchmark  libbenchmark-dev"
)

cluster_programs=(  # which may lie where only root's PATH looks
  "munged      munge"
  "slurmctld   slurmctld"
  "slurmd      slurmd"
  "sbatch      slurm-client"
  "ip          iproute2"
  "unshare     util-linux"
)

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; }

have() { command -v "$1" >/dev/null 2>&1; }

missing=()   # for people: "hdf5.h (serial HDF5 found)"
packages=()  # to install; alternatives as a|b
lack() {     # what, package
  missing+=("$1")
  [[ " ${packages[*]-} " == *" $2 "* ]] || packages+=("$2")
}

# Headers that the compiler does not see, one a line; then "serial-hdf5" and "old-compiler" if so.
# Only the preprocessor runs, and of the headers it reads none but HDF5's list of settings.
unseen_headers() {  # compiler and flags
  local row
  {
    for row in "${libraries[@]}"; do
      printf '#if !__has_include(<%s>)\n"%s"\n#endif\n' "${row%% *}" "${row%% *}"
    done
    printf '#if __has_include(<hdf5.h>) && __has_include(<H5pubconf.h>)\n#include <H5pubconf.h>\n'
    printf '#ifndef H5_HAVE_PARALLEL\n"serial-hdf5"\n#endif\n#endif\n'
    printf '#if __cplusplus < 202002L\n"old-compiler"\n#endif\n'
  } | "$@" -E -P -x c++ - | sed -n 's/^"\(.*\)"$/\1/p'
}

# Libraries that the linker does not find, one a line.
unseen_libraries() {  # compiler, flags and libraries
  local folder
  folder=$(mktemp -d)
  echo 'int main() {}' | LC_ALL=C "$@" -x c++ - -o "$folder/probe" 2>&1 |
    sed -n 's/.*cannot find -l\([^: ]*\).*/\1/p; s/.*library not found for -l\([^ ]*\).*/\1/p'
  rm -r "$folder"
}

look() {
  missing=() packages=()
  local row program header library package
  for row in "${programs[@]}"; do
    read -r program package <<<"$row"
    have "$program" || lack "$program" "$package"
  done
  for row in ${cluster:+"${cluster_programs[@]}"}; do
    read -r program package <<<"$row"
    have "$program" || [ -x "/usr/sbin/$program" ] || lack "$program" "$package"
  done

  local compiler=$mpicxx
  have "$mpicxx" || compiler=g++
  if ! have make || ! have pkg-config || ! "$compiler" --version >/dev/null 2>&1; then
    look_at_packages
    return
  fi
  # MAKEFLAGS of a make that runs this script names a job server that is not ours to use.
  local flags links no_headers no_libraries
  { read -ra flags; read -ra links; } < <(MAKEFLAGS='' make -s -j1 print-FLAGS print-LIBS)
  no_headers=$(unseen_headers "$compiler" "${flags[@]}")
  no_libraries=$(unseen_libraries "$compiler" "${flags[@]}" "${links[@]}" -lgtest -lbenchmark)
  for row in "${libraries[@]}"; do
    read -r header library package <<<"$row"
    if grep -qxF "$header" <<<"$no_headers"; then
      lack "$header" "$package"
    elif grep -qxF -- "$library" <<<"$no_libraries"; then
      lack "lib$library" "$package"
    elif [ "$header" = hdf5.h ] && grep -qx serial-hdf5 <<<"$no_headers"; then
      lack "parallel HDF5 (a serial one was found)" "$package"
    fi
  done
  if grep -qx old-compiler <<<"$no_headers"; then
    lack "g++ 11 or newer for C++20 (found: $("$compiler" --version | head -n 1))" g++
  fi
}

# Without compiler, make and pkg-config only the package database can tell.
look_at_packages() {
  local row header package name installed
  for row in "${libraries[@]}"; do
    read -r header _ package <<<"$row"
    installed=
    for name in ${package//|/ }; do
      dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'ok installed' && installed=yes
    done
    [ -n "$installed" ] || lack "$header" "$package"
  done
}

known() { apt-cache policy "$1" 2>/dev/null | grep -q 'Candidate: [^(]'; }

# Sets `packages` to names that this distribution has, where it has them.
choose_names() {
  local i name
  for i in "${!packages[@]}"; do
    [[ ${packages[i]} == *"|"* ]] || continue
    for name in ${packages[i]//|/ }; do
      known "$name" && packages[i]=$name && break
    done
    packages[i]=${packages[i]%%|*}
  done
}

list_for_other_systems() {
  cat <<'END'
No apt-get here. A build needs:
  g++ 11 or newer (or another compiler for C++20), GNU make 4.2, pkg-config, Python 3.8
  an MPI with mpicxx and mpirun (Open MPI 4 or 5, MPICH), parallel HDF5 1.10 or newer
  oneDNN 2.2 or 3, CLI11 2.1, nlohmann-json 3.9, fmt 8 or newer, xxHash, Random123
  for tests and benchmarks: GoogleTest, Google Benchmark
On a cluster, load their modules. The Makefile finds MPI by MPICXX, HDF5 by pkg-config or
HDF5_CFLAGS and HDF5_LIBS, the others by CPATH and LIBRARY_PATH or CPPFLAGS=-I… and LDFLAGS=-L….
END
}

install() {
  local as_root=() update='' apt=(apt-get install -y --no-install-recommends) package
  if [ "$(id -u)" != 0 ]; then as_root=(sudo); fi
  local prefix=${as_root[0]-}${as_root[0]+ }

  choose_names
  for package in "${packages[@]}"; do known "$package" || update="${prefix}apt-get update && "; done
  local text="$update$prefix${apt[*]} ${packages[*]}"

  if [ -n "${as_root[0]-}" ] && ! { have sudo && { sudo -n true 2>/dev/null || [ -t 0 ]; }; }; then
    echo "Not root, and no sudo without a password here. Run, or ask for:" >&2
    echo "  $text" >&2
    exit 1
  fi
  echo "Installing: $text"
  as_root+=(env DEBIAN_FRONTEND=noninteractive)
  if [ -n "$update" ]; then
    "${as_root[@]}" apt-get update -q
    choose_names
  fi
  # A package that the mirror no longer has is what old lists end in: once more with new ones.
  "${as_root[@]}" "${apt[@]}" -q "${packages[@]}" ||
    { "${as_root[@]}" apt-get update -q && "${as_root[@]}" "${apt[@]}" -q "${packages[@]}"; }
}

report() {
  local IFS=,
  echo "Missing: ${missing[*]}" | sed 's/,/, /g'
}

mode=install
force=
cluster=
for argument; do
  case $argument in
    --check) mode=check ;;
    --force) force=yes ;;
    cluster) cluster=yes ;;
    -h | --help) usage && exit 0 ;;
    *)
      echo "install_deps.sh: unknown option $argument (known: --check, --force, cluster, --help)" >&2
      exit 2
      ;;
  esac
done

look
[ ${#missing[@]} -gt 0 ] || { [ $mode = install ] || echo "Nothing is missing."; exit 0; }
report

if ! have apt-get; then
  list_for_other_systems >&2
  exit 1
fi
# MPICH's HDF5 for a machine whose mpicxx is MPICH's.
if "$mpicxx" -show 2>/dev/null | grep -q mpich; then
  packages=("${packages[@]/libhdf5-openmpi-dev/libhdf5-mpich-dev}")
fi
if [ $mode = check ]; then
  choose_names
  echo "Packages: ${packages[*]}"
  exit 1
fi
if [ -n "${SLURM_JOB_ID-}" ] && [ -z "$force" ]; then
  echo "Nothing is installed inside Slurm job $SLURM_JOB_ID: run 'make deps' on a login node," \
    "or 'scripts/install_deps.sh --force' here." >&2
  exit 1
fi
install
look
[ ${#missing[@]} -eq 0 ] || { report; echo "Still missing after the installation." >&2; exit 1; }
