"""`qshard ckpt` and Hugging Face folders. Both directions with transformers itself are checked by
scripts/check_transformers.py, which made test/fixtures: a folder that transformers saved, one that it
loaded, and the losses it found."""
import json
import shutil
import struct

import cli
import runs

FIXTURES = cli.ROOT / "test" / "fixtures"
NORM = "model.layers.0.self_attn.q_norm.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def ckpt(*args, ranks=1, rc=0, **kwargs):
    result = cli.qshard("ckpt", *args, ranks=ranks, **kwargs)
    cli.expect(result, rc=rc)
    return result


def document(*args, ranks=1, rc=0):
    result = ckpt(*args, "--format", "json", ranks=ranks, rc=rc)
    return json.loads(result.out)


def refused(*args, texts, ranks=2, rc=1):
    return runs.expect_one_error(cli.qshard("ckpt", *args, ranks=ranks), rc, *texts)


def trained(tmp, name="out", ranks=2, **values):
    """A run of 4 steps, saved after 2 and 4; returns the last checkpoint."""
    if not (tmp / "model.json").exists():
        runs.start_files(tmp)
    cli.expect(runs.train(tmp, ranks, train__out=tmp / name, train__steps=4, checkpoint__every=2,
                          optim__lr=0.01, **values))
    return tmp / name / "checkpoints" / "step-00000004.h5"


def flip(path, count, value=b"\x7f"):
    """Changes bytes of the middle of a file, which is tensor data."""
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at:at + count] = bytes(b ^ value[0] for b in data[at:at + count])
    path.write_bytes(data)


def read_header(path):
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    return header, data[8 + size:]


def edit_tensors(path, change):
    """change(name → (entry, bytes)) of a safetensors file."""
    header, data = read_header(path)
    tensors = {name: (entry, data[slice(*entry["data_offsets"])])
               for name, entry in header.items()}
    change(tensors)
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, (entry, values) in tensors.items():
        header[name] = {**entry, "data_offsets": [len(body), len(body) + len(values)]}
        body += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def fixture(tmp, name):
    return shutil.copytree(FIXTURES / name, tmp / name)


def start_from(tmp, folder, *extra, ranks=2, name="run", **values):
    """One step that changes nothing, from an HF folder, evaluated on the fixtures' tokens."""
    runs.tokens(tmp / "train.bin", 1000)
    return runs.train(tmp, ranks, ("--init", f"hf:{folder}", *extra), **{
        "model__config": None, "data__val": FIXTURES / "hf-tokens-u32.bin", "train__seq": 16,
        "train__eval_samples": 12, "train__steps": 1, "optim__lr": 0, "train__out": tmp / name,
        **values})


def loss_of(tmp, name="run"):
    return runs.metrics(tmp / name)[1][-1]["val_loss"]


def expected_loss(name):
    return json.loads((FIXTURES / name / "expected.json").read_text())["loss"]


def test_ls(tmp):
    last = trained(tmp, ranks=3)
    folder = last.parent
    (folder / "step-00000009.h5").write_bytes(last.read_bytes()[:-5000])
    (folder / "step-00000010.h5.tmp").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    found = document("ls", folder)["checkpoints"]
    assert [entry.get("step") for entry in found] == [4, 2, None, None], found
    assert [entry["complete"] for entry in found] == [True, True, False, False], found
    assert found[0]["ranks"] == 3 and found[0]["bytes"] == last.stat().st_size, found
    assert found[0]["written_at"].startswith("20"), found
    assert "step-00000009.h5" in found[2]["problem"] and "unfinished" in found[3]["problem"], found
    lines = ckpt("ls", folder, ranks=2).out.splitlines()
    assert len(lines) == 4 and "notes" not in "".join(lines), lines
    assert "complete" in lines[0] and "NOT USABLE" in lines[2], lines
    refused("ls", tmp / "absent", texts=["absent", "No such folder"])


def test_show(tmp):
    last = trained(tmp)
    doc = document("show", last)
    assert (doc["step"], doc["samples"], doc["ranks"]) == (4, 48, 2), doc
    assert doc["model_config"]["head_dim"] == 8, doc
    assert doc["run_config"]["train"]["global_batch"] == 12, doc
    shapes = {d["name"]: d["shape"] for d in doc["datasets"]}
    assert len(shapes) == 3 * (2 + 2 * 11), shapes
    assert shapes[f"/model/{EMBEDDING}"] == shapes[f"/optim/exp_avg/{EMBEDDING}"] == [61, 24]
    cli.expect(ckpt("show", last), out=f"[61,24]          /model/{EMBEDDING}")
    refused("show", tmp / "train.bin", texts=["train.bin"])


def test_verify(tmp):
    last = trained(tmp)
    for ranks in (1, 3):
        cli.expect(ckpt("verify", last, ranks=ranks), out="intact")
    doc = document("verify", last, ranks=2)
    assert doc["ok"] and doc["datasets"] == 72 and doc["damaged"] == [], doc
    flip(last, 1)
    for ranks in (1, 3):
        result = ckpt("verify", last, ranks=ranks, rc=1)
        assert "wrong checksum" in result.out and "1 DAMAGED" in result.out, result
    doc = document("verify", last, ranks=2, rc=1)
    assert not doc["ok"] and len(doc["damaged"]) == 1, doc


def test_verify_of_what_is_no_checkpoint(tmp):
    last = trained(tmp)
    last.write_bytes(last.read_bytes()[:-100])
    error = refused("verify", last, texts=[last.name])
    result = cli.qshard("ckpt", "verify", last, "--format", "json", ranks=2)
    runs.expect_one_error(result, 1, last.name)
    assert last.name in json.loads(result.out)["problem"] and error, result
    refused("verify", tmp / "absent.h5", texts=["absent.h5"])


def test_diff(tmp):
    last = trained(tmp)
    again = trained(tmp, "again")
    cli.expect(ckpt("diff", last, again, ranks=3), out="the same")
    first = last.parent / "step-00000002.h5"
    result = ckpt("diff", first, last, "--top", 3, ranks=2, rc=1)
    assert "step: 2 → 4" in result.out and "72 of 72 datasets differ" in result.out, result
    docs = [document("diff", first, last, "--top", 0, ranks=ranks, rc=1) for ranks in (1, 3)]
    for doc in docs:
        assert not doc["same"] and doc["different"] == len(doc["largest"]) == 72, doc
        errors = [entry["rel_l2"] for entry in doc["largest"]]
        assert errors == sorted(errors, reverse=True) and errors[-1] > 0, errors
    for a, b in zip(*(sorted(doc["largest"], key=lambda d: d["dataset"]) for doc in docs)):
        assert runs.close(a["rel_l2"], b["rel_l2"], 1e-9) and a["max_abs"] == b["max_abs"], (a, b)
    flip(again, 1)
    doc = document("diff", last, again, ranks=2, rc=1)
    assert doc["different"] == 1 and doc["largest"][0]["elements"] == 1, doc


def test_diff_of_other_models(tmp):
    last = trained(tmp)
    untied = trained(tmp, "untied", extra=["--model.tie_word_embeddings", "false"])
    doc = document("diff", last, untied, ranks=2, rc=1)
    assert any(f"/model/{HEAD} is only in" in line for line in doc["structure"]), doc
    assert any("model_config" in line for line in doc["attributes"]), doc
    runs.model(tmp, intermediate_size=41)
    wider = trained(tmp, "wider")
    lines = document("diff", last, wider, rc=1)["structure"]
    assert any("up_proj.weight: [40, 24] → [41, 24]" in line for line in lines), lines


def test_export_and_import_give_the_same_checkpoint_weights(tmp):
    last = trained(tmp, extra=["--model.tie_word_embeddings", "false"])
    for name, options in (("one", []), ("many", ["--max-shard-gb", "8e-6"])):
        folder = tmp / name
        ckpt("export", last, "--to", "hf", folder, *options, ranks=2)
        files = sorted(p.name for p in folder.iterdir())
        if name == "one":
            assert files == ["config.json", "model.safetensors"], files
        else:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            shards = sorted(set(index["weight_map"].values()))
            assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
            assert files == sorted(["config.json", "model.safetensors.index.json", *shards]), files
            assert all((folder / s).stat().st_size < 8000 + 4096 for s in shards), files
            parts = [read_header(folder / s) for s in shards]
            assert index["metadata"]["total_size"] == sum(len(data) for _, data in parts), index
        ckpt("import", "--from", "hf", folder, tmp / f"{name}.h5", ranks=3)
    cli.expect(ckpt("diff", tmp / "one.h5", tmp / "many.h5"), out="the same")
    doc = document("diff", last, tmp / "one.h5", "--top", 0, rc=1)
    assert all(d["dataset"].startswith("/optim/") for d in doc["largest"]), doc
    assert document("show", tmp / "one.h5")["step"] == 0
    cli.expect(ckpt("verify", tmp / "one.h5", ranks=2), out="intact")
    assert not list(tmp.glob("*.tmp*")), list(tmp.iterdir())


def test_tied_head_is_not_exported(tmp):
    ckpt("export", trained(tmp), "--to", "hf", tmp / "hf", "--dtype", "bf16")
    header, _ = read_header(tmp / "hf" / "model.safetensors")
    assert HEAD not in header and header[EMBEDDING]["shape"] == [61, 24], header
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}, header
    assert json.loads((tmp / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_all_rows_of_a_padded_vocabulary_are_trained_and_exported(tmp):
    """Qwen3's matrices have 151936 rows, its tokenizers some 151,600 ids: the rest are legal."""
    vocab = 151936
    runs.model(tmp, vocab_size=vocab)
    runs.tokens(tmp / "train.bin", 200, vocab=151643, bad={i: vocab - 1 for i in range(0, 200, 3)})
    one_step = dict(train__steps=1, data__shuffle="false")
    cli.expect(runs.train(tmp, 3, **one_step))
    ckpt("export", tmp / "out" / "checkpoints" / "step-00000001.h5", "--to", "hf", tmp / "hf")
    header, _ = read_header(tmp / "hf" / "model.safetensors")
    assert header[EMBEDDING]["shape"] == [vocab, runs.MODEL["hidden_size"]], header[EMBEDDING]
    runs.tokens(tmp / "train.bin", 200, vocab=151643, bad={17: vocab})
    result = runs.train(tmp, 3, train__out=tmp / "refused", **one_step)
    runs.expect_one_error(result, 1, "train.bin", "token 17", "byte 68", f"is {vocab}")


def test_export_spares_what_is_there(tmp):
    last = trained(tmp)
    folder = tmp / "hf"
    folder.mkdir()
    ckpt("export", last, "--to", "hf", folder, "--max-shard-gb", "8e-6")  # empty: fine
    (folder / "tokenizer.json").write_text("mine")
    refused("export", last, "--to", "hf", folder, texts=["not empty", "--overwrite"])
    ckpt("export", last, "--to", "hf", folder, "--overwrite", ranks=2)
    files = sorted(p.name for p in folder.iterdir())  # no shard of the first export is left
    assert files == ["config.json", "model.safetensors", "tokenizer.json"], files
    assert (folder / "tokenizer.json").read_text() == "mine"
    flip(last, 1)
    refused("export", last, "--to", "hf", tmp / "bad", texts=["damaged"])
    assert not list(tmp.glob("bad*")), list(tmp.iterdir())
    refused("export", last, "--to", "hf", tmp / "train.bin", texts=["damaged"])


def test_export_that_fails_leaves_nothing(tmp):
    last = trained(tmp)
    result = cli.run(*cli.launcher(1), "bash", "-c", f"ulimit -f 40; exec {cli.QSHARD} ckpt export "
                     f"{last} --to hf {tmp / 'hf'}")
    cli.expect(result, rc=1, err="File too large")
    assert not list(tmp.glob("hf*")), list(tmp.iterdir())


def test_import_spares_what_is_there(tmp):
    folder = fixture(tmp, "from-transformers")
    ckpt("import", "--from", "hf", folder, tmp / "a.h5")
    refused("import", "--from", "hf", folder, tmp / "a.h5", texts=["a.h5 exists", "--overwrite"])
    ckpt("import", "--from", "hf", folder, tmp / "a.h5", "--overwrite", ranks=2)


def test_folder_of_transformers_starts_a_run(tmp):
    folder = FIXTURES / "from-transformers"  # bf16, shards, untied
    for ranks in (1, 4):
        cli.expect(start_from(tmp, folder, ranks=ranks, name=f"run{ranks}"), out="weights  ")
        assert runs.close(loss_of(tmp, f"run{ranks}"), expected_loss("from-transformers")), ranks
    ckpt("import", "--from", "hf", folder, tmp / "start.h5", ranks=3)
    cli.expect(runs.train(tmp, 2, ("--resume", tmp / "start.h5", "--init", "weights-only"),
                          model__config=folder / "config.json", train__seq=16, train__steps=1,
                          data__val=FIXTURES / "hf-tokens-u32.bin", train__eval_samples=12,
                          optim__lr=0, train__out=tmp / "imported"))
    assert runs.close(loss_of(tmp, "imported"), expected_loss("from-transformers"))


def test_folder_that_transformers_read_is_what_we_write(tmp):
    folder = FIXTURES / "from-qshard"  # bf16, one file, tied
    cli.expect(start_from(tmp, folder))
    assert runs.close(loss_of(tmp), expected_loss("from-qshard"))
    ckpt("import", "--from", "hf", folder, tmp / "start.h5", ranks=3)
    ckpt("export", tmp / "start.h5", "--to", "hf", tmp / "hf", "--dtype", "bf16")
    for name in ("config.json", "model.safetensors"):
        assert (tmp / "hf" / name).read_bytes() == (folder / name).read_bytes(), name


def test_lm_head_of_tied_models(tmp):
    folder = fixture(tmp, "from-qshard")
    weights = folder / "model.safetensors"
    edit_tensors(weights, lambda t: t.update({HEAD: t[EMBEDDING]}))
    result = start_from(tmp, folder, ranks=3, name="equal")
    cli.expect(result)
    assert "rows differ" not in result.out, result
    assert runs.close(loss_of(tmp, "equal"), expected_loss("from-qshard"))

    def change_head(tensors):
        entry, values = tensors[HEAD]
        tensors[HEAD] = entry, values[:-2] + b"\x00\x41"
    edit_tensors(weights, change_head)
    result = start_from(tmp, folder, ranks=3, name="other")
    cli.expect(result, out=f"{HEAD} to {EMBEDDING}, but 1 of 61 rows differ")
    assert result.out.count("rows differ") == 1, result
    assert runs.close(loss_of(tmp, "other"), expected_loss("from-qshard"))

    edit_tensors(weights, lambda t: t.pop(HEAD))
    edit_json(folder / "config.json", lambda c: c.update(tie_word_embeddings=False))
    runs.expect_one_error(start_from(tmp, folder, name="absent"), 1, HEAD, "[61, 24]", "missing")


def test_norm_weights_count_and_are_required(tmp):
    folder = fixture(tmp, "from-qshard")

    def to_three(tensors):
        entry, values = tensors[NORM]
        tensors[NORM] = entry, struct.pack("<H", 0x4040) * (len(values) // 2)
    edit_tensors(folder / "model.safetensors", to_three)
    cli.expect(start_from(tmp, folder))
    assert not runs.close(loss_of(tmp), expected_loss("from-qshard"))
    edit_tensors(folder / "model.safetensors", lambda t: t.pop(NORM))
    runs.expect_one_error(start_from(tmp, folder, name="no"), 1, NORM, "[8]", "missing")


def test_what_the_config_says_is_used(tmp):
    """The same weights with other forms of one config, which change nothing, and with other values."""
    folder = fixture(tmp, "from-qshard")
    original = json.loads((folder / "config.json").read_text())

    def loss_with(name, **change):
        fields = {k: v for k, v in {**original, **change}.items() if v != "absent"}
        (folder / "config.json").write_text(json.dumps(fields))
        cli.expect(start_from(tmp, folder, name=name))
        return loss_of(tmp, name)
    expected = loss_with("as-it-is")
    theta = original["rope_theta"]
    equal = {"rope-parameters": dict(rope_theta="absent", rope_parameters={
                 "rope_theta": theta, "rope_type": "default"}),
             "null-window": dict(sliding_window=None),
             "unused-window": dict(sliding_window=2048, use_sliding_window=False,
                                   max_window_layers=1)}
    for name, change in equal.items():
        assert loss_with(name, **change) == expected, name
    for name, change in {"theta": dict(rope_theta=10 * theta),
                         "eps": dict(rms_norm_eps=1e-2)}.items():
        assert not runs.close(loss_with(name, **change), expected), name


def test_weights_of_another_model(tmp):
    folder = fixture(tmp, "from-qshard")
    edit_json(folder / "config.json", lambda c: c.update(num_key_value_heads=4))
    runs.expect_one_error(start_from(tmp, folder), 1, "k_proj.weight", "[32, 24]", "[16, 24]")
    folder = fixture(tmp / "more", "from-qshard")
    edit_tensors(folder / "model.safetensors", lambda t: t.update({K_PROJ[:-6] + "bias": t[NORM]}))
    runs.expect_one_error(start_from(tmp, folder), 1, "k_proj.bias", "do not belong")
    (folder / "config.json").unlink()
    runs.expect_one_error(start_from(tmp, folder), 1, "config.json", "No such file")


def test_incomplete_downloads(tmp):
    folder = fixture(tmp, "from-transformers")
    shard = folder / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    runs.expect_one_error(start_from(tmp, folder), 1, shard.name, str(len(whole)),
                          str(len(whole) - 1000), "incomplete download?")
    shard.unlink()
    for command in (start_from(tmp, folder, ranks=4),
                    cli.qshard("ckpt", "import", "--from", "hf", folder, tmp / "a.h5", ranks=4)):
        runs.expect_one_error(command, 1, shard.name, "incomplete download?")


def test_model_config_has_to_agree(tmp):
    folder = FIXTURES / "from-qshard"
    config = tmp / "other.json"
    content = json.loads((folder / "config.json").read_text())
    config.write_text(json.dumps({**content, "initializer_range": 0.5, "torch_dtype": "float32"}))
    cli.expect(start_from(tmp, folder, model__config=config))
    for field, value in (("rope_theta", 5e5), ("rms_norm_eps", 1e-5), ("intermediate_size", 41),
                         ("tie_word_embeddings", False)):
        config.write_text(json.dumps({**content, field: value}))
        runs.expect_one_error(start_from(tmp, folder, model__config=config), 2, field,
                              json.dumps(content[field]))
    runs.expect_one_error(start_from(tmp, folder, "--model.num_hidden_layers", "1"), 2,
                          "num_hidden_layers")


def test_init_and_resume(tmp):
    folder = FIXTURES / "from-qshard"
    result = start_from(tmp, folder, "--resume", "auto")
    cli.expect(result, out="weights  ")
    result = start_from(tmp, folder, "--resume", "auto", train__steps=2)
    cli.expect(result, out="resumed  ")
    assert "weights  " not in result.out, result
    runs.expect_one_error(start_from(tmp, folder, "--resume", tmp / "run"), 2, "--init", "--resume")
    runs.expect_one_error(runs.train(tmp, 2, ("--init", "HF:x")), 2, "hf:DIR", "weights-only")


def test_usage(tmp):
    runs.expect_one_error(cli.qshard("ckpt", ranks=2), 2, "subcommand")
    runs.expect_one_error(cli.qshard("ckpt", "export", "a", "b", "--to", "gguf", ranks=2), 2,
                          "gguf")
    cli.expect(cli.qshard("ckpt", "--help"), out="ckpt export")
    cli.expect(cli.qshard("ckpt", "diff", "--help"), out="--top")


if __name__ == "__main__":
    cli.main()
