"""A short run of libFuzzer on the readers of files, where clang has its runtime."""
import cli

SECONDS = 30


def make(*goals, timeout):
    return cli.run("make", "-j2", *goals, f"BUILD={cli.BUILD}", timeout=timeout,
                   env={"MAKEFLAGS": None, "MAKELEVEL": None})


def test_fuzz(tmp):
    if not make("-s", "print-HAS_LIBFUZZER", timeout=60).out.strip():
        print("  skipped: no clang++ with libFuzzer (Debian: clang, libclang-rt-14-dev)")
        return
    # `make test` has built them before: that may take longer than a test is allowed to.
    cli.expect(make("fuzz-programs", timeout=1800))
    result = make("fuzz", f"SECONDS={SECONDS}", timeout=280)
    cli.expect(result)
    assert result.out.count("inputs ") == 5, result


if __name__ == "__main__":
    cli.main()
