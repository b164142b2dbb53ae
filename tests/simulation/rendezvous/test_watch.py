"""A node's watcher hears of every change, also where it was stopped while the record changed often."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from ft_wrapper.exception import StoreError
from ft_wrapper.rendezvous.executor import Executor
from ft_wrapper.rendezvous.moves import close
from ft_wrapper.rendezvous.presence import LOOK_AGAIN, Watcher
from ft_wrapper.rendezvous.record import Node, RendezvousRecord
from ft_wrapper.rendezvous.register import KEPT_VERSIONS, Board, RecordRegister, goodbye_key
from ft_wrapper.rendezvous.settings import RendezvousSettings
from ft_wrapper.testing import Scheduler
from tests.explorer.stores import SimulatedStore

MANY = KEPT_VERSIONS + 8
SETTINGS = RendezvousSettings("job", 1, 1)
INITIAL = RendezvousRecord(1, 1)


class Watched:
    """A watcher on simulated time, and somebody who changes the record."""

    def __init__(self, on_change: Callable[[RendezvousRecord], None] | None = None) -> None:
        self.scheduler = Scheduler(max_time=2 * LOOK_AGAIN)
        self.store = SimulatedStore(self.scheduler)
        self.told: list[tuple[float, int]] = []
        self.board = Board(on_change=on_change or self.note)
        self.register = RecordRegister(self.store.clone("watch"), INITIAL, self.board)
        self.register.read()
        watcher = Watcher(Node("0"), self.register)
        self.watch = self.scheduler.spawn("watch", watcher.run, daemon=True)
        self.writer = RecordRegister(self.store.clone("writer"), INITIAL)

    def note(self, state: RendezvousRecord) -> None:
        self.told.append((self.scheduler.now(), state.version))

    def touch(self, times: int) -> None:
        for _ in range(times):
            self.writer.touch()

    def run(self, plan: Callable[[], None]) -> None:
        self.scheduler.spawn("plan", plan)
        self.scheduler.run()


def test_stopped_while_it_waits() -> None:
    watched = Watched()

    def plan() -> None:
        watched.scheduler.sleep(1.0)
        watched.scheduler.pause(watched.watch, 20.0)
        watched.touch(MANY)
        watched.scheduler.sleep(30.0)
        watched.touch(1)
        watched.scheduler.sleep(1.0)

    watched.run(plan)
    assert watched.told == [(21.0, MANY), (31.0, MANY + 1)]


def test_stopped_between_its_read_and_its_wait() -> None:
    """The key that it waits for is gone by then: it reads the record after a while."""
    watched = Watched()

    watched.scheduler.pause_at(watched.watch, 3, 20.0)  # after one wait and one read

    def plan() -> None:
        watched.scheduler.sleep(1.0)
        watched.touch(1)
        watched.scheduler.sleep(1.0)
        assert watched.told == [(1.0, 1)]
        watched.touch(MANY)
        watched.scheduler.sleep(20.0 + LOOK_AGAIN + 1.0)

    watched.run(plan)
    assert [version for _, version in watched.told] == [1, MANY + 1]
    assert watched.told[-1][0] <= 21.0 + LOOK_AGAIN


def test_slow_to_take_in_a_record() -> None:
    told: list[tuple[float, int]] = []

    def note(state: RendezvousRecord) -> None:
        told.append((watched.scheduler.now(), state.version))
        if len(told) == 1:
            watched.scheduler.sleep(20.0)

    watched = Watched(note)

    def plan() -> None:
        watched.scheduler.sleep(1.0)
        watched.touch(1)
        watched.scheduler.sleep(1.0)
        watched.touch(MANY)
        watched.scheduler.sleep(30.0)

    watched.run(plan)
    assert told == [(1.0, 1), (21.0, MANY + 1)]


def test_told_what_another_thread_of_the_node_has_learned() -> None:
    """The heart writes a record, and puts it on the board, while the watcher tells of the one before."""

    def note(state: RendezvousRecord) -> None:
        told.append(state.version)
        if len(told) == 1:
            watched.touch(1)
            watched.board.learn(watched.writer.read())

    told: list[int] = []
    watched = Watched(note)

    def plan() -> None:
        watched.touch(1)
        watched.scheduler.sleep(1.0)

    watched.run(plan)
    assert told == [1, 2]


@pytest.mark.parametrize("knows", [False, True])
def test_a_wake_up_that_was_lost_is_passed_on(knows: bool) -> None:
    """Who wrote the record died before it could wake anybody; the heart may know the record already."""
    watched = Watched()
    register = RecordRegister(watched.store.clone("heart"), INITIAL, watched.board)
    heart = Executor(Node("0"), register, SETTINGS)

    def plan() -> None:
        watched.scheduler.sleep(1.0)
        watched.store.fail("multi_set")
        with contextlib.suppress(Exception):
            watched.touch(1)
        if knows:
            register.read()
        watched.scheduler.sleep(1.0)
        assert not watched.told
        heart.sweep()
        watched.scheduler.sleep(1.0)

    watched.run(plan)
    assert watched.told == [(2.0, 1)]


def test_its_goodbye_is_its_last_call() -> None:
    """The host of the store may end as soon as it has the goodbye."""
    watched = Watched()
    goodbye = goodbye_key(Node("0").name)

    def check_host(client: str, *_: object) -> None:
        if client == "watch" and goodbye in watched.store.snapshot():
            raise StoreError("the store is gone")

    watched.store.on_operation(check_host)

    def plan() -> None:
        watched.writer.change(lambda record: close(record, "over"))
        watched.scheduler.sleep(1.0)

    watched.run(plan)
    assert goodbye in watched.store.snapshot()
    watched.board.check()
