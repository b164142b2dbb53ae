"""What an agent knows of its ranks: a made-up job by a clock of the test, with the memory that ranks have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ft_wrapper.monitor.shared_memory import RankMemory
from ft_wrapper.monitor.tally import BOUNDS, KINDS, Histogram, RankAccount, Tally
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
        self.account.join(self.member)

    def decided(self, view: View, before: dict[str, Any] | None = None) -> None:
        self.memory.enter_iteration(view.n)
        self.account.decided(view, before or {})

    def enter(self, at: float, *, active: bool = True) -> None:
        self.memory.active, self.memory.entered_at = active, at

    def step(self, number: int, at: float) -> None:
        """It has come to a step at a moment; the first one that is told is the iteration's first."""
        if self.memory.step is None:
            self.memory._first_step, self.memory.first_stamp = number, at
        self.memory._step, self.memory.step_stamp = number, at

    def left(self, ended: float, **phases: float) -> dict[str, Any]:
        self.memory.has_left = True
        return {**self.memory.stay(), "ended": ended, "phases": phases}

    def done(self) -> None:
        self.memory.has_returned = True
        self.account.leave()

    def die(self) -> None:
        self.account.died()
        self.account.leave()
        self.tally.ended(self.pid)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tally(clock: Clock) -> Tally:
    return Tally(clock)


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


def lost(tally: Tally) -> dict[str, float]:
    """Seconds by kind, without those that are nothing."""
    return {kind: pytest.approx(seconds) for kind, seconds in tally.read().seconds.items() if seconds}


def test_before_anything_happens(tally: Tally) -> None:
    known = tally.read()
    assert (known.iteration, known.step, known.progress, known.steps_lost) == (None, None, None, 0)
    assert known.seconds == dict.fromkeys(KINDS, 0.0)
    assert sum(known.ranks.values()) == 0


def test_a_restart_from_start_to_end(tally: Tally, clock: Clock, make: Make) -> None:
    trains, waits = make(0), make(1)
    for rank in (trains, waits):
        rank.start()
    clock.now = 1004.0
    assert tally.read().ranks["outside"] == 2
    trains.join()
    clock.now = 1005.0
    waits.join()
    clock.now = 1006.0
    assert tally.read().ranks["waiting"] == 2
    assert lost(tally) == {"initialization": 9.0, "waiting": 2.0 + 1.0}
    for rank in (trains, waits):
        rank.decided(view(0))
    trains.enter(1006.0)
    waits.enter(1006.0, active=False)
    clock.now = 1010.0
    known = tally.read()
    assert (known.ranks["active"], known.ranks["spare"], known.iteration, known.step) == (1, 1, 0, None)
    assert lost(tally) == {"initialization": 9.0, "waiting": 3.0, "idle_spare": 4.0}, "loading, perhaps"
    trains.step(0, 1011.0)
    trains.step(10, 1021.0)
    clock.now = 1021.5
    known = tally.read()
    assert (known.step, known.progress) == (10, 1021.0)
    assert lost(tally) == {"initialization": 9.0, "waiting": 3.0, "idle_spare": 15.5, "training_prep": 5.0}
    # Half a second into step 10 something fails.
    before = trains.left(1021.5, abort=0.1, leave=0.2, arrive=0.3, decide=0.4)
    clock.now = 1022.0
    known = tally.read()
    assert (known.ranks["restarting"], known.ranks["spare"], known.step) == (1, 1, 10)
    clock.now = 1022.5
    trains.decided(view(1), before)
    waits.decided(view(1), waits.left(1021.5, abort=0.5, decide=0.5))
    trains.enter(1023.0)
    waits.enter(1023.0, active=False)
    trains.step(6, 1024.0)  # the checkpoint's
    trains.step(14, 1032.0)
    clock.now = 1033.0
    known = tally.read()
    assert (known.iteration, known.step, known.steps_lost) == (1, 14, 4)
    assert lost(tally) == {
        "initialization": 9.0,
        "waiting": 3.0,
        "idle_spare": 15.5 + 10.0,
        "training_prep": 5.0 + 1.0,
        "wasted_progress": 0.5 + 4.0,  # step 10 up to the fault, and 6 to 9 once more
        "recovery_abort": 0.6,
        "recovery_leave": 0.2,
        "recovery_arrive": 0.3,
        "recovery_decide": 0.9,
        "recovery_enter": 2 * 0.5,
    }
    for rank in (trains, waits):
        rank.done()
    clock.now = 2000.0
    assert tally.read().ranks["outside"] == 2
    assert sum(tally.read().seconds.values()) == pytest.approx(sum(known.seconds.values()))
    for rank in (trains, waits):
        tally.ended(rank.pid)
    assert tally.read().ranks["gone"] == 0


def test_a_process_that_dies(tally: Tally, clock: Clock, make: Make) -> None:
    """In step 5, which lasts a second; its place is empty for three, until another one has been started."""
    first = make(0)
    first.start()
    first.join()
    first.decided(view(0))
    first.enter(1000.0)
    first.step(0, 1000.0)
    first.step(5, 1005.0)
    clock.now = 1006.0
    first.account.died()
    first.account.leave()
    clock.now = 1006.5  # on a busy machine the agent hears of it later than the monitor
    tally.ended(first.pid)
    clock.now = 1009.0
    assert tally.read().ranks == {**dict.fromkeys(tally.read().ranks, 0), "gone": 1}
    assert lost(tally) == {"wasted_progress": 1.0, "gone": 3.0}
    second = make(0)
    second.start()
    clock.now = 1011.0
    second.member = Member(0, 1)
    second.join()
    clock.now = 1012.0
    assert lost(tally)["idle_spare"] == 1.0, "it waits to be let in"
    second.decided(view(1))
    second.enter(1013.0)
    second.step(3, 1014.0)
    clock.now = 1014.0
    assert tally.read().steps_lost == 2
    assert lost(tally) == {
        "wasted_progress": 1.0,
        "gone": 3.0,
        "initialization": 2.0,
        "idle_spare": 1.0,
        "recovery_enter": 1.0,
        "training_prep": 1.0,
    }


def test_one_that_was_drained_is_not_gone(tally: Tally, clock: Clock, make: Make) -> None:
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


def test_a_process_that_dies_before_it_can_stand_in_for_another(
    tally: Tally, clock: Clock, make: Make
) -> None:
    """As on a node with a broken GPU, where each further process fails while it starts."""
    first = make(0)
    first.start()
    first.join()
    first.decided(view(0))
    clock.now = 1001.0
    first.die()
    for _ in range(2):
        further = make(0)
        further.start()
        assert tally.read().ranks["gone"] == 0
        clock.now += 1.0
        tally.ended(further.pid)
        assert tally.read().ranks["gone"] == 1
        clock.now += 5.0
    assert lost(tally)["gone"] == 10.0
    last = make(0)
    last.start()
    last.join()
    clock.now += 1.0
    last.done()
    tally.ended(last.pid)
    assert tally.read().ranks["gone"] == 0


def test_a_hang_is_detection_and_not_a_step(tally: Tally, clock: Clock, make: Make) -> None:
    rank = make(0)
    rank.start()
    rank.join()
    rank.decided(view(0))
    rank.enter(1000.0)
    rank.step(0, 1000.0)
    rank.step(7, 1007.0)
    clock.now = 1067.5
    rank.account.hung(view(0).nonce, 60.0)
    rank.decided(view(1), rank.left(1067.5, abort=0.0))
    assert lost(tally) == {"detection": 60.0, "wasted_progress": 0.5}


def test_steps_are_lost_once_and_another_call_loses_none(tally: Tally, clock: Clock, make: Make) -> None:
    rank = make(0)
    rank.start()
    rank.join()
    # 0 to 100; from 50 to 70; from 50 to 80: 50 lost, and 20.
    for n, (begin, end) in enumerate([(0, 100), (50, 70), (50, 80)]):
        rank.decided(view(n), rank.left(clock.now, abort=0.0) if n else None)
        rank.enter(clock.now)
        rank.step(begin, clock.now)
        clock.now += end - begin
        rank.step(end, clock.now)
        tally.read()
    assert tally.read().steps_lost == 50 + 20
    assert lost(tally)["wasted_progress"] == 20.0 + 30.0, "in the last ones up to step 100"
    rank.done()
    rank.memory = RankMemory()
    rank.join()
    rank.decided(view(3, first=3))
    rank.enter(clock.now)
    rank.step(0, clock.now)
    rank.step(9, clock.now)
    assert (tally.read().steps_lost, tally.read().step) == (70, 9)
    rank.account.leave()
    rank.memory.close()


def test_many_iterations_are_not_kept_and_yet_counted(tally: Tally, clock: Clock, make: Make) -> None:
    rank = make(0)
    rank.start()
    rank.join()
    for n in range(100):
        rank.decided(view(n), rank.left(clock.now, abort=0.0) if n else None)
        rank.enter(clock.now)
        rank.step(n, clock.now)
        clock.now += 3
        rank.step(n + 3, clock.now)
    assert tally.read().steps_lost == 99 * 2
    assert lost(tally)["wasted_progress"] == 99 * 2.0


def test_an_iteration_that_a_rank_never_entered(tally: Tally, clock: Clock, make: Make) -> None:
    """It ended before: what its restart took is counted once."""
    rank = make(0)
    rank.start()
    rank.join()
    rank.decided(view(0))
    rank.enter(1000.0)
    clock.now = 1001.0
    rank.decided(view(1), rank.left(1000.0, abort=0.25, leave=0.25, arrive=0.25, decide=0.25))
    clock.now = 1003.0
    assert tally.read().ranks["restarting"] == 1
    rank.decided(view(2), rank.left(1000.0, abort=0.25, leave=0.25, arrive=2.0, decide=0.5))
    rank.enter(1003.5)
    clock.now = 1010.0
    assert lost(tally) == {
        "recovery_abort": 0.25,
        "recovery_leave": 0.25,
        "recovery_arrive": 2.0,
        "recovery_decide": 0.5,
        "recovery_enter": 0.5,
    }


def test_what_a_rank_has_not_told_yet_is_of_no_other_iteration(
    tally: Tally, clock: Clock, make: Make
) -> None:
    """It is in the next one already, and back at step 3, while what it says of the last one is on its way."""
    rank = make(0)
    rank.start()
    rank.join()
    rank.decided(view(0))
    rank.enter(1000.0)
    rank.step(20, 1000.0)
    rank.decided(view(1), rank.left(1000.0, abort=0.0))
    rank.enter(1000.0)
    rank.step(10, 1000.0)
    rank.step(12, 1002.0)
    before = rank.left(1002.0, abort=0.0)
    rank.memory.enter_iteration(2)
    rank.enter(1003.0)
    rank.step(3, 1003.0)
    clock.now = 1004.0
    assert (tally.read().steps_lost, tally.read().iteration) == (0, 1)
    rank.account.decided(view(2), before)
    assert (tally.read().steps_lost, tally.read().step) == (10 + 9, 3)


def test_a_function_that_tells_no_steps(tally: Tally, clock: Clock, make: Make) -> None:
    """No one knows what of it is useful; its pings are progress."""
    rank = make(0)
    rank.start()
    rank.join()
    rank.decided(view(0))
    rank.enter(1000.0)
    rank.memory.ping_stamp = 1002.0
    clock.now = 1003.0
    assert (tally.read().progress, tally.read().step, lost(tally)) == (1002.0, None, {})
    rank.decided(view(1), rank.left(1003.0, abort=0.5))
    assert lost(tally) == {"recovery_abort": 0.5}


def test_counters_never_go_down(tally: Tally, clock: Clock, make: Make) -> None:
    """Where new steps begin is worked out from two moments, and comes out earlier once steps have slowed."""
    rank = make(0)
    rank.start()
    rank.join()
    rank.decided(view(0))
    rank.enter(1000.0)
    rank.step(0, 1000.0)
    rank.step(100, 1000.0)
    rank.decided(view(1), rank.left(1000.0, abort=0.0))
    rank.enter(1000.0)
    rank.step(0, 1000.0)
    rank.step(120, 1120.0)
    high = tally.read().seconds["wasted_progress"]
    assert high == pytest.approx(100.0)
    rank.step(200, 1130.0)
    assert tally.read().seconds["wasted_progress"] == high


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
