"""A real SLURM on one machine: each of its machines is a network namespace with a host name of its own.

A slurmd has its own address, name, spool folder and memory cgroup there; munged, which talks over a unix
socket, is shared. Only the kernel, the disk and the processors are the same for all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil
from test_network import _FILES, Network

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "ip", "nsenter")
MEMORY = 20000  # MiB that each node says it has
SILENT = 20  # seconds after which slurmctld gives up a node
_CGROUPS = Path("/sys/fs/cgroup")
# ftrun and the ranks get no variable of the tests but these: else SLURM's processes would pass for theirs.
_PASSED = ("HOME", "LANG", "OMP_NUM_THREADS", "RES_OPTIONS")
T = TypeVar("T")

CONFIG = """
ClusterName=ft
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode={memory}
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout={silent}
SlurmctldTimeout=20
MessageTimeout=10
KillWait=10
WaitTime=5
MinJobAge=600
NodeName={nodes} NodeAddr=10.77.0.[2-{last}] CPUs=8 CoresPerSocket=8 RealMemory={memory} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""

CGROUP = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
"""

# What a process of a machine starts in: its network, its name, its /etc/hosts.
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def until(look: Callable[[], T], what: str, seconds: float = 120.0, said: Callable[[], object] = str) -> T:
    """Looks until there is something.

    Args:
        look: returns something true once it is there. SLURM's states and files can only be looked at.
        what: what is waited for, for the error.
        seconds: how long at most.
        said: what else the error shows.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{said()}"
        time.sleep(0.1)
    return found


class Slurm(Network):
    """SLURM, up while it is entered.

    Args:
        size: number of nodes.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size + 1)  # machine 0 is the controller's
        self.nodes = [self.name(machine) for machine in range(1, size + 1)]

    def name(self, host: int) -> str:
        """Unique on this machine, for cgroups are called after it."""
        return f"{self._name}n{host - 1}" if host else f"{self._name}ctl"

    def __enter__(self) -> Slurm:
        self._root = Path(tempfile.mkdtemp(prefix=f"{self._name}-slurm-"))
        self._root.chmod(0o755)
        super().__enter__()
        try:
            self._configure()
            self._start(0, "slurmctld", "-c")
            for node in self.nodes:
                self.power_on(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in range(self._size):
            self._kill_all(machine)
        with contextlib.suppress(OSError):
            os.kill(int((self._root / "munge.pid").read_text()), signal.SIGTERM)
        super().__exit__()
        for node in self.nodes:
            self._remove_cgroups(node)
        shutil.rmtree(self._root, ignore_errors=True)

    def call(self, *command: str, machine: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Runs a command on a machine, by default the controller's; returns what it prints.

        Raises:
            AssertionError: it failed.
        """
        ended = self._run(machine, command, env)
        assert ended.returncode == 0, f"{' '.join(command)}: exit code {ended.returncode}\n{ended.stderr}"
        return ended.stdout

    def run(self, *command: str, machine: int = 0) -> subprocess.CompletedProcess[str]:
        """The same for a command that may fail: returns how it ended."""
        return self._run(machine, command)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command on the controller's machine; its stdout has its stderr, too."""
        return subprocess.Popen(
            [*self.command(0), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(),
        )

    def submit(self, *words: str, folder: Path, **env: str) -> Job:
        """Submits a batch job.

        Args:
            words: options, script and arguments, as behind ``sbatch``.
            folder: where it is submitted, and runs.
            env: what its environment has besides.
        """
        number = self.call("sbatch", "--parsable", f"--chdir={folder}", *words, env=env).strip()
        return Job(self, number, folder)

    def power_off(self, node: str) -> None:
        """Takes a node's power away: no packet leaves it, no process ends in an orderly way."""
        subprocess.run(["ip", "-n", self._of(node), "link", "set", "eth0", "down"], check=True, timeout=60)
        self._kill_all(self._machine(node))

    def power_on(self, node: str) -> None:
        """Starts a node, and waits until SLURM can use it."""
        subprocess.run(["ip", "-n", self._of(node), "link", "set", "eth0", "up"], check=True, timeout=60)
        shutil.rmtree(self._root / f"spool-{node}", ignore_errors=True)
        (self._root / f"spool-{node}").mkdir()
        self._start(self._machine(node), "slurmd", "-N", node)
        self._until_idle(node)

    def processes(self, node: str, pattern: str = "") -> list[psutil.Process]:
        """The processes of a node whose command line contains a pattern."""
        found = []
        for pid in self._pids(self._machine(node)):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and pattern in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def repair(self) -> None:
        """Makes every node usable again, whatever has happened to it."""
        for node in self.nodes:
            if not self.processes(node, "slurmd -N"):
                self.power_on(node)
            if "idle" not in (state := self._state(node)):
                if "down" in state or "drain" in state:
                    self.call("scontrol", "update", f"nodename={node}", "state=resume")
                self._until_idle(node)

    def until_empty(self, seconds: float = 60.0) -> None:
        """Waits until no job is queued, and no process of one is left on any node."""
        until(lambda: not self.call("squeue", "-h"), "no job", seconds, lambda: self.call("squeue"))
        until(lambda: not self._left(), "no process of a job on the nodes", seconds, self._left)

    def _left(self) -> list[str]:
        found = [process for node in self.nodes for process in self.processes(node)]
        return [" ".join(process.cmdline()) for process in found if process.name() != "slurmd"]

    def _state(self, node: str) -> str:
        return self.call("sinfo", "-h", "-p", "low", "-n", node, "-o", "%T").strip()

    def _until_idle(self, node: str) -> None:
        until(lambda: self._state(node) == "idle", f"{node} is idle", 90, lambda: self.call("sinfo", "-N"))

    def _machine(self, node: str) -> int:
        return self.nodes.index(node) + 1

    def _of(self, node: str) -> str:
        return self._namespace(self._machine(node))

    def _run(
        self, machine: int, command: tuple[str, ...], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command(machine), *command],
            capture_output=True,
            text=True,
            timeout=120,
            env={**self._environment(), **(env or {})},
        )

    def command(self, host: int) -> list[str]:
        """What to put in front of a command; ``ip netns exec`` would hide the cgroups."""
        namespace = f"--net=/run/netns/{self._namespace(host)}"
        inside = ["sh", "-c", _ENTER, self.name(host), str(self._hosts(host))]
        return ["nsenter", namespace, "unshare", "--uts", "--mount", *inside]

    def _write_names(self, host: int) -> None:
        """As on a cluster, all machines have the same names, and none of them leads to the loopback."""
        names = {self.address(other): self.name(other) for other in range(self._size)} | {
            "127.0.0.1": "localhost"
        }
        hosts = self._hosts(host)
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text("".join(f"{address} {name}\n" for address, name in names.items()))

    def _hosts(self, host: int) -> Path:
        return _FILES / self._namespace(host) / "hosts"

    def _environment(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**passed, "PATH": path, "SLURM_CONF": str(self._root / "slurm.conf")}

    def _configure(self) -> None:
        last = self._size
        settings = {
            "controller": self.name(0),
            "address": self.address(0),
            "root": self._root,
            "nodes": f"{self._name}n[0-{last - 2}]",
            "last": last,
            "memory": MEMORY,
            "silent": SILENT,
        }
        (self._root / "state").mkdir()
        (self._root / "slurm.conf").write_text(CONFIG.format(**settings))
        (self._root / "cgroup.conf").write_text(CGROUP)
        key = self._root / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        files = {"key-file": key.name, "socket": "munge.socket", "pid-file": "munge.pid"}
        files |= {"seed-file": "munge.seed", "log-file": "munge.log"}
        words = [f"--{name}={self._root / file}" for name, file in files.items()]
        # It puts itself into the background once it is up.
        subprocess.run(["munged", *words], check=True, timeout=60)

    def _start(self, machine: int, *command: str) -> None:
        """Starts a daemon, which returns once it is in the background."""
        self.call(*command, machine=machine)

    def _pids(self, machine: int) -> list[int]:
        namespace = self._namespace(machine)
        ended = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=60)
        return [int(pid) for pid in ended.stdout.split()]

    def _kill_all(self, machine: int) -> None:
        """Kills all processes of a machine, those too that one of them starts meanwhile."""
        until(lambda: not self._kill_once(machine), f"no process is left on {self.name(machine)}", 60)

    def _kill_once(self, machine: int) -> list[int]:
        pids = self._pids(machine)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    def _remove_cgroups(self, node: str) -> None:
        for top in _CGROUPS.glob(f"*/slurm_{node}"):
            for folder, _, _ in os.walk(top, topdown=False):
                os.rmdir(folder)


class Job:
    """A batch job that runs `job.py`.

    Args:
        slurm: where it runs.
        number: its id.
        folder: where it was submitted.
    """

    def __init__(self, slurm: Slurm, number: str, folder: Path) -> None:
        self.slurm, self.number, self.folder = slurm, number, folder

    def shown(self) -> dict[str, str]:
        """What ``scontrol show job`` says of it."""
        text = self.slurm.call("scontrol", "show", "job", self.number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    @property
    def state(self) -> str:
        """Its state in SLURM's words, and its exit code: ``COMPLETED 0:0``."""
        shown = self.shown()
        return f"{shown['JobState']} {shown['ExitCode']}"

    @property
    def said(self) -> str:
        """What the batch script and all tasks have written."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("ft-*.log")))

    @property
    def steps(self) -> Counter[tuple[int, int]]:
        """How often a rank has done a step, by step and rank."""
        found = re.findall(r"^STEP (\d+) rank (\d+)", self.said, re.M)
        return Counter((int(step), int(rank)) for step, rank in found)

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return int(re.findall(rf"^STEP \d+ rank {rank} pid (\d+)", self.said, re.M)[-1])

    def task(self, node: str) -> psutil.Process:
        """The supervisor that the job's step runs on a node."""
        daemon = f"slurmstepd: [{self.number}.0]"
        for process in self.slurm.processes(node, "/ftrun "):
            with contextlib.suppress(psutil.Error):
                if daemon in " ".join(process.parents()[1].cmdline()):  # above the task's shell
                    return process
        raise AssertionError(f"no ftrun on {node}\n{self.describe()}")

    def agent(self, node: str) -> psutil.Process:
        """The ftrun that the supervisor runs."""
        (agent,) = self.task(node).children()
        return agent

    def until_said(self, *words: str, seconds: float = 120.0) -> None:
        """Waits until all of some texts are there."""
        until(lambda: all(w in self.said for w in words), " and ".join(words), seconds, self.describe)

    def go_on(self) -> None:
        """Lets it go on if it is held."""
        (self.folder / "hold").unlink(missing_ok=True)

    def end(self, seconds: float = 240.0) -> str:
        """Waits for its end; returns state and exit code. Requeued, it starts at once, not after two minutes.

        A job that is held goes on.

        Args:
            seconds: how long each attempt may take.
        """
        self.go_on()
        for attempt in itertools.count(1):
            look = functools.partial(self._is_over, attempt)
            until(look, "the job is over, or requeued", seconds, self.describe)
            if self.shown()["JobState"] != "PENDING":
                break
            # In the second of its end slurmd would refuse it: the credential counts as revoked.
            self.slurm.call("scontrol", "update", f"jobid={self.number}", "starttime=now+2")
        return self.state

    def _is_over(self, attempt: int) -> bool:
        shown = self.shown()
        if shown["JobState"] == "PENDING":
            return int(shown["Restarts"]) >= attempt
        return shown["JobState"] not in ("RUNNING", "COMPLETING", "CONFIGURING")

    def describe(self) -> str:
        """For an error: its state, and its last lines but those of steps."""
        lines = [line for line in self.said.splitlines() if not line.startswith("STEP")]
        return "\n".join([self.state, *lines[-60:]])
