"""Nothing is left of a cluster, however its test ends. Exit code 77: it cannot run here."""
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
import cli
import cluster

PROGRAM = Path(__file__).with_name("test_cluster.py")


def of_folder(folder):
    """Processes in the namespaces of a cluster."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{cluster.INSIDE}={folder}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(Path(f"/proc/{entry}/comm").read_text().strip())
        except OSError:
            continue
    return found


def start(tmp):
    """A test that would take long, and its folder, once the job runs."""
    process = cli.start(sys.executable, PROGRAM, "test_time_limit", env={"TMPDIR": tmp})
    deadline = time.monotonic() + 120
    while True:
        folders = list(tmp.glob("qshard-cluster-*"))
        running = of_folder(folders[0]) if folders else []
        if "qshard" in running:
            assert "slurmctld" in running and running.count("slurmd") == 2, running
            return process, folders[0]
        assert process.poll() is None and time.monotonic() < deadline, running
        time.sleep(0.1)


def expect_gone(folder):
    deadline = time.monotonic() + 10
    while running := of_folder(folder):
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.1)


def test_killed(tmp):
    process, folder = start(tmp)
    process.kill()
    process.wait()
    expect_gone(folder)
    assert os.listdir(folder) == [], "files are left"


def test_terminated(tmp):
    process, folder = start(tmp)
    process.send_signal(signal.SIGTERM)
    result = cli.finish(process, timeout=20)
    assert result.rc == 1, result
    expect_gone(folder)
    assert not folder.exists(), "files are left"


def test_failed(tmp):
    result = cli.run(sys.executable, PROGRAM, "test_that_is_not_there", env={"TMPDIR": tmp})
    assert result.rc == 1 and "KeyError" in result.out, result
    assert not os.listdir(tmp), result


def test_says_why_it_cannot_run(tmp):
    unshare = tmp / "unshare"
    unshare.write_text("#!/bin/sh\necho unshare: Operation not permitted >&2; exit 1\n")
    unshare.chmod(0o755)
    result = cli.run(sys.executable, PROGRAM, env={"PATH": f"{tmp}:{os.environ['PATH']}"})
    cli.expect(result, rc=77)
    assert result.out == "not run: the tests on a Slurm cluster: no namespaces here: " \
        "unshare: Operation not permitted\n", result


def test_says_that_no_cluster_comes_up(tmp):
    munged = tmp / "munged"
    munged.write_text("#!/bin/sh\nexit 3\n")
    munged.chmod(0o755)
    result = cli.run(sys.executable, PROGRAM, "test_no_progress",
                     env={"TMPDIR": tmp, "PATH": f"{tmp}:{os.environ['PATH']}"})
    cli.expect(result, rc=77)
    assert result.out.startswith("not run: the tests on a Slurm cluster: no two nodes come up"), result
    assert "munged" in result.out and "exit status 3" in result.out, result
    assert os.listdir(tmp) == ["munged"], "files are left"


if __name__ == "__main__":
    os.environ["PATH"] += cluster.SBIN
    if missing := cluster.what_is_missing():
        print(f"not run: the tests on a Slurm cluster: {missing}")
        sys.exit(cluster.NOT_RUN)
    cli.main()
