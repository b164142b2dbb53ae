"""The thread that says that a rank lives, while its store comes and goes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from counted import CountedStore

from ft_wrapper.attribution import Interruption
from ft_wrapper.exception import StoreError, StoreUnavailable
from ft_wrapper.monitor.heart import Heart
from ft_wrapper.monitor.watch import RankMonitor
from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.keys import BEFORE_FIRST
from ft_wrapper.protocol.operations import Heartbeat, Step
from ft_wrapper.protocol.records import Member
from ft_wrapper.settings import AllLimits
from ft_wrapper.store import StoreMixin
from ft_wrapper.testing import FakeStore

MEMBER = Member(0, 0)
TIMEOUT = 60.0
NOT_HEARD = "slot 0: no heartbeat reaches the store, retrying; evicted after 10 s"


class Unreliable(FakeStore):
    """A store that is out of reach for the second and third heartbeat."""

    def __init__(self) -> None:
        super().__init__()
        self.beats_sent = 0
        self.has_recovered = threading.Event()

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        if isinstance(steps[0], Heartbeat):
            self.beats_sent += 1
            if self.beats_sent in (2, 3):
                raise StoreUnavailable("etcd at nowhere: got no answer")
            if self.beats_sent > 4:
                self.has_recovered.set()
        return super().execute(steps)


@pytest.fixture
def settings() -> AllLimits:
    return AllLimits(heartbeat_interval=0.001, heartbeat_timeout=10.0, replaced=False)


@contextlib.contextmanager
def monitor(connect: Any, settings: AllLimits) -> Iterator[None]:
    """A monitor with a heart of its own."""
    with contextlib.closing(Heart(connect, str(MEMBER), settings)) as heart:
        watching = RankMonitor(FakeStore, MEMBER, mock.Mock(rank=None), 0, mock.Mock(), settings, heart)
        with contextlib.closing(watching):
            yield


def test_an_outage_is_told_once_and_its_end_once(
    settings: AllLimits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = Unreliable()
    with monitor(lambda: store, settings):
        assert store.has_recovered.wait(TIMEOUT)
    assert [record.getMessage() for record in caplog.records] == [
        f"{NOT_HEARD}: etcd at nowhere: got no answer",
        "slot 0: heartbeats reach the store again",
    ]


def test_a_store_that_cannot_be_reached_at_first(
    settings: AllLimits, caplog: pytest.LogCaptureFixture
) -> None:
    store, tries = Unreliable(), 0

    def connect() -> StoreMixin:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise StoreError("the store cannot be reached")
        return store

    with monitor(connect, settings):
        assert store.has_recovered.wait(TIMEOUT)
    assert caplog.records[0].getMessage() == f"{NOT_HEARD}: the store cannot be reached"


class Leaving(CountedStore):
    """A store whose members say goodbye one after the other, each when it is waited for."""

    def wait_for(self, key: str, seconds: float) -> str | None:
        if "/goodbye/" in key:
            Agreement(self).ends.say_goodbye(Member.parse(key.rpartition("/")[2], key))
        return super().wait_for(key, seconds)


def test_goodbyes_are_waited_for_without_reading_all_of_them_each_time(settings: AllLimits) -> None:
    number = 64
    store = Leaving()
    for slot in range(number):
        Agreement(store).joining.join_first(Agreement(store).joining.register(slot), range(number))
    Agreement(store).ends.say_goodbye(Member(number - 1, 0))
    requests = store.requests()
    heart = Heart(lambda: store, str(MEMBER), dataclasses.replace(settings, heartbeat_interval=5.0))
    watching = RankMonitor(lambda: store, MEMBER, mock.Mock(rank=None), 0, mock.Mock(), settings, heart)
    try:
        watching.await_goodbyes()
    finally:
        watching.close()
        heart.close()
    reads = {key: requests[key] for key in ("join/-1", "goodbyes", "head")}
    assert reads["join/-1"] <= 2
    assert reads["goodbyes"] == (number - 2) + 2  # said, and read


def test_a_death_is_published_once_but_again_if_that_failed(settings: AllLimits) -> None:
    store = FakeStore()
    heart = Heart(lambda: store, str(MEMBER), dataclasses.replace(settings, heartbeat_interval=5.0))
    memory = mock.Mock(active=True, rank=None, leave_requested=False)
    watching = RankMonitor(lambda: store, MEMBER, memory, 0, mock.Mock(), settings, heart)
    try:
        store.fail("append", error=StoreError("out of reach"))
        with pytest.raises(StoreError):
            watching._publish_death(Interruption.HARD_TIMEOUT, "was stopped")
        for _ in range(2):
            watching.rank_died()
    finally:
        watching.close()
        heart.close()
    assert [fault.message for fault in Agreement(store).ends.faults_of(BEFORE_FIRST)] == ["died"]
    assert Agreement(store).ends.deaths_of(BEFORE_FIRST) == {MEMBER}
