#!/usr/bin/env python3
"""Speed of checkpoints: scripts/bench_checkpoint.py [--build DIR] [--dir DIR] [--python PYTHON]

In one sitting, for the same bytes on the same disk (--dir): `dd conv=fsync` of one file; saves by
`qshard train` with independent and with collective transfers; loads; what a save costs the training
loop in the foreground and in the background; and, if --python names an interpreter with PyTorch,
torch.distributed.checkpoint of the same shapes from as many processes. Prints median and range of
--repeat measurements each, in GB/s = 1e9 bytes of tensors a second. The first load of a file may
read the disk, later ones read the page cache; saves end with fsync on all sides.

The cost of a save (loop, free) is the wall time of the steps after it, up to half of the interval
between saves, less that of as many steps of the other half, in which nothing is written any more: a
save that takes longer is an error here. The row without saves says what that is by chance. In loop
all cores compute, so a save in the background takes from the ranks what time it takes; in free one
rank with one thread leaves it the other cores.
"""
import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("speed", "loop", "free")
FEW, SOME, MANY = 3, 8, 40  # steps between saves; one in the background ends within half of MANY


def shapes(config):
    """Of all parameters of a tied Qwen3."""
    C, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    D = config["head_dim"]
    H, K = D * config["num_attention_heads"], D * config["num_key_value_heads"]
    layer = [(C,), (H, C), (K, C), (K, C), (D,), (D,), (C, H), (C,), (F, C), (F, C), (C, F)]
    return [(V, C), (C,)] + layer * config["num_hidden_layers"]


def count_bytes(all_shapes):
    total = 0
    for shape in all_shapes:
        numel = 1
        for dim in shape:
            numel *= dim
        total += 3 * 4 * numel  # weights and two moments, f32
    return total


def torch_worker(folder, config, repeat):
    """Under torch.distributed.run: saves and loads, prints seconds as JSON on rank 0."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {f"{group}.{i}": distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
             for group in ("model", "exp_avg", "exp_avg_sq")
             for i, shape in enumerate(shapes(config))}
    seconds = {"save": [], "load": []}
    for i in range(repeat + 1):
        path = folder / f"torch-{i}"
        for what, act in (("save", dcp.save), ("load", dcp.load)):
            dist.barrier()
            begin = time.monotonic()
            act(state, checkpoint_id=path)
            dist.barrier()
            seconds[what].append(time.monotonic() - begin)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
    if dist.get_rank() == 0:
        print(json.dumps({k: v[1:] for k, v in seconds.items()}))
    dist.destroy_process_group()


class Bench:
    def __init__(self, args):
        self.args = args
        self.folder = args.dir / f"bench-checkpoint-{os.getpid()}"
        self.folder.mkdir(parents=True)
        self.bytes = count_bytes(shapes(json.loads(args.model.read_text())))
        (self.folder / "tokens.bin").write_bytes(array("I", [i * 7 % 8000 for i in range(9000)]))

    def row(self, name, seconds):
        median = statistics.median(seconds)
        rates = [self.bytes / s / 1e9 for s in seconds]
        print(f"{name:<44} {self.bytes / median / 1e9:>6.2f} GB/s  ({min(rates):.2f} – "
              f"{max(rates):.2f})  {median:>7.3f} s  n={len(seconds)}", flush=True)
        return median

    def dd(self):
        path, seconds = self.folder / "dd", []
        for _ in range(self.args.repeat):
            begin = time.monotonic()
            subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=4M", "conv=fsync",
                            "iflag=count_bytes", f"count={self.bytes}"], check=True,
                           stderr=subprocess.DEVNULL)
            seconds.append(time.monotonic() - begin)
            path.unlink()
        return seconds

    def train(self, out, steps, *extra, ranks=None, env={}):
        """Runs it; [(time of arrival, line)] of its output."""
        ranks = ranks or self.args.ranks
        command = [ROOT / "scripts" / "mpirun.sh", "-n", ranks,
                   self.args.build / "qshard", "train", "--model.config", self.args.model,
                   "--data.train", self.folder / "tokens.bin", "--data.format", "raw-u32",
                   "--train.seq", 64, "--train.global_batch", ranks, "--train.steps",
                   steps, "--train.out", out, "--train.log_every", 1, "--train.save_model",
                   "false", "--train.peak_gflops", 1, "--checkpoint.at_end", "false", *extra]
        process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, text=True,
                                   env={**os.environ, **env})
        lines = [(time.monotonic(), line) for line in process.stdout]
        if process.wait() != 0:
            sys.exit(f"failed: {' '.join(str(c) for c in command)}")
        return lines

    def costs(self, lines, every):
        """Seconds that the first half of each interval, but the first, takes longer than the other,
        and those of the other."""
        at = {int(m[1]): t for t, line in lines if (m := re.match(r"step +(\d+)/", line))}
        firsts, seconds = ([at[s + every // 2 * (part + 1)] - at[s + every // 2 * part]
                            for s in range(2 * every, max(at) - every + 1, every)]
                           for part in (0, 1))
        return [a - b for a, b in zip(firsts, seconds)], seconds

    def saves(self, *extra, every, **how):
        """Seconds of the saves, and what each cost the loop; the first is left out."""
        out = self.folder / "out"
        steps = every * (self.args.repeat + 2)
        lines = self.train(out, steps, "--checkpoint.every", every, *extra, **how)
        took = [json.loads(line)["checkpoint_ms"] / 1e3
                for line in (out / "metrics.jsonl").read_text().splitlines() if
                "checkpoint_ms" in line]
        costs, halves = self.costs(lines, every)
        if every == MANY and max(took) > min(halves):
            sys.exit(f"a save took {max(took):.2f} s, half of an interval {min(halves):.2f} s: "
                     "what it costs cannot be told here")
        return took[1:], costs, out, steps

    def without_saves(self, **how):
        out = self.folder / "out"
        lines = self.train(out, MANY * (self.args.repeat + 2), **how)
        shutil.rmtree(out)
        return self.costs(lines, MANY)[0]

    def show_cost(self, name, seconds, save):
        low, median, high = min(seconds), statistics.median(seconds), max(seconds)
        print(f"{name:<44} {1e3 * median:>5.0f} ms  ({1e3 * low:.0f} – {1e3 * high:.0f}), "
              f"{100 * median / save:.0f} % of a save in the foreground  n={len(seconds)}",
              flush=True)

    def loads(self, out, steps):
        """From the last checkpoint of a run; each makes one step more."""
        seconds = []
        path = sorted((out / "checkpoints").iterdir())[-1]
        for i in range(self.args.repeat):
            lines = self.train(self.folder / f"load{i}", steps + 1, "--resume", path)
            seconds += [float(m[1]) for _, line in lines
                        if (m := re.search(r"rank\(s\) in ([\d.]+) s", line))]
        return seconds

    def torch(self):
        command = [self.args.python, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={self.args.ranks}", __file__, "--torch-worker",
                   "--dir", self.folder, "--model", self.args.model, "--repeat", self.args.repeat]
        result = subprocess.run([str(c) for c in command], capture_output=True, text=True,
                                env={**os.environ, "OMP_NUM_THREADS": "1"})
        if result.returncode != 0:
            sys.exit(result.stderr)
        return json.loads(result.stdout.splitlines()[-1])

    def speed(self):
        self.row("dd conv=fsync", self.dd())
        took, _, out, steps = self.saves(every=FEW)
        save = self.row("save, independent transfers", took)
        loaded = self.row("load and verify", self.loads(out, steps))
        shutil.rmtree(out)
        took, _, out, _ = self.saves("--checkpoint.collective", "true", every=FEW)
        self.row("save, collective transfers", took)
        shutil.rmtree(out)
        dd = self.row("dd conv=fsync, again", self.dd())
        print(f"rate of a save: {dd / save:.2f} of dd's")
        if self.args.python:
            theirs = self.torch()
            their_save = self.row("torch.distributed.checkpoint save", theirs["save"])
            their_load = self.row("torch.distributed.checkpoint load", theirs["load"])
            print(f"rate of a save: {their_save / save:.2f} x torch's, "
                  f"of a load: {their_load / loaded:.2f} x")

    def loop(self):
        self.show_costs(f"{self.args.ranks} ranks", {})

    def free(self):
        self.show_costs("1 rank, 1 thread", {"ranks": 1, "env": {"OMP_THREAD_LIMIT": "1"}})

    def show_costs(self, name, how):
        took, costs, out, _ = self.saves(every=SOME, **how)
        save = self.row(f"save, {name}", took)
        self.show_cost("  cost to the training loop", costs, save)
        shutil.rmtree(out)
        took, costs, out, _ = self.saves("--checkpoint.async", "true", every=MANY, **how)
        self.row(f"save in the background, {name}", took)
        self.show_cost("  cost to the training loop", costs, save)
        shutil.rmtree(out)
        self.show_cost("  the same without saves", self.without_saves(**how), save)

    def run(self):
        load = os.getloadavg()[0]
        print(f"{self.bytes / 1e6:.0f} MB of f32 tensors, {self.args.ranks} ranks, "
              f"{os.cpu_count()} CPUs (load {load:.1f}), {self.folder}\n"
              f"median (slowest – fastest)")
        parts = PARTS if self.args.part == "all" else (self.args.part,)
        for part in parts:
            getattr(self, part)()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs", help="on the disk in question")
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "configs" / "small30m.json")
    parser.add_argument("--part", choices=("all", *PARTS), default="all",
                        help="speed: saves and loads; loop, free: what a save costs (default all)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--python", help="an interpreter with PyTorch, for the comparison")
    parser.add_argument("--torch-worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_worker:
        torch_worker(args.dir, json.loads(args.model.read_text()), args.repeat)
        return
    bench = Bench(args)
    try:
        bench.run()
    finally:
        shutil.rmtree(bench.folder)


if __name__ == "__main__":
    main()
