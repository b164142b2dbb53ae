"""Whether the agent's main loop is alive, by HTTP; and torch's watchdog, for its workers.

With ``TORCHELASTIC_HEALTH_CHECK_PORT`` set, a GET of any path is answered 200 if the loop is, and 503 if it
is not, with a few facts as JSON. The loop sleeps while nothing happens, so it is woken and asked to answer,
within ``TORCHELASTIC_HEALTH_CHECK_TIMEOUT`` seconds (60). ``/metrics`` is for Prometheus. A POST of
``/drain?within=SECONDS`` from this host asks that this node leave the job in order, before it is taken away.

With ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` the agent has a `FileTimerServer`, and its workers find the named
pipe in ``TORCHELASTIC_TIMER_FILE``. One that overruns a ``timer.expires(…)`` of
``torch.distributed.elastic.timer`` is killed, has failed, and is treated like any other that has.
"""

import contextlib
import errno
import ipaddress
import json
import logging
import math
import os
import socket
import socketserver
import tempfile
import threading
import urllib.parse
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from torch.distributed.elastic.agent.server import local_elastic_agent as theirs
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerRequest, FileTimerServer

from .group import Group
from .nodes import CannotStart
from .signals import Inbox, News, What

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

TIMEOUT_ENV = "TORCHELASTIC_HEALTH_CHECK_TIMEOUT"
#: Seconds; as in torch's agent. The loop may be busy ending ranks for more than ten.
DEFAULT_TIMEOUT = 60.0
#: Seconds that a notice gives, if it does not say. Clouds give 30 and more.
NOTICE = 30.0
_CLIENT_TIMEOUT = 10.0  # seconds for which a client may keep its connection without a word
_TOO_MANY_FILES = 1.0  # seconds until another try
_NEVER = 3600.0  # seconds between two looks whether to end: `Health.__exit__` wakes the thread
_TIMERS_INTERVAL = 0.1  # seconds between two looks at the timers; as in torch's agent
_END_TIMEOUT = 5.0


class Health(socketserver.ThreadingMixIn, WSGIServer):
    """Answers in a thread for each request, and waits for connections in one of its own. A context manager.

    Args:
        port: where; 0 for a free one.
        timeout: seconds within which the loop has to answer.
        group: the workers.
        inbox: which wakes the loop.

    Raises:
        OSError: the port is taken, or not allowed.
    """

    request_queue_size = 32

    def __init__(self, port: int, timeout: float, group: Group, inbox: Inbox) -> None:
        super().__init__(("", port), _Handler)
        self.set_app(application(group, inbox, timeout))
        self._inbox = inbox
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(_NEVER,), name="ft_wrapper-health")

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # http.server's looks this machine's name up, too
        self.server_name, self.server_port = "", int(self.server_address[1])
        self.setup_environ()

    def __enter__(self) -> "Health":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._inbox.unattended():  # those that ask whether the loop is alive get their answer
            self._ending.set()
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which does not poll
            self.shutdown()
            self._thread.join()
            with self._lock:
                for connection in self._connections:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)
            self.server_close()  # waits for the threads of all requests

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The connection stays where it is, and would wake us again at once.
                log.warning("health endpoint: %s; it answers again when there are fewer", error.strerror)
                self._ending.wait(_TOO_MANY_FILES)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("health endpoint: a request of %s failed", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("health endpoint: " + format, *args)


def application(group: Group, inbox: Inbox, timeout: float) -> "WSGIApplication":
    """What answers requests.

    Args:
        group: the workers.
        inbox: which wakes the loop.
        timeout: seconds within which the loop has to answer.
    """
    metrics = _metrics(group)

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return metrics(environ, start_response)
        if (environ["PATH_INFO"], environ["REQUEST_METHOD"]) == ("/drain", "POST"):
            return _drain(environ, start_response, inbox)
        alive = inbox.knock().wait(timeout)
        body = json.dumps({"alive": alive, **facts(group)}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response("200 OK" if alive else "503 Service Unavailable", headers)
        return [body]

    return answer


def _drain(environ: "WSGIEnvironment", start_response: "StartResponse", inbox: Inbox) -> Iterable[bytes]:
    """Passes a notice on to the loop, which asks the other nodes."""
    peer = ipaddress.ip_address(environ["REMOTE_ADDR"].partition("%")[0])
    mapped = getattr(peer, "ipv4_mapped", None)
    (text, *_) = urllib.parse.parse_qs(environ["QUERY_STRING"]).get("within", [str(NOTICE)])
    try:
        within = float(text)
    except ValueError:
        within = math.nan
    if not (mapped or peer).is_loopback:
        status, answer = "403 Forbidden", "only from this host"
    elif not 0 <= within < math.inf:
        status, answer = "400 Bad Request", f"within={text}: use a number of seconds"
    else:
        inbox.put(inbox.term, News(What.NOTICE, "asked by HTTP", within=within))
        status, answer = "202 Accepted", "asked; the log says what comes of it"
    start_response(status, [("Content-Type", "text/plain")])
    return [f"{answer}\n".encode()]


def facts(group: Group) -> dict[str, Any]:
    """What a health check answers about the workers.

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
        group: the workers.
        inbox: wakes the main loop.

    Returns:
        A context: what answers; None if nothing does, also where another program has the port: on a host
        with several agents all find the same variable, and one of them answers.

    Raises:
        CannotStart: a variable is wrong, or the port is not allowed; says which.
    """
    port = os.environ.get(theirs.TORCHELASTIC_HEALTH_CHECK_PORT)
    if port is None:
        yield None
        return
    if not port.isdecimal() or int(port) > 65535:
        raise CannotStart(f"{theirs.TORCHELASTIC_HEALTH_CHECK_PORT}={port}: use a port's number")
    try:
        server = Health(int(port), _timeout(), group, inbox)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            log.warning(
                "%s=%s: another program has this port: this agent answers no health checks; give each agent "
                "of a host a port of its own",
                theirs.TORCHELASTIC_HEALTH_CHECK_PORT,
                port,
            )
            yield None
            return
        words = f"{theirs.TORCHELASTIC_HEALTH_CHECK_PORT}={port}: {error.strerror}; choose another port"
        raise CannotStart(words) from error
    with server:
        log.info("the health endpoint is at port %d", server.server_port)
        yield server


def _timeout() -> float:
    value = os.environ.get(TIMEOUT_ENV, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise CannotStart(f"{TIMEOUT_ENV}={value}: use a number of seconds")
    return seconds


# For Prometheus --------------------------------------------------------------------------------------------


class _Collector:
    def __init__(self, group: Group) -> None:
        self._group = group

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts, role = self._group.counts, self._group.spec.role
        state, remaining = self._group.state.name.lower(), self._group.remaining_restarts
        for family, name, words, value, more in (
            (CounterMetricFamily, "rank_failures", "Rank processes that failed", counts.failures, {}),
            (CounterMetricFamily, "rank_replacements", "Ranks started again alone", counts.replacements, {}),
            (CounterMetricFamily, "group_restarts", "Restarts of all, as some failed", counts.restarts, {}),
            (CounterMetricFamily, "rounds", "Starts of all ranks", counts.rounds, {}),
            (GaugeMetricFamily, "workers_remaining_restarts", "Restarts of all that are left", remaining, {}),
            (GaugeMetricFamily, "workers_state", "1 for the state of the ranks", 1, {"state": state}),
        ):
            metric = family(f"ft_wrapper_{name}", words, labels=["role", *more])
            metric.add_metric([role, *more.values()], value)
            yield metric


def _metrics(group: Group) -> "WSGIApplication":
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError:
        return _without_metrics
    registry = CollectorRegistry()
    registry.register(_Collector(group))
    return make_wsgi_app(registry)


def _without_metrics(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
    start_response("404 Not Found", [("Content-Type", "text/plain")])
    return [b"install ft-wrapper[prometheus] for metrics\n"]


# For workers -----------------------------------------------------------------------------------------------


class _Server(FileTimerServer):
    """Torch's, but for two things: it spares the agent, and it can be stopped before its first use."""

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        if worker_pid == os.getpid():
            return True  # torch's ends its own process, too, as its agents cannot replace a single worker
        log.warning("process %d has overrun a timer: it is sent signal %d", worker_pid, signal)
        reaped: bool = super()._reap_worker(worker_pid, signal)
        return reaped

    def stop(self) -> None:
        thread: threading.Thread | None = self._watchdog_thread
        self._stop_signaled = True
        with contextlib.suppress(OSError):
            # Its thread may wait for the first worker to open the pipe, or for a line.
            pipe = os.open(self._file_path, os.O_RDWR | os.O_NONBLOCK)
            try:
                nothing = FileTimerRequest(worker_pid=0, scope_id="", expiration_time=-1)
                os.write(pipe, f"{nothing.to_json()}\n".encode())
                if thread is not None:
                    thread.join(_END_TIMEOUT)
            finally:
                os.close(pipe)
        super().stop()


@contextlib.contextmanager
def watchdog(run_id: str) -> Iterator[str]:
    """Serves the workers' timers for a while, if the environment asks for that.

    Args:
        run_id: the job.

    Returns:
        A context: the named pipe; empty if there is no watchdog.

    Raises:
        OSError: the pipe cannot be made.
    """
    if os.environ.get(theirs.TORCHELASTIC_ENABLE_FILE_TIMER) != "1":
        yield ""
        return
    path = os.environ.get(theirs.TORCHELASTIC_TIMER_FILE) or os.path.join(
        tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}"
    )
    server = _Server(path, run_id, max_interval=_TIMERS_INTERVAL, daemon=True)
    server.start()
    try:
        yield path
    finally:
        server.stop()
