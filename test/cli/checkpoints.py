"""Runs that save and resume, and the processes under mpirun: for the tests of checkpoints."""
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import cli
import runs

# Vocabulary and head_dim do not divide by 3, 4, 7 or 8 ranks; 8 norms of 32 leave some empty.
TINY = dict(vocab_size=515, hidden_size=64, intermediate_size=96, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32)
ENDLESS = dict(train__steps=1000000, train__log_every=1000000)


def start_files(tmp, count=3000, **model):
    runs.model(tmp, **{**TINY, **model})
    runs.tokens(tmp / "train.bin", count, vocab=515)


def resume(tmp, ranks, how="auto", extra=(), **values):
    return runs.train(tmp, ranks, extra=["--resume", str(how), *extra], **values)


def file(folder, step):
    return folder / "checkpoints" / f"step-{step:08}.h5"


def saved(folder):
    """Names in the folder of checkpoints."""
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def curve(folder):
    """Step → (loss, norm, lr); the later line of a step counts."""
    return {line["step"]: (line["loss"], line["grad_norm"], line["lr"])
            for line in runs.metrics(folder)[0]}


def same_curve(a, b, tolerance=1e-5):
    assert a.keys() == b.keys(), (sorted(a), sorted(b))
    for step in a:
        for x, y in zip(a[step], b[step]):
            assert runs.close(x, y, tolerance), (step, a[step], b[step])


def processes():
    """Process id → parent's id."""
    found = {}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit():
                stat = Path(f"/proc/{entry}/stat").read_text()
                found[int(entry)] = int(stat.rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    return found


def ranks_of(process, program=None):
    """Process ids of the ranks under a launcher, by rank."""
    parents, found = processes(), {}
    for pid in parents:
        above = pid
        while above in parents and above != process.pid:
            above = parents[above]
        try:
            if above != process.pid or os.path.realpath(f"/proc/{pid}/exe") != str(program or cli.QSHARD):
                continue
            entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found[int(dict(e.partition("=")[::2] for e in entries)["OMPI_COMM_WORLD_RANK"])] = pid
        except (OSError, KeyError):
            continue
    return [found[rank] for rank in sorted(found)]


def start(tmp, ranks, extra=(), **values):
    return cli.start(*cli.launcher(ranks), cli.QSHARD, "train",
                     *runs.options(tmp, **{**ENDLESS, **values}), *extra, cwd=tmp)


def wait_for(process, condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if process.poll() is not None:
            raise AssertionError(f"it ended early\n{cli.finish(process)}")
        assert time.monotonic() < deadline, "nothing has happened"
        time.sleep(0.005)
    return value


def steps_done(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def verify(path, ranks=0):
    cli.expect(cli.qshard("ckpt", "verify", path, ranks=ranks))


def mpi_io_libraries():
    """Open MPI's ompio and romioNNN; another MPI has but the one."""
    if not shutil.which("ompi_info"):
        return [None]
    known = subprocess.run(["ompi_info"], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^ *MCA io: (\w+)", known, re.M)
    assert len(names) == 2, names
    return sorted(names)
