"""What the drivers of ``hangs.py`` and ``false_alarms.py`` share: a job, its events and its board."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from jobs import Job
from watched_training import FINISH, Board, Task

RESTARTS = 100_000  # more than there are faults: the launcher does not give up
FORMATION_TIMEOUT = 180.0  # seconds for all ranks to have trained a step
WATCH_FAILED = "looking for hangs failed"  # what a node logs that finds no more hangs
FINISH_TIMEOUT = 60.0
LOOK_EVERY = 0.02


class JobFailed(Exception):
    """A job did not start, or has ended too early. The message holds the end of its output."""


@dataclasses.dataclass
class Restart:
    """The end of an iteration, and what is known of the restart after it.

    Args:
        at: when the first rank learned of the end.
        kind: of the fault; ``join`` if there was none.
        line: what the log says; until all ranks are back: the first fault.
        culprits: slots that are to blame; None until all ranks are back.
    """

    at: float
    kind: str = ""
    line: str = ""
    culprits: tuple[int, ...] | None = None


class Watched:
    """A job under ``ftrun`` whose restarts the driver watches.

    Args:
        job: its processes.
        worker: the script of its ranks.
        task: what they do.
    """

    def __init__(self, job: Job, worker: Path, task: Task) -> None:
        self.job, self.task = job, task
        self.board = Board(task.folder, task.ranks)
        self.events: list[dict[str, Any]] = []
        self._rest, self._offset = b"", 0
        options = [f"--nproc-per-node={task.ranks}", f"--max-rank-restarts={RESTARTS}"]
        command = [sys.executable, "-m", "ft_wrapper.run", *options, str(worker), task.to_json()]
        # A cache of its own: what an earlier job has compiled would not be compiled again.
        cache = str(job.folder / "compiled")
        self.launcher = job.start(command, events=True, TORCHINDUCTOR_CACHE_DIR=cache)

    def read(self) -> list[dict[str, Any]]:
        """Returns all events so far."""
        if self.job.events.exists():
            with open(self.job.events, "rb") as file:
                file.seek(self._offset)
                lines = file.read()
            self._offset += len(lines)
            *whole, self._rest = (self._rest + lines).split(b"\n")
            self.events += map(json.loads, whole)
        return self.events

    def restarts(self) -> list[Restart]:
        """Returns the restarts so far, in the order of time."""
        found: dict[int, Restart] = {}
        for event in self.read():
            if event["event"] == "end":
                found.setdefault(event["iteration"], Restart(event["monotonic"]))
        for event in self.events:
            restart = found.get(event.get("iteration", 0) - (event["event"] == "restarted"))
            if restart is None:
                continue
            if event["event"] == "restarted":
                restart.kind, restart.line = event["kind"], event["line"]
                restart.culprits = tuple(event["culprits"])
            elif event["event"] == "fault" and not restart.line:
                restart.kind, restart.line = event["kind"].lower(), event["message"]
        return sorted(found.values(), key=lambda restart: restart.at)

    def wait(self, what: Callable[[], bool], seconds: float) -> bool:
        """Waits until something holds; returns whether it came in time.

        Raises:
            JobFailed: the launcher has ended before.
        """
        deadline = time.monotonic() + seconds
        while not what():
            if time.monotonic() > deadline:
                return False
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.launcher.wait(LOOK_EVERY)
                raise JobFailed(
                    f"ftrun exited with {self.launcher.returncode}:\n{self.job.complaint(lines=30)}"
                )
        return True

    def column(self, field: str) -> list[float]:
        """Returns a field of the board, of all ranks."""
        return [self.board.get(rank, field) for rank in range(self.task.ranks)]

    def trains_since(self, moment: float) -> float | None:
        """Returns when all ranks had done a step of an iteration that began after a moment; None: not yet."""
        stepped = self.column("stepped")
        return max(stepped) if min(stepped) > moment and len(set(self.column("entry"))) == 1 else None

    def start(self) -> None:
        """Waits until all ranks have done a step.

        Raises:
            JobFailed: they have not.
        """
        if not self.wait(lambda: self.trains_since(0.0) is not None, FORMATION_TIMEOUT):
            raise JobFailed(f"the job did not start:\n{self.job.complaint(lines=30)}")

    def finish(self) -> str:
        """Lets the job end; returns what is wrong with its end, empty if nothing is."""
        self.board.set(0, "order", FINISH)
        try:
            code = self.launcher.wait(FINISH_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"the job had not ended {FINISH_TIMEOUT:g} s after it was to end"
        if code != 0:
            return f"ftrun exited with {code}:\n{self.job.complaint(lines=30)}"
        if WATCH_FAILED in self.job.output.read_text(errors="replace"):
            return f"the job had no evidence from then on: {WATCH_FAILED}"
        _, left = psutil.wait_procs(self.job.helpers(), timeout=FINISH_TIMEOUT)
        return f"the job has left processes behind: {left}" if left else ""

    def steps(self) -> Steps:
        """Counts the steps so far."""
        done: Counter[tuple[int, int]] = Counter()
        wrong = 0
        for rank in range(self.task.ranks):
            path = self.job.folder / f"rank-{rank}.jsonl"
            for line in path.read_text().splitlines() if path.exists() else ():
                record = json.loads(line)
                done[rank, record["step"]] += 1
                wrong = max(wrong, abs(record["updates"] - record["step"] - 1))
        numbers = {step for _, step in done}
        last = max(numbers, default=-1)
        return Steps(last + 1, last + 1 - len(numbers), sum(done.values()) - len(done), wrong)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a job.

    Args:
        done: by the rank that is ahead, each counted once.
        lost: numbers of steps that no rank has done.
        again: steps that a rank has done again.
        wrong: greatest difference between the number of a step and the updates of the state after it.
    """

    done: int
    lost: int
    again: int
    wrong: int

    def __str__(self) -> str:
        text = f"{self.done} steps, {self.lost} lost, {self.again} done again"
        return text + f"; UPDATES WRONG by {self.wrong}" * (self.wrong > 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that both drivers have."""
    add = parser.add_argument
    add("--seed", type=int, default=0, help="decides all that is random (default: 0)")
    add("--soft-timeout", type=float, metavar="S", help="of the wrapper (default: the wrapper's own)")
    add("--hard-timeout", type=float, metavar="S", help="of the wrapper (default: the wrapper's own)")
    add("--keep", type=Path, metavar="DIR", help="keep the events, steps and outputs of all jobs here")


def settings(arguments: argparse.Namespace) -> dict[str, float]:
    """Returns the arguments of the wrapper that the command line has."""
    names = ("soft_timeout", "hard_timeout")
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}
