"""slurm/train.sbatch on a real Slurm of two hosts, see cluster.py. Exit code 77: it cannot run here."""
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
import checkpoints as ck
import cli
import cluster
import runs

SLURM = None  # the running cluster.Cluster
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
ENDLESS = 1000000
LONG = 300  # seconds after which something has gone wrong, on a busy machine too


def start_files(tmp, steps, **model):
    """Model and tokens, settings of a machine, and a config whose number of steps can be changed."""
    ck.start_files(tmp, count=20000, **model)
    set_steps(tmp, steps)
    (tmp / "machine.env").write_text(
        "# The hosts' cable; ranks that outnumber the cores of both hosts together.\n"
        "export OMPI_MCA_btl_tcp_if_include=cable OMPI_MCA_oob_tcp_if_include=cable\n"
        "export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none\n"
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n")


def set_steps(tmp, steps):
    (tmp / "run.json").write_text(json.dumps({"train": {"steps": steps}}))


def options(tmp, **values):
    """A learning rate that does not depend on the number of steps; the transport whose sums do not
    depend on where the ranks are."""
    return ["--config", str(tmp / "run.json"),
            *runs.options(tmp, **{"train__steps": None, "schedule__kind": "constant",
                                  "comm__transport": "mpi", **values})]


def submit(tmp, nodes, tasks, *extra, sbatch=(), env=None, **values):
    """Job id; `tasks` a node."""
    variables = {"MACHINE": tmp / "machine.env", "QSHARD": cli.QSHARD, **(env or {})}
    variables = {k: str(v) for k, v in variables.items()}
    return int(SLURM.on("n1", "sbatch", "--parsable", "-N", nodes, "--ntasks-per-node", tasks,
                        "-t", 5, "-o", tmp / "log-%j", *sbatch, "slurm/train.sbatch",
                        *options(tmp, **values), *extra, env=variables, cwd=cli.ROOT))


def show(job):
    """Fields of `scontrol show job`; the state a word."""
    line = SLURM.on("n1", "scontrol", "-o", "show", "job", job)
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def log(tmp, job):
    path = tmp / f"log-{job}"
    return path.read_text(errors="replace") if path.exists() else "(no log)"


def wait_for(tmp, job, condition, what, seconds=LONG):
    try:
        return SLURM.wait_for(condition, what, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}\njob {job}: {show(job)}\n{log(tmp, job)}") from None


def ended(tmp, job, seconds=LONG):
    """The job's fields at its end."""
    wait_for(tmp, job, lambda: show(job)["JobState"] in ENDED, f"the end of job {job}", seconds)
    return show(job)


def completed(tmp, job, restarts=0, seconds=LONG):
    fields = ended(tmp, job, seconds)
    found = fields["JobState"], fields["ExitCode"], int(fields["Restarts"])
    assert found == ("COMPLETED", "0:0", restarts), f"{found}\n{log(tmp, job)}"
    return log(tmp, job)


def running(tmp, job, steps=5):
    """Waits until the job has made so many steps (of all starts)."""
    wait_for(tmp, job, lambda: ck.steps_done(tmp / "out") >= steps, f"{steps} steps")


def pending_again(tmp, job, restarts=1):
    """Waits until the job was requeued, not started."""
    wait_for(tmp, job, lambda: show(job)["JobState"] == "PENDING" and
             int(show(job)["Restarts"]) == restarts, f"job {job} to be requeued")


def warn_of_limit(job):
    """What Slurm does at --signal=B:USR1@N."""
    SLURM.on("n1", "scancel", "--signal=USR1", "--batch", job)


def made_steps(out):
    """Steps in the order of metrics.jsonl."""
    return [line["step"] for line in runs.metrics(out)[0]]


def resumes(out):
    """After which steps later starts have begun."""
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "resumed_from" in line]


def expect_each_step_once(out, steps):
    assert made_steps(out) == list(range(1, steps + 1)), f"a step was lost or made twice: {out}"


def expect_uninterrupted(tmp, steps, **values):
    """Every bit of the curve is that of a run on one host that nothing has stopped."""
    runs_alone = tmp / "alone"
    set_steps(tmp, steps)
    command = options(tmp, **{**values, "train__out": runs_alone, "checkpoint__at_end": "false"})
    cli.expect(cli.qshard("train", *command, ranks=4, timeout=2 * LONG))
    assert ck.curve(tmp / "out") == ck.curve(runs_alone), "not the curve of an uninterrupted run"


def test_two_hosts_and_one(tmp):
    start_files(tmp, steps=20)
    # Gradients are summed over the ranks in rank order, by shm over each node's ranks first: with
    # one rank a node that is the same order.
    for transport, tasks, bitwise in (("mpi", 2, True), ("shm", 1, True), ("shm", 2, False)):
        curves = []
        for nodes in (2, 1):
            out = tmp / f"{transport}-{nodes}-{tasks}"
            before = SLURM.sent_bytes("n1")
            text = completed(tmp, submit(tmp, nodes, 2 * tasks // nodes, train__out=out,
                                         comm__transport=transport))
            sent = SLURM.sent_bytes("n1") - before
            assert f"ranks       {2 * tasks} on {nodes} node(s)" in text, text
            for host in ("n1", "n2"):
                assert (f" on {host}\n" in text) == (nodes == 2), text
            # A step sends 100 kB and more of a model of 100000 parameters; Slurm has its messages.
            assert (sent > 20 * 100e3) == (nodes == 2), f"{sent} bytes left n1"
            curves.append(ck.curve(out))
        assert len(curves[0]) == 20
        if bitwise:
            assert curves[0] == curves[1], (transport, tasks)
        ck.same_curve(*curves)


def test_bytes_between_hosts(tmp):
    """One rank a host: what the transport says it has sent is what goes through the cable."""
    start_files(tmp, steps=3, hidden_size=256, intermediate_size=768, num_hidden_layers=4)
    for transport in ("shm", "mpi"):
        out = tmp / transport
        before = {node: SLURM.sent_bytes(node) for node in cluster.ADDRESSES}
        job = submit(tmp, 2, 1, "--trace", tmp / f"{transport}.json", train__out=out,
                     comm__transport=transport, train__seq=16, checkpoint__at_end="false")
        completed(tmp, job)
        sent = sum(SLURM.sent_bytes(node) - before[node] for node in before)
        events = json.loads((tmp / f"{transport}.json").read_text())["traceEvents"]
        counted = sum(event.get("args", {}).get("copied_bytes", 0) for event in events)
        print(f"    {transport}: {counted} bytes counted, {sent} through the cable: {sent / counted:.4f}")
        assert counted > 30e6 and abs(sent - counted) < 0.05 * counted, (transport, counted, sent)


def test_requeue_by_hand(tmp):
    """scontrol requeue: the step is finished and saved, the same job id goes on with the next."""
    start_files(tmp, ENDLESS)
    job = submit(tmp, 2, 2)
    running(tmp, job)
    SLURM.on("n1", "scontrol", "requeue", job)
    pending_again(tmp, job)
    saved = max(made_steps(tmp / "out"))
    set_steps(tmp, saved + 20)
    text = completed(tmp, job, restarts=1)
    assert text.count("train.sbatch: job") == 2, f"the first start's log is gone\n{text}"
    assert f"stopped after step {saved}, saved" in text, text
    expect_each_step_once(tmp / "out", saved + 20)
    assert resumes(tmp / "out") == [saved]
    expect_uninterrupted(tmp, saved + 20)


def test_time_limit(tmp):
    """Saved before the limit, requeued by the job itself, finished by a later start."""
    start_files(tmp, ENDLESS)
    values = dict(train__global_batch=96, train__micro_batch=3)
    job = submit(tmp, 2, 2, sbatch=["-t", 1, "--signal=B:USR1@15"], **values)
    pending_again(tmp, job)
    saved = max(made_steps(tmp / "out"))
    set_steps(tmp, saved + 10)
    fields = ended(tmp, job)
    text = log(tmp, job)
    # On a busy machine the second start may reach its limit as well.
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), f"{fields}\n{text}"
    assert f"stopped after step {saved}, saved" in text, text
    expect_each_step_once(tmp / "out", saved + 10)
    assert resumes(tmp / "out")[0] == saved and len(resumes(tmp / "out")) == int(fields["Restarts"])
    expect_uninterrupted(tmp, saved + 10, **values)


def test_ranks_that_leave_late(tmp):
    """--kill-on-bad-exit terminates ranks that are still leaving, which they survive, and kills them
    in the end: the job counts as saved all the same."""
    start_files(tmp, ENDLESS)
    slow = tmp / "slow"
    slow.write_text(f"""#!/bin/bash
trap : USR1 TERM
"{cli.QSHARD}" "$@" &
while wait $!; code=$?; [ $code -gt 128 ]; do :; done
ended=$SECONDS
while [ "$SLURM_PROCID" = 1 ] && [ $((SECONDS - ended)) -lt {3 * cluster.KILL_WAIT} ]; do sleep 1; done
exit $code
""")
    slow.chmod(0o755)
    job = submit(tmp, 2, 2, env={"QSHARD": slow})
    running(tmp, job)
    warn_of_limit(job)
    pending_again(tmp, job)
    saved = max(made_steps(tmp / "out"))
    set_steps(tmp, saved + 20)
    completed(tmp, job, restarts=1)
    assert "exit code 137" in log(tmp, job), f"no rank was killed: this tests nothing\n{log(tmp, job)}"
    expect_each_step_once(tmp / "out", saved + 20)


def test_scancel(tmp):
    """Saved, not requeued; the same command later goes on."""
    start_files(tmp, ENDLESS)
    job = submit(tmp, 2, 2)
    running(tmp, job)
    SLURM.on("n1", "scancel", job)
    fields = ended(tmp, job)
    assert fields["JobState"] == "CANCELLED" and fields["Restarts"] == "0", fields
    wait_for(tmp, job, lambda: "exit code 75, saved" in log(tmp, job), "the end of the script")
    saved = max(made_steps(tmp / "out"))
    set_steps(tmp, saved + 20)
    completed(tmp, submit(tmp, 2, 2))
    expect_each_step_once(tmp / "out", saved + 20)
    assert resumes(tmp / "out") == [saved]
    text = completed(tmp, submit(tmp, 1, 2))
    assert "nothing to do: " in text, text
    expect_each_step_once(tmp / "out", saved + 20)


def test_lost_node(tmp):
    """Slurm requeues the job; made smaller, it goes on from the last checkpoint on the node left."""
    start_files(tmp, ENDLESS)
    every = 20
    job = submit(tmp, 2, 2, checkpoint__every=every)
    running(tmp, job, 2 * every + 5)
    SLURM.lose("n2")
    try:
        pending_again(tmp, job)
        went_on_without(tmp, job, every)
    finally:
        SLURM.bring_back("n2")


def went_on_without(tmp, job, every):
    saved = [int(name[5:13]) for name in ck.saved(tmp / "out") if name.endswith(".h5")][-1]
    made = max(made_steps(tmp / "out"))
    assert saved <= made < saved + every + 2, (saved, made)
    set_steps(tmp, saved + 20)
    SLURM.on("n1", "scontrol", "update", f"JobId={job}", "NumNodes=1", "NumTasks=2")
    text = completed(tmp, job, restarts=1)
    assert "ranks       2 on 1 node(s)" in text.split("train.sbatch: job")[-1], text
    # What was lost is made again, and nothing else.
    assert made_steps(tmp / "out") == [*range(1, made + 1), *range(saved + 1, saved + 21)]
    assert resumes(tmp / "out") == [saved]
    curve = ck.curve(tmp / "out")
    set_steps(tmp, saved + 20)
    cli.expect(cli.qshard("train", *options(tmp, train__out=tmp / "alone"), ranks=4))
    ck.same_curve(curve, ck.curve(tmp / "alone"))


def test_killed_rank(tmp):
    """The job ends within seconds as failed: another start would likely end the same way."""
    start_files(tmp, ENDLESS)
    job = submit(tmp, 2, 2, checkpoint__every=5)
    running(tmp, job, 12)
    begin = time.monotonic()
    os.kill(SLURM.ranks("n2", cli.QSHARD)[0], signal.SIGKILL)
    fields = ended(tmp, job)
    assert fields["JobState"] == "FAILED" and fields["Restarts"] == "0", fields
    # Slurm sends TERM at once, to which ranks that wait for a dead one do not come, then KILL.
    assert time.monotonic() - begin < cluster.KILL_WAIT + 15, "the other ranks were left waiting"
    # srun's is the highest of all ranks: killed, or the SIGPIPE of one that was talking to the dead.
    assert fields["ExitCode"] in ("137:0", "141:0"), f"{fields}\n{log(tmp, job)}"


def test_no_progress(tmp):
    """A start that was too short to save a step is not repeated for ever."""
    start_files(tmp, ENDLESS)
    program = tmp / "program"
    program.write_text("#!/bin/bash\ntrap 'exit 75' USR1\necho ready\nsleep 300 &\nwait\n")
    program.chmod(0o755)
    job = submit(tmp, 2, 1, env={"QSHARD": program})
    wait_for(tmp, job, lambda: log(tmp, job).count("ready") == 2, "the program")
    warn_of_limit(job)
    fields = ended(tmp, job)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "1:0", "0"), fields
    assert "not requeued" in log(tmp, job), log(tmp, job)


def test_mpirun(tmp):
    """LAUNCHER=mpirun inside the allocation, across both hosts and a limit."""
    start_files(tmp, ENDLESS)
    job = submit(tmp, 2, 2, env={"LAUNCHER": "mpirun"})
    running(tmp, job)
    warn_of_limit(job)
    pending_again(tmp, job)
    saved = max(made_steps(tmp / "out"))
    set_steps(tmp, saved + 20)
    text = completed(tmp, job, restarts=1)
    assert text.count("ranks       4 on 2 node(s)") == 2, text
    expect_each_step_once(tmp / "out", saved + 20)
    assert resumes(tmp / "out") == [saved]


def test_study(tmp):
    """A job array: each task the options of its line."""
    start_files(tmp, steps=5)
    (tmp / "study.txt").write_text(f"--train.out {tmp}/a --optim.lr 1e-3\n"
                                   f"--train.out '{tmp}/b c' --optim.lr 2e-3\n")
    job = submit(tmp, 1, 2, sbatch=["--array", "1-2", "-o", tmp / "log-%a"], train__out=None,
                 env={"STUDY": tmp / "study.txt"})
    wait_for(tmp, job, lambda: not SLURM.on("n1", "squeue", "-h", "-j", job, check=False), "the array")
    for task, (out, lr) in enumerate({"a": 1e-3, "b c": 2e-3}.items(), 1):
        assert runs.metrics(tmp / out)[0][-1]["lr"] == lr, log(tmp, task)
        expect_each_step_once(tmp / out, 5)


def test_scaling_study_as_jobs(tmp):
    """scripts/scaling.py with a job for each point."""
    start_files(tmp, steps=5)
    launch = f"sbatch -W -o {tmp}/log-%j -N {{ranks}} --ntasks-per-node 1 slurm/train.sbatch"
    SLURM.on("n1", sys.executable, "scripts/scaling.py", "run", tmp / "study",
             "--ranks", 1, 2, "--dtype", "f32", "--batch", 4, "--warmup", 1, "--steps", 3,
             "--repeats", 1, "--qshard", cli.QSHARD, "--launch", launch, "--",
             "--model.config", tmp / "model.json", "--data.train", tmp / "train.bin",
             "--data.format", "raw-u32", "--train.seq", 8, cwd=cli.ROOT, timeout=LONG,
             env={"MACHINE": str(tmp / "machine.env"), "QSHARD": str(cli.QSHARD)})
    points = json.loads((tmp / "study" / "scaling.json").read_text())["points"]
    assert [(p["ranks"], p["repeats"]) for p in points] == [(1, 1), (2, 1)], points
    assert "2 on 2 node(s)" in "".join(path.read_text() for path in tmp.glob("log-*"))


def test_wrong_start_protocol(tmp):
    """srun without the protocol that the MPI library knows: the job fails at once, and once."""
    start_files(tmp, steps=5)
    job = submit(tmp, 1, 2, env={"MPI_TYPE": "none"})
    fields = ended(tmp, job)
    assert (fields["JobState"], fields["Restarts"]) == ("FAILED", "0"), fields
    assert "PMI" in log(tmp, job) and not (tmp / "out").exists(), log(tmp, job)


def main():
    global SLURM
    with cluster.Cluster() as SLURM:
        # Tests make their folders where all of this is thrown away.
        cli.tempfile.tempdir = str(cluster.FOLDER)
        cli.main()


if __name__ == "__main__":
    sys.exit(cluster.inside(main))
