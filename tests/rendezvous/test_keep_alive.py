"""Who watches whom, what counts as silence, and who may take others out."""

from __future__ import annotations

import dataclasses

import pytest

from ft_wrapper.rendezvous import keys
from ft_wrapper.rendezvous.keep_alive import NeighbourWatch, neighbours
from ft_wrapper.rendezvous.state import GROUP, RANK, Node, Seat, State, may_unseat
from ft_wrapper.testing import FakeStore

NODES = [Node(str(number)) for number in range(6)]


def record(policy: str, seated: int, spares: int, empty: tuple[int, ...] = ()) -> State:
    seats = tuple(
        Seat(n, n, 1, "default", None if n in empty else NODES[n], NODES[n].id) for n in range(seated)
    )
    return State(
        1, 6, complete=True, policy=policy, seats=seats, spares=tuple(NODES[seated : seated + spares])
    )


def watched(state: State) -> list[str]:
    """Whom each node watches, as text."""
    return ["".join(other.id for other in neighbours(state, node)) for node in state.nodes]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (record(GROUP, 4, 2), ["12", "23", "34", "45", "50", "01"]),
        (record(GROUP, 2, 0), ["1", "0"]),
        (record(RANK, 4, 2), ["12", "23", "3450", "4501", "0123", "0123"]),
        (record(RANK, 2, 2), ["123", "230", "01", "01"]),
        (record(RANK, 3, 1, empty=(1,)), ["23", "30", "02"]),
        (record(RANK, 1, 1), ["1", "0"]),
    ],
)
def test_neighbours(state: State, expected: list[str]) -> None:
    assert watched(state) == expected
    assert neighbours(state, Node("other")) == []


def test_two_that_may_act_watch_each_node_under_policy_rank() -> None:
    for seated in range(1, 6):
        for spares in range(6 - seated):
            state = record(RANK, seated, spares)
            for node in state.nodes:
                watchers = [other for other in state.participants if node in neighbours(state, other)]
                assert len(watchers) >= min(2, len([p for p in state.participants if p != node])), state


def test_who_may_take_others_out() -> None:
    state = record(RANK, 2, 2)
    seated, other, spare, _ = NODES[:4]
    assert may_unseat(state, seated, [other])
    assert not may_unseat(state, spare, [other])
    assert may_unseat(state, spare, [seated, other]), "nobody else is left that could"
    assert may_unseat(dataclasses.replace(state, policy=GROUP), spare, [other])
    assert not may_unseat(state, Node("0", 1), [other]), "another incarnation has the seat"
    assert not may_unseat(state, NODES[5], [seated, other])
    assert not may_unseat(dataclasses.replace(state, closed=True), seated, [other])


class SlowStore(FakeStore):
    """Time passes before or after an operation, as a test says."""

    before = after = 0.0

    def add(self, key: str, amount: int) -> int:
        self.clock.advance(self.before)
        count = super().add(key, amount)
        self.clock.advance(self.after)
        return count


@pytest.mark.parametrize("pause", ["before", "after"])
def test_own_pause_does_not_silence_others(pause: str) -> None:
    """This node stands still for longer than the timeout while it looks; the other one beats every 5 s."""
    store = SlowStore()
    watch = NeighbourWatch(store, NODES[0], timeout=15.0)
    state = record(GROUP, 2, 0)
    assert watch.silent(state) == []
    store.clock.advance(4.9)
    setattr(store, pause, 60.0)
    assert watch.silent(state) == [], "silence of 4.9 s was taken for one of more than 15 s"
    setattr(store, pause, 0.0)
    FakeStore.add(store, keys.alive(NODES[1].name), 1)
    assert watch.silent(state) == []
    for seconds in (5.0, 5.0, 4.9):
        store.clock.advance(seconds)
        assert watch.silent(state) == []
    store.clock.advance(0.2)
    assert watch.silent(state) == [NODES[1]]
