"""What a heart does, tick by tick: for one rank, and for all of a node."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from counted import CountedStore, formed

from ft_wrapper.exception import StoreError
from ft_wrapper.monitor.heart import Heart, HeartBeat
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.operations import Heartbeat, Step
from ft_wrapper.protocol.records import Member, View
from ft_wrapper.settings import AllLimits
from ft_wrapper.store import StoreMixin
from ft_wrapper.testing import FakeStore

TIMEOUT = 60.0
SETTINGS = AllLimits(heartbeat_interval=1.0, heartbeat_timeout=30.0)


@dataclasses.dataclass(eq=False)
class Stub:
    """A rank, for a heart."""

    member: Member
    view: View | None = None
    rank: int | None = None
    is_between: bool = False
    left_out: list[bool] = dataclasses.field(default_factory=list)

    def note_left_out(self, left_out: bool) -> None:
        self.left_out.append(left_out)


def go_on(store: StoreMixin, view: View, *slots: int) -> View:
    """Ends an iteration, and only these slots go on."""
    job = Agreement(store)
    job.ends.end_iteration(view.n, "fault")
    for slot in slots:
        job.iterations.arrive(view, Member(slot, 0), slot, len(view.members))
    silent = frozenset(view.members) - {Member(slot, 0) for slot in slots}
    job.iterations.advance(view, Member(slots[0], 0), silent=silent)
    current = job.iterations.read_current()
    assert current is not None and current.n == view.n + 1
    return current


def test_a_node_costs_one_request_an_interval() -> None:
    """However many ranks it has; and the whole node is heard by one key."""
    store = CountedStore()
    view = formed(store, 16, lambda slot: f"node {slot // 8}")
    ranks = [Stub(Member(slot, 0), view, slot) for slot in range(1, 8)]  # rank 0 has some more to do
    beat = HeartBeat(Agreement(store), "node 0", SETTINGS)
    for tick in range(640):
        if tick == 40:
            requests = store.requests()
        Agreement(store).heartbeats.beat_heart("node 1")
        beat.tick(ranks)
        store.clock.advance(1.0)
    theirs = requests.pop("heartbeat/node 1") - 600
    assert requests["heartbeat/node 0"] == 300
    assert theirs == 200
    assert requests["head"] == requests["end/0"] == 50
    assert sum(requests.values()) + theirs == 600


def test_where_the_timeout_is_short_each_tick_does_all() -> None:
    store = CountedStore()
    view = formed(store, 2)
    settings = dataclasses.replace(SETTINGS, heartbeat_timeout=3.0)
    beat = HeartBeat(Agreement(store), "0:0", settings)
    requests = store.requests()
    for _ in range(10):
        Agreement(store).heartbeats.beat_heart("1:0")
        beat.tick([Stub(Member(0, 0), view)])
        store.clock.advance(1.0)
    assert requests == {"heartbeat/0:0": 10, "heartbeat/1:0": 20, "head": 10, "end/0": 10, "member/1:0": 1}


@pytest.mark.parametrize("timeout", [3.0, 30.0])
def test_a_silent_node_is_noticed_within_the_timeout_and_some_intervals(timeout: float) -> None:
    store = FakeStore()
    job = Agreement(store)
    view = formed(store, 6, lambda slot: f"node {slot // 2}")
    beat = HeartBeat(Agreement(store), "node 0", dataclasses.replace(SETTINGS, heartbeat_timeout=timeout))
    ranks = [Stub(Member(slot, 0), view) for slot in (0, 1)]
    for tick in range(200):
        if tick < 50:
            job.heartbeats.beat_heart("node 1")
        job.heartbeats.beat_heart("node 2")
        beat.tick(ranks)
        if job.ends.outcome_of(0) is not None:
            break
        store.clock.advance(1.0)
    assert tick - 50 <= timeout + 6
    assert {fault.member.slot for fault in job.ends.faults_of(0)} == {2, 3}


def test_who_was_left_out_is_told_soon_after_a_pause_and_not_much_later_without() -> None:
    for paused in (True, False):
        store = FakeStore()
        view = formed(store, 3)
        rank = Stub(Member(0, 0), view)
        beat = HeartBeat(Agreement(store), str(rank.member), SETTINGS)
        for _ in range(20):
            beat.tick([rank])
            Agreement(store).heartbeats.beat_heart("1:0")
            store.clock.advance(1.0)
        go_on(store, view, 1, 2)
        store.clock.advance(40.0 if paused else 0.0)
        ticks = 0
        while not (rank.left_out and rank.left_out[-1]):
            beat.tick([rank])
            store.clock.advance(1.0)
            ticks += 1
        assert ticks == 1 if paused else ticks <= 12


def test_an_outage_is_followed_by_a_look_at_all() -> None:
    store = FakeStore()
    view = formed(store, 2)
    rank = Stub(Member(0, 0), view)
    beat = HeartBeat(Agreement(store), str(rank.member), SETTINGS)
    for _ in range(3):
        beat.tick([rank])
        store.clock.advance(1.0)
    go_on(store, view, 1)
    store.fail(error=StoreError("out of reach"))
    with pytest.raises(StoreError):
        beat.tick([rank])
    beat.tick([rank])
    assert rank.left_out[-1]


def test_each_of_a_node_hears_whether_it_was_left_out_of_what_it_was_in() -> None:
    store = FakeStore()
    first = formed(store, 3, lambda slot: "node" if slot < 2 else None)
    behind, here = Stub(Member(0, 0), first), Stub(Member(1, 0), first)
    beat = HeartBeat(Agreement(store), "node", dataclasses.replace(SETTINGS, heartbeat_timeout=3.0))
    beat.tick([here, behind])
    here.view = go_on(store, first, 1, 2)
    beat.tick([here, behind])
    assert (behind.left_out, here.left_out) == ([False, True], [False, False])
    assert Agreement(store).ends.outcome_of(1) is None
    behind.view = None
    beat.tick([here, behind])  # another incarnation of it, that is not in yet


# ---- in its thread


class Heard(FakeStore):
    """A store that says when it was written to last, and by whom."""

    def __init__(self) -> None:
        super().__init__()
        self.beats_sent: Counter[str] = Counter()
        self.changed = threading.Condition()
        self.closed = 0

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        match steps:
            case [Heartbeat(key)]:
                with self.changed:
                    self.beats_sent[key.rpartition("/")[2]] += 1
                    self.changed.notify_all()
        return super().execute(steps)

    def await_beats(self, heart: str, more: int) -> None:
        with self.changed:
            until = self.beats_sent[heart] + more
            assert self.changed.wait_for(lambda: self.beats_sent[heart] >= until, TIMEOUT)

    def close(self) -> None:
        self.closed += 1


def test_a_heart_beats_as_long_as_somebody_lives() -> None:
    store, connected = Heard(), threading.Event()

    def connect() -> StoreMixin:
        connected.set()
        return store

    heart = Heart(connect, "node", dataclasses.replace(SETTINGS, heartbeat_interval=0.001))
    try:
        first, second = Stub(Member(0, 0)), Stub(Member(1, 0))
        assert not heart.is_beating and not connected.is_set()
        heart.add(first)
        store.await_beats("node", 3)
        heart.add(second)
        heart.remove(first)
        heart.remove(first)
        store.await_beats("node", 3)
        heart.remove(second)
        assert not heart.is_beating
        sent, deadline = -1, time.monotonic() + TIMEOUT
        while sent != store.beats_sent["node"]:  # one may have begun
            assert time.monotonic() < deadline, "it goes on"
            sent = store.beats_sent["node"]
            heart._stop.wait(0.1)
        heart.add(second)
        store.await_beats("node", 3)
    finally:
        heart.close()
    assert store.closed == 1


def test_a_shared_heart_has_a_key_that_is_no_members() -> None:
    key = keys.heartbeat(keys.shared_heart("ab12"))
    assert keys.is_shared_heart(key) and keys.member_of(key) is None
    assert not keys.is_shared_heart(keys.heartbeat("1:0"))


def test_a_heart_does_not_try_to_reconnect_for_as_long_as_others_take_to_miss_it() -> None:
    """Back at once after an outage, others begin to count; a long attempt of its own must be over in time."""
    patience: list[float] = []
    told = threading.Event()

    class Store(FakeStore):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "patience":
                patience.append(value)
                told.set()

    store = Store()
    heart = Heart(lambda: store, "0:0", SETTINGS)
    try:
        heart.add(Stub(Agreement(store).joining.register(0)))
        assert told.wait(TIMEOUT)
    finally:
        heart.close()
    assert patience == [SETTINGS.heartbeat_timeout / 2]


@pytest.mark.parametrize(("ends", "level"), [(True, "DEBUG"), (False, "WARNING")])
def test_a_job_that_ends_while_a_heart_beats_alarms_no_one(
    ends: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two calls the store may go; a beat may be on its way by then."""
    rank, tried = Stub(Member(0, 0)), threading.Semaphore(0)

    class Store(FakeStore):
        def execute(self, steps: Sequence[Step]) -> list[str | None]:
            rank.is_between = ends
            tried.release()
            raise StoreError("gone")

    store = Store()
    heart = Heart(lambda: store, str(rank.member), dataclasses.replace(SETTINGS, heartbeat_interval=0.001))
    with caplog.at_level("DEBUG", "ft_wrapper.monitor.heart"):
        try:
            heart.add(rank)
            for _ in range(3):  # by the second beat the first one's failure is in the log
                assert tried.acquire(timeout=TIMEOUT)
        finally:
            heart.close()
    assert [record.levelname for record in caplog.records] == [level]
