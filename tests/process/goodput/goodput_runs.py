"""Random fault runs with real processes: do the buckets of the report add up, and are its numbers right?

    python tests/process/goodput/goodput_runs.py --runs 20 --seed 1

In each run, three ranks of four train through faults at random steps: exceptions, SIGKILLs (of which a new
process comes back) and one hang. The wall time is measured here, from the start of ftrun to its end, and not
taken from the events (but ftrun ends without Python's own last steps, as in daily tests). Steps done again
are counted in what the ranks have noted beside the events. Ends with 1 if the buckets miss the wall time of
all ranks by more than 1 %, or a number differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE.parents[1]) not in sys.path:
    sys.path.insert(0, str(HERE.parents[1]))

from support import ends, warm_ftrun  # noqa: E402

from ft_wrapper import events  # noqa: E402
from ft_wrapper.report import Report, make_reports  # noqa: E402

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
    def outside(self) -> tuple[float, float]:
        """Seconds before the first event's moment and after the last one's."""
        rows = self.report.time.rows
        return min(row.begin for row in rows) - self.began, self.ended - max(row.end for row in rows)

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


def main() -> int:
    """Runs jobs, and prints a line for each; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--folder", type=Path, help="where to keep the files (default: nowhere)")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as temporary, warm_ftrun.warm():
        for seed in range(args.seed, args.seed + args.runs):
            folder = (args.folder or Path(temporary)) / str(seed)
            run = run_job(
                folder, random_faults(seed, args.steps), steps=args.steps, step_seconds=0.04, every=100
            )
            bad += bool(run.wrong)
            time_ = run.report.time
            print(
                f"seed {seed}: {run.faults}; wall {run.wall:.2f} s, buckets {100 * run.miss:+.2f} % "
                f"({1e3 * run.outside[0]:.0f} ms before, {1e3 * run.outside[1]:.0f} ms after all events); "
                f"{time_.steps} steps, {time_.steps_again} again (noted {run.again}); "
                f"useful {100 * time_.share('useful_steps'):.1f} %, "
                f"again {100 * time_.share('wasted_progress'):.1f} %"
                + "".join(f"; WRONG: {what}" for what in run.wrong),
                flush=True,
            )
    print(f"{args.runs} runs, {bad} of them wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
