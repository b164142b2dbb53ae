"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(consecutive: int = 1) -> int:
    """Finds a port that is free, and that the kernel gives to no connection before it is used.

    Args:
        consecutive: so many ports in a row are free, of which this is the first.
    """
    lowest = int(_GIVEN_AWAY.read_text().split()[0])
    # A seed that a test has set must not make all tests of a machine use the same ports.
    choose = random.SystemRandom()
    while True:
        port = choose.randrange(min(10000, lowest - 1000), lowest - consecutive)
        with contextlib.ExitStack() as trials, contextlib.suppress(OSError):
            for number in range(port, port + consecutive):
                trials.enter_context(socket.socket()).bind(("", number))
            return port
