"""HTTP requests to whichever member of an etcd cluster answers.

HTTP rather than gRPC because rank processes fork: a gRPC channel does not survive that, while a connection
here is made by the process that uses it.

A request whose answer was lost may have been carried out, and may be carried out a moment later still, after
its repetition. So a client that makes a change hands in a transaction whose comparisons make that harmless.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import tenacity

from ..exception import StoreError, StoreUnavailable
from .etcd_answers import EtcdRefused, NoAnswer, meaning_of, read_answer
from .etcd_endpoints import Endpoint, check_files, parse_endpoints

try:
    import urllib3
except ImportError as error:
    raise ImportError('etcd needs urllib3: pip install "ft-wrapper[etcd]"') from error

log = logging.getLogger(__name__)

_FIRST_TRY = 0.5  # seconds for one try; proposals in flight at a change of leader are lost silently
_LONGEST_TRY = 5.0  # where every member is that slow
_SHORTEST_TRY = 0.05
_CONNECTIONS = 8  # kept open to a member for the threads of a process; more are made and closed again
_JSON = {"Content-Type": "application/json"}

# A host that is cut off sends nothing, and a watch that is silent is what one hopes for.
_SOCKET_OPTIONS: list[tuple[int, int, int | bytes]] = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


class EtcdHttp:
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
        tls = ca is not None or cert is not None
        self._endpoints = parse_endpoints(endpoints, tls)
        self._tls: dict[str, Any] = {
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": ca,
            "cert_file": cert,
            "key_file": key,
        }
        if any(endpoint.tls for endpoint in self._endpoints):
            check_files(ca, cert, key)
        self.timeout = timeout
        self._user, self._password = user, password
        self._token: str | None = None
        self._current = 0
        self._pid = os.getpid()
        self._pools: dict[Endpoint, urllib3.HTTPConnectionPool] = {}
        self._inherited: list[object] = []
        self.leaving: set[Callable[[Endpoint], None]] = set()

    def __repr__(self) -> str:
        return f"etcd at {','.join(map(str, self._endpoints))}"

    def close(self) -> None:
        """Closes all connections of this process. Another request opens new ones."""
        if self._pid == os.getpid():
            pools, self._pools = self._pools, {}
            for pool in pools.values():
                pool.close()

    @property
    def current(self) -> Endpoint:
        """The member that is asked next."""
        return self._endpoints[self._current]

    def prefer_leader(self) -> None:
        """Asks the leader from now on, if one says that it is: others pass on to it what they are asked."""
        if len(self._endpoints) == 1:
            return
        before = self._current
        for number, endpoint in enumerate(self._endpoints):
            self._current = number
            try:
                token = self.token(_FIRST_TRY)
                status = self._send("status", "maintenance/status", b"{}", _FIRST_TRY, token)
            except (NoAnswer, StoreError) as error:
                log.debug("%r: whether %s leads is not known: %s", self, endpoint, error)
                continue
            if status.get("leader") == status.get("header", {}).get("member_id"):
                self._current = number
                return
        self._current = before

    def request(
        self, what: str, path: str, body: dict[str, Any], timeout: float | None
    ) -> tuple[dict[str, Any], int]:
        """Sends a request until a member answers.

        Args:
            what: what to call it in messages.
            path: behind ``/v3/``.
            body: the request as JSON.
            timeout: seconds for which it is tried again; the client's when None.

        Returns:
            The answer as JSON, and how often the request was sent.

        Raises:
            StoreUnavailable: no one answered in time. It may have been carried out.
            StoreError: it failed; names endpoints and operation.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        data = json.dumps(body, separators=(",", ":")).encode()
        tries = 0

        def attempt() -> dict[str, Any]:
            nonlocal tries
            tries += 1
            patience = min(self.try_lasts(tries), max(_SHORTEST_TRY, deadline - time.monotonic()))
            return self._try(what, path, data, patience)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(NoAnswer),
            stop=tenacity.stop_after_delay(seconds),
            wait=lambda state: self.pause_after(state.attempt_number),
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

    def try_lasts(self, tries: int) -> float:
        """Seconds for a try: more with every round through the members.

        Args:
            tries: how many there are, this one included.
        """
        return min(_LONGEST_TRY, _FIRST_TRY * 2.0 ** min(10, (tries - 1) // len(self._endpoints)))

    def pause_after(self, failures: int) -> float:
        """Seconds before another try: none until all members have been asked.

        Args:
            failures: how many tries have failed so far.
        """
        rounds = failures // len(self._endpoints)
        return 0.0 if rounds == 0 else random.uniform(0.5, 1.0) * min(0.5, 0.01 * 2.0 ** min(10, rounds))

    def _try(self, what: str, path: str, data: bytes, patience: float) -> dict[str, Any]:
        token = self.token(patience)
        try:
            return self._send(what, path, data, patience, token)
        except EtcdRefused as error:
            if not self.forget(token, error):
                raise
            return self._send(what, path, data, patience, self.token(patience))  # nothing was carried out

    def _send(self, what: str, path: str, data: bytes, patience: float, token: str | None) -> dict[str, Any]:
        endpoint = self.current
        try:
            response = self._pool(endpoint).urlopen(
                "POST",
                f"/v3/{path}",
                body=data,
                headers=headers(token),
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=patience, read=patience),
            )
            return read_answer(what, endpoint, response.status, response.data)
        except urllib3.exceptions.HTTPError as error:
            self.leave(endpoint)
            raise meaning_of(what, endpoint, error) from None
        except NoAnswer:
            self.leave(endpoint)
            raise

    def leave(self, endpoint: Endpoint) -> None:
        """Another member is asked from now on.

        Args:
            endpoint: the one that does not answer.
        """
        if endpoint == self.current and len(self._endpoints) > 1:
            self._current = (self._current + 1) % len(self._endpoints)
            for listener in list(self.leaving):
                listener(endpoint)

    def token(self, patience: float) -> str | None:
        """What stands for the user; logs in if need be. None without users.

        Args:
            patience: seconds for that.

        Raises:
            NoAnswer: the member cannot answer now.
            StoreError: the user or the password is wrong.
        """
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

    def forget(self, token: str | None, error: EtcdRefused) -> bool:
        """Lets the next request log in again, if that is what it was refused for.

        The token ran out, or the member was started again.

        Args:
            token: what it was sent with.
            error: the refusal.
        """
        if self._user is None or not error.wants_login:
            return False
        if self._token == token:
            self._token = None
        return True

    def _pool(self, endpoint: Endpoint) -> urllib3.HTTPConnectionPool:
        if self._pid != os.getpid():
            # Connections of the process that this one was forked from. They are kept, since closing one may
            # tell the other side.
            self._inherited.append(self._pools)
            self._pools, self.leaving, self._pid = {}, set(), os.getpid()
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

    def connection(self, endpoint: Endpoint, patience: float) -> urllib3.connection.HTTPConnection:
        """A connection outside the pools.

        Args:
            endpoint: to whom.
            patience: seconds for all that is done on it.
        """
        if not endpoint.tls:
            return urllib3.connection.HTTPConnection(
                endpoint.host, endpoint.port, timeout=patience, socket_options=_SOCKET_OPTIONS
            )
        return urllib3.connection.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=patience, socket_options=_SOCKET_OPTIONS, **self._tls
        )


def headers(token: str | None) -> dict[str, str]:
    """What is in front of a request.

    Args:
        token: what stands for the user, if there is one.
    """
    return _JSON if token is None else {**_JSON, "Authorization": token}


def _last(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None
