"""How the slow ranks of a node are followed: from what ranks answer to what is said of them."""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from ft_wrapper.monitor.evidence import STEPS, WHERE, StepTimings, Whereabouts
from ft_wrapper.monitor.lateness import Pace, Signs
from ft_wrapper.monitor.shared_memory import RankMemory
from ft_wrapper.monitor.slow import PacedRank, SlowRanks

STEP = 0.05
BATCH = 10  # steps in an answer


class Node:
    """Three ranks of a node that all are this process."""

    def __init__(self) -> None:
        self.ranks = [PacedRank(RankMemory(), os.getpid()) for _ in range(3)]
        self.slow = SlowRanks()
        self.asked = Counter[bytes]()
        self.step, self.now, self.n = 0, 0.0, 7
        self._draw = random.Random(1)

    def go_on(self, steps: int, late: float = 0.0, *, lost: int = 0, collectives: float = 3.0) -> list[Any]:
        """Does steps, of which rank 1 is late in each; returns the news."""
        news = []
        for _ in range(steps // BATCH):
            numbers = range(self.step + 1 + lost, self.step + 1 + BATCH)
            self.step, self.now = self.step + BATCH, self.now + BATCH * STEP
            for place, rank in enumerate(self.ranks):
                run_ups = {n: (0.01 * self._draw.random() + late * (place == 1), 0.0) for n in numbers}
                rank.heard(StepTimings(run_ups, STEP, collectives), self.now)
            news += self.turn()
        return news

    def turn(self) -> list[Any]:
        def ask(question: bytes) -> None:
            self.asked[question] += 1
            for rank in self.ranks if question == WHERE else ():
                rank.stands(Whereabouts(words="at a.py:1 in f"))

        changed = self.slow.turn(self.ranks, self.n, STEP, self.now, ask)
        return [(self.ranks.index(one), one.slow, one.is_lasting) for one in changed]


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    for rank in node.ranks:
        rank.memory.close()


def test_a_rank_begins_to_be_slow_lasts_and_ends_once(node: Node) -> None:
    assert node.go_on(100) == []
    (begins,) = node.go_on(160, 0.3 * STEP)
    assert node.asked[WHERE] and node.asked[STEPS]
    assert begins[0] == 1 and begins[1].share == pytest.approx(0.3, abs=0.1) and begins[1].step == STEP
    assert begins[1].cause == "asleep" and begins[1].words == "at a.py:1 in f"
    ((rank, slow, is_lasting),) = node.go_on(400, 0.3 * STEP)
    assert rank == 1 and slow is not None and is_lasting
    assert node.go_on(200) == [(1, None, False)]
    assert node.ranks[1].cost == pytest.approx(0.3 * STEP * node.ranks[1].since[1], rel=0.3)


def test_the_end_of_an_iteration_ends_it(node: Node) -> None:
    assert len(node.go_on(200, 0.3 * STEP)) == 1
    node.n += 1
    assert node.turn() == [(1, None, False)] and node.turn() == []
    assert len(node.go_on(200, 0.3 * STEP)) == 1, "it begins again"


def test_ranks_are_asked_often_enough_that_no_step_is_forgotten(node: Node) -> None:
    for collectives, most in ((3.0, BATCH), (25.0, 1)):
        node.go_on(BATCH, collectives=collectives)
        node.now += 100.0
        node.turn()
        assert 0.8 <= node.slow.due - node.now + 1e-6 <= max(0.8, most * STEP) + 1e-5


def test_steps_that_were_forgotten_are_said_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.go_on(300, lost=6, collectives=40.0)
    (said,) = caplog.messages
    assert "slow ranks are found late: 6" in said and "some 40 collectives" in said


def test_votes_without_a_collective_are_not_forgotten_steps(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.go_on(300, lost=6, collectives=3.0)
    assert not caplog.messages


def test_all_ranks_of_a_node_that_is_late_are_slow(node: Node) -> None:
    node.go_on(100)
    assert node.slow.pace is not None
    fast = Pace(node.slow.pace.run_up - 0.2 * STEP, Signs())
    node.slow.heard(fast)
    assert node.go_on(BATCH) == [], "once may be chance"
    node.slow.heard(fast)
    assert sorted(rank for rank, slow, _ in node.go_on(5 * BATCH) if slow) == [0, 1, 2]
    node.slow.heard(node.slow.pace)
    assert sorted(rank for rank, slow, _ in node.go_on(BATCH) if not slow) == [0, 1, 2]


def test_a_lack_of_processors_is_said_once_and_names_no_rank(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {id(rank): 0.7 if place == 1 else 0.4 for place, rank in enumerate(node.ranks)}
    monkeypatch.setattr(PacedRank, "signs", lambda self: Signs(waited=waits[id(self)]))
    with caplog.at_level(logging.WARNING):
        assert node.go_on(400, 0.3 * STEP) == []
    assert caplog.messages == ["all ranks of this node wait for a processor for 40% of the time"]
