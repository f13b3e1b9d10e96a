"""`qshard train` on GPUs that the simulator plays (test/cudasim): the CPU's curve, the same bits in
another run and after a stop, and checkpoints that pass between both backends."""
import os
import re
import signal
import struct

from gpu_runs import RUN, SEEDS, resume, same_values, train, weights
import checkpoints as ck
import cli
import runs


def header(path):
    data = path.read_bytes()
    return data[:8 + struct.unpack("<Q", data[:8])[0]]


# --- numbers
def test_f32_follows_the_cpu(tmp):
    """The same f32 arithmetic with sums in another order: as far from the CPU as its own runs on
    other numbers of ranks are from each other (test/cli/test_train.py)."""
    runs.start_files(tmp)
    runs.tokens(tmp / "val.bin", 100)
    values = dict(data__val=tmp / "val.bin", train__eval_every=3)
    train(tmp, 1, "cpu", backend="cpu", **values)
    expected = ck.curve(tmp / "cpu")
    assert max(norm for _, norm, _ in expected.values()) > 0.5, "nothing was clipped"
    for ranks in (1, 2, 4):
        out = tmp / f"cuda{ranks}"
        result = train(tmp, ranks, out, **values)
        cli.expect(result, out="transport   nccl (NCCL ")
        gpus = re.findall(r"^rank +(\d+) cpus \d+ threads \d+ .*PCI (\S+)\) on \S+$", result.out, re.M)
        assert len(set(gpus)) == ranks and gpus[-1][0] == str(ranks - 1), result
        ck.same_curve(ck.curve(out), expected, 1e-5)
        for ours, theirs in zip(runs.metrics(out)[1], runs.metrics(tmp / "cpu")[1], strict=True):
            assert runs.close(ours["val_loss"], theirs["val_loss"]), (ours, theirs)


def test_16_bits_follow_the_cpu(tmp):
    """Rounded at the same places, but from sums in another order, so to other values now and then.
    Each of the two is as far from f32 as the CPU's, which makes twice that between them."""
    runs.start_files(tmp)
    train(tmp, 1, "f32", backend="cpu")
    exact = ck.curve(tmp / "f32")
    for dtype, all_ranks in (("bf16", (1, 2, 4)), ("fp16", (1, 4))):
        train(tmp, 1, f"cpu-{dtype}", backend="cpu", train__param_dtype=dtype)
        rounded = ck.curve(tmp / f"cpu-{dtype}")
        for what in (0, 1):  # loss, norm
            limit = max(abs(rounded[s][what] / exact[s][what] - 1) for s in exact)
            for ranks in all_ranks:
                out = tmp / f"{dtype}-{ranks}"
                if what == 0:
                    train(tmp, ranks, out, train__param_dtype=dtype)
                off = max(abs(ck.curve(out)[s][what] / rounded[s][what] - 1) for s in exact)
                assert 0 < off <= 2 * limit, (dtype, what, ranks, off, limit)


def test_runs_and_resumed_runs_are_the_same_bits(tmp):
    """Whatever the order in which the GPU runs things; saved behind training."""
    runs.start_files(tmp)
    cases = [(2, dict(checkpoint__async="true", checkpoint__every=2, train__micro_batch=2)),
             (4, dict(train__param_dtype="bf16", train__reduce_dtype="bf16",
                      fsdp__reshard_after_forward="false", checkpoint__async="true")),
             (3, dict(train__param_dtype="fp16", train__reduce_dtype="fp16"))]
    for ranks, values in cases:
        straight, again, resumed = (f"{name}{ranks}" for name in ("straight", "again", "resumed"))
        train(tmp, ranks, straight, **values)
        if ranks == 2:
            train(tmp, ranks, again, **values)
            assert ck.curve(tmp / again) == ck.curve(tmp / straight)
            same_values(ck.file(tmp / again, 6), ck.file(tmp / straight, 6))
        train(tmp, ranks, resumed, rc=75, train__stop_after=3, **values)
        cli.expect(resume(tmp, ranks, resumed, **values), out="going on with step 4")
        assert ck.curve(tmp / resumed) == ck.curve(tmp / straight), ranks
        assert weights(tmp / resumed) == weights(tmp / straight), ranks
        same_values(ck.file(tmp / resumed, 6), ck.file(tmp / straight, 6))
    assert "step-00000004.h5" in ck.saved(tmp / "straight2"), ck.saved(tmp / "straight2")


def test_memory_is_as_planned(tmp):
    """To the operators' scratch, offloaded or not: page-locked pieces of checkpoints are planned."""
    runs.start_files(tmp)
    for ranks, offload in ((1, "none"), (2, "none"), (2, "optimizer")):
        result = train(tmp, ranks, f"{offload}{ranks}", fsdp__offload=offload)
        planned, off_by = re.findall(r"^  total +([\d.]+ \w+) .* ([+-][\d.]+) %$", result.out, re.M)[-1]
        assert planned.endswith(" MB") and abs(float(off_by)) < 1, result


def test_saves_behind_training_while_mpi_moves_gpu_memory(tmp):
    """The thread that writes calls MPI and waits for the GPU, but moves no step along."""
    runs.start_files(tmp)
    for out in ("straight", "again"):
        result = runs.train(tmp, 2, timeout=240,
                            env={"CUDASIM_SEED": next(SEEDS), "CUDASIM_CUDA_AWARE": 1},
                            **{**RUN, "device__backend": "cuda", "comm__transport": "mpi-cuda",
                               "checkpoint__async": "true", "checkpoint__every": 1,
                               "train__out": tmp / out})
        cli.expect(result, out="GPU memory straight to")
    same_values(ck.file(tmp / "again", 6), ck.file(tmp / "straight", 6))


# --- what is written
def test_units_of_several_layers_are_the_same_bits(tmp):
    runs.start_files(tmp)
    runs.model(tmp, num_hidden_layers=3)
    for k in 1, 2, 3:
        train(tmp, 3, f"k{k}", fsdp__layers_per_unit=k, train__micro_batch=2)
        assert runs.without_clock(tmp / f"k{k}") == runs.without_clock(tmp / "k1")
        assert weights(tmp / f"k{k}") == weights(tmp / "k1")


def test_checkpoints_go_to_other_ranks_and_to_the_cpu_and_back(tmp):
    runs.start_files(tmp)
    train(tmp, 1, "cpu", backend="cpu")
    expected = ck.curve(tmp / "cpu")
    first = train(tmp, 2, "cuda", rc=75, train__stop_after=2)
    assert "stopped after step 2, saved" in first.out, first
    train(tmp, 4, "onCpu", backend="cpu", rc=75, train__stop_after=2)
    saved = {"cuda": ck.file(tmp / "cuda", 2), "cpu": ck.file(tmp / "onCpu", 2)}
    for path in saved.values():
        ck.verify(path)
    for written, backend, ranks in (("cuda", "cuda", 1), ("cuda", "cuda", 4), ("cuda", "cpu", 3),
                                    ("cpu", "cuda", 2)):
        out = f"{written}-{backend}{ranks}"
        result = resume(tmp, ranks, out, saved[written], backend=backend)
        assert "differs" not in result.out, result
        curve = ck.curve(tmp / out)
        assert sorted(curve) == [3, 4, 5, 6], curve
        ck.same_curve(curve, {step: expected[step] for step in curve}, 1e-5)


def test_models_are_written_and_read_as_on_the_cpu(tmp):
    runs.start_files(tmp)
    for out, backend, ranks in (("cpu", "cpu", 1), ("cuda", "cuda", 4)):
        train(tmp, ranks, out, backend=backend)
    cpu, cuda = (tmp / out / "model.safetensors" for out in ("cpu", "cuda"))
    assert header(cuda) == header(cpu) and cuda.stat().st_size == cpu.stat().st_size
    assert (tmp / "cuda" / "config.json").read_text() == (tmp / "cpu" / "config.json").read_text()
    # The weights of the last checkpoint, which other code reads.
    cli.expect(cli.qshard("ckpt", "export", ck.file(tmp / "cuda", 6), "--to", "hf", tmp / "hf"))
    assert weights(tmp / "hf") == weights(tmp / "cuda")
    # Another run begins with them: at rate 0 it writes the same bits, in any dtype that it gathers.
    for ranks, dtype in ((1, "bf16"), (2, "f32"), (4, "bf16")):
        out = f"next{ranks}"
        result = train(tmp, ranks, out, extra=["--init", f"hf:{tmp / 'cpu'}"], optim__lr=0,
                       schedule__min_lr=0, train__steps=1, schedule__warmup_steps=0,
                       train__param_dtype=dtype)
        assert f"weights     {tmp / 'cpu'}" in result.out, result
        assert weights(tmp / out) == weights(tmp / "cpu"), ranks
    result = train(tmp, 2, "only", extra=["--init", "weights-only", "--resume",
                                          ck.file(tmp / "cuda", 6)],
                   optim__lr=0, schedule__warmup_steps=0, train__steps=1)
    assert "weights only, starting at step 1" in result.out, result
    assert weights(tmp / "only") == weights(tmp / "cuda")


def test_ranks_without_rows_take_part(tmp):
    """The last of 5 ranks holds no row of a norm over 8."""
    runs.start_files(tmp)
    values = dict(train__global_batch=10, checkpoint__collective="true", train__save_model="false")
    train(tmp, 5, "out", rc=75, train__stop_after=1, **values)
    ck.verify(ck.file(tmp / "out", 1), ranks=3)
    result = resume(tmp, 5, "out", rc=75, train__stop_after=1, **values)
    assert "going on with step 2" in result.out, result


# --- signals
def test_a_signal_to_one_rank_saves_and_leaves(tmp):
    runs.start_files(tmp)
    first, last = [], 0
    for ranks, number, use_async in ((4, signal.SIGUSR1, "false"), (2, signal.SIGTERM, "true")):
        values = {**RUN, "device__backend": "cuda", "checkpoint__async": use_async}
        del values["train__steps"]
        process = ck.start(tmp, ranks, extra=first, **values)
        ck.wait_for(process, lambda: ck.steps_done(tmp / "out") > last + 2, 120)
        os.kill(ck.ranks_of(process)[ranks - 1], number)
        result = cli.finish(process, timeout=120)
        cli.expect(result, rc=75, out="stopped after step")
        last = max(ck.curve(tmp / "out"))
        assert f"stopped after step {last}, saved" in result.out, result
        assert ck.saved(tmp / "out")[-1] == ck.file(tmp / "out", last).name, ck.saved(tmp / "out")
        ck.verify(ck.file(tmp / "out", last))
        first = ["--resume", "auto"]
    assert "going on with step" in result.out, result


if __name__ == "__main__":
    cli.main()
