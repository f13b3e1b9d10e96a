"""Saving and resuming: the same run as without a stop, on the same and on other numbers of ranks."""
import json
import os
import re
import shutil
import subprocess

import checkpoints as ck
import cli
import runs

# 3000 tokens: 93 samples, 3 steps an epoch.
RUN = dict(train__seq=32, train__global_batch=24, train__steps=8, optim__lr=0.01,
           schedule__warmup_steps=3)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_resume_is_bitwise_the_uninterrupted_run(tmp):
    ck.start_files(tmp)
    cases = [(4, dict(train__micro_batch=2)),  # step 5 is in the middle of an epoch, shuffled
             (3, dict(train__param_dtype="bf16", checkpoint__async="true")),
             (8, dict(data__shuffle="false", comm__transport="mpi", checkpoint__every=2))]
    for ranks, values in cases:
        values = {**RUN, **values, "train__save_model": "true"}
        straight, resumed = tmp / f"straight{ranks}", tmp / f"resumed{ranks}"
        cli.expect(runs.train(tmp, ranks, **{**values, "train__out": straight}))
        values["train__out"] = resumed
        cli.expect(runs.train(tmp, ranks, train__stop_after=5, **values), rc=75)
        result = ck.resume(tmp, ranks, **values)
        cli.expect(result, out="going on with step 6")
        assert ck.curve(resumed) == ck.curve(straight), (ranks, ck.curve(resumed))
        assert weights(resumed) == weights(straight), ranks
        lines = [json.loads(line) for line in (resumed / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9)), lines
        mark = [line for line in lines if "resumed_from" in line]
        assert [line["step"] for line in mark] == [5], lines
        assert mark[0]["resumed_from"].endswith("step-00000005.h5"), lines


def test_every_number_of_ranks_goes_on_with_the_same_curve(tmp):
    ck.start_files(tmp)
    values = {**RUN, "train__global_batch": 840 // 7, "train__seq": 8}  # 120 by 1, 2, 3, 4, 5, 8
    values["train__steps"] = 5
    cli.expect(runs.train(tmp, 4, **{**values, "train__out": tmp / "straight"}))
    cli.expect(runs.train(tmp, 4, train__stop_after=3, **values), rc=75)
    expected = ck.curve(tmp / "straight")
    for ranks in (1, 2, 3, 5, 8):
        out = tmp / f"out{ranks}"
        shutil.copytree(tmp / "out", out)
        cli.expect(ck.resume(tmp, ranks, **{**values, "train__out": out}))
        ck.same_curve(ck.curve(out), expected)
    # And back: saved by 5 ranks at the end, two more steps on 4.
    values["train__steps"] = 7
    for ranks, out in ((4, tmp / "out5"), (1, tmp / "straight")):
        result = ck.resume(tmp, ranks, **{**values, "train__out": out})
        cli.expect(result, out="train.steps: 5 → 7")
    ck.same_curve(ck.curve(tmp / "out5"), ck.curve(tmp / "straight"))


def test_seven_ranks_with_empty_shards(tmp):
    ck.start_files(tmp)
    values = {**RUN, "train__global_batch": 28, "train__steps": 4}
    for ranks in (4, 7):
        cli.expect(runs.train(tmp, ranks, train__stop_after=2,
                              **{**values, "train__out": tmp / f"out{ranks}"}), rc=75)
    cli.expect(ck.resume(tmp, 7, **{**values, "train__out": tmp / "out4"}))
    cli.expect(ck.resume(tmp, 4, **{**values, "train__out": tmp / "out7"}))
    ck.same_curve(ck.curve(tmp / "out4"), ck.curve(tmp / "out7"))


def structure(path):
    """What h5dump says of the file but for who wrote it when."""
    dump = subprocess.run(["h5dump", "-A", path], capture_output=True, text=True, check=True).stdout
    parts = re.split(r'(?=ATTRIBUTE ")', dump.replace(str(path), "FILE"))
    varying = ('ATTRIBUTE "world_size"', 'ATTRIBUTE "written_at"', 'ATTRIBUTE "xxh3_header"')
    return [part for part in parts if not part.startswith(varying)]


def test_the_file_is_the_same_whatever_ranks_wrote_it(tmp):
    """After one step at rate 0: the weights, and so their checksums, agree bit for bit; the moments
    depend on the order of sums, so their checksums are left out."""
    if not shutil.which("h5dump"):
        print("  h5dump is not installed: the structure is checked by mpi/checkpoint_test alone")
        return
    ck.start_files(tmp)
    values = {**RUN, "train__steps": 1, "schedule__warmup_steps": 0, "optim__lr": 0,
              "train__out": tmp / "out"}
    found = []
    for ranks in (1, 2, 4):
        cli.expect(runs.train(tmp, ranks, **values))
        parts = structure(ck.file(tmp / "out", 1))
        # Checksums of gradients' moments depend on rounding, those of the weights may not.
        moments = False
        kept = []
        for part in parts:
            if 'GROUP "optim"' in part:
                moments = True
            if moments and part.startswith('ATTRIBUTE "xxh3_rows"'):
                part = re.sub(r"\(0\): -?\d+", "", part)
            kept.append(part)
        found.append(kept)
        shutil.rmtree(tmp / "out")
    assert 'DATASET "model.embed_tokens.weight"' in "".join(found[0])
    assert found[0] == found[1] == found[2]


def test_transfers_give_the_same_values(tmp):
    """Independent and collective, by both of Open MPI's MPI-IO libraries, uneven numbers of ranks."""
    ck.start_files(tmp)
    values = {**RUN, "train__steps": 3, "train__save_model": "true"}
    for ranks in (3, 4, 7):
        batch = 28 if ranks == 7 else 24
        curves, bytes_ = [], []
        for io in ck.mpi_io_libraries():
            for collective in ("false", "true") if ranks == 4 else ("true",):
                out = tmp / f"{ranks}-{io}-{collective}"
                now = {**values, "train__out": out, "train__global_batch": batch,
                       "checkpoint__collective": collective, "checkpoint__piece_mb": 1,
                       "checkpoint__alignment_kb": 64}
                env = {"OMPI_MCA_io": io}
                cli.expect(runs.train(tmp, ranks, train__stop_after=2, env=env, **now), rc=75)
                cli.expect(ck.resume(tmp, ranks, env=env, **now))
                curves.append(ck.curve(out))
                bytes_.append(weights(out))
        assert all(c == curves[0] for c in curves) and all(b == bytes_[0] for b in bytes_), ranks


def test_collective_transfers_by_every_component_of_ompio(tmp):
    found = shutil.which("ompi_info") and cli.run("ompi_info", "--parsable").out
    components = sorted(set(re.findall(r"^mca:fcoll:(\w+):version", found or "", re.M)))
    if not components:
        print("  no fcoll components: this is not Open MPI")
        return
    ck.start_files(tmp)
    for name in components:
        values = {**RUN, "train__steps": 2, "schedule__warmup_steps": 0, "train__out": tmp / name,
                  "checkpoint__collective": "true", "checkpoint__piece_mb": 1}
        cli.expect(runs.train(tmp, 3, env={"OMPI_MCA_io": "ompio", "OMPI_MCA_fcoll": name}, **values))
        ck.verify(ck.file(tmp / name, 2), ranks=2)


def test_nothing_to_do_leaves_everything_alone(tmp):
    ck.start_files(tmp)
    cli.expect(runs.train(tmp, 2, **{**RUN, "train__steps": 2, "schedule__warmup_steps": 1}))
    before = ck.file(tmp / "out", 2).stat()
    metrics = (tmp / "out" / "metrics.jsonl").read_text()
    for steps in (2, 1):
        values = {**RUN, "train__steps": steps, "schedule__warmup_steps": 1}
        result = ck.resume(tmp, 2, **values)
        cli.expect(result, out="nothing to do")
    assert ck.file(tmp / "out", 2).stat() == before
    assert (tmp / "out" / "metrics.jsonl").read_text() == metrics


def test_a_longer_run_follows_its_own_schedule(tmp):
    ck.start_files(tmp)
    cli.expect(runs.train(tmp, 2, **{**RUN, "train__out": tmp / "long"}))
    cli.expect(runs.train(tmp, 2, **{**RUN, "train__steps": 4}))
    result = ck.resume(tmp, 2, **RUN)
    cli.expect(result, out="differs from the saved run: train.steps: 4 → 8")
    long, extended = ck.curve(tmp / "long"), ck.curve(tmp / "out")
    assert [extended[s][2] for s in range(5, 9)] == [long[s][2] for s in range(5, 9)], extended


def test_changed_options_are_listed_and_need_permission(tmp):
    ck.start_files(tmp)
    cli.expect(runs.train(tmp, 2, train__stop_after=2, **RUN), rc=75)
    for change in (dict(train__seed=7), dict(optim__lr=0.02), dict(train__global_batch=12),
                   dict(data__shuffle="false"), dict(optim__beta1=0.8)):
        key = next(iter(change)).replace("__", ".")
        runs.expect_one_error(ck.resume(tmp, 2, **{**RUN, **change}), 2, key, "--allow-changes")
    harmless = dict(train__micro_batch=1, train__log_every=3, comm__transport="mpi",
                    checkpoint__every=1)
    result = ck.resume(tmp, 4, train__stop_after=1, **{**RUN, **harmless})
    cli.expect(result, rc=75)
    assert "differs" not in result.out, result
    result = ck.resume(tmp, 2, extra=["--allow-changes"], **{**RUN, "optim__lr": 0.02})
    cli.expect(result, out="differs from the saved run: optim.lr: 0.01 → 0.02")


def test_another_model_is_refused_and_weights_alone_are_taken_on_request(tmp):
    ck.start_files(tmp)
    cli.expect(runs.train(tmp, 2, train__stop_after=2, **RUN), rc=75)
    path = ck.file(tmp / "out", 2)
    wider = ["--allow-changes", "--model.intermediate_size", "128"]
    result = ck.resume(tmp, 2, path, extra=wider, **{**RUN, "train__out": tmp / "other"})
    runs.expect_one_error(result, 1, "gate_proj.weight", "[128, 64]", "[96, 64]")
    result = ck.resume(tmp, 3, path, extra=["--init", "weights-only"],
                       **{**RUN, "train__out": tmp / "next", "train__seed": 5})
    cli.expect(result, out="weights only, starting at step 1")
    assert sorted(ck.curve(tmp / "next")) == list(range(1, 9))
    assert ck.curve(tmp / "next")[1][0] != ck.curve(tmp / "out")[1][0]


def test_resume_auto_starts_when_there_is_nothing(tmp):
    """A job that is started again and again with one command line, also after it was killed before
    its first checkpoint."""
    ck.start_files(tmp)
    values = {**RUN, "train__steps": 4}
    process = ck.start(tmp, 2)
    ck.wait_for(process, lambda: ck.steps_done(tmp / "out") > 2)
    for pid in ck.ranks_of(process):
        os.kill(pid, 9)
    cli.finish(process, 20)
    result = ck.resume(tmp, 2, train__stop_after=1, **values)
    cli.expect(result, rc=75, out="no checkpoint in")
    cli.expect(ck.resume(tmp, 4, **values), out="going on with step 2")
    cli.expect(ck.resume(tmp, 4, **values), out="nothing to do")
    cli.expect(cli.qshard("ckpt", "ls", tmp / "out" / "checkpoints"))


def test_saves_are_logged(tmp):
    ck.start_files(tmp)
    result = runs.train(tmp, 2, checkpoint__every=3, checkpoint__async="true", **RUN)
    cli.expect(result)
    assert re.findall(r"^saved step (\d+): .* MB in [\d.]+ s, [\d.]+ GB/s$", result.out, re.M) == [
        "3", "6", "8"], result
    lines = [json.loads(line) for line in (tmp / "out" / "metrics.jsonl").read_text().splitlines()]
    sizes = {line["checkpoint_bytes"] for line in lines if "checkpoint" in line}
    assert len(sizes) == 1 and sizes.pop() > 3 * 4 * 515 * 64, lines
    assert "HDF5 1." in result.out, result


def test_write_calls_do_not_grow_with_the_square_of_ranks(tmp):
    if not shutil.which("strace"):
        print("  strace is not installed: write calls are not counted")
        return
    ck.start_files(tmp)
    calls = {}
    for ranks, layers in ((1, 2), (4, 2), (4, 8)):
        out = tmp / f"out{ranks}-{layers}"
        log = tmp / f"log{ranks}-{layers}"
        trace = ["strace", "-f", "-y", "-e", "trace=pwrite64,pwritev,write", "-o", log]
        values = {**RUN, "train__steps": 1, "schedule__warmup_steps": 0, "train__out": out}
        result = cli.run(*trace, *cli.launcher(ranks), cli.QSHARD, "train",
                         *runs.options(tmp, **values), "--model.num_hidden_layers", layers, cwd=tmp,
                         env={"ASAN_OPTIONS": "detect_leaks=0"})  # impossible under strace
        cli.expect(result)
        calls[ranks, layers] = log.read_text(errors="replace").count(".h5.tmp")
    datasets = {layers: 3 * (2 + 11 * layers) for layers in (2, 8)}
    for (ranks, layers), count in calls.items():
        assert 0 < count <= datasets[layers] * (ranks + 6), calls


if __name__ == "__main__":
    cli.main()
