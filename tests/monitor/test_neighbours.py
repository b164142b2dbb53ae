"""Watching the next members in the ring."""

from __future__ import annotations

import pytest
from torch.distributed import DistStoreError

from ft_wrapper.monitor.neighbours import NeighbourWatch
from ft_wrapper.store import Member, View, keys
from ft_wrapper.testing import FakeStore

TIMEOUT = 10.0
MEMBERS = tuple(Member(slot, 0) for slot in range(3))
VIEW = View(0, 0, "nonce", 0, MEMBERS)


def test_those_behind_a_silent_member_are_watched_too() -> None:
    store = FakeStore()
    watch = NeighbourWatch(store, MEMBERS[0], TIMEOUT)
    for _ in range(3):
        store.send_heartbeat(MEMBERS[2])
        silent = watch.look(VIEW)
        store.clock.advance(5.0)
    assert silent == {MEMBERS[1]}
    assert store.outcome_of(0) == "fault"
    assert [fault.member for fault in store.faults_of(0)] == [MEMBERS[1]]


def test_a_failed_look_forgets_what_was_seen() -> None:
    store = FakeStore()
    watch = NeighbourWatch(store, MEMBERS[0], TIMEOUT)
    assert not watch.look(VIEW)
    store.clock.advance(5.0)
    assert not watch.look(VIEW)
    store.fail(error=DistStoreError("lost"))
    with pytest.raises(DistStoreError):
        watch.look(VIEW)
    for _ in range(2):
        store.clock.advance(5.0)
        assert not watch.look(VIEW)


def test_an_end_that_woke_nobody_is_passed_on() -> None:
    store = FakeStore()
    watch = NeighbourWatch(store, MEMBERS[0], TIMEOUT)
    watch.look(VIEW)
    assert not store.check([keys.wake_end(0)])
    store.set(keys.end(0), "fault")
    watch.look(VIEW)
    assert store.check([keys.wake_end(0)])
