"""What tests of the command line share. A test file is a program:

    import cli

    def test_what_is_shown(tmp):          # tmp: an empty folder of this test
        result = cli.qshard("data", "info", tmp / "none.h5", ranks=2)
        cli.expect(result, rc=1, err="none.h5")

    if __name__ == "__main__":
        cli.main()

QSHARD_BUILD names the build folder (default: build).
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("QSHARD_BUILD", ROOT / "build")).resolve()
QSHARD = BUILD / "qshard"
STARTED = []  # processes of the running test
MPIRUN = ROOT / "scripts" / "mpirun.sh"


@dataclass
class Result:
    command: str
    rc: int
    out: str
    err: str
    seconds: float

    def __str__(self):
        return (f"$ {self.command}\nexit code {self.rc} after {self.seconds:.2f} s\n"
                f"stdout:\n{self.out}\nstderr:\n{self.err}")


def start(*command, env=None, cwd=None):
    """The process of a command in a session of its own; environment entries of None are removed."""
    entries = {**os.environ, **(env or {})}
    process = subprocess.Popen([str(c) for c in command], text=True, errors="replace", cwd=cwd or ROOT,
                            env={k: str(v) for k, v in entries.items() if v is not None},
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True)
    STARTED.append(process)
    return process


def end(process):
    """Its output, after it was told to end, and killed if it does not."""
    os.killpg(process.pid, signal.SIGTERM)  # mpirun passes it on to the ranks
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def finish(process, timeout=120):
    """Result of a process made by start(); fails the test if it takes longer than `timeout` s."""
    begin = time.monotonic()
    command = " ".join(process.args)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = end(process)
        raise AssertionError(f"still running after {timeout} s: {command}\n{out}\n{err}") from None
    return Result(command, process.returncode, out, err, time.monotonic() - begin)


def run(*command, timeout=120, env=None, cwd=None):
    return finish(start(*command, env=env, cwd=cwd), timeout)


def qshard(*args, ranks=0, timeout=120, env=None, cwd=None):
    """`qshard args` under mpirun with so many ranks; 0: without mpirun."""
    return run(*launcher(ranks), QSHARD, *args, timeout=timeout, env=env, cwd=cwd)


def launcher(ranks):
    return [MPIRUN, "-n", ranks] if ranks else []


def odd_launcher(ranks, change):
    """A launcher whose last rank first does `change`: 'cd elsewhere' or 'set -- "$@" --an-option 1'.
    mpirun's own way, `-n 3 … : -n 1 …`, ends in a segmentation fault of Debian 13's mpirun 5.0.7."""
    script = (f'if [ "${{OMPI_COMM_WORLD_RANK-${{PMI_RANK-}}}}" = {ranks - 1} ]; then {change}; fi\n'
              'exec "$@"')
    return [*launcher(ranks), "bash", "-c", script, "bash"]


def expect(result, rc=0, out="", err=""):
    """Checks the exit code and that stdout and stderr contain these texts."""
    assert result.rc == rc, f"expected exit code {rc}\n{result}"
    assert out in result.out, f"expected '{out}' in stdout\n{result}"
    assert err in result.err, f"expected '{err}' in stderr\n{result}"


def main():
    """Runs the test functions of the file that was started, or those named on its command line."""
    tests = {name: f for name, f in vars(sys.modules["__main__"]).items()
             if name.startswith("test_") and callable(f)}
    names = sys.argv[1:] or list(tests)
    failed = 0
    for name in names:
        tmp = Path(tempfile.mkdtemp(prefix="qshard-"))
        begin = time.monotonic()
        try:
            tests[name](tmp)
            status = "ok"
        except Exception:  # one that breaks in another way than by an assertion failed as well
            status = "FAILED"
            failed += 1
            traceback.print_exc(file=sys.stdout)
        finally:
            for process in STARTED:
                if process.poll() is None:
                    end(process)
            STARTED.clear()
            shutil.rmtree(tmp, ignore_errors=True)
        print(f"  {status} {name} {time.monotonic() - begin:.2f} s", flush=True)
    print(f"tests: {len(names) - failed} passed, {failed} failed")
    sys.exit(failed > 0)
