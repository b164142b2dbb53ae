"""What the rank writes meanwhile: who watches it reads each field of its memory once."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import Any
from unittest import mock

from ft_wrapper.agent.group import RankMetrics
from ft_wrapper.monitor.shared_memory import _NO_STEP, Phase, RankMemory
from ft_wrapper.monitor.watch import RankMonitor
from ft_wrapper.protocol.records import Member
from ft_wrapper.settings import AllLimits
from ft_wrapper.testing import FakeStore

NOW = time.monotonic()


def flickering(*values: float) -> Any:
    """A field that holds the next of these values whenever it is read; what is written to it is ignored."""
    held = itertools.cycle(values)
    return property(lambda self: next(held), lambda self, value: None)


class Flickering(RankMemory):
    """Memory of a rank that leaves the function, and enters the next iteration, at each read."""

    leave_stamp = flickering(NOW, 0.0)
    _rank = flickering(3, -1)
    _step = flickering(7, _NO_STEP)


def test_a_rank_that_leaves_as_its_monitor_looks_is_not_ended() -> None:
    with contextlib.closing(Flickering()) as memory:
        memory.enter_phase(Phase.WATCHED)
        heart = mock.Mock(**{"hangs.steps.patience": 1.0})
        whose = Member(0, 0), memory, os.getpid(), mock.Mock()
        monitor = RankMonitor(FakeStore, *whose, AllLimits(), heart)
        for _ in range(10):
            assert min(monitor._left(NOW)) > 0.0
        monitor.close()


def test_a_rank_and_a_step_are_none_or_numbers() -> None:
    with contextlib.closing(Flickering()) as memory:
        assert {memory.rank for _ in range(10)} == {3, None}
        assert {memory.step for _ in range(10)} == {7, None}
        memory.iteration = 0
        metrics = RankMetrics()
        metrics.ranks = lambda: [(memory, True)] * 2
        for _ in range(10):
            metrics.read()
            assert metrics.step == 7
