"""Watching the next members in the ring."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from typing import Any

import pytest
from counted import CountedStore, formed
from torch.distributed import DistStoreError

from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.entering import Entered
from ft_wrapper.protocol.neighbours import NeighbourWatch, Sight
from ft_wrapper.protocol.operations import Delete, read
from ft_wrapper.protocol.records import Decision, Member, View
from ft_wrapper.testing import FakeStore

TIMEOUT = 10.0


def members(number: int) -> tuple[Member, ...]:
    return tuple(Member(slot, 0) for slot in range(number))


MEMBERS = members(3)


@pytest.fixture
def store() -> CountedStore:
    return CountedStore()


def view_of(number: int, n: int = 0) -> View:
    return View(Decision(0, n, 0, (), (), (), (), (), number, 1), "nonce", members(number))


VIEW = view_of(3)


def share(store: FakeStore, heart: str, *slots: int) -> None:
    """Says that members have a heart together."""
    for slot in slots:
        store.set(keys.member(str(Member(slot, 0))), json.dumps({"heart": heart}))


def assign(store: FakeStore, n: int, *active_ranks: int | None) -> None:
    """Has the members enter an iteration, each with its active rank."""
    active = sum(rank is not None for rank in active_ranks)
    for slot, rank in enumerate(active_ranks):
        Agreement(store).entering.enter(
            n, Entered(Member(slot, 0), rank), (len(active_ranks), active), ("host", 1) if rank == 0 else None
        )


def pass_time(
    store: FakeStore, watch: NeighbourWatch, view: View, *heard: Member | str, seconds: float = 2 * TIMEOUT
) -> frozenset[Member]:
    """Looks once a second, while some of the hearts beat; what the last look gives."""
    silent = frozenset[Member]()
    for _ in range(int(seconds)):
        for heart in heard:
            Agreement(store).heartbeats.beat_heart(str(heart))
        silent = watch.look(view, MEMBERS[:1])
        store.clock.advance(1.0)
    return silent


@pytest.fixture
def requests(store: CountedStore) -> Counter[str]:
    """How often each key is read or written."""
    return store.requests()


def test_a_failed_look_forgets_what_was_seen(store: FakeStore) -> None:
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    assert not watch.look(VIEW, MEMBERS[:1])
    store.clock.advance(5.0)
    assert not watch.look(VIEW, MEMBERS[:1])
    store.fail(error=DistStoreError("lost"))
    with pytest.raises(DistStoreError):
        watch.look(VIEW, MEMBERS[:1])
    for _ in range(2):
        store.clock.advance(5.0)
        assert not watch.look(VIEW, MEMBERS[:1])


def test_an_end_that_woke_nobody_is_passed_on(store: FakeStore) -> None:
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    watch.look(VIEW, MEMBERS[:1])
    assert not store.check([keys.wake_end(0)])
    store.set(keys.end(0), "fault")
    watch.look(VIEW, MEMBERS[:1], sight=Sight.HEARTS | Sight.HEAD)
    assert not store.check([keys.wake_end(0)])
    watch.look(VIEW, MEMBERS[:1])
    assert store.check([keys.wake_end(0)])


def test_many_that_are_lost_together_are_known_soon_after_the_first(store: FakeStore) -> None:
    number = 256
    view = view_of(number)
    watch = NeighbourWatch(Agreement(store), "0:0", TIMEOUT)
    began = store.now()
    for _ in range(int(2 * TIMEOUT)):
        Agreement(store).heartbeats.beat_heart(str(members(number)[-1]))
        silent = watch.look(view, MEMBERS[:1])
        if len(silent) == number - 2:
            break
        store.clock.advance(1.0)
    assert silent == set(members(number)[1:-1])
    assert store.now() - began <= 1.6 * TIMEOUT


# ---- one heart for several


def test_a_node_watches_behind_each_row_of_its_members(store: FakeStore) -> None:
    """And passes over those of its own that are there no more: their heart goes on."""
    view = view_of(6)
    share(store, "a", 0, 1, 3)  # 1 is dead
    watch = NeighbourWatch(Agreement(store), "a", TIMEOUT)
    for _ in range(int(3 * TIMEOUT)):
        silent = watch.look(view, [Member(0, 0), Member(3, 0)])
        Agreement(store).heartbeats.beat_heart("a")
        Agreement(store).heartbeats.beat_heart("5:0")
        store.clock.advance(1.0)
    assert silent == {Member(2, 0), Member(4, 0)}


def test_a_member_that_got_another_heart_is_not_silent(store: FakeStore) -> None:
    share(store, "a", 1)
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    assert not pass_time(store, watch, VIEW, "a", seconds=3)
    share(store, "b", 1)
    assert not pass_time(store, watch, VIEW, "b", seconds=5 * TIMEOUT)
    assert Agreement(store).ends.outcome_of(0) is None
    assert pass_time(store, watch, VIEW)


def test_a_rank_whose_heart_is_mute_costs_a_restart_for_each_timeout_and_not_for_each_look(
    store: FakeStore,
) -> None:
    """It leaves the function and arrives each time, so the decision of who arrives last keeps it."""
    job = Agreement(store)
    view = formed(store, 3)
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    seconds = 10 * int(TIMEOUT)
    for _ in range(seconds):
        for member in (MEMBERS[0], MEMBERS[2]):
            job.heartbeats.beat_heart(str(member))
        watch.look(view, MEMBERS[:1])
        store.clock.advance(1.0)
        if job.ends.outcome_of(view.n) is not None:
            for rank, member in enumerate(view.members):
                job.iterations.arrive(view, member, rank, 3)
            current = job.iterations.read_current()
            assert current is not None
            view = current
    assert view.members == MEMBERS
    assert 2 <= view.n <= seconds / TIMEOUT


# ---- spares


def test_a_silent_spare_ends_nothing(
    store: FakeStore, requests: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assign(store, 0, 0, None, 1)
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    assert pass_time(store, watch, VIEW, MEMBERS[2], seconds=5 * TIMEOUT) == {MEMBERS[1]}
    assert watch._suspicion
    assert Agreement(store).ends.outcome_of(0) is None
    assert [fault.member for fault in Agreement(store).ends.faults_of(0)] == [MEMBERS[1]]  # for people
    [record] = caplog.records
    assert record.getMessage().startswith("slot 1, a spare, has sent no heartbeat for 10 s")
    assert requests["entered/0"] == 3 + 1  # three have entered, and it was asked once who
    assert not pass_time(store, watch, VIEW, *MEMBERS, seconds=1)
    assert not watch._suspicion


def test_those_behind_a_silent_spare_are_watched(store: FakeStore) -> None:
    assign(store, 0, 0, None, 1)
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    pass_time(store, watch, VIEW, MEMBERS[2])
    assert Agreement(store).ends.outcome_of(0) is None
    assert pass_time(store, watch, VIEW) == set(MEMBERS[1:])
    assert Agreement(store).ends.outcome_of(0) == "fault"


def test_who_may_be_active_is_not_taken_for_a_spare(store: FakeStore) -> None:
    # The other two have not come so far.
    Agreement(store).entering.enter(0, Entered(MEMBERS[0], 0), (3, 2), ("host", 1))
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    pass_time(store, watch, VIEW, MEMBERS[2])
    assert Agreement(store).ends.outcome_of(0) == "fault"


def test_a_spare_is_judged_anew_in_the_next_iteration(store: FakeStore) -> None:
    assign(store, 0, 0, None, 1)
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    pass_time(store, watch, VIEW, MEMBERS[2])
    assert Agreement(store).ends.outcome_of(0) is None
    assign(store, 1, 0, 1, None)
    pass_time(store, watch, view_of(3, 1), MEMBERS[2], seconds=1)
    assert Agreement(store).ends.outcome_of(1) == "fault"


class Happens(threading.Event):
    """Anyone who waits on it lets something happen meanwhile, each time the next thing."""

    def __init__(self, store: FakeStore, *things: Any) -> None:
        super().__init__()
        self.waited: list[float] = []
        self._store = store
        self._things = list(things)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waited.append(timeout)
        self._store.clock.advance(timeout)
        if self._things:
            self._things.pop(0)()
        return False


def test_a_restart_does_not_wait_for_a_spare_that_was_silent_before(store: FakeStore) -> None:
    job = Agreement(store)
    view = formed(store, 3)
    assign(store, 0, 0, None, 1)
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    pass_time(store, watch, view, MEMBERS[2])
    job.ends.end_iteration(0, "fault")
    stop = Happens(
        store,
        lambda: job.iterations.arrive(view, MEMBERS[2], 2, 3),
        lambda: job.iterations.arrive(view, MEMBERS[0], 0, 3),
    )
    while pause := watch.leave_out_suspects():
        stop.wait(pause)
    current = job.iterations.read_current()
    assert current is not None
    assert (current.n, current.members) == (1, (MEMBERS[0], MEMBERS[2]))
    assert sum(stop.waited) < 0.5
    assert not watch._suspicion


def test_nobody_is_left_out_after_a_look_that_was_too_late(store: FakeStore) -> None:
    """The others have gone on; what this one takes for the iteration that is on has long been followed."""
    view = formed(store, 3)
    watch = NeighbourWatch(Agreement(store), str(MEMBERS[0]), TIMEOUT)
    for _ in range(12):
        watch.look(view, MEMBERS[:1], sight=Sight.HEARTS)
        store.clock.advance(0.5)
    Agreement(store).ends.end_iteration(0, "fault")
    for rank, member in enumerate(MEMBERS):
        Agreement(store).iterations.arrive(view, member, rank, 3)
    store.execute([Delete(tuple([key for key in store.list_keys() if keys.iteration_of(key) == 0]))])
    for _ in range(int(4 * TIMEOUT)):
        assert not watch.look(view, MEMBERS[:1], sight=Sight.HEARTS)
        store.clock.advance(0.5)
    assert not watch._suspicion
    assert read(store, keys.end(0)) is None


def test_the_roster_is_read_once_for_each_head(store: FakeStore, requests: Counter[str]) -> None:
    job = Agreement(store)
    view = formed(store, 3)
    job.ends.end_iteration(0, "fault")
    for rank, member in enumerate(MEMBERS[:2]):
        job.iterations.arrive(view, member, rank, 3)
    job.iterations.advance(view, MEMBERS[0], silent=frozenset(MEMBERS[2:]))
    head = job.iterations.read_head()
    assert head is not None and head.n == 1
    watch = NeighbourWatch(Agreement(store), "a", TIMEOUT)
    requests.clear()
    for _ in range(10):
        assert not watch.look(view, MEMBERS)
        assert watch.left_out == {MEMBERS[2]}
    assert requests[keys.roster(1, head.nonce).removeprefix("ft_wrapper/1/")] == 1
