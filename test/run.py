#!/usr/bin/env python3
"""Runs the tests: test/run.py [-k NAME] [--ranks N …] [--list] [--build DIR]

Programs, each from one source file:
  test/unit/x_test.cpp     1 rank
  test/mpi/x_test.cpp      1, 2, 3, 4, 5, 7, 8 ranks: odd and prime counts find what even ones hide
  test/cli/test_x.py       functions test_*(tmp), see test/cli/cli.py
and, where `make cudasim` or `make cudasim-test` has built them in build/cudasim (see --cudasim):
  test/cudasim/tests/x_test.cpp   the simulator itself
  test/cuda/x_test.cpp            the CUDA backend on it, 1 rank
  test/cuda/test_x.py             the program on it, as test/cli
and with --cluster:
  test/cluster/test_x.py          jobs on a Slurm of two hosts that the test starts

Each prints `tests: P passed, F failed[, S skipped]` on a line of its own and exits with a code that
agrees. A crash, a time-out, a missing program or line and a program without a test count as
one failure. A program that cannot run here prints `not run: WHY`, exits with 77 and counts as
nothing; where no other ran, so does this one.
Prints one line a program, the output of those that failed, last `N passed, N failed`.
"""
import argparse
import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

TEST = Path(__file__).resolve().parent
MPIRUN = TEST.parent / "scripts" / "mpirun.sh"
RANKS = [1, 2, 3, 4, 5, 7, 8]
RESULT = re.compile(r"^tests: (\d+) passed, (\d+) failed(?:, (\d+) skipped)?$", re.M)
NOT_RUN = 77
CLUSTER_TIMEOUT = 1200  # seconds, for all jobs together; 4 minutes on a quiet machine
CLI_LINE = re.compile(r"^  (?:ok|FAILED) .*", re.M)


@dataclass
class Program:
    name: str
    ranks: int
    command: list
    functions: list = field(default_factory=list)  # of a test/cli file
    timeout: float = 0  # seconds; 0: as all others

    def title(self):
        count = f"{self.ranks} rank{'s'[: self.ranks != 1]}" if self.ranks else ""
        return f"{self.name:<44} {count:>7}"


@dataclass
class Outcome:
    program: Program
    passed: int
    failed: int
    skipped: int
    seconds: float
    output: str
    reason: str = ""
    ran: bool = True


def test_functions(path):
    tree = ast.parse(path.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_")]


def python_program(source, name, name_filter):
    functions = [f for f in test_functions(source) if name_filter in f"{name}.{f}"]
    command = [sys.executable, str(source), *functions]
    return [Program(name, 0, command, functions)] if functions else []


def find_programs(tests, build, ranks, name_filter):
    programs = []
    for kind, counts in (("unit", [1]), ("mpi", ranks)):
        for source in sorted((tests / kind).glob("*_test.cpp")):
            name = f"{kind}/{source.stem}"
            if name_filter not in name:
                continue
            for n in counts:
                command = [str(MPIRUN), "-n", str(n), str(build / "test" / name)]
                programs.append(Program(name, n, command))
    for source in sorted((tests / "cli").glob("test_*.py")):
        name = f"cli/{source.stem}"
        programs += python_program(source, name, name_filter)
    return programs


def find_cudasim_programs(tests, cudasim, name_filter):
    """Those that were built: they need the CUDA toolkit's headers."""
    programs = []
    for folder in ("cudasim/tests", "cuda"):
        for source in sorted((tests / folder).glob("*_test.cpp")):
            name = f"cudasim/{folder.removeprefix('cudasim/')}/{source.stem}"
            binary = cudasim / "test" / folder / source.stem
            if name_filter in name and binary.exists():
                # The simulator's own tests start ranks of their own.
                launcher = [str(MPIRUN), "-n", "1"] if folder == "cuda" else []
                programs.append(Program(name, 1, [*launcher, str(binary)]))
    if (cudasim / "qshard").exists():
        for source in sorted((tests / "cuda").glob("test_*.py")):
            programs += python_program(source, f"cudasim/cuda/{source.stem}", name_filter)
    return programs


def find_cluster_programs(tests, name_filter):
    programs = []
    for source in sorted((tests / "cluster").glob("test_*.py")):
        programs += python_program(source, f"cluster/{source.stem}", name_filter)
    for program in programs:
        program.timeout = CLUSTER_TIMEOUT
    return programs


def environment(build, cudasim):
    env = dict(os.environ, QSHARD_BUILD=str(build), QSHARD_CUDASIM=str(cudasim),
               PYTHONDONTWRITEBYTECODE="1")
    # Programs run side by side: a thread that spins at the end of a parallel loop would hold the
    # core that another program needs.
    env.setdefault("OMP_WAIT_POLICY", "passive")
    env.setdefault("UBSAN_OPTIONS", "print_stacktrace=1")
    return env


def run_program(program, env, timeout):
    start = time.monotonic()
    try:
        process = subprocess.Popen(program.command, env=env, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True)
    except OSError as error:
        return Outcome(program, 0, 1, 0, 0.0, str(error), "could not start")
    timed_out = False
    timeout = program.timeout or timeout
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        output = stop(process)
    seconds = time.monotonic() - start
    text = output.decode(errors="replace")

    results = RESULT.findall(text)
    passed, failed, skipped = (int(n or 0) for n in results[-1]) if results else (0, 0, 0)
    code = process.returncode
    reason = ""
    if timed_out:
        reason = f"still running after {timeout:g} s"
    elif code < 0:
        reason = f"ended by {signal.Signals(-code).name}"
    elif code == NOT_RUN and (why := re.search("^not run: .*", text, re.M)):
        return Outcome(program, 0, 0, 0, seconds, text, why[0], ran=False)
    elif not results:
        reason = f"no result line, exit code {code}"
    elif failed == 0 and code != 0:
        reason = f"all tests passed, but exit code {code}"
    elif failed != 0 and code == 0:
        reason = "tests failed, but exit code 0"
    elif passed + failed + skipped == 0:
        reason = "no test in it"
    return Outcome(program, passed, failed or int(bool(reason)), skipped, seconds, text, reason)


def stop(process):
    """mpirun ends its ranks on SIGTERM; whatever is left of the session is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            return process.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired:
            pass
    return b""


class Cores:
    """As many programs at once as there are cores for their ranks; at least two."""

    def __init__(self, count):
        self.count = self.free = max(2, count)
        self.changed = threading.Condition()

    def use(self, program, action):
        # A CLI test starts ranks of its own, and some look at the clock: it runs alone.
        share = min(program.ranks or self.count, self.count)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= share)
            self.free -= share
        try:
            return action()
        finally:
            with self.changed:
                self.free += share
                self.changed.notify_all()


def report(outcome):
    status = "FAILED" if outcome.failed else "ok" if outcome.ran else "----"
    notes = [outcome.reason] if outcome.reason else []
    notes += [f"{outcome.skipped} skipped"] if outcome.skipped else []
    print(f"{status:<6} {outcome.program.title()} {outcome.passed:>4} passed"
          f" {outcome.failed:>3} failed {outcome.seconds:>7.2f} s   {', '.join(notes)}".rstrip(), flush=True)
    if outcome.program.functions and outcome.ran:
        print("\n".join("     " + line for line in CLI_LINE.findall(outcome.output)), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="NAME", default="", help="only names that contain this")
    parser.add_argument("--ranks", metavar="N", nargs="+", type=int, default=RANKS,
                        help=f"ranks of test/mpi (default {' '.join(map(str, RANKS))})")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--build", metavar="DIR", type=Path, default=TEST.parent / "build",
                        help="build folder (default build)")
    parser.add_argument("--cudasim", metavar="DIR", type=Path,
                        help="build folder of the CUDA simulator (default: cudasim in --build)")
    parser.add_argument("--cluster", action="store_true",
                        help="test/cluster too, which needs root and Slurm's daemons")
    parser.add_argument("--tests", metavar="DIR", type=Path, default=TEST,
                        help="folder of the sources (default test)")
    parser.add_argument("--timeout", metavar="S", type=float, default=300.0,
                        help="seconds a program may take (default 300)")
    args = parser.parse_args()

    build = args.build.resolve()
    cudasim = (args.cudasim or build / "cudasim").resolve()
    programs = find_programs(args.tests, build, args.ranks, args.k)
    programs += find_cudasim_programs(args.tests, cudasim, args.k)
    if args.cluster:
        programs += find_cluster_programs(args.tests, args.k)
    if not programs:
        parser.error(f"no test's name contains '{args.k}'")
    if args.list:
        for program in programs:
            print(program.title().rstrip())
            for function in program.functions:
                print(f"    {function}")
        return 0

    cores = Cores(len(os.sched_getaffinity(0)))
    env = environment(build, cudasim)
    outcomes = []
    with ThreadPoolExecutor(cores.count) as pool:
        def job(program):
            return cores.use(program, lambda: run_program(program, env, args.timeout))
        for future in as_completed([pool.submit(job, p) for p in programs]):
            outcomes.append(future.result())
            report(outcomes[-1])

    for outcome in outcomes:
        if outcome.failed:
            print(f"\n---- {outcome.program.title().rstrip()}: {outcome.reason or 'failed tests'}")
            print(f"$ {shlex.join(outcome.program.command)}\n{outcome.output.rstrip()}")
    passed = sum(o.passed for o in outcomes)
    failed = sum(o.failed for o in outcomes)
    print(f"\n{passed} passed, {failed} failed")
    if failed:
        return 1
    return 0 if any(o.ran for o in outcomes) else NOT_RUN


if __name__ == "__main__":
    sys.exit(main())
