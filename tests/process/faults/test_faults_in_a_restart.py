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
from support.nightly import at_night

from ft_wrapper.store import TCPStoreServer

ALWAYS = [
    ("sigkill", "abort", 0),
    ("sigkill", "arrived", 2),
    ("sigkill", "decided", 0),
    ("sigkill", "assignment", 2),
    ("sigstop", "decided", 0),
]
NIGHTLY = [
    (kind, point, victim)
    for kind in ("sigkill", "sigstop")
    for point in ("abort", "arrived", "decided", "assignment")
    for victim in (0, 2, SPARE)
    if (kind, point, victim) not in ALWAYS
]


@pytest.mark.parametrize(
    ("kind", "point", "victim"), [*ALWAYS, *at_night("a rank is lost at each point always", NIGHTLY)]
)
def test_a_rank_that_is_restarting(job: Job, tmp_path: Path, kind: str, point: str, victim: int) -> None:
    start(job, tmp_path, trains_through_a_bad_restart, kind, point, victim, str(tmp_path))
    if point == "arrived":
        job.expect("arrived", victim)
        if kind == "sigkill":
            job.wait_for_end(victim)
        job.tell("arrive", *{*range(WORLD)} - {victim})
    job.wait_for_end()
    check(job, tmp_path, gone={victim}, faults=2)


@pytest.mark.nightly("it dies at one in tests/process/wrapper/test_rejoin.py, at each in simulations")
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


@pytest.mark.nightly("hosts are lost in tests/process/wrapper/test_fault_table.py")
@pytest.mark.timeout(600)
def test_the_monitor_dies_with_its_rank_at_any_step(template: Template, tmp_path: Path) -> None:
    for k in range(100):
        folder = tmp_path / str(k)
        folder.mkdir()
        server = TCPStoreServer(0, "127.0.0.1")
        with running(template, folder) as job:
            job.store_is_elsewhere = True
            env = {"FT_WRAPPER_STORE": f"127.0.0.1:{server.port}"}
            start(job, folder, trains_though_a_monitor_dies, k, str(folder), env=env)
            job.wait_for_end()
            dies = (folder / "fired" / "the bomb").exists()
            check(job, folder, gone={0}, faults=2 if dies else 1)
        server.close()
        if not dies:
            break
    # It logs the fault, ends the iteration, wakes, logs the death, counts it.
    assert k >= 5


@pytest.mark.parametrize(
    ("number", "faults"), [(signal.SIGKILL, ""), (signal.SIGSTOP, "sigkill:rank=0:step=3")]
)
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
