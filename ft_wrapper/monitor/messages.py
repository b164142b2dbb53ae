"""The messages between a rank and its monitor: each is a line on a stream socket.

To an agent the rank first sends hello, with the descriptors of the shared memory and of a socket. On that the
monitor asks where the function stands, and the progress watchdog answers. The agent answers hello with a
`HelloReply`. Then the rank sends messages: the name of a class of this file, and its fields as JSON. A
`Reply` answers some of them. `watch` carries out the messages.
"""

import json
import socket
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..protocol.records import Decision, Member, Record, View

#: Version of the protocol, part of hello: the ranks may run another Python with another ft_wrapper.
VERSION = 16

_LONGEST = 1 << 16  # bytes of an answer, or of hello


@dataclass(frozen=True)
class Join(Record):
    """The rank's member. From now on the monitor sends its heartbeat."""

    member: Member


@dataclass(frozen=True)
class Enter(Record):
    """The rank's iteration: its whole view."""

    view: View


@dataclass(frozen=True)
class Advance(Record):
    """The rank's iteration: the decision that led to it from the last one, and its nonce."""

    decision: Decision
    nonce: str


@dataclass(frozen=True)
class Restarted(Record):
    """All ranks are back, this one last: the kind of fault, and the seconds of each phase."""

    cause: str
    phases: tuple[str, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Serve(Record):
    """Asks the monitor to open the store of an iteration, and to answer with its port."""

    host: str


@dataclass(frozen=True)
class LeaveCall(Record):
    """The rank has left a call, and may make another one.

    The monitor answers once it no longer reads the shared memory.
    """


@dataclass(frozen=True)
class Respond(Record):
    """Asks for an answer, since the monitor has not watched the rank for too long."""


@dataclass(frozen=True)
class Leave(Record):
    """The rank leaves in order."""


Message = Join | Enter | Advance | Restarted | Serve | LeaveCall | Respond | Leave
_MESSAGES: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(Message)}


@dataclass(frozen=True)
class Reply:
    """The monitor's answer to a message.

    Args:
        port: port of the store that the monitor has opened.
        error: why the monitor could not carry out the message; empty if it did.
    """

    port: int = 0
    error: str = ""


@dataclass(frozen=True)
class HelloReply:
    """The agent's answer to hello.

    Args:
        replaced: whether the agent replaces the rank's process if it ends, by one that joins the job.
        heart: name of the heart that beats for the rank.
        refused: why the rank gets no monitor in the agent; empty if it gets one.
    """

    replaced: bool
    heart: str = ""
    refused: str = ""


def parse(line: bytes) -> Message:
    """Reads a rank's message.

    Raises:
        KeyError: the message is unknown.
        ft_wrapper.exception.StoreError: the message has wrong fields.
        UnicodeDecodeError: the line is not text.
    """
    kind, _, fields = line.decode().partition(" ")
    return _MESSAGES[kind].from_json(fields, kind)


def send(line: socket.socket, fields: Mapping[str, Any]) -> None:
    """Sends hello, or a reply.

    Raises:
        OSError: the line has ended, or its timeout has passed.
    """
    line.sendall(json.dumps(fields).encode() + b"\n")


def receive(line: socket.socket) -> dict[str, Any]:
    """Receives hello, or a reply. Nothing else may be under way.

    Raises:
        EOFError: the line has ended.
        OSError: the line has failed, or its timeout has passed.
        ValueError: the line is not JSON.
    """
    data = b""
    while not data.endswith(b"\n"):
        more = line.recv(_LONGEST - len(data))
        if not more:
            raise EOFError("the line has ended, or sends too much")
        data += more
    fields: dict[str, Any] = json.loads(data)
    return fields
