"""Who is slow by the run-ups of many drawn steps, and why by its signs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from ft_wrapper.monitor.lateness import Cause, Lateness, Pace, Signs, cause_of, judge_rank, usual_pace

STEP = 0.04
RANKS = 4
BAD = 2

Delay = Callable[[int, random.Random], float]


def named_in(seed: int, steps: int, *, delays: dict[int, Delay], step: float = STEP) -> list[set[int]]:
    """The ranks that are named after each step; the run-ups have the noise of a busy machine."""
    draw, lateness = random.Random(seed), Lateness()
    found = []
    for n in range(steps):
        run_ups = {rank: step / 4 * draw.lognormvariate(0.0, 0.15) for rank in range(RANKS)}
        run_ups[draw.randrange(RANKS)] += step * (draw.random() < 0.1)  # it did not get a processor
        for rank, delay in delays.items():
            run_ups[rank] += delay(n, draw)
        lateness.step(run_ups, step, n * step)
        found.append(set(lateness.named))
    return found


KINDS: dict[str, Delay] = {
    "each step": lambda n, draw: 0.25 * STEP,
    "12 %": lambda n, draw: 0.14 * STEP,
    "collections": lambda n, draw: 2 * STEP * (n % 5 == 0),
    "pulses": lambda n, draw: 0.8 * STEP * (draw.random() < 0.3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_a_slow_rank_is_named_in_time(kind: str, seed: int) -> None:
    found = named_in(seed, 150, delays={BAD: KINDS[kind]})  # 6 s
    assert {BAD} in found
    assert all(named <= {BAD} for named in found)


@pytest.mark.parametrize("seed", range(10))
def test_two_slow_ranks_are_both_named(seed: int) -> None:
    slow: Delay = lambda n, draw: 0.3 * STEP  # noqa: E731
    assert named_in(seed, 150, delays={1: slow, BAD: slow})[-1] == {1, BAD}


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_is_named_by_noise(seed: int) -> None:
    assert not any(named_in(seed, 1000, delays={}))


def test_what_is_below_the_threshold_has_no_name() -> None:
    assert not any(named_in(0, 1000, delays={BAD: lambda n, draw: 0.03 * STEP}))


def test_a_rank_that_is_no_longer_slow_loses_its_name() -> None:
    found = named_in(0, 400, delays={BAD: lambda n, draw: 0.3 * STEP * (n < 200)})
    assert found[199] == {BAD} and not found[-1]
    changes = sum(a != b for a, b in itertools.pairwise(found))
    assert changes == 2, "named once"


def test_a_name_takes_three_seconds_and_thirty_windows() -> None:
    slow: dict[int, Delay] = {BAD: lambda n, draw: 0.5 * step}
    for step in (0.01, STEP, 1.0):
        found = named_in(1, 400, delays=slow, step=step)
        first = next(n for n, named in enumerate(found) if named)
        assert first >= 58 and first * step >= 3.0


USUAL = Signs(run=0.2, waited=0.05)


@pytest.mark.parametrize(
    ("mine", "cause"),
    [
        (USUAL, Cause.ASLEEP),
        (USUAL._replace(run=0.4), Cause.WORKS),
        (USUAL._replace(waited=0.2), Cause.PROCESSOR),
        (USUAL._replace(waited=0.2, throttled=0.3), Cause.THROTTLED),
        (USUAL._replace(stopped=0.15), Cause.STOPPED),
        (USUAL._replace(loader=0.2), Cause.LOADER),
        (USUAL._replace(waited=0.2, loader=0.2), Cause.LOADER),
    ],
)
def test_the_cause(mine: Signs, cause: Cause) -> None:
    assert cause_of(mine, USUAL, 0.2) is cause


@pytest.mark.parametrize(
    ("mine", "found"),
    [
        (USUAL._replace(throttled=0.3), (0.3, Cause.THROTTLED)),
        (USUAL._replace(stopped=0.2, waited=0.9), (0.2, Cause.STOPPED)),
        (USUAL._replace(throttled=0.07), None),
        (USUAL, None),
    ],
)
def test_a_rank_that_is_kept_from_running_alone_is_slow(
    mine: Signs, found: tuple[float, Cause] | None
) -> None:
    if found is not None:
        found = pytest.approx(found[0]), found[1]
    assert judge_rank(None, None, mine, USUAL, is_slow=False) == found
    assert judge_rank(None, None, mine, mine, is_slow=False) is None, "all are throttled alike"


def test_a_slow_rank_stays_slow_at_half_of_what_made_it_slow() -> None:
    for held, is_slow in ((0.07, True), (0.03, True), (0.07, False)):
        mine = USUAL._replace(throttled=held)
        assert bool(judge_rank(None, None, mine, USUAL, is_slow=is_slow)) == (is_slow and held > 0.04)


def test_what_is_usual_in_a_job_is_the_median_of_its_nodes() -> None:
    paces = [Pace(run_up, Signs(run=run_up * 10)) for run_up in (0.02, 0.05, 0.01)]
    assert usual_pace(paces) == Pace(0.02, Signs(run=0.2))
    assert Pace.from_json(paces[0].to_json()) == paces[0]


@pytest.mark.parametrize(
    ("mine", "is_victim"),
    [
        (USUAL, True),
        (USUAL._replace(run=0.4), False),
        (USUAL._replace(waited=0.3), False),
        (USUAL._replace(own=0.3), False),
    ],
)
def test_a_links_victim_is_late_at_the_vote_alone_and_has_only_waited(mine: Signs, is_victim: bool) -> None:
    assert judge_rank(None, 0.2, mine, USUAL, is_slow=False) == ((0.2, Cause.LINK) if is_victim else None)
    assert judge_rank(0.2, 0.2, USUAL, USUAL, is_slow=False) == (0.2, Cause.ASLEEP)


def follow(lates: list[float]) -> list[bool]:
    """Whether a rank is named after each step in which it was late by so much of a step."""
    lateness, found = Lateness(), []
    for n, late in enumerate(lates):
        lateness.step({rank: late * STEP * (rank == BAD) for rank in range(RANKS)}, STEP, n * STEP)
        found.append(BAD in lateness.named)
    return found


def test_one_stall_in_thirty_steps_does_not_count() -> None:
    assert not any(follow([5.0 if n % 30 == 7 else 0.06 for n in range(400)]))


def test_a_name_stays_while_some_windows_are_slow() -> None:
    some = [0.2 if n % 80 < 50 else 0.0 for n in range(400)]
    assert all(follow([0.2] * 160 + some)[150:]) and not any(follow(some))
