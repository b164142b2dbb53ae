"""Fault runs with real processes, and what the report has to say of them.

The wall time is measured here, from the start of ftrun to its end, and not taken from the events (but ftrun
ends without Python's own last steps, as in daily tests). Steps done again are counted in what the ranks have
noted beside the events.
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from support import ends, warm_ftrun

from ft_wrapper import events
from ft_wrapper.report import Report, make_reports

HERE = Path(__file__).resolve().parent
TOLERANCE = 0.01
LIMIT = 240.0
"""Seconds that a run may take."""


@dataclasses.dataclass
class Run:
    """What became of a run.

    Args:
        faults: what was asked for.
        began: when ftrun was started,
        ended: and when it had ended, on the clock of the events.
        report: what the events say.
        steps: how many were done, by what the ranks have noted.
        again: how many were done again.
    """

    faults: str
    began: float
    ended: float
    report: Report
    steps: int
    again: int

    @property
    def wall(self) -> float:
        """Seconds from the start of ftrun to its end."""
        return self.ended - self.began

    @property
    def miss(self) -> float:
        """By which part the buckets miss the wall time of all ranks."""
        in_all = self.wall * len(self.report.time.rows)
        return sum(self.report.time.buckets.values()) / in_all - 1

    @property
    def wrong(self) -> list[str]:
        """What must not be."""
        time_ = self.report.time
        found = []
        if abs(self.miss) > TOLERANCE:
            found.append(f"the buckets miss the wall time by {100 * self.miss:+.2f} %")
        if (time_.steps, time_.steps_again) != (self.steps, self.again):
            found.append(f"{time_.steps} + {time_.steps_again} steps, noted: {self.steps} + {self.again}")
        return found


def count_steps(folder: Path, steps: int) -> tuple[int, int]:
    """Steps done and steps done again, by what the ranks have noted; all were done in the end."""
    begun: dict[int, list[int]] = defaultdict(list)
    for path in folder.glob("begun-*"):
        for line in path.read_text().splitlines():
            iteration, step = map(int, line.split())
            begun[iteration].append(step)
    done: set[int] = set()
    again = 0
    last = max(begun)
    for iteration in sorted(begun):
        end = steps if iteration == last else max(begun[iteration])
        here = set(range(min(begun[iteration]), end))
        again += len(here & done)
        done |= here
    return len(done), again


def run_job(folder: Path, faults: str, *, processes: int = 4, active: int = 3, **options: Any) -> Run:
    """Runs a job to its end.

    Args:
        folder: for its files; it must not be there yet.
        faults: see `goodput_job`.
        processes: how many ranks.
        active: how many of them train.
        options: of the job, such as ``steps``.
    """
    folder.mkdir(parents=True)
    words = ["--nproc-per-node", processes, "--max-rank-restarts", 100, HERE / "goodput_job.py", folder]
    words += ["--faults", faults, "--active", active]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    environment = {"TMPDIR": str(folder), events.ENV: str(folder / "events")}
    # Python's own last steps, with torch in the process, come after all events: 0.2 to 1 s on a busy machine.
    environment[ends.ENDS] = "quick"
    began = time.monotonic()
    with open(folder / "output", "wb") as output:
        ftrun = warm_ftrun.start_ftrun([str(word) for word in words], output.fileno(), folder, environment)
    try:
        code = ftrun.wait(LIMIT)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        ended = time.monotonic()
        ftrun.kill()
        ftrun.wait()
    if code != 0:
        raise RuntimeError(f"ftrun ended with {code}:\n{(folder / 'output').read_text()[-4000:]}")
    (report,) = make_reports(events.load(str(folder / "events")))
    return Run(faults, began, ended, report, *count_steps(folder, options["steps"]))


def random_faults(seed: int, steps: int) -> str:
    """Two exceptions, a SIGKILL and a hang, in any order, somewhere."""
    chance = random.Random(seed)
    kinds = ["exception", "late", "sigkill", "hang"]
    chance.shuffle(kinds)
    at = sorted(chance.sample(range(1, steps - 1), len(kinds)))
    return ",".join(f"{kind}:{step}" for kind, step in zip(kinds, at, strict=True))
