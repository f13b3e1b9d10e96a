"""`qshard bench`: columns, the arithmetic between them, what is left out, and planted errors."""
import json
import re
import statistics

import cli
import runs

UNITS = re.compile(r"(_us|_ms|_per_s|_per_s_all_ranks|_per_s_per_rank|bytes|flop|per_step|calls|wrong|[mnk])$|^share_of_")


def bench(tmp, *args, ranks=0, rc=0, **model):
    runs.model(tmp, **model)
    result = cli.qshard("bench", *args, "--model", tmp / "model.json", "--seq", 8, "--repeats", 3,
                        "--format", "json", ranks=ranks)
    cli.expect(result, rc=rc)
    return json.loads(result.out)


def near(a, b, tolerance=1e-6):
    assert abs(a - b) <= tolerance * max(abs(a), abs(b)), (a, b)


def expect_units(document):
    rows = [(name, value) for row in document["rows"] for name, value in row.items()]
    for name, value in [(n, v) for n, v in document.items() if n != "provenance"] + rows:
        numbers = value if isinstance(value, list) and name != "rows" else [value]
        if isinstance(numbers[0], (int, float)):
            assert UNITS.search(name), f"{name} has no unit"
    for row in document["rows"]:
        unit = next((n.split("_")[1] for n in row if n.startswith("lowest_")), None)
        if row.get(f"lowest_{unit}") is not None:
            assert row[f"lowest_{unit}"] <= row[f"time_{unit}"] <= row[f"highest_{unit}"], row


def test_gemm(tmp):
    doc = bench(tmp, "gemm")
    expect_units(doc)
    assert len(doc["rows"]) == 15
    for row in doc["rows"]:
        near(row["gflop_per_s"] * row["time_us"] * 1e3, 2 * row["m"] * row["n"] * row["k"])
        near(row["share_of_best"], row["gflop_per_s"] / doc["best_gflop_per_s"])
        assert 0 < row["share_of_best"] <= 1, row
    head = [r for r in doc["rows"] if (r["operator"], r["part"]) == ("linear", "head")]
    assert [(r["m"], r["n"], r["k"]) for r in head] == [(8, runs.VOCAB, 24)]


def test_ops_measures_every_operator(tmp):
    doc = bench(tmp, "ops", "--param-dtype", "f32")
    expect_units(doc)
    header = (cli.ROOT / "include" / "device" / "ops.h").read_text()
    declared = set(re.findall(r"virtual void (\w+)\(", header)) - {"mark"}
    assert {row["operator"] for row in doc["rows"]} == declared
    for row in doc["rows"]:
        assert row["least_bytes"] > 0, row
        near(row["gb_per_s"] * row["time_us"] * 1e3, row["least_bytes"])
    bytes_of = {(r["operator"], r["part"]): r["least_bytes"] for r in doc["rows"]}
    n, c, f, size = 8, 24, 40, 4
    assert bytes_of["linear", "o_proj"] == size * (n * 32 + 32 * c + n * c)
    assert bytes_of["add", "hidden"] == 3 * size * n * c
    assert bytes_of["swiglu", "ffn"] == 3 * size * n * f
    assert bytes_of["adamw", "gate_proj"] == 7 * size * c * f
    assert bytes_of["embedding", "hidden"] == size * (n + 2 * n * c)  # not the whole table
    assert bytes_of["rms_norm_grad", "hidden"] == size * (4 * n * c + n + 2 * c)


def test_collectives(tmp):
    for ranks in (2, 3):
        doc = bench(tmp, "collectives", "--from", 100, "--to", 7000, "--factor", 8, ranks=ranks)
        expect_units(doc)
        assert doc["wrong"] == 0
        rows = doc["rows"]
        assert {(r["transport"], r["operation"]) for r in rows} == {
            (t, o) for t in ("shm", "mpi") for o in ("all-gather", "reduce-scatter")}
        assert {r["unit"] for r in rows} == {"root", "layer", "-"} and len(rows) == 2 * 2 * (2 + 3)
        for row in rows:
            near(row["algbw_gb_per_s"], row["bytes"] / row["time_us"] * 1e-3)
            near(row["busbw_gb_per_s"], row["algbw_gb_per_s"] * (ranks - 1) / ranks)
        parts = {"all-gather": 2, "reduce-scatter": 4}  # bf16 and f32
        padded = -(-50 // ranks) * ranks  # 100 bytes of bf16 in equal parts
        for row in rows:
            if row["unit"] == "-" and row["bytes"] < 400:
                assert row["bytes"] == padded * parts[row["operation"]], row


def test_a_wrong_value_is_counted_and_ends_with_1(tmp):
    for dtype in ("f32", "bf16"):
        doc = bench(tmp, "collectives", "--spoil", "--to", 0, "--param-dtype", dtype, ranks=2, rc=1)
        assert [row["wrong"] for row in doc["rows"]] == [1] * 8 and doc["wrong"] == 8, doc


def test_step_leaves_the_warm_up_out(tmp):
    doc = bench(tmp, "step", "--warm-up", 2, ranks=2)
    assert len(doc["warm_up_steps_ms"]) == 2 and len(doc["steps_ms"]) == 3
    near(doc["step_ms"], statistics.median(doc["steps_ms"]))
    near(doc["highest_ms"], max(doc["steps_ms"]))
    assert doc["tokens_per_step"] == 16 and doc["provenance"]["warm_up"] == 2
    near(doc["tokens_per_s"] * doc["step_ms"], 16e3)


def test_step_by_operator(tmp):
    doc = bench(tmp, "step", "--breakdown", "--param-dtype", "f32", ranks=2)
    expect_units(doc)
    near(sum(row["share_of_step"] for row in doc["rows"]), 1)
    kinds = {(row["phase"], row["operator"]): row for row in doc["rows"]}
    # 2 layers of q/k/v, o, gate/up, down, and the head.
    assert kinds["forward", "linear"]["calls"] == 2 * 4
    assert kinds["backward", "linear_wgrad"]["calls"] == 2 * 4 + 1
    pairs = 8 * 9 // 2
    assert kinds["forward", "attention"]["flop"] == 2 * 4 * 4 * 8 * pairs
    assert ("optimizer", "adamw") in kinds and ("transport", "all-gather wait") in kinds


def test_checkpoint(tmp):
    args = ["checkpoint", "--dir", tmp, "--warm-up", 1]
    doc = bench(tmp, *args, ranks=2)
    expect_units(doc)
    rows = {row["operation"]: row for row in doc["rows"]}
    assert len(rows) == 4 and "save" in rows and "load from the page cache" in rows, rows
    c, f, hd, kd, d = 24, 40, 32, 16, 8
    layer = 2 * c + 2 * d + 2 * hd * c + 2 * kd * c + 3 * c * f
    for row in rows.values():
        assert row["bytes"] == 3 * 4 * (runs.VOCAB * c + c + 2 * layer), row
        near(row["gb_per_s"] * row["time_ms"] * 1e6, row["bytes"])
    assert not (tmp / "qshard-bench-checkpoint").exists()
    (tmp / "qshard-bench-checkpoint").mkdir()
    runs.expect_one_error(cli.qshard("bench", *args, "--model", tmp / "model.json", ranks=2), 2,
                          "qshard-bench-checkpoint exists")
    assert (tmp / "qshard-bench-checkpoint").exists()


def test_text_is_the_same_table(tmp):
    runs.model(tmp)
    result = cli.qshard("bench", "gemm", "--model", tmp / "model.json", "--seq", 8, "--repeats", 1)
    cli.expect(result, out="best_gflop_per_s")
    lines = result.out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("operator"))
    assert lines[header].split() == ["operator", "part", "m", "n", "k", "time_us", "lowest_us",
                                     "highest_us", "gflop_per_s", "share_of_best"], lines[header]
    assert len(lines) - header == 16, result


def test_provenance(tmp):
    found = bench(tmp, "gemm", "--warm-up", 1)["provenance"]
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", found["commit"]), found
    assert "oneDNN" in found["device"] and "HDF5" in found["libraries"][1], found
    for name in ("host", "cpu", "compiler", "time", "ranks", "threads_per_rank", "param_dtype"):
        assert found[name], name
    assert found["repeats"] == 3 and found["warm_up"] == 1


def test_refusals(tmp):
    def refused(*args, texts, ranks=0, rc=2):
        runs.expect_one_error(cli.qshard("bench", *args, ranks=ranks), rc, *texts)
    refused("gemm", "--model", tmp / "none.json", rc=1, texts=["none.json"])
    refused("gemm", "--param-dtype", "fp16", texts=["fp16"])
    refused("collectives", "--transport", "nccl", texts=["nccl"], ranks=2)
    refused("step", "--repeats", 0, texts=["--repeats"])
    refused("step", "--graph", texts=["device.graph", "shm", "comm.transport nccl"], ranks=2)
    refused("gem", texts=["subcommand"])


if __name__ == "__main__":
    cli.main()
