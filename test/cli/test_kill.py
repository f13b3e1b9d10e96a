"""A rank that dies or fails in the middle of a run: the job ends within seconds, not never."""
import os
import resource
import signal
import time

import cli
import runs
from checkpoints import ranks_of

ENDLESS = dict(train__steps=1000000, train__log_every=1000000)


def expect_gone(ranks, seconds=5):
    """No rank is left but as an entry that nobody has collected yet."""
    def alive(pid):
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False
    deadline = time.monotonic() + seconds
    while left := [pid for pid in ranks if alive(pid)]:
        assert time.monotonic() < deadline, f"rank processes {left} are still there"
        time.sleep(0.05)


def running(process, folder, seconds=30, program=cli.QSHARD, steps=5):
    """The ranks, once some steps have been made."""
    deadline = time.monotonic() + seconds
    path = folder / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < steps:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not start"
        time.sleep(0.02)
    return ranks_of(process, program)


def start(tmp, **values):
    runs.start_files(tmp)
    return cli.start(*cli.launcher(4), cli.QSHARD, "train",
                     *runs.options(tmp, **ENDLESS, **values), cwd=tmp)


def test_killed_rank_ends_the_job(tmp):
    for transport, victim in (("shm", 2), ("mpi", 0)):
        out = tmp / transport
        process = start(tmp, train__out=out, comm__transport=transport)
        ranks = running(process, out)
        assert len(ranks) == 4, ranks
        os.kill(ranks[victim], signal.SIGKILL)
        result = cli.finish(process, timeout=10)
        assert result.rc != 0, result
        expect_gone(ranks)


def test_error_on_one_rank_ends_the_job(tmp):
    """Rank 0 finds its disk full, here a limit on the size of files, and no other rank knows."""
    process = start(tmp)
    ranks = running(process, tmp / "out")
    resource.prlimit(ranks[0], resource.RLIMIT_FSIZE, (1, 1))
    result = cli.finish(process, timeout=10)
    error = runs.expect_one_error(result, 1, "(rank 0 on ", "metrics.jsonl", "disk full")
    assert os.uname().nodename in error, result
    expect_gone(ranks)


def test_interrupt_ends_the_job(tmp):
    process = start(tmp)
    ranks = running(process, tmp / "out")
    process.send_signal(signal.SIGINT)
    result = cli.finish(process, timeout=10)
    assert result.rc != 0, result
    expect_gone(ranks)


if __name__ == "__main__":
    cli.main()
