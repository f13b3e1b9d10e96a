"""Steps as CUDA graphs (device.graph) on GPUs that the simulator plays."""
import json
import re

from gpu_runs import resume, same_values, train, weights
import checkpoints as ck
import cli
import runs


def graph_lines(result):
    """Text of what was recorded, in order, with the step."""
    return [(line.split(" ", 1)[1].strip(), int(line.rsplit(" ", 1)[1]))
            for line in result.out.splitlines()
            if line.startswith("graph ") and " nodes, recorded in " in line]


def test_steps_as_graphs_are_the_same_bits(tmp):
    """Evaluations between them; labels, rates and the clipping change with the step. At first fp16
    overflows: its update is recorded after the first step that has one."""
    runs.start_files(tmp)
    runs.tokens(tmp / "val.bin", 100)
    cases = [(1, dict(train__param_dtype="f32", train__micro_batch=4, data__val=tmp / "val.bin",
                      train__eval_every=2)),
             (2, dict(checkpoint__async="true", checkpoint__every=1, train__micro_batch=2,
                      train__activation_checkpoint="full", train__param_dtype="bf16")),
             (4, dict(train__param_dtype="f32", fsdp__mesh="2x2",
                      fsdp__reduce_every_microbatch="false", train__micro_batch=1)),
             (4, dict(train__param_dtype="fp16", train__reduce_dtype="fp16", train__steps=8,
                      grad_scaler__init_scale=2**19, fsdp__reshard_ranks=2))]
    for number, (ranks, values) in enumerate(cases):
        folders = [tmp / f"{name}{number}" for name in ("without", "with", "again")]
        results = [train(tmp, ranks, out, device__graph=graph, **values)
                   for out, graph in zip(folders, ("false", "true", "true"))]
        assert not graph_lines(results[0]), results[0]
        expected = json.dumps(runs.without_clock(folders[0]))  # a norm may be NaN
        for out, result in zip(folders[1:], results[1:]):
            lines = graph_lines(result)
            assert len(lines) == 2 and lines[0][1] == 2, result
            assert lines[1][1] == 2 or number == 3 and lines[1][1] > 2, result
            assert json.dumps(runs.without_clock(out)) == expected, (number, out)
            assert weights(out) == weights(folders[0]), number
            steps = values.get("train__steps", 6)
            same_values(ck.file(out, steps), ck.file(folders[0], steps))


def test_a_run_goes_on_with_graphs_and_without(tmp):
    runs.start_files(tmp)
    values = dict(checkpoint__async="true", train__micro_batch=2)
    train(tmp, 2, "straight", **values)
    for first, then in (("false", "true"), ("true", "false"), ("true", "true")):
        out = f"{first}-{then}"
        train(tmp, 2, out, rc=75, train__stop_after=3, device__graph=first, **values)
        result = resume(tmp, 2, out, device__graph=then, **values)
        cli.expect(result, out="going on with step 4")
        assert "differs" not in result.out, result
        assert [step for _, step in graph_lines(result)] == [5, 5] * (then == "true"), result
        assert ck.curve(tmp / out) == ck.curve(tmp / "straight"), out
        assert weights(tmp / out) == weights(tmp / "straight"), out


def test_graphs_refuse_what_they_cannot_hold(tmp):
    runs.start_files(tmp)
    refusals = ((dict(comm__transport="mpi-cuda"), (), "comm.transport nccl"),
                (dict(backend="cpu"), (), "device.backend cuda"),
                (dict(fsdp__offload="optimizer"), (), "fsdp.offload none"),
                ({}, ["--trace", tmp / "trace.json"], "--trace"))
    for values, extra, text in refusals:
        result = train(tmp, 2, "out", rc=2, extra=extra, device__graph="true", **values)
        errors = [line for line in result.err.splitlines() if "device.graph" in line]
        assert len(errors) == 1 and text in errors[0], result
        assert not (tmp / "out").exists(), result


if __name__ == "__main__":
    cli.main()
