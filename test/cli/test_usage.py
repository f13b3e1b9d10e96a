"""Help and usage errors, which no launcher is needed for."""
import cli


def test_help_without_mpirun(tmp):
    result = cli.qshard("--help", cwd=tmp)
    cli.expect(result, out="train")
    assert not result.err, result


def test_unknown_subcommand_is_one_line(tmp):
    result = cli.qshard("trian", cwd=tmp)
    cli.expect(result, rc=2, err="trian")
    assert len(result.err.strip().splitlines()) == 1 and not result.out, result


if __name__ == "__main__":
    cli.main()
