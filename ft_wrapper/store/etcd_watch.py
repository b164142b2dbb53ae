"""Watches of keys in etcd: a standing one for notification keys, and one for each wait for other keys.

If a watch begins at a revision that is past when the request arrives, etcd serves it with its next periodic
look, up to 100 ms later. So one watch follows the notification keys all the time: see `StandingWatch`.

Each watch has a connection of its own. On a shared one the gateway may lose all requests after the first,
since its HTTP server discards what it has not read when the answer begins.
"""

import contextlib
import http.client
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import urllib3

from . import etcd_messages as messages
from .address import Endpoint
from .bounded import in_background
from .etcd_client import EtcdClient
from .etcd_messages import EtcdCompacted, EtcdRefused, KeyValue, NoAnswer, Range

log = logging.getLogger(__name__)

#: Seconds until the next look; limits the delay of a write whose notification was missed.
LOOK_AGAIN = 10.0

_LOST = (NoAnswer, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError)
_CLOSED_WITHIN = 2.0  # seconds for a closed watch's thread to end


class Watch:
    """The writes of a span as they come, each once and in order. A deletion has ``create_revision`` 0.

    When a member is lost, the watch goes on with another member, after the last revision that it has seen. A
    member that has lost the majority reports that, and is left. Without writes there is no traffic.

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
        """Goes on with another member, if the watch is with this one; called in any thread."""
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
        # With this header a member without a leader reports that, rather than being silent.
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
        except Exception as error:  # any error, since nobody may wait for ever
            why = error
        with self._changed:
            self.ended, self._why = True, why
            self._changed.notify_all()
