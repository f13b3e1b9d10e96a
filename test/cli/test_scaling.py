"""scripts/scaling.py and plot_scaling.py: what is run, what is counted, what is compared."""
import csv
import json
import sys

import cli
import runs

POINT = {"mode": "strong", "batch": 4, "transport": "shm", "mesh": "full", "dtype": "bf16", "prefetch": "1",
         "checkpointing": "none", "ranks": 2, "global_batch": 4}
SCALING = cli.ROOT / "scripts" / "scaling.py"
PLOT = cli.ROOT / "scripts" / "plot_scaling.py"


def study(tmp, name="study", ranks=(1, 2), extra=(), options=()):
    if not (tmp / "train.bin").exists():
        runs.start_files(tmp)
    return cli.run(sys.executable, SCALING, "run", tmp / name, "--ranks", *ranks, "--mode", "strong", "weak",
                   "--dtype", "f32", "--batch", 4, "--warmup", 2, "--steps", 3, "--repeats", 2, *extra,
                   "--", "--model.config", tmp / "model.json", "--data.train", tmp / "train.bin",
                   "--data.format", "raw-u32", "--train.seq", 8, *options, timeout=300)


def folder_of(root, **changed):
    point = {**POINT, **changed}
    del point["global_batch"]
    return root / "runs" / "-".join(str(value) for value in point.values())


def planted(tmp, name, times):
    """A study of one point: a list of step times in ms for each repeat, after one warm-up step."""
    root = tmp / name
    point = folder_of(root)
    for repeat, steps in enumerate(times):
        folder = point / str(repeat)
        folder.mkdir(parents=True)
        lines = [{"step": i, "loss": 1.0, "step_ms": ms, "model_flops_per_s": 6e12} for i, ms in enumerate([1000.0, *steps], 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "run.json").write_text('{"train": {"seq": 10}}')
    (point / "point.json").write_text(json.dumps(POINT))
    (root / "study.json").write_text(json.dumps({"warmup_steps": 1, "timed_steps": len(times[0])}))
    return root


def table(root):
    return list(csv.DictReader((root / "scaling.csv").open()))


def test_study(tmp):
    cli.expect(study(tmp), out="scaling.csv")
    points = table(tmp / "study")
    assert [(p["mode"], p["ranks"]) for p in points] == [
        ("strong", "1"), ("strong", "2"), ("weak", "1"), ("weak", "2")], points
    for point in points:
        ranks, batch = int(point["ranks"]), int(point["global_batch_sequences"])
        assert batch == 4 * (ranks if point["mode"] == "weak" else 1), point
        assert int(point["tokens_per_step"]) == batch * 8, point
        total = float(point["total_tokens_per_s"])
        assert runs.close(total, float(point["tokens_per_s_per_rank"]) * ranks), point
        assert runs.close(total * float(point["step_ms_median"]), batch * 8 * 1e3), point
        assert (float(point["step_ms_lowest"]) <= float(point["step_ms_median"])
                <= float(point["step_ms_highest"])), point
        assert point["repeats"] == "2" and point["warmup_steps"] == "2", point
    assert points[0]["efficiency_percent"] == "100.0", points[0]
    document = json.loads((tmp / "study" / "scaling.json").read_text())
    assert len(document["points"]) == 4 and len(document["provenance"]["program_sha256"]) == 64

    # What is complete is not run again, what is not is.
    again = study(tmp)
    cli.expect(again)
    assert "strong" not in again.out.split("mode ")[0], again
    lost = folder_of(tmp / "study", mode="weak", dtype="f32") / "1" / "metrics.jsonl"
    lost.write_text("\n".join(lost.read_text().splitlines()[:3]))
    again = study(tmp)
    cli.expect(again, out=f"8/8 {lost.parent.relative_to(tmp / 'study')}\n")
    assert again.out.count("/8 ") == 1 and len(runs.metrics(lost.parent)[0]) == 5, again


def test_other_settings_do_not_mix(tmp):
    cli.expect(study(tmp, ranks=[1]))
    cli.expect(study(tmp, ranks=[1], options=["--train.seed", 2]), rc=2, err="another qshard_options")


def test_batch_that_does_not_divide(tmp):
    cli.expect(study(tmp, ranks=[1, 3]), rc=2, err="--batch 4 does not divide by 3 ranks")
    assert not (tmp / "study" / "runs").exists()


def test_failed_run_is_shown(tmp):
    cli.expect(study(tmp, ranks=[1], options=["--optim.lr", "x"]), rc=2, err="log.txt")


def test_warm_up_is_left_out_and_medians_are_taken(tmp):
    root = planted(tmp, "a", [[10, 11, 90], [12, 20, 13], [5, 14, 15]])
    cli.expect(cli.run(sys.executable, SCALING, "collect", root))
    point, = table(root)
    assert [float(point[f"step_ms_{x}"]) for x in ("median", "lowest", "highest")] == [13, 11, 14], point
    assert runs.close(float(point["total_tokens_per_s"]), 40 / 13e-3), point


def test_units_are_in_the_names(tmp):
    root = planted(tmp, "a", [[10, 11, 12]])
    cli.expect(cli.run(sys.executable, SCALING, "collect", root))
    units = ("_ms_", "_per_s", "percent", "ratio", "sequences", "steps", "ranks", "repeats", "tokens_per_step")
    for name in table(root)[0]:
        assert name in POINT or any(u in name for u in units), name


def test_comparison(tmp):
    chance = [10.0, 10.3, 9.9, 10.1, 10.2]
    before = planted(tmp, "before", [[x] * 3 for x in chance])
    for name, factor, verdict in (("same", 1.0, "no difference shown"), ("slow", 1.2, "slower"),
                                  ("fast", 0.8, "faster"), ("near", 1.003, "no difference shown")):
        after = planted(tmp, name, [[x * factor] * 3 for x in reversed(chance)])
        result = cli.run(sys.executable, SCALING, "compare", before, after)
        cli.expect(result, out=verdict)
        if factor in (0.8, 1.2):  # 2 of the 252 ways to deal ten values out to two fives
            assert f" {2 / 252:.3f} " in result.out, result
    few = planted(tmp, "few", [[x * 2] * 3 for x in chance[:3]])
    cli.expect(cli.run(sys.executable, SCALING, "compare", few, planted(tmp, "few2", [[1] * 3] * 3)),
               out=f"{2 / 20:.3f}  no difference shown")


def span(rank, category, phase, begin, end):
    return {"ph": "X", "pid": rank, "cat": category, "ts": begin, "dur": end - begin, "name": "x",
            "args": {"phase": phase}}


def add_trace(root):
    """A step of warm-up and one of 100 us: rank 0 waits 10 us, rank 1 30 us, both compute for 50."""
    events = [{"ph": "M", "pid": 0, "name": "process_name"}]
    for rank, wait in (0, 10), (1, 30):
        events += [span(rank, "compute", "forward", 0, 500), span(rank, "compute", "optimizer", 500, 900),
                   span(rank, "gather", "forward", 1000, 1000 + wait),
                   span(rank, "compute", "forward", 1030, 1070), span(rank, "io", "", 1000, 1100),
                   span(rank, "compute", "optimizer", 1090, 1100)]
    (folder_of(root) / "traced").mkdir()
    (folder_of(root) / "traced" / "trace.json").write_text(json.dumps({"traceEvents": events}))


def add_plan(root):
    (folder_of(root) / "plan.json").write_text('{"seconds": {"step": 0.014}}')
    (root / "hardware-2.json").write_text('{"peak_tflops": {"bf16": 12.0, "f32": 1.0}}')


def test_shares_and_prediction(tmp):
    root = planted(tmp, "a", [[10, 11, 12]])
    add_trace(root)
    add_plan(root)
    cli.expect(cli.run(sys.executable, SCALING, "collect", root))
    point, = table(root)
    found = {name: float(point[name]) for name in (
        "compute_percent", "exposed_communication_percent", "other_percent", "predicted_step_ms",
        "mfu_percent")}
    # 6 of 2 · 12 TFLOP/s
    for name, value in zip(found, (50, 20, 30, 14, 25)):
        assert runs.close(found[name], value), (name, found)
    (folder_of(root) / "traced" / "trace.json").write_text('{"traceEvents": [')
    cli.expect(cli.run(sys.executable, SCALING, "collect", root), rc=2, err="trace.json")


def test_traced_and_predicted_study(tmp):
    """One step of each kind, measured for real; meshes run with their own number of ranks only."""
    cli.expect(study(tmp, ranks=[1, 2], extra=["--calibrate", "--trace", "--mesh", "full", "2x1"]))
    points = table(tmp / "study")
    assert [(p["mode"], p["mesh"], p["ranks"]) for p in points] == [
        (mode, *rest) for mode in ("strong", "weak") for rest in (
            ("2x1", "2"), ("full", "1"), ("full", "2"))], points
    for point in points:
        parts = [float(point[f"{name}_percent"]) for name in ("compute", "exposed_communication", "other")]
        assert runs.close(sum(parts), 100) and parts[0] > 0 and parts[1] >= 0, point
        assert float(point["predicted_step_ms"]) > 0 and 0 < float(point["mfu_percent"]) < 200, point


def test_refusals(tmp):
    cli.expect(study(tmp, ranks=[1], extra=["--mesh", "2x2"]), rc=2, err="a mesh of 4 ranks")
    cli.expect(study(tmp, ranks=[1], extra=["--trace", "--warmup", 7]), rc=2, err="traces 10 steps")
    cli.expect(study(tmp, ranks=[1], extra=["--trace", "--launch", "sbatch x.sbatch"]), rc=2,
               err="within an allocation")
    cli.expect(study(tmp, ranks=[1], extra=["--hardware", tmp / "none.json"]), rc=2,
               err="none.json: no such file")
    assert not (tmp / "study").exists()


def test_report(tmp):
    root = planted(tmp, "a", [[10, 11, 12], [11, 12, 13]])
    add_trace(root)
    add_plan(root)
    info = {"warmup_steps": 1, "timed_steps": 3, "commit": "0", "host": "h<1>", "begun": "2026-01-01T"}
    (root / "study.json").write_text(json.dumps(info))
    cli.expect(cli.run(sys.executable, SCALING, "collect", root))
    result = cli.run(sys.executable, PLOT, root)
    if result.rc and "needs matplotlib" in result.err:
        print("    matplotlib is not installed: nothing was drawn")
        return
    cli.expect(result, out="report.html")
    page = (root / "report.html").read_text()
    assert "h&lt;1&gt;" in page and "exposed communication percent" in page and "<td>14</td>" in page
    for tag in ("src=", "<script", "@import", "<link"):
        assert tag not in page, tag
    cli.expect(cli.run(sys.executable, PLOT, root, "--out", root / "study.png"), out="study.png")
    assert (root / "study.png").read_bytes().startswith(b"\x89PNG")


if __name__ == "__main__":
    cli.main()
