#!/usr/bin/env python3
"""qshard beside PyTorch FSDP2: scripts/compare_peer.py --python PYTHON [--rows NAME …] [--repeat N]

Trains the same shapes with `qshard train` on CPU ranks and with Hugging Face's Qwen3 under PyTorch's
fully_shard (gloo), in turn, --repeat times each, one thread a rank: forward, backward, clipping to
norm 1, AdamW, f32 master weights, f32 reduction. Prints tokens/s of both, the ratio as median (lowest
– highest pair), what share of the product rate qshard reaches, and the memory of a rank: the mean of
all, the highest of samples every 2 s, memory that ranks share counted once (PSS).
Sets nothing up: PYTHON is an interpreter with torch and transformers. For a machine that does nothing
else; clocks of shared machines drift, so only ratios of one sitting mean something.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 2


@dataclass
class Row:
    name: str
    model: str  # in data/configs
    ranks: int
    batch: int
    seq: int
    dtype: str
    steps: int = 6  # measured
    layers: int = 0  # 0: as in the model

    def config(self):
        fields = json.loads((ROOT / "data" / "configs" / self.model).read_text())
        return {**fields, "num_hidden_layers": self.layers} if self.layers else fields


ROWS = [
    Row("small30m-2-f32", "small30m.json", 2, 4, 256, "f32"),
    Row("small30m-2-bf16", "small30m.json", 2, 4, 256, "bf16"),
    Row("small30m-4-f32", "small30m.json", 4, 2, 256, "f32"),
    Row("small30m-4-bf16", "small30m.json", 4, 2, 256, "bf16"),
    Row("small30m-long-bf16", "small30m.json", 2, 1, 2048, "bf16"),
    Row("layers-4-f32", "walkthrough-layer.json", 4, 2, 8, "f32", steps=40, layers=4),
    Row("0.6b-2-bf16", "qwen3-0.6b.json", 2, 1, 512, "bf16", steps=2),
]


def worker(rank, row, rendezvous, results):
    """One rank of PyTorch's side."""
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank,
                            world_size=row.ranks)
    fields = row.config()
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**fields, attn_implementation="sdpa"))
    options = {"mesh": init_device_mesh("cpu", (row.ranks,))}
    if row.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                                    reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(rank)
    seconds = []
    for _ in range(WARM_UP + row.steps):
        tokens = torch.randint(fields["vocab_size"], (row.batch, row.seq + 1), generator=generator)
        dist.barrier()
        begin = time.perf_counter()
        logits = model(input_ids=tokens[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        results.put({"seconds": statistics.median(seconds[WARM_UP:])})
    dist.barrier()
    dist.destroy_process_group()


def run_peer(row):
    """In an interpreter with PyTorch: all ranks of one run; prints one line of JSON."""
    import torch.multiprocessing as mp
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=worker, args=(r, row, f"{folder}/meet", results))
                 for r in range(row.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            if rank.exitcode != 0:
                sys.exit(f"a rank of PyTorch ended with {rank.exitcode}")
    print(json.dumps(results.get()))


def resident_bytes(pid):
    """Of a process, by PSS; 0 when it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def descendants(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return children + [deeper for child in children for deeper in descendants(child)]


def shell(command, ranks, **env):
    """Standard output, and the highest mean of the largest `ranks` processes' memory in bytes."""
    # Variables that choose another BLAS kernel slow PyTorch down.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    command, memory = [str(c) for c in command], 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env={**inherited, **env})
        while True:
            try:
                process.wait(2)
                break
            except subprocess.TimeoutExpired:
                sizes = sorted(map(resident_bytes, descendants(process.pid)), reverse=True)
                memory = max(memory, sum(sizes[:ranks]) / ranks)
        out.seek(0), err.seek(0)
        if process.returncode != 0:
            sys.exit(f"failed: {' '.join(command)}\n{err.read()}")
        return out.read(), memory


def theirs(args, row):
    out, memory = shell([args.python, __file__, "--peer-run", row.name], row.ranks,
                        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    return {**json.loads(out.splitlines()[-1]), "memory": memory}


def ours(args, row, folder):
    model, out = folder / "model.json", folder / "out"
    model.write_text(json.dumps(row.config()))
    chance = random.Random(1)
    vocab, samples = row.config()["vocab_size"], row.ranks * row.batch * 4
    (folder / "tokens.bin").write_bytes(
        array("I", [chance.randrange(vocab) for _ in range(samples * row.seq + 1)]).tobytes())
    options = {"model.config": model, "data.train": folder / "tokens.bin", "data.format": "raw-u32",
               "train.seq": row.seq, "train.global_batch": row.ranks * row.batch,
               "train.steps": WARM_UP + row.steps, "train.param_dtype": row.dtype, "train.out": out,
               "train.overwrite": "true", "train.save_model": "false", "checkpoint.at_end": "false"}
    _, memory = shell([ROOT / "scripts" / "mpirun.sh", "-n", row.ranks, args.build / "qshard", "train",
                       *(x for k, v in options.items() for x in (f"--{k}", v))], row.ranks,
                      OMP_NUM_THREADS="1")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "step_ms" in step][WARM_UP:]
    return {"seconds": statistics.median(step["step_ms"] for step in steps) / 1e3,
            "share": statistics.median(step["peak_share"] for step in steps),
            "memory": memory}


def compare(args, row):
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeat):
            pairs.append((ours(args, row, Path(folder)), theirs(args, row)))
    tokens = row.ranks * row.batch * row.seq
    ratios = [peer["seconds"] / own["seconds"] for own, peer in pairs]
    middle = [statistics.median(side["seconds"] for side in sides) for sides in zip(*pairs)]
    result = {"row": row.name, "ranks": row.ranks, "batch": row.batch, "seq": row.seq,
              "dtype": row.dtype, "tokens_per_s": tokens / middle[0],
              "peer_tokens_per_s": tokens / middle[1], "ratio": statistics.median(ratios),
              "ratios": ratios, "peak_share": statistics.median(own["share"] for own, _ in pairs),
              "memory_bytes": max(own["memory"] for own, _ in pairs),
              "peer_memory_bytes": max(peer["memory"] for _, peer in pairs)}
    spread = f"({min(ratios):.2f} – {max(ratios):.2f})"
    print(f"{row.name:<20}{result['tokens_per_s']:>10.0f}{result['peer_tokens_per_s']:>10.0f}"
          f"{result['ratio']:>8.2f} {spread:<15}{100 * result['peak_share']:>5.0f} %"
          f"{result['memory_bytes'] / 1e6:>9.0f} MB{result['peer_memory_bytes'] / 1e6:>9.0f} MB",
          flush=True)
    return result


def main():
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="an interpreter with torch and transformers")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"of {', '.join(names)}; default: all (0.6b needs 24 GB)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="the table as JSON")
    parser.add_argument("--peer-run", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    by_name = {row.name: row for row in ROWS}
    if args.peer_run:
        return run_peer(by_name[args.peer_run])
    if not args.python:
        parser.error("--python: name an interpreter with torch and transformers")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; tokens/s, medians of "
          f"{args.repeat}\n{'row':<20}{'qshard':>10}{'PyTorch':>10}{'ratio':>8} {'':<15}{'share':>7}"
          f"{'qshard':>12}{'PyTorch':>12}", flush=True)
    results = [compare(args, by_name[name]) for name in args.rows]
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
