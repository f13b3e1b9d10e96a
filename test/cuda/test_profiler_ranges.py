"""NVTX ranges of the CUDA build: those of the trace, with the same names, when a profiler is attached
(the simulator plays one where CUDASIM_NVTX is set), and nothing otherwise."""
import json
import re

import simulated  # noqa: F401  first: it makes test/cli's modules known
import cli
import runs

cli.QSHARD = simulated.QSHARD.resolve()
RUN = dict(device__backend="cuda", train__steps=2, optim__clip=0.5)


def train(tmp, ranks, env=None, extra=(), **values):
    runs.start_files(tmp)
    result = runs.train(tmp, ranks, extra, timeout=240, env=env, **{**RUN, **values})
    cli.expect(result)
    return result


def ranges(tmp):
    """Names by process, with the promise that they are balanced kept."""
    found = []
    for path in tmp.glob("nvtx.*"):
        *lines, end = path.read_text().splitlines()
        opened, pushes, pops = map(int, end.removeprefix("end ").split())
        assert opened == 0 and pushes == pops == len(lines) > 0, (path, end)
        # No range of ours is inside of another.
        found.append([re.fullmatch(r"0 qshard: (.*)", line)[1] for line in lines])
    return found


def range_of(event):
    if event["cat"] != "compute":
        return event["name"]  # the unit is in it
    return f"{event['name']} {event['args']['unit']}, {event['args']['step']}"


def test_ranges_are_the_spans_of_the_trace(tmp):
    for transport, ranks in (("nccl", 2), ("mpi-cuda", 1)):
        folder = tmp / transport
        folder.mkdir()
        train(folder, ranks, {"CUDASIM_NVTX": folder / "nvtx"}, ["--trace", folder / "t.json"],
              comm__transport=transport)
        events = [e for e in json.loads((folder / "t.json").read_text())["traceEvents"]
                  if e["ph"] == "X" and e["cat"] != "io"]
        found = ranges(folder)
        assert len(found) == ranks
        for rank in range(ranks):
            own = sorted((e for e in events if e["pid"] == rank), key=lambda e: e["ts"])
            expected = [range_of(event) for event in own]
            assert expected in found, (expected[:5], [names[:5] for names in found])
        for name in ("linear layers.1, 6 o_proj", "adamw layers.0, AdamW",
                     "all-gather start layers.1", "reduce-scatter wait root"):
            assert name in found[0], name


def test_no_profiler_no_ranges_same_numbers(tmp):
    for name, env in (("without", None), ("with", {"CUDASIM_NVTX": tmp / "nvtx"})):
        train(tmp, 2, env, train__out=tmp / name)
        assert len(list(tmp.glob("nvtx.*"))) == (2 if env else 0)
    assert runs.without_clock(tmp / "without") == runs.without_clock(tmp / "with")


def test_graphs_are_named_while_they_are_recorded(tmp):
    counts, curves = {}, []
    for graph in ("false", "true"):
        for steps in (2, 4):
            folder = tmp / f"{graph}{steps}"
            folder.mkdir()
            train(folder, 1, {"CUDASIM_NVTX": folder / "nvtx"}, train__steps=steps,
                  device__graph=graph, train__out=folder / "out")
            names, = ranges(folder)
            counts[graph, steps] = names.count("linear layers.1, 6 o_proj")
        curves.append(runs.without_clock(folder / "out"))
    assert counts["false", 2] == 2 and counts["false", 4] == 4, counts
    assert 1 <= counts["true", 2] == counts["true", 4] < 4, counts
    assert curves[0] == curves[1]


if __name__ == "__main__":
    cli.main()
