#!/usr/bin/env python3
"""Replays every reference case on the simulator: transports, dtypes, ranks, scheduling seeds.

    make cudasim && test/cuda/verify_matrix.py [--seeds 20] [--ranks 1 2 3 4] [-k TEXT]

Each case runs on its own number of ranks and, where its batch divides, on those of --ranks. What else
is random on a GPU changes with the seed: operations of NCCL that take the whole GPU or not, MPI with
GPU memory or pinned memory. Prints a line for each combination, what missed a limit in how many
seeds, and last the misses. Those that are known must miss in every seed, so that this list ends with
them; every other miss fails.
"""
import argparse
import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from simulated import REFERENCE, verify

CASES = ["tiny-tied", "wide-head-untied", "empty-shards"]
DTYPES, TRANSPORTS = ["f32", "bf16", "fp16"], ["nccl", "mpi-cuda"]
# (case, dtype): quantities that miss their limit in every seed, on every number of ranks.
KNOWN = {("empty-shards", "bf16"): {"loss"}}
ROW = re.compile(r"^(\w+) +\S+ +\S+ +\S+ +NO", re.M)


def rank_counts(case, wanted):
    """The case's own number first; others are possible where they divide the global batch."""
    train = json.loads((REFERENCE / case / "train.json").read_text())
    own, batch = train["world"], train["world"] * train["batch"]
    return own, [own] + [n for n in wanted if n != own and batch % n == 0]


def surroundings(transport, seed):
    of_transport = "CUDASIM_NCCL_EXCLUSIVE" if transport == "nccl" else "CUDASIM_CUDA_AWARE"
    # Host code that touches device memory does so in every seed: one is enough.
    return {of_transport: seed % 2, "CUDASIM_GUARD": int(seed == 1)}


def missed(case, dtype, ranks, own, transport, seed):
    """Names of the quantities that missed their limits; or a text on what else went wrong."""
    env = {"CUDASIM_SEED": seed, **surroundings(transport, seed)}
    options = ["--ranks-any"] if ranks != own else []
    try:
        result = verify(case, "--param-dtype", dtype, "--transport", transport, *options,
                        ranks=ranks, env=env, timeout=300)
    except AssertionError as error:
        return {f"no end: {str(error).splitlines()[0]}"}
    if result.rc == 0 and "verify: ok" in result.out:
        return set()
    if result.rc == 1 and "verify: FAILED" in result.out:
        return set(ROW.findall(result.out))
    lines = result.err.strip().splitlines() or [""]
    return {f"exit code {result.rc}: {lines[0]} …"}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="seeds 1 to N (default 20)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default 1)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3, 4],
                        help="besides each case's own (default 1 2 3 4)")
    parser.add_argument("-k", metavar="TEXT", default="", help="only lines that contain it")
    args = parser.parse_args()
    misses, runs = [], 0
    for case in CASES:
        own, counts = rank_counts(case, args.ranks)
        for ranks in counts:
            for dtype in DTYPES:
                for transport in TRANSPORTS:
                    title = f"{case} {ranks} ranks {dtype} {transport}"
                    if args.k not in title:
                        continue
                    known = KNOWN.get((case, dtype), set())
                    counter, unknown = Counter(), 0
                    with ThreadPoolExecutor(args.jobs) as pool:
                        results = list(pool.map(
                            lambda seed: missed(case, dtype, ranks, own, transport, seed),
                            range(1, args.seeds + 1)))
                    for found in results:
                        counter.update(found)
                        unknown += found != known
                    runs += args.seeds
                    text = ", ".join(f"{what} in {n}" for what, n in sorted(counter.items()))
                    status = "FAILED" if unknown else "known " if known else "ok    "
                    print(f"{status} {title:<44} {f'missed: {text} of {args.seeds} seeds' if text else ''}"
                          .rstrip(), flush=True)
                    if text:
                        misses.append((status, title, text))
    print(f"\n{runs} runs")
    for status, title, text in misses:
        print(f"miss   {title}: {text}{' (known)' if status == 'known ' else ''}")
    failed = any(status == "FAILED" for status, _, _ in misses)
    print("matrix: FAILED" if failed else "matrix: ok")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
