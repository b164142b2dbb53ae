"""Who is silent, in an observer's eyes."""

from __future__ import annotations

import pytest
from torch.distributed import DistStoreError

from ft_wrapper.store import HeartbeatObserver, Member, StoreMixin
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
    observer = HeartbeatObserver(job_store, TIMEOUT)
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
    job_store.send_heartbeat(MEMBER)
    assert not observer.silent([MEMBER])


# On etcd a heartbeat holds for its lease's time, by etcd's clock: test_etcd_heartbeats.py.
@pytest.mark.parametrize("job_store", ["fake", "tcp"], indirect=True)
def test_a_pause_of_the_observer_silences_nobody(
    job_store: StoreMixin, clock: Clock, observer: HeartbeatObserver
) -> None:
    """As when all were stopped together: who is heard a moment later has not been silent."""
    clock.advance(1000.0)
    assert not observer.silent([MEMBER])
    job_store.send_heartbeat(MEMBER)
    assert observer.stillness(MEMBER) == 0.0
    clock.advance(1000.0)
    assert not observer.silent([MEMBER])
    clock.advance(5.0)
    assert observer.silent([MEMBER]) == {MEMBER}


def test_a_failed_look_forgets_what_was_seen() -> None:
    store = FakeStore()
    observer = HeartbeatObserver(store, TIMEOUT)
    assert not observer.silent([MEMBER])
    store.clock.advance(9.0)
    store.fail(error=DistStoreError("lost"))
    with pytest.raises(DistStoreError):
        observer.silent([MEMBER])
    store.clock.advance(9.0)
    assert observer.stillness(MEMBER) == 0.0
