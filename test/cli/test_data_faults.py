"""Token files that a run cannot use: found before or while training, by whichever rank."""
import cli
import runs


def refused(tmp, *texts, ranks=4, rc=1, **values):
    return runs.expect_one_error(runs.train(tmp, ranks, **values), rc, *texts)


def test_fewer_samples_than_a_step(tmp):
    runs.start_files(tmp, count=3 * 8 + 1)
    refused(tmp, "train.bin", "3 samples", "12", rc=2)


def test_validation_shorter_than_a_sample(tmp):
    runs.start_files(tmp)
    runs.tokens(tmp / "val.bin", 8)
    refused(tmp, "val.bin", "8 tokens", "9", rc=2, data__val=tmp / "val.bin")


def test_empty_and_missing_files(tmp):
    runs.start_files(tmp)
    (tmp / "empty.bin").write_bytes(b"")
    refused(tmp, "empty.bin", data__train=tmp / "empty.bin")
    refused(tmp, "absent.bin", "No such file", data__train=tmp / "absent.bin")


def test_raw_file_is_not_guessed(tmp):
    runs.start_files(tmp)
    refused(tmp, "train.bin", "raw-u32", data__format="auto")


def test_vocabulary_of_the_file_is_larger_than_the_models(tmp):
    runs.model(tmp)
    runs.tokens(tmp / "ids.bin", 3000)
    cli.expect(cli.qshard("data", "import", "--from", tmp / "ids.bin", "--format", "raw-u32",
                          "--vocab-size", 62, "--out", tmp / "train.h5"))
    refused(tmp, "train.h5", "62", "61", data__train=tmp / "train.h5", data__format="auto")
    runs.model(tmp, vocab_size=62)
    cli.expect(runs.train(tmp, 2, data__train=tmp / "train.h5", data__format="auto"))


def test_token_outside_the_vocabulary(tmp):
    """Sample 50 of 13 · 12 in file order is read in step 5 as sequence 2, by rank 0 of 4."""
    for bad in (61, 2**32 - 1):
        runs.model(tmp)
        runs.tokens(tmp / "train.bin", 13 * 12 * 8 + 1, bad={50 * 8 + 3: bad})
        out = tmp / f"out{bad}"
        refused(tmp, "rank 0 on ", "train.bin", str(bad), "403", str(403 * 4), "61",
                data__shuffle="false", train__steps=13, train__out=out)
        # The steps before it were made, and their metrics are there.
        assert [line["step"] for line in runs.metrics(out)[0]] == [1, 2, 3, 4]


def test_label_outside_the_vocabulary_on_one_rank(tmp):
    """Of the last sequence of step 3 only the last label is bad; its rank is 3 of 4."""
    runs.model(tmp)
    runs.tokens(tmp / "train.bin", 3 * 12 * 8 + 1, bad={3 * 12 * 8: 99})
    error = refused(tmp, "rank 3 on ", "train.bin", "99", str(3 * 12 * 8), data__shuffle="false",
                    train__steps=3)
    assert "ranks failed" not in error, error
    assert [line["step"] for line in runs.metrics(tmp / "out")[0]] == [1, 2]


def test_token_outside_the_vocabulary_in_the_evaluation(tmp):
    runs.start_files(tmp)
    runs.tokens(tmp / "val.bin", 500, bad={20: 61})
    refused(tmp, "val.bin", "61", "20", data__val=tmp / "val.bin", train__eval_every=2)


if __name__ == "__main__":
    cli.main()
