"""Jobs of members without processes; on a store whose time passes only while somebody waits, or real."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from store_helpers import Background

from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.housekeeping import past_keys
from ft_wrapper.protocol.operations import Delete
from ft_wrapper.protocol.records import Member, View
from ft_wrapper.store import StoreMixin
from ft_wrapper.testing import Clock, FakeStore
from ft_wrapper.testing.clock import Waiter


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


@contextlib.contextmanager
def meanwhile(store: StoreMixin, key: str | None, act: Callable[[StoreMixin], Any]) -> Iterator[None]:
    """Lets others do something while the block waits.

    Args:
        store: whose clock the others go by, if it is a script.
        key: on a real store, after which key was written they do so; None: at once.
        act: what they do.
    """
    if isinstance(store, FakeStore):
        assert isinstance(store.clock, Script)
        store.clock.at(store.now() + 0.1, lambda: act(store))
        yield
        return
    others = store.clone()

    def run() -> None:
        if key is not None:
            others.wait([key], timedelta(seconds=60))
        act(others)

    thread = Background(run)
    try:
        yield
    finally:
        thread.join()
        others.close()


def formed(slots: Sequence[int]) -> tuple[FakeStore, View, list[Member]]:
    """A job that has just formed: its store, a fake one with a script, its iteration, its members."""
    store = FakeStore(Script())
    return store, *formed_in(store, slots)


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
