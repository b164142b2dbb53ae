"""A store that counts what it is asked for, and a job in a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.records import MemberRecord, View
from ft_wrapper.store import StoreMixin
from ft_wrapper.testing import FakeStore


class CountedStore(FakeStore):
    """A store in memory that needs one request for a register, as a TCPStore does."""

    reads_by_compare_set = True

    def requests(self) -> Counter[str]:
        """How often each key is read or written from now on: by its name behind the version."""
        seen: Counter[str] = Counter()

        def count(_: str, operation: str, arguments: Sequence[Any]) -> None:
            key = arguments[0] if isinstance(arguments[0], str) else arguments[0][0]
            seen[key.removeprefix("ft_wrapper/1/")] += 1

        self.on_operation(count)
        return seen


def formed(store: StoreMixin, number: int, heart: Callable[[int], str | None] = lambda slot: None) -> View:
    """A job that has just formed, each slot with its heart."""
    for slot in range(number):
        name = heart(slot)
        Agreement(store).joining.join_first(
            Agreement(store).joining.register(slot, MemberRecord(heart=name or None)), range(number)
        )
    current = Agreement(store).iterations.read_current()
    assert current is not None
    return current
