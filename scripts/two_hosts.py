#!/usr/bin/env python3
"""Two hosts of one machine: scripts/two_hosts.py [--rate RATE] [--slots N] COMMAND …

Runs COMMAND on the first of two hosts that this makes of one Linux machine: network, host name,
shared memory and half of the CPUs, a cable between them that carries --rate in each direction, and an
mpirun that starts N ranks on each, the first host first. To see what crosses the network, and what hides it:

  sudo scripts/two_hosts.py --rate 1gbit scripts/scaling.py run study --ranks 2 --transport mpi \\
      --prefetch 0 1 2 --trace -- --model.config M.json --data.train T.h5

Needs root, iproute2 and util-linux. All of it is gone when COMMAND ends.
"""
import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

INSIDE = "QSHARD_TWO_HOSTS"  # set for the copy of this script that is the first host
ADDRESSES = {"host1": "10.213.0.1", "host2": "10.213.0.2"}
NAMESPACES = ["unshare", "--mount", "--net", "--uts", "--ipc"]


def refuse(text):
    sys.exit(f"two_hosts.py: {text}")


def call(*command):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if result.returncode:
        refuse(f"{' '.join(str(c) for c in command)}: {result.stderr.strip()}")


def settle(name, hosts):
    """Commands that make the namespaces they run in a host."""
    return (f"mount --bind {hosts} /etc/hosts && mount -t tmpfs none /dev/shm && hostname {name} && "
            "ip link set lo up")


def connect(other, rate):
    """A cable from the host that this runs on to that of the process `other`."""
    call("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
    for (_, address), there in zip(ADDRESSES.items(), ([], ["nsenter", "-t", other, "-n", "--"])):
        call(*there, "ip", "address", "add", f"{address}/24", "dev", "cable")
        call(*there, "ip", "link", "set", "cable", "up")
        if rate:
            call(*there, "tc", "qdisc", "add", "dev", "cable", "root", "tbf", "rate", rate, "burst",
                 "256k", "latency", "50ms")


def halves(cpus):
    """Of the CPUs, for each host; all for both where there is but one."""
    middle = len(cpus) // 2
    return (cpus[:middle], cpus[middle:]) if middle else (cpus, cpus)


def first_host(args, folder):
    """Runs in namespaces of its own."""
    own_cpus, other_cpus = halves(sorted(os.sched_getaffinity(0)))
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
        f"{address} {name}\n" for name, address in ADDRESSES.items()))
    call("sh", "-c", settle("host1", folder / "hosts"))
    other = subprocess.Popen([*NAMESPACES, "--kill-child", "--fork", "sh", "-c",
                              settle("host2", folder / "hosts") + " && echo $$ && exec sleep infinity"],
                             stdout=subprocess.PIPE, text=True)
    try:
        pid = other.stdout.readline().strip()
        if not pid:
            refuse("no namespaces for the second host")
        connect(pid, args.rate)
        agent = folder / "agent"  # what mpirun starts its daemon on the other host with
        agent.write_text(f'#!/bin/sh\nshift\nexec nsenter -t {pid} -m -n -u -i -- '
                         f'taskset -c {",".join(map(str, other_cpus))} sh -c "cd \'$PWD\' && $*"\n')
        os.sched_setaffinity(0, own_cpus)
        agent.chmod(0o755)
        (folder / "hostfile").write_text("".join(f"{name} slots={args.slots}\n" for name in ADDRESSES))
        settings = {"plm_rsh_agent": agent, "orte_default_hostfile": folder / "hostfile",
                    "btl_tcp_if_include": "cable", "oob_tcp_if_include": "cable"}
        return subprocess.run(args.command, env={
            **{k: v for k, v in os.environ.items() if k != INSIDE},
            **{f"OMPI_MCA_{k}": str(v) for k, v in settings.items()}}).returncode
    finally:
        other.kill()
        other.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="as tc takes it: 1gbit; default: no limit")
    parser.add_argument("--slots", type=int, default=1, help="ranks on each host; default 1")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("name a command")
    if os.environ.get(INSIDE):
        sys.exit(first_host(args, Path(os.environ[INSIDE])))
    missing = [tool for tool in ("unshare", "nsenter", "taskset", "ip", "tc") if not shutil.which(tool)]
    if missing:
        refuse(f"not found: {', '.join(missing)} (packages util-linux and iproute2)")
    if os.geteuid():
        refuse("needs root, for network namespaces")
    folder = tempfile.mkdtemp(prefix="two-hosts-")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        host = subprocess.Popen([*NAMESPACES, "--kill-child", "--fork", sys.executable, *sys.argv],
                                env={**os.environ, INSIDE: folder})
        try:
            code = host.wait()
        finally:
            host.kill()
        sys.exit(code)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
