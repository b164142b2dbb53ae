"""What tests of etcd need beside it: a relay in front of it that loses and holds back what a test says."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import threading
from collections.abc import Callable
from typing import Any

from ft_wrapper.store import EtcdStore
from ft_wrapper.store.etcd_client import EtcdClient
from ft_wrapper.store.etcd_messages import Range, Transaction, compare, delete, put

Make = Callable[..., EtcdStore]


def write(client: EtcdClient, key: bytes, value: bytes, lease: int = 0) -> int:
    """Writes a key that has another value; returns the store's revision. A repetition writes nothing."""
    has_it = [compare(Range(key), "value", value)]
    return client.transaction(Transaction("put", [], has_it, [put(key, value, lease)])).revision


def erase(client: EtcdClient, span: Range) -> int:
    """Deletes keys; returns how many."""
    return client.transaction(Transaction("delete", [delete(span)])).answers[0].number


def ask(client: EtcdClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends a request for which the client has no method."""
    return client.request(path, path, body)


class Relay:
    """Forwards requests to one member of etcd, and notes them.

    Args:
        endpoint: ``host:port`` of the member.
    """

    def __init__(self, endpoint: str) -> None:
        self.target = endpoint
        self.requests: list[str] = []
        self._changed = threading.Condition()
        self._lose: list[str] = []
        self._hold: list[str] = []
        self._held: list[tuple[str, bytes]] = []
        relay = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                relay._lines.add(self.connection)

            def finish(self) -> None:
                relay._lines.discard(self.connection)
                super().finish()

            def do_POST(self) -> None:
                relay._serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # closing the server waits for them
        self._open: set[socket.socket] = set()
        self._lines: set[socket.socket] = set()
        self.endpoint = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def lose_answer(self, path: str = "kv/txn", times: int = 1) -> None:
        """Lets requests be carried out, and closes the connection instead of answering."""
        self._lose += [path] * times

    def hold(self, path: str = "kv/txn", times: int = 1) -> None:
        """Keeps requests back, and closes their connections."""
        self._hold += [path] * times

    def release(self) -> list[bytes]:
        """Lets what was held back be carried out now; returns what etcd answered, which no one else sees."""
        held, self._held = self._held, []
        return [self._forward(path, body)[1] for path, body in held]

    def wait_for(self, path: str, times: int) -> None:
        """Waits until so many requests have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.requests.count(path) >= times, 60.0), self.requests

    def close(self) -> None:
        """Ends it, and all connections to it."""
        self._server.shutdown()
        self._thread.join()
        self._cut(self._open | self._lines)
        self._server.server_close()  # and its threads end, with their descriptors

    def cut_watches(self) -> None:
        """Ends all watches that are on."""
        self._cut(self._open)

    def _cut(self, lines: set[socket.socket]) -> None:
        for line in list(lines):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _serve(self, request: http.server.BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        path = request.path.removeprefix("/v3/")
        with self._changed:
            self.requests.append(path)
            self._changed.notify_all()
        if path in self._hold:
            self._hold.remove(path)
            self._held.append((path, body))
            request.close_connection = True
            return
        if path == "watch":
            self._stream(request, body)
            return
        status, answer = self._forward(path, body)
        if path in self._lose:
            self._lose.remove(path)
            request.close_connection = True
            return
        request.send_response(status)
        request.send_header("Content-Length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)

    def _forward(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.target, timeout=20.0)
        try:
            connection.request("POST", f"/v3/{path}", body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _stream(self, request: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        """Copies what comes until either side ends; the one that waits is woken by the other's end."""
        upstream = http.client.HTTPConnection(self.target)
        upstream.request("POST", "/v3/watch", body, {"Grpc-Metadata-hasleader": "true"})
        response = upstream.getresponse()
        request.send_response(response.status)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        assert upstream.sock is not None
        line, client = upstream.sock, request.connection
        self._open |= {line, client}

        def end_with_client() -> None:
            with contextlib.suppress(OSError):
                client.recv(1)
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

        watcher = threading.Thread(target=end_with_client)
        watcher.start()
        try:
            while data := response.readline():
                request.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        except (OSError, http.client.HTTPException):
            pass
        finally:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            watcher.join()
            self._open -= {line, client}
            response.close()
            upstream.close()
            request.close_connection = True
