"""Whether a store carries a thousand processes where each process has the usual limit of 1,024 open files.

    python benchmarks/scale_processes.py
    python benchmarks/scale_processes.py --processes 50 --files 64

One process hosts a store as a rank's monitor does. Each of the others is a stand-in for a rank: it opens a
rank's four connections, asks something on each of them, and keeps them until all have come so far. It speaks
the store's language by itself, since a thousand processes that import torch do not fit on one machine. All
of them begin with that soft limit; what the host makes of it is what is tried here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time

CONNECTIONS = 4  # of a rank: its own, its monitor thread's, its monitor's, its monitor's heartbeat's
HOST = "127.0.0.1"
_HOSTING = """
import logging, sys
from ft_wrapper.store import TCPStoreServer
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="host: %(levelname)s %(message)s")
server = TCPStoreServer(0, "127.0.0.1")
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""
# What torch's client sends: kinds of requests, by the number that torch gives them.
_VALIDATE, _SET, _ADD, _WAIT, _PING = (bytes([number]) for number in (0, 1, 4, 6, 13))
_MAGIC = 0x3C85F7CE


def _sized(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _connect(port: int, seconds: float) -> socket.socket:
    """Opens a connection, as torch's client does."""
    line = socket.create_connection((HOST, port), timeout=seconds)
    line.sendall(_VALIDATE + struct.pack("<I", _MAGIC) + _PING + bytes(4))
    if _receive(line, 4) != bytes(4):
        raise RuntimeError("the server does not answer as the TCPStore of torch 2.13 does")
    return line


def _receive(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise RuntimeError("the server has closed a connection")
        data += part
    return data


def _add(line: socket.socket, key: bytes, amount: int) -> int:
    line.sendall(_ADD + _sized(key) + struct.pack("<q", amount))
    return int(struct.unpack("<q", _receive(line, 8))[0])


def be_rank(port: int, processes: int, seconds: float) -> None:
    """Opens a rank's connections, says so, and waits until all ranks have done so.

    Args:
        port: of the store.
        processes: how many ranks there are.
        seconds: to wait for anything at the longest.
    """
    with contextlib.ExitStack() as owned:
        lines = [owned.enter_context(_connect(port, seconds)) for _ in range(CONNECTIONS)]
        for line in lines:
            _add(line, b"/asked", 1)
        if _add(lines[0], b"/here", 1) == processes:
            lines[0].sendall(_SET + _sized(b"/all") + _sized(b"1"))
        lines[1].sendall(_WAIT + struct.pack("<Q", 1) + _sized(b"/all"))
        if _receive(lines[1], 1) != bytes(1):
            raise RuntimeError("the wait has failed")


def _fork_rank(port: int, processes: int, seconds: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        be_rank(port, processes, seconds)
        status = 0
    except Exception as error:
        print(f"process {os.getpid()}: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def measure(processes: int, seconds: float) -> int:
    """Starts a host and so many ranks.

    Args:
        processes: how many ranks.
        seconds: for which a rank waits for an answer at the longest.

    Returns:
        How many of them had all of their connections at the same time.
    """
    host = subprocess.Popen(
        [sys.executable, "-c", _HOSTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    ranks: list[int] = []
    try:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        ranks += [_fork_rank(port, processes, seconds) for _ in range(processes)]
        served = 0
        while ranks:
            _, status = os.waitpid(ranks[-1], 0)
            ranks.pop()
            served += status == 0
        return served
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        host.kill()
        host.communicate()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--files", type=int, default=1024, metavar="N", help="soft limit of each (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="to wait for an answer (default: %(default)g)"
    )
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(arguments.files, hard), hard))
    begin = time.monotonic()
    served = measure(arguments.processes, arguments.seconds)
    print(
        f"{served} of {arguments.processes} processes had their {CONNECTIONS} connections at the same time, "
        f"each process with {arguments.files} open files to begin with; {time.monotonic() - begin:.1f} s"
    )
    sys.exit(served != arguments.processes)


if __name__ == "__main__":
    main()
