"""What several operations in a row are made of: see `StoreOperations.carry_out`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Read:
    """Reads a key that no one waits for. Gives what it holds, None if it is absent."""

    key: str


@dataclasses.dataclass(frozen=True)
class ReadLog:
    """Reads a log. Gives its entries, a line each."""

    key: str


@dataclasses.dataclass(frozen=True)
class Beats:
    """Looks for signs of life. Gives a number; see `StoreOperations.beats`."""

    key: str


@dataclasses.dataclass(frozen=True)
class Write:
    """Writes keys. Gives None."""

    values: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Wake:
    """Writes a key that wakes those who wait for it; one that is there may be left as it is. Gives None."""

    key: str
    value: str


@dataclasses.dataclass(frozen=True)
class Append:
    """Adds an entry (one line) to a log. Gives None."""

    key: str
    entry: str


@dataclasses.dataclass(frozen=True)
class Count:
    """Counts one more. Gives the count: a hint, since a lost answer may be counted twice."""

    key: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """Writes a register unless it is written. Gives what it holds then."""

    key: str
    value: str


@dataclasses.dataclass(frozen=True)
class Move:
    """Writes a register if it holds what is expected (``""``: is absent). Gives what it holds then."""

    key: str
    expected: str
    desired: str


Step = Read | ReadLog | Beats | Write | Wake | Append | Count | Claim | Move
