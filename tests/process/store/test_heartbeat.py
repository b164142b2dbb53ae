"""Who is silent, in an observer's eyes."""

from __future__ import annotations

import pytest
from torch.distributed import DistStoreError

from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.records import Member, MemberRecord
from ft_wrapper.protocol.silence import HeartbeatObserver
from ft_wrapper.store import EtcdStore, StoreMixin
from ft_wrapper.testing import Clock, FakeStore

TIMEOUT = 10.0
MEMBER = Member(1, 0)


@pytest.fixture
def clock(job_store: StoreMixin, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The observer's own."""
    clock = Clock()
    monkeypatch.setattr(job_store, "now", clock.now)
    return clock


@pytest.fixture
def observer(job_store: StoreMixin, clock: Clock) -> HeartbeatObserver:
    observer = HeartbeatObserver(Agreement(job_store).heartbeats, TIMEOUT)
    assert not observer.silent([MEMBER])
    return observer


def test_a_counter_that_stands_still_for_the_timeout_is_silence(
    job_store: StoreMixin, clock: Clock, observer: HeartbeatObserver
) -> None:
    for passed in range(1, 10):
        clock.advance(1.0)
        assert observer.stillness(MEMBER) == passed
        assert not observer.silent([])
    clock.advance(1.0)
    assert observer.silent([MEMBER]) == {MEMBER}
    Agreement(job_store).heartbeats.beat_heart(str(MEMBER))
    assert not observer.silent([MEMBER])


# On etcd a heartbeat holds for its lease's time, by etcd's clock: test_etcd_heartbeats.py.
@pytest.mark.parametrize("job_store", ["fake", "tcp"], indirect=True)
def test_a_pause_of_the_observer_silences_nobody(
    job_store: StoreMixin, clock: Clock, observer: HeartbeatObserver
) -> None:
    """As when all were stopped together: who is heard a moment later has not been silent."""
    clock.advance(1000.0)
    assert not observer.silent([MEMBER])
    Agreement(job_store).heartbeats.beat_heart(str(MEMBER))
    assert observer.stillness(MEMBER) == 0.0
    clock.advance(1000.0)
    assert not observer.silent([MEMBER])
    clock.advance(5.0)
    assert observer.silent([MEMBER]) == {MEMBER}


def test_members_that_share_a_heart_are_heard_and_silent_together(
    job_store: StoreMixin, clock: Clock
) -> None:
    pair = [Agreement(job_store).joining.register(slot, MemberRecord(heart="ours")) for slot in (5, 6)]
    alone = Agreement(job_store).joining.register(7)
    assert [Agreement(job_store).heartbeats.heart_of(member) for member in (*pair, alone)] == [
        "ours",
        "ours",
        "7:0",
    ]
    observer = HeartbeatObserver(Agreement(job_store).heartbeats, TIMEOUT)
    Agreement(job_store).heartbeats.beat_heart("ours", 60.0)
    assert not observer.silent([*pair, alone])
    before = Agreement(job_store).heartbeats.get_heartbeat(pair[0])
    Agreement(job_store).heartbeats.beat_heart("ours", 60.0)
    assert Agreement(job_store).heartbeats.get_heartbeat(pair[1]) > before
    if isinstance(job_store, EtcdStore):
        return  # on etcd the lease lasts, by etcd's clock
    for _ in range(3):
        clock.advance(TIMEOUT / 2)
        silent = observer.silent([*pair, alone])
    assert silent == {*pair, alone}
    Agreement(job_store).heartbeats.beat_heart("ours")
    assert observer.silent([*pair, alone]) == {alone}


def test_a_failed_look_forgets_what_was_seen() -> None:
    store = FakeStore()
    observer = HeartbeatObserver(Agreement(store).heartbeats, TIMEOUT)
    assert not observer.silent([MEMBER])
    store.clock.advance(9.0)
    store.fail(error=DistStoreError("lost"))
    with pytest.raises(DistStoreError):
        observer.silent([MEMBER])
    store.clock.advance(9.0)
    assert observer.stillness(MEMBER) == 0.0
