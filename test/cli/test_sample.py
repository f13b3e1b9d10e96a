"""`qshard sample`: greedy tokens against a float64 forward, the same on any ranks, refusals."""
import json
import shutil
import subprocess

import cli
import runs
from qwen3_reference import Qwen3

UNTIED = cli.ROOT / "test" / "reference" / "wide-head-untied"
TEXT = "for (i → Σ) {a+b}\n"


def byte_run(tmp, text=TEXT * 100, documents=1, steps=60, **values):
    """The folder of a run on the bytes of some equal documents."""
    runs.model(tmp, vocab_size=257)
    texts = tmp / "texts"
    texts.mkdir()
    for i in range(documents):
        (texts / f"{i}.txt").write_text(text)
    cli.expect(cli.qshard("data", "tokenize", "--out", tmp / "train.h5", texts))
    cli.expect(runs.train(tmp, data__train=tmp / "train.h5", data__format="auto", train__seq=16,
                          train__steps=steps, optim__lr=0.01, **values))
    return tmp / "out"


def sample(*args, ranks=0, **kwargs):
    result = cli.qshard("sample", *args, "--format", "json", ranks=ranks, **kwargs)
    cli.expect(result)
    return json.loads(result.out)


def ids_of(document):
    return [s["ids"] for s in document["samples"]]


def refused(*args, texts, rc=2, ranks=0):
    return runs.expect_one_error(cli.qshard("sample", *args, ranks=ranks), rc, *texts)


def expect_greedy(model, prompt, ids, window=1000, choices=None):
    """Each id has the highest logit, to f32 rounding, after those before it."""
    for t, chosen in enumerate(ids):
        logits = model.logits((prompt + ids[:t])[-window:])[:choices]
        assert logits[chosen] >= max(logits) - 1e-4, (t, chosen, logits[chosen], max(logits))
    assert len(set(ids)) > 1, ids  # else a constant would pass


def test_greedy_is_the_argmax_of_a_float64_forward(tmp):
    out = byte_run(tmp)
    folder = tmp / "hf"
    cli.expect(cli.qshard("ckpt", "export", "--to", "hf", out / "checkpoints" / "step-00000060.h5",
                          folder))
    model = Qwen3(folder)
    for source in (out, folder):  # the newest checkpoint, and what is exported
        doc = sample("--from", source, "--prompt", "for (", "--tokens", 11, "--greedy")
        assert doc["prompt_ids"] == [256, *b"for ("] and doc["tokenizer"] == "bytes", doc
        expect_greedy(model, doc["prompt_ids"], ids_of(doc)[0], window=16)
    slid = sample("--from", folder, "--prompt", "for (", "--tokens", 9, "--greedy", "--window", 4)
    expect_greedy(model, slid["prompt_ids"], ids_of(slid)[0], window=4)


def test_greedy_check_can_fail(tmp):
    model = Qwen3(UNTIED)
    ids = ids_of(sample("--from", UNTIED, "--prompt-ids", "5,1", "--tokens", 6, "--greedy"))[0]
    expect_greedy(model, [5, 1], ids)
    for wrong in ([5, 2], [1, 5], [1]):
        try:
            expect_greedy(model, wrong, ids)
        except AssertionError:
            continue
        raise AssertionError(f"passes with the prompt {wrong}")


def test_same_tokens_on_any_ranks_and_transport(tmp):
    base = ["--from", UNTIED, "--prompt-ids", "3,1,4", "--tokens", 10, "--samples", 4, "--seed", 7]
    one = sample(*base)
    assert len({tuple(ids) for ids in ids_of(one)}) == 4, one
    for ranks in (2, 3, 5):
        for transport in ("shm", "mpi"):
            many = sample(*base, "--transport", transport, ranks=ranks)
            assert ids_of(many) == ids_of(one) and many["ranks"] == ranks, (ranks, transport)
    assert ids_of(sample(*base[:-1], 8)) != ids_of(one)
    first = sample(*[1 if a == 4 else a for a in base])
    assert ids_of(first) == ids_of(one)[:1], "sample 0 depends on how many there are"


def test_choices_follow_the_options(tmp):
    base = ["--from", UNTIED, "--prompt-ids", "3", "--tokens", 12]
    greedy = ids_of(sample(*base, "--greedy"))
    for args in (["--top-k", 1], ["--top-p", "1e-9"], ["--temperature", "1e-6"]):
        assert ids_of(sample(*base, *args)) == greedy, args
    assert ids_of(sample(*base)) != greedy


def test_text_is_prompt_and_continuation(tmp):
    out = byte_run(tmp)
    args = ["--from", out, "--prompt", "for (", "--tokens", 20, "--seed", 2]
    doc = sample(*args)
    result = cli.qshard("sample", *args)
    cli.expect(result)
    assert result.out == "for (" + doc["samples"][0]["text"] + "\n", (result.out, doc)
    assert not result.err, result
    result = cli.qshard("sample", *args, "--samples", 2, ranks=2)
    cli.expect(result, out="--- sample 2 of 2\nfor (")
    assert doc["samples"][0]["text"] in result.out, result


def test_output_is_utf8_whatever_the_model_says(tmp):
    out = byte_run(tmp, steps=1)  # knows nothing: bytes at random
    raw = subprocess.run([cli.QSHARD, "sample", "--from", out, "--tokens", "300"], check=True,
                         stdin=subprocess.DEVNULL, capture_output=True).stdout
    text = raw.decode()  # strict
    assert "\N{REPLACEMENT CHARACTER}" in text and all(c in "\n\t" or ord(c) >= 32 for c in text)


def test_a_sample_ends_with_its_document(tmp):
    out = byte_run(tmp, text="ab", documents=300, steps=100)  # 3 tokens: samples begin anywhere
    doc = sample("--from", out, "--greedy", "--tokens", 4, "--samples", 2)
    for s in doc["samples"]:
        assert (s["ids"], s["text"], s["ended"]) == ([97, 98, 256], "ab", "document"), s
    assert [s["ended"] for s in sample("--from", out, "--greedy", "--tokens", 1)["samples"]] == ["tokens"]


def test_ids_from_standard_input(tmp):
    args = ["sample", "--from", UNTIED, "--tokens", "5", "--greedy", "--prompt-ids"]
    expected = cli.qshard(*args, "3,1,4")
    cli.expect(expected)
    for command in ([cli.QSHARD], [cli.MPIRUN, "-n", "3", cli.QSHARD]):
        done = subprocess.run([*command, *args, "-"], input="3 1\n4\n", text=True, check=True,
                              capture_output=True, timeout=60)
        assert done.stdout == expected.out, (done, expected)
    assert len(expected.out.split()) == 5 and "," not in expected.out, expected


def test_bf16_samples_too(tmp):
    args = ["--from", UNTIED, "--prompt-ids", "3", "--tokens", 5, "--param-dtype", "bf16"]
    assert ids_of(sample(*args)) == ids_of(sample(*args, ranks=2))


def test_what_cannot_be_sampled_is_refused_in_one_line(tmp):
    ids = ["--from", UNTIED, "--prompt-ids"]
    (tmp / "empty").mkdir()
    for ranks in (0, 2):
        refused("--from", tmp / "none", "--prompt", "x", ranks=ranks, texts=["none", "no such"])
        refused(*ids, "1,x", ranks=ranks, texts=["'x'"])
    refused("--from", tmp / "empty", "--prompt", "x", texts=["empty", "config.json", "*.h5"])
    refused("--from", UNTIED, "--prompt", "x", texts=["--prompt-ids", "does not record a tokenizer"])
    refused("--from", UNTIED, texts=["--prompt-ids 1,2,3"])
    vocab = json.loads((UNTIED / "config.json").read_text())["vocab_size"]
    refused(*ids, f"1,{vocab}", texts=[f"token 1 of the prompt is {vocab}", f"0 to {vocab - 1}"])
    refused(*ids, "1,-1", texts=["-1"])
    refused(*ids, "1,99999999999", texts=["99999999999"])
    refused(*ids, ",", texts=["the prompt is empty"])
    refused(*ids, "1", "--tokenizer", "bytes", texts=["--tokenizer ids"])
    refused("--from", UNTIED, "--tokenizer", "bytes", texts=["vocab_size", "257"])
    refused(*ids, "1", "--prompt", "x", texts=["--prompt"])
    refused(*ids, "1", "--temperature", 0, texts=["--temperature"])
    refused(*ids, "1", "--top-p", 1.5, texts=["--top-p"])
    refused(*ids, "1", "--greedy", "--top-k", 5, texts=["--greedy"])
    refused(*ids, "1", "--param-dtype", "fp16", texts=["fp16"])
    refused(*ids, "1", "--transport", "nccl", texts=["nccl"])


def test_damaged_models_are_refused_in_one_line(tmp):
    out = byte_run(tmp, steps=2)
    path = out / "checkpoints" / "step-00000002.h5"
    data = bytearray(path.read_bytes())
    for sixth in (1, 3, 5):  # in each of model, first and second moments
        data[len(data) * sixth // 6] ^= 0x40
    path.write_bytes(data)
    refused("--from", path, rc=1, ranks=2, texts=["step-00000002.h5", "checksum"])
    refused("--from", out, rc=1, texts=["none of them usable"])
    path.write_bytes(data[:1000])
    refused("--from", path, rc=1, texts=["step-00000002.h5"])
    folder = tmp / "hf"
    shutil.copytree(UNTIED, folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-4:] = b"\x00\x00\xc0\x7f"  # NaN
    (folder / "model.safetensors").write_bytes(weights)
    refused("--from", folder, "--prompt-ids", "1", rc=1, ranks=2, texts=["not finite"])
    (folder / "model.safetensors").write_bytes(weights[:-100])
    refused("--from", folder, "--prompt-ids", "1", rc=1, texts=["model.safetensors"])


def test_the_tokenizer_goes_with_the_model(tmp):
    out = byte_run(tmp, steps=2, train__save_model="true")
    path = out / "checkpoints" / "step-00000002.h5"
    assert json.loads((out / "config.json").read_text())["qshard_tokenizer"] == "bytes"
    cli.expect(cli.qshard("ckpt", "export", "--to", "hf", path, tmp / "hf"))
    assert json.loads((tmp / "hf" / "config.json").read_text())["qshard_tokenizer"] == "bytes"
    cli.expect(cli.qshard("ckpt", "import", "--from", "hf", tmp / "hf", tmp / "again.h5"))
    args = ["--tokens", 5, "--prompt", "f"]
    texts = {sample("--from", p, *args)["samples"][0]["text"] for p in (path, out, tmp / "hf", tmp / "again.h5")}
    assert len(texts) == 1, texts
    (tmp / "hf" / "config.json").write_text(json.dumps(
        {**json.loads((tmp / "hf" / "config.json").read_text()), "qshard_tokenizer": 5}))
    refused("--from", tmp / "hf", *args, texts=["qshard_tokenizer", "5"])


if __name__ == "__main__":
    cli.main()
