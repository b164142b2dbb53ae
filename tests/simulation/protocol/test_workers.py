"""Work that is shared among processes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest

from tests.explorer.explore import share

SLEEPERS = """
import os, time
from tests.explorer.explore import share

def work(part):
    print(part, flush=True)
    time.sleep(3600)

list(share(work, 2, 2))
"""


@pytest.mark.parametrize("processes", [1, 3])
def test_each_part_is_carried_out_once(processes: int) -> None:
    assert sorted(share(lambda part: part * part, 5, processes)) == [0, 1, 4, 9, 16]


def test_parts_are_carried_out_in_other_processes() -> None:
    assert os.getpid() not in set(share(lambda _: os.getpid(), 3, 2))


def test_what_a_part_raises_is_told() -> None:
    def work(part: int) -> int:
        return 1 // part

    with pytest.raises(ZeroDivisionError):
        list(share(work, 2, 2))


def test_workers_end_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPERS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"0\n", "1\n"}
        process.kill()
        assert process.stdout.read() == ""  # which comes to its end when no one is left who could write


def test_a_worker_that_dies_is_an_error() -> None:
    with pytest.raises(BrokenProcessPool):
        list(share(lambda _: os._exit(1), 3, 2))


def test_not_all_parts_wait_for_a_worker_at_once() -> None:
    results = share(lambda part: part, 10**9, 2)
    assert {next(results) for _ in range(100)} <= set(range(110))
    results.close()
