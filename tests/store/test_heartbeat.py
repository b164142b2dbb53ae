"""Who is silent, in an observer's eyes."""

from __future__ import annotations

import pytest
from torch.distributed import DistStoreError

from ft_wrapper.store import HeartbeatObserver, Member
from ft_wrapper.testing import FakeStore

TIMEOUT = 10.0
MEMBER = Member(1, 0)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def observer(store: FakeStore) -> HeartbeatObserver:
    observer = HeartbeatObserver(store, TIMEOUT)
    assert not observer.silent([MEMBER])
    return observer


def test_a_counter_that_stands_still_for_the_timeout_is_silence(
    store: FakeStore, observer: HeartbeatObserver
) -> None:
    for passed in range(1, 10):
        store.clock.advance(1.0)
        assert observer.stillness(MEMBER) == passed
        assert not observer.silent([])
    store.clock.advance(1.0)
    assert observer.silent([MEMBER]) == {MEMBER}
    store.send_heartbeat(MEMBER)
    assert not observer.silent([MEMBER])


def test_a_pause_of_the_observer_silences_nobody(store: FakeStore, observer: HeartbeatObserver) -> None:
    """As when all were stopped together: who is heard a moment later has not been silent."""
    store.clock.advance(1000.0)
    assert not observer.silent([MEMBER])
    store.send_heartbeat(MEMBER)
    assert observer.stillness(MEMBER) == 0.0
    store.clock.advance(1000.0)
    assert not observer.silent([MEMBER])
    store.clock.advance(5.0)
    assert observer.silent([MEMBER]) == {MEMBER}


def test_a_failed_look_forgets_what_was_seen(store: FakeStore, observer: HeartbeatObserver) -> None:
    store.clock.advance(9.0)
    store.fail(error=DistStoreError("lost"))
    with pytest.raises(DistStoreError):
        observer.silent([MEMBER])
    store.clock.advance(9.0)
    assert observer.stillness(MEMBER) == 0.0
