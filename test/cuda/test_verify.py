"""`qshard verify` on GPUs that the simulator plays (test/cudasim): operators, NCCL transport and
step against the reference cases, and how errors end."""
from simulated import cli, expect_ok, verify
import runs


def test_f32(tmp):
    expect_ok(verify("tiny-tied", ranks=4))
    expect_ok(verify("empty-shards", ranks=8))


def test_bf16(tmp):
    expect_ok(verify("tiny-tied", "--param-dtype", "bf16", ranks=4))
    # Without reshard, without prefetch, gradients summed and moved as bf16.
    expect_ok(verify("tiny-tied", "--param-dtype", "bf16", "--reduce-dtype", "bf16", "--prefetch",
                     "0", "--reshard-after-forward", "false", "--transport", "nccl", ranks=4))


def test_fp16(tmp):
    for case, ranks in (("tiny-tied", 4), ("wide-head-untied", 3), ("empty-shards", 8)):
        for transport in ("nccl", "mpi-cuda"):
            expect_ok(verify(case, "--param-dtype", "fp16", "--transport", transport, ranks=ranks))


# A known miss: the loss is 6.7e-4 from the truth, the limit is 5.2e-4 (the CPU has 5.05e-4). This
# goes red when the miss is mended: then expect_ok belongs here.
def test_bf16_with_empty_shards_misses_the_limit_of_the_loss(tmp):
    result = verify("empty-shards", "--param-dtype", "bf16", ranks=8)
    cli.expect(result, rc=1, out="\nverify: FAILED loss\n")


def test_accumulation_and_prefetch(tmp):
    expect_ok(verify("wide-head-untied", "--reduce-every-microbatch", "false", "--prefetch", "2",
                     ranks=3))


def test_activation_checkpointing(tmp):
    for mode in "selective", "full":
        expect_ok(verify("tiny-tied", "--param-dtype", "bf16", "--activation-checkpoint", mode,
                         ranks=4))


def test_replicas_and_groups(tmp):
    for transport in ("nccl", "mpi-cuda"):
        expect_ok(verify("tiny-tied", "--transport", transport, "--mesh", "2x2", ranks=4))
        expect_ok(verify("tiny-tied", "--transport", transport, "--reshard-ranks", "2", ranks=4))
        expect_ok(verify("empty-shards", "--transport", transport, "--mesh", "2x4",
                         "--reshard-ranks", "2", "--reshard-after-backward", "false", ranks=8))
        expect_ok(verify("wide-head-untied", "--transport", transport, "--mesh", "3x1",
                         "--param-dtype", "bf16", "--reduce-dtype", "bf16", ranks=3))
    # Four communicators of an NCCL that does not order launches, each operation on the whole GPU.
    expect_ok(verify("tiny-tied", "--mesh", "2x2", ranks=4,
                     env={"CUDASIM_NCCL_VERSION": 22203, "CUDASIM_NCCL_EXCLUSIVE": 1}))
    expect_ok(verify("tiny-tied", "--mesh", "2x2", "--nccl-buffers", "windows", ranks=4))


def test_refusals(tmp):
    result = verify("tiny-tied", "--transport", "shm", ranks=4)
    runs.expect_one_error(result, 2, "transport shm", "nccl")
    result = verify("tiny-tied", ranks=4, env={"CUDASIM_DEVICES": 1})
    runs.expect_one_error(result, 1, "ranks 0 and 1 both use GPU", "--gpus-per-task=1")
    result = verify("tiny-tied", ranks=4, env={"CUDASIM_DEVICES": 2})
    cli.expect(result, rc=1, err="--gpus-per-node=4")
    result = verify("tiny-tied", ranks=4, env={"CUDASIM_DEVICES": 0})
    cli.expect(result, rc=1, err="sees no GPU")


if __name__ == "__main__":
    cli.main()
