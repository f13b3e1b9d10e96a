"""What `qshard train` says about memory: planned before the run, measured at its end, refused when it
does not fit."""
import re

import cli
import runs

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
LARGER = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=6, head_dim=16)
SIZES = dict(train__seq=64, train__global_batch=12, train__steps=2, train__log_every=1)


def start_files(tmp):
    runs.model(tmp, **LARGER)
    runs.tokens(tmp / "train.bin", 3000)


def table(text):
    """Segment → bytes of a rank, a node and, in the last table, measured."""
    found = {}
    for line in text[text.rindex("  planned "):].splitlines()[1:]:
        words = re.findall(r"([\d.]+) ([kMG]?B)\b", line)
        if not words:
            break
        found[line.split()[0]] = [float(number) * UNITS[unit] for number, unit in words]
    return found


def test_plan_is_what_a_run_holds(tmp):
    start_files(tmp)
    runs.tokens(tmp / "val.bin", 3000)
    for ranks, more in ((1, {}), (2, dict(checkpoint__async="true", train__micro_batch=3)),
                        (3, dict(comm__transport="mpi", train__param_dtype="bf16",
                                 train__activation_checkpoint="selective")),
                        (2, dict(comm__transport="mpi", fsdp__layers_per_unit=4)),
                        (4, dict(fsdp__reshard_after_forward="false",
                                 train__reduce_dtype="bf16"))):
        result = runs.train(tmp, ranks, train__overwrite="true", data__val=tmp / "val.bin",
                            **SIZES, **more)
        cli.expect(result)
        rows = table(result.out)
        planned, node, measured = rows["total"]
        assert abs(measured - planned) < 0.03 * planned, result
        assert runs.close(node, ranks * planned, 0.01), result
        parts = [rows[name][0] for name in rows if name != "total"]
        assert len(parts) == 7 and runs.close(sum(parts), planned, 0.01), result


def test_a_run_that_does_not_fit_is_refused_with_what_would(tmp):
    start_files(tmp)
    fits = runs.train(tmp, 2, **SIZES)
    needed = table(fits.out)["total"][0] / 1e9
    out = tmp / "refused"
    result = runs.train(tmp, 2, train__memory_gb=0.95 * needed, train__out=out, **SIZES)
    error = runs.expect_one_error(result, 2, "train.memory_gb", "Nearest setting that fits")
    assert "activations" in result.err and not out.exists(), result
    # What it names does fit, and the curve is the same.
    options = re.search(r"that fits: (--\S+ \S+) ", error)[1].split()
    cli.expect(runs.train(tmp, 2, extra=options, train__memory_gb=0.95 * needed, train__out=out,
                          **SIZES))
    assert runs.without_clock(out) == runs.without_clock(tmp / "out")
    result = runs.train(tmp, 2, train__memory_gb=0.01 * needed, train__out=tmp / "no", **SIZES)
    runs.expect_one_error(result, 2, "train.memory_gb")


def test_units_of_one_layer_are_the_first_thing_that_would_fit(tmp):
    start_files(tmp)
    sizes = dict(SIZES, comm__transport="mpi")
    needed = table(runs.train(tmp, 2, **sizes).out)["total"][0] / 1e9
    result = runs.train(tmp, 2, train__memory_gb=1.01 * needed, fsdp__layers_per_unit=6,
                        train__out=tmp / "refused", **sizes)
    runs.expect_one_error(result, 2, "fits: --fsdp.layers_per_unit 1 (")


def test_offloading_needs_a_gpu(tmp):
    start_files(tmp)
    for transport in "shm", "mpi":
        result = runs.train(tmp, 2, fsdp__offload="optimizer", comm__transport=transport, **SIZES)
        runs.expect_one_error(result, 2, "fsdp.offload optimizer", transport, "device.backend cuda")
        assert not (tmp / "out").exists(), result


def test_auto_takes_as_little_checkpointing_as_fits(tmp):
    start_files(tmp)
    auto = dict(train__activation_checkpoint="auto", train__overwrite="true", **SIZES)
    needed = {}
    for mode in "none", "selective", "full":
        result = runs.train(tmp, 2, **{**auto, "train__activation_checkpoint": mode})
        needed[mode] = table(result.out)["total"][0] / 1e9
    assert needed["none"] > needed["selective"] > needed["full"], needed
    for mode, bytes_needed in needed.items():
        result = runs.train(tmp, 2, train__memory_gb=1.001 * bytes_needed, **auto)
        cli.expect(result, out=f"activation checkpointing: {mode}")
    cli.expect(runs.train(tmp, 2, **auto), out="activation checkpointing: none")


if __name__ == "__main__":
    cli.main()
