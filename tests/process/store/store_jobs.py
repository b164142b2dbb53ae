"""Jobs of members without processes; on a store whose time passes only while somebody waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.housekeeping import past_keys
from ft_wrapper.protocol.operations import Delete
from ft_wrapper.protocol.records import Member, View
from ft_wrapper.store import StoreMixin
from ft_wrapper.testing import Clock, FakeStore
from ft_wrapper.testing.fake_store import Waiter


class Script(Clock):
    """A clock for one thread: anyone who waits lets happen what others do meanwhile, and then time passes."""

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


def formed(slots: Sequence[int]) -> tuple[Agreement, View, list[Member]]:
    """A job that has just formed, on a fake store with a script; its iteration, its members."""
    job = Agreement(FakeStore(Script()))
    return job, *formed_in(job.store, slots)


def formed_in(store: StoreMixin, slots: Sequence[int]) -> tuple[View, list[Member]]:
    """The same in a given store."""
    members = [Agreement(store).joining.register(slot) for slot in slots]
    for member in members:
        Agreement(store).joining.join_first(member, slots)
    current = Agreement(store).iterations.read_current()
    assert current is not None
    return current, members


def go_on(store: StoreMixin, view: View, members: Sequence[Member], outcome: str = "fault") -> View:
    """Ends the iteration, and all these members leave it, each with its place among them as its rank."""
    Agreement(store).ends.end_iteration(view.n, outcome)
    for rank, member in enumerate(members):
        Agreement(store).iterations.arrive(view, member, rank, len(view.members))
    current = Agreement(store).iterations.read_current()
    assert current is not None and current.n == view.n + 1, "they did not go on"
    return current


def delete_past(store: StoreMixin, view: View) -> int:
    """Deletes all past keys at once; gives their number."""
    past = past_keys(store, view, store.list_keys())
    store.execute([Delete(tuple(past))])
    return len(past)
