#!/usr/bin/env bash
# What `make run` runs: trains a small byte-level Qwen3 on the C and C++ headers of this machine.
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

command=(scripts/mpirun.sh -n "$ranks" "$qshard" train --config data/configs/demo.json "$@")
printf '$ %s\n' "${command[*]}"
"${command[@]}"

cat <<END

Next:
  make run RANKS=2                                    the same curve on another number of ranks
  make run ARGS="--train.param_dtype bf16"            gather and compute in bf16
  make run ARGS="--train.steps 2000 --optim.lr 1e-3"  longer
  make help                                           tests, benchmarks, build variables
  $qshard train --help
END
