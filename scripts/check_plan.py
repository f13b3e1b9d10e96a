#!/usr/bin/env python3
"""Predicted against measured step times: scripts/check_plan.py [--build DIR] [--steps N] [--json FILE]

For 1 and 2 ranks each, `qshard plan --calibrate` measures this machine with one model and setting;
`qshard plan` then predicts other models, sequences, dtypes and activation checkpointing, and `qshard
train` runs them. Prints both step times (the median of the steps after the second) and exits with 1
when one prediction is off by more than 15 %. For a machine that does nothing else.
"""
import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.15
# name: (changes of small30m.json, sequences of a rank, tokens of a sequence, checkpointing)
SETTINGS = {
    "small30m 2 x 256": ({}, 2, 256, "none"),
    "small30m 1 x 1024": ({}, 1, 1024, "none"),
    "small30m 2 x 256 full": ({}, 2, 256, "full"),
    "wide 2 x 256": ({"hidden_size": 768, "intermediate_size": 2304}, 2, 256, "none"),
    "deep 4 x 128 selective": ({"hidden_size": 384, "num_hidden_layers": 16}, 4, 128, "selective"),
}


def shell(*command):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(str(c) for c in command)}\n{result.stderr}")
    return result.stdout


def measure(args, folder, model, ranks, setting, dtype):
    _, batch, seq, mode = setting
    out = folder / "out"
    shell(ROOT / "scripts" / "mpirun.sh", "-n", ranks, args.build / "qshard", "train",
          "--model.config", model, "--data.train", folder / "tokens.bin", "--data.format", "raw-u32",
          "--train.seq", seq, "--train.global_batch", ranks * batch, "--train.steps", args.steps,
          "--train.param_dtype", dtype, "--train.activation_checkpoint", mode, "--train.out", out,
          "--train.overwrite", "true", "--train.save_model", "false", "--checkpoint.at_end", "false",
          "--train.peak_gflops", 1)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_ms"] for line in lines[2:] if "step_ms" in line)


def predict(args, folder, model, ranks, setting, dtype):
    _, batch, seq, mode = setting
    report = json.loads(shell(
        ROOT / "scripts" / "mpirun.sh", "-n", 1, args.build / "qshard", "plan", "--model", model,
        "--ranks", ranks, "--batch", batch, "--seq", seq, "--param-dtype", dtype,
        "--activation-checkpoint", mode, "--hardware", folder / f"hardware{ranks}.json",
        "--format", "json"))
    return 1e3 * report["seconds"]["step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="the rows as JSON")
    args = parser.parse_args()
    base = json.loads((ROOT / "data" / "configs" / "small30m.json").read_text())
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokens.bin").write_bytes(array("I", [i * 7 % 8000 for i in range(99000)]))
        model = folder / "model.json"
        print(f"{'setting':<34}{'predicted':>12}{'measured':>12}{'off by':>9}")
        for ranks in 1, 2:
            model.write_text(json.dumps(base))
            shell(ROOT / "scripts" / "mpirun.sh", "-n", ranks, args.build / "qshard", "plan",
                  "--model", model, "--batch", 4, "--seq", 256, "--calibrate",
                  folder / f"hardware{ranks}.json")
            for dtype, (title, setting) in itertools.product(("f32", "bf16"), SETTINGS.items()):
                model.write_text(json.dumps({**base, **setting[0]}))
                predicted = predict(args, folder, model, ranks, setting, dtype)
                measured = measure(args, folder, model, ranks, setting, dtype)
                off = predicted / measured - 1
                rows.append({"setting": title, "ranks": ranks, "dtype": dtype,
                             "predicted_ms": predicted, "measured_ms": measured, "off": off})
                print(f"{f'{ranks} rank(s) {dtype} {title}':<34}{predicted:>9.1f} ms"
                      f"{measured:>9.1f} ms{100 * off:>+7.1f} %", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    worst = max(abs(row["off"]) for row in rows)
    print(f"{len(rows)} settings, largest difference {100 * worst:.1f} %")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
