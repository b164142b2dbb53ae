"""Who is silent, in an observer's eyes. On etcd a heartbeat is a lease: test_etcd_heartbeats.py."""

from __future__ import annotations

import pytest

from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.records import Member, MemberRecord
from ft_wrapper.protocol.silence import HeartbeatObserver
from ft_wrapper.testing import Clock

TIMEOUT = 10.0
MEMBER = Member(1, 0)


@pytest.fixture
def clock(job: Agreement) -> Clock:
    return job.store.clock


@pytest.fixture
def observer(job: Agreement) -> HeartbeatObserver:
    observer = HeartbeatObserver(job.heartbeats, TIMEOUT)
    assert not observer.silent([MEMBER])
    return observer


def test_a_counter_that_stands_still_for_the_timeout_is_silence(
    job: Agreement, clock: Clock, observer: HeartbeatObserver
) -> None:
    for passed in range(1, 10):
        clock.advance(1.0)
        assert observer.stillness(MEMBER) == passed
        assert not observer.silent([])
    clock.advance(1.0)
    assert observer.silent([MEMBER]) == {MEMBER}
    job.heartbeats.beat_heart(str(MEMBER))
    assert not observer.silent([MEMBER])


def test_a_pause_of_the_observer_silences_nobody(
    job: Agreement, clock: Clock, observer: HeartbeatObserver
) -> None:
    """As when all were stopped together: who is heard a moment later has not been silent."""
    clock.advance(1000.0)
    assert not observer.silent([MEMBER])
    job.heartbeats.beat_heart(str(MEMBER))
    assert observer.stillness(MEMBER) == 0.0
    clock.advance(1000.0)
    assert not observer.silent([MEMBER])
    clock.advance(5.0)
    assert observer.silent([MEMBER]) == {MEMBER}


def test_members_that_share_a_heart_are_heard_and_silent_together(job: Agreement, clock: Clock) -> None:
    pair = [job.joining.register(slot, MemberRecord(heart="ours")) for slot in (5, 6)]
    alone = job.joining.register(7)
    assert [job.heartbeats.heart_of(member) for member in (*pair, alone)] == ["ours", "ours", "7:0"]
    observer = HeartbeatObserver(job.heartbeats, TIMEOUT)
    job.heartbeats.beat_heart("ours", 60.0)
    assert not observer.silent([*pair, alone])
    before = job.heartbeats.get_heartbeat(pair[0])
    job.heartbeats.beat_heart("ours", 60.0)
    assert job.heartbeats.get_heartbeat(pair[1]) > before
    for _ in range(3):
        clock.advance(TIMEOUT / 2)
        silent = observer.silent([*pair, alone])
    assert silent == {*pair, alone}
    job.heartbeats.beat_heart("ours")
    assert observer.silent([*pair, alone]) == {alone}
