"""The health endpoint: whether the agent's main loop is alive, by HTTP.

With ``TORCHELASTIC_HEALTH_CHECK_PORT`` set, a GET of any path is answered 200 if the loop is, and 503 if it
is not, with a few facts as JSON. The loop sleeps while nothing happens, so it is woken and asked to answer,
within ``TORCHELASTIC_HEALTH_CHECK_TIMEOUT`` seconds (60). ``/metrics`` is for Prometheus.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import json
import logging
import math
import os
import select
import selectors
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.local_elastic_agent import TORCHELASTIC_HEALTH_CHECK_PORT

from .group import Group
from .nodes import Inbox

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

TIMEOUT_ENV = "TORCHELASTIC_HEALTH_CHECK_TIMEOUT"
DEFAULT_TIMEOUT = 60.0
"""Seconds; as in torch's agent. The loop may be busy ending ranks for more than ten."""
_CLIENT_TIMEOUT = 10.0  # seconds for which a client may keep its connection without a word
_TOO_MANY_FILES = 1.0  # seconds until another try


class Health(http.server.ThreadingHTTPServer):
    """Answers in a thread for each request, and waits for connections in one of its own. A context manager.

    Args:
        port: where; 0 for a free one.
        timeout: seconds within which the loop has to answer.
        group: what is told of.
        inbox: which wakes the loop.

    Raises:
        OSError: the port is taken, or not allowed.
    """

    daemon_threads = False  # they are waited for
    request_queue_size = 32

    def __init__(self, port: int, timeout: float, group: Group, inbox: Inbox) -> None:
        super().__init__(("", port), _Handler)
        self.answer_timeout = timeout
        self.group = group
        self._inbox = inbox
        self._lock = threading.Lock()
        self._asking: set[threading.Event] = set()
        self._connections: set[socket.socket] = set()
        self._stopped = False
        self.socket.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="ft_wrapper-health")

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # http.server's looks this machine's name up, too
        self.server_name, self.server_port = "", self.port

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopped = True
            for asking in self._asking:
                asking.set()
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
        self._wake.close()
        self._thread.join()
        self._woken.close()
        self.server_close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def is_alive(self) -> bool:
        """Wakes the main loop, and waits for its answer."""
        asking = self._inbox.knock()
        with self._lock:
            if self._stopped:
                return True  # it is just ending
            self._asking.add(asking)
        try:
            return asking.wait(self.answer_timeout)
        finally:
            with self._lock:
                self._asking.discard(asking)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self.socket, selectors.EVENT_READ)
            while not self._stopped:
                if any(key.fileobj is self.socket for key, _ in selector.select()):
                    self.handle_request()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The connection stays where it is, and would wake us again at once.
                log.warning("health endpoint: %s; it answers again when there are fewer", error.strerror)
                end = select.poll()
                end.register(self._woken, select.POLLIN)
                end.poll(_TOO_MANY_FILES * 1000)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_late = self._stopped
            self._connections.add(request)
        if is_late:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("health endpoint: a request of %s failed", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Health
    timeout = _CLIENT_TIMEOUT

    def do_GET(self) -> None:
        if self.path.split("?")[0] == "/metrics":
            self._answer(*_metrics(self.server.group))
            return
        alive = self.server.is_alive()
        body = json.dumps({"alive": alive, **facts(self.server.group)})
        self._answer(200 if alive else 503, "application/json", body.encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("health endpoint: " + format, *args)


def facts(group: Group) -> dict[str, Any]:
    """What is told of the workers.

    Args:
        group: the workers.
    """
    now, counts = group.copy(), group.counts
    return {
        "state": now.state.value,
        "role": now.spec.role,
        "group_rank": now.group_rank,
        "ranks": {str(worker.global_rank): worker.id for worker in now.workers if worker.global_rank >= 0},
        "restarts": counts.restarts,
        "remaining_restarts": group.remaining_restarts,
        "rank_failures": counts.failures,
        "rank_replacements": counts.replacements,
    }


@contextlib.contextmanager
def health(group: Group, inbox: Inbox) -> Iterator[Health | None]:
    """Answers for a while, if the environment says at which port.

    Args:
        group: what is told of.
        inbox: wakes the main loop.

    Returns:
        A context: what answers; None if nothing does, also where another program has the port: on a host
        with several agents all find the same variable, and one of them answers.

    Raises:
        ValueError: a variable is wrong, or the port is not allowed; says which.
    """
    port = os.environ.get(TORCHELASTIC_HEALTH_CHECK_PORT)
    if port is None:
        yield None
        return
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{TORCHELASTIC_HEALTH_CHECK_PORT}={port}: use a port's number")
    try:
        server = Health(int(port), _timeout(), group, inbox)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            log.warning(
                "%s=%s: another program has this port: this agent answers no health checks; give each agent "
                "of a host a port of its own",
                TORCHELASTIC_HEALTH_CHECK_PORT,
                port,
            )
            yield None
            return
        words = f"{TORCHELASTIC_HEALTH_CHECK_PORT}={port}: {error.strerror}; choose another port"
        raise ValueError(words) from error
    with server:
        log.info("the health endpoint is at port %d", server.port)
        yield server


def _timeout() -> float:
    value = os.environ.get(TIMEOUT_ENV, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"{TIMEOUT_ENV}={value}: use a number of seconds")
    return seconds


# For Prometheus --------------------------------------------------------------------------------------------


class _Collector:
    def __init__(self, group: Group) -> None:
        self._group = group

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts, role = self._group.counts, self._group.spec.role
        for name, words, value in (
            ("rank_failures", "Rank processes that failed", counts.failures),
            ("rank_replacements", "Rank processes started again alone", counts.replacements),
            ("group_restarts", "Restarts of all ranks because some had failed", counts.restarts),
            ("rounds", "Starts of all ranks", counts.rounds),
        ):
            counter = CounterMetricFamily(f"ft_wrapper_{name}", words, labels=["role"])
            counter.add_metric([role], value)
            yield counter
        remaining = GaugeMetricFamily(
            "ft_wrapper_workers_remaining_restarts", "Restarts of all ranks that are left", labels=["role"]
        )
        remaining.add_metric([role], self._group.remaining_restarts)
        yield remaining
        state = GaugeMetricFamily(
            "ft_wrapper_workers_state", "1 for the state of the ranks", labels=["role", "state"]
        )
        state.add_metric([role, self._group.state.name.lower()], 1)
        yield state


def _metrics(group: Group) -> tuple[int, str, bytes]:
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    except ImportError:
        return 404, "text/plain", b"install ft-wrapper[prometheus] for metrics\n"
    registry = CollectorRegistry()
    registry.register(_Collector(group))
    return 200, CONTENT_TYPE_LATEST, generate_latest(registry)
