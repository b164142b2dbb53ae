"""Follows the writes of a span of keys on etcd."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import logging
import socket
import threading
from collections.abc import Generator, Iterator
from typing import Any

import urllib3

from .etcd_answers import EtcdCompacted, EtcdRefused, NoAnswer, meaning_of, read_answer, refusal
from .etcd_endpoints import Endpoint
from .etcd_http import EtcdHttp, headers
from .etcd_messages import Event, Watched, parse_key_value, watch_json

log = logging.getLogger(__name__)


class Watch:
    """Writes of a span, as they come, each once and in order.

    It goes on with another member when one is lost, and with the revision after the last one seen. A member
    that has lost the majority says so and is left. While nothing is written there is no traffic.

    Args:
        etcd: the client.
        watched: what to watch, and from which revision on.
    """

    def __init__(self, etcd: EtcdHttp, watched: Watched) -> None:
        self._etcd = etcd
        self._watched = watched
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._endpoint: Endpoint | None = None
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
            EtcdCompacted: writes since the last event are not kept any more: read, and watch again.
            StoreError: no member will ever serve it: wrong password, no such right, no etcd.
        """
        etcd, failures = self._etcd, 0
        etcd.leaving.add(self.leave)
        try:
            while not self._closed.is_set():
                try:
                    for event in self._one_stream(etcd.try_lasts(failures + 1)):
                        failures = 0
                        yield event
                except NoAnswer as error:
                    failures += 1
                    if not self._closed.is_set():
                        log.debug("%r: watch: %s; trying again", etcd, error)
                        self._closed.wait(etcd.pause_after(failures))
        finally:
            etcd.leaving.discard(self.leave)

    def _one_stream(self, patience: float) -> Iterator[Event]:
        etcd = self._etcd
        endpoint = etcd.current
        token = etcd.token(patience)
        connection = etcd.connection(endpoint, patience)
        try:
            for message in self._messages(connection, endpoint, token):
                yield from self._events(message, endpoint)
            raise NoAnswer(f"{endpoint} ended a watch")
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            etcd.leave(endpoint)
            raise meaning_of("watch", endpoint, error) from None
        except NoAnswer:
            etcd.leave(endpoint)
            raise
        except EtcdRefused as error:
            if not etcd.forget(token, error):
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
        with self._lock:
            if self._closed.is_set():
                return
            self._socket, self._endpoint = connection.sock, endpoint
        # One only: the gateway reads others while its answer has begun, and may lose them.
        body = json.dumps(watch_json(self._watched))
        # A member without a leader says so, rather than nothing.
        has_leader = {**headers(token), "Grpc-Metadata-hasleader": "true"}
        connection.request("POST", "/v3/watch", body=body.encode(), headers=has_leader, preload_content=False)
        response = connection.getresponse()
        if response.status != 200:
            read_answer("watch", endpoint, response.status, response.read())
        if connection.sock is not None:
            connection.sock.settimeout(None)
        buffer = b""
        for chunk in response.read_chunked(decode_content=False):
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                if line:
                    yield read_answer("watch", endpoint, 200, line)

    def _events(self, message: dict[str, Any], endpoint: Endpoint) -> Iterator[Event]:
        result = message.get("result", {})
        if result.get("canceled"):
            compacted = int(result.get("compact_revision", 0))
            if compacted:
                raise EtcdCompacted(f"{endpoint}: watch: revisions before {compacted} are gone", compacted)
            reason = str(result.get("cancel_reason", "canceled"))
            raise refusal("watch", endpoint, 7 if "permission" in reason else 2, reason)
        for event in result.get("events", []):
            kv = parse_key_value(event["kv"])
            deleted = event.get("type") == "DELETE"
            yield Event(kv.key, None if deleted else kv.value, kv.mod_revision)
        if result.get("events"):
            # All writes of a revision come in one message.
            last = parse_key_value(result["events"][-1]["kv"]).mod_revision
            self._watched = dataclasses.replace(self._watched, start=last + 1)
