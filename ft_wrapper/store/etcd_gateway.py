"""A client of etcd's v3 JSON gateway: HTTP requests to whichever member answers.

HTTP rather than gRPC because rank processes fork: a gRPC channel does not survive that, while a connection
here is made by the process that uses it. Reads are linearizable, always.

A request whose answer was lost may have been carried out, and may be carried out a moment later still, after
its repetition. So whoever changes something hands in a transaction whose comparisons make that harmless.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import logging
import os
import random
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import tenacity

from ..exception import StoreError, StoreUnavailable
from .etcd_messages import (
    Branch,
    Compare,
    Delete,
    Event,
    KeyValue,
    Operation,
    Put,
    Range,
    Transaction,
    Watched,
    operation_json,
    parse_answer,
    parse_answers,
    parse_key_value,
    parse_revision,
    transaction_json,
    watch_json,
)

try:
    import urllib3
except ImportError as error:
    raise ImportError('etcd needs urllib3: pip install "ft-wrapper[etcd]"') from error

log = logging.getLogger(__name__)

MOST_OPERATIONS = 128
"""The most operations that etcd takes in a transaction, by default."""
LARGEST_REQUEST = 1_500_000
"""The most bytes that etcd takes in a request, about, by default."""

_FIRST_TRY = 0.5  # seconds for one try; proposals in flight at a change of leader are lost silently
_LONGEST_TRY = 5.0  # where every member is that slow
_SHORTEST_TRY = 0.05
_CONNECTIONS = 8  # kept open to a member for the threads of a process; more are made and closed again
_JSON = {"Content-Type": "application/json"}

# gRPC's codes, as the gateway gives them.
_NOT_FOUND, _UNAUTHENTICATED = 5, 16
_PASSING = {1, 2, 4, 10, 14}  # canceled, unknown, deadline exceeded, aborted, unavailable
_LOGIN_AGAIN = ("invalid auth token", "revision of auth store is old", "invalid auth", "user name is empty")

# A host that is cut off sends nothing, and a watch that is silent is what one hopes for.
_SOCKET_OPTIONS: list[tuple[int, int, int | bytes]] = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


class EtcdRefused(StoreError):
    """etcd answered that it will not. The message says what, and why.

    Attributes:
        code: gRPC's number of the reason.
        reason: etcd's words.
    """

    def __init__(self, message: str, code: int, reason: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    @property
    def is_too_large(self) -> bool:
        """Whether the request was too large, for etcd or for what it is made of."""
        return "too large" in self.reason or "larger than max" in self.reason


class EtcdCompacted(StoreError):
    """What was asked for lies before etcd's last compaction: read again, and go on from there.

    Attributes:
        revision: the oldest revision that is kept.
    """

    def __init__(self, message: str, revision: int) -> None:
        super().__init__(message)
        self.revision = revision


class _NoAnswer(Exception):
    """A member did not answer, or is not able to right now: another try may do better."""


@dataclasses.dataclass(frozen=True)
class _Endpoint:
    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class EtcdGateway:
    """A client of an etcd cluster, for all threads of a process, and of its children after a fork.

    Args:
        endpoints: the members: ``host:port,host:port``, or a list of these; with or without a scheme.
        user: who to log in as; nobody when None.
        password: the user's.
        ca: path of the certificates of those who may sign the members', PEM; makes it TLS.
        cert: path of a certificate to show, PEM; makes it TLS.
        key: path of its key, PEM.
        timeout: seconds for which a request is tried again before it fails.

    Raises:
        ValueError: an argument cannot be right; no network is touched.
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
        tls = ca is not None or cert is not None
        self._endpoints = _parse(endpoints, tls)
        self._tls: dict[str, Any] = {
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": ca,
            "cert_file": cert,
            "key_file": key,
        }
        if any(endpoint.tls for endpoint in self._endpoints):
            _check_files(ca, cert, key)
        self.timeout = timeout
        self._user, self._password = user, password
        self._token: str | None = None
        self._current = 0
        self._pid = os.getpid()
        self._pools: dict[_Endpoint, urllib3.HTTPConnectionPool] = {}
        self._inherited: list[object] = []
        self._watches: set[Watch] = set()

    def __repr__(self) -> str:
        return f"etcd at {','.join(map(str, self._endpoints))}"

    def close(self) -> None:
        """Closes all connections of this process. Another request opens new ones."""
        if self._pid == os.getpid():
            pools, self._pools = self._pools, {}
            for pool in pools.values():
                pool.close()

    # Keys ----------------------------------------------------------------------------------------------

    def range(self, what: Range, timeout: float | None = None) -> tuple[KeyValue, ...]:
        """Reads keys.

        Args:
            what: which ones.
            timeout: seconds for which it is tried again; the client's when None.

        Raises:
            EtcdCompacted: it asks for a revision that is not kept.
            StoreError: it failed; names endpoints and operation.
        """
        reply, _ = self._call("range", "kv/range", operation_json(what)["request_range"], timeout)
        return parse_answer(reply).keys

    def put(self, what: Put, timeout: float | None = None) -> int:
        """Writes a key; returns the store's revision by it. Arguments and errors as for `range`.

        A repetition after a lost answer may come after somebody else's write of the same key.
        """
        reply, _ = self._call("put", "kv/put", operation_json(what)["request_put"], timeout)
        return parse_revision(reply)

    def delete(self, what: Delete, timeout: float | None = None) -> int:
        """Deletes keys; returns how many. Arguments and errors as for `range`; repetitions as for `put`."""
        reply, _ = self._call(
            "delete", "kv/deleterange", operation_json(what)["request_delete_range"], timeout
        )
        return int(reply.get("deleted", 0))

    def transaction(
        self,
        compare: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        what: str = "transaction",
        timeout: float | None = None,
    ) -> Transaction:
        """Does some operations if all comparisons hold, and others if not; all at once.

        Args:
            compare: what must hold.
            success: what to do then.
            failure: what to do otherwise.
            what: what to call it in messages.
            timeout: seconds for which it is tried again; the client's when None.

        Raises:
            StoreUnavailable: nobody answered in time. It may have been carried out.
            StoreError: it failed; names endpoints and operation.
        """
        body = transaction_json(Branch(tuple(compare), tuple(success), tuple(failure)))
        reply, tries = self._call(what, "kv/txn", body, timeout)
        return Transaction(
            bool(reply.get("succeeded")), parse_revision(reply), parse_answers(reply), tries > 1
        )

    # Leases --------------------------------------------------------------------------------------------

    def grant(self, ttl: int, timeout: float | None = None) -> int:
        """Makes a lease; returns its id. After a lost answer one more stays behind until it runs out.

        Args:
            ttl: seconds for which it lasts unless it is kept alive; etcd takes no less than it can keep.
            timeout: seconds for which it is tried again; the client's when None.
        """
        reply, _ = self._call("lease grant", "lease/grant", {"TTL": str(ttl)}, timeout)
        return int(reply["ID"])

    def keep_alive(self, lease: int, timeout: float | None = None) -> int:
        """Lets a lease last its whole time again; returns the seconds, 0 if there is no such lease."""
        reply, _ = self._call("lease keep alive", "lease/keepalive", {"ID": str(lease)}, timeout)
        return int(reply.get("result", {}).get("TTL", 0))

    def time_to_live(self, lease: int, timeout: float | None = None) -> int:
        """How many seconds a lease still lasts; -1 if there is no such lease."""
        reply, _ = self._call("lease time to live", "lease/timetolive", {"ID": str(lease)}, timeout)
        return int(reply.get("TTL", 0))

    def revoke(self, lease: int, timeout: float | None = None) -> bool:
        """Ends a lease, and deletes the keys that go with it; tells whether there was one."""
        try:
            self._call("lease revoke", "lease/revoke", {"ID": str(lease)}, timeout)
        except EtcdRefused as error:
            if error.code != _NOT_FOUND:
                raise
            return False
        return True

    # Watches -------------------------------------------------------------------------------------------

    def watch(self, watched: Watched) -> Watch:
        """Follows the writes of a span; see `Watch`."""
        return Watch(self, watched)

    # Members -------------------------------------------------------------------------------------------

    def prefer_leader(self) -> None:
        """Asks the leader from now on, if one says that it is: others pass on to it what they are asked."""
        if len(self._endpoints) == 1:
            return
        before = self._current
        for number in range(len(self._endpoints)):
            self._current = number
            try:
                token = self._logged_in(_FIRST_TRY)
                status = self._send("status", "maintenance/status", b"{}", _FIRST_TRY, token)
            except (_NoAnswer, StoreError) as error:
                log.debug("%r: whether %s leads is not known: %s", self, self._endpoints[number], error)
                continue
            if status.get("leader") == status.get("header", {}).get("member_id"):
                self._current = number
                return
        self._current = before

    # Anything else -------------------------------------------------------------------------------------

    def call(self, path: str, body: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Sends a request that this client has no name for: of maintenance, of users and roles.

        Args:
            path: behind ``/v3/``.
            body: the request as JSON.
            timeout: seconds for which it is tried again; the client's when None.

        Returns:
            The answer as JSON.

        Raises:
            StoreError: it failed; names endpoints and operation.
        """
        return self._call(path, path, body, timeout)[0]

    # Steps ---------------------------------------------------------------------------------------------

    def _call(
        self, what: str, path: str, body: dict[str, Any], timeout: float | None
    ) -> tuple[dict[str, Any], int]:
        """Sends a request until a member answers; returns the answer, and how often it was sent."""
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        data = json.dumps(body, separators=(",", ":")).encode()
        tries = 0

        def attempt() -> dict[str, Any]:
            nonlocal tries
            tries += 1
            patience = min(self._try_lasts(tries), max(_SHORTEST_TRY, deadline - time.monotonic()))
            return self._try(what, path, data, patience)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_NoAnswer),
            stop=tenacity.stop_after_delay(seconds),
            wait=lambda state: self._pause_after(state.attempt_number),
            before_sleep=lambda state: log.debug("%r: %s: %s; trying again", self, what, _last(state)),
        )
        try:
            reply = retrying(attempt)
        except tenacity.RetryError as failure:
            raise StoreUnavailable(
                f"{self!r}: {what} got no answer for {seconds:g} s: {failure.last_attempt.exception()}; see "
                "whether its members run, can be reached, and have a majority"
            ) from None
        return reply, tries

    def _try_lasts(self, tries: int) -> float:
        """Seconds for a try: more with every round through the members."""
        return min(_LONGEST_TRY, _FIRST_TRY * 2.0 ** min(10, (tries - 1) // len(self._endpoints)))

    def _pause_after(self, failures: int) -> float:
        """Seconds before another try: none until all members have been asked."""
        rounds = failures // len(self._endpoints)
        return 0.0 if rounds == 0 else random.uniform(0.5, 1.0) * min(0.5, 0.01 * 2.0 ** min(10, rounds))

    def _try(self, what: str, path: str, data: bytes, patience: float) -> dict[str, Any]:
        token = self._logged_in(patience)
        try:
            return self._send(what, path, data, patience, token)
        except EtcdRefused as error:
            if self._user is None or not _wants_login(error):
                raise
            # The token ran out, or the member was started again. Nothing was carried out.
            if self._token == token:
                self._token = None
            return self._send(what, path, data, patience, self._logged_in(patience))

    def _send(self, what: str, path: str, data: bytes, patience: float, token: str | None) -> dict[str, Any]:
        number = self._current
        endpoint = self._endpoints[number]
        try:
            response = self._pool(endpoint).urlopen(
                "POST",
                f"/v3/{path}",
                body=data,
                headers=_headers(token),
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=patience, read=patience),
            )
            return self._read(what, endpoint, response.status, response.data)
        except urllib3.exceptions.HTTPError as error:
            self._move_on(number)
            raise self._failure(what, endpoint, error) from None
        except _NoAnswer:
            self._move_on(number)
            raise

    def _move_on(self, number: int) -> None:
        """Another member is asked from now on; watches leave this one, which may be stopped, too."""
        if number == self._current and len(self._endpoints) > 1:
            self._current = (number + 1) % len(self._endpoints)
            for watch in list(self._watches):
                watch.leave(self._endpoints[number])

    def _read(self, what: str, endpoint: _Endpoint, status: int, data: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(data)
        except ValueError:
            reply = None
        if status == 200 and isinstance(reply, dict):
            inner = reply.get("error")
            if isinstance(inner, dict):  # of a stream
                raise self._refusal(what, endpoint, int(inner.get("grpc_code", 2)), str(inner.get("message")))
            return reply
        if isinstance(reply, dict) and "code" in reply:
            raise self._refusal(what, endpoint, int(reply["code"]), str(reply.get("error")))
        if status >= 500:
            raise _NoAnswer(f"{endpoint} answers HTTP {status}")
        raise StoreError(
            f"{endpoint} does not answer {what} as etcd's v3 gateway does, but HTTP {status} "
            f"{data[:100]!r}; see whether it is an etcd of version 3.4 or later, and whether it wants https"
        )

    def _refusal(self, what: str, endpoint: _Endpoint, code: int, reason: str) -> Exception:
        if "compacted" in reason:
            return EtcdCompacted(f"{endpoint}: {what}: {reason}", 0)
        if "too many requests" in reason or (code in _PASSING and "invalid" not in reason):
            return _NoAnswer(f"{endpoint}: {reason}")
        hint = ""
        if "too large" in reason:
            hint = f"; etcd takes no more than about {LARGEST_REQUEST} bytes a request"
        elif "space exceeded" in reason:
            hint = "; compact and defragment it, and disarm its alarm"
        elif "user name is empty" in reason and self._user is None:
            hint = "; it wants a user and a password"
        return EtcdRefused(f"{endpoint} refuses {what}: {reason}{hint}", code, reason)

    def _failure(self, what: str, endpoint: _Endpoint, error: Exception) -> Exception:
        """What an error of the HTTP library means."""
        cause: BaseException | None = error
        hint = ""
        while cause is not None:
            # Who is spoken to with TLS and has none, or the other way round, hangs up; so does who is killed.
            if isinstance(cause, ssl.SSLEOFError | ConnectionResetError):
                hint = f"; see whether it {'speaks TLS' if endpoint.tls else 'wants https'}"
            if isinstance(cause, ssl.SSLError) and _is_final(cause):
                return StoreError(
                    f"{endpoint}: {what}: no TLS connection: {cause.reason or cause}; see whether the "
                    "certificates on both sides are right, and whether it speaks TLS at all"
                )
            if isinstance(cause, http.client.BadStatusLine) and not isinstance(
                cause, http.client.RemoteDisconnected
            ):
                return StoreError(f"{endpoint} does not speak HTTP: it is no etcd, or one that wants https")
            following = cause.__cause__ or cause.__context__
            cause = following or next((a for a in cause.args if isinstance(a, BaseException)), None)
        return _NoAnswer(f"{endpoint}: {_plain(error)}{hint}")

    def _logged_in(self, patience: float) -> str | None:
        if self._user is None or self._token is not None:
            return self._token
        body = json.dumps({"name": self._user, "password": self._password}).encode()
        try:
            reply = self._send("login", "auth/authenticate", body, patience, None)
        except EtcdRefused as error:
            if "not enabled" in error.reason:
                return None
            raise
        self._token = str(reply["token"])
        return self._token

    def _pool(self, endpoint: _Endpoint) -> urllib3.HTTPConnectionPool:
        if self._pid != os.getpid():
            # Connections of the process that this one was forked from. They are kept, since closing one may
            # tell the other side.
            self._inherited.append(self._pools)
            self._pools, self._watches, self._pid = {}, set(), os.getpid()
        pool = self._pools.get(endpoint)
        if pool is None:
            kind = urllib3.HTTPSConnectionPool if endpoint.tls else urllib3.HTTPConnectionPool
            pool = kind(
                endpoint.host,
                endpoint.port,
                maxsize=_CONNECTIONS,
                socket_options=_SOCKET_OPTIONS,
                **(self._tls if endpoint.tls else {}),
            )
            # Two threads may come at once: one pool is as good as the other.
            pool = self._pools.setdefault(endpoint, pool)
        return pool

    def _connection(self, endpoint: _Endpoint, patience: float) -> urllib3.connection.HTTPConnection:
        """A connection outside the pools."""
        if not endpoint.tls:
            return urllib3.connection.HTTPConnection(
                endpoint.host, endpoint.port, timeout=patience, socket_options=_SOCKET_OPTIONS
            )
        return urllib3.connection.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=patience, socket_options=_SOCKET_OPTIONS, **self._tls
        )


class Watch:
    """Writes of a span, as they come, each once and in order.

    It goes on with another member when one is lost, and with the revision after the last one seen. A member
    that has lost the majority says so and is left. While nothing is written there is no traffic.

    Args:
        gateway: the client.
        watched: what to watch, and from which revision on.
    """

    def __init__(self, gateway: EtcdGateway, watched: Watched) -> None:
        self._gateway = gateway
        self._watched = watched
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._endpoint: _Endpoint | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """Ends the iteration, from any thread."""
        with self._lock:
            self._closed.set()
            self._shut()

    def leave(self, endpoint: object) -> None:
        """Goes on with another member, if this is the one that it is with; from any thread."""
        with self._lock:
            if self._endpoint == endpoint:
                self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Under TLS, the plain one: that of ssl is not for other threads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def events(self) -> Generator[Event, None, None]:
        """Yields events until it is closed.

        Raises:
            EtcdCompacted: writes since the last event are not kept any more: read, and watch anew.
            StoreError: no member will ever serve it: wrong password, no such right, no etcd.
        """
        gateway, failures = self._gateway, 0
        gateway._watches.add(self)
        try:
            while not self._closed.is_set():
                try:
                    for event in self._one_stream(gateway._try_lasts(failures + 1)):
                        failures = 0
                        yield event
                except _NoAnswer as error:
                    failures += 1
                    if not self._closed.is_set():
                        log.debug("%r: watch: %s; trying again", gateway, error)
                        self._closed.wait(gateway._pause_after(failures))
        finally:
            gateway._watches.discard(self)

    def _one_stream(self, patience: float) -> Iterator[Event]:
        gateway = self._gateway
        number = gateway._current
        endpoint = gateway._endpoints[number]
        token = gateway._logged_in(patience)
        connection = gateway._connection(endpoint, patience)
        try:
            for message in self._messages(connection, endpoint, token):
                yield from self._events(message, endpoint)
            raise _NoAnswer(f"{endpoint} ended a watch")
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            gateway._move_on(number)
            raise gateway._failure("watch", endpoint, error) from None
        except _NoAnswer:
            gateway._move_on(number)
            raise
        except EtcdRefused as error:
            if gateway._user is None or not _wants_login(error):
                raise
            if gateway._token == token:
                gateway._token = None
            raise _NoAnswer(f"{endpoint}: {error.reason}") from None
        finally:
            with self._lock:
                self._socket = self._endpoint = None
                connection.close()

    def _messages(
        self, connection: urllib3.connection.HTTPConnection, endpoint: _Endpoint, token: str | None
    ) -> Iterator[dict[str, Any]]:
        connection.connect()
        with self._lock:
            if self._closed.is_set():
                return
            self._socket, self._endpoint = connection.sock, endpoint
        # One only: the gateway reads others while its answer has begun, and may lose them.
        body = json.dumps(watch_json(self._watched))
        # A member without a leader says so, rather than nothing.
        headers = {**_headers(token), "Grpc-Metadata-hasleader": "true"}
        connection.request("POST", "/v3/watch", body=body.encode(), headers=headers, preload_content=False)
        response = connection.getresponse()
        if response.status != 200:
            self._gateway._read("watch", endpoint, response.status, response.read())
        if connection.sock is not None:
            connection.sock.settimeout(None)
        buffer = b""
        for chunk in response.read_chunked(decode_content=False):
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                if line:
                    yield self._gateway._read("watch", endpoint, 200, line)

    def _events(self, message: dict[str, Any], endpoint: _Endpoint) -> Iterator[Event]:
        result = message.get("result", {})
        if result.get("canceled"):
            compacted = int(result.get("compact_revision", 0))
            if compacted:
                raise EtcdCompacted(f"{endpoint}: watch: revisions before {compacted} are gone", compacted)
            reason = str(result.get("cancel_reason", "canceled"))
            raise self._gateway._refusal("watch", endpoint, 7 if "permission" in reason else 2, reason)
        for event in result.get("events", []):
            kv = parse_key_value(event["kv"])
            deleted = event.get("type") == "DELETE"
            yield Event(kv.key, None if deleted else kv.value, kv.mod_revision)
        if result.get("events"):
            # All writes of a revision come in one message.
            last = parse_key_value(result["events"][-1]["kv"]).mod_revision
            self._watched = dataclasses.replace(self._watched, start=last + 1)


# Addresses, certificates, errors -----------------------------------------------------------------------


def _parse(endpoints: str | Sequence[str], tls: bool) -> list[_Endpoint]:
    parts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    found = [_parse_one(part.strip(), tls) for part in parts if part.strip()]
    if not found:
        raise ValueError("endpoints of etcd are empty; pass 'host:port,host:port,…'")
    return found


def _parse_one(text: str, tls: bool) -> _Endpoint:
    url = urllib.parse.urlsplit(text if "://" in text else f"{'https' if tls else 'http'}://{text}")
    if url.username is not None or url.password is not None:
        raise ValueError("an endpoint of etcd holds a password; pass user and password on their own")
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if url.scheme not in ("http", "https") or not host or port is None or url.path.strip("/"):
        raise ValueError(
            f"endpoint {text!r} of etcd must be host:port, http://host:port or https://host:port"
        )
    if tls and url.scheme == "http":
        raise ValueError(f"endpoint {text!r} of etcd is plain http, though there are certificates for TLS")
    return _Endpoint(host, port, url.scheme == "https")


def _check_files(ca: str | None, cert: str | None, key: str | None) -> None:
    context = ssl.create_default_context()
    for name, path in (("ca", ca), ("cert", cert), ("key", key)):
        if path is not None and not os.access(path, os.R_OK):
            raise ValueError(f"{name}={path!r} for etcd cannot be read")
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"ca={ca!r}, cert={cert!r}, key={key!r} for etcd do not fit: {error}") from None


def _headers(token: str | None) -> dict[str, str]:
    return _JSON if token is None else {**_JSON, "Authorization": token}


def _wants_login(error: EtcdRefused) -> bool:
    return error.code == _UNAUTHENTICATED or any(words in error.reason for words in _LOGIN_AGAIN)


def _is_final(error: ssl.SSLError) -> bool:
    """Whether it is about what the two sides show each other, so that another try does no better."""
    reason = error.reason or ""
    return isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in reason or "WRONG_VERSION" in reason


def _plain(error: Exception) -> str:
    """An error in words, without the object that the HTTP library puts in front."""
    return str(error).rpartition(">: ")[2] or repr(error)


def _last(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None
