"""SIGTERM, SIGUSR1 and SIGUSR2: the step is finished, all ranks save and leave, and a later job goes on."""
import os
import random
import signal
import time

import checkpoints as ck
import cli
import runs

RUN = dict(train__seq=8, train__global_batch=4)


def stopped(result, out):
    """The step after which a run has stopped; it is the only one saved and the last one made."""
    cli.expect(result, rc=75, out="stopped after step")
    step = int(result.out.split("stopped after step ")[1].split(",")[0])
    assert max(ck.curve(out)) == step, (step, max(ck.curve(out)))
    assert ck.saved(out)[-1] == ck.file(out, step).name, ck.saved(out)
    return step


def goes_on(tmp, step, ranks=4):
    result = ck.resume(tmp, ranks, train__stop_after=1, **{**ck.ENDLESS, **RUN})
    cli.expect(result, rc=75, out=f"going on with step {step + 1}")
    assert max(ck.curve(tmp / "out")) == step + 1


def test_any_signal_to_any_rank_or_the_launcher(tmp):
    ck.start_files(tmp)
    first = []
    for number, to in ((signal.SIGTERM, "one"), (signal.SIGUSR1, "all"), (signal.SIGUSR2, "one"),
                       (signal.SIGTERM, "launcher"), (signal.SIGUSR1, "launcher"),
                       (signal.SIGUSR2, "launcher"), (signal.SIGTERM, "all")):
        before = ck.steps_done(tmp / "out")
        process = ck.start(tmp, 4, extra=first, **RUN)
        ck.wait_for(process, lambda: ck.steps_done(tmp / "out") > before + 3)
        ranks = ck.ranks_of(process)
        for pid in {"one": [ranks[3]], "all": ranks, "launcher": [process.pid]}[to]:
            os.kill(pid, number)
        result = cli.finish(process, timeout=20)
        step = stopped(result, tmp / "out")
        assert result.seconds < 15, result
        first = ["--resume", "auto"]
    goes_on(tmp, step)


def test_one_rank_at_random_times(tmp):
    """20 stops with short steps: always at one step, of which the next job makes the next."""
    ck.start_files(tmp)
    chance, last, extra = random.Random(7), 0, []
    for _ in range(20):
        process = ck.start(tmp, 4, extra=extra, **RUN)
        ck.wait_for(process, lambda: ck.steps_done(tmp / "out") > last)
        time.sleep(0.1 * chance.random())
        os.kill(ck.ranks_of(process)[3], signal.SIGUSR1)
        result = cli.finish(process, timeout=20)
        if extra:
            assert f"going on with step {last + 1}" in result.out, result
        last, extra = stopped(result, tmp / "out"), ["--resume", "auto"]
    steps = [line["step"] for line in runs.metrics(tmp / "out")[0]]
    assert steps == list(range(1, last + 1)), "a step was lost or made twice"


def test_signals_during_a_save_change_nothing(tmp):
    """Every step is saved and a stream of signals arrives: one stop, all files whole."""
    ck.start_files(tmp)
    for use_async in ("false", "true"):
        out = tmp / use_async
        process = ck.start(tmp, 4, **RUN, checkpoint__every=1, checkpoint__async=use_async,
                           train__out=out)
        ck.wait_for(process, lambda: ck.steps_done(out) > 3)
        ranks = ck.ranks_of(process)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2) * 5:
            for pid in ranks:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            time.sleep(0.002)
        stopped(cli.finish(process, timeout=20), out)
        for name in ck.saved(out):
            assert name.endswith(".h5"), ck.saved(out)
            ck.verify(out / "checkpoints" / name)


def test_training_goes_on_under_a_save_and_leaving_waits_for_it(tmp):
    """A model of some megabytes: steps are made between the begin and the end of its save."""
    ck.start_files(tmp, vocab_size=20000)
    values = {**RUN, "checkpoint__every": 4, "checkpoint__async": "true", "train__steps": 9,
              "train__log_every": 1}
    result = runs.train(tmp, 2, **values)
    cli.expect(result)
    saves = [line for line in result.out.splitlines() if line.startswith(("step ", "saved step"))]
    at = saves.index(next(line for line in saves if line.startswith("saved step 4")))
    made = [line for line in saves[:at] if line.startswith("step ")]
    assert len(made) > 4, f"no step was made under the save\n{result}"
    assert ck.saved(tmp / "out") == ["step-00000008.h5", "step-00000009.h5"], result
    assert saves[-1].startswith("saved step 9"), result


if __name__ == "__main__":
    cli.main()
