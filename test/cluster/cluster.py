"""A Slurm cluster of two nodes on one machine, for the tests of slurm/.

Each node has its own network, host name, mounts and /dev/shm, and a cable (a veth pair) to the
other: MPI sees two hosts and talks TCP between them. n1 runs the controller as well. All of it lives
in one PID and one mount namespace, its files in a tmpfs there: when the test ends, whatever the
reason, the kernel removes everything.

    sys.exit(cluster.inside(main))      # main runs there, with cluster.FOLDER; exit code 77: not run
    with cluster.Cluster() as slurm: …  # starts the daemons
"""
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NOT_RUN = 77
PROGRAMS = ["munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "unshare", "nsenter", "ip"]
SBIN = ":/usr/local/sbin:/usr/sbin:/sbin"
INSIDE = "QSHARD_TEST_CLUSTER"  # set in the namespaces: the folder of everything
FOLDER = Path(os.environ.get(INSIDE, "/nonexistent"))
ADDRESSES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
KILL_WAIT = 10  # seconds between TERM and KILL; Slurm's default is 30
CPUS = 8  # a node's, as Slurm counts them: what jobs ask for, not what the machine has


class NotRun(Exception):
    """Why nothing can be tested on this machine."""


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def what_is_missing():
    path = os.environ["PATH"] + SBIN
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if missing:
        return f"{', '.join(missing)} not found: scripts/install_deps.sh cluster"
    if os.geteuid() != 0:
        return "it needs root, for namespaces and Slurm's daemons"
    probe = subprocess.run(["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "true"],
                           capture_output=True, text=True)
    if probe.returncode:
        return f"no namespaces here: {probe.stderr.strip()}"
    return ""


def inside(main):
    """Exit code of main() in new namespaces."""
    if INSIDE in os.environ:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", FOLDER], check=True)
        try:
            return main()
        except NotRun as reason:
            print(f"not run: the tests on a Slurm cluster: {reason}")
            return NOT_RUN
    os.environ["PATH"] += SBIN
    if missing := what_is_missing():
        print(f"not run: the tests on a Slurm cluster: {missing}")
        return NOT_RUN
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = tempfile.mkdtemp(prefix="qshard-cluster-")
    process = None
    try:
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                   sys.executable, *sys.argv]
        process = subprocess.Popen(command, env={**os.environ, INSIDE: folder},
                                   preexec_fn=die_with_parent)
        return process.wait()
    finally:
        if process:
            process.kill()
            process.wait()
        os.rmdir(folder)


class Cluster:
    def __init__(self):
        self.processes = []
        self.nodes = {}  # name → process that holds the node's namespaces
        self.env = {**os.environ, "SLURM_CONF": str(FOLDER / "slurm.conf")}

    def __enter__(self):
        try:
            self.connect_nodes()
            self.write_settings()
            self.start_daemons()
            if "pmix" not in self.on("n1", "sh", "-c", "srun --mpi=list 2>&1"):
                raise NotRun("this Slurm has no plug-in for PMIx (srun --mpi=list)")
        except BaseException as error:
            self.__exit__()
            if isinstance(error, (AssertionError, OSError, subprocess.SubprocessError)):
                raise NotRun(f"no two nodes come up on this machine: {error}") from error
            raise
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.kill()
        for process in self.processes:
            process.wait()

    # --- nodes

    def connect_nodes(self):
        hosts = FOLDER / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" +
                         "".join(f"{address} {name}\n" for name, address in ADDRESSES.items()))
        for name in ADDRESSES:
            script = (f"mount --bind {hosts} /etc/hosts && mount -t tmpfs none /dev/shm && "
                      f"hostname {name} && ip link set lo up && echo ready && exec sleep infinity")
            holder = subprocess.Popen(["unshare", "--mount", "--net", "--uts", "sh", "-c", script],
                                      stdout=subprocess.PIPE, text=True)
            self.processes.append(holder)
            assert holder.stdout.readline() == "ready\n", f"no namespaces for node {name}"
            self.nodes[name] = holder
        self.on("n1", "ip", "link", "add", "cable", "type", "veth",
                "peer", "name", "cable", "netns", self.nodes["n2"].pid)
        for name, address in ADDRESSES.items():
            self.on(name, "ip", "address", "add", f"{address}/24", "dev", "cable")
            self.on(name, "ip", "link", "set", "cable", "up")

    def command_on(self, node, command):
        return ["nsenter", "-t", str(self.nodes[node].pid), "-m", "-n", "-u", "--",
                *(str(c) for c in command)]

    def on(self, node, *command, check=True, env=None, cwd=None, timeout=60):
        """Runs a command on a node; its output."""
        # nsenter leaves the working folder where the namespace has it: go there by a shell.
        shell = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(cwd or os.getcwd())]
        result = subprocess.run(self.command_on(node, [*shell, *command]), text=True, timeout=timeout,
                                env={**self.env, **(env or {})}, stdin=subprocess.DEVNULL,
                                capture_output=True)
        if check and result.returncode:
            raise AssertionError(f"on {node}: {' '.join(map(str, command))}: exit code "
                                 f"{result.returncode}\n{result.stdout}{result.stderr}")
        return result.stdout

    def sent_bytes(self, node):
        """Bytes that have left the node by its cable."""
        for line in self.on(node, "cat", "/proc/self/net/dev").splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "cable":
                return int(counts.split()[8])
        raise AssertionError(f"no cable at {node}")

    # --- daemons

    def write_settings(self):
        for name in ("log", "state", "munge", *(f"spool-{n}" for n in ADDRESSES),
                     *(f"tmp-{n}" for n in ADDRESSES)):
            (FOLDER / name).mkdir()
        key = FOLDER / "munge" / "key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        self.munge_socket = FOLDER / "munge" / "socket"
        nodes = "\n".join(f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={CPUS} "
                          "RealMemory=1000 State=UNKNOWN" for name, address in ADDRESSES.items())
        (FOLDER / "slurm.conf").write_text(f"""ClusterName=test
SlurmctldHost=n1({ADDRESSES['n1']})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is how long a requeued job waits as well.
AuthInfo=socket={self.munge_socket},cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0
JobRequeue=1
KillWait={KILL_WAIT}
SlurmdTimeout=20
SlurmdParameters=config_overrides
MailProg=/bin/true
ReturnToService=2
StateSaveLocation={FOLDER}/state
SlurmdSpoolDir={FOLDER}/spool-%n
TmpFS={FOLDER}/tmp-%n
SlurmctldPidFile={FOLDER}/slurmctld.pid
SlurmdPidFile={FOLDER}/slurmd-%n.pid
SlurmctldLogFile={FOLDER}/log/slurmctld
SlurmdLogFile={FOLDER}/log/%n
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4
""")

    def daemon(self, node, *command):
        process = subprocess.Popen(self.command_on(node, command), env=self.env,
                                   stdin=subprocess.DEVNULL,
                                   stdout=open(FOLDER / "log" / f"{command[0]}-{node}.out", "ab"),
                                   stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def start_slurmd(self, node):
        return self.daemon(node, "slurmd", "-D", "-N", node)

    def ranks(self, node, program):
        """Process ids of a program on a node."""
        place = os.readlink(f"/proc/{self.nodes[node].pid}/ns/uts")
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if (os.readlink(f"/proc/{entry}/exe") == str(program) and
                        os.readlink(f"/proc/{entry}/ns/uts") == place):
                    found.append(int(entry))
            except OSError:
                continue
        return sorted(found)

    def lose(self, node):
        """Everything that runs on a node dies, and an administrator says so."""
        place = os.readlink(f"/proc/{self.nodes[node].pid}/ns/uts")
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if (os.readlink(f"/proc/{entry}/ns/uts") == place and
                        int(entry) != self.nodes[node].pid):
                    os.kill(int(entry), signal.SIGKILL)
            except OSError:
                continue
        self.slurmd[node].wait()
        self.on("n1", "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def bring_back(self, node):
        self.slurmd[node] = self.start_slurmd(node)
        # Once its daemon has registered, Slurm may call it idle by itself, and then refuses RESUME.
        self.on("n1", "scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        self.wait_for(lambda: self.states()[node] == "idle", f"node {node} to come back")

    def start_daemons(self):
        munge = FOLDER / "munge"
        subprocess.run(["munged", "--force", f"--socket={self.munge_socket}",
                        f"--key-file={munge}/key", f"--pid-file={munge}/pid",
                        f"--log-file={munge}/log", f"--seed-file={munge}/seed"], check=True)
        self.daemon("n1", "slurmctld", "-D", "-c")
        self.slurmd = {name: self.start_slurmd(name) for name in ADDRESSES}
        self.wait_for(lambda: self.states() == {"n1": "idle", "n2": "idle"}, "nodes that are idle")

    def states(self):
        lines = self.on("n1", "sinfo", "-h", "-N", "-o", "%N %T", check=False).split("\n")
        return dict(line.split() for line in lines if line)

    def wait_for(self, condition, what, seconds=60):
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds} s for {what}\n{self.story()}")
            time.sleep(0.2)
        return value

    def story(self):
        """What the daemons have logged last."""
        texts = []
        for path in sorted((FOLDER / "log").iterdir()):
            lines = path.read_text(errors="replace").splitlines()[-25:]
            texts.append(f"---- {path.name}\n" + "\n".join(lines))
        return "\n".join(texts)
