"""scripts/gpu_check.sh in a folder of scripts/gpu_check_bundle.sh that was moved, on the simulator:
every step runs, and one that fails is named."""
import json

import simulated
import cli
import runs


def bundle(tmp):
    made, moved = tmp / "made", tmp / "moved"
    cli.expect(cli.run(cli.ROOT / "scripts" / "gpu_check_bundle.sh", simulated.QSHARD.parent, made))
    made.rename(moved)
    for test in moved.glob("bin/*_test"):  # they run elsewhere, and take minutes
        if test.name not in ("device_test", "ops_linear_test"):
            test.unlink()
    return moved


def check(folder, *args, rc):
    result = cli.run(folder / "gpu_check.sh", "--models", runs.model(folder), "--batch", 2, "--seq", 8,
                     "--repeats", 1, "--python", "false", *args, cwd=folder, timeout=280)
    cli.expect(result, rc=rc)
    return result


def test_every_step_runs_and_a_failure_is_named(tmp):
    folder = bundle(tmp)
    broken = folder / "bin" / "broken_test"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    listed = check(folder, "--dry-run", rc=0)
    result = check(folder, rc=1)
    document = json.loads((folder / "gpu_check_result" / "gpu_check.json").read_text())
    steps = {step["name"]: step for step in document["steps"]}
    for line in listed.out.splitlines():
        assert line.split(":")[0] in steps, line
    assert [name for name, step in steps.items() if step["result"] == "FAILED"] == ["broken_test"], result
    assert "exit code 3" in steps["broken_test"]["why"]
    for name in ("verify-f32", "verify-bf16", "verify-fp16", "ops-model", "step-model", "graph-model",
                 "memory-model"):
        assert steps[name]["result"] == "ok", result
    for name in ("step-model", "graph-model"):
        assert document["measurements"][name]["tokens_per_s"] > 0
    assert document["measurements"]["graph-model"]["graphs"] is True
    assert "1 failed" in result.out and "tokens/s" in result.out, result


def expect_one_line(result, text):
    cli.expect(result, rc=1)
    assert len(result.err.splitlines()) == 1 and text in result.err, result


def test_a_machine_where_nothing_can_run_is_told_at_once(tmp):
    folder = bundle(tmp)
    expect_one_line(cli.run(folder / "gpu_check.sh", cwd=tmp, env={"CUDASIM_DEVICES": 0}), "no GPU")
    needs = folder / "glibc"
    assert needs.read_text().startswith("2."), needs.read_text()
    needs.write_text("2.999\n")
    expect_one_line(cli.run(folder / "gpu_check.sh", cwd=tmp), "needs glibc 2.999 or later")
    needs.unlink()
    expect_one_line(cli.run(folder / "gpu_check.sh", cwd=tmp), "make CUDA=1 gpu-check-bundle")


def test_bad_options(tmp):
    for args in (["--nothing"], ["--models"]):
        cli.expect(cli.run(cli.ROOT / "scripts" / "gpu_check.sh", *args, cwd=tmp), rc=2)


if __name__ == "__main__":
    cli.main()
