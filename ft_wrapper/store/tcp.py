"""Keys in a TCPStore, and the server that keeps them."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import tenacity
from torch._C._distributed_c10d import Store
from torch._C._distributed_c10d import TCPStore as TorchTCPStore
from torch.distributed import DistError, DistNetworkError

from ..exception import StoreError
from .holding import HoldingStore
from .keys import LIFE
from .operations import to_text

log = logging.getLogger(__name__)

T = TypeVar("T")

_NEVER = "\x00no key holds this"
_BACKLOG = 4096  # all ranks of a job come at once
DEFAULT_TIMEOUT = timedelta(seconds=30)
_MOST_UNANSWERED = 64
# Where the server goes while torch's client connects, that takes up to three times its timeout to say so. So
# attempts are short, but each twice as long as the one before, for a server that thousands come to at once.
_FIRST_ATTEMPT = 1.0  # seconds
_LONGEST_ATTEMPT = 16.0
_LAST_WORDS = 5.0  # seconds after the last attempt began


class TCPStore(HoldingStore):
    """A client of a TCPStore server.

    It never hosts the server: that has to outlive any rank (see `TCPStoreServer`). When the connection is
    lost it connects again and repeats the operation, until ``timeout`` has passed; a server that comes back
    empty is an error, because all that was agreed is gone.

    Args:
        host_name: host of the server; the environment variable MASTER_ADDR when None.
        port: its port; MASTER_PORT + 1 when None.
        world_size: ignored; accepted so that arguments for torch's TCPStore fit.
        timeout: how long to try to connect, and to wait in operations that wait.
        namespace: put in front of every key, so that several jobs can share a server.

    Raises:
        StoreError: nobody answers at that address within the timeout.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        namespace: str = "",
    ) -> None:
        self.host_name, self.port = tcp_address(host_name, port)
        self._patience = timeout.total_seconds()
        self._unanswered: list[Callable[[Store], None]] = []
        wait_for_port(self.host_name, self.port, self._patience)

        def connect() -> None:
            for attempt in self._retrying().copy(reraise=True):
                with attempt:
                    client = self._open(timeout, attempt.retry_state.attempt_number)
                    super(TCPStore, self).__init__(client, namespace)
                    self._life = self._read_life(client)

        try:
            answered = _ends_within(self._patience + _LAST_WORDS, connect)
        except DistError as error:
            raise StoreError(f"no TCPStore answers at {self.host_name}:{self.port}: {error}") from error
        if not answered:
            raise StoreError(
                f"no TCPStore answers at {self.host_name}:{self.port} within {self._patience:g} s, though "
                "somebody listens there; see whether another program has the port"
            )

    def __repr__(self) -> str:
        return f"TCPStore({self.host_name}:{self.port})"

    def set_patience(self, seconds: float) -> None:
        self._patience = seconds

    def clone(self) -> TCPStore:
        other = TCPStore.__new__(TCPStore)
        other.host_name, other.port = self.host_name, self.port
        other._patience, other._life = self._patience, self._life
        other._unanswered = []
        other.namespace = self.namespace
        other._place = self._place
        other._store = self._store.clone()  # type: ignore[attr-defined]
        return other

    def try_get(self, key: str) -> str | None:
        # One round trip; check and get take three. A comparison that fails changes nothing and answers with
        # what the key holds, or with the expected value where there is no key.
        value = self.compare_set(key, _NEVER, _NEVER)
        return None if value == _NEVER.encode() else to_text(value, key)

    def set(self, key: str, value: str | bytes) -> None:
        self._tell(f"set {key}", lambda store: store.set(self._full(key), value))  # type: ignore[arg-type]

    def append(self, key: str, value: str | bytes) -> None:
        self._tell(f"append {key}", lambda store: store.append(self._full(key), value))  # type: ignore[attr-defined]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        full = self._all_full(keys)
        self._tell(f"multi_set {keys}", lambda store: store.multi_set(full, values))  # type: ignore[attr-defined]

    def _do(self, what: str, operation: Callable[[Store], T]) -> T:
        """Carries out an operation that the server answers."""
        try:
            result = operation(self._store)
        except DistNetworkError as error:
            log.warning("%r: lost during %s, trying again: %s", self, what, error)
            result = self._repeat(what, operation)
        # The server answers in order: what it was told before has been carried out.
        self._unanswered.clear()
        return result

    def _tell(self, what: str, operation: Callable[[Store], None]) -> None:
        """Carries out an operation that the server does not answer.

        On a connection that is lost already the first of them seems to succeed. So they are kept until an
        operation has been answered, and repeated should the connection turn out to be lost.
        """
        try:
            operation(self._store)
        except DistNetworkError as error:
            log.warning("%r: lost during %s, trying again: %s", self, what, error)
            self._repeat(what, operation)
        self._unanswered.append(operation)
        if len(self._unanswered) >= _MOST_UNANSWERED:
            self.check([LIFE])

    def _repeat(self, what: str, operation: Callable[[Store], T]) -> T:
        try:
            for attempt in self._retrying():
                with attempt:
                    result = self._reconnect_and_do(operation, attempt.retry_state.attempt_number)
            return result
        except tenacity.RetryError as failure:
            raise StoreError(
                f"store at {self.host_name}:{self.port} is lost: {what} failed for {self._patience:g} s; "
                "see whether the process that hosts it still runs"
            ) from failure.last_attempt.exception()

    def _reconnect_and_do(self, operation: Callable[[Store], T], number: int) -> T:
        fresh = self._open(self.timeout, number)
        if self._read_life(fresh) != self._life:
            raise StoreError(
                f"store at {self.host_name}:{self.port} came back without its contents; this job cannot go on"
            )
        for unanswered in self._unanswered:
            unanswered(fresh)
        self._store = fresh
        return operation(fresh)

    def _retrying(self) -> tenacity.Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(DistNetworkError),
            stop=tenacity.stop_after_delay(self._patience),
            wait=tenacity.wait_exponential(multiplier=0.05, max=1.0),
        )

    def _open(self, timeout: timedelta, number: int) -> TorchTCPStore:
        """Makes a connection, in one attempt.

        Args:
            timeout: of the operations that wait.
            number: which attempt in a row it is, from 1.
        """
        seconds = min(_FIRST_ATTEMPT * 2 ** min(number - 1, 10), _LONGEST_ATTEMPT, max(self._patience, 0.1))
        try:
            wait_for_port(self.host_name, self.port, seconds)
        except StoreError as error:
            raise DistNetworkError(str(error)) from None
        client = TorchTCPStore(
            self.host_name,
            self.port,
            is_master=False,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        client.set_timeout(timeout)
        return client

    def _read_life(self, store: Store) -> bytes:
        """The nonce written once in a store's life; whoever comes first writes it."""
        nonce = socket.gethostname() + "-" + os.urandom(6).hex()
        store.compare_set(self._full(LIFE), "", nonce)
        return store.get(self._full(LIFE))


class TCPStoreServer:
    """A TCPStore server in this process, which must not be a training process.

    Args:
        port: port to listen on; 0 takes a free one.
        host_name: this host, as the clients call it; decides between IPv4 and IPv6.

    Raises:
        StoreError: the port is taken.
    """

    def __init__(self, port: int = 0, host_name: str = "localhost") -> None:
        try:
            self._store = serve(host_name, port, DEFAULT_TIMEOUT)
        except OSError as error:
            raise StoreError(
                f"port {port} cannot be used for the coordination store: {error}; choose another MASTER_PORT "
                "(the store takes MASTER_PORT + 1) or pass store_kwargs={'port': ...}"
            ) from error
        self.port: int = self._store.port

    def close(self) -> None:
        """Ends the server."""
        del self._store


def serve(host_name: str, port: int, timeout: timedelta) -> TorchTCPStore:
    """Opens a TCPStore server on all of this host's addresses.

    On a socket of one family: a server of torch's own making listens on IPv6 and sees ``127.0.0.1`` as
    ``::ffff:127.0.0.1``, whose name it looks up for each client, which no hosts file answers.

    Args:
        host_name: this host, as the clients call it; decides between IPv4 and IPv6.
        port: port to listen on; 0 takes a free one.
        timeout: of the operations on the returned store.

    Raises:
        OSError: the port is taken, or the host is unknown.
    """
    families = [info[0] for info in socket.getaddrinfo(host_name, port, type=socket.SOCK_STREAM)]
    family = socket.AF_INET if socket.AF_INET in families else families[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(_BACKLOG)
        return TorchTCPStore(
            host_name,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),  # the server closes it
        )


def tcp_address(host_name: str | None, port: int | None) -> tuple[str, int]:
    """Completes an address from MASTER_ADDR and MASTER_PORT + 1.

    Raises:
        ValueError: a variable that is needed is missing or malformed; names it, its value and what to do.
    """
    if host_name is None:
        host_name = os.environ.get("MASTER_ADDR", "")
        if not host_name:
            raise ValueError(
                "environment variable MASTER_ADDR is not set; start the script with ftrun or torchrun, "
                "which set it, or pass store_kwargs={'host_name': ...}"
            )
    if port is None:
        port = master_port() + 1
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f"port={port!r} of the store must lie in 1..65535")
    return host_name, port


def master_port() -> int:
    """Reads MASTER_PORT.

    Raises:
        ValueError: it is missing or no port.
    """
    text = os.environ.get("MASTER_PORT")
    if text is None:
        raise ValueError(
            "environment variable MASTER_PORT is not set; start the script with ftrun or torchrun, "
            "which set it, or pass store_kwargs={'port': ...}"
        )
    if not text.isdigit() or not 0 < int(text) < 65535:
        raise ValueError(
            f"environment variable MASTER_PORT={text!r} must be an integer in 1..65534; "
            "start the script with ftrun or torchrun, which set it"
        )
    return int(text)


def wait_for_port(host_name: str, port: int, seconds: float) -> None:
    """Waits until somebody listens at an address.

    torch's own client backs off half a second and more when it comes before the server.

    Raises:
        StoreError: nobody did within so many seconds, or the host is unknown.
    """
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(OSError),
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_exponential(multiplier=0.002, max=0.1),
    )
    try:
        retrying(_probe, host_name, port, max(seconds, 0.1))
    except tenacity.RetryError as failure:
        error = failure.last_attempt.exception()
        raise StoreError(
            f"store at {host_name}:{port} cannot be reached within {seconds:g} s: {error}; see whether rank "
            "0 (or ftrun) runs there, and whether MASTER_ADDR and MASTER_PORT are right"
        ) from error


def _probe(host_name: str, port: int, seconds: float) -> None:
    socket.create_connection((host_name, port), timeout=seconds).close()


def _ends_within(seconds: float, function: Callable[[], None]) -> bool:
    """Runs a function that may block for good; False if it does.

    torch's client reads without a timeout while it connects. A thread that is stuck so stays behind.
    """
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    threading.Thread(target=run, name="ft_wrapper-connect", daemon=True).start()
    try:
        error = ended.get(timeout=seconds)
    except queue.Empty:
        return False
    if error is not None:
        raise error
    return True
