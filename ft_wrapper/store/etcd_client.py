"""Requests to an etcd cluster through its JSON gateway: members, retries, login, TLS.

HTTP rather than gRPC because ranks fork: a gRPC channel does not survive a fork, while here each process
makes its own connections. All reads are linearizable.

A request whose answer was lost may have been carried out, and may still be carried out after its repetition.
So each change is a transaction whose comparisons make a repetition harmless.
"""

import json
import logging
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

import tenacity

from ..exception import StoreError, StoreUnavailable
from . import etcd_messages as messages
from .address import Endpoint, parse_endpoints
from .etcd_messages import Answer, EtcdRefused, KeyValue, NoAnswer, Range, Transaction

try:
    import urllib3
except ImportError as error:
    raise ImportError('etcd needs urllib3: pip install "ft-wrapper[etcd]"') from error

log = logging.getLogger(__name__)

_FIRST_TRY = 0.5  # seconds for the first try; proposals in flight at a change of leader are lost silently
_LONGEST_TRY = 5.0  # if every member is that slow
_SHORTEST_TRY = 0.05
_CONNECTIONS = 8  # kept open to a member for the threads of a process; further ones are closed after use

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
        leaving: functions that are called with a member that is no longer used, since it may be stopped.

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

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(NoAnswer),
            stop=tenacity.stop_after_delay(seconds),
            wait=lambda state: self.pause_after(state.attempt_number),
            before_sleep=tenacity.before_sleep_log(log, logging.DEBUG),
        )
        reply = dict[str, Any]()
        try:
            for attempt in retrying:
                with attempt:
                    patience = max(_SHORTEST_TRY, deadline - time.monotonic())
                    patience = min(patience, self.try_lasts(attempt.retry_state.attempt_number))
                    reply = self._send(what, path, data, patience)
            return reply
        except tenacity.RetryError as failure:
            raise StoreUnavailable(
                f"{self!r}: {what} got no answer for {seconds:g} s: {failure.last_attempt.exception()}; see "
                "whether its members run, can be reached, and have a majority"
            ) from None

    # Members -------------------------------------------------------------------------------------------

    @property
    def current(self) -> Endpoint:
        """The member that gets the next request."""
        return self._endpoints[self._current]

    def leave(self, endpoint: Endpoint) -> None:
        """Goes on with the next member, if the given one, which does not answer, is the current one."""
        if endpoint == self.current and len(self._endpoints) > 1:
            self._current = (self._current + 1) % len(self._endpoints)
            for listener in list(self.leaving):
                listener(endpoint)

    def prefer_leader(self) -> None:
        """Makes the leader the current member, if it can be found: other members only forward requests."""
        if len(self._endpoints) == 1:
            return
        before = self._current
        for number, endpoint in enumerate(self._endpoints):
            self._current = number
            try:
                status = self._send("status", "maintenance/status", b"{}", _FIRST_TRY)
            except (NoAnswer, StoreError) as error:
                log.debug("%r: whether %s leads is not known: %s", self, endpoint, error)
                continue
            if status.get("leader") == status.get("header", {}).get("member_id"):
                return
        self._current = before

    # One try, also for watches -------------------------------------------------------------------------

    def try_lasts(self, tries: int) -> float:
        """Seconds for a try, by its number in a row; longer with every round through the members."""
        return min(_LONGEST_TRY, _FIRST_TRY * 2.0 ** min(10, (tries - 1) // len(self._endpoints)))

    def pause_after(self, failures: int) -> float:
        """Seconds before another try, by the number of failures; 0 until all members have been tried."""
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
        """One try, with the user's token."""
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
