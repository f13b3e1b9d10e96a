"""`qshard walkthrough` on GPUs that the simulator plays (test/cudasim)."""
import json

from simulated import QSHARD, cli
import runs


def walk(tmp, transport, dtype, ranks, *options):
    result = cli.run(*cli.launcher(ranks), QSHARD, "walkthrough", "--backend", "cuda", "--model",
                     runs.model(tmp), "--transport", transport, "--param-dtype", dtype, "--seq", 4,
                     "--format", "json", *options)
    cli.expect(result)
    return json.loads(result.out)


def test_checks_are_met_and_bytes_counted(tmp):
    for transport in ("nccl", "mpi-cuda"):
        for ranks in (1, 2, 4):
            for dtype in ("f32", "bf16", "fp16"):
                doc = walk(tmp, transport, dtype, ranks)
                assert all(c["ok"] for c in doc["checks"]), doc["checks"]
                total = doc["communication"]["total"]
                assert (min(total["gather_logical_bytes"]) > 0) == (ranks > 1)
                for kind in ("gather", "reduce"):
                    assert total[f"{kind}_copied_bytes"] == total[f"{kind}_logical_bytes"]


def test_meshes_and_groups(tmp):
    for transport in ("nccl", "mpi-cuda"):
        walk(tmp, transport, "fp16", 4, "--mesh", "2x2")
        walk(tmp, transport, "bf16", 4, "--reshard-ranks", "2")


if __name__ == "__main__":
    cli.main()
