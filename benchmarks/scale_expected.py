"""What a rank should ask of the store, by counting: written down by hand from the protocol's description.

It knows the wire, the names of the keys and the order of the operations, and shares no code with what it
foretells. So where it differs from what `scale.py` counts, one of the two has changed without the other;
docs/scale.md derives it in words. All figures are those of a rank in the middle: neither the one that
decides, nor rank 0.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import socket
from fractions import Fraction

from scale_worker import HOST, Plan

_NEVER = "\x00no key holds this"  # what a client of ours expects, to read a key without changing it
_NONCE = "0" * 12


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a rank asks.

    Args:
        operations: requests.
        bytes: of these and their answers, without those of TCP and IP.
    """

    operations: float
    bytes: float

    def __add__(self, other: Expected) -> Expected:
        return Expected(self.operations + other.operations, self.bytes + other.bytes)

    def __mul__(self, times: float | Fraction) -> Expected:
        return Expected(float(self.operations * times), float(self.bytes * times))


def _all(*parts: Expected) -> Expected:
    return Expected(sum(part.operations for part in parts), sum(part.bytes for part in parts))


# The wire: a kind, a byte; sizes and numbers, eight; the client puts a slash in front of each key. ---------


def _text(value: str) -> int:
    return 8 + len(value)


def _key(name: str) -> int:
    return _text(f"/ft_wrapper/{name}")


def _write(name: str, value: str) -> Expected:
    """``set`` and ``append``: not answered."""
    return Expected(1, 1 + _key(name) + _text(value))


def _add(name: str) -> Expected:
    return Expected(1, 1 + _key(name) + 8 + 8)


def _wait(name: str) -> Expected:
    return Expected(1, 1 + 8 + _key(name) + 1)


def _compare(name: str, expected: str, desired: str, answer: str) -> Expected:
    return Expected(1, 1 + _key(name) + _text(expected) + _text(desired) + _text(answer))


def _claim(name: str, value: str) -> Expected:
    return _compare(name, "", value, value)


def _read(name: str, value: str | None) -> Expected:
    return _compare(name, _NEVER, _NEVER, _NEVER if value is None else value)


# The protocol ----------------------------------------------------------------------------------------------


def _enter(n: int, rank: int, size: int) -> Expected:
    """From knowing its place: that is claimed, what rank 0 told is read, and after a restart it is counted.

    A rank that comes before rank 0 waits for that, and reads it again.
    """
    member = f"{rank}:0"
    return _all(
        _claim(f"1/seat/{n}/{rank}", member),
        _write(f"1/entered/{n}", f"{member} {rank} -\n"),
        _read(f"1/meeting/{n}", f"{HOST} 1 {size} {size}"),
        *([_add(f"1/count/entered/{n}")] if n else []),
    )


def expected_form(plan: Plan) -> Expected:
    """What a rank asks until it may call the function for the first time.

    Args:
        plan: what is simulated.
    """
    slot, head = plan.ranks // 2, f"0:0:{_NONCE}"
    record: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid()}
    terms = json.dumps({"formation_size": plan.ranks, "function": "train"})
    heart = [_add(f"1/heartbeat/{slot}:0")]
    if plan.node > 1:
        record["heart"] = "shared-" + "0" * 16
        # Written once when it registers and once more when its heart is known, the first one's by itself.
        heart += [_write(f"1/member/{slot}:0", json.dumps(record))]
        record = {"host": record["host"], "pid": record["pid"]}
    return _all(
        _claim("version", "1"),
        _claim("1/terms/0", terms),
        _add(f"1/incarnations/{slot}"),
        _write(f"1/member/{slot}:0", json.dumps(record)),
        *heart,
        _read("1/head", None),
        _write("1/join/-1", f"{slot}:0 0\n"),
        _add("1/count/gone/-1"),
        _wait("1/wake/head/0"),
        _read("1/head", head),
        _read("1/head", head),
        _read(f"1/roster/0/{_NONCE}", f"[[0,{plan.ranks - 1},0]]"),
        _enter(0, slot, plan.ranks),
    )


def expected_restart(plan: Plan, lost: int = 0, looks: float = 0.0, n: int = 1) -> Expected:
    """What a rank asks from the end of an iteration until it may call the function in the next one.

    Args:
        plan: what is simulated.
        lost: ranks that are gone.
        looks: how often it had to look by itself, because the decision took long.
        n: the iteration that ends.
    """
    rank, size = plan.ranks // 2, plan.ranks
    gone = range(plan.ranks // 4, plan.ranks // 4 + lost)
    decision = json.dumps(
        {
            "call": 0,
            "n": n + 1,
            "first": 0,
            "removed": [f"{slot}:0" for slot in gone],
            "ranks": list(gone),
            "joined": [],
            "joined_ranks": [],
            "inserted": [],
            "world_size": size,
            "min_world_size": 1,
        }
    )
    head = f"0:{n}:{_NONCE}"
    # It waits for the wake, cancels that, and sees that head stands, that it is not taken for dead, and how
    # the iteration ended.
    look = _all(
        _wait(f"1/wake/head/{n + 1}"),
        Expected(1, 1),
        _read("1/head", head),
        _read(f"1/dead/{n}", None),
        _read(f"1/end/{n}", "fault"),
    )
    return _all(
        _wait(f"1/wake/end/{n}"),
        _write(f"1/arrived/{n}", f"{rank}:0 {rank} {size}\n"),
        _add(f"1/count/gone/{n}"),
        look * looks,
        _wait(f"1/wake/head/{n + 1}"),
        _read("1/head", head),
        _read(f"1/decision/{n + 1}/{_NONCE}", decision),
        _enter(n + 1, rank, size),
    )


def expected_heartbeats(plan: Plan) -> Expected:
    """What is asked in an interval for a rank's heartbeat, and to hear its neighbour's.

    Args:
        plan: what is simulated.
    """
    name = f"{plan.ranks // 2}:0" if plan.node == 1 else "shared-" + "0" * 16
    beat = _add(f"1/heartbeat/{name}")  # an addition of nothing reads, at the same cost
    looks = [_read("1/head", f"0:0:{_NONCE}"), _read("1/end/0", None)]
    if importlib.util.find_spec("ft_wrapper.monitor.heart") is None:
        return _all(beat, *looks, beat)  # before hearts did one thing at a time
    # In twelve intervals six signs of life, four looks at the neighbour's, and one at each of the others.
    return _all(beat * 10, *looks) * Fraction(1, 12 * plan.node)
