"""Replicas and groups (fsdp.mesh, fsdp.reshard_ranks) from the command line, on nodes that this
machine plays (QSHARD_RANKS_PER_NODE)."""
import array
import struct

import cli
import runs
from test_verify import REFERENCE, last_line, verify

TWO_NODES = {"QSHARD_RANKS_PER_NODE": 2}


def losses(folder):
    return [line["loss"] for line in runs.metrics(folder)[0]]


def weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    return array.array("f", data[8 + struct.unpack_from("<Q", data)[0]:])


def expect_same_curve(a, b):
    assert len(a) == len(b) and all(runs.close(x, y, 1e-4) for x, y in zip(a, b)), (a, b)


def test_bad_ones_are_refused_in_one_line(tmp):
    runs.start_files(tmp)
    for mesh, texts in (("2x3", ["2 replicas", "4 ranks", "1x4, 2x2, 4x1"]),
                        ("0x4", ["at least 1", "1x4, 2x2, 4x1"]),
                        ("two by two", ["full, auto, or RxS"])):
        result = runs.train(tmp, ranks=4, fsdp__mesh=mesh)
        runs.expect_one_error(result, 2, f"fsdp.mesh {mesh}", *texts)
    result = runs.train(tmp, ranks=4, fsdp__reshard_ranks=3, comm__transport="mpi")
    runs.expect_one_error(result, 2, "fsdp.reshard_ranks 3", "divisor of the 4 ranks")
    result = runs.train(tmp, ranks=4, fsdp__reshard_ranks=2)
    runs.expect_one_error(result, 2, "fsdp.reshard_ranks 2", "shm", "comm.transport mpi")
    result = cli.qshard("verify", "--reference", REFERENCE / "tiny-tied", "--mesh", "3x2", ranks=4)
    runs.expect_one_error(result, 2, "fsdp.mesh 3x2", "4 ranks")


def test_reference_cases(tmp):
    for name, ranks, options in (
            ("tiny-tied", 4, ["--mesh", "2x2"]),
            ("tiny-tied", 4, ["--mesh", "4x1", "--transport", "mpi", "--param-dtype", "bf16"]),
            ("wide-head-untied", 3, ["--mesh", "3x1"]),
            ("empty-shards", 8, ["--mesh", "2x4"]),
            ("tiny-tied", 4, ["--layers-per-unit", "2", "--param-dtype", "bf16"]),
            ("wide-head-untied", 3, ["--layers-per-unit", "2", "--transport", "mpi"]),
            ("empty-shards", 8, ["--mesh", "2x4", "--transport", "mpi", "--reshard-ranks", "2"]),
            ("tiny-tied", 4, ["--transport", "mpi", "--reshard-ranks", "2", "--backward-prefetch",
                              "2", "--reshard-after-backward", "false"])):
        result = verify(REFERENCE / name, *options, ranks=ranks)
        assert last_line(result) == "verify: ok", result


def test_nodes(tmp):
    runs.start_files(tmp)
    cli.expect(runs.train(tmp, ranks=4, train__out=tmp / "full"),
               out="mesh        1x4 of fsdp.mesh full: 1 replica(s), a rank holds 1/4")
    result = runs.train(tmp, ranks=4, train__out=tmp / "auto", fsdp__mesh="auto", env=TWO_NODES)
    cli.expect(result, out="mesh        2x2 of fsdp.mesh auto (2 nodes of 2 ranks): 2 replica(s)")
    assert "4 on 2 node(s)" in result.out and "\nreplicas    " in result.out, result
    assert "rows between" not in result.out.split("\nreplicas")[0], result  # none leave the node
    expect_same_curve(losses(tmp / "auto"), losses(tmp / "full"))

    result = runs.train(tmp, ranks=4, train__out=tmp / "one", fsdp__mesh="auto")
    cli.expect(result, out="1x4 of fsdp.mesh auto (one node)")
    result = runs.train(tmp, ranks=3, train__out=tmp / "odd", fsdp__mesh="auto", env=TWO_NODES)
    cli.expect(result, out="1x3 of fsdp.mesh auto (2 nodes have different numbers of ranks)")
    # One replica over both nodes, whose layers stay in a node from forward to backward.
    result = runs.train(tmp, ranks=4, train__out=tmp / "groups", fsdp__reshard_ranks=2,
                        comm__transport="mpi", env=TWO_NODES)
    cli.expect(result, out="groups      layers stay on 2 ranks")
    expect_same_curve(losses(tmp / "groups"), losses(tmp / "full"))


# Two replicas over two nodes each.
def test_replicas_over_nodes(tmp):
    runs.start_files(tmp)
    cli.expect(runs.train(tmp, ranks=4, train__out=tmp / "full"))
    result = runs.train(tmp, ranks=4, train__out=tmp / "wide", fsdp__mesh="2x2",
                        env={"QSHARD_RANKS_PER_NODE": 1})
    cli.expect(result, out="rows between 2 nodes")
    expect_same_curve(losses(tmp / "wide"), losses(tmp / "full"))


def test_checkpoints_pass_between_meshes(tmp):
    runs.start_files(tmp)
    cli.expect(runs.train(tmp, ranks=4, train__out=tmp / "full", train__save_model="true"))
    values = dict(train__out=tmp / "out", train__save_model="true", checkpoint__async="true")
    cli.expect(runs.train(tmp, ranks=4, fsdp__mesh="2x2", train__stop_after=2, **values), rc=75)
    result = runs.train(tmp, ranks=4, fsdp__mesh="1x4", train__stop_after=1,
                        extra=("--resume", "auto"), **values)
    cli.expect(result, rc=75, out="written by 2 rank(s)")
    cli.expect(runs.train(tmp, ranks=3, fsdp__mesh="3x1", extra=("--resume", "auto"), **values))
    expect_same_curve(losses(tmp / "out"), losses(tmp / "full"))
    ours, expected = weights(tmp / "out"), weights(tmp / "full")
    assert len(ours) == len(expected)
    error = sum((a - b) ** 2 for a, b in zip(ours, expected)) / sum(b * b for b in expected)
    assert error < 1e-8, error


# Units of several layers: the same bits, on nodes too, and checkpoints that know nothing of them.
def test_layers_per_unit(tmp):
    runs.start_files(tmp)
    runs.model(tmp, num_hidden_layers=5)
    for name, values in (("plain", {}), ("nodes", dict(env=TWO_NODES)),
                         ("replicas", dict(env=TWO_NODES, fsdp__mesh="auto")),
                         ("mpi", dict(comm__transport="mpi", train__param_dtype="bf16"))):
        for k in 1, 2, 3:
            out = tmp / f"{name}-{k}"
            result = runs.train(tmp, ranks=4, train__out=out, fsdp__layers_per_unit=k, **values)
            cli.expect(result)
            units = {1: "", 2: "units       3 of 2 layers each", 3: "units       2 of 3 layers each"}[k]
            assert units in result.out and ("\nunits" in result.out) == (k > 1), result
            assert losses(out) == losses(tmp / f"{name}-1"), (name, k)
    cli.expect(runs.train(tmp, ranks=4, train__out=tmp / "two", train__save_model="true"))
    values = dict(train__out=tmp / "out", train__save_model="true")
    cli.expect(runs.train(tmp, ranks=4, fsdp__layers_per_unit=2, train__stop_after=2, **values), rc=75)
    cli.expect(runs.train(tmp, ranks=4, fsdp__layers_per_unit=5, extra=("--resume", "auto"), **values))
    assert losses(tmp / "out") == losses(tmp / "two")
    assert weights(tmp / "out") == weights(tmp / "two")
    for k, texts in ((0, ["fsdp.layers_per_unit"]), (6, ["fsdp.layers_per_unit 6", "1 to 5"])):
        runs.expect_one_error(runs.train(tmp, ranks=4, fsdp__layers_per_unit=k), 2, *texts)
    help_text = " ".join(cli.qshard("train", "--help").out.split())
    assert "layers are small and latency is high" in help_text, help_text


def test_another_divide_factor_changes_the_mathematics(tmp):
    runs.start_files(tmp)
    cli.expect(runs.train(tmp, train__stop_after=2), rc=75)
    resume = dict(extra=("--resume", "auto"), fsdp__gradient_divide_factor=100)
    runs.expect_one_error(runs.train(tmp, **resume), 2, "fsdp.gradient_divide_factor: 0.0 → 100.0",
                          "--allow-changes")
    cli.expect(runs.train(tmp, fsdp__prefetch=0, fsdp__reshard_after_backward="false",
                          extra=("--resume", "auto")))


if __name__ == "__main__":
    cli.main()
