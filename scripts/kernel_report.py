#!/usr/bin/env python3
"""Makes the table of cuda/registers.md. Usage: kernel_report.py ARCH NVCC_VERSION FOLDER

FOLDER has, for each source, NAME.log (ptxas -v) and NAME.sass (cuobjdump -sass). Called by
scripts/kernel_report.sh.
"""
import re
import subprocess
import sys
from pathlib import Path

PTXAS = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)", re.S)
SASS_FUNCTION = re.compile(r"Function : (\w+)\n(.*?)(?=\n\s*Function :|\Z)", re.S)
SHARED = re.compile(r"(\d+) bytes smem")
# Machine instructions whose number the table gives.
COLUMNS = [
    ("HMMA", r"\bHMMA\b"),
    ("LDSM", r"\bLDSM\b"),
    ("LDGSTS", r"\bLDGSTS\b"),
    ("LDG 16 B", r"\bLDG\.E\S*\.128"),
    ("STG 16 B", r"\bSTG\.E\S*\.128"),
]

HEAD = """# Kernels on sm_{arch}

Written by scripts/kernel_report.sh with nvcc {version}. Spills and static shared memory in bytes,
then numbers of machine instructions: tensor-core products (HMMA), matrix loads (LDSM),
asynchronous copies to shared memory (LDGSTS), and accesses of 16 bytes to device memory. The
variants with a last number of 1 are for rows that are not aligned.
"""


def demangled(symbols):
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True,
                          check=True).stdout
    return dict(zip(symbols, text.splitlines()))


def short(name):
    """attention_kernel<bf16, 128> from the whole signature"""
    name = re.sub(r"^void ", "", name)
    name = name.split("(anonymous namespace)::", 1)[-1]
    depth = 0
    for i, c in enumerate(name):
        depth += {"<": 1, ">": -1}.get(c, 0)
        if c == "(" and depth == 0:
            name = name[:i]
            break
    name = re.sub(r"\((?:int|bool|qshard::cuda::\(anonymous namespace\)::\w+|qshard::cuda::\w+)\)",
                  "", name)
    return name.replace("__nv_bfloat16", "bf16").replace("__half", "fp16").replace("float", "f32")


def kernels_of(log, sass):
    code = {m.group(1): m.group(2) for m in SASS_FUNCTION.finditer(sass)}
    rows = []
    for match in PTXAS.finditer(log):
        symbol = match["symbol"]
        shared = SHARED.search(match["rest"])
        counts = [len(re.findall(pattern, code.get(symbol, ""))) for _, pattern in COLUMNS]
        rows.append((symbol, int(match["registers"]), int(match["stores"]) + int(match["loads"]),
                     int(shared.group(1)) if shared else 0, counts))
    return rows


def faults_of(source, name, spills, count):
    if source == "attention":
        if spills:
            yield f"{name} spills {spills} bytes"
        for needed in ("HMMA", "LDSM", "LDGSTS", "STG 16 B"):
            if not count[needed]:
                yield f"{name} has no {needed}"
    elif source != "attention_general" and re.search(r", [48](, |>)", name):
        if not (count["LDG 16 B"] or count["STG 16 B"]):
            yield f"{name} has no accesses of 16 bytes"


def main():
    arch, version, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    print(HEAD.format(arch=arch, version=version))
    faults = []
    for log in sorted(folder.glob("*.log")):
        rows = kernels_of(log.read_text(), log.with_suffix(".sass").read_text())
        names = demangled([row[0] for row in rows])
        rows = sorted((short(names[symbol]), *rest) for symbol, *rest in rows)
        titles = ["kernel", "registers", "spills", "shared"] + [title for title, _ in COLUMNS]
        print(f"## {log.stem}.cu\n\n| {' | '.join(titles)} |\n|---|{'--:|' * (len(titles) - 1)}")
        for name, registers, spills, shared, counts in rows:
            cells = [registers, spills, shared, *counts]
            print(f"| `{name}` | {' | '.join(map(str, cells))} |")
            faults += faults_of(log.stem, name, spills, dict(zip(titles[4:], counts)))
        print()
    for fault in faults:
        print(f"kernel_report: {fault}", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
