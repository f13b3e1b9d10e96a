#!/usr/bin/env python3
"""Scaling studies: step time over ranks, numeric formats and transports.

  scripts/scaling.py run STUDY --ranks 1 2 4 --transport shm mpi -- --model.config M.json --data.train T.h5
  scripts/scaling.py run STUDY --ranks 8 16 --launch 'srun -n {ranks} --mpi=pmix' -- …   in an allocation
  scripts/scaling.py run STUDY --ranks 8 16 --launch 'sbatch -W -n {ranks} slurm/train.sbatch' -- …
  scripts/scaling.py collect STUDY
  scripts/scaling.py compare BEFORE AFTER

`run` trains every point --repeats times, each for --warmup steps that are not counted and --steps that
are, in folders of STUDY; the options after -- are qshard's. Strong scaling keeps --batch for all ranks
together, weak scaling for each rank. Repeats are the outermost loop, so that a machine that gets slower
slows all points alike. What is complete is not run again: start it once more after an interruption.

`collect` (also at the end of `run`) writes STUDY/scaling.csv and scaling.json. A repeat counts with the
median of its steps; a point with the median of its repeats, and the lowest and highest as its spread.
Speed-up and efficiency are against the fewest ranks of the same mode, transport and format.

`compare` takes points that both studies have: ratio of the medians, and p of an exact permutation test
of the repeats (means of their logarithms, two-sided). Five repeats each can reach 0.008, three only 0.1.
"""
import argparse
import csv
import hashlib
import itertools
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCAL = str(ROOT / "scripts" / "mpirun.sh") + " -n {ranks}"
KEYS = ["mode", "transport", "dtype", "ranks"]


def refuse(text):
    print(f"scaling.py: {text}", file=sys.stderr)
    sys.exit(2)


def read_json(path):
    try:
        return json.loads(path.read_text())
    except OSError as error:
        refuse(f"{path}: {error.strerror}")


# --- run

def provenance(args):
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"],
                            capture_output=True, text=True).stdout.strip()
    return {"program": str(args.qshard), "commit": commit or "unknown",
            "program_sha256": hashlib.sha256(args.qshard.read_bytes()).hexdigest(),
            "host": platform.node(), "machine": platform.machine(), "system": platform.platform(),
            "launch": args.launch, "qshard_options": args.options,
            "warmup_steps": args.warmup, "timed_steps": args.steps, "batch": args.batch}


def points(args):
    found = [dict(zip(KEYS, values))
             for values in itertools.product(args.mode, args.transport, args.dtype, args.ranks)]
    for point in found:
        point["global_batch"] = args.batch * (point["ranks"] if point["mode"] == "weak" else 1)
        if point["global_batch"] % point["ranks"]:
            refuse(f"--batch {args.batch} does not divide by {point['ranks']} ranks: a strong scaling "
                   "study keeps the global batch, choose a multiple of all --ranks")
    return found


def folder_of(study, point, repeat):
    return study / "runs" / "{mode}-{transport}-{dtype}-{ranks}".format(**point) / str(repeat)


def step_times(folder, total):
    """step_ms of all steps, or None if the run is not complete."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    steps = [line["step_ms"] for line in lines if "loss" in line]
    return steps if len(steps) == total else None


def train(args, point, folder):
    options = {"train.out": folder, "train.steps": args.warmup + args.steps,
               "train.global_batch": point["global_batch"], "train.param_dtype": point["dtype"],
               "comm.transport": point["transport"], "schedule.warmup_steps": 0,
               "checkpoint.at_end": "false", "train.save_model": "false", "train.peak_gflops": 1}
    # train.sbatch names the program and the command itself.
    launch = shlex.split(args.launch.format(ranks=point["ranks"]))
    if not launch[-1].endswith(".sbatch"):
        launch += [str(args.qshard), "train", "--train.overwrite", "true"]
    command = launch + args.options + [str(x) for k, v in options.items() for x in (f"--{k}", v)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    with open(folder / "log.txt", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code or step_times(folder, args.warmup + args.steps) is None:
        refuse(f"exit code {code}, see {folder / 'log.txt'}: {shlex.join(command)}")


def run(args):
    if args.warmup < 1 or args.steps < 3:
        refuse("at least 1 step of --warmup (the first one is always slower) and 3 --steps")
    if not args.qshard.exists():
        refuse(f"no program {args.qshard}: make, or name it with --qshard")
    study, now = args.study, provenance(args)
    study.mkdir(parents=True, exist_ok=True)
    if (study / "study.json").exists():
        before = read_json(study / "study.json")
        changed = [k for k in now if k != "commit" and before.get(k) != now[k]]
        if changed:
            refuse(f"{study} was begun with another {', '.join(changed)}: use another folder")
    else:
        now["begun"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        (study / "study.json").write_text(json.dumps(now, indent=2) + "\n")
    work = [(point, folder_of(study, point, repeat))
            for repeat in range(args.repeats) for point in points(args)]
    for number, (point, folder) in enumerate(work, 1):
        if step_times(folder, args.warmup + args.steps) is not None:
            continue
        print(f"{number}/{len(work)} {folder.relative_to(study)}", flush=True)
        (folder / "..").resolve().mkdir(parents=True, exist_ok=True)
        (folder.parent / "point.json").write_text(json.dumps(point) + "\n")
        train(args, point, folder)
    collect(args)


# --- collect

def repeats_of(study):
    """Point (as a tuple of KEYS) → (its description, median step of each complete repeat in ms)."""
    info, found = read_json(study / "study.json"), {}
    total = info["warmup_steps"] + info["timed_steps"]
    for path in sorted(study.glob("runs/*/point.json")):
        times = [step_times(folder, total) for folder in sorted(path.parent.glob("[0-9]*"))]
        medians = [statistics.median(t[info["warmup_steps"]:]) for t in times if t]
        if medians:
            point = read_json(path)
            found[tuple(point[k] for k in KEYS)] = point, medians
    if not found:
        refuse(f"{study} has no complete run")
    return info, found


def tokens_per_sequence(study, point):
    settings = read_json(folder_of(study, point, 0) / "run.json")
    return settings["train"]["seq"]


def rows(study):
    info, found = repeats_of(study)
    for key in sorted(found):
        point, medians = found[key]
        step_ms = statistics.median(medians)
        tokens = point["global_batch"] * tokens_per_sequence(study, point)
        fewest = min(k for k in found if k[:3] == key[:3])
        base, base_medians = found[fewest]
        # Work per time, so that both modes read alike.
        speedup = (point["global_batch"] / step_ms /
                   (base["global_batch"] / statistics.median(base_medians)))
        yield {"mode": point["mode"], "transport": point["transport"], "dtype": point["dtype"],
               "ranks": point["ranks"], "repeats": len(medians),
               "warmup_steps": info["warmup_steps"], "timed_steps": info["timed_steps"],
               "global_batch_sequences": point["global_batch"], "tokens_per_step": tokens,
               "step_ms_median": step_ms, "step_ms_lowest": min(medians),
               "step_ms_highest": max(medians), "total_tokens_per_s": tokens / step_ms * 1e3,
               "tokens_per_s_per_rank": tokens / step_ms * 1e3 / point["ranks"],
               "speedup_ratio": speedup,
               "efficiency_percent": 100 * speedup * fewest[3] / point["ranks"],
               "baseline_ranks": fewest[3]}


def collect(args):
    table = list(rows(args.study))
    with open(args.study / "scaling.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    document = {"provenance": read_json(args.study / "study.json"), "points": table}
    (args.study / "scaling.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"{'mode':<7}{'transport':<10}{'dtype':<6}{'ranks':>5}{'step ms':>10}{'spread':>19}"
          f"{'tok/s total':>13}{'speed-up':>10}{'efficiency':>12}")
    for row in table:
        spread = f"{row['step_ms_lowest']:.2f}–{row['step_ms_highest']:.2f}"
        print(f"{row['mode']:<7}{row['transport']:<10}{row['dtype']:<6}{row['ranks']:>5}"
              f"{row['step_ms_median']:>10.2f}{spread:>19}{row['total_tokens_per_s']:>13.0f}"
              f"{row['speedup_ratio']:>10.2f}{row['efficiency_percent']:>10.0f} %")
    print(f"{args.study}/scaling.csv, scaling.json")


# --- compare

def permutation_p(a, b):
    """Share of all ways to deal the values out to both sides whose means differ as much or more."""
    values = [math.log(x) for x in a + b]
    total, n, m = sum(values), len(a), len(b)

    def difference(chosen):
        part = sum(values[i] for i in chosen)
        return abs(part / n - (total - part) / m)

    found = difference(range(n))
    ways = [difference(c) >= found - 1e-12 for c in itertools.combinations(range(n + m), n)]
    return sum(ways) / len(ways)


def compare(args):
    (_, before), (_, after) = repeats_of(args.study), repeats_of(args.other)
    both = sorted(before.keys() & after.keys())
    if not both:
        refuse("the studies have no point in common")
    print(f"{'mode':<7}{'transport':<10}{'dtype':<6}{'ranks':>5}{'before ms':>11}{'after ms':>10}"
          f"{'after/before':>14}{'p':>8}")
    for key in both:
        a, b = before[key][1], after[key][1]
        x, y, p = statistics.median(a), statistics.median(b), permutation_p(a, b)
        verdict = ("faster" if y < x else "slower") if p < args.level else "no difference shown"
        print(f"{key[0]:<7}{key[1]:<10}{key[2]:<6}{key[3]:>5}{x:>11.2f}{y:>10.2f}{y / x:>14.3f}"
              f"{p:>8.3f}  {verdict}")


def main():
    arguments, options = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, options = arguments[:at], arguments[at + 1:]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="run what is missing of a study, and collect it")
    command.add_argument("study", type=Path)
    command.add_argument("--ranks", type=int, nargs="+", required=True)
    command.add_argument("--transport", nargs="+", default=["shm"])
    command.add_argument("--dtype", nargs="+", default=["bf16"])
    command.add_argument("--mode", nargs="+", choices=["strong", "weak"], default=["strong"])
    command.add_argument("--batch", type=int, default=16, metavar="SEQUENCES",
                         help="of all ranks (strong) or of each (weak); default 16")
    command.add_argument("--warmup", type=int, default=5, metavar="STEPS", help="default 5")
    command.add_argument("--steps", type=int, default=20, help="timed ones; default 20")
    command.add_argument("--repeats", type=int, default=5, help="default 5")
    command.add_argument("--launch", default=LOCAL, metavar="COMMAND",
                         help="with {ranks}; default scripts/mpirun.sh -n {ranks}")
    command.add_argument("--qshard", type=Path,
                         default=Path(os.environ.get("QSHARD_BUILD", ROOT / "build")) / "qshard")
    command.set_defaults(function=run, options=options)
    command = commands.add_parser("collect", help="CSV and JSON of what is complete")
    command.add_argument("study", type=Path)
    command.set_defaults(function=collect)
    command = commands.add_parser("compare", help="two studies")
    command.add_argument("study", type=Path, metavar="BEFORE")
    command.add_argument("other", type=Path, metavar="AFTER")
    command.add_argument("--level", type=float, default=0.05, help="of significance; default 0.05")
    command.set_defaults(function=compare)
    args = parser.parse_args(arguments)
    args.function(args)


if __name__ == "__main__":
    main()
