"""Requests to an etcd cluster through its JSON gateway, with members, retries, login, TLS; watches of keys.

HTTP rather than gRPC because ranks fork: a gRPC channel does not survive a fork, while here each process
makes its own connections. All reads are linearizable.

A request whose answer was lost may have been carried out, and may still be carried out after its repetition.
So each change is a transaction whose comparisons make a repetition harmless.

There is a standing watch for notification keys, and one watch for each wait for other keys. If a watch begins
at a revision that is already past when the request arrives, etcd serves it at its next periodic look, up to
100 ms later. So one watch follows the notification keys all the time: see `StandingWatch`. Each watch has its
own connection. On a shared one the gateway may lose all requests after the first, since its HTTP server
discards unread requests when the answer begins.
"""

import contextlib
import http.client
import itertools
import json
import logging
import math
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import tenacity

from ..exception import StoreUnavailable
from . import etcd_messages as messages
from .address import Endpoint, parse_endpoints
from .bounded import in_background
from .etcd_messages import Answer, EtcdCompacted, EtcdRefused, KeyValue, NoAnswer, Range, Transaction

try:
    import urllib3
except ImportError as error:
    raise ImportError('etcd needs urllib3: pip install "ft-wrapper[etcd]"') from error

log = logging.getLogger(__name__)

_FIRST_TRY = 0.5  # seconds for the first attempt; a change of leader silently loses proposals in flight
_LONGEST_TRY = 5.0  # if every member is that slow
_SHORTEST_TRY = 0.05
_CONNECTIONS = 8  # kept open to a member for the threads of a process; further ones are closed after use

#: Seconds until the next look; limits the delay of a write whose notification was missed.
LOOK_AGAIN = 10.0

_LOST = (NoAnswer, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError)
_CLOSED_WITHIN = 2.0  # seconds for a closed watch's thread to end

# TCP keepalive, since a host that is cut off sends nothing, but a healthy watch is silent for long, too.
_SOCKET_OPTIONS: list[tuple[int, int, int | bytes]] = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


class EtcdClient:
    """Requests to an etcd cluster, from all threads of a process, and from its children after a fork.

    Args:
        endpoints: the members: ``host:port,host:port``, or a list of ``host:port``; with or without a scheme.
        user: user to log in as; no login when None.
        password: password of the user.
        ca: path of the CA certificates that the members' certificates are checked against, PEM; turns on TLS.
        cert: path of the client's certificate, PEM; turns on TLS.
        key: path of the certificate's key, PEM.
        timeout: seconds for which a request is retried before it fails.

    Attributes:
        leaving: functions called with a member that is no longer used, since it may have stopped.

    Raises:
        ValueError: an argument is malformed. No network is used.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        user: str | None = None,
        password: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        if (user is None) != (password is None):
            raise ValueError("user and password of etcd go together: pass both or none")
        if (cert is None) != (key is None):
            raise ValueError(f"cert={cert!r} and key={key!r} go together: pass both or none")
        self._endpoints = parse_endpoints(endpoints, tls=ca is not None or cert is not None)
        self._tls: dict[str, Any] = {}
        if any(endpoint.tls for endpoint in self._endpoints):
            try:
                context = ssl.create_default_context(cafile=ca)
                if cert is not None:
                    context.load_cert_chain(cert, key)
            except OSError as error:
                files = f"ca={ca!r}, cert={cert!r}, key={key!r}"
                raise ValueError(f"{files} cannot be used for etcd: {error}") from None
            self._tls = {"ssl_context": context}
        self.timeout = timeout
        self._user, self._password = user, password
        self._token: str | None = None
        self._current = 0
        self._inherited: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._pools = urllib3.PoolManager(maxsize=_CONNECTIONS, socket_options=_SOCKET_OPTIONS, **self._tls)
        self.leaving: set[Callable[[Endpoint], None]] = set()

    def __repr__(self) -> str:
        return f"etcd at {','.join(map(str, self._endpoints))}"

    def close(self) -> None:
        """Closes all connections of this process. Another request opens new ones."""
        if self._pid == os.getpid():
            self._pools.clear()

    # Requests ------------------------------------------------------------------------------------------

    def read(self, span: Range, timeout: float | None = None) -> Sequence[KeyValue]:
        """Reads keys; see `transaction` for errors."""
        request = messages.get(span)["request_range"]
        return Answer.parse(self.request("range", "kv/range", request, timeout)).keys

    def transaction(self, transaction: Transaction, timeout: float | None = None) -> Answer:
        """Carries out a transaction.

        Args:
            transaction: the transaction.
            timeout: seconds for which it is retried; the client's when None.

        Raises:
            StoreUnavailable: no member answered in time. The transaction may have been carried out.
            StoreError: the transaction failed; names endpoints and operation.
        """
        return Answer.parse(self.request(transaction.what, "kv/txn", transaction.json, timeout))

    def grant(self, ttl: int, timeout: float | None = None) -> int:
        """Makes a lease of ``ttl`` seconds; returns its id. After a lost answer there is one more lease."""
        return int(self.request("lease grant", "lease/grant", {"TTL": str(ttl)}, timeout)["ID"])

    def keep_alive(self, lease: int, timeout: float | None = None) -> int:
        """Renews a lease; returns its seconds, 0 if there is no such lease."""
        reply = self.request("lease keep alive", "lease/keepalive", {"ID": str(lease)}, timeout)
        return int(reply.get("result", {}).get("TTL", 0))

    def revoke(self, lease: int, timeout: float | None = None) -> bool:
        """Ends a lease, and deletes its keys; returns whether it existed."""
        try:
            self.request("lease revoke", "lease/revoke", {"ID": str(lease)}, timeout)
        except EtcdRefused as error:
            if error.code != messages.NOT_FOUND:
                raise
            return False
        return True

    def request(
        self, what: str, path: str, body: dict[str, Any], timeout: float | None = None
    ) -> dict[str, Any]:
        """Sends a request until a member answers.

        Args:
            what: name of the request, for messages.
            path: path of the request after ``/v3/``.
            body: the request as JSON.
            timeout: seconds for which the request is retried; the client's when None.

        Returns:
            The answer as JSON.

        Raises:
            StoreUnavailable: no member answered in time. The request may have been carried out.
            StoreError: the request failed; names endpoints and operation.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        data = json.dumps(body, separators=(",", ":")).encode()
        tries = itertools.count(1)

        def send() -> dict[str, Any]:
            patience = max(_SHORTEST_TRY, deadline - time.monotonic())
            return self._send(what, path, data, min(patience, self.try_lasts(next(tries))))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(NoAnswer),
            stop=tenacity.stop_after_delay(seconds),
            wait=lambda state: self.pause_after(state.attempt_number),
            before_sleep=tenacity.before_sleep_log(log, logging.DEBUG),
        )
        try:
            return retrying(send)
        except tenacity.RetryError as failure:
            raise StoreUnavailable(
                f"{self!r}: {what} got no answer for {seconds:g} s: {failure.last_attempt.exception()}; "
                "check that its members run, can be reached, and have a majority"
            ) from None

    # Members -------------------------------------------------------------------------------------------

    @property
    def current(self) -> Endpoint:
        """The member that gets the next request."""
        return self._endpoints[self._current]

    def leave(self, endpoint: Endpoint) -> None:
        """Switches to the next member if the given one, which does not answer, is the current one."""
        if endpoint == self.current and len(self._endpoints) > 1:
            self._current = (self._current + 1) % len(self._endpoints)
            for listener in list(self.leaving):
                listener(endpoint)

    # One attempt, also for watches ---------------------------------------------------------------------

    def try_lasts(self, tries: int) -> float:
        """Seconds for an attempt, by its number in a row; longer with every round through the members."""
        return min(_LONGEST_TRY, _FIRST_TRY * 2.0 ** min(10, (tries - 1) // len(self._endpoints)))

    def pause_after(self, failures: int) -> float:
        """Seconds before another attempt, by the number of failures; 0 until all members have been tried."""
        rounds = failures // len(self._endpoints)
        return 0.0 if rounds == 0 else random.uniform(0.5, 1.0) * min(0.5, 0.01 * 2.0 ** min(10, rounds))

    def token(self, patience: float) -> str | None:
        """The user's token; logs in if there is none yet. None without a user.

        Args:
            patience: seconds for the login.

        Raises:
            NoAnswer: the member cannot answer now.
            StoreError: the user or the password is wrong.
        """
        if self._user is None or self._token is not None:
            return self._token
        body = json.dumps({"name": self._user, "password": self._password}).encode()
        try:
            reply = self._post("login", "auth/authenticate", body, patience, None)
        except EtcdRefused as error:
            if "not enabled" in error.reason:
                return None
            raise
        self._token = str(reply["token"])
        return self._token

    def forget(self, token: str | None) -> bool:
        """Forgets a token that etcd refused: it has expired, or was lost with a member.

        Returns:
            Whether another login may help; False without a user.
        """
        if self._user is None:
            return False
        if self._token == token:
            self._token = None
        return True

    def headers(self, token: str | None) -> dict[str, str]:
        """The headers of a request."""
        return {"Content-Type": "application/json", **({} if token is None else {"Authorization": token})}

    def connection(self, endpoint: Endpoint, patience: float) -> urllib3.connection.HTTPConnection:
        """A new connection, on which no step takes longer than ``patience`` seconds."""
        given: dict[str, Any] = {"timeout": patience, "socket_options": _SOCKET_OPTIONS}
        if endpoint.tls:
            return urllib3.connection.HTTPSConnection(endpoint.host, endpoint.port, **given, **self._tls)
        return urllib3.connection.HTTPConnection(endpoint.host, endpoint.port, **given)

    def _send(self, what: str, path: str, data: bytes, patience: float) -> dict[str, Any]:
        """One attempt, with the user's token."""
        token = self.token(patience)
        try:
            return self._post(what, path, data, patience, token)
        except EtcdRefused as error:
            if not (error.wants_login and self.forget(token)):
                raise
            return self._post(what, path, data, patience, self.token(patience))  # etcd has done nothing yet

    def _post(self, what: str, path: str, data: bytes, patience: float, token: str | None) -> dict[str, Any]:
        if self._pid != os.getpid():
            # This process was forked. The parent's connections are kept here, since closing one under TLS may
            # send a message to the other side.
            self._inherited.append(self._pools)
            self._begin()
        endpoint = self.current
        try:
            response = self._pools.urlopen(
                "POST",
                f"{'https' if endpoint.tls else 'http'}://{endpoint}/v3/{path}",
                body=data,
                headers=self.headers(token),
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=patience, read=patience),
            )
            return messages.read_answer(what, endpoint, response.status, response.data)
        except (urllib3.exceptions.HTTPError, NoAnswer) as error:
            self.leave(endpoint)
            raise messages.meaning_of(what, endpoint, error) from None


# Watches --------------------------------------------------------------------------------------------


class Watch:
    """The writes of a span as they come, each once and in order. A deletion has ``create_revision`` 0.

    When a member is lost, the watch goes on with another one, after the last revision that it has seen. It
    leaves a member that reports a lost majority. Without writes there is no traffic.

    Args:
        client: a client of etcd.
        span: the keys.
        start: the first revision to report.
    """

    def __init__(self, client: EtcdClient, span: Range, start: int) -> None:
        self._client = client
        self._span = span
        self._start = start
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._endpoint: Endpoint | None = None
        self._closed = threading.Event()
        self._deadline = math.inf
        self._denied = False  # whether the last answer denied permission

    def close(self) -> None:
        """Ends the watch, from any thread."""
        with self._lock:
            self._closed.set()
            self._shut()

    def _leave(self, endpoint: Endpoint) -> None:
        """Switches to another member, if the watch uses this one; called from any thread."""
        with self._lock:
            if self._endpoint == endpoint:
                self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # The plain socket's method also under TLS: that of ssl is not for other threads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _left(self) -> float:
        return 0.0 if self._closed.is_set() else self._deadline - time.monotonic()

    def first(self, seconds: float) -> KeyValue | None:
        """Waits for the first event, in this thread; None if there is none in time, or the watch was closed.

        Raises:
            EtcdCompacted: etcd no longer has some of the revisions.
            StoreError: no member will ever serve the watch.
        """
        self._deadline = time.monotonic() + seconds
        with contextlib.closing(self.events()) as events:
            return next(events, None)

    def events(self) -> Generator[KeyValue, None, None]:
        """Yields events until the watch is closed.

        Raises:
            EtcdCompacted: etcd no longer has all writes since the last event: read, and watch again.
            StoreError: no member will ever serve the watch: wrong password, no permission, no etcd.
        """
        client, failures = self._client, 0
        client.leaving.add(self._leave)
        try:
            while self._left() > 0:
                patience = min(client.try_lasts(failures + 1), max(self._left(), 0.05))
                try:
                    for event in self._one_stream(patience):
                        failures = 0
                        yield event
                except NoAnswer as error:
                    failures += 1
                    log.debug("%r: watch: %s", client, error)
                    self._closed.wait(min(client.pause_after(failures), self._left()))
        finally:
            client.leaving.discard(self._leave)

    def _one_stream(self, patience: float) -> Iterator[KeyValue]:
        client = self._client
        endpoint = client.current
        token = client.token(patience)
        connection = client.connection(endpoint, patience)
        try:
            for message in self._messages(connection, endpoint, token):
                yield from self._events(message, endpoint)
            raise NoAnswer(f"{endpoint} ended a watch")
        except _LOST as error:
            if self._left() > 0:  # otherwise closing the watch has ended the connection
                client.leave(endpoint)
                raise messages.meaning_of("watch", endpoint, error) from None
        except EtcdRefused as error:
            # Before 3.5.6 and 3.4.22, etcd also denies permission if it does not know the token. So only a
            # denial with a new token is final.
            denied_before, self._denied = self._denied, error.code == messages.PERMISSION_DENIED
            outdated = error.wants_login or (self._denied and not denied_before)
            if not (outdated and client.forget(token)):
                raise
            raise NoAnswer(f"{endpoint}: {error.reason}") from None
        finally:
            with self._lock:
                self._socket = self._endpoint = None
                connection.close()

    def _messages(
        self, connection: urllib3.connection.HTTPConnection, endpoint: Endpoint, token: str | None
    ) -> Iterator[dict[str, Any]]:
        connection.connect()
        line = connection.sock
        assert line is not None
        with self._lock:
            if self._closed.is_set():
                return
            self._socket, self._endpoint = line, endpoint
        request = {**self._span.json, "start_revision": str(self._start)}
        # With this header a member without a leader reports that instead of staying silent.
        headers = {**self._client.headers(token), "Grpc-Metadata-hasleader": "true"}
        body = json.dumps({"create_request": request}).encode()
        connection.request("POST", "/v3/watch", body=body, headers=headers, preload_content=False)
        response = connection.getresponse()
        if response.status != 200:
            messages.read_answer("watch", endpoint, response.status, response.read())
        left = self._left()
        line.settimeout(None if math.isinf(left) else max(left, 0.001))
        for message in response:
            if message.strip():
                yield messages.read_answer("watch", endpoint, 200, message)

    def _events(self, message: dict[str, Any], endpoint: Endpoint) -> Iterator[KeyValue]:
        result = message.get("result", {})
        if result.get("canceled"):
            kept = int(result.get("compact_revision", 0))
            reason = (
                f"compacted: {kept} is the first" if kept else str(result.get("cancel_reason", "canceled"))
            )
            code = messages.PERMISSION_DENIED if "permission" in reason else 2
            raise messages.refusal("watch", endpoint, code, reason)
        self._denied = False
        events = [KeyValue.parse(event["kv"]) for event in result.get("events", [])]
        yield from events
        if events:  # all writes of a revision come in one message
            self._start = events[-1].mod_revision + 1


class StandingWatch:
    """Follows the notification keys, for all threads of a process.

    It knows which of the keys exist, so that a waiting thread need not read them.

    Args:
        client: a client of etcd.
        keys: the keys to follow.
        present: the keys that exist.
        revision: revision at which these keys existed.
    """

    def __init__(self, client: EtcdClient, keys: Range, present: Iterable[KeyValue], revision: int) -> None:
        self._changed = threading.Condition()
        self._values = {kv.key: kv.value for kv in present}
        self.ended = False
        """Whether the watch has ended. Waiting threads then read, and use another watch."""
        self._why: Exception | None = None
        self._watch = Watch(client, keys, revision + 1)
        self._thread = in_background("a watch of etcd", self._run)

    def wait_for(self, key: bytes, seconds: float) -> bytes | None:
        """Waits for a key; returns its value, or None if the caller has to read the key to know.

        Raises:
            StoreError: no member will serve the watch.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self.ended, seconds)
            if self._why is not None:
                raise self._why
            return self._values.get(key)

    def close(self) -> None:
        """Ends the watch and its thread; waiting threads return."""
        self._watch.close()
        self._thread.join(_CLOSED_WITHIN)

    def _run(self) -> None:
        why = None
        try:
            for event in self._watch.events():
                with self._changed:
                    self._values.pop(event.key, None)
                    if event.create_revision:
                        self._values[event.key] = event.value
                        self._changed.notify_all()
        except EtcdCompacted:
            pass
        except Exception as error:  # any error, since no thread may wait forever
            why = error
        with self._changed:
            self.ended, self._why = True, why
            self._changed.notify_all()
