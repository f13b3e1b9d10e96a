"""Optimizer states in the host's memory (fsdp.offload) of GPUs that the simulator plays."""
from gpu_runs import resume, same_values, train, weights
import checkpoints as ck
import cli
import runs


def test_offloaded_states_are_the_same_bits(tmp):
    """Curve, checkpoints and model, saved behind training or not; a stopped run goes on with or
    without."""
    runs.start_files(tmp)
    for ranks, use_async, goes_on, values in (
            (1, "false", "none", dict(train__micro_batch=4, train__param_dtype="f32")),
            (2, "true", "optimizer", dict(train__param_dtype="bf16")),
            (4, "true", "none", dict(train__param_dtype="fp16", comm__transport="mpi-cuda")),
            (4, "false", "optimizer", dict(fsdp__mesh="2x2"))):
        plain, host, stopped = (f"{name}-{ranks}-{use_async}" for name in ("plain", "host", "stopped"))
        train(tmp, ranks, plain, **values)
        values.update(fsdp__offload="optimizer", checkpoint__async=use_async, checkpoint__every=2)
        result = train(tmp, ranks, host, **values)
        words = result.out[result.out.rindex("  host moments"):].splitlines()[0].split()
        assert words[-2:] == ["+0.00", "%"] and float(words[2]) > 0, result
        assert ("  host shards" in result.out) == (values.get("train__param_dtype", "f32") != "f32")
        ck.verify(ck.file(tmp / host, 4))

        train(tmp, ranks, stopped, rc=75, train__stop_after=3, **values)
        result = resume(tmp, ranks, stopped, **{**values, "fsdp__offload": goes_on})
        assert "differs" not in result.out and "going on with step 4" in result.out, result
        for out in host, stopped:
            assert ck.curve(tmp / out) == ck.curve(tmp / plain), out
            assert weights(tmp / out) == weights(tmp / plain), out
            same_values(ck.file(tmp / out, 6), ck.file(tmp / plain, 6))


def test_a_hugging_face_folder_starts_an_offloaded_run(tmp):
    runs.start_files(tmp)
    train(tmp, 1, "first", train__steps=2)
    for offload in ("none", "optimizer"):
        train(tmp, 2, offload, extra=["--init", f"hf:{tmp / 'first'}"], train__steps=3,
              train__param_dtype="bf16", fsdp__offload=offload)
    assert ck.curve(tmp / "optimizer") == ck.curve(tmp / "none")
    assert ck.curve(tmp / "none") != ck.curve(tmp / "first")
    assert weights(tmp / "optimizer") == weights(tmp / "none")


if __name__ == "__main__":
    cli.main()
