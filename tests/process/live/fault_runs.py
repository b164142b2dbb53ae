"""Fault runs of live state with real processes.

A job is one ftrun with many wrapped calls, since starting costs most. Each call is a run: it trains a small
model through random faults at named points of its steps and its recoveries. The first run of a job has none,
and all others must end with its bits: no step is lost or done again, as long as each shard of the state has a
living holder. The rest is told from the job's events: who held what when, and whether a run that went to the
checkpoint had to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
if str(HERE.parents[1]) not in sys.path:
    sys.path.insert(0, str(HERE.parents[1]))

from points import RECOVERY_POINTS, TORN  # noqa: E402
from support import warm_ftrun  # noqa: E402

from ft_wrapper import events  # noqa: E402

STEPS = 24
CLEAN = -1
"""Number of the run without faults."""
START, A_RUN = 120.0, 30.0
"""Seconds in which a job starts, and in which a run of it ends."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "use-vc timeout:1 attempts:1"}

Record = dict[str, Any]


PROCESSES, ACTIVE = 4, 3


@dataclasses.dataclass
class Verdict:
    """What became of a run.

    Args:
        number: its seed.
        faults: kind and point of those that happened.
        unasked: kinds of the faults that ended an iteration in which we had injected none.
        received: bytes that went from rank to rank.
        again: steps done again that were committed and not given up.
        lost: steps that a recovery has gone behind, and need not have.
        wrong: what must not be.
    """

    number: int
    faults: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unasked: list[str] = dataclasses.field(default_factory=list)
    received: int = 0
    again: int = 0
    lost: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)

    @property
    def in_recovery(self) -> bool:
        """Whether a fault happened within a recovery."""
        return any(point in RECOVERY_POINTS for _, point in self.faults)


# Judging -------------------------------------------------------------------------------------------------


class Holders:
    """Who holds which shard, worked out from what processes said and what happened to them.

    A process that was a spare while the others went on holds nothing that counts. What is not sure is not
    held against either side.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[str | None, bool]] = {}  # by process: the shard, and whether it is sure
        self._was_in: dict[int, int] = {}  # by process: its last iteration
        self._sealed: set[int] = set()
        self._went_on: set[int] = set()
        self._gathered: dict[int, list[tuple[str, str | None, bool, bool]]] = {}

    def hear(self, record: Record) -> None:
        """Takes an event in."""
        event, pid, n = record["event"], record["pid"], record["iteration"]
        if event == "holds":
            self._held[pid] = record.get("shard"), record["sure"]
        elif event == "inject" and record["point"] in TORN:
            self._held[pid] = None, True
        elif event == "sealed":
            self._sealed.add(n)
        elif event == "committed" and not record["rolled"]:
            self._went_on.add(n)
        elif event == "gathers":
            shard, is_sure = self._held.get(pid, (None, True))
            away = range(self._was_in.get(pid, n) + 1, n)
            counts = is_sure and not self._sealed.intersection(away)
            may_count = not self._went_on.intersection(away)
            self._gathered.setdefault(n, []).append((record["needs"], shard, counts, may_count))
            self._was_in[pid] = n

    def missing(self, n: int) -> tuple[bool, bool]:
        """Whether a shard may have no holder in an iteration's recovery, and whether it must have none."""
        gathered = self._gathered[n]
        needed = {needs for needs, _, _, _ in gathered}
        sure = {shard for _, shard, counts, _ in gathered if counts}
        at_most = {shard for _, shard, _, may_count in gathered if may_count}
        return not needed <= sure, not needed <= at_most


def judge(number: int, records: list[Record], reference: str | None) -> Verdict:
    """Judges a run by its events.

    Args:
        number: of the run.
        records: those of its iterations, in order.
        reference: digest of the clean run; None: this is it.
    """
    verdict, holders = Verdict(number), Holders()
    committed: dict[int, list[int]] = {}  # iterations by step, in the present history
    planned: set[int] = set()
    was_sealed = False
    for record in records:
        holders.hear(record)
        event, n = record["event"], record["iteration"]
        if event == "inject":
            verdict.faults.append((record["kind"], record["point"]))
        elif event == "sealed":
            was_sealed = True
        elif event == "received":
            verdict.received += record["bytes"]
        elif event == "committed":
            before = committed.setdefault(record["step"], [])
            if not record["rolled"] and any(other < n for other in before):
                verdict.again += not any(other == n for other in before)
            before.append(n)
        elif event == "planned" and n not in planned:
            planned.add(n)
            may, must = holders.missing(n)
            if record["rung"] == "PEERS":
                verdict.lost += max(0, max(committed, default=0) - record["step"])
                if must:
                    verdict.wrong.append(f"iteration {n} went on without a holder of some shard")
            else:
                committed = {step: by for step, by in committed.items() if step <= record["step"]}
                if was_sealed and not may:
                    verdict.wrong.append(f"iteration {n} went down the ladder, and need not have")
    verdict.wrong += _wrong_end(records, reference)
    verdict.wrong += [f"{verdict.again} steps were done again"] * bool(verdict.again)
    verdict.wrong += [f"{verdict.lost} steps were lost"] * bool(verdict.lost)
    _look_at_restarts(verdict, records)
    return verdict


def _wrong_end(records: list[Record], reference: str | None) -> list[str]:
    finished = [record for record in records if record["event"] == "finished"]
    last = max(record["iteration"] for record in records if record["event"] == "entered")
    ranks = {record["rank"] for record in finished if record["iteration"] == last}
    digests = {record["digest"] for record in finished}
    if reference is not None:
        digests.add(reference)
    wrong = []
    if ranks != set(range(ACTIVE)):
        wrong.append(f"iteration {last} was the last, and finished on ranks {sorted(ranks)} only")
    if len(digests) != 1:
        wrong.append(f"{len(digests)} different digests")
    if any(record["step"] != STEPS for record in finished):
        wrong.append(f"finished after other steps than {STEPS}")
    return wrong


def _look_at_restarts(verdict: Verdict, records: list[Record]) -> None:
    asked = {record["iteration"] for record in records if record["event"] == "inject"}
    for record in records:
        if record["event"] == "fault" and record["iteration"] not in asked:
            verdict.unasked.append(record["kind"])
    if "EXCEPTION" in verdict.unasked:
        verdict.wrong.append("an exception was raised that is not ours")


def digest_of(records: Iterable[Record]) -> str | None:
    """The digest with which a run has finished; None if it did not."""
    return next((record["digest"] for record in records if record["event"] == "finished"), None)


def by_run(records: list[Record]) -> dict[int, list[Record]]:
    """The events of each run that began: those of its iterations."""
    runs = {record["iteration"]: record["run"] for record in records if record["event"] == "entered"}
    found: dict[int, list[Record]] = {}
    for record in records:
        run = record.get("run", runs.get(record.get("iteration", -1)))
        if run is not None:
            found.setdefault(run, []).append(record)
    return found


# Running -------------------------------------------------------------------------------------------------


def run_job(folder: Path, first: int, runs: int, variant: int) -> list[Verdict]:
    """Runs a job to its end.

    Args:
        folder: for its files.
        first: seed of its first run with faults.
        runs: how many of these.
        variant: what a step is made of; see `live_job.Variant`.

    Returns:
        A verdict on each run; what is wrong with the job counts for its last one.
    """
    folder.mkdir(parents=True)
    words = ["--nproc-per-node", PROCESSES, "--max-rank-restarts", 100 * runs, HERE / "live_job.py"]
    words += ["--folder", folder, "--first", first, "--runs", runs, "--steps", STEPS]
    words += ["--active", ACTIVE, "--variant", variant]
    records, trouble = run_ftrun(words, folder, ENVIRONMENT, START + A_RUN * (runs + 1))
    reference = digest_of(records.get(CLEAN, []))
    verdicts = [judge(number, records[number], reference) for number in sorted(records)]
    missing = runs + 1 - len(verdicts)
    trouble += [f"{missing} runs did not begin"] * bool(missing)
    verdicts = verdicts or [Verdict(CLEAN)]
    verdicts[-1].wrong += trouble
    return verdicts


def run_ftrun(
    words: list[Any], folder: Path, environment: dict[str, str], limit: float
) -> tuple[dict[int, list[Record]], list[str]]:
    """Runs an ftrun to its end.

    Args:
        words: its arguments.
        folder: for its output, its events and its temporary files.
        environment: further variables.
        limit: seconds that it may take.

    Returns:
        The events of each run, and what was wrong.
    """
    environment = {"TMPDIR": str(folder), **environment, events.ENV: str(folder / "events")}
    trouble = []
    with open(folder / "output", "wb") as output:
        ftrun = warm_ftrun.start_ftrun([str(word) for word in words], output.fileno(), folder, environment)
    try:
        code = ftrun.wait(limit)
        trouble += [f"ftrun ended with {code}"] * (code != 0)
    except subprocess.TimeoutExpired:
        trouble.append("the job did not end")
    finally:
        ftrun.kill()
        ftrun.wait()
    trouble += [f"a process was left: {command}" for command in end_left(folder)]
    path = folder / "events"
    return by_run(events.load(str(path)) if path.exists() else []), trouble


def end_left(folder: Path) -> list[str]:
    """Ends what a job has left, and what comes at its end anyway; returns what did not end by itself."""
    mine = [
        each for each in psutil.process_iter() if _environment(each).get(events.ENV) == str(folder / "events")
    ]
    _, left = psutil.wait_procs(mine, timeout=20)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return [str(process) for process in left]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}
