"""What is refused at the start: one message with the numbers and the fix, and the job is gone."""
import os
import shutil

import cli
import runs


def refused(tmp, *texts, rc=2, ranks=4, extra=(), **values):
    result = runs.train(tmp, ranks, extra=extra, **values)
    return runs.expect_one_error(result, rc, *texts)


def test_unknown_option_names_the_nearest(tmp):
    runs.start_files(tmp)
    refused(tmp, "--optim.lrr", "optim.lr", extra=["--optim.lrr", "1"])


def test_wrong_type(tmp):
    runs.start_files(tmp)
    refused(tmp, "train.steps", "ten", train__steps="ten")


def test_out_of_range(tmp):
    runs.start_files(tmp)
    refused(tmp, "train.seq", "0", train__seq=0)


def test_missing_config(tmp):
    refused(tmp, "absent.json", "No such file", rc=1, extra=["--config", tmp / "absent.json"])


def test_config_with_broken_json(tmp):
    (tmp / "run.json").write_text('{\n  "train": {"steps": 5,,}\n}\n')
    refused(tmp, "run.json", "line 2", "column", extra=["--config", tmp / "run.json"])


def test_config_with_unknown_key(tmp):
    (tmp / "run.json").write_text('{"train": {"stepps": 5}}')
    refused(tmp, "run.json", "train.stepps", "train.steps", extra=["--config", tmp / "run.json"])


def test_missing_model_config(tmp):
    runs.tokens(tmp / "train.bin", 3000)
    refused(tmp, "model.json", "No such file", rc=1)


def test_model_that_is_not_qwen3(tmp):
    runs.start_files(tmp)
    runs.model(tmp, model_type="llama")
    refused(tmp, "model_type", "llama", "qwen3")


def test_no_data_given(tmp):
    runs.start_files(tmp)
    refused(tmp, "data.train", data__train=None)


def test_batch_that_does_not_divide(tmp):
    runs.start_files(tmp)
    refused(tmp, "global_batch 6", "4 ranks", "4 and 8", train__global_batch=6)
    refused(tmp, "12", "micro_batch 2", "8 and 16", train__micro_batch=2)


def test_existing_outputs_are_kept(tmp):
    runs.start_files(tmp)
    cli.expect(runs.train(tmp, 1, train__steps=1))
    before = (tmp / "out" / "metrics.jsonl").read_bytes()
    refused(tmp, str(tmp / "out"), "train.overwrite", rc=1)
    assert (tmp / "out" / "metrics.jsonl").read_bytes() == before
    cli.expect(runs.train(tmp, 4, train__overwrite="true"))
    assert (tmp / "out" / "metrics.jsonl").read_bytes() != before


def test_model_of_another_program_is_not_overwritten(tmp):
    runs.start_files(tmp)
    (tmp / "out").mkdir()
    (tmp / "out" / "model.safetensors").write_bytes(b"precious")
    refused(tmp, "out/model.safetensors", "train.overwrite", rc=1)
    assert os.listdir(tmp / "out") == ["model.safetensors"]


def test_output_folder_that_cannot_be_made(tmp):
    runs.start_files(tmp)
    refused(tmp, "train.bin/out", "Not a directory", rc=1, train__out=tmp / "train.bin" / "out")


def test_file_missing_on_one_rank_only(tmp):
    """The last rank starts in a folder without the files, as on a node without the file system."""
    runs.start_files(tmp)
    (tmp / "empty").mkdir()
    relative = runs.options(tmp, model__config="model.json", data__train="train.bin")
    shutil.copy(tmp / "model.json", tmp / "empty")
    result = cli.run(*cli.odd_launcher(4, "cd empty"), cli.QSHARD, "train", *relative, cwd=tmp)
    runs.expect_one_error(result, 1, "rank 3 on ", "train.bin", "No such file")


def test_other_file_on_one_rank(tmp):
    runs.start_files(tmp)
    (tmp / "other").mkdir()
    relative = runs.options(tmp, model__config="model.json", data__train="train.bin")

    def start():
        return cli.run(*cli.odd_launcher(3, "cd other"), cli.QSHARD, "train", *relative, cwd=tmp)

    shutil.copy(tmp / "model.json", tmp / "other")
    runs.tokens(tmp / "other" / "train.bin", 2000)
    runs.expect_one_error(start(), 1, "rank 2 on ", "data.train", "2000 tokens", "3000 tokens")
    shutil.copy(tmp / "train.bin", tmp / "other")
    runs.model(tmp / "other", hidden_size=32)
    runs.expect_one_error(start(), 1, "rank 2 on ", "model", "24", "32")


def test_other_command_on_one_rank(tmp):
    runs.start_files(tmp)
    command = [cli.QSHARD, "train", *runs.options(tmp, train__steps=None), "--train.steps"]
    result = cli.run(*cli.odd_launcher(3, 'set -- "${@:1:$#-1}" 6'), *command, 5, cwd=tmp)
    runs.expect_one_error(result, 2, "rank 2 on ", "--train.steps 6", "--train.steps 5")


def test_singletons_of_a_broken_srun(tmp):
    runs.start_files(tmp)
    slurm = {"SLURM_JOB_ID": 1, "SLURM_PROCID": 2, "SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 4}
    result = runs.train(tmp, 0, env=slurm)
    runs.expect_one_error(result, 2, "4 tasks", "srun --mpi=list")
    cli.expect(runs.train(tmp, 0, env={**slurm, "QSHARD_ALLOW_SINGLETON": 1}, train__steps=1))


def test_usage_errors_of_verify(tmp):
    for arguments, text in ((["--param-dtype", "fp8"], "fp8"), (["--transport", "tcp"], "tcp"),
                            (["--prefetch", "-1"], "prefetch")):
        result = cli.qshard("verify", "--reference", tmp, *arguments, ranks=2)
        runs.expect_one_error(result, 2, text)
    runs.expect_one_error(cli.qshard("verify", ranks=2), 2, "--reference")


if __name__ == "__main__":
    cli.main()
