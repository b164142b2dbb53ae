"""Requests to an etcd cluster through its JSON gateway: members, retries, login, TLS.

HTTP rather than gRPC because ranks fork: a gRPC channel does not survive a fork, while a connection here is
made by the process that uses it. All reads are linearizable.

A request whose answer was lost may have been carried out, and may still be carried out after its repetition.
So a client that changes something hands in a transaction whose comparisons make that harmless.
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
from .etcd_messages import Answer, EtcdRefused, KeyValue, NoAnswer, Span, Transaction

try:
    import urllib3
except ImportError as error:
    raise ImportError('etcd needs urllib3: pip install "ft-wrapper[etcd]"') from error

log = logging.getLogger(__name__)

_FIRST_TRY = 0.5  # seconds for one try; proposals in flight at a change of leader are lost silently
_LONGEST_TRY = 5.0  # where every member is that slow
_SHORTEST_TRY = 0.05
_CONNECTIONS = 8  # kept open to a member for the threads of a process; more are made and closed again

# A host that is cut off sends nothing, and a healthy watch is silent for long.
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
        endpoints: the members: ``host:port,host:port``, or a list of these; with or without a scheme.
        user: who to log in as; no one when None.
        password: the user's.
        ca: path of the certificates of those who may sign the members', PEM; makes it TLS.
        cert: path of a certificate to show, PEM; makes it TLS.
        key: path of its key, PEM.
        timeout: seconds for which a request is tried again before it fails.

    Attributes:
        leaving: are called with a member that is not asked any more, for it may be stopped.

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

    def read(self, span: Span, timeout: float | None = None) -> Sequence[KeyValue]:
        """Reads keys; see `transaction` for errors."""
        request = messages.get(span)["request_range"]
        return Answer.parse(self.request("range", "kv/range", request, timeout)).keys

    def transaction(self, transaction: Transaction, timeout: float | None = None) -> Answer:
        """Carries out a transaction.

        Args:
            transaction: what to do.
            timeout: seconds for which it is tried again; the client's when None.

        Raises:
            StoreUnavailable: no member answered in time. It may have been carried out.
            StoreError: it failed; names endpoints and operation.
        """
        return Answer.parse(self.request(transaction.what, "kv/txn", transaction.json, timeout))

    def grant(self, ttl: int, timeout: float | None = None) -> int:
        """Makes a lease for so many seconds; returns its id. After a lost answer there is one more."""
        return int(self.request("lease grant", "lease/grant", {"TTL": str(ttl)}, timeout)["ID"])

    def keep_alive(self, lease: int, timeout: float | None = None) -> int:
        """Lets a lease last its whole time again; returns the seconds, 0 if there is no such lease."""
        reply = self.request("lease keep alive", "lease/keepalive", {"ID": str(lease)}, timeout)
        return int(reply.get("result", {}).get("TTL", 0))

    def revoke(self, lease: int, timeout: float | None = None) -> bool:
        """Ends a lease, and deletes the keys that go with it; tells whether there was one."""
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
            what: what to call it in messages.
            path: behind ``/v3/``.
            body: the request as JSON.
            timeout: seconds for which it is tried again; the client's when None.

        Returns:
            The answer as JSON.

        Raises:
            StoreUnavailable: no member answered in time. It may have been carried out.
            StoreError: it failed; names endpoints and operation.
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
        """The member that is asked next."""
        return self._endpoints[self._current]

    def leave(self, endpoint: Endpoint) -> None:
        """Asks another member from now on, if this one, which does not answer, is the current one."""
        if endpoint == self.current and len(self._endpoints) > 1:
            self._current = (self._current + 1) % len(self._endpoints)
            for listener in list(self.leaving):
                listener(endpoint)

    def prefer_leader(self) -> None:
        """Asks the leader from now on, if a member says that it leads: the others only hand requests on."""
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
        """Seconds for a try, of which this is so many in a row: more with every round through the members."""
        return min(_LONGEST_TRY, _FIRST_TRY * 2.0 ** min(10, (tries - 1) // len(self._endpoints)))

    def pause_after(self, failures: int) -> float:
        """Seconds before another try after so many failures: none until all members have been asked."""
        rounds = failures // len(self._endpoints)
        return 0.0 if rounds == 0 else random.uniform(0.5, 1.0) * min(0.5, 0.01 * 2.0 ** min(10, rounds))

    def token(self, patience: float) -> str | None:
        """The user's token; logs in, within so many seconds, if there is none yet. None without users.

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
        """Forgets a token that etcd did not take: it runs out, or dies with a member. False without users."""
        if self._user is None:
            return False
        if self._token == token:
            self._token = None
        return True

    def headers(self, token: str | None) -> dict[str, str]:
        """The headers of a request."""
        return {"Content-Type": "application/json", **({} if token is None else {"Authorization": token})}

    def connection(self, endpoint: Endpoint, patience: float) -> urllib3.connection.HTTPConnection:
        """A connection of its own, on which no step takes longer than so many seconds."""
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
            return self._post(what, path, data, patience, self.token(patience))  # nothing was done

    def _post(self, what: str, path: str, data: bytes, patience: float, token: str | None) -> dict[str, Any]:
        if self._pid != os.getpid():
            # The connections of the process that this one was forked from are kept: closing one may tell the
            # other side.
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
