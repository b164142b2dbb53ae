"""A host of a store that loses its power, without namespaces and without root.

Its sockets get a filter that drops each packet before the kernel acknowledges it: nobody is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

TIMEOUT = 60.0
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # return 0: so many bytes are let in


class SilentHost:
    """A TCPStore server in a process whose host can be silenced.

    Args:
        port: where it listens; 0 for a free one.
    """

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.port = int(self._answer())
        except BaseException:
            self.close()
            raise

    def lose_power(self) -> None:
        """From now on no packet gets in, and none is acknowledged."""
        self._ask("silence")

    def come_back(self) -> None:
        """The network is there again, and so is the server."""
        self._ask("noise")

    def stop(self) -> None:
        """The server is stopped; its host lives. Returns once it is."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """The server runs again."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT)

    def _ask(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self._answer() == what

    def _answer(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT)
        assert ready, f"the host did not answer within {TIMEOUT:g} s"
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def silent_host() -> Iterator[SilentHost]:
    """Closes it in the end."""
    host = SilentHost()
    try:
        yield host
    finally:
        host.close()


def _filter_all(port: int, option: int) -> None:
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(_DROP))
    for fd in os.listdir("/proc/self/fd"):
        if not os.path.realpath(f"/proc/self/fd/{fd}").rpartition("/")[2].startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(fd))) as held, contextlib.suppress(OSError):
            if held.family in (socket.AF_INET, socket.AF_INET6) and held.getsockname()[1] == port:
                held.setsockopt(socket.SOL_SOCKET, option, program)


def _serve(port: int) -> None:
    from ft_wrapper.agent.signals import die_with
    from ft_wrapper.store import TCPStoreServer

    die_with(os.getppid())  # also while it is stopped
    server = TCPStoreServer(port, "localhost")
    print(server.port, flush=True)
    for line in sys.stdin:
        _filter_all(server.port, _SO_ATTACH_FILTER if line == "silence\n" else _SO_DETACH_FILTER)
        print(line, end="", flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
