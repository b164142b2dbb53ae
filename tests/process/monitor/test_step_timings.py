"""What a rank answers about its steps, with torch's flight recorder."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ft_wrapper.monitor.shared_memory import RankMemory, Votes
from ft_wrapper.torch_groups import collective
from ft_wrapper.torch_groups.collective import step_timings

PAUSE = 0.002  # from the begin of a step to the first collective, at least


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankMemory]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    memory = RankMemory()
    yield memory
    memory.close()
    dist.destroy_process_group()


def do_step() -> None:
    time.sleep(PAUSE)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


def test_a_run_up_lasts_from_the_ping_to_the_first_collective(memory: RankMemory) -> None:
    ping, _ = memory.make_ping()
    for step in range(8):
        ping(step)
        do_step()
    ping(8)  # no collective yet
    found = step_timings(memory.begins())
    assert sorted(found.steps)[-7:] == [2, 3, 4, 5, 6, 7, 8], "what was before the first one may be forgotten"
    assert 9 not in found.steps
    assert found.step >= PAUSE
    assert all(run_up >= PAUSE and not voted for run_up, voted in [*found.steps.values()][-7:])
    assert found.collectives == pytest.approx(3.0, abs=1.0)


def test_a_step_begins_where_its_last_vote_has_ended(memory: RankMemory) -> None:
    ping, _ = memory.make_ping()
    voting = Votes(memory)
    dist.all_reduce(torch.ones(1))
    for _ in range(5):
        ping()
        with voting:  # a broadcast
            pass
        with voting:
            time.sleep(PAUSE)
        do_step()
    found = step_timings(memory.begins())
    assert sorted(found.steps)[-5:] == [2, 4, 6, 8, 10]
    assert all(run_up >= PAUSE and voted >= PAUSE for run_up, voted in [*found.steps.values()][-5:])


def test_what_an_earlier_iteration_did_is_not_counted(memory: RankMemory) -> None:
    ping, _ = memory.make_ping()
    for _ in range(70):
        ping()
        do_step()
    memory.enter_iteration(1)
    assert memory.begins() == []
    ping()
    assert [n for n, _, _ in memory.begins()] == [1]


def test_a_step_whose_first_collective_may_be_forgotten_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    ahead = time.time_ns() - time.monotonic_ns()
    known = [{"time_created_ns": int((began + seconds) * 1e9) + ahead} for seconds in (0.5, 1.25)]
    monkeypatch.setattr(collective, "_entries", lambda: known)
    found = step_timings([(1, began, 0.0), (2, began + 1.0, 0.125), (3, began + 2.0, 0.0)])
    assert found.steps == {2: (pytest.approx(0.25, abs=0.01), 0.125)}
