"""A short run of libFuzzer on the readers of files, where clang has its runtime."""
import os
import shutil

import cli

SECONDS = 30


def has_libfuzzer(tmp):
    source = tmp / "probe.cpp"
    source.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) '
                      "{ return 0; }\n")
    return bool(shutil.which("clang++")) and cli.run(
        "clang++", "-fsanitize=fuzzer", source, "-o", tmp / "probe").rc == 0


def test_fuzz(tmp):
    if not has_libfuzzer(tmp):
        print("  skipped: no clang++ with libFuzzer (Debian: clang, libclang-rt-14-dev)")
        return
    result = cli.run("make", "-j2", "fuzz", f"SECONDS={SECONDS}", f"BUILD={cli.BUILD}",
                     timeout=280, env={"MAKEFLAGS": None, "MAKELEVEL": None, **os.environ})
    cli.expect(result)
    assert result.out.count("inputs ") == 5, result


if __name__ == "__main__":
    cli.main()
