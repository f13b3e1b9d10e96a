"""Training runs: what must be the same on any number of ranks, what they report and leave behind."""
import hashlib
import json
import re
import struct

import cli
import runs

STEP_FIELDS = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_ms",
               "model_flops_per_s", "peak_share", "memory_bytes"]


def tensors(path):
    """Name → shape of a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same_curve(a, b):
    assert len(a) == len(b), (len(a), len(b))
    for x, y in zip(a, b):
        assert runs.close(x["loss"], y["loss"]), (x, y)
        assert runs.close(x["grad_norm"], y["grad_norm"]), (x, y)


def test_same_curve_on_1_to_4_ranks(tmp):
    runs.start_files(tmp)
    values = dict(train__steps=50, optim__clip=0.5, optim__lr=0.01, train__log_every=7)
    curves = {}
    for ranks in (1, 2, 3, 4):
        result = runs.train(tmp, ranks, train__out=tmp / f"out{ranks}", **values)
        cli.expect(result)
        curves[ranks] = runs.metrics(tmp / f"out{ranks}")[0]
        # Each step and each console line once, whatever the ranks.
        assert [line["step"] for line in curves[ranks]] == list(range(1, 51))
        shown = [int(n) for n in re.findall(r"^step +(\d+)/50 ", result.out, re.M)]
        assert shown == [1, 7, 14, 21, 28, 35, 42, 49, 50], result
    for ranks in (2, 3, 4):
        same_curve(curves[ranks], curves[1])
    assert curves[1][-1]["loss"] < 0.8 * curves[1][0]["loss"], "it does not learn"
    assert max(line["grad_norm"] for line in curves[1]) > 0.5, "nothing was clipped"

    cli.expect(runs.train(tmp, 4, train__out=tmp / "again", **values))
    assert runs.without_clock(tmp / "again") == runs.without_clock(tmp / "out4")


def test_same_curve_for_every_split_into_micro_batches(tmp):
    runs.start_files(tmp)
    curves = []
    for ranks, micro in ((1, 1), (2, 2), (4, 2), (4, 1)):
        out = tmp / f"out{ranks}-{micro}"
        cli.expect(runs.train(tmp, ranks, train__out=out, train__global_batch=8,
                              train__micro_batch=micro))
        curves.append(runs.metrics(out)[0])
    for curve in curves[1:]:
        same_curve(curve, curves[0])


def test_initial_weights_depend_on_the_seed_alone(tmp):
    runs.start_files(tmp)
    digests = {}
    for ranks, seed in ((1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (1, 2)):
        out = tmp / f"out{ranks}-{seed}"
        cli.expect(runs.train(tmp, ranks, train__out=out, train__steps=1, train__seed=seed,
                              optim__lr=0, train__global_batch=24, train__save_model="true"))
        digests[ranks, seed] = digest(out / "model.safetensors")
    assert len({d for (_, seed), d in digests.items() if seed == 1}) == 1, digests
    assert digests[1, 2] != digests[1, 1]


def test_metrics_of_every_line(tmp):
    runs.start_files(tmp)
    runs.tokens(tmp / "val.bin", 500)
    cli.expect(runs.train(tmp, 2, data__val=tmp / "val.bin", train__steps=7, train__eval_every=3,
                          train__eval_samples=5, schedule__warmup_steps=2))
    steps, evaluations = runs.metrics(tmp / "out")
    for number, line in enumerate(steps, 1):
        assert list(line) == STEP_FIELDS, line
        assert line["step"] == number and line["tokens"] == number * 96, line
        assert runs.close(line["tokens_per_s"] * line["step_ms"] / 1e3, 96, 0.01), line
        assert runs.close(line["peak_share"], line["model_flops_per_s"] / 2e9, 1e-9), line
        assert line["memory_bytes"] > 1e6, line
    assert [line["lr"] for line in steps[:2]] == [0.0005, 0.001], steps
    assert [line["step"] for line in evaluations] == [3, 6, 7], evaluations
    assert all(line["val_tokens"] == 40 for line in evaluations), evaluations


def test_evaluation_does_not_depend_on_ranks(tmp):
    runs.start_files(tmp)
    runs.tokens(tmp / "val.bin", 500)
    found = []
    for ranks in (1, 3, 4):  # 5 sequences: some ranks get ignored labels only
        out = tmp / f"out{ranks}"
        cli.expect(runs.train(tmp, ranks, data__val=tmp / "val.bin", train__steps=2,
                              train__eval_samples=5, train__out=out))
        found.append(runs.metrics(out)[1][-1]["val_loss"])
    assert all(runs.close(loss, found[0]) for loss in found), found


def test_outputs(tmp):
    runs.start_files(tmp)
    result = runs.train(tmp, 4, train__save_model="true")
    cli.expect(result, out="loss (nats per token)")
    assert result.err == "", result
    assert str(tmp / "out") in result.out.splitlines()[-1], result
    assert sorted(p.name for p in (tmp / "out").iterdir()) == [
        "checkpoints", "config.json", "metrics.jsonl", "model.safetensors", "run.json"]
    shapes = tensors(tmp / "out" / "model.safetensors")
    assert len(shapes) == 2 + 2 * 11 and "lm_head.weight" not in shapes, shapes
    assert shapes["model.embed_tokens.weight"] == [61, 24]  # 61 rows on 4 ranks, without padding
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == [32, 24]
    settings = json.loads((tmp / "out" / "run.json").read_text())
    assert settings["train"]["global_batch"] == 12 and settings["optim"]["beta2"] == 0.95, settings
    # The saved model and settings start another run.
    cli.expect(cli.qshard("train", "--config", tmp / "out" / "run.json", "--model.config",
                          tmp / "out" / "config.json", "--train.out", tmp / "next", cwd=tmp))
    same_curve(runs.metrics(tmp / "next")[0], runs.metrics(tmp / "out")[0])


def test_untied_head_is_saved(tmp):
    runs.start_files(tmp)
    cli.expect(runs.train(tmp, 3, train__save_model="true", extra=["--model.tie_word_embeddings",
                                                                   "false"]))
    shapes = tensors(tmp / "out" / "model.safetensors")
    assert shapes["lm_head.weight"] == [61, 24] and len(shapes) == 3 + 2 * 11, shapes


def test_epochs_drop_the_same_remainder_everywhere(tmp):
    runs.model(tmp)
    runs.tokens(tmp / "train.bin", (4 * 3 + 1) * 8 + 1)  # 13 samples, 3 steps of 4 an epoch
    runs.tokens(tmp / "val.bin", 5 * 8 + 1)
    result = runs.train(tmp, 4, train__global_batch=4, train__steps=9, data__val=tmp / "val.bin",
                        train__eval_every=2)
    cli.expect(result, out="13 samples")
    assert "3 steps an epoch (1 samples left out of each)" in result.out, result
    assert len(runs.metrics(tmp / "out")[0]) == 9


def test_start_log_says_what_runs(tmp):
    runs.start_files(tmp)
    result = runs.train(tmp, 4, train__steps=1, train__param_dtype="bf16")
    cli.expect(result, out="numbers     parameters bf16, products in ")
    assert ", gradients reduced as f32, " in result.out, result
    assert "12 sequences = 4 ranks × 1 micro-batches × 3 sequences of 8 tokens" in result.out
    assert "4 on 1 node(s)" in result.out and "\ntransport   shm (" in result.out, result
    start = [line for line in result.out.split("\nstep 1/")[0].splitlines() if line]
    assert len(set(start)) == len(start), f"a line that more than one rank printed\n{result}"


def test_fp16_follows_f32(tmp):
    runs.start_files(tmp)
    values = dict(train__steps=30, optim__lr=0.01)
    curves = {}
    for ranks, dtype in ((1, "f32"), (1, "fp16"), (3, "fp16")):
        out = tmp / f"{dtype}-{ranks}"
        result = runs.train(tmp, ranks, train__out=out, train__param_dtype=dtype, **values)
        cli.expect(result)
        curves[dtype, ranks] = runs.metrics(out)[0]
        fields = STEP_FIELDS + (["loss_scale"] if dtype == "fp16" else [])
        assert all(list(line) == fields for line in curves[dtype, ranks]), result
    for ranks in (1, 3):
        for ours, exact in zip(curves["fp16", ranks], curves["f32", 1], strict=True):
            assert ours["loss_scale"] == 65536, ours
            assert ours["loss"] != exact["loss"] and runs.close(ours["loss"], exact["loss"], 2e-3), (
                ours, exact)


# Every gradient overflows at the scale of the first steps: they are skipped and told, and the run
# goes on; stopped amid an interval and resumed it has the same bits.
def test_fp16_overflow_is_skipped_and_told(tmp):
    runs.start_files(tmp)
    values = dict(train__steps=40, train__param_dtype="fp16", train__log_every=50,
                  train__save_model="true", extra=["--grad_scaler.init_scale", 2.0**40,
                                                   "--grad_scaler.growth_interval", 4])
    result = runs.train(tmp, 2, **values)
    cli.expect(result)
    lines = runs.metrics(tmp / "out")[0]
    skipped = [line for line in lines if "skipped" in line]
    assert 5 < len(skipped) < 35 and "skipped" in lines[0], skipped
    scale, good = 2.0**40, 0
    for line in lines:
        assert line["loss_scale"] == scale, (line, scale)
        good = 0 if "skipped" in line else good + 1
        scale *= 0.5 if good == 0 else 2 if good % 4 == 0 else 1
        good %= 4
        if "skipped" in line:
            assert "overflow" in line["skipped"], line
    assert result.out.count("skipped: a gradient overflowed at loss scale") == len(skipped), result
    assert f"{len(skipped)} step(s) skipped: a gradient overflowed" in result.out, result

    stop = next(i for i, line in enumerate(lines, 1) if i > 20 and line["loss_scale"] ==
                lines[i]["loss_scale"] == lines[i - 2]["loss_scale"])
    out = tmp / "resumed"
    cli.expect(runs.train(tmp, 2, **{**values, "train__out": out, "train__stop_after": stop}), rc=75)
    saved = cli.qshard("ckpt", "show", out / "checkpoints" / f"step-{stop:08}.h5")
    cli.expect(saved, out=f"loss_scale   {lines[stop]['loss_scale']:.1f}")
    extra = [*values["extra"], "--resume", "auto"]
    cli.expect(runs.train(tmp, 2, **{**values, "train__out": out, "extra": extra}))
    assert [line for line in runs.without_clock(out) if "loss" in line] == [
        line for line in runs.without_clock(tmp / "out") if "loss" in line]
    assert digest(out / "model.safetensors") == digest(tmp / "out" / "model.safetensors")


# Nothing mends a loss that is not finite by itself: the scale falls to 1, and the run ends.
def test_fp16_that_never_fits_ends_the_run(tmp):
    runs.start_files(tmp)
    result = runs.train(tmp, 2, train__param_dtype="fp16", train__steps=9, optim__lr=1e6,
                        optim__clip=0, extra=["--grad_scaler.init_scale", 4])
    runs.expect_one_error(result, 1, "not finite at loss scale 1", "step ")


def test_one_cpu_for_four_ranks_is_warned_of(tmp):
    runs.start_files(tmp)
    result = cli.run("taskset", "-c", "0", *cli.launcher(4), cli.QSHARD, "train",
                     *runs.options(tmp, train__steps=1), env={"OMP_NUM_THREADS": None}, cwd=tmp)
    cli.expect(result, out="1 CPU(s) for 4 ranks")
    assert result.out.count("\nwarning ") == 1, result
    assert "1 thread(s) a rank" in result.out, result


def test_alone_without_mpirun(tmp):
    runs.start_files(tmp)
    cli.expect(runs.train(tmp, 0, train__steps=1), out="1 on 1 node(s)")


def test_settings_as_json(tmp):
    result = cli.qshard("train", "--train.steps", "7", "--print-config", ranks=2, cwd=tmp)
    cli.expect(result)
    assert json.loads(result.out)["train"]["steps"] == 7, result


def test_help_is_printed_once(tmp):
    result = cli.qshard("train", "--help", ranks=3, cwd=tmp)
    cli.expect(result, out="--train.global_batch")
    assert result.out.count("--train.global_batch INT") == 1, result


if __name__ == "__main__":
    cli.main()
