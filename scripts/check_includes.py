#!/usr/bin/env python3
"""Checks the rules about which folder may know what. Usage: scripts/check_includes.py [ROOT]

An include may only point left:
    base, tensor, {device, comm}, fsdp, {model, io}, train, cli
with the backends cpu and cuda beside device: nothing but src/backends.cpp knows them. MPI, HDF5,
oneDNN, CUDA, the environment and the console each have one place (see PLACES).
Prints file:line, the rule and the fix for each breach; exit code 1 if there is one.
"""
import re
import sys
from pathlib import Path

# Folder: what it may include besides itself. comm knows device because transports call operators.
MAY_INCLUDE = {
    "base": [],
    "tensor": ["base"],
    "device": ["base", "tensor"],
    "cpu": ["base", "tensor", "device"],
    "comm": ["base", "tensor", "device"],
    "cuda": ["base", "tensor", "device", "comm"],
    "fsdp": ["base", "tensor", "device", "comm"],
    "model": ["base", "tensor", "device", "comm", "fsdp"],
    "io": ["base", "tensor", "device", "comm", "fsdp"],
    "train": ["base", "tensor", "device", "comm", "fsdp", "model", "io", "backends"],
    "cli": ["base", "tensor", "device", "comm", "fsdp", "model", "io", "train", "backends"],
    "backends": ["base", "tensor", "device", "comm", "cpu", "cuda"],
}
ORDER = "base → tensor → {device, comm} → fsdp → {model, io} → train → cli"

# What, its pattern, where it may stand (folders, or files without suffix), and the fix elsewhere.
INCLUDE, CODE = "include", "code"
PLACES = [
    (INCLUDE, "oneDNN's header", r"(oneapi/dnnl/)?dnnl\w*\.h(pp)?",
     ["cpu/gemm_onednn"], "call the operator in device/ops.h"),
    (INCLUDE, "HDF5's header", r"(hdf5(_hl)?|H5\w+)\.h",
     ["io/hdf5_file"], "use io/hdf5_file.h"),
    (INCLUDE, "MPI's header", r"mpi(-ext)?\.h",
     ["comm", "cuda", "io/hdf5_file"], "use comm/world.h or comm/collectives.h"),
    (INCLUDE, "a CUDA or NCCL header", r"(cuda\w*|cublas\w*|nccl\w*)\.hp?p?",
     ["cuda"], "use device/device.h, device/ops.h or comm/collectives.h"),
    (CODE, "an MPI call", r"\bP?MPI_[A-Z]\w*\s*\(",
     ["comm", "cuda", "io/hdf5_file"], "use a method of World or Collectives"),
    (CODE, "the environment", r"\b(secure_)?getenv\b|\benviron\b",
     ["base/config", "comm/world"], "read it in base/config and pass the value"),
    (CODE, "console output",
     r"\b(v?printf|puts|putchar|perror)\s*\("
     r"|\b(fprintf|fputs|fputc|fwrite)\s*\([^;]*\bstd(out|err)\b"
     r"|\bstd::(cout|cerr|clog|print(ln)?)\b|\bfmt::print(ln)?\b",
     ["train/metrics", "cli", "main"],
     "throw (base/check.h) or return the text to train/metrics or cli"),
]

COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^()\s]*)\(.*?\)(?P=tag)"'
    r'|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'', re.S)
INCLUDE_LINE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


def without_comments(text):
    def keep_strings(match):
        return blank(match) if match.group().startswith("/") else match.group()
    return COMMENT_OR_STRING.sub(keep_strings, text)


def without_comments_and_strings(text):
    return COMMENT_OR_STRING.sub(blank, text)


def place(path):
    """Folder and name of include/… or src/…: ("comm", "comm/world"), ("main", "main")"""
    parts = path.with_suffix("").parts[1:]
    return parts[0], "/".join(parts)


class Checker:
    def __init__(self, root):
        self.root = root
        self.breaches = []

    def breach(self, path, text, offset, rule, fix):
        line = text.count("\n", 0, offset) + 1
        self.breaches.append((str(path), line, f"{path}:{line}: {rule}; fix: {fix}"))

    def check_file(self, path):
        text = (self.root / path).read_text(errors="replace")
        folder, name = place(path)
        if folder != "main" and folder not in MAY_INCLUDE:
            self.breach(path, text, 0, f"folder {folder} has no place in the order {ORDER}",
                        "move the file, or give the folder a line in scripts/check_includes.py")
            return
        directives = without_comments(text)
        for match in INCLUDE_LINE.finditer(directives):
            self.check_include(path, directives, match, folder, name)
        code = without_comments_and_strings(text)
        for kind, what, pattern, places, fix in PLACES:
            if kind == CODE and not ({folder, name} & set(places)):
                for match in re.finditer(pattern, code):
                    self.breach_of_place(path, code, match.start(), what, places, fix)

    def check_include(self, path, text, match, folder, name):
        quote, target = match.groups()
        for kind, what, pattern, places, fix in PLACES:
            here = {folder, name} & set(places)
            if kind == INCLUDE and not here and re.fullmatch(pattern, target):
                self.breach_of_place(path, text, match.start(), what, places, fix)
                return
        # Device code keeps its headers beside it: cuda/x.h is written as such.
        known = any((self.root / base / target).is_file() for base in ("include", ".")
                    if base == "include" or target.startswith("cuda/"))
        if quote == '"' and not known:
            self.breach(path, text, match.start(), f'"{target}" is not a path below include/',
                        'write ours as "folder/file.h" and others as <file.h>')
        if not known or folder in ("main", "backends"):
            return
        to, _ = place(Path("include", target))
        if to != folder and to not in MAY_INCLUDE[folder]:
            allowed = ", ".join(MAY_INCLUDE[folder]) or "nothing else"
            self.breach(path, text, match.start(),
                        f"{folder} may not include {target} (order: {ORDER}; "
                        f"{folder} may include {allowed})",
                        f"move what is needed left of {folder}, or pass it in from the right")

    def breach_of_place(self, path, text, offset, what, places, fix):
        self.breach(path, text, offset, f"{what} belongs into {', '.join(places)} only", fix)

    def check_tree(self):
        files = [p for top in ("include", "src") for suffix in ("h", "cpp", "cuh", "cu")
                 for p in (self.root / top).rglob(f"*.{suffix}")]
        for file in files:
            self.check_file(file.relative_to(self.root))
        return len(files)


def main():
    if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return 2 * (len(sys.argv) > 2)
    root = Path(sys.argv[1]) if len(sys.argv) == 2 else Path(__file__).resolve().parents[1]
    checker = Checker(root)
    count = checker.check_tree()
    if count == 0:
        print(f"{root}: no source below include/ or src/")
        return 1
    for _, _, message in sorted(checker.breaches):
        print(message)
    return int(bool(checker.breaches))


if __name__ == "__main__":
    sys.exit(main())
