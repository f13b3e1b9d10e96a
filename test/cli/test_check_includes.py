"""scripts/check_includes.py: this tree is clean, and each rule finds a planted breach."""
import sys

import cli

HEADERS = ["base/check", "tensor/tensor", "device/ops", "comm/world", "cpu/backend_cpu",
           "fsdp/unit", "model/qwen3_model", "io/checkpoint", "train/trainer", "cli/cli"]


def check(root):
    return cli.run(sys.executable, cli.ROOT / "scripts" / "check_includes.py", root)


def plant(tmp, path, text):
    """A tree with one header a folder and the text at `path`."""
    files = {f"include/{h}.h": "#pragma once\n" for h in HEADERS}
    files[path] = text
    for name, content in files.items():
        file = tmp / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def expect_breach(tmp, path, text, line, *words):
    plant(tmp, path, text)
    result = check(tmp)
    cli.expect(result, rc=1, out=f"{path}:{line}: ")
    assert len(result.out.splitlines()) == 1 and "; fix: " in result.out, result
    for word in words:
        assert word in result.out, result
    (tmp / path).unlink()


def test_this_tree(tmp):
    result = check(cli.ROOT)
    assert result.rc == 0 and not result.out, result


def test_empty_tree_is_no_success(tmp):
    cli.expect(check(tmp), rc=1, out="no source")


def test_what_is_allowed(tmp):
    plant(tmp, "src/comm/world.cpp",
          '#include <mpi.h>\n#include "device/ops.h"\n#include "base/check.h"\n'
          'auto* a = getenv("A");  int b = MPI_Init(nullptr, nullptr);\n')
    cli.expect(check(tmp))
    plant(tmp, "src/io/checkpoint.cpp",
          '#include "fsdp/unit.h"\n#include "tensor/tensor.h"\n#include <cstdio>\n'
          '// #include "train/trainer.h" and printf("x") in a comment; getenv too\n'
          '/* MPI_Init();\n std::cout */ auto* text = "printf(1) MPI_Init( std::cout getenv";\n'
          'int a = snprintf(b, 1, "x"); int c = fprintf(file, "x");\n')
    cli.expect(check(tmp))
    plant(tmp, "src/main.cpp",
          '#include "cli/cli.h"\n#include "cpu/backend_cpu.h"\nint a = puts("x");\n'
          "int c = 1'000'000, d = '\"';\n")
    cli.expect(check(tmp))


def test_includes_that_point_right(tmp):
    order = [["base"], ["tensor"], ["device"], ["comm"], ["fsdp"], ["model", "io"], ["train"],
             ["cli"]]
    header = {h.split("/")[0]: h for h in HEADERS}
    planted = []
    for i, left in enumerate(order):
        for a, b in ((a, b) for right in order[i + 1:] for a in left for b in right):
            planted.append(f"src/{a}/to_{b}.cpp:2: {a} may not include {header[b]}.h")
            plant(tmp, f"src/{a}/to_{b}.cpp", f'\n#include "{header[b]}.h"\n')
    result = check(tmp)
    assert result.rc == 1 and len(result.out.splitlines()) == len(planted), result
    for text in planted:
        assert text in result.out, f"{text} is not in\n{result}"


def test_folders_side_by_side(tmp):
    expect_breach(tmp, "src/io/planted.cpp", '#include "model/qwen3_model.h"\n', 1, "io may not")
    expect_breach(tmp, "src/model/planted.cpp", '#include "io/checkpoint.h"\n', 1, "model may not")
    expect_breach(tmp, "src/fsdp/planted.cpp", '#include "cpu/backend_cpu.h"\n', 1, "fsdp may not")
    expect_breach(tmp, "src/cpu/planted.cpp", '#include "comm/world.h"\n', 1, "cpu may not")
    expect_breach(tmp, "src/base/planted.cpp", '#include <train/trainer.h>\n', 1, "base may not")


def test_paths_and_folders(tmp):
    expect_breach(tmp, "src/io/planted.cpp", '#include "../train/trainer.h"\n', 1, "folder/file.h")
    expect_breach(tmp, "include/io/planted.h", '#include "checkpoint.h"\n', 1, "folder/file.h")
    expect_breach(tmp, "src/misc/planted.cpp", "int a;\n", 1, "folder misc")


def test_places(tmp):
    planted = {
        "#include <dnnl.hpp>": "gemm_onednn",
        "#include <oneapi/dnnl/dnnl.hpp>": "gemm_onednn",
        "#  include <hdf5.h>": "hdf5_file",
        '#include "H5Cpp.h"': "hdf5_file",
        "#include <mpi.h>": "comm",
        "#include <cuda_runtime.h>": "cuda",
        "#include <nccl.h>": "cuda",
        "int a = MPI_Barrier(comm);": "comm",
        'auto* a = std::getenv("HOME");': "base/config",
        'void f() { printf("x"); }': "train/metrics",
        'void f() { fprintf(stderr, "x"); }': "train/metrics",
        'void f() { std::cout << 1; }': "train/metrics",
        'void f() { fmt::print("x"); }': "train/metrics",
        'void f() { puts("x"); }': "train/metrics",
    }
    for text, word in planted.items():
        expect_breach(tmp, "src/train/planted.cpp", f"\n/* a\n b */ int x;\n{text}\n", 4, word)
    expect_breach(tmp, "src/cpu/ops_cpu.cpp", "#include <dnnl.hpp>\n", 1, "gemm_onednn")


if __name__ == "__main__":
    cli.main()
