"""The transports between GPUs on the simulator: what moves, what is refused, and how a job ends when
a transfer fails or a rank dies."""
import os
import resource
import signal

from simulated import QSHARD, cli, expect_ok, verify
import runs
import test_kill

GPU_MEMORY = {"CUDASIM_CUDA_AWARE": 1}


def test_mpi_cuda_through_pinned_memory(tmp):
    result = verify("tiny-tied", "--transport", "mpi-cuda", ranks=4)
    expect_ok(result)
    assert "transport mpi-cuda (through " in result.out, result
    expect_ok(verify("wide-head-untied", "--transport", "mpi-cuda", "--param-dtype", "bf16",
                     "--reduce-dtype", "bf16", "--prefetch", "2", ranks=3))


def test_mpi_cuda_with_gpu_memory(tmp):
    result = verify("tiny-tied", "--transport", "mpi-cuda", ranks=4, env=GPU_MEMORY)
    expect_ok(result)
    assert "transport mpi-cuda (GPU memory straight to " in result.out, result
    result = verify("tiny-tied", "--transport", "mpi-cuda", "--mpi-memory", "pinned", ranks=4,
                    env=GPU_MEMORY)
    expect_ok(result)
    assert "pinned memory" in result.out, result


def test_nccl_buffers(tmp):
    result = verify("tiny-tied", "--nccl-buffers", "windows", "--param-dtype", "bf16", ranks=4)
    expect_ok(result)
    assert "buffers in symmetric windows)" in result.out, result
    result = verify("wide-head-untied", "--nccl-buffers", "copy-engine", ranks=3)
    expect_ok(result)
    assert "gathers without CTAs" in result.out, result


# An NCCL that does not order launches, and operations that each take the whole GPU.
def test_nccl_of_before_2_26(tmp):
    expect_ok(verify("tiny-tied", ranks=4, env={"CUDASIM_NCCL_VERSION": 22203,
                                                "CUDASIM_NCCL_EXCLUSIVE": 1}))


def test_refusals(tmp):
    old = {"CUDASIM_NCCL_VERSION": 22203}
    for options, env, texts in (
            (["--nccl-buffers", "windows"], old, ["needs NCCL 2.27.0", "runs with 2.22.3"]),
            (["--nccl-buffers", "copy-engine"], old, ["needs NCCL 2.28.0"]),
            (["--nccl-buffers", "windows"], {"CUDASIM_NCCL_WINDOWS": 0}, ["no symmetric windows"]),
            (["--nccl-buffers", "windows", "--transport", "mpi-cuda"], {}, ["goes with", "nccl"]),
            (["--mpi-memory", "device"], {}, ["goes with", "mpi-cuda"]),
            (["--mpi-memory", "device", "--transport", "mpi-cuda"], {}, ["takes no GPU memory"])):
        result = verify("tiny-tied", *options, ranks=4, env=env)
        runs.expect_one_error(result, 2, *texts, seconds=60)


# --- how jobs end

def expect_one_end(result, *texts):
    assert result.rc not in (0, 70), result
    runs.expect_one_error(result, result.rc, *texts, seconds=60)


# Every rank is told that another is gone, and one says so.
def test_lost_connection_is_said_once(tmp):
    expect_one_end(verify("tiny-tied", ranks=4, env={"CUDASIM_NCCL_ERROR": 5}),
                   "remote process exited", "(rank ")


# The others wait for it without knowing.
def test_failed_transfer_of_one_rank(tmp):
    one = {"CUDASIM_NCCL_ERROR": 5, "CUDASIM_NCCL_ERROR_RANK": 1}
    expect_one_end(verify("tiny-tied", ranks=4, env=one), "unhandled system error", "(rank 1 on ")
    expect_one_end(verify("tiny-tied", ranks=4, env={**one, "CUDASIM_NCCL_ABORT_HANGS": 1}),
                   "unhandled system error", "(rank 1 on ")


def endless_training(tmp, transport):
    runs.start_files(tmp)
    out = tmp / transport
    options = runs.options(tmp, **test_kill.ENDLESS, train__out=out, comm__transport=transport,
                           device__backend="cuda", checkpoint__every=0, checkpoint__at_end="false")
    process = cli.start(*cli.launcher(3), QSHARD, "train", *options, cwd=tmp,
                        env={"CUDASIM_GUARD": 0})
    return process, test_kill.running(process, out, 120, QSHARD, steps=2)


def test_killed_rank_ends_the_job(tmp):
    for transport, victim in (("nccl", 2), ("mpi-cuda", 1)):
        process, ranks = endless_training(tmp, transport)
        os.kill(ranks[victim], signal.SIGKILL)
        result = cli.finish(process, timeout=30)
        assert result.rc != 0, result
        test_kill.expect_gone(ranks)


# Its operations on the GPU, and those of the ranks that wait for it, are under way.
def test_error_on_one_rank_ends_the_job(tmp):
    for transport in ("nccl", "mpi-cuda"):
        process, ranks = endless_training(tmp, transport)
        resource.prlimit(ranks[0], resource.RLIMIT_FSIZE, (1, 1))
        result = cli.finish(process, timeout=60)
        runs.expect_one_error(result, 1, "(rank 0 on ", "disk full", seconds=60)
        test_kill.expect_gone(ranks)


if __name__ == "__main__":
    cli.main()
