"""Jobs of members without processes, on a store whose time passes only while somebody waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from ft_wrapper.store import Decision, Member, StoreMixin, View
from ft_wrapper.testing import Clock, FakeStore
from ft_wrapper.testing.clock import Waiter


class Script(Clock):
    """A clock for one thread: whoever waits lets happen what others do meanwhile, and then time passes."""

    def __init__(self) -> None:
        super().__init__()
        self._actions: list[tuple[float, int, Callable[[], Any]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[[], Any]) -> None:
        """Lets something happen at a time."""
        self._count += 1
        heapq.heappush(self._actions, (when, self._count, action))

    def block(self, waiter: Waiter, deadline: float) -> bool:
        """Waits, in virtual time."""
        while not waiter.woken and self._actions and self._actions[0][0] <= deadline:
            when, _, action = heapq.heappop(self._actions)
            self._now = max(self._now, when)
            action()
        if not waiter.woken:
            self._now = max(self._now, deadline)
            assert self._now < 1e5, "waits for ever"
        return waiter.woken


def formed(slots: Sequence[int], store: StoreMixin | None = None) -> tuple[FakeStore, View, list[Member]]:
    """A job that has just formed: its store (a fake one, unless one is given), its iteration, its members."""
    store = store or FakeStore(Script())
    members = [store.register(slot, "{}") for slot in slots]
    for member in members:
        store.join_first(member, slots)
    current = store.read_current()
    assert current is not None
    return store, current[0], members  # type: ignore[return-value]


def go_on(
    store: StoreMixin, view: View, members: Sequence[Member], outcome: str = "fault"
) -> tuple[View, Decision]:
    """Ends the iteration, and all these members leave it, each with its place among them as its rank."""
    store.end_iteration(view.n, outcome)
    for rank, member in enumerate(members):
        store.arrive(view, member, rank, len(view.members))
    current = store.read_current()
    assert current is not None and current[0].n == view.n + 1, "they did not go on"
    return current
