"""`qshard verify` on the reference cases, and that it finds what is planted in copies of them."""
import json
import os
import shutil
import struct

import cli
import runs

REFERENCE = cli.ROOT / "test" / "reference"
RANKS = {"tiny-tied": 4, "wide-head-untied": 3, "empty-shards": 8}


def verify(folder, *options, ranks, rc=0, **kwargs):
    result = cli.qshard("verify", "--reference", folder, *options, ranks=ranks, **kwargs)
    cli.expect(result, rc=rc)
    return result


def last_line(result):
    return result.out.splitlines()[-1]


def copy(tmp, name="tiny-tied"):
    folder = tmp / name
    shutil.copytree(REFERENCE / name, folder)
    return folder


def edit_element(path, tensor, index, kind, change):
    """Changes one element of a tensor in a safetensors file."""
    data = bytearray(path.read_bytes())
    size = struct.unpack_from("<Q", data)[0]
    begin = 8 + size + json.loads(data[8:8 + size])[tensor]["data_offsets"][0] + 4 * index
    struct.pack_into(kind, data, begin, change(struct.unpack_from(kind, data, begin)[0]))
    path.write_bytes(data)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_cases_pass(tmp):
    for name, ranks in RANKS.items():
        for dtype in ("f32", "bf16", "fp16"):
            for transport in ("shm", "mpi"):
                result = verify(REFERENCE / name, "--param-dtype", dtype, "--transport", transport,
                                ranks=ranks)
                assert last_line(result) == "verify: ok", result


def test_other_ranks(tmp):
    for ranks in (1, 2, 8):
        result = verify(REFERENCE / "tiny-tied", "--ranks-any", ranks=ranks)
        assert last_line(result) == "verify: ok", result
    result = cli.qshard("verify", "--reference", REFERENCE / "tiny-tied", ranks=2)
    runs.expect_one_error(result, 2, "4 ranks", "mpirun -n 4", "--ranks-any")
    result = cli.qshard("verify", "--reference", REFERENCE / "tiny-tied", "--ranks-any", ranks=3)
    runs.expect_one_error(result, 2, "8 rows", "3 ranks")


def test_outputs_are_written(tmp):
    result = verify(REFERENCE / "wide-head-untied", "--out", tmp / "out", ranks=3)
    assert sorted(os.listdir(tmp / "out")) == [
        "final.safetensors", "result.json", "step1_grads.safetensors"]
    found = json.loads((tmp / "out" / "result.json").read_text())
    expected = json.loads((REFERENCE / "wide-head-untied" / "train.json").read_text())["expected"]
    assert [set(step) for step in found] == [{"step", "loss", "grad_norm", "tokens"}] * len(expected)
    for ours, truth in zip(found, expected):
        assert ours["step"] == truth["step"] and ours["tokens"] == truth["tokens"], (ours, truth)
        assert runs.close(ours["loss"], truth["loss"]), (ours, truth)
    reference = (REFERENCE / "wide-head-untied" / "final.safetensors").stat().st_size
    assert abs((tmp / "out" / "final.safetensors").stat().st_size - reference) < 4096
    assert "step1_grads" in result.out and "limit" in result.out, result


def test_nothing_is_left_behind_without_out(tmp):
    verify(REFERENCE / "tiny-tied", ranks=4, env={"TMPDIR": tmp})
    assert not [name for name in os.listdir(tmp) if name.startswith("qshard-verify")]
    folder = copy(tmp)
    edit_json(folder / "train.json", lambda case: case["pytorch_fsdp2_error"].pop("f32"))
    verify(folder, ranks=4, rc=1, env={"TMPDIR": tmp})
    assert not [name for name in os.listdir(tmp) if name.startswith("qshard-verify")]


def expect_failed(folder, quantity, *also, ranks=4):
    result = verify(folder, ranks=ranks, rc=1)
    names = last_line(result).removeprefix("verify: FAILED ").split(", ")
    assert last_line(result).startswith("verify: FAILED ") and quantity in names, result
    row = next(line for line in result.out.splitlines() if line.startswith(f"{quantity} "))
    assert "NO" in row, result
    for text in also:
        assert text in row, result
    return names


def test_planted_gradient(tmp):
    folder = copy(tmp)
    tensor = "model.layers.1.mlp.up_proj.weight"
    edit_element(folder / "step1_grads.safetensors", tensor, 5, "<f", lambda g: g + 1e-3)
    assert expect_failed(folder, "step1_grads", tensor) == ["step1_grads"]


def test_planted_final_weight(tmp):
    folder = copy(tmp)
    tensor = "model.layers.0.self_attn.k_norm.weight"
    edit_element(folder / "final.safetensors", tensor, 3, "<f", lambda w: w * 1.001)
    assert expect_failed(folder, "final", tensor) == ["final"]


def test_planted_nan(tmp):
    folder = copy(tmp)
    edit_element(folder / "final.safetensors", "model.norm.weight", 0, "<f", lambda w: float("nan"))
    assert expect_failed(folder, "final", "model.norm.weight") == ["final"]


def test_planted_loss_norm_and_tokens(tmp):
    for field, factor in (("loss", 1 + 1e-5), ("grad_norm", 1 + 1e-4)):
        folder = copy(tmp / field)

        def change(case):
            case["expected"][2][field] *= factor
        edit_json(folder / "train.json", change)
        assert expect_failed(folder, field, "step 3") == [field]
    folder = copy(tmp / "tokens")

    def add_token(case):
        case["expected"][1]["tokens"] += 1
    edit_json(folder / "train.json", add_token)
    assert expect_failed(folder, "tokens", "step 2") == ["tokens"]


def test_planted_batch_id(tmp):
    folder = copy(tmp)
    edit_element(folder / "batches.safetensors", "inputs", 40, "<i", lambda i: (i + 1) % 97)
    assert "loss" in expect_failed(folder, "step1_grads")


def test_planted_initial_weight(tmp):
    folder = copy(tmp)
    edit_element(folder / "model.safetensors", "model.norm.weight", 1, "<f", lambda w: w + 0.01)
    assert "final" in expect_failed(folder, "loss")


def test_planted_optimizer_setting(tmp):
    folder = copy(tmp)

    def change(case):
        case["optim"]["weight_decay"] *= 2
    edit_json(folder / "train.json", change)
    expect_failed(folder, "final")


def refused(folder, *texts, ranks=4, rc=1):
    result = cli.qshard("verify", "--reference", folder, ranks=ranks)
    runs.expect_one_error(result, rc, *texts)


def test_missing_folder_and_files(tmp):
    refused(tmp / "absent", "absent/train.json", "No such file")
    for name in ("config.json", "batches.safetensors", "model.safetensors", "final.safetensors"):
        folder = copy(tmp / name)
        (folder / name).unlink()
        refused(folder, name, "No such file")


def test_damaged_files(tmp):
    folder = copy(tmp / "ids")
    edit_element(folder / "batches.safetensors", "labels", 7, "<i", lambda i: 97)
    refused(folder, "batches.safetensors", "97")
    folder = copy(tmp / "short")
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate((folder / "model.safetensors").stat().st_size - 100)
    refused(folder, "model.safetensors")
    folder = copy(tmp / "field")
    edit_json(folder / "train.json", lambda case: case["optim"].pop("eps"))
    refused(folder, "train.json", "eps")
    folder = copy(tmp / "fewer")
    edit_json(folder / "train.json", lambda case: case["expected"].pop())
    refused(folder, "train.json", "4 steps", "3 expected")
    folder = copy(tmp / "shape")
    edit_json(folder / "config.json", lambda config: config.update(num_key_value_heads=4))
    refused(folder, "k_proj.weight", "[64, 64]", "[32, 64]")


if __name__ == "__main__":
    cli.main()
