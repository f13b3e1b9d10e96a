"""What tests of the program on simulated GPUs share. Imports test/cli's modules for them."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
import cli  # noqa: E402

REFERENCE = cli.ROOT / "test" / "reference"
QSHARD = Path(os.environ.get("QSHARD_CUDASIM", cli.BUILD / "cudasim")) / "qshard"


def verify(case, *options, ranks, env=None, timeout=120, program=QSHARD):
    return cli.run(*cli.launcher(ranks), program, "verify", "--reference", REFERENCE / case,
                   "--backend", "cuda", *options, env=env, timeout=timeout)


def expect_ok(result):
    cli.expect(result, out="\nverify: ok\n")
