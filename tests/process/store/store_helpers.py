"""What tests of stores need beside them: threads, and a network that can be cut."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import threading
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Background:
    """A function in a thread of its own.

    Args:
        function: what it runs.
    """

    function: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error

    def join(self) -> Any:
        """Waits for its end; returns or raises what the function did."""
        self._thread.join(60.0)
        assert not self._thread.is_alive(), "still running after 60 s"
        if self.error is not None:
            raise self.error
        return self.result


class Proxy:
    """Forwards connections to a port, until they are cut.

    Args:
        port: where to.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("localhost", 0))
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._over: list[socket.socket] = []  # cut, to be closed
        self._lock = threading.Lock()
        self._refuses = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> int:
        """Cuts all connections; new ones are accepted. Returns how many it cut."""
        with self._lock:
            pairs, self._pairs = self._pairs, {}
            for line in pairs:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
            self._over += pairs  # closed by the thread, which may be about to wait for them
        self._wake.send(b"!")
        return len(pairs) // 2

    def refuse(self) -> None:
        """Cuts all connections, and from then on each new one at once."""
        self._refuses = True
        self.cut()

    def close(self) -> None:
        """Ends it."""
        self._wake.close()
        self._thread.join()
        self.cut_quietly()
        self._listener.close()
        self._woken.close()

    def cut_quietly(self) -> None:
        """Closes what is left once the thread has ended."""
        for line in (*self._pairs, *self._over):
            line.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._over:
                    self._over.pop().close()
                watched = [self._listener, self._woken, *self._pairs]
            readable, _, _ = select.select(watched, [], [])
            for line in readable:
                if line is self._woken:
                    if not line.recv(100):
                        return
                elif line is self._listener:
                    client, _ = line.accept()
                    if self._refuses:
                        client.close()
                        continue
                    server = socket.create_connection(("localhost", self._target))
                    with self._lock:
                        self._pairs |= {client: server, server: client}
                else:
                    self._forward(line)

    def _forward(self, line: socket.socket) -> None:
        with self._lock:
            other = self._pairs.get(line)
            if other is None:
                return
            try:
                data = line.recv(1 << 16)
                if data:
                    other.sendall(data)
                    return
            except OSError:
                pass
            for end in (line, other):
                self._pairs.pop(end).close()
