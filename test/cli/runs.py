"""Small training runs, for the tests of `qshard train`."""
import array
import json
import random

import cli

VOCAB = 61
# Smaller than any real model, in all its shapes unlike: heads · head_dim = 32, hidden 24.
MODEL = {"model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True}
# Fields of metrics.jsonl that differ between equal runs.
CLOCK_FIELDS = {"tokens_per_s", "step_ms", "model_flops_per_s", "peak_share", "memory_bytes",
                "val_ms", "checkpoint_ms", "checkpoint"}  # the last one: a path in the run's folder


def tokens(path, count, vocab=VOCAB, bad=None):
    """Headerless u32 tokens with something to learn; `bad`: {index: id}."""
    chance = random.Random(1)
    ids, last = array.array("I"), 0
    for _ in range(count):
        last = chance.randrange(vocab) if chance.random() < 0.25 else (last * 7 + 3) % vocab
        ids.append(last)
    for index, token in (bad or {}).items():
        ids[index] = token
    path.write_bytes(ids.tobytes())
    return path


def model(folder, **fields):
    path = folder / "model.json"
    path.write_text(json.dumps({**MODEL, **fields}))
    return path


def options(tmp, **values):
    """Command line of a run in tmp; section__key=value adds or replaces, None removes."""
    settings = {"model.config": tmp / "model.json", "data.train": tmp / "train.bin",
                "data.format": "raw-u32", "train.seq": 8, "train.global_batch": 12,
                "train.steps": 5, "train.param_dtype": "f32", "train.out": tmp / "out",
                "train.peak_gflops": 1, "train.save_model": "false"}
    settings.update({k.replace("__", "."): v for k, v in values.items()})
    return [str(part) for key, value in settings.items() if value is not None
            for part in (f"--{key}", value)]


def start_files(tmp, count=3000):
    model(tmp)
    tokens(tmp / "train.bin", count)


def train(tmp, ranks=1, extra=(), timeout=60, env=None, **values):
    return cli.qshard("train", *options(tmp, **values), *extra, ranks=ranks, timeout=timeout,
                      env=env, cwd=tmp)


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return ([line for line in lines if "loss" in line],
            [line for line in lines if "val_loss" in line])


def without_clock(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK_FIELDS} for line in lines]


def close(a, b, tolerance=1e-5):
    return abs(a - b) <= tolerance * abs(b)


def expect_one_error(result, rc, *texts, seconds=15):
    """One error message, on one line, with all the texts; gone in time."""
    cli.expect(result, rc=rc)
    lines = [line for line in result.err.splitlines() if line.startswith("qshard: error")]
    assert len(lines) == 1, f"expected one error, found {len(lines)}\n{result}"
    for text in texts:
        assert str(text) in lines[0], f"expected '{text}' in the error\n{result}"
    assert result.seconds < seconds, f"took longer than {seconds} s\n{result}"
    return lines[0]
