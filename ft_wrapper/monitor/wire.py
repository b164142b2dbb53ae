"""What a rank and its monitor say to each other: one JSON object a line, over a stream socket."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

AGENT_ENV = "FT_WRAPPER_AGENT"
"""Where the agent hears hello: the name of an abstract Unix socket, without the NUL in front."""
VERSION = 2
"""Of hello: another Python, with another ft_wrapper, may run the ranks."""

_LONGEST = 1 << 16  # bytes of an answer, or of hello


def send(line: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message.

    Raises:
        OSError: the line has ended, or its timeout has passed.
    """
    line.sendall(json.dumps(message).encode() + b"\n")


def receive(line: socket.socket) -> dict[str, Any]:
    """Receives a message, the only one that is under way.

    Raises:
        EOFError: the line has ended.
        OSError: the line has failed, or its timeout has passed.
        ValueError: what came is no message.
    """
    return _complete(line, b"")


def send_hello(line: socket.socket, message: dict[str, Any], fd: int) -> None:
    """Sends the first message, and a descriptor.

    Raises:
        OSError: as for `send`.
    """
    data = json.dumps(message).encode() + b"\n"
    line.sendall(data[socket.send_fds(line, [data], [fd]) :])


def receive_hello(line: socket.socket) -> tuple[dict[str, Any], int]:
    """Receives the first message.

    Returns:
        The message, and the descriptor that came with it, for the caller to close.

    Raises:
        EOFError: the line has ended.
        OSError: the line has failed, or its timeout has passed.
        ValueError: what came is no message, or has no descriptor.
    """
    data, fds, _, _ = socket.recv_fds(line, _LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        message = _complete(line, data) if data else {}
        if not fds:
            raise ValueError("hello came without a descriptor")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds[0]


def _complete(line: socket.socket, data: bytes) -> dict[str, Any]:
    while not data.endswith(b"\n"):
        part = line.recv(4096)
        if not part:
            raise EOFError("the line has ended")
        data += part
        if len(data) > _LONGEST:
            raise ValueError(f"more than {_LONGEST} bytes without an end")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("no JSON object")
    return message
