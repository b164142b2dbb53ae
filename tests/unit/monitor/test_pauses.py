"""A monitor that did not run itself for a while counts that time as no one's silence."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from ft_wrapper.monitor import watch
from ft_wrapper.monitor.shared_memory import Phase
from ft_wrapper.monitor.watch import Pauses, RankMonitor
from ft_wrapper.protocol.records import Member
from ft_wrapper.settings import AllLimits
from ft_wrapper.testing import FakeStore

SETTINGS = AllLimits(
    monitor_process_interval=1.0, soft_timeout=10.0, hard_timeout=20.0, progress_watchdog_interval=1.0
)


def test_only_gaps_are_left_out_and_only_as_far_as_they_are_later() -> None:
    pauses = Pauses(1.0, 0.0)
    pauses.expect(1.0)
    pauses.look(1.9)  # a busy machine
    assert pauses.since(0.0, 1.9) == 1.9
    pauses.expect(2.9)
    pauses.look(101.9)
    assert pauses.since(1.4, 101.9) == pytest.approx(0.5)
    assert pauses.since(1.9, 101.9) == pauses.since(50.0, 101.9) == 0.0
    # What was stamped after the pause, and before the watcher looked.
    assert pauses.since(101.4, 111.9) == pytest.approx(10.0)
    assert pauses.since(float("inf"), 111.9) == -float("inf")


def test_pause_after_pause_is_left_out() -> None:
    pauses, now = Pauses(1.0, 0.0), 0.0
    for _ in range(1000):
        pauses.expect(now + 1.0)
        now += 100.0
        pauses.look(now)
    assert pauses.since(0.0, now) == 0.0


class Watched:
    """A rank's monitor with a clock of the test's.

    Args:
        monkeypatch: turns the monitor's clock into this one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.sent: list[int] = []
        clock = mock.Mock(monotonic=lambda: self.now, time=lambda: 0.0)
        monkeypatch.setattr(watch, "time", clock)
        self.memory: Any = mock.Mock(
            last_step=dict,
            phase=Phase.WATCHED,
            hang_protection_disabled=0,
            iteration=0,
            rank=None,
            active=True,
            leave_stamp=0.0,
        )
        self.stamp()
        self.store = store = FakeStore()
        whose = Member(0, 0), self.memory, 0, mock.Mock()
        self.monitor = RankMonitor(lambda: store, *whose, SETTINGS, mock.Mock())
        monkeypatch.setattr(self.monitor, "_end_rank", self._end)

    def _end(self, pidfd: int, message: str) -> None:
        self.sent.append(signal.SIGTERM)
        self.monitor._is_dying = True

    def stamp(self) -> None:
        """The rank makes progress."""
        stamp = self.now
        self.memory.gil_stamp = stamp
        self.memory.progress_stamp = lambda slack: stamp

    def pass_time(self, seconds: float) -> None:
        """The monitor looks whenever it wants to; the rank does nothing."""
        end = self.now + seconds
        while self.now < end and not self.sent:
            self.now = min(end, self.now + self.monitor.pause())
            self.look()

    def look(self) -> None:
        """The monitor looks, and tells what it has to tell."""
        self.monitor.keep_time(-1)
        for publisher in self.monitor._publishers:
            publisher.join(60.0)
            assert not publisher.is_alive()

    def pause(self, seconds: float) -> None:
        """Neither of them runs."""
        self.monitor.pause()
        self.now += seconds
        self.look()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(monkeypatch)
    yield watched
    watched.monitor.close()


def test_a_rank_that_was_paused_with_its_monitor_is_left_alone(watched: Watched) -> None:
    for _ in range(5):
        watched.stamp()
        watched.pass_time(0.5)
        watched.pause(3600.0)
    watched.pass_time(9.0)
    assert watched.sent == []
    assert watched.monitor._reported < 0


def test_after_a_pause_time_counts_again(watched: Watched) -> None:
    """It has stood still for nine seconds when it is paused, and goes on doing so afterwards."""
    watched.pass_time(9.0)
    watched.pause(3600.0)
    assert watched.monitor._reported < 0
    watched.pass_time(2.5)
    assert watched.monitor._reported == 0
    assert watched.sent == []
    watched.pass_time(9.0)
    assert watched.sent == [signal.SIGTERM]
