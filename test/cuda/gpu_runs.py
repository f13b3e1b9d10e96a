"""Runs of `qshard train` on GPUs that the simulator plays (test/cudasim), each with another seed of
it: with that the order changes in which streams, blocks and threads run. Every fourth is guarded:
there the host cannot touch GPU memory, which takes three times as long."""
import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
import cli  # noqa: E402
import runs  # noqa: E402

# It has the CPU backend as well.
cli.QSHARD = Path(os.environ.get("QSHARD_CUDASIM", cli.BUILD / "cudasim")).resolve() / "qshard"

RUN = dict(train__seq=8, train__global_batch=12, train__steps=6, optim__lr=0.01, optim__clip=0.5,
           schedule__warmup_steps=2, train__save_model="true")
SEEDS = itertools.count(1)


def train(tmp, ranks, out, backend="cuda", extra=(), rc=0, **values):
    values = {**RUN, "device__backend": backend, "train__out": tmp / out, **values}
    seed = next(SEEDS)
    env = {"CUDASIM_SEED": seed, "CUDASIM_GUARD": int(seed % 4 == 1)}
    result = runs.train(tmp, ranks, extra, timeout=240, env=env, **values)
    cli.expect(result, rc=rc)
    return result


def resume(tmp, ranks, out, how="auto", extra=(), **values):
    return train(tmp, ranks, out, extra=["--resume", how, *extra], **values)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def same_values(a, b):
    """Of all tensors of two checkpoints, bit for bit."""
    cli.expect(cli.qshard("ckpt", "diff", a, b))
