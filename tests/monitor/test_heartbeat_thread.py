"""The thread that says that a rank lives, while its store comes and goes."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from ft_wrapper.exception import StoreError, StoreUnavailable
from ft_wrapper.monitor.rank_monitor import RankMonitor
from ft_wrapper.monitor.settings import MonitorSettings
from ft_wrapper.store import Member, StoreMixin
from ft_wrapper.testing import FakeStore

MEMBER = Member(0, 0)
TIMEOUT = 60.0


class Unreliable(FakeStore):
    """A store that is out of reach for the second and third heartbeat."""

    def __init__(self) -> None:
        super().__init__()
        self.beats_sent = 0
        self.has_recovered = threading.Event()

    def send_heartbeat(self, member: Member, lasts: float = 0.0) -> None:
        self.beats_sent += 1
        if self.beats_sent in (2, 3):
            raise StoreUnavailable("etcd at nowhere: got no answer")
        if self.beats_sent > 4:
            self.has_recovered.set()


@pytest.fixture
def settings() -> MonitorSettings:
    return MonitorSettings(
        interval=1.0,
        soft_timeout=10.0,
        hard_timeout=20.0,
        watchdog_interval=1.0,
        termination_grace_time=1.0,
        heartbeat_interval=0.001,
        heartbeat_timeout=10.0,
        barrier_timeout=10.0,
        join_window=1.0,
        replaced=False,
    )


def monitor(connect: Any, settings: MonitorSettings) -> RankMonitor:
    return RankMonitor(connect, MEMBER, memory=None, pid=0, settings=settings)  # type: ignore[arg-type]


def test_an_outage_is_told_once_and_its_end_once(
    settings: MonitorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = Unreliable()
    watching = monitor(lambda: store, settings)
    assert store.has_recovered.wait(TIMEOUT)
    watching.close()
    assert [record.getMessage() for record in caplog.records] == [
        "0:0 is not heard for now: etcd at nowhere: got no answer",
        "0:0 is heard again",
    ]


def test_a_store_that_cannot_be_reached_at_first(
    settings: MonitorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    store, tries = Unreliable(), 0

    def connect() -> StoreMixin:
        nonlocal tries
        tries += 1
        if tries == 2:  # the first one is the monitor's own, the second one the heartbeat's
            raise StoreError("the store cannot be reached")
        return store

    watching = monitor(connect, settings)
    assert store.has_recovered.wait(TIMEOUT)
    watching.close()
    assert caplog.records[0].getMessage() == "0:0 is not heard yet: the store cannot be reached"
