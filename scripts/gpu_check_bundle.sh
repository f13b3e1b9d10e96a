#!/usr/bin/env bash
# Makes a folder that runs on a machine with GPUs and a CUDA driver only: the program, its CUDA
# tests, the shared libraries of both but the driver's and glibc's, Open MPI's plugins, and
# scripts/gpu_check.sh, which uses them. The folder may be moved. `make CUDA=1 gpu-check-bundle`
# calls it.
# Usage: scripts/gpu_check_bundle.sh BUILD OUT      BUILD has qshard and test/cuda/*_test
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 out=$2
[ -x "$build/qshard" ] || { echo "gpu_check_bundle: no $build/qshard" >&2; exit 1; }
if [ -e "$out" ]; then
  echo "gpu_check_bundle: $out exists: remove it or name another folder" >&2
  exit 1
fi
mkdir -p "$out"/{bin,lib,mpi,data}
cp "$build/qshard" "$build"/test/cuda/*_test "$out/bin/"
strip --strip-debug "$out"/bin/*
cp scripts/gpu_check.sh scripts/gpu_check_torch.py "$out/"
cp -r data/configs test/reference "$out/data/"

# Paths of the libraries that files are linked to, without those that belong to the machine.
libraries() {
  ldd "$@" 2>/dev/null | awk '$2 == "=>" && $3 == "not" {print $1} $3 ~ /^\// {print $3}' |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libutil|ld-linux[^/]*)\.so' |
    grep -vE '(^|/)libcuda\.so' | sort -u
}
for library in $(libraries "$out"/bin/*); do
  if [ ! -e "$library" ]; then
    echo "gpu_check_bundle: $library was not found: set LD_LIBRARY_PATH" >&2
    exit 1
  fi
  cp -L "$library" "$out/lib/"
done

# Open MPI finds its plugins from the folder that OPAL_PREFIX names. Those that need more libraries,
# of networks, are left out: one process has no use for them.
ompi_path() { ompi_info --parsable --path "$1" | sed 's/^path:[^:]*://'; }
if compgen -G "$out/lib/libopen-pal.*" >/dev/null; then
  prefix=$(ompi_path prefix)
  for folder in "$(ompi_path pkglibdir)" "$(ompi_path pkgdatadir)"; do
    mkdir -p "$out/mpi/${folder#"$prefix"/}"
    for file in "$folder"/*; do
      missing=
      for library in $([[ $file != *.so ]] || libraries "$file"); do
        [ -e "$out/lib/$(basename "$library")" ] || missing=$library
      done
      [ -n "$missing" ] || cp -r "$file" "$out/mpi/${folder#"$prefix"/}/"
    done
  done
fi
# gpu_check.sh compares it with the machine's. Not every file is a program or a library.
{ find "$out" -type f -exec objdump -p {} + 2>/dev/null || true; } | grep -oP '\bGLIBC_\K[0-9.]+' |
  sort -V | tail -n 1 >"$out/glibc" || true
[ -s "$out/glibc" ] || { echo "gpu_check_bundle: objdump finds no GLIBC_ version" >&2; exit 1; }
echo "$out: $(du -sh "$out" | cut -f1), run $out/gpu_check.sh there"
