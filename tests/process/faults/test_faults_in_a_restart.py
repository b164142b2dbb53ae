"""A rank, or its monitor, is lost in the middle of a restart, at every point of it; and the spare is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_job import SPARE, WORLD, check, start
from faulty_restart import (
    trains_though_a_monitor_dies,
    trains_though_the_proposer_dies,
    trains_through_a_bad_restart,
    trains_with_a_lost_spare,
)
from rank_harness import Job, Template, await_end, running

from ft_wrapper.store import TCPStoreServer

POINTS = ("abort", "arrived", "decided", "assignment")
NIGHTLY = [pytest.mark.nightly("another rank is lost there in every run, and a waiting spare")]


@pytest.mark.parametrize(
    ("kind", "point", "victim"),
    [
        pytest.param(
            kind, point, victim, marks=NIGHTLY if (kind == "sigstop" and victim) or victim == SPARE else []
        )
        for kind in ("sigkill", "sigstop")
        for point in POINTS
        for victim in (0, 2, SPARE)
    ],
)
def test_a_rank_that_is_restarting(job: Job, tmp_path: Path, kind: str, point: str, victim: int) -> None:
    start(job, tmp_path, trains_through_a_bad_restart, kind, point, victim, str(tmp_path), {})
    if point == "arrived":
        job.expect("arrived", victim)
        if kind == "sigkill":
            job.wait_for_end(victim)
        job.tell("arrive", *{*range(WORLD)} - {victim})
    job.wait_for_end()
    check(job, tmp_path, gone={victim}, faults=2)


@pytest.mark.parametrize(("kind", "point"), [("gil", "decided"), ("gil", "assignment"), ("sleep", "abort")])
def test_a_rank_that_hangs_while_it_is_restarting(job: Job, tmp_path: Path, kind: str, point: str) -> None:
    start(job, tmp_path, trains_through_a_bad_restart, kind, point, 0, str(tmp_path), {})
    job.wait_for_end()
    check(job, tmp_path, gone={0}, faults=2)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_assignment_that_hangs(job: Job, tmp_path: Path, victim: int) -> None:
    start(job, tmp_path, trains_through_a_bad_restart, "sleep", "assignment", victim, str(tmp_path), {})
    job.wait_for_end()
    check(job, tmp_path, gone={victim}, faults=2)


@pytest.mark.timeout(600)
def test_the_proposer_dies_at_any_step(template: Template, tmp_path: Path) -> None:
    k = alone = 0
    while alone < 2:
        folder = tmp_path / f"{k}-{alone}"
        folder.mkdir()
        with running(template, folder) as job:
            start(job, folder, trains_though_the_proposer_dies, k, str(folder))
            job.expect("arrived", 0, 1, 3)
            job.tell("arrive", 2)
            job.wait_for_end()
            dies = (folder / "fired" / "the bomb").exists()
            check(job, folder, gone={2} if dies else set(), faults=2 if dies else 1)
        # It is through with its proposal before step k; or, on a slow machine, another one proposed first.
        alone = 0 if dies else alone + 1
        k += dies
    # It reads head, end, arrivals and deaths, writes the decision, moves head, ...
    assert k >= 6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=NIGHTLY)])
def test_the_monitor_dies_with_its_rank_at_any_step(template: Template, tmp_path: Path, victim: int) -> None:
    for k in range(100):
        folder = tmp_path / str(k)
        folder.mkdir()
        server = TCPStoreServer(0, "127.0.0.1")
        with running(template, folder) as job:
            job.store_is_elsewhere = True
            env = {"FT_WRAPPER_STORE": f"127.0.0.1:{server.port}"}
            start(job, folder, trains_though_a_monitor_dies, k, victim, str(folder), env=env)
            job.wait_for_end()
            dies = (folder / "fired" / "the bomb").exists()
            check(job, folder, gone={victim}, faults=2 if dies else 1)
        server.close()
        if not dies:
            break
    # It logs the fault, ends the iteration, wakes, logs the death, counts it.
    assert k >= 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
@pytest.mark.parametrize("faults", ["", "sigkill:rank=0:step=3"])
def test_a_waiting_spare_is_lost(job: Job, tmp_path: Path, number: signal.Signals, faults: str) -> None:
    start(job, tmp_path, trains_with_a_lost_spare, faults, str(tmp_path))
    job.expect("waiting", 0, 1, 2)
    job.expect("ready", SPARE)
    monitor = job.monitors()[SPARE]
    job.send_signal(SPARE, number)
    await_end(monitor)  # it has told the others
    job.tell("go on", 0, 1, 2)
    job.wait_for_end()
    restarts = check(job, tmp_path, gone={0, SPARE} if faults else {SPARE}, faults=1 if faults else 0)
    assert restarts == (1 if faults else 0)
