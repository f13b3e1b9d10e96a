"""Checkpoints when something goes wrong: kills, full disks, damaged files, folders ranks do not share."""
import fcntl
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time

import checkpoints as ck
import cli
import runs

RUN = dict(train__seq=32, train__global_batch=24, train__steps=6, checkpoint__every=2)
OFTEN = dict(train__seq=8, train__global_batch=4, checkpoint__every=1, checkpoint__keep_last=3)


def kill_all(process, ranks):
    for pid in [process.pid, *ranks]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    # mpirun, the launcher's child, goes as well.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.communicate(timeout=20)


def newest_complete(folder):
    return max(int(name[5:13]) for name in ck.saved(folder) if name.endswith(".h5"))


def test_killed_while_saving_20_times(tmp):
    """Every step is saved, so that nearly every moment lies in a save. The next job always starts
    from the newest file that has its final name, and that is whole."""
    ck.start_files(tmp)
    out, chance, last = tmp / "out", random.Random(4), 0
    unfinished = 0
    for attempt in range(20):
        begun = ck.steps_done(out)
        process = ck.start(tmp, 2, extra=["--resume", "auto"],
                           **{**OFTEN, "checkpoint__async": str(attempt % 2 == 1).lower()})
        ck.wait_for(process, lambda: ck.steps_done(out) > begun + 1)
        ranks = ck.ranks_of(process)
        time.sleep(0.1 * chance.random())
        if attempt % 4 == 3:  # one rank alone: mpirun ends the other
            os.kill(ranks[attempt // 4 % 2], signal.SIGKILL)
            result = cli.finish(process, timeout=15)
            assert result.rc != 0, result
        else:
            kill_all(process, ranks)
        newest = newest_complete(out)
        assert newest >= last, (newest, last)
        unfinished += any(name.endswith(".tmp") for name in ck.saved(out))
        last = newest
        ck.verify(ck.file(out, newest))
    assert unfinished > 0, "no kill hit a save"
    assert last > 10, last
    result = ck.resume(tmp, 3, train__stop_after=1, **{**ck.ENDLESS, **OFTEN,
                                                      "train__global_batch": 4 * 3},
                       extra=["--allow-changes"])
    cli.expect(result, rc=75, out=f"going on with step {last + 1}")
    assert not [name for name in ck.saved(out) if name.endswith(".tmp")], ck.saved(out)


def test_damaged_files_are_skipped_or_one_error(tmp):
    ck.start_files(tmp)
    cli.expect(runs.train(tmp, 4, checkpoint__keep_last=0, **RUN))
    shutil.copytree(tmp / "out", tmp / "good")
    newest, path = ck.file(tmp / "out", 6), lambda step: ck.file(tmp / "out", step)
    cases = {"truncated by 100 bytes": lambda p: os.truncate(p, p.stat().st_size - 100),
             "empty": lambda p: os.truncate(p, 0),
             "checksum": lambda p: flip_middle(p),
             "unfinished": lambda p: p.rename(p.with_name(p.name + ".tmp"))}
    for what, damage in cases.items():
        shutil.rmtree(tmp / "out")
        shutil.copytree(tmp / "good", tmp / "out")
        damage(newest)
        result = ck.resume(tmp, 3, **{**RUN, "train__steps": 5})
        cli.expect(result, out="going on with step 5" if what == "unfinished" else "skipped")
        assert newest.name in result.out and "step-00000004.h5 written" in result.out, (what, result)
    for step in (2, 4, 5, 6):
        if path(step).exists():
            os.truncate(path(step), 3000)
    before = ck.saved(tmp / "out")
    runs.expect_one_error(ck.resume(tmp, 3, **RUN), 1, "none of them usable")
    assert ck.saved(tmp / "out") == before


def flip_middle(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_full_disk_stops_all_and_keeps_the_older_ones(tmp):
    """A limit on the size of files, on all ranks and on one."""
    ck.start_files(tmp)
    for victims in ((0, 1, 2, 3), (2,)):
        shutil.rmtree(tmp / "out", ignore_errors=True)
        process = ck.start(tmp, 4, **{**OFTEN, "checkpoint__every": 20})
        ck.wait_for(process, lambda: ck.file(tmp / "out", 20).exists())
        for rank in victims:
            resource.prlimit(ck.ranks_of(process)[rank], resource.RLIMIT_FSIZE, (400000, 400000))
        result = cli.finish(process, timeout=60)
        error = runs.expect_one_error(result, 1, "not saved", "older ones are intact",
                                      "File too large", ".h5.tmp", seconds=60)
        if len(victims) == 1:
            assert "rank 2 on" in error, error
        assert not [n for n in ck.saved(tmp / "out") if n.endswith(".tmp")], ck.saved(tmp / "out")
        for name in ck.saved(tmp / "out"):
            ck.verify(tmp / "out" / "checkpoints" / name, ranks=2)


FULL_TARGET = r"""
// For LD_PRELOAD: on the ranks of VICTIMS every write of more than a byte to an unfinished checkpoint
// finds no space, as when one of a file system's servers is full.
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
struct iovec;
static bool is_full(int fd, size_t count) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *victims = getenv("VICTIMS");
  if (count < 2 || !rank || !victims || !strstr(victims, rank)) return false;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return false;
  path[length] = 0;
  if (!strstr(path, ".h5.tmp")) return false;
  errno = ENOSPC;
  return true;
}
#define REPLACE(name, count, parameters, ...)                                        \
  extern "C" ssize_t name parameters {                                               \
    if (is_full(fd, count)) return -1;                                               \
    return reinterpret_cast<ssize_t(*) parameters>(dlsym(RTLD_NEXT, #name))(__VA_ARGS__); \
  }
REPLACE(write, n, (int fd, const void* from, size_t n), fd, from, n)
REPLACE(pwrite, n, (int fd, const void* from, size_t n, off_t at), fd, from, n, at)
REPLACE(pwrite64, n, (int fd, const void* from, size_t n, off_t at), fd, from, n, at)
REPLACE(writev, 2, (int fd, const iovec* from, int n), fd, from, n)
REPLACE(pwritev, 2, (int fd, const iovec* from, int n, off_t at), fd, from, n, at)
REPLACE(pwritev64, 2, (int fd, const iovec* from, int n, off_t at), fd, from, n, at)
"""


def test_writes_that_fail_in_the_middle(tmp):
    """Nothing before the transfers could have told. In collective ones, whatever library makes them,
    the other ranks cannot be told any more: the job ends all the same."""
    (tmp / "full.cpp").write_text(FULL_TARGET)
    made = cli.run("mpicxx", "-shared", "-fPIC", tmp / "full.cpp", "-o", tmp / "full.so", "-ldl")
    cli.expect(made)
    ck.start_files(tmp)
    values = {**RUN, "train__steps": 4, "checkpoint__keep_last": 0}
    cli.expect(runs.train(tmp, 4, train__stop_after=2, **values), rc=75)
    first = ck.file(tmp / "out", 2)
    # In Open MPI's own library rank 0 alone would write so little in a collective transfer.
    libraries = ck.mpi_io_libraries()
    ompio, romio = libraries[0], libraries[-1]
    for io, collective, use_async, victims in (
            (ompio, "false", "false", "2"), (romio, "false", "false", "2"),
            (romio, "true", "false", "2"), (romio, "true", "true", "2")):
        env = {"OMPI_MCA_io": io, "VICTIMS": victims, "LD_PRELOAD": tmp / "full.so"}
        result = ck.resume(tmp, 4, env=env, checkpoint__collective=collective,
                           checkpoint__async=use_async, **values)
        error = runs.expect_one_error(result, 1, "step 4 not saved", "older ones are intact",
                                      ".h5.tmp", "rank 2 on", seconds=30)
        assert ("so the job ends here" in error) == (collective == "true"), error
        assert not ck.file(tmp / "out", 4).exists() and first.exists(), ck.saved(tmp / "out")
    ck.verify(first, ranks=2)
    cli.expect(ck.resume(tmp, 4, **values))
    assert ck.saved(tmp / "out") == ["step-00000002.h5", "step-00000004.h5"], ck.saved(tmp / "out")


def test_damaged_structures_are_named(tmp):
    """A wrong byte in what HDF5 itself keeps; all bytes: unit/checkpoint_bytes_test."""
    ck.start_files(tmp)
    cli.expect(runs.train(tmp, 2, checkpoint__keep_last=0, **{**RUN, "train__steps": 4}))
    newest = ck.file(tmp / "out", 4)
    good = newest.read_bytes()
    places = {"superblock": 20, "root": good.index(b"OHDR") + 30, "a header": good.rindex(b"OHDR") + 20,
              "a name": good.index(b"exp_avg_sq"), "a checksum": good.index(b"xxh3_rows") + 30}
    for where, at in places.items():
        newest.write_bytes(good[:at] + bytes([good[at] ^ 0x11]) + good[at + 1:])
        runs.expect_one_error(cli.qshard("ckpt", "verify", newest, ranks=2), 1, newest.name)
        found = find_usable(tmp)
        assert found == "step-00000002.h5", (where, found)
    newest.write_bytes(good)
    assert find_usable(tmp) == newest.name


def find_usable(tmp):
    """What --resume auto takes, by asking for no more steps than it holds."""
    result = ck.resume(tmp, 3, **{**RUN, "train__steps": 2})
    cli.expect(result, out="nothing to do")
    return re.search(r"nothing to do: .*/(step-\d+\.h5)", result.out)[1]


def test_a_small_file_system_fills_up(tmp):
    small = tmp / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small],
                             capture_output=True)
    if mounted.returncode != 0:
        print("  no file system may be mounted here: the file size limit alone is tested")
        return
    try:
        ck.start_files(tmp)
        values = {**RUN, "train__out": small / "out", "checkpoint__keep_last": 0}
        for use_async in ("false", "true"):
            result = runs.train(tmp, 4, checkpoint__async=use_async, **values)
            runs.expect_one_error(result, 1, "not saved", "No space left", seconds=30)
            names = ck.saved(small / "out")
            assert names and not [n for n in names if n.endswith(".tmp")], names
            for name in names:
                ck.verify(small / "out" / "checkpoints" / name)
            shutil.rmtree(small / "out")
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_folder_that_cannot_be_made(tmp):
    ck.start_files(tmp)
    (tmp / "out").mkdir()
    (tmp / "out" / "checkpoints").write_text("a file")
    for use_async in ("false", "true"):
        result = runs.train(tmp, 4, train__overwrite="true", checkpoint__async=use_async, **RUN)
        runs.expect_one_error(result, 1, "step 2 not saved", tmp / "out" / "checkpoints")


def test_ranks_that_see_different_folders_are_told(tmp):
    ck.start_files(tmp)
    cli.expect(runs.train(tmp, 4, train__out="out", train__stop_after=2, **{**RUN, "train__steps": 8}),
               rc=75)
    (tmp / "empty").mkdir()
    values = {**RUN, "train__steps": 8, "train__out": "out"}
    for how in ("auto", "out/checkpoints/step-00000002.h5"):
        command = [cli.QSHARD, "train", *runs.options(tmp, **values), "--resume", how]
        result = cli.run(*cli.odd_launcher(4, "cd empty"), *command, cwd=tmp)
        error = runs.expect_one_error(result, 1, "rank 3 on", "step-00000002.h5")
        assert "rank 0 on" not in error, error
    # Nothing to resume, but the first save goes into a folder that only some of them see.
    values["train__out"] = "new"
    command = [cli.QSHARD, "train", *runs.options(tmp, **values)]
    result = cli.run(*cli.odd_launcher(4, "cd empty"), *command, cwd=tmp)
    runs.expect_one_error(result, 1, "rank 3 on", "step 2 not saved", "No such file")


def test_a_held_lock_does_not_matter(tmp):
    ck.start_files(tmp)
    cli.expect(runs.train(tmp, 2, **{**RUN, "train__steps": 2}))
    with open(ck.file(tmp / "out", 2), "rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for variable in (None, "FALSE"):
            result = ck.resume(tmp, 2, ck.file(tmp / "out", 2), env={
                "HDF5_USE_FILE_LOCKING": variable}, **{**RUN, "train__steps": 3,
                                                       "train__out": tmp / f"out{variable}"})
            cli.expect(result, out="going on with step 3")


def test_wrong_hints_are_refused_before_the_first_step(tmp):
    ck.start_files(tmp)
    result = runs.train(tmp, 2, checkpoint__hints="striping", **RUN)
    runs.expect_one_error(result, 2, "striping", "key=value")
    assert "step 1/" not in result.out, result


def test_weights_that_are_not_finite_are_not_saved(tmp):
    """A rate that blows the weights up: the run ends, what it had saved before stays."""
    ck.start_files(tmp)
    result = runs.train(tmp, 2, **{**RUN, "optim__lr": 1e30, "train__steps": 40,
                                   "checkpoint__every": 1, "optim__weight_decay": 0})
    assert result.rc == 1 and "finite" in result.err, result
    checkpoints = tmp / "out" / "checkpoints"
    for name in ck.saved(tmp / "out") if checkpoints.exists() else []:
        ck.verify(checkpoints / name)


if __name__ == "__main__":
    cli.main()
