"""What an agent knows of its ranks: a made-up job, with the memory that ranks have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from ft_wrapper.monitor.shared_memory import RankMemory
from ft_wrapper.monitor.tally import BOUNDS, Histogram, RankAccount, Tally
from ft_wrapper.protocol.records import Member, View


class Rank:
    """A rank that does what the test says, at the moments that it says."""

    def __init__(self, tally: Tally, slot: int) -> None:
        self.tally = tally
        self.member = Member(slot, 0)
        self.pid = 100 + slot
        self.memory = RankMemory()
        self.memory.main_stamp = 0.0  # not of the clock of the test
        self.account: RankAccount

    def start(self) -> None:
        self.tally.started(self.pid, self.member.slot)

    def join(self) -> None:
        self.account = self.tally.open(self.pid, self.memory)

    def decided(self, view: View) -> None:
        self.memory.enter_iteration(view.n)
        self.account.decided(view)

    def enter(self, at: float, *, active: bool = True) -> None:
        self.memory.active, self.memory.entered_at = active, at

    def step(self, number: int, at: float) -> None:
        """It has come to a step at a moment; the first one that is told is the iteration's first."""
        if self.memory.step is None:
            self.memory._first_step = number
        self.memory._step, self.memory.step_stamp = number, at

    def left(self) -> None:
        self.memory.has_left = True

    def done(self) -> None:
        self.memory.has_returned = True
        self.account.leave()

    def die(self) -> None:
        self.account.leave()
        self.tally.ended(self.pid)


@pytest.fixture
def tally() -> Tally:
    return Tally()


Make = Callable[[int], Rank]


@pytest.fixture
def make(tally: Tally) -> Iterator[Make]:
    with contextlib.ExitStack() as memories:

        def make(slot: int) -> Rank:
            rank = Rank(tally, slot)
            memories.callback(rank.memory.close)
            return rank

        yield make


def view(n: int, first: int = 0) -> View:
    return View(0, n, f"nonce-{first}-{n}", first, (Member(0, 0), Member(1, 0)))


def test_before_anything_happens(tally: Tally) -> None:
    known = tally.read()
    assert (known.iteration, known.step, known.progress) == (None, None, None)
    assert sum(known.ranks.values()) == 0


def test_a_restart_from_start_to_end(tally: Tally, make: Make) -> None:
    trains, waits = make(0), make(1)
    for rank in (trains, waits):
        rank.start()
    assert tally.read().ranks["outside"] == 2
    for rank in (trains, waits):
        rank.join()
    assert tally.read().ranks["waiting"] == 2
    for rank in (trains, waits):
        rank.decided(view(0))
    assert tally.read().ranks["waiting"] == 2
    trains.enter(1006.0)
    waits.enter(1006.0, active=False)
    known = tally.read()
    assert (known.ranks["active"], known.ranks["spare"], known.iteration, known.step) == (1, 1, 0, None)
    trains.step(0, 1011.0)
    trains.step(10, 1021.0)
    known = tally.read()
    assert (known.step, known.progress) == (10, 1021.0)
    trains.left()
    known = tally.read()
    assert (known.ranks["restarting"], known.ranks["spare"], known.step) == (1, 1, 10)
    waits.left()
    for rank in (trains, waits):
        rank.decided(view(1))
    known = tally.read()
    assert (known.ranks["restarting"], known.iteration, known.step) == (2, 1, 10)
    trains.enter(1023.0)
    waits.enter(1023.0, active=False)
    trains.step(6, 1024.0)  # the checkpoint's
    trains.step(8, 1026.0)
    known = tally.read()
    assert (known.iteration, known.step, known.progress) == (1, 8, 1026.0)
    trains.step(9, 1027.0)
    for rank in (trains, waits):
        rank.done()
    known = tally.read()
    assert (known.ranks["outside"], known.step, known.progress) == (2, 9, 1027.0)
    for rank in (trains, waits):
        tally.ended(rank.pid)
    assert tally.read().ranks["gone"] == 0


def test_a_step_of_the_last_iteration_is_not_that_of_this_one(tally: Tally, make: Make) -> None:
    """A rank is back at step 3, and another one has not left the last iteration yet."""
    first, second = make(0), make(1)
    for rank in (first, second):
        rank.start()
        rank.join()
        rank.decided(view(0))
        rank.enter(1000.0)
        rank.step(20, 1001.0)
    first.left()
    first.decided(view(1))
    assert tally.read().step == 20
    first.enter(1002.0)
    first.step(3, 1003.0)
    assert (tally.read().step, tally.read().iteration) == (3, 1)


def test_a_function_that_tells_no_steps(tally: Tally, make: Make) -> None:
    """Its pings are progress; without any, that its main thread runs."""
    rank = make(0)
    rank.start()
    rank.join()
    rank.decided(view(0))
    rank.memory.main_stamp = 1001.0
    assert tally.read().progress is None
    rank.enter(1000.0, active=False)
    assert tally.read().progress is None, "a spare makes none"
    rank.memory.active = True
    assert tally.read().progress == 1001.0
    rank.memory.ping_stamp, rank.memory.main_stamp = 1002.0, 1003.0
    assert (tally.read().progress, tally.read().step) == (1002.0, None)


def test_one_that_was_drained_is_not_gone(tally: Tally, make: Make) -> None:
    """It leaves without having returned; nothing stands in for it, and no alert is due."""
    rank = make(0)
    rank.start()
    rank.join()
    rank.decided(view(0))
    rank.enter(1000.0)
    rank.memory.leaves = True
    rank.die()
    assert tally.read().ranks["gone"] == 0


def test_one_whose_process_is_gone_or_comes_while_it_is_drained_is_not_gone(tally: Tally, make: Make) -> None:
    first = make(0)
    first.start()
    first.join()
    first.die()
    assert tally.read().ranks["gone"] == 1
    tally.drained(0)
    assert tally.read().ranks["gone"] == 0
    late = make(0)
    late.start()
    late.join()
    late.die()
    assert tally.read().ranks["gone"] == 0
    tally.begin_round()
    again = make(0)
    again.start()
    again.join()
    again.die()
    assert tally.read().ranks["gone"] == 1, "in the next round it is wanted"


def test_a_start_replaces_its_own_rank_alone(tally: Tally, make: Make) -> None:
    """Another process, which had joined nothing, has failed as well, and is there again first."""
    dead, other = make(0), make(1)
    for rank in (dead, other):
        rank.start()
    dead.join()
    dead.die()
    tally.ended(other.pid)
    other.start()
    assert tally.read().ranks["gone"] == 1
    make(0).start()
    assert tally.read().ranks["gone"] == 0


def test_a_process_that_dies_before_it_can_stand_in_for_another(tally: Tally, make: Make) -> None:
    """As on a node with a broken GPU, where each further process fails while it starts."""
    first = make(0)
    first.start()
    first.join()
    first.decided(view(0))
    first.die()
    for _ in range(2):
        further = make(0)
        further.start()
        assert tally.read().ranks["gone"] == 0
        tally.ended(further.pid)
        assert tally.read().ranks["gone"] == 1
    last = make(0)
    last.start()
    last.join()
    last.done()
    tally.ended(last.pid)
    assert tally.read().ranks["gone"] == 0


def test_restarts_and_how_long_they_took(tally: Tally) -> None:
    tally.restarted("terminated", {"abort": 0.002, "total": 0.0025})
    tally.restarted("terminated", {"total": 500.0, "unknown": 1.0})
    tally.restarted("join", {"total": 0.0})
    known = tally.read()
    assert known.restarts == {"terminated": 2, "join": 1}
    assert known.phases["total"].sum == pytest.approx(500.0025)
    counts = known.phases["total"].cumulative()
    assert (counts[0], counts[BOUNDS.index(0.0025)], counts[-2], counts[-1]) == (1, 2, 2, 3)
    assert known.phases["abort"].cumulative()[-1] == 1
    tally.restarted("join", {"total": 0.0})
    assert known.phases["total"].cumulative()[-1] == 3, "what was read does not change"
    assert Histogram().cumulative() == [0] * (len(BOUNDS) + 1)
