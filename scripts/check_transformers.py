#!/usr/bin/env python3
"""Checks both directions between qshard and Hugging Face transformers on tiny models.

    scripts/check_transformers.py [--build build] [--fixtures test/fixtures]

  out  a model trained here, exported by `qshard ckpt export` in one file and in shards, f32 and
       bf16, is loaded by from_pretrained without a missing or unexpected weight, and its loss on
       the validation tokens equals ours
  in   models that transformers saves (bf16 in shards, f32 in one file, tied and untied) start
       `qshard train --init hf:DIR` and `qshard ckpt import`; our loss equals theirs

A loss counts as equal within 1e-5 relative in f32. Needs torch, transformers and safetensors.
--fixtures writes the folders and losses that test/cli/test_ckpt.py uses without these packages.
"""
import argparse
import array
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch  # noqa: E402
import transformers  # noqa: E402

transformers.utils.logging.disable_progress_bar()
ROOT = Path(__file__).resolve().parents[1]
VOCAB, SEQ, SAMPLES = 61, 16, 12
SHAPE = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
             max_position_embeddings=64)
TOLERANCE = 1e-5


def write_tokens(path, count):
    chance, ids, last = random.Random(3), array.array("I"), 0
    for _ in range(count):
        last = chance.randrange(VOCAB) if chance.random() < 0.25 else (last * 7 + 3) % VOCAB
        ids.append(last)
    path.write_bytes(ids.tobytes())
    return list(ids)


def theirs(folder, tokens):
    """Mean loss of transformers over the samples that qshard evaluates, in f32 arithmetic."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    ids = torch.tensor(tokens[:SAMPLES * SEQ + 1])
    inputs, labels = ids[:-1].view(SAMPLES, SEQ), ids[1:].view(SAMPLES, SEQ)
    with torch.no_grad():
        logits = model.eval()(inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten()).item()


def make_model(tied, seed):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**SHAPE, tie_word_embeddings=tied)
    model = transformers.Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():  # so that a forgotten norm changes the loss
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=0.15)
    return model


class Qshard:
    def __init__(self, build, tmp):
        self.program, self.tmp = build / "qshard", tmp

    def run(self, *args, ranks=1):
        command = [ROOT / "scripts/mpirun.sh", "-n", ranks, self.program, *args]
        result = subprocess.run([str(c) for c in command], text=True, capture_output=True,
                                timeout=120)
        assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}" \
                                       f"\n{result.stderr}"
        return result.stdout

    def train(self, out, *args, ranks=2, steps=1, lr=0):
        self.run("train", "--data.train", self.tmp / "train.bin", "--data.val",
                 self.tmp / "val.bin", "--data.format", "raw-u32", "--train.seq", SEQ,
                 "--train.global_batch", 4, "--train.steps", steps, "--train.eval_samples", SAMPLES,
                 "--train.param_dtype", "f32", "--optim.lr", lr, "--train.peak_gflops", 1,
                 "--train.out", out, *args, ranks=ranks)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [line["val_loss"] for line in lines if "val_loss" in line][-1]


def compare(what, ours, truth):
    error = abs(ours - truth) / truth
    print(f"  {what:<44} ours {ours:.7f}  theirs {truth:.7f}  difference {error:.1e}", flush=True)
    assert error < TOLERANCE, what


def check_out(qshard, tmp, tokens, fixtures):
    config = tmp / "config.json"
    config.write_text(json.dumps({**SHAPE, "model_type": "qwen3", "rope_theta": 1e4,
                                  "tie_word_embeddings": True}))
    for tied in ("true", "false"):
        out = tmp / f"trained-{tied}"
        ours = qshard.train(out, "--model.config", config, "--model.tie_word_embeddings", tied,
                            steps=20, lr=0.01)
        checkpoint = out / "checkpoints" / "step-00000020.h5"
        for name, options in (("one file", []), ("shards", ["--max-shard-gb", "1e-5"])):
            folder = tmp / f"export-{tied}-{name.replace(' ', '-')}"
            qshard.run("ckpt", "export", checkpoint, "--to", "hf", folder, *options)
            compare(f"out, tied {tied}, f32, {name}", ours, theirs(folder, tokens))
        half = tmp / f"export-{tied}-bf16"
        qshard.run("ckpt", "export", checkpoint, "--to", "hf", half, "--dtype", "bf16")
        compare(f"out, tied {tied}, bf16, read back", qshard.train(
            tmp / f"half-{tied}", "--init", f"hf:{half}"), theirs(half, tokens))
        if fixtures and tied == "true":
            keep(fixtures, "from-qshard", half, theirs(half, tokens))


def check_in(qshard, tmp, tokens, fixtures):
    for tied, dtype, shards in ((True, torch.bfloat16, "20KB"), (False, torch.bfloat16, "20KB"),
                                (True, torch.float32, None), (False, torch.float32, None)):
        name = f"tied {tied}, {str(dtype)[6:]}, {'shards' if shards else 'one file'}".lower()
        folder = tmp / name.replace(", ", "-").replace(" ", "-")
        options = {"max_shard_size": shards} if shards else {}
        make_model(tied, seed=5).to(dtype).save_pretrained(folder, **options)
        assert (folder / "model.safetensors.index.json").exists() == bool(shards), folder
        truth = theirs(folder, tokens)
        compare(f"in, {name}", qshard.train(tmp / f"{folder.name}-run", "--init", f"hf:{folder}"),
                truth)
        start = tmp / f"{folder.name}.h5"
        qshard.run("ckpt", "import", "--from", "hf", folder, start, ranks=3)
        compare(f"in, {name}, ckpt import", qshard.train(
            tmp / f"{folder.name}-import", "--model.config", folder / "config.json", "--resume",
            start, "--init", "weights-only"), truth)
        if fixtures and shards and not tied:
            keep(fixtures, "from-transformers", folder, truth)


def keep(fixtures, name, folder, loss):
    target = fixtures / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if file.name == "config.json" or "safetensors" in file.name:
            shutil.copy(file, target)
    expected = {"loss": loss, "seq": SEQ, "samples": SAMPLES,
                "transformers": transformers.__version__, "torch": torch.__version__}
    (target / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="build folder")
    parser.add_argument("--fixtures", type=Path, help="folder to write test fixtures to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qshard-hf-") as name:
        tmp = Path(name)
        write_tokens(tmp / "train.bin", 2000)
        tokens = write_tokens(tmp / "val.bin", SAMPLES * SEQ + 1)
        qshard = Qshard(args.build.resolve(), tmp)
        if args.fixtures:
            args.fixtures.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp / "val.bin", args.fixtures / "hf-tokens-u32.bin")
        print(f"torch {torch.__version__}, transformers {transformers.__version__}")
        check_out(qshard, tmp, tokens, args.fixtures)
        check_in(qshard, tmp, tokens, args.fixtures)
    print("ok")


if __name__ == "__main__":
    sys.exit(main())
