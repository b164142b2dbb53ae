"""Whether the agent's main loop is alive, by HTTP.

With ``TORCHELASTIC_HEALTH_CHECK_PORT`` set, a GET of any path is answered 200 if the loop is, and 503 if it
is not, with a few facts as JSON. Only this host reaches a bare port. The loop sleeps while nothing happens,
so it is woken and asked to answer, within ``TORCHELASTIC_HEALTH_CHECK_TIMEOUT`` seconds (60). ``/metrics`` is
for Prometheus (`metrics`). A POST of ``/drain?within=SECONDS`` from this host asks this node to drain before
it is lost; one of ``/notice?within=SECONDS`` asks all ranks for a checkpoint.
"""

import errno
import io
import ipaddress
import json
import logging
import math
import os
import socket
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import connection
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from torch.distributed.elastic.agent.server import local_elastic_agent as theirs

from ..store.address import host_port, loopback, split_host_port
from .group import Group
from .metrics import metrics
from .nodes import CannotStart, Inbox, Nodes
from .rounds import News, What

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

ADDRESS_ENV = theirs.TORCHELASTIC_HEALTH_CHECK_PORT
TIMEOUT_ENV = "TORCHELASTIC_HEALTH_CHECK_TIMEOUT"
#: Seconds; as in torch's agent. The loop may be busy ending ranks for more than ten.
DEFAULT_TIMEOUT = 60.0
#: What a POST asks for, by its path.
REQUESTS = {"/drain": What.LEAVE, "/notice": What.CHECKPOINT}
#: Seconds that a request gives, if it does not say. Clouds give 30 and more.
NOTICE = 30.0
_CLIENT_TIMEOUT = 5.0  # seconds in which a client has to send its request, and to take the answer
_MOST_CONNECTIONS = 32  # at once; further ones are closed
_LONGEST_REQUEST = 65536  # bytes
_NEVER = 3600.0  # seconds between two looks whether to end: `Health.__exit__` wakes the thread


class Health(socketserver.ThreadingMixIn, WSGIServer):
    """Answers each request in a thread, and waits for connections in another. A context manager.

    Args:
        host: a name or address of this host, where it listens; the loopback if empty.
        port: where; 0 for a free one.
        answer: what answers requests, see `application`.
        inbox: wakes the loop.

    Raises:
        OSError: the port is taken, or not allowed; or the name or address is not this host's.
    """

    request_queue_size = _MOST_CONNECTIONS
    daemon_threads = True  # the end waits for no client

    def __init__(self, host: str, port: int, answer: "WSGIApplication", inbox: Inbox) -> None:
        found = socket.getaddrinfo(host or loopback(), port, type=socket.SOCK_STREAM)
        self.address_family, _, _, _, address = found[0]
        super().__init__(address, _Handler)  # type: ignore[arg-type]
        self.set_app(answer)
        self._inbox = inbox
        self._connections: set[socket.socket] = set()
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
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which does not poll
            self.shutdown()
            self._thread.join()
            self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        self._connections.add(request)
        return len(self._connections) <= _MOST_CONNECTIONS

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("health endpoint: a request of %s failed", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT

    def handle(self) -> None:
        """Reads the whole request first: a client that sends it byte by byte gets no more time."""
        request, deadline = b"", time.monotonic() + self.timeout
        while b"\n\n" not in request.replace(b"\r", b""):
            ready = connection.wait([self.connection], max(0.0, deadline - time.monotonic()))
            data = self.connection.recv(_LONGEST_REQUEST) if ready else b""
            if not data or len(request) > _LONGEST_REQUEST:
                return
            request += data
        self.rfile = io.BytesIO(request)
        super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("health endpoint: " + format, *args)


def application(group: Group, nodes: Nodes, run_id: str, timeout: float) -> "WSGIApplication":
    """What answers requests.

    Args:
        group: the workers.
        nodes: the other nodes; their inbox wakes the loop.
        run_id: of the job.
        timeout: seconds within which the loop has to answer.
    """
    for_prometheus = metrics(group, nodes, run_id)

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return for_prometheus(environ, start_response)
        request = REQUESTS.get(environ["PATH_INFO"])
        if request is not None and environ["REQUEST_METHOD"] == "POST":
            return _pass_on(request, environ, start_response, nodes.inbox)
        alive = nodes.inbox.is_attended(timeout)
        body = json.dumps({"alive": alive, **facts(group)}).encode()
        status = "200 OK" if alive else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [body]

    return answer


def _pass_on(what: What, environ: "WSGIEnvironment", start: "StartResponse", inbox: Inbox) -> Iterable[bytes]:
    """Passes a request on to the loop, which asks the other nodes."""
    peer = ipaddress.ip_address(environ["REMOTE_ADDR"].partition("%")[0])
    mapped = getattr(peer, "ipv4_mapped", None)
    (text, *_) = urllib.parse.parse_qs(environ["QUERY_STRING"]).get("within", [str(NOTICE)])
    within = _seconds(text)
    if not (mapped or peer).is_loopback:
        status, answer = "403 Forbidden", "only from this host"
    elif not 0 <= within < math.inf:
        status, answer = "400 Bad Request", f"within={text}: use a number of seconds"
    else:
        inbox.put(inbox.term, News(what, "asked by HTTP", within=within))
        status, answer = "202 Accepted", "asked; the log says what comes of it"
    start(status, [("Content-Type", "text/plain")])
    return [f"{answer}\n".encode()]


def facts(group: Group) -> dict[str, Any]:
    """What a health check answers about the workers.

    Args:
        group: the workers.
    """
    where, counts, pids = group.round, group.counts, group.pids
    return {
        "state": group.state.value,
        "role": group.role,
        "group_rank": where and where.group_rank,
        "ranks": {str(where.rank(rank)): pids.get(rank) for rank in range(group.nproc)} if where else {},
        "restarts": counts.restarts,
        "remaining_restarts": group.remaining_restarts,
        "rank_failures": counts.failures,
        "rank_replacements": counts.replacements,
    }


def health(group: Group, nodes: Nodes, run_id: str) -> AbstractContextManager[Health | None]:
    """Answers within the context, if the environment says where.

    Args:
        group: the workers.
        nodes: the other nodes; their inbox wakes the main loop.
        run_id: of the job.

    Returns:
        A context: the server; None if there is none, or if another program has the port: several agents on a
        host find the same variable, and one of them answers.

    Raises:
        CannotStart: a variable is wrong, or the port is not allowed; says which.
    """
    where = os.environ.get(ADDRESS_ENV)
    if where is None:
        return nullcontext()
    host, port = _address(where)
    answer = application(group, nodes, run_id, _timeout())
    try:
        server = Health(host, port, answer, nodes.inbox)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            words = "another program has this port: this agent answers no health checks; give each its own"
            log.warning("%s=%s: %s", ADDRESS_ENV, where, words)
            return nullcontext()
        way_out = "choose a name or address of this host, and a port that is allowed"
        raise CannotStart(f"{ADDRESS_ENV}={where}: {error.strerror}; {way_out}") from error
    log.info("the health endpoint is at %s", host_port(host or loopback(), server.server_port))
    return server


def _address(where: str) -> tuple[str, int]:
    """Host and port; without a host it is empty."""
    host, port = split_host_port(where)
    is_bare = ":" in host and not where.startswith("[")  # IPv6, whose last part may not be a port
    if not port.isdecimal() or int(port) > 65535 or is_bare:
        raise CannotStart(f"{ADDRESS_ENV}={where}: use a port's number, HOST:PORT or [IPv6]:PORT")
    return host, int(port)


def _timeout() -> float:
    value = os.environ.get(TIMEOUT_ENV, str(DEFAULT_TIMEOUT))
    seconds = _seconds(value)
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise CannotStart(f"{TIMEOUT_ENV}={value}: use a number of seconds")
    return seconds


def _seconds(text: str) -> float:
    """The number in a text; NaN, which is within no limits, if there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
