"""Who watches whom, what counts as silence, and who may take others out."""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import pytest
from simulated_nodes import neighbours

from ft_wrapper.rendezvous.executor import Executor
from ft_wrapper.rendezvous.moves import may_evict, quarantine
from ft_wrapper.rendezvous.presence import NodeHeart, NodeWatch
from ft_wrapper.rendezvous.record import Node, RendezvousRecord, RoundPolicy, Seat
from ft_wrapper.rendezvous.register import RecordRegister, alive_key
from ft_wrapper.rendezvous.settings import RendezvousSettings
from ft_wrapper.testing import FakeStore

NODES = [Node(str(number)) for number in range(6)]
SETTINGS = RendezvousSettings("job", 1, 6, keep_alive_interval=5.0, keep_alive_max_attempt=3)


def record(policy: str, seated: int, spares: int, empty: tuple[int, ...] = ()) -> RendezvousRecord:
    seats = tuple(
        Seat(n, n, 1, "default", None if n in empty else NODES[n], NODES[n].id) for n in range(seated)
    )
    return RendezvousRecord(
        1, 6, complete=True, policy=policy, seats=seats, spares=tuple(NODES[seated : seated + spares])
    )


def watched(state: RendezvousRecord) -> list[str]:
    """Whom each node watches, as text."""
    return ["".join(other.id for other in neighbours(state, node)) for node in state.nodes]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (record(RoundPolicy.GROUP, 4, 2), ["12", "23", "34", "45", "50", "01"]),
        (record(RoundPolicy.GROUP, 2, 0), ["1", "0"]),
        (record(RoundPolicy.RANK, 4, 2), ["12", "23", "3450", "4501", "01", "01"]),
        (record(RoundPolicy.RANK, 2, 2), ["123", "230", "01", "01"]),
        (record(RoundPolicy.RANK, 3, 1, empty=(1,)), ["23", "30", "02"]),
        (record(RoundPolicy.RANK, 1, 1), ["1", "0"]),
    ],
)
def test_neighbours(state: RendezvousRecord, expected: list[str]) -> None:
    assert watched(state) == expected
    assert neighbours(state, Node("other")) == []


def test_two_that_may_act_watch_each_node_under_policy_rank() -> None:
    for seated in range(1, 6):
        for spares in range(6 - seated):
            state = record(RoundPolicy.RANK, seated, spares)
            for node in state.nodes:
                watchers = [other for other in state.participants if node in neighbours(state, other)]
                assert len(watchers) >= min(2, len([p for p in state.participants if p != node])), state


def test_who_may_take_others_out() -> None:
    state = record(RoundPolicy.RANK, 2, 2)
    seated, other, spare, _ = NODES[:4]
    assert may_evict(state, seated, [other])
    assert not may_evict(state, spare, [other])
    assert may_evict(state, spare, [seated, other]), "no one else is left that could"
    assert may_evict(dataclasses.replace(state, policy=RoundPolicy.GROUP), spare, [other])
    assert not may_evict(state, Node("0", 1), [other]), "another incarnation has the seat"
    assert not may_evict(state, NODES[5], [seated, other])
    assert not may_evict(dataclasses.replace(state, closed=True), seated, [other])


class SlowStore(FakeStore):
    """Time passes before or after an operation, as a test says."""

    before = after = 0.0

    def add(self, key: str, amount: int) -> int:
        self.clock.advance(self.before)
        count = super().add(key, amount)
        self.clock.advance(self.after)
        return count


Store = TypeVar("Store", bound=FakeStore)


def observed(store: Store) -> tuple[Store, NodeWatch]:
    """A store, and what the first node sees of the others there."""
    return store, NodeWatch(store, NODES[0], timeout=15.0, interval=5.0)


@pytest.mark.parametrize("pause", ["before", "after"])
def test_own_pause_does_not_silence_others(pause: str) -> None:
    """This node stands still for longer than the timeout while it looks; the other one beats every 5 s."""
    store, watch = observed(SlowStore())
    state = record(RoundPolicy.GROUP, 2, 0)
    assert watch.silent(state) == []
    store.clock.advance(4.9)
    setattr(store, pause, 60.0)
    assert watch.silent(state) == [], "silence of 4.9 s was taken for one of more than 15 s"
    setattr(store, pause, 0.0)
    FakeStore.add(store, alive_key(NODES[1].name), 1)
    assert watch.silent(state) == []
    for seconds in (5.0, 5.0, 4.9):
        store.clock.advance(seconds)
        assert watch.silent(state) == []
    store.clock.advance(5.2)
    assert watch.silent(state) == [], "the others may not be back yet"
    for seconds in (5.0, 5.0, 5.0):
        store.clock.advance(seconds)
        found = watch.silent(state)
    assert found == [NODES[1]]


def beat(store: FakeStore, *nodes: Node) -> None:
    for node in nodes:
        store.add(alive_key(node.name), 1)


def looks(
    watch: NodeWatch, store: FakeStore, state: RendezvousRecord, count: int, *living: Node
) -> list[Node]:
    """So many looks, one every 5 s, while these live; what the last one found."""
    found: list[Node] = []
    for _ in range(count):
        beat(store, *living)
        store.clock.advance(5.0)
        found = watch.silent(state)
    return found


def test_all_that_were_lost_together_are_silent_at_the_same_time() -> None:
    store, watch = observed(FakeStore())
    state = record(RoundPolicy.GROUP, 6, 0)
    assert looks(watch, store, state, 8, *NODES[1:]) == []
    found = [len(looks(watch, store, state, 1, NODES[5])) for _ in range(6)]
    assert found == [0, 0, 2, 2, 4, 4], "the fifth look was to find all four that were lost"


def test_what_was_seen_stays_when_places_change() -> None:
    """A living node comes to be between this one and those that it observes."""
    store, watch = observed(FakeStore())
    state = record(RoundPolicy.GROUP, 5, 0)
    looks(watch, store, state, 8, *NODES[1:])
    looks(watch, store, state, 5, NODES[4])
    places = dict(enumerate((NODES[0], NODES[4], NODES[5], NODES[2], NODES[3])))
    changed = dataclasses.replace(
        state,
        seats=tuple(dataclasses.replace(seat, occupant=places[n]) for n, seat in enumerate(state.seats)),
    )
    assert set(looks(watch, store, changed, 1, NODES[4], NODES[5])) == {NODES[2], NODES[3]}


def test_a_look_reads_two_counters_while_all_live() -> None:
    store, watch = observed(FakeStore())
    reads: list[str] = []
    state = record(RoundPolicy.GROUP, 6, 0)
    looks(watch, store, state, 4, *NODES[1:])
    store.on_operation(lambda client, operation, args: reads.append(str(args[0])) if args[1] == 0 else None)
    looks(watch, store, state, 1, NODES[2])  # the next one is a little late
    looks(watch, store, state, 1, *NODES[1:])
    assert len(reads) == 4


@pytest.mark.parametrize("away", [3.0, 8.0, 20.0, 55.0])
def test_nodes_that_reconnect_later_are_not_silent(away: float) -> None:
    """An outage of the store: the others' clients notice its end as late as their attempts let them."""
    store, watch = observed(SlowStore())
    state = record(RoundPolicy.GROUP, 3, 0)
    assert looks(watch, store, state, 8, *NODES[1:3]) == []
    store.clock.advance(5.0 + away)  # its own sign of life had to wait
    assert watch.silent(state) == []
    late = min(16.0, away + 5.0) + 1.0 + 5.0
    for _ in range(int(late / 5.0)):
        assert looks(watch, store, state, 1) == [], "taken out before it could reconnect"
    assert looks(watch, store, state, 8, *NODES[1:3]) == []
    assert NODES[1] in looks(watch, store, state, 8)


def test_a_store_that_stays_slow_keeps_no_lost_node_in() -> None:
    store, watch = observed(FakeStore())
    state, found, seconds = record(RoundPolicy.GROUP, 2, 0), list[Node](), 0.0
    while not found:
        store.clock.advance(9.0)  # each look comes late
        seconds += 9.0
        found = watch.silent(state)
        assert seconds < 200.0
    assert found == [NODES[1]]


def heart_of(node: Node, store: FakeStore, state: RendezvousRecord) -> NodeHeart:
    """A node's heart, whose beats the test asks for."""
    register = RecordRegister(store, state)
    register.board.learn(state)
    return NodeHeart(Executor(node, register, SETTINGS))


def test_a_node_that_joins_again_is_not_taken_out_for_its_silence_before() -> None:
    """Its heart's connection may come back later than the one that it joins by."""
    store, options = FakeStore(), SETTINGS.options()
    state = dataclasses.replace(record(RoundPolicy.RANK, 3, 0, empty=(2,)), options=options)
    heart, cut_off = heart_of(NODES[0], store, state), heart_of(NODES[2], store, state)._executor

    def looks_until_it_is_out() -> int:
        for count in range(1, 10):
            beat(store, NODES[1])
            store.clock.advance(5.0)
            heart._register.read()
            assert not heart._beat()
            if cut_off.register.read().place_of(NODES[2]) is None:
                return count
        raise AssertionError("it was never taken out")

    leaving, looks = None, list[int]()
    for _ in range(3):
        leaving = cut_off.join(leaving).round
        looks.append(looks_until_it_is_out())
    assert looks[1:] == [4, 4], "it was to have the whole timeout again, and no longer"


@pytest.mark.parametrize(
    ("state", "who"),
    [(record(RoundPolicy.GROUP, 2, 0), 0), (record(RoundPolicy.RANK, 2, 1), 0), (RendezvousRecord(1, 6), 5)],
    ids=["group", "rank", "all are kept out"],
)
def test_one_that_dies_while_it_is_kept_out_is_forgotten(state: RendezvousRecord, who: int) -> None:
    """The first node sees to that; those in the record stay there."""
    store = FakeStore()
    heart = heart_of(NODES[who], store.clone(), state)
    for node in NODES[3:]:
        heart._register.change(functools.partial(quarantine, node=node, reason="no disk", now=0.0))

    def left_after(beats: int, *living: Node) -> list[str]:
        for _ in range(beats):
            beat(store, *state.nodes, *living)
            store.clock.advance(5.0)
            assert not heart._beat()
        return [one.node.id for one in heart._register.read().quarantine]

    assert left_after(9, *NODES[3:]) == ["3", "4", "5"]
    assert left_after(2, *NODES[4:]) == ["3", "4", "5"]
    assert left_after(4, *NODES[4:]) == ["4", "5"]


def test_only_the_first_node_looks_after_those_that_are_kept_out() -> None:
    store, reads = FakeStore(), list[str]()
    state = quarantine(record(RoundPolicy.GROUP, 2, 0), NODES[5], "no disk", 0.0)
    hearts = [heart_of(node, store.clone(), state) for node in NODES[:2]]
    store.on_operation(lambda client, operation, args: reads.append(str(args)))
    for heart, count in zip(hearts, (1, 0), strict=True):
        reads.clear()
        heart._beat()
        assert sum(alive_key(NODES[5].name) in one for one in reads) == count
