"""Keys in a TCPStore: the client and the server."""

import copy
import ctypes
import errno
import functools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import tenacity
import torch
from torch._C._distributed_c10d import TCPStore as TorchTCPStore
from torch.distributed import DistNetworkError
from torch.torch_version import TorchVersion

from .._files import check_open_files, quiet_torch, raise_file_limit
from ..exception import RestartTimeout, StoreError
from ..protocol.keys import LIFE
from .address import host_port, listening_address, tcp_address
from .base import DEFAULT_TIMEOUT, NEVER, HoldingStore, StoreMixin, describe_call
from .bounded import call_in_thread
from .secret import seal_of

log = logging.getLogger(__name__)

SERVER_IS_LIBUV = TorchVersion(torch.__version__) >= "2.8"
"""Whether a `TCPStoreServer` is torch's newer server, which takes a socket since pytorch 150215."""
# Key: a rank's monitor hosts the server. Without a namespace, since it is about the server, not about a job.
HOSTED_BY_RANK = "ft_wrapper/hosted_by_rank"
_BACKLOG = 4096  # all ranks of a job connect at once
_FILES_OF_A_SERVER = 12  # files that torch's server opens; without them its only error is "uv loop"
#: Errors for which waiting does not help.
NO_DESCRIPTORS = errno.EMFILE, errno.ENFILE

_Call = tuple[str, tuple[Any, ...]]  # name and arguments of an operation

_NOT_ANSWERED = "set", "append", "multi_set"
_MOST_UNANSWERED = 64
# If the server ends while torch's client connects, the client takes up to three times its timeout to report
# it. So attempts start short, but each is twice as long as the last, for a server with thousands of clients.
_FIRST_ATTEMPT = 1.0  # seconds
_LONGEST_ATTEMPT = 16.0
_LAST_WORDS = 5.0  # seconds beyond the patience for the last attempt to fail
_SILENCE = 15.0  # seconds after which the kernel ends a connection to a silent host, with one of these errors
_SILENT = tuple(map(os.strerror, (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)))


class TCPStore(HoldingStore):
    """A client of a TCPStore server.

    It never hosts the server, which has to outlive any rank (see `TCPStoreServer`). If the connection is
    lost, it reconnects and repeats the operation, until ``timeout`` has passed. It waits for this only once:
    later operations, also of clones, fail at once unless a server listens at the address again. A server that
    comes back empty is an error, because all agreements are lost.

    It waits for a server that is busy or stopped. A silent host, as after a loss of power, counts as lost
    after half of ``timeout``, but not before 15 s, or ``timeout`` if that is less.

    Threads may share a client: their operations take turns.

    Args:
        host_name: host of the server; the environment variable MASTER_ADDR when None.
        port: port of the server; MASTER_PORT + 1 when None.
        world_size: ignored; accepted so that arguments for torch's TCPStore fit.
        timeout: how long to try to connect, and to wait in operations that wait.
        namespace: prefix of every key, so that several jobs can share a server.

    Raises:
        StoreError: no server answers at the address within the timeout.
    """

    reads_by_compare_set = True

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        namespace: str = "",
    ) -> None:
        self.host_name, self.port = tcp_address(host_name, port)
        self.patience = timeout.total_seconds()
        self._unanswered: list[_Call] = []
        # Errors of clients that have tried long enough; all clones share the list.
        self._losses: list[str] = []
        self._is_clone, self._lock, self._silence = False, threading.RLock(), min(_SILENCE, self.patience)
        self.hears_signals = False
        """Whether signals are handled while the main thread waits for an answer; clones inherit this."""
        self.namespace = namespace
        wait_for_port(self.host_name, self.port, self.patience)
        self._life: bytes | None = None
        self._connect("the first connection", timeout)
        self.place = f"{self.port}/{namespace}"
        self.seal = seal_of(self.place)

    @property
    def _where(self) -> str:
        return host_port(self.host_name, self.port)

    def __repr__(self) -> str:
        return f"TCPStore({self._where})"

    def is_hosted_by_rank(self) -> bool:
        """Whether a rank of the job hosts the server; see `TCPStoreServer`."""
        return bool(self._call("check", [HOSTED_BY_RANK]))

    def clone(self) -> "TCPStore":
        other = copy.copy(self)
        other._is_clone, other._unanswered, other._lock = True, [], threading.RLock()
        other._connect("another connection", self.timeout)
        return other

    def close(self) -> None:
        """Closes the connection. Unless this is a clone, its clones no longer try to reconnect."""
        if not self._is_clone:
            self._losses.append(f"store at {self._where}: this process has closed it")
        super().close()

    def _call(self, name: str, *args: Any) -> Any:
        """Calls an operation of torch's client; repeats it on a new connection if this one is lost.

        The server handles calls in order, but does not answer those that only write: on a lost connection the
        first such call seems to succeed. So these calls are kept until a later call has been answered, and
        are repeated with a call that finds the connection lost.
        """
        if self.hears_signals and threading.current_thread() is threading.main_thread():
            return call_in_thread(functools.partial(self._call, name, *args), describe_call(name, args))
        with self._lock:  # an answer only confirms calls of the same thread, so threads take turns
            try:
                answer = getattr(self._store, name)(*args)
            except DistNetworkError as error:
                if losses := self._losses[:1]:
                    self._look_again(losses[0])
                what = describe_call(name, args)
                log.warning("%r: lost during %s, trying again: %s", self, what, error)
                silence = self._silence if any(words in str(error) for words in _SILENT) else 0.0
                calls = [*self._unanswered, (name, args)]
                answer = self._connect(what, self.timeout, calls, silence)
            if name not in _NOT_ANSWERED:
                self._unanswered.clear()
            else:
                self._unanswered.append((name, args))
                if len(self._unanswered) >= _MOST_UNANSWERED:
                    self.check([LIFE])
            return answer

    def _connect(
        self, what: str, timeout: timedelta, calls: Sequence[_Call] = (), silence: float = 0.0
    ) -> Any:
        """Makes a connection, and makes calls on it; returns the answer to the last call.

        Args:
            what: what the connection is for, for the error.
            timeout: timeout of operations that wait.
            calls: the calls.
            silence: seconds for which the server's host has been silent.
        """
        patience = max(0.0, self.patience / 2 - silence) if silence else self.patience
        # If a clone has meanwhile waited long enough, this client need not wait.
        too_long = tenacity.stop_after_delay(patience)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(DistNetworkError),
            stop=lambda tried: bool(self._losses) or too_long(tried),
            wait=tenacity.wait_exponential(multiplier=0.05, max=1.0),
        )
        answer = None
        try:
            for attempt in retrying:
                with attempt:
                    fresh, life = self._open(timeout, attempt.retry_state)
                    if self._life not in (None, life):
                        raise StoreError(
                            f"store at {self._where} came back without its contents; this job cannot go on"
                        )
                    self._store, self._life = fresh, life
                    for name, args in calls:
                        if name == "add":
                            _check_number(fresh, args[0])
                        answer = getattr(fresh, name)(*args)
            return answer
        except tenacity.RetryError as failure:
            who, see = f"{what} failed", "the process that hosts it still runs"
            if silence:
                who, see = f"its host {self.host_name} was silent", "that machine is up"
            said = f"store at {self._where} is lost: {who} for {silence + patience:g} s; see whether {see}"
            self._losses.append(said)
            raise StoreError([*self._losses, said][0]) from failure.last_attempt.exception()

    def _look_again(self, loss: str) -> None:
        """Checks once whether a server listens at the address of a lost store again."""
        try:
            _probe(self.host_name, self.port, _FIRST_ATTEMPT)
        except OSError as error:
            raise StoreError(loss) from error
        self._losses.clear()

    def _open(self, timeout: timedelta, tried: tenacity.RetryCallState) -> tuple[StoreMixin, bytes]:
        """Makes a connection, in one attempt.

        Args:
            timeout: timeout of operations that wait.
            tried: number of the attempt, and when the first one began.

        Returns:
            The connection, and the store's nonce, written by its first client.
        """
        longer = _FIRST_ATTEMPT * 2 ** min(tried.attempt_number - 1, 10)
        left = max(self.patience - (time.monotonic() - tried.start_time), 0.1)
        seconds = timedelta(seconds=min(longer, _LONGEST_ATTEMPT, left))
        try:
            wait_for_port(self.host_name, self.port, seconds.total_seconds())
        except StoreError as error:
            raise DistNetworkError(str(error)) from None

        def connect() -> tuple[StoreMixin, bytes]:
            client = TorchTCPStore(
                self.host_name, self.port, is_master=False, timeout=seconds, wait_for_workers=False
            )
            limit_silence(self.port, self._silence)
            client.set_timeout(timeout)
            nonce = socket.gethostname() + "-" + os.urandom(6).hex()
            return cast(StoreMixin, client), client.compare_set(self.namespace + LIFE, "", nonce)

        try:
            # torch's client reads without a timeout while it connects.
            return call_in_thread(connect, f"connecting to {self._where}", left + _LAST_WORDS)
        except RestartTimeout:
            raise StoreError(
                f"no TCPStore answers at {self._where} within {self.patience:g} s, though a process "
                "listens there; see whether that process is stopped, or another program has the port"
            ) from None


def wait_for_port(host_name: str, port: int, seconds: float) -> None:
    """Waits until a server listens at an address.

    torch's own client backs off for half a second or more if it connects before the server listens.

    Raises:
        StoreError: no server listened within ``seconds``, the host is unknown, or no descriptors are left.
    """
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_pass),
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_exponential(multiplier=0.002, max=0.1),
    )
    try:
        retrying(_probe, host_name, port, max(seconds, 0.1))
    except OSError as error:
        raise StoreError(
            f"no connection to the store at {host_port(host_name, port)} can be made: {error}; raise "
            "the limit on open files (ulimit -n)"
        ) from error
    except tenacity.RetryError as failure:
        last = failure.last_attempt.exception()
        raise StoreError(
            f"store at {host_port(host_name, port)} cannot be reached within {seconds:g} s: {last}; see "
            "whether rank 0 (or ftrun) runs there, and whether the address (a rank's: MASTER_ADDR) is right"
        ) from last


def _check_number(client: StoreMixin, key: str) -> None:
    """Raises StoreError if a counter holds no number, since the server hangs up when adding to it."""
    held = client.compare_set(key, NEVER, NEVER).decode(errors="replace")
    if held != NEVER and not held.lstrip("-").isdecimal():
        raise StoreError(f"store key {key!r} holds {held!r}, where a number belongs")


def _may_pass(error: BaseException) -> bool:
    """Whether waiting may help; it does not if no descriptors are left."""
    return isinstance(error, OSError) and error.errno not in NO_DESCRIPTORS


def _probe(host_name: str, port: int, seconds: float) -> None:
    socket.create_connection((host_name, port), timeout=seconds).close()


# Loss of power on the host ----------------------------------------------------------------------------------
#
# The kernel ends calls on connections to such a host, which sends neither FIN nor RST. torch's client reads
# without a timeout, so a call would last as long as the kernel retransmits: 15 minutes, or forever in a call
# that waits. A living host acknowledges packets even if the server is busy or stopped. So only silence of the
# host shows that it is lost.

_libc = ctypes.CDLL(None)  # Python's socket objects would make the descriptors non-blocking


def limit_silence(port: int, seconds: float) -> None:
    """Limits how long the host at the other end of a connection may be silent.

    Args:
        port: port at the other end. The limit is set on all connections of this process to this port, since
            torch does not expose the descriptor of its connection.
        seconds: seconds of silence after which a call on a connection fails with ETIMEDOUT.
    """
    third = max(1, int(seconds / 3))
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,  # for connections on which nothing is sent
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): third,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): third,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): int(1e3 * seconds),
    }
    peer = ctypes.create_string_buffer(128)  # sizeof(struct sockaddr_storage)
    for fd in map(int, os.listdir("/proc/self/fd")):
        failed = _libc.getpeername(fd, peer, ctypes.byref(ctypes.c_uint32(len(peer)))) != 0
        if not failed and peer.raw[2:4] == struct.pack("!H", port):
            for (level, option), value in options.items():
                _libc.setsockopt(fd, level, option, ctypes.byref(ctypes.c_int(value)), 4)


# The server ---------------------------------------------------------------------------------------------


class TCPStoreServer:
    """A TCPStore server in this process, which must not be a training process.

    Args:
        port: port to listen on; 0 for a free port.
        host_name: name or address by which clients reach this host.
        by_rank: whether a rank's monitor hosts the server, and closes it after the last goodbye; clients can
            read this.

    Raises:
        StoreError: the port is taken, the host is unknown, or no descriptors are left.
    """

    def __init__(self, port: int = 0, host_name: str = "localhost", *, by_rank: bool = False) -> None:
        try:
            self._store = serve(host_name, port, DEFAULT_TIMEOUT)
        except OSError as error:
            raise StoreError(
                f"no store can be hosted at {host_port(host_name, port)}: {error}; see whether the name "
                "leads to this host; or choose another MASTER_PORT (the store takes MASTER_PORT + 1) or pass "
                "store_kwargs={'port': ...}"
            ) from error
        self.port: int = self._store.port
        if listening_address(host_name, self.port)[1][0] == "":
            log.info(
                "the store at %s listens on all addresses of this host, since that name is no single address "
                "here; name an address to make it listen only there",
                host_port(host_name, self.port),
            )
        if by_rank:
            self._store.set(HOSTED_BY_RANK, "1")

    def close(self) -> None:
        """Ends the server: first its port is freed, then its connections end.

        At process exit the order is undefined.
        """
        del self._store


def serve(host_name: str, port: int, timeout: timedelta) -> TorchTCPStore:
    """Opens a TCPStore server, which listens on the address of `listening_address`.

    Everybody who reaches the server may read and write everything: a TCPStore has no users.

    This process's limit on open files is raised as far as possible, see `raise_file_limit`, and torch's C++
    code in this process logs only errors.

    The socket has one family. A server that torch itself opens listens on IPv6 and sees ``127.0.0.1`` as
    ``::ffff:127.0.0.1``, whose name it looks up for each client, and no hosts file has that name.

    Args:
        host_name: name or address by which clients reach this host.
        port: port to listen on; 0 for a free port.
        timeout: timeout of operations on the returned store.

    Raises:
        OSError: the port is taken, the host is unknown, or this process may not open enough files.
    """
    raise_file_limit()
    quiet_torch()
    check_open_files(_FILES_OF_A_SERVER, "a process that hosts a store")
    family, address = listening_address(host_name, port)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
        options["master_listen_fd"] = listener.detach()  # the server closes it
        # The server's own client must not connect elsewhere: it would wait forever.
        own = host_name if address[0] else {socket.AF_INET6: "::1"}.get(family, "127.0.0.1")
        return TorchTCPStore(own, port, **options, use_libuv=SERVER_IS_LIBUV)
