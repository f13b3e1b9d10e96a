"""`qshard plan`: what it says beside what runs do, and for machines that are not here."""
import json

import cli
import runs
from test_memory import LARGER, SIZES, table

HARDWARE = cli.ROOT / "data" / "hardware"
CONFIGS = cli.ROOT / "data" / "configs"


def plan(*args, ranks=1, rc=0):
    result = cli.qshard("plan", *args, "--format", "json", ranks=ranks)
    cli.expect(result, rc=rc)
    return json.loads(result.out)


def test_memory_is_what_train_says(tmp):
    runs.model(tmp, **LARGER)
    runs.tokens(tmp / "train.bin", 3000)
    result = runs.train(tmp, 3, train__param_dtype="bf16", **SIZES)
    planned = plan("--model", tmp / "model.json", "--ranks", 3, "--batch", 4, "--seq", 64)
    tokens = 2 * 4 * 4 * 64  # ids and labels of the step, which the trainer adds
    expected = planned["memory_bytes"]["total"] + tokens
    assert runs.close(table(result.out)["total"][0], expected, 0.01), (result, planned)


def test_traffic_of_the_layer_that_every_reader_checks(tmp):
    """hidden 512, 4 ranks, 16-bit parameters: 3.54 MB for each gather and each reduction of a layer."""
    doc = json.loads((CONFIGS / "walkthrough-layer.json").read_text())
    bytes_of = {}
    for layers in 1, 2:
        (tmp / "m.json").write_text(json.dumps({**doc, "num_hidden_layers": layers}))
        bytes_of[layers] = plan("--model", tmp / "m.json", "--ranks", 4, "--batch", 2, "--seq", 8,
                                "--reduce-dtype", "bf16")["traffic_bytes"]
    layer = 2360448 * 2 * 3 // 4
    for phase in "forward_gathers", "backward_gathers", "reductions":
        assert bytes_of[2][phase] - bytes_of[1][phase] == layer, (phase, bytes_of)
    assert bytes_of[2]["between_nodes"] == bytes_of[2]["replica_sums"] == 0, bytes_of
    # 2 nodes of 2: a rank's link brings its share of the other node's half of a unit. As 2 replicas,
    # only the shards' sums go between nodes, both ways.
    args = ("--model", tmp / "m.json", "--ranks", 4, "--ranks-per-node", 2, "--reduce-dtype", "bf16")
    full, mesh = (plan(*args, "--mesh", m)["traffic_bytes"] for m in ("full", "2x2"))
    assert full["between_nodes"] * 3 == full["total"], full
    assert full["replica_sums"] == 0 and mesh["replica_sums"] == mesh["between_nodes"] > 0, mesh
    assert mesh["between_nodes"] < full["between_nodes"], (full, mesh)


def test_large_machines(tmp):
    """A model and machine that do not fit here; recomputation counts as work, not as MFU."""
    for name in "a100", "h100", "h200", "b200":
        few, full = (plan("--model", CONFIGS / "qwen3-32b.json", "--ranks", 1024, "--seq", 4096,
                          "--hardware", HARDWARE / f"{name}.json", "--activation-checkpoint", mode,
                          "--tokens", 1e12) for mode in ("none", "full"))
        assert few["flops"]["model"] == full["flops"]["model"] < full["flops"]["executed"], full
        assert full["memory_bytes"]["total"] < few["memory_bytes"]["total"]
        for report in few, full:
            time, step = report["seconds"], report["setting"]["tokens_per_step"]
            parts = ("compute", "exposed_gathers", "exposed_reductions", "other")
            assert runs.close(sum(time[p] for p in parts), time["step"], 1e-9), time
            assert runs.close(time["tokens_per_s"], step / time["step"], 1e-9), time
            assert runs.close(time["days"], 1e12 / time["tokens_per_s"] / 86400, 1e-9), time
            assert 0.05 < time["mfu"] < 0.7, time
        half = plan("--model", CONFIGS / "qwen3-32b.json", "--ranks", 1024, "--seq", 4096,
                    "--hardware", HARDWARE / f"{name}.json", "--param-dtype", "fp16")
        assert half["seconds"]["step"] == few["seconds"]["step"], (half, few)
        assert runs.close(sum(full["seconds"]["operators"].values()), full["seconds"]["compute"], 1e-9)


def test_offloaded_states_leave_the_gpu(tmp):
    args = ("--model", CONFIGS / "qwen3-32b.json", "--ranks", 8, "--seq", 4096, "--hardware",
            HARDWARE / "h100.json", "--activation-checkpoint", "full")
    on_device, offloaded = plan(*args), plan(*args, "--offload", "optimizer")
    before, after = on_device["memory_bytes"], offloaded["memory_bytes"]
    assert "host_moments" not in before and after["moments"] == 0, (before, after)
    assert after["host_moments"] == before["moments"] == 2 * after["host_shards"], (before, after)
    assert before["shards"] - after["shards"] == after["host_shards"], (before, after)
    slots = 2 * 3 * 4 * 2**22  # two pieces of three states of 4 Mi elements, f32
    assert after["workspace"] - before["workspace"] == slots, (before, after)
    for segment in "params", "gradients", "activations", "communication":
        assert after[segment] == before[segment], segment
    wait = offloaded["seconds"]["exposed_offload"]
    assert on_device["seconds"]["exposed_offload"] == 0 and 0 < wait < 12 * 33e9 / 8 / 50e9, wait
    cli.expect(cli.qshard("plan", *args, "--offload", "optimizer"), out="exposed offload")


def test_search(tmp):
    args = ("--model", CONFIGS / "qwen3-8b.json", "--ranks", 16, "--batch", 8, "--seq", 4096,
            "--hardware", HARDWARE / "h100.json", "--search")
    found = plan(*args)
    assert len(found) > 1, found
    steps = [report["seconds"]["step"] for report in found]
    assert steps == sorted(steps)
    for report in found:
        assert report["memory_bytes"]["total"] <= 80e9, report
        assert report["setting"]["batch"] * report["setting"]["accumulation"] == 8, report
    fewer = plan(*args, "--memory-gb", 30)
    assert 0 < len(fewer) < len(found), (len(fewer), len(found))
    cli.expect(cli.qshard("plan", *args), out="tokens/s")
    runs.expect_one_error(cli.qshard("plan", *args, "--memory-gb", 3), 1, "3.0 GB", "more ranks")


def test_layers_per_unit(tmp):
    """Fewer transfers: small layers on a link of high latency gain, large ones only need more memory."""
    profile = json.loads((HARDWARE / "h100.json").read_text())
    profile["in_node"]["latency_us"] = profile["between_nodes"]["latency_us"] = 500
    (tmp / "far.json").write_text(json.dumps(profile))
    args = ("--model", CONFIGS / "qwen3-0.6b.json", "--ranks", 64, "--seq", 256,
            "--hardware", tmp / "far.json", "--layers-per-unit")
    one, three = plan(*args, 1), plan(*args, 3)
    assert three["setting"]["layers_per_unit"] == 3, three
    assert three["traffic_bytes"] == one["traffic_bytes"], (one, three)
    assert three["seconds"]["step"] < 0.8 * one["seconds"]["step"], (one, three)
    assert three["memory_bytes"]["params"] > one["memory_bytes"]["params"], (one, three)
    cli.expect(cli.qshard("plan", *args, 3), out="3 layer(s) a unit")


def test_calibration_is_a_profile(tmp):
    runs.model(tmp, **LARGER)
    model = ("--model", tmp / "model.json", "--seq", 32)
    cli.expect(cli.qshard("plan", *model, "--calibrate", tmp / "here.json", ranks=2))
    profile = json.loads((tmp / "here.json").read_text())
    assert {"f32/linear", "bf16/attention_grad", "rms_norm", "adamw"} <= set(profile["measured"]), profile
    report = plan(*model, "--ranks", 2, "--hardware", tmp / "here.json")
    assert report["seconds"]["hardware"] == profile["name"]
    assert report["setting"]["transport"] == "shm" and report["seconds"]["step"] > 0, report


def test_refusals(tmp):
    model = ("--model", CONFIGS / "small30m.json")
    (tmp / "bad.json").write_text('{"name": "x"}')
    for args, rc, texts in (
            (("--model", tmp / "none.json"), 1, ["none.json"]),
            ((*model, "--hardware", tmp / "none.json"), 1, ["none.json"]),
            ((*model, "--hardware", tmp / "bad.json"), 1, ["bad.json", "ranks_per_node"]),
            ((*model, "--search"), 2, ["--hardware"]),
            ((*model, "--ranks", 0), 2, ["--ranks"]),
            ((*model, "--ranks", 4, "--mesh", "2x3"), 2, ["2x3"]),
            ((*model, "--layers-per-unit", 0), 2, ["--layers-per-unit"]),
            ((*model, "--layers-per-unit", 99), 2, ["fsdp.layers_per_unit 99"]),
            ((*model, "--activation-checkpoint", "some"), 2, ["selective"]),
            ((*model, "--offload", "optimizer"), 2, ["fsdp.offload", "shm", "none"])):
        runs.expect_one_error(cli.qshard("plan", *args, ranks=2), rc, *texts)


if __name__ == "__main__":
    cli.main()
