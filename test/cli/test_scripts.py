"""scripts/mpirun.sh and scripts/install_deps.sh on machines that lack something; scripts/two_hosts.py."""
import os
import subprocess

import cli

INSTALL = cli.ROOT / "scripts" / "install_deps.sh"


def path_without(tmp, *programs):
    """A PATH with everything but some programs."""
    folder = tmp / "bin"
    folder.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for entry in os.scandir(directory) if os.path.isdir(directory) else []:
            link = folder / entry.name
            if entry.name not in programs and not link.is_symlink():
                link.symlink_to(entry.path)
    return str(folder)


def test_nothing_is_missing_and_it_is_quick(tmp):
    result = cli.run(INSTALL)
    cli.expect(result)
    assert not result.out and result.seconds < 5, result


def test_missing_program_is_named(tmp):
    for program in ("mpirun", "mpicxx", "pkg-config"):
        folder = tmp / program
        folder.mkdir()
        result = cli.run(INSTALL, "--check", env={"PATH": path_without(folder, program)})
        cli.expect(result, rc=1, out=f"Missing: {program}")


def test_missing_header_is_named(tmp):
    # A compiler that sees nothing but what is given to it.
    compiler = tmp / "mpicxx"
    compiler.write_text('#!/bin/bash\nexec mpicxx -nostdinc "$@"\n')
    compiler.chmod(0o755)
    result = cli.run(INSTALL, "--check", env={"MPICXX": compiler})
    cli.expect(result, rc=1, out="fmt/format.h")


def test_missing_library_is_named(tmp):
    compiler = tmp / "mpicxx"
    compiler.write_text('#!/bin/bash\nif [[ " $* " == *" -lfmt "* ]]; then\n'
                        'echo "ld: cannot find -lfmt: No such file" >&2; exit 1\nfi\n'
                        'exec mpicxx "$@"\n')
    compiler.chmod(0o755)
    result = cli.run(INSTALL, "--check", env={"MPICXX": compiler})
    cli.expect(result, rc=1, out="Missing: libfmt\n")


def can_make_hosts():
    """Network namespaces are root's, and not every container lets its root make them."""
    tools = subprocess.run(["sh", "-c", "command -v ip tc taskset && unshare --net --mount --uts true"],
                           capture_output=True)
    return os.geteuid() == 0 and tools.returncode == 0


def test_two_hosts(tmp):
    """mpirun starts ranks on both, under their own names; exit codes pass; nothing is left behind."""
    two_hosts = cli.ROOT / "scripts" / "two_hosts.py"
    if not can_make_hosts():
        print("    no rights or tools for network namespaces: not run")
        return
    env = {"TMPDIR": tmp}
    mpirun = [cli.ROOT / "scripts" / "mpirun.sh", "-n", 2]
    result = cli.run(two_hosts, "--rate", "1gbit", *mpirun, "hostname", env=env)
    cli.expect(result)
    assert sorted(result.out.split()) == ["host1", "host2"], result
    cli.expect(cli.run(two_hosts, "sh", "-c", "exit 7", env=env), rc=7)
    cli.expect(cli.run(two_hosts, "--rate", "fast", "true", env=env), rc=1, err="fast")
    cli.expect(cli.run(two_hosts, env=env), rc=2, err="name a command")
    assert not list(tmp.glob("two-hosts-*")), list(tmp.iterdir())


def test_serial_hdf5_is_refused(tmp):
    (tmp / "hdf5.h").touch()
    (tmp / "H5pubconf.h").write_text("/* without H5_HAVE_PARALLEL */\n")
    env = {"HDF5_CFLAGS": f"-I{tmp}", "HDF5_LIBS": "-lm"}
    cli.expect(cli.run(INSTALL, "--check", env=env), rc=1, out="parallel HDF5")
    result = cli.run("make", "-n", f"BUILD={tmp}/build", env={**env, "MAKEFLAGS": None})
    cli.expect(result, rc=2, err="serial")


def test_nothing_is_installed_in_a_job(tmp):
    env = {"SLURM_JOB_ID": "7", "PATH": path_without(tmp, "mpirun")}
    cli.expect(cli.run(INSTALL, env=env), rc=1, out="Missing: mpirun", err="Slurm job 7")


def test_slurm_is_wanted_only_when_asked_for(tmp):
    env = {"PATH": path_without(tmp, "sbatch")}
    cli.expect(cli.run(INSTALL, "--check", env=env), out="Nothing is missing.")
    result = cli.run(INSTALL, "cluster", "--check", env=env)
    cli.expect(result, rc=1, out="sbatch")
    assert "slurm-client" in result.out, result


def test_unknown_option(tmp):
    cli.expect(cli.run(INSTALL, "--chek"), rc=2, err="--chek")


def test_mpirun_passes_arguments_and_keeps_settings(tmp):
    launcher = tmp / "launcher"
    launcher.write_text('#!/bin/bash\nprintf "<%s>" "$@"\nenv | grep ^OMPI_MCA_ | sort\n')
    launcher.chmod(0o755)
    env = {k: None for k in os.environ if k.startswith("OMPI_MCA_")} | {"MPIRUN": launcher}
    result = cli.run(cli.MPIRUN, "-n", 1000, "a program", "--b=c d", "", env=env)
    cli.expect(result, out="<-n><1000><a program><--b=c d><>")
    cli.expect(result, out="OMPI_MCA_rmaps_base_oversubscribe=1\n")
    cli.expect(result, out="OMPI_MCA_mpi_yield_when_idle=1\n")
    assert not result.err, result
    env["OMPI_MCA_rmaps_base_oversubscribe"] = "0"
    result = cli.run(cli.MPIRUN, "-n", 1, "p", env=env)
    cli.expect(result, out="OMPI_MCA_rmaps_base_oversubscribe=0\n")
    assert "yield_when_idle" not in result.out, result


def test_mpirun_passes_the_exit_code(tmp):
    cli.expect(cli.run(cli.MPIRUN, "-n", 3, "true"))
    assert cli.run(cli.MPIRUN, "-n", 3, "false").rc == 1


if __name__ == "__main__":
    cli.main()
