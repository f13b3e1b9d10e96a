"""test/run.py itself, on planted programs: whatever goes wrong in one must be counted."""
import sys

import cli

PROGRAMS = {
    "good": "echo 'tests: 3 passed, 0 failed'",
    "failing": "echo 'found the culprit'; echo 'tests: 1 passed, 2 failed'; exit 1",
    "crashing": "echo 'tests: 1 passed, 0 failed'; kill -SEGV $$",
    "silent": "exit 0",
    "empty": "echo 'tests: 0 passed, 0 failed'",
    "skipping": "echo 'tests: 0 passed, 0 failed, 2 skipped'",
    "lying": "echo 'tests: 1 passed, 1 failed'",
    "hanging": "sleep 60",
    "unable": "echo 'not run: no such machine'; exit 77",
}


def run(tmp, names, *options, missing=()):
    for name in [*names, *missing]:
        source = tmp / "tests" / "unit" / f"{name}_test.cpp"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.touch()
    for name in names:
        program = tmp / "build" / "test" / "unit" / f"{name}_test"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/bash\n{PROGRAMS[name]}\n")
        program.chmod(0o755)
    return cli.run(sys.executable, cli.ROOT / "test" / "run.py",
                   "--tests", tmp / "tests", "--build", tmp / "build", *options)


def last_line(result):
    return result.out.splitlines()[-1]


def test_good_program(tmp):
    result = run(tmp, ["good"])
    cli.expect(result, out="unit/good_test")
    assert last_line(result) == "3 passed, 0 failed", result


def test_skipped_tests_are_shown(tmp):
    result = run(tmp, ["skipping"])
    cli.expect(result, out="2 skipped")
    assert last_line(result) == "0 passed, 0 failed", result


def test_program_that_cannot_run_here_is_neither_passed_nor_failed(tmp):
    result = run(tmp, ["unable"])
    cli.expect(result, rc=77, out="not run: no such machine")
    assert last_line(result) == "0 passed, 0 failed", result
    result = run(tmp, ["unable", "good"])
    cli.expect(result, out="not run: no such machine")
    assert last_line(result) == "3 passed, 0 failed", result


def test_each_kind_of_failure_counts(tmp):
    bad = {"failing": 2, "crashing": 1, "silent": 1, "empty": 1, "lying": 1}
    result = run(tmp, list(bad))
    cli.expect(result, rc=1)
    for name, count in bad.items():
        line = next(x for x in result.out.splitlines() if x.startswith(f"FAILED unit/{name}_test"))
        assert f" {count} failed" in line, result
    assert last_line(result) == "3 passed, 6 failed", result


def test_output_of_failures_only(tmp):
    result = run(tmp, ["good", "failing"])
    cli.expect(result, rc=1, out="found the culprit")
    assert "3 passed, 0 failed\n" not in result.out, result
    assert last_line(result) == "4 passed, 2 failed", result


def test_missing_program(tmp):
    result = run(tmp, [], missing=["absent"])
    cli.expect(result, rc=1, out="absent")
    assert last_line(result) == "0 passed, 1 failed", result


def test_timeout(tmp):
    result = run(tmp, ["hanging"], "--timeout", "1")
    cli.expect(result, rc=1, out="still running after 1 s")
    assert result.seconds < 20, result


def test_cli_functions_are_reported(tmp):
    file = tmp / "tests" / "cli" / "test_planted.py"
    file.parent.mkdir(parents=True)
    folder = str(cli.ROOT / "test" / "cli")
    file.write_text(f"import sys\nsys.path.insert(0, {folder!r})\nimport cli\n"
                    "def test_right(tmp): assert tmp.is_dir()\n"
                    "def test_wrong(tmp): assert 1 == 2\n"
                    "cli.main()\n")
    result = run(tmp, [])
    cli.expect(result, rc=1, out="ok test_right")
    assert "FAILED test_wrong" in result.out and last_line(result) == "1 passed, 1 failed", result
    result = run(tmp, [], "-k", "right")
    cli.expect(result)
    assert last_line(result) == "1 passed, 0 failed", result


def test_nothing_selected(tmp):
    cli.expect(run(tmp, ["good"], "-k", "nothing"), rc=2, err="nothing")


if __name__ == "__main__":
    cli.main()
