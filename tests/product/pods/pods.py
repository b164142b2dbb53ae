"""Pods without a Kubernetes: what a container runtime makes of the manifest's pod, on this machine.

A pod has its own network, PID, mount, IPC and host-name namespaces, a read-only root file system, user and
group 65534, a /dev/shm of 64 MiB, a tmpfs for TMPDIR and a memory cgroup (version 1). The command is PID 1.
What it is started with comes from ``kubernetes.yaml``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from manifests import etcd_words, node_of, words_of

from ft_wrapper.testing.etcd_server import find_etcd

TIMEOUT = 120.0
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
POD_USER = 65534
MEMORY = Path("/sys/fs/cgroup/memory")
FILE = "kubernetes.yaml"
SECRET = "0123456789abcdef"
#: A node is lost after 4 s rather than 15 s.
QUICK = "keep_alive_interval=0.5,keep_alive_max_attempt=8,last_call_timeout=60"

_DEVICES = ("null", "zero", "full", "random", "urandom")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_NUMBERS = itertools.count()


def why_not() -> str:
    """Why this machine can make no pods; empty if it can."""
    if os.geteuid() != 0:
        return "pods need root"
    if missing := [
        name for name in ("ip", "nsenter", "unshare", "setpriv", "pivot_root") if not shutil.which(name)
    ]:
        return f"pods need {', '.join(missing)}"
    if not os.access(MEMORY / "cgroup.procs", os.W_OK):
        return "pods need a memory cgroup of version 1"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True, text=True
    )
    return tried.stderr.strip()


def image() -> list[str]:
    """What is in a pod's root file system: this machine's programs, this Python and the repository."""
    found = {
        *_SYSTEM,
        str(ROOT),
        sys.prefix,
        sys.base_prefix,
        os.path.dirname(os.path.realpath(sys.executable)),
    }
    found |= {path for path in sys.path if os.path.isdir(path)}
    found |= {str(Path(find_etcd()).resolve().parent)}
    kept: list[str] = []
    for path in sorted(path for path in found if os.path.lexists(path)):
        if not any(path.startswith(f"{above}/") for above in kept):
            kept.append(path)
    return kept


class Network:
    """A switch, and the names that pods know. A context manager.

    Args:
        folder: for files that pods see.
        families: of addresses: 4, 6 or both.
    """

    def __init__(self, folder: Path, families: Sequence[int] = (4, 6)) -> None:
        self.folder = folder
        self.families = families
        self.name = f"ftpods{os.getpid()}n{next(_NUMBERS)}"
        self.pods: list[Pod] = []
        self.news = threading.Condition()  # a pod has said something, or ended
        self._names: dict[str, list[str]] = {}
        self._hosts = itertools.count(10)

    def __enter__(self) -> Network:
        folder = self.folder
        while folder != folder.parent:  # pytest's folders are root's alone
            folder.chmod(folder.stat().st_mode | 0o055)
            folder = folder.parent
        (self.folder / "checkpoints").mkdir()
        os.chown(self.folder / "checkpoints", POD_USER, POD_USER)
        (self.folder / "secret").mkdir()
        (self.folder / "secret" / "secret").write_text(SECRET)
        os.chown(self.folder / "secret" / "secret", 0, POD_USER)
        (self.folder / "secret" / "secret").chmod(0o440)
        _ip("netns", "add", self.name)
        _ip("-n", self.name, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.name, "link", "set", "bridge", "up")
        _ip("-n", self.name, "link", "set", "lo", "up")
        for address in self._addresses(1):
            _ip("-n", self.name, "address", "add", address, "dev", "bridge", "nodad")
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.remove()
        _ip("netns", "delete", self.name, check=False)

    @property
    def checkpoints(self) -> Path:
        """The volume that all pods share."""
        return self.folder / "checkpoints"

    def new_addresses(self) -> list[str]:
        """Addresses that no pod has had."""
        return self._addresses(next(self._hosts))

    def publish(self, name: str, addresses: Sequence[str]) -> None:
        """Gives a name an address, as DNS does once a pod has one; all pods know it from now on."""
        self._names[name] = [address.partition("/")[0] for address in addresses]
        for pod in self.pods:
            pod.write_hosts()

    def lines(self) -> list[str]:
        """The names, as /etc/hosts has them."""
        return [f"{address} {name}" for name, found in self._names.items() for address in found]

    def await_line(self, pattern: str) -> None:
        """Waits until one of the Job's pods has said something."""
        with self.news:
            found = self.news.wait_for(lambda: re.search(pattern, self.said(), re.MULTILINE), TIMEOUT)
            assert found, f"no pod said {pattern!r}{self.said()}"

    def said(self) -> str:
        """All output of the Job's pods, for a message."""
        return "".join(f"\n--- {pod.name}\n{pod.said}" for pod in self.pods if isinstance(pod, Node))

    def get(self, url: str) -> tuple[int, str]:
        """What another host gets from a pod: status and body."""
        script = (
            "import sys, urllib.request, urllib.error\n"
            "try: answer = urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2]))\n"
            "except urllib.error.HTTPError as error: answer = error\n"
            "print(answer.status, answer.read().decode())"
        )
        words = ["nsenter", f"--net=/run/netns/{self.name}", sys.executable, "-c", script, url, str(TIMEOUT)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT + 10)
        assert done.returncode == 0, done.stderr
        status, _, body = done.stdout.partition(" ")
        return int(status), body

    def _addresses(self, host: int) -> list[str]:
        known = {4: f"10.78.0.{host}/24", 6: f"fd78::{host:x}/64"}
        return [known[family] for family in self.families]


class Pod:
    """One pod: a container, and its network.

    Args:
        network: where it is.
        name: its host name.
        domain: the headless service, whose name follows the pod's.
    """

    def __init__(self, network: Network, name: str, domain: str) -> None:
        self.network, self.name, self.domain = network, name, domain
        self.number = next(_NUMBERS)
        self._namespace = f"{network.name}p{self.number}"
        self._group = MEMORY / self._namespace
        self._hosts = network.folder / f"{self._namespace}.hosts"
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._said: list[str] = []
        self._is_closed = False
        self.addresses = network.new_addresses()
        network.pods.append(self)
        _ip("netns", "add", self._namespace)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        _ip("-n", network.name, "link", "add", f"pod{self.number}", *ends)
        _ip("-n", network.name, "link", "set", f"pod{self.number}", "master", "bridge", "up")
        _ip("-n", self._namespace, "link", "set", "lo", "up")
        for address in self.addresses:
            nodad = ["nodad"] if ":" in address else []
            _ip("-n", self._namespace, "address", "add", address, "dev", "eth0", *nodad)
        _ip("-n", self._namespace, "link", "set", "eth0", "up")
        self.write_hosts()

    @property
    def full_name(self) -> str:
        """What other pods call it."""
        return f"{self.name}.{self.domain}"

    def publish(self) -> None:
        """Lets other pods find it."""
        self.network.publish(self.full_name, self.addresses)

    def write_hosts(self) -> None:
        """What the kubelet writes into /etc/hosts, and what DNS knows."""
        own = [f"{address.partition('/')[0]} {self.name}" for address in self.addresses]
        loopback = ["127.0.0.1 localhost", "::1 localhost"]
        self._hosts.write_text("\n".join([*loopback, *own, *self.network.lines()]) + "\n")
        self._hosts.chmod(0o644)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], memory: int | None = None
    ) -> None:
        """Starts its container.

        Args:
            command: PID 1.
            environment: all of it.
            memory: bytes, beyond which the kernel kills.
        """
        self._group.mkdir()
        if memory is not None:
            (self._group / "memory.limit_in_bytes").write_text(str(memory))
        read, write = os.pipe()
        words = [
            "nsenter",
            f"--net=/run/netns/{self._namespace}",
            "unshare",
            "--uts",
            "--mount",
            "--ipc",
            "--pid",
        ]
        words += ["--fork", "--kill-child=KILL", "bash", "-euc", self._setup(write), "bash"]
        words += ["setpriv", f"--reuid={POD_USER}", f"--regid={POD_USER}", "--clear-groups", "--no-new-privs"]
        words += [
            "--bounding-set=-all",
            "--pdeathsig=KILL",
            "env",
            "-i",
            *(f"{key}={value}" for key, value in environment.items()),
        ]
        try:
            self._process = subprocess.Popen(
                [*words, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
            )
        finally:
            os.close(write)
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        with open(read) as pipe:
            ready = select.select([pipe], [], [], TIMEOUT)[0]
            number = pipe.readline() if ready else ""
        assert number, f"{self.name}: the container was not made:\n{self.said}"
        self._pid = int(number)

    def signal(self, signum: signal.Signals) -> None:
        """To PID 1, as the kubelet."""
        os.kill(self._pid, signum)

    def end(self) -> int:
        """Waits for its end; returns the exit code, as Kubernetes has it."""
        assert self._process is not None
        try:
            code = self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended{self.network.said()}") from None
        self.await_that(lambda: self._is_closed, "the end of its output")
        return code if code >= 0 else 128 - code

    def kill_agent(self) -> None:
        """The only child of PID 1, which supervises it."""
        (agent,) = psutil.Process(self._pid).children()
        agent.kill()

    def lose_power(self) -> None:
        """No process there notifies anybody of anything."""
        _ip("-n", self._namespace, "link", "set", "eth0", "down")
        self.signal(signal.SIGKILL)
        self.end()

    def zombies(self) -> list[int]:
        """Processes of it that have ended and were not reaped."""
        below = psutil.Process(self._pid).children(recursive=True)
        return [process.pid for process in below if process.status() == psutil.STATUS_ZOMBIE]

    def remove(self) -> None:
        """Ends it, and removes all that it had."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid or self._process.pid, signal.SIGKILL)
            self._process.wait(TIMEOUT)
        _ip("netns", "delete", self._namespace, check=False)
        if self._group.exists():
            _remove_group(self._group)

    # What it says ------------------------------------------------------------------------------------------

    @property
    def said(self) -> str:
        """All output so far, except for steps and checkpoints."""
        with self.network.news:
            return "".join(line for line in self._said if not line.startswith(('train {"st', 'train {"sa')))

    def records(self) -> list[dict[str, Any]]:
        """What its ranks have said of the training."""
        with self.network.news:
            return [json.loads(line[6:]) for line in self._said if line.startswith("train {")]

    def await_line(self, pattern: str, count: int = 1) -> None:
        """Waits until it has said something so often."""
        self.await_that(lambda: len(re.findall(pattern, self.said, re.MULTILINE)) >= count, f"{pattern!r}")

    def await_that(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until something holds, with a look at each line that it says."""
        deadline = time.monotonic() + TIMEOUT
        with self.network.news:
            while not condition():
                left = deadline - time.monotonic()
                assert left > 0, f"{self.name}: there is no {what}{self.network.said()}"
                assert not self._is_closed, f"{self.name} ended without {what}{self.network.said()}"
                self.network.news.wait(left)

    def _listen(self, output: Any) -> None:
        with output:
            for line in output:
                with self.network.news:
                    self._said.append(line.decode(errors="replace"))
                    self.network.news.notify_all()
        with self.network.news:
            self._is_closed = True
            self.network.news.notify_all()

    # Its file system ---------------------------------------------------------------------------------------

    def _setup(self, ready: int) -> str:
        """A script of bash: it makes the root file system, and becomes the rest of its words."""
        new = shlex.quote(str(self.network.folder / "root"))
        volumes = {
            "/checkpoints": self.network.folder / "checkpoints",
            "/etc/train": self.network.folder / "secret",
        }
        lines = [
            "read -r pid rest </proc/self/stat",  # in numbers of the machine: /proc is still the machine's
            f"echo 0 >{shlex.quote(str(self._group / 'cgroup.procs'))}",
            f"hostname {self.name}",
            "mount --make-rprivate /",
            f"mkdir -p {new}",
            f"mount -t tmpfs -o mode=0755 root {new}",
            f"cd {new}",
            "mkdir proc dev sys tmp old scratch checkpoints data etc",
        ]
        for path in map(shlex.quote, image()):
            if os.path.islink(path):
                lines.append(f"cp -P {path} {new}{path}")
            else:
                lines += [f"mkdir -p {new}{path}", f"mount --bind {path} {new}{path}"]
                lines += [f"mount -o remount,bind,ro {new}{path}"]
        lines += [
            f"mount -t tmpfs -o mode=0755 etc {new}/etc",
            f"cp -a /etc/ld.so.* /etc/nsswitch.conf /etc/passwd /etc/group {new}/etc/",
            f": >{new}/etc/resolv.conf; : >{new}/etc/hosts; mkdir {new}/etc/train",
            f"mount --bind {shlex.quote(str(self._hosts))} {new}/etc/hosts",
            f"mount -t proc proc {new}/proc",
            f"mount --bind /sys {new}/sys",
            f"mount -t tmpfs -o mode=0755 cgroup {new}/sys/fs/cgroup",
            f"mkdir {new}/sys/fs/cgroup/memory",
            f"mount --bind {shlex.quote(str(self._group))} {new}/sys/fs/cgroup/memory",
            f"mount -t tmpfs -o mode=0755 dev {new}/dev",
            f"mkdir {new}/dev/shm",
            f"mount -t tmpfs -o mode=1777,size=64m shm {new}/dev/shm",
            f"mount -t tmpfs -o mode=1777 scratch {new}/scratch",
            f"mount -t tmpfs -o mode=1777 data {new}/data",
        ]
        for device in _DEVICES:
            lines += [f": >{new}/dev/{device}", f"mount --bind /dev/{device} {new}/dev/{device}"]
        for inside, outside in volumes.items():
            lines += [f"mount --bind {shlex.quote(str(outside))} {new}{inside}"]
        lines += [
            f"mount -o remount,bind,ro {new}/etc/train",
            f"mount -o remount,ro {new}/etc",
            f"mount -o remount,bind,ro {new}/sys",
            f"cd {new}",
            "pivot_root . old",
            "umount -l /old",
            "rmdir /old",
            "mount -o remount,ro /",
            f"cd {shlex.quote(str(HERE))}",
            f"echo $pid >&{ready}",
            f"exec {ready}>&-",
            'exec "$@"',
        ]
        return "\n".join(lines)


# Of the manifest --------------------------------------------------------------------------------------------


class Etcd(Pod):
    """A member of the manifest's etcd.

    Args:
        network: where it is.
        number: of the member.
        is_published: whether other pods find it from the beginning.
    """

    def __init__(self, network: Network, number: int, *, is_published: bool = True) -> None:
        super().__init__(network, f"train-etcd-{number}", "train-etcd")
        if is_published:
            self.publish()

    def run(self) -> None:
        """Starts the member."""
        words = etcd_words(self.name)
        if 4 not in self.network.families:
            words = [word.replace("0.0.0.0", "[::]") for word in words]
        self.start([find_etcd(), *words[1:]], {"PATH": "/usr/bin:/bin", "GOMAXPROCS": "1"})


class Node(Pod):
    """A pod of the manifest's Job.

    Args:
        network: where it is.
        index: of the Job.
        nnodes: of ftrun.
        is_published: whether other pods find it from the beginning.
    """

    def __init__(
        self, network: Network, index: int, nnodes: str = "2:3", *, is_published: bool = True
    ) -> None:
        super().__init__(network, f"train-{index}", "train")
        self.index, self.nnodes = index, nnodes
        if is_published:
            self.publish()

    @property
    def address(self) -> str:
        """Where another host reaches it."""
        found = self.addresses[0].partition("/")[0]
        return f"[{found}]" if ":" in found else found

    def run(self, *options: str, memory: int | None = None, before: Sequence[str] = ()) -> None:
        """Starts ftrun with the words of the manifest; those of one machine with eight GPUs are replaced.

        Args:
            options: more of them.
            memory: limit of the pod.
            before: what to put in front of the command.
        """
        words = words_of(FILE, JOB_COMPLETION_INDEX=str(self.index))
        script = words.index("train.py")
        words[script:] = ["--nproc-per-node=1", f"--nnodes={self.nnodes}", f"--rdzv-conf={QUICK}", *options]
        words += ["train.py", "/checkpoints"]
        if 4 not in self.network.families:
            words = [word.replace("0.0.0.0", "[::]") for word in words]
        given = {entry["name"]: entry["value"] for entry in node_of(FILE)["env"] if "value" in entry}
        given |= {"JOB_COMPLETION_INDEX": str(self.index), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        given |= {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOSTNAME": self.name}
        self.start([*before, "ftrun", *words], given, memory)

    # What has become of the training -----------------------------------------------------------------------

    def steps(self) -> dict[int, list[int]]:
        """The steps that each process of a rank has done, in order."""
        found: dict[int, list[int]] = {}
        for record in self.records():
            if "step" in record:
                found.setdefault(record["pid"], []).append(record["step"])
        return found

    def step(self) -> int:
        """The last step."""
        return max((steps[-1] for steps in self.steps().values()), default=0)

    def first(self) -> int:
        """The step from which its first rank went on."""
        return next(int(record["begins"]) for record in self.records() if "begins" in record)

    def noticed(self) -> list[int]:
        """The steps at which its ranks have saved because of a notice."""
        return [int(record["noticed"]) for record in self.records() if "noticed" in record]

    def await_noticed(self) -> None:
        """Waits until a rank has saved because of a notice."""
        self.await_that(lambda: bool(self.noticed()), "save because of a notice")

    def go_on(self, steps: int = 15) -> int:
        """Waits for so many further steps; returns the last one."""
        wanted = self.step() + steps
        self.await_that(lambda: self.step() >= wanted, f"step {wanted}")
        return self.step()

    def await_world(self, size: int) -> None:
        """Waits until its rank trains with so many others, itself included, and has done some steps there."""

        def trains() -> bool:
            begun = [record for record in self.records() if "begins" in record]
            return bool(begun) and begun[-1]["size"] == size and self.step() >= begun[-1]["begins"] + 5

        self.await_that(trains, f"step in a world of {size}")

    def repeated(self) -> int:
        """How many steps its ranks have done more than once."""
        return sum(len(steps) - len(set(steps)) for steps in self.steps().values())

    def ended(self) -> dict[str, int]:
        """The ledger at the end."""
        (found,) = (record for record in self.records() if "ended" in record)
        return found


@contextlib.contextmanager
def etcd(network: Network) -> Iterator[list[Etcd]]:
    """The manifest's three members, ready."""
    members = [Etcd(network, number) for number in range(3)]
    for member in members:
        member.run()
    for member in members:
        member.await_line("ready to serve client requests")
    yield members


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0 or not check, f"ip {' '.join(words)}: {done.stderr.strip()}"


def _remove_group(group: Path) -> None:
    """The kernel takes processes out of a group a little after their end."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            assert time.monotonic() < deadline, f"{group} still has {(group / 'cgroup.procs').read_text()}"
            time.sleep(0.02)
