"""What a rank and its monitor send each other: read as it was written, or refused."""

from __future__ import annotations

import typing

import pytest

from ft_wrapper.exception import StoreError
from ft_wrapper.monitor import messages
from ft_wrapper.protocol.records import Blamed, Decision, Member, SameFault, View

MEMBERS = (Member(0, 0), Member(1, 2))
SAME = (SameFault("ValueError: at train.py:3\nin step", 2, MEMBERS[1]),)
BLAMED = (Blamed(1, "a", 12.5),)
DECISION = Decision(0, 4, 1, MEMBERS[:1], (0,), (Member(0, 1),), (0,), (), 2, 2, SAME, 3, 60.0, BLAMED)
SENT: list[messages.Message] = [
    messages.Join(MEMBERS[1]),
    messages.Enter(View(DECISION, "nonce", MEMBERS)),
    messages.Advance(DECISION, "nonce"),
    messages.Restarted("TERMINATED", ("abort", "total"), (0.25, 1.0)),
    messages.Serve("a host"),
    messages.LeaveCall(),
    messages.Respond(),
    messages.Leave(),
]


def line(message: messages.Message) -> bytes:
    return f"{type(message).__name__} {message.to_json()}".encode()


@pytest.mark.parametrize("message", SENT, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_sent(message: messages.Message) -> None:
    assert messages.parse(line(message)) == message
    assert b"\n" not in line(message)


def test_all_messages_are_tried() -> None:
    assert {type(message) for message in SENT} == set(typing.get_args(messages.Message))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", KeyError),
        (b"garbage", KeyError),
        (b"Reply {}", KeyError),
        (b"\xff {}", UnicodeDecodeError),
        (b"Serve", StoreError),
        (b"Serve {}", StoreError),
        (b"Serve []", StoreError),
        (b"Serve }{", StoreError),
        (b'Serve {"host": 5}', StoreError),
        (b'Join {"member": "0"}', StoreError),
        (b'Enter {"view": [0, 1]}', StoreError),
        (b'Restarted {"cause": "x", "phases": ["total"], "seconds": ["long"]}', StoreError),
    ],
)
def test_what_is_no_message_is_refused(text: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        messages.parse(text)
