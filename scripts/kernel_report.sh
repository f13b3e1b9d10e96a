#!/usr/bin/env bash
# Writes cuda/registers.md: registers, spills and shared memory of every kernel, and what its
# machine code consists of. Needs no GPU, but nvcc and cuobjdump with nvdisasm (of the toolkit, or
# the Python packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm; CUOBJDUMP names it). Fails
# when an attention kernel spills or a vector kernel has no accesses of 16 bytes.
# Usage: scripts/kernel_report.sh [ARCH]   (90)
set -euo pipefail
cd "$(dirname "$0")/.."
arch=${1:-90}
nvcc=${NVCC:-nvcc}
cuobjdump=${CUOBJDUMP:-$(dirname "$(command -v "$nvcc")")/cuobjdump}
if ! command -v "$cuobjdump" >/dev/null; then
  echo "kernel_report: no $cuobjdump: set CUOBJDUMP" >&2
  exit 1
fi
read -ra flags < <(make -s CUDA=1 print-KERNEL_FLAGS)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

for source in cuda/*.cu; do
  name=$(basename "$source" .cu)
  "$nvcc" "${flags[@]}" -cubin -arch="sm_$arch" -Xptxas -v -o "$build/$name.cubin" "$source" \
    2>"$build/$name.log" || { cat "$build/$name.log" >&2; exit 1; }
  "$cuobjdump" -sass "$build/$name.cubin" >"$build/$name.sass"
done
version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
python3 scripts/kernel_report.py "$arch" "$version" "$build" >"$build/registers.md"
mv "$build/registers.md" cuda/registers.md
echo "cuda/registers.md: $(grep -c '^| `' cuda/registers.md) kernels"
