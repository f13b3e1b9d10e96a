#!/usr/bin/env python3
"""Scaling studies: step time over ranks and settings.

  scripts/scaling.py run STUDY --ranks 1 2 4 --transport shm mpi -- --model.config M.json --data.train T.h5
  scripts/scaling.py run STUDY --ranks 1 2 4 --mode strong weak --dtype f32 bf16 --calibrate --trace -- …
  scripts/scaling.py run STUDY --ranks 8 16 --launch 'srun -n {ranks} --mpi=pmix' -- …   in an allocation
  scripts/scaling.py run STUDY --ranks 8 16 --launch 'sbatch -W -n {ranks} slurm/train.sbatch' -- …
  scripts/scaling.py collect STUDY
  scripts/scaling.py compare BEFORE AFTER

`run` trains every point --repeats times, each for --warmup steps that are not counted and --steps that
are, in folders of STUDY; the options after -- are qshard's. Strong scaling keeps --batch for all ranks
together, weak scaling for each rank. All combinations of --mode, --batch, --mesh, … are points; a mesh
RxS only with R·S ranks. Repeats are the outermost loop, so that a machine that gets slower slows all
points alike. What is complete is not run again: start it once more after an interruption.

--trace adds a traced run to each point, for the shares of compute and of communication that nothing
hides. --calibrate measures the machine with each number of ranks by `qshard plan --calibrate`, or
--hardware names a profile (data/hardware): then a point has its MFU and its predicted step time.

`collect` (also at the end of `run`) writes STUDY/scaling.csv and scaling.json. A repeat counts with the
median of its steps; a point with the median of its repeats, and the lowest and highest as its spread.
Speed-up and efficiency are against the fewest ranks with otherwise the same settings.

`compare` takes points that both studies have: ratio of the medians, and p of an exact permutation test
of the repeats (means of their logarithms, two-sided). Five repeats each can reach 0.008, three only 0.1.
scripts/plot_scaling.py makes a report of a study.
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
# What a study may vary beside mode, batch and ranks: qshard's option, and its value by default.
SWEEPS = {"transport": ("comm.transport", "shm"), "mesh": ("fsdp.mesh", "full"),
          "dtype": ("train.param_dtype", "bf16"), "prefetch": ("fsdp.prefetch", "1"),
          "checkpointing": ("train.activation_checkpoint", "none")}
KEYS = ["mode", "batch", *SWEEPS, "ranks"]
TRACED = 4  # steps of a traced run after the warm-up; qshard traces ten at most


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
            "warmup_steps": args.warmup, "timed_steps": args.steps}


def points(args):
    found, ranks_of_mesh = [], {}
    for values in itertools.product(*(getattr(args, key) for key in KEYS)):
        point = dict(zip(KEYS, values))
        sides = point["mesh"].split("x")
        if len(sides) == 2 and all(side.isdigit() for side in sides):
            ranks_of_mesh[point["mesh"]] = int(sides[0]) * int(sides[1])
            if point["ranks"] != ranks_of_mesh[point["mesh"]]:
                continue
        point["global_batch"] = point["batch"] * (point["ranks"] if point["mode"] == "weak" else 1)
        if point["global_batch"] % point["ranks"]:
            refuse(f"--batch {point['batch']} does not divide by {point['ranks']} ranks: a strong "
                   "scaling study keeps the global batch, choose a multiple of all --ranks")
        found.append(point)
    for mesh, ranks in ranks_of_mesh.items():
        if ranks not in args.ranks:
            refuse(f"--mesh {mesh} is a mesh of {ranks} ranks, which --ranks does not name")
    return found


def folder_of(study, point):
    return study / "runs" / "-".join(str(point[key]) for key in KEYS)


def step_times(folder, total):
    """step_ms of all steps, or None if the run is not complete."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    steps = [line["step_ms"] for line in lines if "loss" in line]
    return steps if len(steps) == total else None


def launch(args, ranks):
    return shlex.split(args.launch.format(ranks=ranks))


def shell(command, log):
    with open(log, "w") as file:
        code = subprocess.run([str(c) for c in command], stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        refuse(f"exit code {code}, see {log}: {shlex.join(str(c) for c in command)}")


def train(args, point, folder, steps, extra=()):
    options = {"train.out": folder, "train.steps": steps, "train.global_batch": point["global_batch"],
               **{option: point[key] for key, (option, _) in SWEEPS.items()},
               "schedule.warmup_steps": 0, "checkpoint.at_end": "false", "train.save_model": "false",
               "train.peak_gflops": 1}
    # train.sbatch names the program and the command itself.
    command = launch(args, point["ranks"])
    if not command[-1].endswith(".sbatch"):
        command += [args.qshard, "train", "--train.overwrite", "true"]
    command += args.options + [x for k, v in options.items() for x in (f"--{k}", v)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    shell([*command, *extra], folder / "log.txt")
    if step_times(folder, steps) is None:
        refuse(f"{folder}/metrics.jsonl: expected {steps} steps, see {folder}/log.txt")


def sequences(settings, ranks):
    """Of a rank: sequences of a micro-batch, and micro-batches."""
    share = settings["train"]["global_batch"] // ranks
    micro = settings["train"]["micro_batch"] or share
    return micro, share // micro


def calibrate(args, ranks):
    """The machine's profile for so many ranks, measured with the study's first model and sequence."""
    profile = args.study / f"hardware-{ranks}.json"
    if args.hardware:
        profile.write_text(args.hardware.read_text())
    if profile.exists():
        return profile
    point = next(p for p in points(args) if p["ranks"] == ranks)
    settings = read_json(folder_of(args.study, point) / "0" / "run.json")
    print(f"measures the machine with {ranks} rank(s)", flush=True)
    shell([*launch(args, ranks), args.qshard, "plan", "--model", settings["model"]["config"], "--batch",
           sequences(settings, ranks)[0], "--seq", settings["train"]["seq"], "--calibrate", profile],
          args.study / f"hardware-{ranks}.log")
    return profile


def predict(args, point):
    folder = folder_of(args.study, point)
    settings = read_json(folder / "0" / "run.json")
    micro, accumulation = sequences(settings, point["ranks"])
    command = [*shlex.split(LOCAL.format(ranks=1)), args.qshard, "plan", "--model",
               settings["model"]["config"], "--ranks", point["ranks"], "--batch", micro,
               "--accumulation", accumulation, "--seq", settings["train"]["seq"], "--param-dtype",
               point["dtype"], "--reduce-dtype", settings["train"]["reduce_dtype"], "--mesh",
               point["mesh"], "--layers-per-unit", settings["fsdp"].get("layers_per_unit", 1),
               "--prefetch", point["prefetch"], "--transport", point["transport"],
               "--activation-checkpoint", point["checkpointing"], "--hardware",
               calibrate(args, point["ranks"]), "--format", "json"]
    # Not by shell(): what mpirun has to say on stderr is no part of the document.
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if result.returncode:
        refuse(f"{shlex.join(str(c) for c in command)}: {result.stderr.strip()}")
    (folder / "plan.json").write_text(result.stdout)


def begin_study(args):
    study, now = args.study, provenance(args)
    study.mkdir(parents=True, exist_ok=True)
    if not (study / "study.json").exists():
        now["begun"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        (study / "study.json").write_text(json.dumps(now, indent=2) + "\n")
        return
    before = read_json(study / "study.json")
    changed = [k for k in now if k != "commit" and before.get(k) != now[k]]
    if changed:
        refuse(f"{study} was begun with another {', '.join(changed)}: use another folder")


def check(args):
    if args.warmup < 1 or args.steps < 3:
        refuse("at least 1 step of --warmup (the first one is always slower) and 3 --steps")
    if not args.qshard.exists():
        refuse(f"no program {args.qshard}: make, or name it with --qshard")
    if args.hardware and not args.hardware.is_file():
        refuse(f"--hardware {args.hardware}: no such file, see data/hardware")
    job = args.launch.endswith(".sbatch")
    if job and (args.trace or args.calibrate):
        refuse("--trace and --calibrate run within an allocation: train.sbatch takes options of "
               "`qshard train` alone. Use --launch 'srun …' in one, or --hardware FILE")
    if args.trace and args.warmup + TRACED > 10:
        refuse(f"--trace: qshard traces 10 steps, --warmup {args.warmup} leaves less than {TRACED}")


def run(args):
    check(args)
    chosen = points(args)
    begin_study(args)
    work = [(point, str(repeat), args.warmup + args.steps) for repeat in range(args.repeats)
            for point in chosen]
    if args.trace:
        work += [(point, "traced", args.warmup + TRACED) for point in chosen]
    for number, (point, name, steps) in enumerate(work, 1):
        folder = folder_of(args.study, point) / name
        if step_times(folder, steps) is not None:
            continue
        print(f"{number}/{len(work)} {folder.relative_to(args.study)}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "point.json").write_text(json.dumps(point) + "\n")
        train(args, point, folder, steps,
              ["--trace", folder / "trace.json"] if name == "traced" else [])
    if args.hardware or args.calibrate:
        for point in chosen:
            predict(args, point)
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


def shares(folder, warmup):
    """Shares of a traced step, over all ranks: operators, waits for communication that nothing hides,
    and the rest (host code, other ranks on the same cores)."""
    try:
        events = read_json(folder / "trace.json")["traceEvents"]
    except ValueError as error:
        refuse(f"{folder}/trace.json: {error}")
    sums, ranks = {"compute": 0.0, "waits": 0.0, "all": 0.0}, {e["pid"] for e in events}
    for rank in ranks:
        spans = sorted((e for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] != "io"),
                       key=lambda e: e["ts"])
        step, begin, last = 0, None, ""
        for e in spans:
            phase = e["args"]["phase"]
            step += phase == "forward" and last == "optimizer"
            last = phase
            if step < warmup:
                continue
            begin = e["ts"] if begin is None else begin
            sums["compute" if e["cat"] == "compute" else "waits"] += e["dur"]
        if begin is None:
            refuse(f"{folder}/trace.json: rank {rank} has no step after {warmup} of warm-up")
        sums["all"] += max(e["ts"] + e["dur"] for e in spans) - begin
    compute, waits = sums["compute"] / sums["all"], sums["waits"] / sums["all"]
    return {"compute_percent": 100 * compute, "exposed_communication_percent": 100 * waits,
            "other_percent": 100 * (1 - compute - waits)}


def prediction(folder, point, flops):
    """Of the planner, and the share of the profile's product rate that the run reached."""
    report = read_json(folder / "plan.json")
    peak = read_json(folder / ".." / ".." / f"hardware-{point['ranks']}.json")["peak_tflops"]
    return {"predicted_step_ms": 1e3 * report["seconds"]["step"],
            "mfu_percent": 100 * flops / (point["ranks"] * peak[point["dtype"]] * 1e12)}


def flops_per_s(folder, warmup):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([x.get("model_flops_per_s", 0) for x in lines if "loss" in x][warmup:])


def rows(study):
    info, found = repeats_of(study)
    warmup = info["warmup_steps"]
    for key in sorted(found):
        point, medians = found[key]
        folder = folder_of(study, point)
        step_ms = statistics.median(medians)
        tokens = point["global_batch"] * read_json(folder / "0" / "run.json")["train"]["seq"]
        fewest = min(k for k in found if k[:-1] == key[:-1])
        base, base_medians = found[fewest]
        # Work per time, so that both modes read alike.
        speedup = (point["global_batch"] / step_ms /
                   (base["global_batch"] / statistics.median(base_medians)))
        row = {**{k: point[k] for k in KEYS if k != "batch"},
               "repeats": len(medians), "warmup_steps": warmup, "timed_steps": info["timed_steps"],
               "batch_sequences": point["batch"], "global_batch_sequences": point["global_batch"],
               "tokens_per_step": tokens, "step_ms_median": step_ms, "step_ms_lowest": min(medians),
               "step_ms_highest": max(medians), "total_tokens_per_s": tokens / step_ms * 1e3,
               "tokens_per_s_per_rank": tokens / step_ms * 1e3 / point["ranks"],
               "speedup_ratio": speedup,
               "efficiency_percent": 100 * speedup * fewest[-1] / point["ranks"],
               "baseline_ranks": fewest[-1]}
        if (folder / "plan.json").exists():
            row |= prediction(folder, point, flops_per_s(folder / "0", warmup))
        if (folder / "traced" / "trace.json").exists():
            row |= shares(folder / "traced", warmup)
        yield row


def collect(args):
    table = list(rows(args.study))
    columns = list(dict.fromkeys(name for row in table for name in row))
    with open(args.study / "scaling.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(table)
    document = {"provenance": read_json(args.study / "study.json"), "points": table}
    (args.study / "scaling.json").write_text(json.dumps(document, indent=2) + "\n")
    shown = settings_shown(table)
    print(headings(shown) + f"{'ranks':>6}{'step ms':>10}{'spread':>19}{'tok/s total':>13}"
          f"{'speed-up':>10}{'efficiency':>12}")
    for row in table:
        spread = f"{row['step_ms_lowest']:.2f}–{row['step_ms_highest']:.2f}"
        print(values_of(row, shown) + f"{row['ranks']:>6}{row['step_ms_median']:>10.2f}{spread:>19}"
              f"{row['total_tokens_per_s']:>13.0f}{row['speedup_ratio']:>10.2f}"
              f"{row['efficiency_percent']:>10.0f} %")
    print(f"{args.study}/scaling.csv, scaling.json")


def settings_shown(table):
    """mode, transport and dtype, and what else the table varies."""
    names = ["mode", "transport", "dtype", "batch_sequences", "mesh", "prefetch", "checkpointing"]
    return [n for i, n in enumerate(names) if i < 3 or len({row[n] for row in table}) > 1]


def headings(names):
    return "".join(f"{name.split('_')[0]:<{max(10, len(name.split('_')[0]) + 1)}}" for name in names)


def values_of(row, names):
    return "".join(f"{row[name]!s:<{max(10, len(name.split('_')[0]) + 1)}}" for name in names)


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
    points = [{**before[key][0], "batch_sequences": before[key][0]["batch"]} for key in both]
    shown = settings_shown(points)
    print(headings(shown) + f"{'ranks':>6}{'before ms':>11}{'after ms':>10}{'after/before':>14}{'p':>8}")
    for key, point in zip(both, points):
        a, b = before[key][1], after[key][1]
        x, y, p = statistics.median(a), statistics.median(b), permutation_p(a, b)
        verdict = ("faster" if y < x else "slower") if p < args.level else "no difference shown"
        print(values_of(point, shown) + f"{point['ranks']:>6}{x:>11.2f}{y:>10.2f}{y / x:>14.3f}"
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
    for key, (option, value) in SWEEPS.items():
        command.add_argument(f"--{key}", nargs="+", default=[value], metavar="VALUE",
                             help=f"values of {option}; default {value}")
    command.add_argument("--mode", nargs="+", choices=["strong", "weak"], default=["strong"])
    command.add_argument("--batch", type=int, nargs="+", default=[16], metavar="SEQUENCES",
                         help="of all ranks (strong) or of each (weak); default 16")
    command.add_argument("--trace", action="store_true", help="one more run of each point, traced")
    hardware = command.add_mutually_exclusive_group()
    hardware.add_argument("--calibrate", action="store_true", help="measure a profile, and predict")
    hardware.add_argument("--hardware", type=Path, metavar="FILE", help="predict with this profile")
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
