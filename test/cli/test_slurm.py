"""slurm/train.sbatch without Slurm; on a real one it is tested by test/cluster."""
import os
import re
import shutil
import signal
import time

import checkpoints as ck
import cli
import runs

SCRIPT = cli.ROOT / "slurm" / "train.sbatch"
SLURM = {name: None for name in os.environ if name.startswith("SLURM_")}


def job(tmp, *arguments, **variables):
    """Environment and command of the script as Slurm would run it, with fake programs in tmp/bin."""
    env = {**SLURM, "PATH": f"{tmp}/bin:{os.environ['PATH']}", "SLURM_NTASKS": 4,
           "QSHARD": cli.QSHARD, **variables}
    return {"env": env}, ["bash", SCRIPT, *arguments]


def run(tmp, *arguments, **variables):
    options, command = job(tmp, *arguments, **variables)
    return cli.run(*command, **options)


def program(tmp, name, script):
    path = tmp / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def test_settings_for_slurm(tmp):
    text = SCRIPT.read_text()
    settings = re.findall(r"^#SBATCH (.*)", text, re.M)
    assert {"--requeue", "--open-mode=append"} <= set(settings), settings
    assert any(s.startswith("--signal=B:USR1@") for s in settings), settings
    code = "\n".join(line.split("  # ")[0] for line in text.splitlines()
                     if not line.lstrip().startswith("#"))
    assert not re.search(r"(?<![\w/.}])/(?!dev/null|\^)[a-z]", code), "an absolute path"
    assert not re.search(r"^\s*(make|cmake|mpicxx)\b", code, re.M), "it builds"


def test_shellcheck(tmp):
    if not shutil.which("shellcheck"):
        print("    shellcheck is not installed: nothing was checked")
        return
    scripts = [SCRIPT, cli.ROOT / ".ci" / "run", *(cli.ROOT / "scripts").glob("*.sh"),
               *(cli.ROOT / "slurm" / "machines").glob("*.env")]
    assert len(scripts) > 5, scripts
    cli.expect(cli.run("shellcheck", *scripts))
    planted = program(tmp, "planted", "rm -r $1/*")
    assert cli.run("shellcheck", planted).rc == 1


def test_refused_with_one_message(tmp):
    out = ["--train.out", tmp / "out"]
    study = tmp / "study.txt"
    study.write_text("--optim.lr 1e-3\n")
    for arguments, variables, text in (
            ([], {}, "--train.out"),
            ([*out, "--resume", "none"], {}, "leave out --resume"),
            (out, {"QSHARD": tmp / "none"}, "'make' on a login node"),
            (out, {"BACKEND": "cuda"}, "--gpus-per-node"),
            (out, {"BACKEND": "rocm"}, "expected cpu or cuda"),
            (out, {"LAUNCHER": "qsub"}, "expected srun, mpirun"),
            (out, {"MACHINE": "nowhere"}, "slurm/machines/nowhere.env"),
            (out, {"STUDY": study}, "--array"),
            (out, {"STUDY": study, "SLURM_ARRAY_TASK_ID": 2}, "no line 2"),
            (out, {"STUDY": tmp / "none", "SLURM_ARRAY_TASK_ID": 1}, "cannot read"),
            (out, {"SLURM_NTASKS": None}, "SLURM_NTASKS")):
        result = run(tmp, *arguments, **variables)
        cli.expect(result, rc=2, err=text)
        assert not result.out and result.err.count("\n") == 1, result


def test_what_srun_gets(tmp):
    program(tmp, "srun", 'printf "<%s>" "$@"')
    result = run(tmp, "--train.out", "a b", SLURM_CPUS_PER_TASK=3)
    cli.expect(result, out=f"<-n><4><--mpi=pmix><--kill-on-bad-exit=1><--cpus-per-task=3><{cli.QSHARD}>"
                           "<train><--train.out><a b><--resume><auto>")
    cli.expect(run(tmp, "--train.out=x", BACKEND="cuda", SLURM_GPUS_ON_NODE=4),
               out=f"<--gpu-bind=none><{cli.QSHARD}><train><--train.out=x><--resume><auto>"
                   "<--device.backend><cuda>")
    machine = tmp / "machine.env"
    machine.write_text("MPI_TYPE=pmi2\nLAUNCH_OPTIONS='--cpu-bind=cores -v'\nunset_is_fine=$NOT_SET\n")
    cli.expect(run(tmp, "--train.out=x", MACHINE=machine), out="<--mpi=pmi2>")
    cli.expect(run(tmp, "--train.out=x", MACHINE=machine), out=f"<--cpu-bind=cores><-v><{cli.QSHARD}>")
    # Two nodes of four became one.
    fewer = {"SLURM_NTASKS": 16, "SLURM_NTASKS_PER_NODE": 4, "SLURM_JOB_NUM_NODES": 2}
    cli.expect(run(tmp, "--train.out=x", **fewer), out="<-n><8>")
    for name in ("cpu", "gpu"):
        cli.expect(run(tmp, "--train.out=x", MACHINE=name, SLURM_GPUS_ON_NODE=4),
                   out="<--cpu-bind=cores><--distribution=block:block>")


def test_line_of_a_study(tmp):
    program(tmp, "srun", 'printf "<%s>" "$@"')
    study = tmp / "study.txt"
    study.write_text("--train.out one\n--train.out 'the second' --optim.lr \"2e-3\"\n")
    cli.expect(run(tmp, "--config", "c.json", STUDY=study, SLURM_ARRAY_TASK_ID=2),
               out="<--config><c.json><--train.out><the second><--optim.lr><2e-3>")


def test_runs_without_slurm_and_goes_on_in_a_second_start(tmp):
    runs.start_files(tmp)
    options = runs.options(tmp, train__steps=6)
    result = run(tmp, *options, "--train.stop_after", 3, LAUNCHER=cli.MPIRUN)
    cli.expect(result, rc=75, out="saved so far: step 3")
    result = run(tmp, *options, LAUNCHER=cli.MPIRUN, SLURM_RESTART_COUNT=1)
    cli.expect(result, out="start 2, nodes")
    assert [line["step"] for line in runs.metrics(tmp / "out")[0]] == [1, 2, 3, 4, 5, 6], result


def test_signals_to_the_script_alone_reach_the_ranks(tmp):
    ck.start_files(tmp)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        out = tmp / number.name
        arguments = runs.options(tmp, **ck.ENDLESS, train__global_batch=4, train__out=out)
        options, command = job(tmp, *arguments, LAUNCHER=cli.MPIRUN)
        process = cli.start(*command, **options)
        ck.wait_for(process, lambda: ck.steps_done(out) > 3)
        os.kill(process.pid, number)
        result = cli.finish(process, timeout=30)
        cli.expect(result, rc=75, out=f"saved so far: step {max(ck.curve(out))}\n")


def limited(tmp, code, checkpoint="", number=signal.SIGUSR1, scontrol='echo "scontrol $*"'):
    """Result of a job near its limit whose ranks save as told and leave with this code."""
    save = f'mkdir -p {tmp}/out/checkpoints; touch {tmp}/out/checkpoints/{checkpoint}' if checkpoint else ":"
    program(tmp, "scontrol", scontrol)
    program(tmp, "srun", f"trap '{save}; exit {code}' USR1; touch {tmp}/ready; sleep 60 >/dev/null 2>&1 & wait")
    options, command = job(tmp, "--train.out", tmp / "out", SLURM_JOB_ID=17)
    process = cli.start(*command, **options)
    ck.wait_for(process, (tmp / "ready").exists)
    (tmp / "ready").unlink()
    time.sleep(0.1)
    os.kill(process.pid, number)
    return cli.finish(process, timeout=30)


def test_requeued_only_after_progress(tmp):
    result = limited(tmp, 75)
    cli.expect(result, rc=1, err="not requeued: no step was saved")
    # A file that is not complete has another name.
    cli.expect(limited(tmp, 75, "step-00000009.h5.tmp"), rc=1, err="not requeued")
    cli.expect(limited(tmp, 75, "step-00000009.h5"), out="scontrol requeue 17")
    cli.expect(limited(tmp, 75, "step-00000009.h5"), rc=1, err="not requeued")
    # srun's code when ranks that were still leaving were killed.
    cli.expect(limited(tmp, 137, "step-00000010.h5"), out="scontrol requeue 17")
    # As numbers, not as text.
    cli.expect(limited(tmp, 75, "step-100000000.h5"), out="scontrol requeue 17")


def test_a_requeue_that_is_refused_says_how_to_go_on(tmp):
    cli.expect(limited(tmp, 75, "step-00000009.h5", scontrol="exit 1"), rc=75, err="submit it again")


def test_termination_is_not_answered_by_a_requeue(tmp):
    result = limited(tmp, 75, "step-00000009.h5", signal.SIGTERM)
    cli.expect(result, rc=75, out="saved so far: step 9")
    assert "scontrol" not in result.out, result


def test_an_error_is_not_requeued(tmp):
    for code in (1, 2):
        result = limited(tmp, code, f"step-0000000{code}.h5")
        cli.expect(result, rc=code)
        assert "scontrol" not in result.out, result


if __name__ == "__main__":
    cli.main()
