#!/usr/bin/env python3
"""Plants faults in the transports between GPUs and in what takes offloaded states through a GPU, and
counts in how many seeds the simulator sees them.

    make cudasim SIM=tracker && test/cuda/transport_faults.py [--seeds 20] [-k NAME] [--list]

A fault is an edit of one source file, made in a copy of it, that leaves out or weakens one step. Each
runs test/cuda/transports_test.cpp on 2 ranks, or engine_test.cpp on 1, with every seed; so does the
correct program in the same surroundings. A fault that is missed in any seed, or a report by the
correct program, fails.
"""
import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from simulated import cli

NCCL, MPI, SHARED = ("cuda/nccl_collectives.cpp", "cuda/mpi_cuda_collectives.cpp",
                     "src/comm/private_collectives.cpp")
GRAPH = "cuda/graph_cuda.cpp"
SLOTS, UNIT, ENGINE = "src/fsdp/state_slots.cpp", "src/fsdp/unit.cpp", "src/train/engine.cpp"
REPORT = 70  # the simulator's exit code
# NCCL operations that take the whole GPU, so that their order between communicators matters.
EXCLUSIVE = {"CUDASIM_NCCL_EXCLUSIVE": 1}
OLD_NCCL = {**EXCLUSIVE, "CUDASIM_NCCL_VERSION": 22203}
GPU_MEMORY = {"CUDASIM_CUDA_AWARE": 1}


@dataclass
class Fault:
    name: str
    source: str
    text: str  # found once in the source
    instead: str = ""
    transport: str = "nccl"
    env: dict = field(default_factory=dict)
    test: str = "transports_test"
    ranks: int = 2
    tests: str = ""  # of its tests; those of the transport otherwise


def offload(name, source, text, tests="OffloadedStatesGive"):
    return Fault("offload: " + name, source, text, test="engine_test", ranks=1, tests=tests)


def graphs(name, text, instead="", source=NCCL, env=None):
    return Fault("graphs: " + name, source, text, instead, env=env or {}, test="graph_test", ranks=1,
                 tests="GiveTheSameBits/")


def mpi(name, text, instead="", env=None):
    return Fault("mpi-cuda: " + name, MPI, text, instead, "mpi-cuda", env or {})


FAULTS = [
    Fault("nccl: reduction does not wait for the gradient", NCCL,
          "slots_[slot].written.make_wait(reductions_->stream());"),
    Fault("nccl: sum does not wait for the reduction", NCCL,
          "slots_[slot].done.make_wait(device_.stream());"),
    Fault("nccl: compute does not wait for the gather", NCCL,
          "gathered_[unit].make_wait(device_.stream());"),
    Fault("nccl: gather does not wait for publish", NCCL,
          "published_[unit].make_wait(gathers_->stream());"),
    Fault("nccl: gather into a buffer that is still used", NCCL,
          "last_use_[full].make_wait(gathers_->stream());"),
    Fault("nccl: buffer given to a second unit before its gather ended", SHARED,
          "free_.pop_front();"),
    Fault("nccl: communicators start in any order", NCCL,
          'setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);', "{}", env=EXCLUSIVE),
    Fault("nccl: communicators of an old NCCL start in any order", NCCL,
          "if (chained_ || cuda::is_captured(stream)) last_.make_wait(stream);", env=OLD_NCCL),
    mpi("gather does not wait for publish", "rows.published.make_wait(gather_stream_);"),
    mpi("MPI sends rows before they are copied", "!rows.ready.done() || "),
    mpi("MPI fills a staging buffer that is still unpacked", " || !arrival.unpacked.done()"),
    mpi("rows are unpacked before MPI has ended", "complete(gathers_.front().request)", "true"),
    mpi("unpacked into a buffer that is still used",
        "last_use_[gather.full].make_wait(gather_stream_);"),
    mpi("compute does not wait for the gather",
        "rows_[unit].gathered.make_wait(device_.stream());"),
    mpi("packing does not wait for the gradient", "s.written.make_wait(reduce_stream_);"),
    mpi("MPI sends a gradient before it is packed", "if (!s.packed.done()) return false;"),
    mpi("own rows are taken before MPI has ended", "complete(reductions_.front().request)", "true"),
    mpi("sum does not wait for the own rows", "slots_[slot].done.make_wait(device_.stream());"),
    mpi("GPU memory: MPI sends a shard before it is published", "!rows.ready.done() || ",
        env=GPU_MEMORY),
    mpi("GPU memory: MPI sends a gradient before it is packed",
        "if (!s.packed.done()) return false;", env=GPU_MEMORY),
    graphs("compute does not wait for the gather", "gathered_[unit].make_wait(device_.stream());"),
    graphs("sum does not wait for the reduction", "slots_[slot].done.make_wait(device_.stream());"),
    graphs("gather into a buffer that is still used",
           "last_use_[full].make_wait(gathers_->stream());"),
    graphs("streams do not branch off", "branched_.make_wait(channel->stream());", ";"),
    graphs("streams do not branch off after a launch", "device_.branch_off();", source=GRAPH),
    graphs("communicators start in any order", "chained_ || cuda::is_captured(stream)) last_.make",
           "chained_) last_.make", env=EXCLUSIVE),
    offload("slot filled before its piece is back", SLOTS,
            "device_.hold(Queue::uploads, *slot.emptied);"),
    offload("operators do not wait for a piece", SLOTS,
            "device_.hold(Queue::operators, *slot.filled);"),
    offload("piece goes back before operators end", SLOTS,
            "device_.order(Queue::operators, Queue::downloads);"),
    offload("state fetched before it is back", UNIT, "device.hold(Queue::uploads, *stored_);"),
    offload("update does not wait for a snapshot", ENGINE,
            "backend_.device->order(Queue::downloads, Queue::operators);", "AnUpdateWaits"),
]


def make_variable(name):
    command = ["make", "-s", "SIM=tracker", f"BUILD={cli.BUILD}", f"print-{name}"]
    return subprocess.run(command, cwd=cli.ROOT, check=True, text=True,
                          stdout=subprocess.PIPE).stdout.split()


class Builder:
    """Links the test anew with one object in place of the library's."""

    def __init__(self):
        names = ("MPICXX", "CUDASIM_HOST", "CUDASIM_DEVICE", "CUDASIM_LIB", "CUDASIM_BUILD", "LIBS",
                 "CUDASIM_LIBS")
        self.make = {name: make_variable(name) for name in names}
        self.folder = Path(self.make["CUDASIM_BUILD"][0])

    def correct(self, fault):
        return self.folder / "test/cuda" / fault.test

    def program(self, fault, folder):
        source = (cli.ROOT / fault.source).read_text()
        if source.count(fault.text) != 1:
            sys.exit(f"{fault.source} has {source.count(fault.text)} times '{fault.text}', the "
                     f"fault '{fault.name}' needs it once")
        copy, object_file = folder / "source.cpp", folder / "source.o"
        copy.write_text(source.replace(fault.text, fault.instead))
        m = self.make
        self.run(*m["MPICXX"], *m["CUDASIM_HOST"], "-Wno-unused", "-c", copy, "-o", object_file)
        # An object before the library: the library's own is then not needed.
        self.run(*m["MPICXX"], *m["CUDASIM_HOST"], *m["CUDASIM_DEVICE"],
                 self.folder / f"host/test/cuda/{fault.test}.o",
                 self.folder / "host/test/test_main.o", object_file, *m["CUDASIM_LIB"], "-o",
                 folder / "test", "-lgtest", *m["LIBS"], *m["CUDASIM_LIBS"])
        return folder / "test"

    @staticmethod
    def run(*command):
        subprocess.run([str(part) for part in command], cwd=cli.ROOT, check=True)


def outcome(program, fault, seed):
    """'ok', 'report', 'wrong' numbers, or what else happened."""
    try:
        tests = f"*{fault.tests}*" if fault.tests else f"*{fault.transport.replace('-', '_')}"
        result = cli.run(*cli.launcher(fault.ranks), program, f"--gtest_filter={tests}",
                         env={**fault.env, "CUDASIM_SEED": seed, "CUDASIM_GUARD": 0}, timeout=300)
    except AssertionError as error:
        return f"seed {seed}: {error}", ""
    if result.rc == REPORT and "cudasim: " in result.err:
        return "report", result.err[result.err.index("cudasim: "):].splitlines()[0]
    if result.rc == 1 and ", expected " in result.out:
        return "wrong", ""
    return ("ok", "") if result.rc == 0 else (f"seed {seed}: {result}", "")


def run_seeds(program, fault, args):
    """(runs that ended well, reports, runs with wrong numbers, the first report, what is odd)"""
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(
            lambda seed: outcome(program, fault, seed), range(1, args.seeds + 1)))
    kinds = [kind for kind, _ in outcomes]
    text = next((text for kind, text in outcomes if kind == "report"), "")
    odd = [kind for kind in kinds if kind not in ("ok", "report", "wrong")]
    return kinds.count("ok"), kinds.count("report"), kinds.count("wrong"), text, odd


def check(name, program, fault, args, faulty):
    ok, reports, wrong, text, odd = run_seeds(program, fault, args)
    good = not odd and (ok == 0 if faulty else ok == args.seeds)
    print(f"{'ok    ' if good else 'FAILED'} {name:<66} reports {reports:2}, wrong numbers {wrong:2} "
          f"of {args.seeds} seeds   {text}".rstrip(), flush=True)
    for line in odd[:1]:
        print(line, flush=True)
    return good


def surroundings(faults):
    """A fault for each test, transport and environment."""
    first = {}
    for fault in faults:
        first.setdefault((fault.test, fault.tests, fault.transport, str(fault.env)), fault)
    return first.values()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="seeds 1 to N (default 20)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default 1)")
    parser.add_argument("-k", metavar="NAME", default="", help="only faults whose name contains it")
    parser.add_argument("--list", action="store_true", help="names only")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if args.k in fault.name]
    if args.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    builder = Builder()
    results = []
    for fault in surroundings(faults):
        name = " ".join([f"{fault.tests or fault.transport}: correct",
                         *(f"{k}={v}" for k, v in fault.env.items())])
        results.append(check(name, builder.correct(fault), fault, args, False))
    for fault in faults:
        with tempfile.TemporaryDirectory(prefix="qshard-") as folder:
            program = builder.program(fault, Path(folder))
            results.append(check(fault.name, program, fault, args, True))
    print(f"tests: {results.count(True)} passed, {results.count(False)} failed")
    return int(False in results)


if __name__ == "__main__":
    sys.exit(main())
