"""Hangs of all kinds: how soon they are noticed, when training goes on, and whether the right rank is named.

    python benchmarks/hangs.py
    python benchmarks/hangs.py --kinds sleep pipe --ranks 2 --steps 0.02 --live

Two and four ranks train with DistributedDataParallel in a gloo group, with a data loader's worker each, with
live state and with checkpoints. One hang after the other comes at random moments and places of a step, on
random ranks, so that most of them come after restarts. A rank stamps its hang just before it begins.
"Noticed" is when the first rank learns that its iteration has ended; "next step" is when all ranks have done
a step after that. A hang that is not noticed, or not recovered from, within ``--give-up`` is missed; the job
is killed, and a new one takes the remaining hangs.

worker_sleeps is no hang: a data loader's worker that sleeps for 2.5 s. skipped has no right answer: one rank
skips a collective and waits in the next one, which is another group's or live state's vote. finally_fault is
a rank whose clean-up sleeps after another rank's exception; it is noticed when that clean-up has ended, and
the rank to name is that with the exception.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from figures import duration, table
from hangs_worker import (
    CHECKPOINT,
    FINALLY_FAULT,
    KINDS,
    PLACES,
    SKIPPED,
    SLEEPS,
    WORKER_SLEEPS,
    WORKER_STOPPED,
)
from jobs import job, own_all_descendants
from watched_jobs import JobFailed, Restart, Watched, add_arguments, settings
from watched_training import Task

WORKER = Path(__file__).resolve().parent / "hangs_worker.py"
BEGIN_TIMEOUT = 60.0  # seconds for a rank to reach the place of its hang
LONG = 0.5  # a step of that many seconds is a long one
BEFORE_FAULT = 1.0  # seconds in which the fault before a clean-up that hangs has happened


@dataclasses.dataclass(frozen=True)
class Hang:
    """One hang of the schedule.

    Args:
        kind: what hangs.
        rank: where, as numbered then.
        place: number of the place in a step, for the kinds that may come at any.
        pause: seconds of training before it.
    """

    kind: str
    rank: int
    place: int
    pause: float


@dataclasses.dataclass(frozen=True)
class Cell:
    """Jobs whose hangs are summed up.

    Args:
        ranks: of a job.
        step: seconds of a step.
        live: whether the state lives on in the survivors.
    """

    ranks: int
    step: float
    live: bool

    @property
    def column(self) -> str:
        """Its name in the table, without the ranks."""
        return f"{'live' if self.live else 'checkpoints'}, {duration(self.step)}"


@dataclasses.dataclass
class Outcome:
    """What came of one hang. Times are in seconds since it began.

    Args:
        kind: of the hang.
        slot: to be named.
        noticed: until its iteration ended.
        recovered: until all ranks had done a step after that.
        restart: that ended it; None if there was none.
        follow_ups: restarts between the first one and the next step of all ranks.
        missed: whether it was given up.
    """

    kind: str
    slot: int
    noticed: float | None = None
    recovered: float | None = None
    restart: Restart | None = None
    follow_ups: int = 0
    missed: bool = False

    @property
    def is_right(self) -> bool:
        """Whether exactly the right slot was named; for a slow worker: that there was no restart."""
        if self.kind == WORKER_SLEEPS:
            return self.restart is None and not self.missed
        return self.restart is not None and self.restart.culprits == (self.slot,)

    def __str__(self) -> str:
        if self.missed:
            return f"{self.kind}: MISSED, slot {self.slot}"
        if self.restart is None:
            return f"{self.kind}: no restart"
        named = "not named" if not self.is_right else "named"
        times = f"noticed {duration(self.noticed)}, next step {duration(self.recovered)}"
        more = f", {self.follow_ups} more restarts" * (self.follow_ups > 0)
        return f"{self.kind}: {times}{more}, slot {self.slot} {named}: {self.restart.line}"


@dataclasses.dataclass
class Tally:
    """What the jobs of a cell have done.

    Args:
        outcomes: of the hangs.
        uncaused: restarts without a hang.
        troubles: of whole jobs.
        steps: a line for each job.
    """

    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    uncaused: list[Restart] = dataclasses.field(default_factory=list)
    troubles: list[str] = dataclasses.field(default_factory=list)
    steps: list[str] = dataclasses.field(default_factory=list)


def schedule(cell: Cell, arguments: argparse.Namespace) -> list[Hang]:
    """Returns the hangs of a cell: as many of each kind, in random order."""
    chance = random.Random(f"{arguments.seed} {cell}")
    kinds = arguments.kinds * (arguments.long_hangs if cell.step >= LONG else arguments.hangs)
    chance.shuffle(kinds)
    return [
        Hang(
            kind,
            0 if kind == CHECKPOINT else chance.randrange(cell.ranks),
            chance.randrange(len(PLACES)),
            chance.uniform(0.5, 1.5) + chance.uniform(0, 3) * cell.step,
        )
        for kind in kinds
    ]


def deliver(hang: Hang, watched: Watched, give_up: float) -> Outcome:
    """Lets a hang happen, and follows it to the next step of all ranks."""
    board, rank = watched.board, hang.rank
    named = (rank + 1) % watched.task.ranks if hang.kind == FINALLY_FAULT else rank
    outcome = Outcome(hang.kind, int(board.get(named, "slot")))
    slot = board.get(rank, "slot")
    board.set(rank, "began", 0)
    board.set(rank, "place", hang.place)
    is_worker = hang.kind in (WORKER_SLEEPS, WORKER_STOPPED)
    board.set(rank, "loader" if is_worker else "order", KINDS.index(hang.kind) + 1)
    if not watched.wait(lambda: board.get(rank, "began") > 0, BEGIN_TIMEOUT):
        raise JobFailed(f"{hang.kind} on rank {rank} did not begin:\n{watched.job.complaint(lines=30)}")

    def ends() -> Restart | None:
        after = board.get(rank, "began") - BEFORE_FAULT * (hang.kind == FINALLY_FAULT)
        return next((each for each in watched.restarts() if each.at > after), None)

    def noticed() -> float | None:
        if hang.kind == FINALLY_FAULT:
            began = board.get(rank, "began")
            left = (each for each in watched.read() if each["event"] == "left" and each["slot"] == slot)
            return next((each["monotonic"] for each in left if each["monotonic"] > began), None)
        return None if (restart := ends()) is None else restart.at

    def is_over() -> bool:
        slept = hang.kind == WORKER_SLEEPS and board.get(rank, "loader") == 0
        return slept or noticed() is not None

    patience = give_up + SLEEPS * (hang.kind == WORKER_SLEEPS)
    if not watched.wait(is_over, patience):
        outcome.missed = True
        return outcome
    at, began = noticed(), board.get(rank, "began")
    if at is None:  # a worker that slept: nothing has happened unless a restart comes before the next steps
        since = time.monotonic()
        watched.wait(lambda: min(watched.column("last")) > since or noticed() is not None, give_up)
        at = noticed()
        if at is None:
            outcome.missed = min(watched.column("last")) <= since
            return outcome
    outcome.noticed = at - began

    def is_back() -> bool:
        restart = ends()
        named_by_now = restart is not None and restart.culprits is not None
        later = [each for each in watched.restarts() if each.at > at]
        return watched.trains_since(at) is not None and (named_by_now or bool(later))

    outcome.missed = not watched.wait(is_back, give_up)
    if outcome.missed:
        return outcome
    back = watched.trains_since(at) or time.monotonic()
    outcome.recovered, outcome.restart = back - began, ends()
    first = outcome.restart.at if outcome.restart else at
    outcome.follow_ups = sum(first < each.at < back for each in watched.restarts())
    return outcome


def run(
    cell: Cell, hangs: list[Hang], folder: Path, arguments: argparse.Namespace, tally: Tally
) -> list[Hang]:
    """Runs one job until a hang is missed; returns the hangs that are left."""
    give_up = arguments.give_up or (100.0 if cell.step >= LONG else 30.0)
    with job(folder) as job_:
        task = Task(
            settings=settings(arguments),
            folder=str(job_.folder),
            limit=round(len(hangs) * (2 * give_up + BEGIN_TIMEOUT)) + 300,
            ranks=cell.ranks,
            step=cell.step,
            live=cell.live,
            checkpoint_every=max(5, round(1 / cell.step)),
            evaluate_every=max(10, round(4 / cell.step)),
            seed=arguments.seed,
        )
        watched = Watched(job_, WORKER, task)
        caused: list[tuple[float, float]] = []  # from a hang until the next one may come
        done, trouble = 0, ""
        try:
            watched.start()
            for hang in hangs:
                until = time.monotonic() + hang.pause
                watched.wait(lambda until=until: time.monotonic() > until, hang.pause + 1)  # type: ignore[misc]
                caused.append((time.monotonic(), math.inf))
                done += 1
                try:
                    outcome = deliver(hang, watched, give_up)
                except JobFailed:
                    tally.outcomes.append(Outcome(hang.kind, slot=-1, missed=True))
                    raise
                caused[-1] = (caused[-1][0], time.monotonic())
                tally.outcomes.append(outcome)
                print(f"{cell.ranks} ranks, {cell.column}: {outcome}", flush=True)
                if outcome.missed:
                    caused[-1] = (caused[-1][0], math.inf)
                    trouble = f"{hang.kind} was missed:\n{job_.complaint(lines=30)}"
                    break
            else:
                trouble = watched.finish()
        except JobFailed as error:
            trouble = f"after {done} of {len(hangs)} hangs: {error}"
        for restart in watched.restarts():
            if not any(began < restart.at < end for began, end in caused):
                tally.uncaused.append(restart)
        tally.steps.append(str(watched.steps()))
    if trouble:
        tally.troubles.append(trouble)
        print(f"{cell.ranks} ranks, {cell.column}: {trouble}", flush=True)
    return hangs[done:]


def measure(arguments: argparse.Namespace, cells: Iterable[Cell], folder: Path) -> dict[Cell, Tally]:
    """Runs all jobs, one after the other."""
    tallies = {}
    for cell in cells:
        tally = tallies[cell] = Tally()
        left = schedule(cell, arguments)
        while left:
            remaining = run(cell, left, folder, arguments, tally)
            if len(remaining) == len(left):  # it did not even start
                break
            left = remaining
    return tallies


# The table -----------------------------------------------------------------------------------------------


def middle_and_worst(values: list[float]) -> str:
    """Returns the median and the greatest of some durations."""
    return f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "-"


def said(outcomes: list[Outcome]) -> str:
    """Returns how often the right rank was named."""
    text = f"{sum(each.is_right for each in outcomes)} of {len(outcomes)}"
    missed = sum(each.missed for each in outcomes)
    return text + f", {missed} missed" * (missed > 0)


def rows(tallies: dict[Cell, Tally], kinds: list[str]) -> list[list[str]]:
    """Returns the table's rows."""
    columns = list(dict.fromkeys((cell.step, cell.live) for cell in tallies))
    found = []
    for ranks in dict.fromkeys(cell.ranks for cell in tallies):
        for kind in kinds:
            row = [kind, str(ranks)]
            for step, live in columns:
                outcomes = [o for o in tallies[Cell(ranks, step, live)].outcomes if o.kind == kind]
                row.append(middle_and_worst([o.noticed for o in outcomes if o.noticed is not None]))
                row.append(middle_and_worst([o.recovered for o in outcomes if o.recovered is not None]))
                row.append(said(outcomes) if outcomes else "-")
            found.append(row)
    return found


def print_results(tallies: dict[Cell, Tally], kinds: list[str]) -> None:
    """Prints a line for each kind, what went wrong, and the table."""
    print("\nWhat the log says:")
    for kind in kinds:
        outcomes = [o for tally in tallies.values() for o in tally.outcomes if o.kind == kind and o.restart]
        for outcome in outcomes if kind == SKIPPED else outcomes[:1]:
            assert outcome.restart is not None
            print(f"  {kind}, slot {outcome.slot}: {outcome.restart.line}")
    print("\nThe jobs:")
    for cell, tally in tallies.items():
        more = sum(outcome.follow_ups for outcome in tally.outcomes)
        print(
            f"  {cell.ranks} ranks, {cell.column}: {' + '.join(tally.steps)}; {len(tally.outcomes)} hangs, "
            f"{more} further restarts before the next step, {len(tally.uncaused)} restarts without a hang, "
            f"{len(tally.troubles)} jobs given up"
        )
        for restart in tally.uncaused:
            print(f"    without a hang: {restart.line}")
    print("\nSeconds: median (worst). Named: exactly the right rank; for worker_sleeps: no restart.")
    headers = ["kind", "ranks"]
    for column in dict.fromkeys(cell.column for cell in tallies):
        headers += [f"{column}: noticed", "next step", "named"]
    print(table(headers, rows(tallies, kinds)))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    add = parser.add_argument
    add(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        metavar="KIND",
        help=f"of {', '.join(KINDS)}",
    )
    add("--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="(default: 2 4)")
    add("--steps", nargs="+", type=float, default=[0.02, 1.0], metavar="S", help="seconds (default: 0.02 1)")
    add("--hangs", type=int, default=5, metavar="N", help="of each kind in a job of short steps (default: 5)")
    add("--long-hangs", type=int, default=2, metavar="N", help=f"from {LONG} s a step on (default: 2)")
    add("--give-up", type=float, metavar="S", help=f"(default: 30, and 100 from {LONG} s a step on)")
    add("--live", action=argparse.BooleanOptionalAction, help="live state only, or checkpoints only")
    arguments = parser.parse_args()
    if (
        min(arguments.ranks) < 2
        or min(arguments.steps) <= 0
        or min(arguments.hangs, arguments.long_hangs) < 1
    ):
        parser.error("at least 2 ranks, more than 0 seconds, and 1 hang")
    own_all_descendants()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="hangs-"))
    lives = (True, False) if arguments.live is None else (arguments.live,)
    cells = [
        Cell(ranks, step, live) for ranks in arguments.ranks for step in arguments.steps for live in lives
    ]
    try:
        tallies = measure(arguments, cells, folder)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print_results(tallies, arguments.kinds)


if __name__ == "__main__":
    main()
