"""A soft timeout is put off while a rank waits for its loader's worker, not beyond the hard one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence

import pytest
from test_pauses import Watched

from ft_wrapper.monitor.patience import LoaderPatience
from ft_wrapper.protocol import keys
from ft_wrapper.protocol.operations import Beat, Step
from ft_wrapper.store import Member, View
from ft_wrapper.testing import FakeStore

TIMEOUT = 60.0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A rank in iteration 0: soft timeout 10 s, hard timeout 20 s; the monitor looks each second."""
    watched = Watched(monkeypatch)
    watched.monitor.view = View(0, 0, "nonce", 0, (Member(0, 0), Member(1, 0)))
    yield watched
    watched.monitor.close()


def pass_time(watched: Watched, seconds: int, *, another_waits: bool = False, has_gil: bool = True) -> None:
    """The rank does nothing; another one may wait for its loader's worker, and say so each second."""
    for _ in range(seconds):
        if another_waits:
            watched.store.execute([Beat(keys.waiting(0), 3.0)])
        if has_gil:
            watched.memory.gil_stamp = watched.now
        watched.pass_time(1.0)


def told(watched: Watched) -> list[str]:
    return [fault.message for fault in watched.monitor._agreement.ends.faults_of(0)]


def test_without_a_waiting_rank_the_soft_timeout_counts(watched: Watched) -> None:
    pass_time(watched, 12)
    assert told(watched) == ["made no progress for soft_timeout=10 s"]


def test_while_another_rank_waits_it_is_put_off_until_the_hard_timeout(watched: Watched) -> None:
    pass_time(watched, 19, another_waits=True)
    assert told(watched) == []
    pass_time(watched, 1, another_waits=True)
    assert told(watched) == ["made no progress for hard_timeout=20 s"]
    assert watched.sent == []  # the process has time to leave, as after any soft timeout
    pass_time(watched, 9, another_waits=True)
    assert watched.sent == []
    pass_time(watched, 1, another_waits=True)
    assert watched.sent == [signal.SIGTERM]


def test_when_no_rank_waits_any_more_it_counts_again(watched: Watched) -> None:
    pass_time(watched, 14, another_waits=True)
    assert told(watched) == []
    pass_time(watched, 5)  # three signs of life that did not come
    assert told(watched) == ["made no progress for soft_timeout=10 s"]


def test_progress_takes_it_back(watched: Watched) -> None:
    pass_time(watched, 15, another_waits=True)
    watched.stamp()
    pass_time(watched, 9)
    assert told(watched) == []
    pass_time(watched, 2)
    assert told(watched) == ["made no progress for soft_timeout=10 s"]
    pass_time(watched, 9)
    assert watched.sent == [signal.SIGTERM]


def test_a_rank_that_waits_itself_is_waited_for(watched: Watched) -> None:
    watched.monitor.note_loader(0, True, None)
    pass_time(watched, 18)
    assert told(watched) == []
    watched.monitor.note_loader(0, False, None)
    pass_time(watched, 4)
    assert len(told(watched)) == 1


def test_a_wait_of_another_iteration_does_not_count(watched: Watched) -> None:
    watched.monitor.note_loader(7, True, None)
    pass_time(watched, 11)
    assert told(watched) == ["made no progress for soft_timeout=10 s"]


def test_a_held_gil_is_not_put_off(watched: Watched) -> None:
    pass_time(watched, 19, another_waits=True, has_gil=False)
    assert watched.sent == []
    pass_time(watched, 1, another_waits=True, has_gil=False)
    assert watched.sent == [signal.SIGTERM]


def test_a_worker_that_will_not_answer_is_told_at_once(watched: Watched) -> None:
    watched.monitor.note_loader(0, False, "waited for its loader's worker 4711, which is dead")
    watched.look()
    watched.monitor.note_loader(0, False, "waited for its loader's worker 4711, which is dead")
    watched.look()
    assert told(watched) == ["waited for its loader's worker 4711, which is dead"]
    assert watched.monitor._agreement.ends.outcome_of(0) == "fault"


class Heard(FakeStore):
    """Says when signs of life come."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Semaphore(0)

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        given = super().execute(steps)
        if isinstance(steps[0], Beat):
            self.came.release()
        return given


def test_signs_of_life_come_as_long_as_the_rank_waits() -> None:
    store = Heard()
    waits, asks = LoaderPatience(store, 0.01), LoaderPatience(store, TIMEOUT)
    try:
        assert not asks.is_anyone_waiting(3)
        waits.note(3, True)
        for _ in range(3):
            assert store.came.acquire(timeout=TIMEOUT)
        assert asks.is_anyone_waiting(3)
        assert not asks.is_anyone_waiting(4)
        waits.note(4, True)
        while not asks.is_anyone_waiting(4):
            assert store.came.acquire(timeout=TIMEOUT)
    finally:
        waits.close()
        asks.close()
    while store.came.acquire(blocking=False):
        pass
    assert not store.came.acquire(timeout=0.1)  # none comes any more
