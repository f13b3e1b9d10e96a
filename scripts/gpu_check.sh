#!/usr/bin/env bash
# Checks and measures the CUDA backend on this machine's first GPU, in at most 5 minutes; lies in a
# folder made by `make CUDA=1 gpu-check-bundle`. Needs a driver; compute-sanitizer and a python3 with
# torch and transformers are used where they are. No mpirun: one process, one GPU.
#
#   ./gpu_check.sh [--models "qwen3-0.6b qwen3-1.7b"] [--batch 4] [--seq 2048] [--repeats 10]
#                  [--limit 300] [--python python3] [--out gpu_check_result] [--dry-run]
#
# --models: names in data/configs, or files. --limit: seconds for everything. --dry-run prints the
# commands. Results: OUT/gpu_check.json, and a log for each step. A step that fails is named, the
# others run all the same. Exit codes: 0 all passed (or was skipped, which is said), 1 not, 2 usage.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
models="qwen3-0.6b qwen3-1.7b" batch=4 seq=2048 repeats=10 limit=300 python=python3
out=gpu_check_result dry_run=
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry_run=1 && shift && continue ;;
    --models | --batch | --seq | --repeats | --limit | --python | --out) ;;
    *) sed -n '2,/^set /p' "$0" | sed '$d; s/^# \?//' >&2 && exit 2 ;;
  esac
  [ $# -ge 2 ] || { echo "gpu_check: $1 needs a value" >&2; exit 2; }
  printf -v "${1#--}" %s "$2"
  shift 2
done
mkdir -p "$out" || exit 2
rm -f "$out"/*.log "$out"/*.json "$out"/steps

export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# One process without mpirun's daemon, with plugins that lie here, and without those of networks.
export OPAL_PREFIX="$here/mpi" OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_pml=ob1
export OMPI_MCA_mca_base_component_show_load_errors=0
qshard=$here/bin/qshard
failed=0

# step NAME SECONDS COMMAND…: runs it, with stdout in OUT/NAME.json when NAME begins with a +.
step() {
  local name=${1#+} most=$2 file begin=$SECONDS code=0 left=$((limit - SECONDS))
  [ "$1" = "$name" ] && file=/dev/stderr || file=$out/$name.json
  shift 2
  if [ -n "$dry_run" ]; then
    echo "$name: $*"
    return
  fi
  [ "$most" -lt "$left" ] || most=$left
  if [ "$most" -le 0 ]; then
    note "$name" FAILED 0 "no time left of --limit $limit"
    return
  fi
  { timeout -k 5 "$most" "$@" >>"$file"; } 2>>"$out/$name.log" || code=$?
  case $code in
    0) note "$name" ok $((SECONDS - begin)) ;;
    124 | 137) note "$name" FAILED $((SECONDS - begin)) "still running after $most s" ;;
    *) note "$name" FAILED $((SECONDS - begin)) "exit code $code, see $out/$name.log" ;;
  esac
}
note() {  # NAME RESULT SECONDS [WHY]
  [ "$2" != FAILED ] || failed=1
  printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "${4-}" >>"$out/steps"
  printf '%-28s %-8s %4s s  %s\n' "$1" "$2" "$3" "${4-}"
}
skipped() { if [ -n "$dry_run" ]; then echo "$1: skipped: $2"; else note "$1" skipped 0 "$2"; fi; }
# The first number of this name in a document; empty without.
field() { sed -n "s/^ *\"$2\": *\([-+.0-9e]*\),\{0,1\}$/\1/p" "$out/$1.json" 2>/dev/null | head -n 1; }
calc() { awk "BEGIN { printf \"%.4g\", $1 }"; }

config() { [ -f "$1" ] && echo "$1" || echo "$here/data/configs/$1.json"; }
label() { basename "$1" .json; }
shape=(--batch "$batch" --seq "$seq" --param-dtype bf16)

# Both end the script with one line where no step could work.
stop() { echo "gpu_check: $1" >&2; exit 1; }
check_glibc() {
  local needs has
  needs=$(cat "$here/glibc" 2>/dev/null) ||
    stop "no $here/glibc: run it in a folder made by make CUDA=1 gpu-check-bundle"
  has=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed 's/^glibc //')
  [ "$(printf '%s\n' "$needs" "${has:-0}" | sort -V | tail -n 1)" = "$has" ] ||
    stop "this folder needs glibc $needs or later and this system has ${has:-none}: run it on a \
later system, or make it (make CUDA=1 gpu-check-bundle) on one no later than this"
}
check_start() {
  local model=$here/data/configs/walkthrough-layer.json
  timeout -k 5 60 "$qshard" bench gemm --backend cuda --model "$model" --seq 1 \
    --warm-up 0 --repeats 1 >"$out/start.log" 2>&1 && return
  stop "no product on the GPU: $(grep -m 1 'error' "$out/start.log" || echo "see $out/start.log")"
}

check_values() {
  local program dtype
  if command -v nvidia-smi >/dev/null; then
    step machine 20 nvidia-smi
  else
    skipped machine "no nvidia-smi"
  fi
  for program in "$here"/bin/*_test; do step "$(basename "$program")" 90 "$program"; done
  for dtype in f32 bf16 fp16; do
    step "verify-$dtype" 60 "$qshard" verify --reference "$here/data/reference/tiny-tied" \
      --backend cuda --ranks-any --param-dtype "$dtype"
  done
}

sanitize() {
  local name
  for name in ops_norm ops_optimizer ops_linear; do
    if command -v compute-sanitizer >/dev/null; then
      step "sanitizer-$name" 60 compute-sanitizer --error-exitcode 9 "$here/bin/${name}_test"
    else
      skipped "sanitizer-$name" "no compute-sanitizer"
    fi
  done
}

measure() {
  local model name first=1
  for model in $models; do
    name=$(label "$model") model=$(config "$model")
    local options=(--model "$model" "${shape[@]}" --format json)
    local measured=("${options[@]}" --backend cuda --repeats "$repeats")
    [ -z "$first" ] || step "+ops-$name" 60 "$qshard" bench ops "${measured[@]}"
    first=
    step "+step-$name" 60 "$qshard" bench step "${measured[@]}"
    step "+graph-$name" 60 "$qshard" bench step "${measured[@]}" --graph
    step "+plan-$name" 20 "$qshard" plan "${options[@]}" --transport nccl --ranks 1
    [ -n "$dry_run" ] || check_memory "$name"
    if "$python" -c 'import torch, transformers' 2>/dev/null; then
      # Its libraries are its own.
      step "+torch-$name" 90 env -u LD_LIBRARY_PATH "$python" "$here/gpu_check_torch.py" "$model" \
        --batch "$batch" --seq "$seq" --repeats "$repeats"
    else
      skipped "torch-$name" "no torch and transformers in $python"
    fi
  done
}

# What the program held at most against the plan, which leaves out scratch memory of operators.
check_memory() {
  local held planned
  held=$(field "step-$1" memory_peak_bytes) planned=$(field "plan-$1" total)
  if [ -z "$held" ] || [ -z "$planned" ]; then
    note "memory-$1" FAILED 0 "no measurement or no plan"
  elif awk "BEGIN { exit !($held < 0.98 * $planned || $held > 1.02 * $planned + 2^26) }"; then
    note "memory-$1" FAILED 0 "held $held bytes, planned $planned"
  else
    note "memory-$1" ok 0 "held $held bytes, planned $planned"
  fi
}

# A line an operator of bench ops: the share of the ceiling that it is closer to.
rates() {
  awk -F'": ' '
    { gsub(/[",]|^ */, "", $1); gsub(/[",]/, "", $2) }
    $1 == "operator" { op = $2 } $1 == "part" { part = $2 } $1 == "time_us" { us = $2 }
    $1 == "gflop_per_s" { flops = $2 } $1 == "share_of_products" { products = $2 }
    $1 == "gb_per_s" { bytes = $2 }
    $1 == "share_of_copy" {
      printf "%-18s %10.1f us %10.1f TFLOP/s %4.0f %% %10.1f GB/s %4.0f %%   %s\n",
             op, us, flops / 1e3, 100 * products, bytes, 100 * $2, part
    }' "$1"
}

speed_line() {  # WHO MODEL TOKENS_PER_S MFU
  printf '%-8s %-14s %12s tokens/s   MFU %s of the measured product rate\n' "$1" "$2" "$3" "$4"
}

summary() {
  local model ours graph theirs
  echo
  for model in "$out"/ops-*.json; do
    [ -s "$model" ] || continue
    echo "$(label "$model"): time, share of products' rate, share of a copy's rate"
    rates "$model"
  done
  for model in $models; do
    model=$(label "$model")
    ours=$(field "step-$model" tokens_per_s) theirs=$(field "torch-$model" tokens_per_s)
    [ -n "$ours" ] || continue
    speed_line qshard "$model" "$(calc "$ours")" "$(calc "$(field "step-$model" share_of_products)")"
    graph=$(field "graph-$model" tokens_per_s)
    [ -z "$graph" ] || speed_line graphs "$model" "$(calc "$graph")" \
      "$(calc "$(field "graph-$model" share_of_products)")"
    [ -z "$theirs" ] || speed_line PyTorch "$model" "$(calc "$theirs")" \
      "$(calc "$(field "step-$model" share_of_products) * $theirs / $ours")"
  done
  awk -F'\t' '{ n[$2]++ } $2 == "FAILED" { names = names " " $1 }
    END { printf "%d ok, %d failed, %d skipped%s\n", n["ok"], n["FAILED"], n["skipped"],
                 (names ? ":" names : "") }' "$out/steps"
}

write_json() {
  local file separator=
  echo '{"steps": ['
  awk -F'\t' '{ gsub(/["\\]/, "", $4)
    printf "%s {\"name\": \"%s\", \"result\": \"%s\", \"seconds\": %d, \"why\": \"%s\"}\n",
           (NR > 1 ? "," : ""), $1, $2, $3, $4 }' "$out/steps"
  echo '], "measurements": {'
  for file in "$out"/{ops,step,graph,plan,torch}-*.json; do
    [ "$(tail -n 1 "$file" 2>/dev/null)" ] || continue
    grep -qsxF "$(basename "$file" .json)" <(awk -F'\t' '$2 == "ok" { print $1 }' "$out/steps") ||
      continue
    echo "$separator\"$(basename "$file" .json)\":"
    cat "$file"
    separator=,
  done
  echo '}}'
}

if [ -z "$dry_run" ]; then
  check_glibc
  check_start
fi
check_values
sanitize
measure
[ -z "$dry_run" ] || exit 0
summary | tee "$out/summary.txt"
write_json >"$out/gpu_check.json"
echo "$out/gpu_check.json"
exit "$failed"
