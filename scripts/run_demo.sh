#!/usr/bin/env bash
# What `make run` runs: trains a small byte-level Qwen3 on the C and C++ headers of this machine and lets
# it write some lines.
#
#   scripts/run_demo.sh [--section.key value …]     options of `qshard train`
#
# RANKS=4            CPU ranks
# TEXTS="…"          other files or folders; the token files made of them are kept in runs/demo
# QSHARD=build/qshard
set -euo pipefail
cd "$(dirname "$0")/.."

ranks=${RANKS:-4}
texts=${TEXTS:-/usr/include/*.h /usr/include/c++}
qshard=${QSHARD:-build/qshard}
folder=runs/demo

if [ ! -e "$folder/train.h5" ] || [ ! -e "$folder/val.h5" ]; then
  mkdir -p "$folder"
  # shellcheck disable=SC2086  # several paths, some of them patterns
  "$qshard" data tokenize --out "$folder/train.h5" --val-out "$folder/val.h5" $texts
  echo
fi

# Options that this script needs to know; the last one given counts.
steps=600 out=
for ((i = 1; i < $#; i++)); do
  next=$((i + 1))
  case ${!i} in
    --train.steps) steps=${!next} ;;
    --train.out) out=${!next} ;;
  esac
done
out=${out:-$folder/$(date +%Y%m%d-%H%M%S)}
again=$((ranks > 1 ? ranks / 2 : 1))

train() {
  local n=$1
  shift
  local command=(scripts/mpirun.sh -n "$n" "$qshard" train --config data/configs/demo.json --train.out "$out" "$@")
  printf '$ %s\n' "${command[*]}"
  "${command[@]}"
}

# Open MPI 4 then says nothing of exit code 75 (5 has no such setting).
export OMPI_MCA_orte_execute_quiet=1

# A run that is stopped, as by a job's time limit, saves itself and says so with exit code 75; it goes
# on from its checkpoint on another number of ranks with the same curve.
stopped=0
train "$ranks" --train.stop_after $((steps * 3 / 4)) "$@" || stopped=$?
if [ $stopped -ne 75 ]; then exit $stopped; fi
printf '\nStopped after three quarters (exit code 75); now on %s rank(s), from the checkpoint:\n' "$again"
train "$again" --resume auto "$@"

# Of what was learned: the same text for the same model.
say=("$qshard" sample --from "$out/checkpoints" --prompt '#include <' --tokens 160 --temperature 0.6 --top-p 0.95)
printf "\n$ %s --prompt '#include <' %s\n" "${say[*]:0:4}" "${say[*]:6}"
"${say[@]}"

cat <<END

Next:
  make run ARGS="--train.param_dtype f32"                compute in f32 instead of bf16
  make run ARGS="--train.steps 2000 --optim.lr 2e-3"     longer
  scripts/mpirun.sh -n 4 $qshard walkthrough        a step, operator by operator
  $qshard data tokenize --help                      your own texts
  $qshard train --help
  make help                                              tests, benchmarks, build variables
END
