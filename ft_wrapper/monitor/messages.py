"""The messages between a rank and its monitor, wherever that runs: each is a line on a stream socket.

An agent gets hello first, with the descriptor of the shared memory, and answers with a `HelloReply`. Then the
rank sends messages: the name of a class of this file, and its fields as JSON. A `Reply` answers some of them.
What the monitor does with the messages is in `watch`.
"""

import json
import socket
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..protocol.codec import Record
from ..protocol.records import Decision, Member, View

#: Of hello: another Python, with another ft_wrapper, may run the ranks.
VERSION = 13

_LONGEST = 1 << 16  # bytes of an answer, or of hello


@dataclass(frozen=True)
class Join(Record):
    """Who the rank is: from now on the monitor sends its heartbeat."""

    member: Member


@dataclass(frozen=True)
class Enter(Record):
    """The iteration that the rank is in: all of its view."""

    view: View


@dataclass(frozen=True)
class Advance(Record):
    """The iteration that the rank is in: what has changed since the last one, and which proposal it was."""

    decision: Decision
    nonce: str


@dataclass(frozen=True)
class Restarted(Record):
    """All ranks are back, and this one came last: what kind of fault it was, and how long each phase took."""

    cause: str
    phases: tuple[str, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Serve(Record):
    """The monitor opens the store of an iteration, and answers with its port."""

    host: str


@dataclass(frozen=True)
class LeaveCall(Record):
    """The rank has left a call, and may come to another one.

    Answered once the monitor looks at the shared memory no more.
    """


@dataclass(frozen=True)
class Respond(Record):
    """The monitor has not looked after the rank for too long: it answers once it does."""


@dataclass(frozen=True)
class Leave(Record):
    """The rank leaves in order."""


Message = Join | Enter | Advance | Restarted | Serve | LeaveCall | Respond | Leave
_MESSAGES: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(Message)}


@dataclass(frozen=True)
class Reply:
    """What the monitor answers.

    Args:
        port: of the store that it has opened.
        error: why it has not done what it was to do.
    """

    port: int = 0
    error: str = ""


@dataclass(frozen=True)
class HelloReply:
    """What an agent answers to hello.

    Args:
        replaced: whether it starts another process in place of this one, which joins the job.
        heart: the name of the heart that beats for the rank.
        refused: why the rank gets no monitor there; empty if it gets one.
    """

    replaced: bool
    heart: str = ""
    refused: str = ""


def parse(line: bytes) -> Message:
    """Reads a message of a rank.

    Raises:
        KeyError: there is no such message.
        ft_wrapper.exception.StoreError: its fields are others.
        UnicodeDecodeError: it is no text.
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
    """Receives hello, or a reply: the only one that is under way.

    Raises:
        EOFError: the line has ended.
        OSError: the line has failed, or its timeout has passed.
        ValueError: what came is no JSON.
    """
    data = b""
    while not data.endswith(b"\n"):
        more = line.recv(_LONGEST - len(data))
        if not more:
            raise EOFError("the line has ended, or says too much")
        data += more
    fields: dict[str, Any] = json.loads(data)
    return fields
