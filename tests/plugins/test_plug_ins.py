"""What all plug-ins share: they are abstract classes with one method, and importing them starts nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ft_wrapper.abort import Abort
from ft_wrapper.completion import Completion
from ft_wrapper.finalize import Finalize
from ft_wrapper.health_check import HealthCheck
from ft_wrapper.initialize import Initialize
from ft_wrapper.rank_assignment import RankAssignment, RankFilter
from ft_wrapper.terminate import Terminate

KINDS = [Abort, Completion, Finalize, HealthCheck, Initialize, RankAssignment, RankFilter, Terminate]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plug_in_needs_a_call(kind: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind()

    class Mine(kind):  # type: ignore[misc]
        def __call__(self, argument: object) -> object:
            return argument

    assert Mine()(5) == 5


def test_importing_them_starts_nothing() -> None:
    script = """
import multiprocessing, signal, threading, torch
before = {s: signal.getsignal(s) for s in signal.valid_signals()}
from ft_wrapper import (compose, completion, finalize, health_check, initialize, nested_restarter,
                        rank_assignment, terminate)
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert not multiprocessing.active_children()
assert before == {s: signal.getsignal(s) for s in signal.valid_signals()}
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
