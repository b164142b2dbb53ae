"""Healthy but noisy jobs: no restart may come.

    python benchmarks/false_alarms.py
    python benchmarks/false_alarms.py --seconds 60 --live --noise sleep stop --http

Four ranks train with DistributedDataParallel in a gloo group, with a data loader's worker each, an evaluation
every 200 steps and a checkpoint with fsync and barrier every 500. At random moments come:

    gc        a collection of 700,000 objects          loader   a loader's worker sleeps for 2.5 s
    sleep     a rank sleeps for 0.1 to 0.7 s           compile  torch.compile on one rank, once in mid-job
    disk      rank 0 writes to a slow disk             busy     up to 8 busy processes, changed every 10 s
    stop      SIGSTOP to all ranks for 1 to 3 s        freeze   the same by a cgroup: ranks, or all processes
    trace     a debugger stops a rank for 3 s

--http adds requests of 3 s in the main thread, at two places of the program: one restart at each is allowed,
after which the wrapper has to know the place. disk, freeze and trace need permissions; the script says what
cannot be done here. The exit status is 1 if there was any restart that is not allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from false_alarms_worker import DISK, HTTP, INSIDE, request_after_commit, request_before_commit
from figures import duration, table
from jobs import Job, job, own_all_descendants
from watched_jobs import JobFailed, Restart, Watched, add_arguments, settings
from watched_training import Task

HERE = Path(__file__).resolve().parent
CGROUPS = Path("/sys/fs/cgroup")
BUSY, STOP, FREEZE, TRACE = "busy", "stop", "freeze", "trace"
PAUSES = (STOP, FREEZE, TRACE)
NOISE = tuple(sorted({*INSIDE, BUSY, *PAUSES} - {HTTP}))
PERIOD = 10.0  # seconds between two changes from outside
SLOW_DISK = 8_000_000  # bytes a second
TRACED = 3.0  # seconds


# What happens to a job from outside -----------------------------------------------------------------------


@contextlib.contextmanager
def cgroup(parent: Path) -> Iterator[Path]:
    """Gives a new cgroup; moves what is in it to its parent, and removes it.

    Raises:
        OSError: it cannot be made.
    """
    group = parent / f"ft-wrapper-{uuid.uuid4().hex}"
    group.mkdir()
    try:
        yield group
    finally:
        while pids := (group / "cgroup.procs").read_text().split():  # some may fork meanwhile
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def slow_disk(group: Path, folder: Path) -> None:
    """Limits the writes of a cgroup to the disk of a folder.

    Raises:
        OSError: it cannot be limited.
    """
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    if (device / "partition").exists():
        device = device.parent
    disk = (device / "dev").read_text().strip()
    (group / "blkio.throttle.write_bps_device").write_text(f"{disk} {SLOW_DISK}")


def freezers() -> list[tuple[Path, str, str, str]]:
    """Returns the folders in which a cgroup can be frozen, with its file and the words for it."""
    found = [(CGROUPS / "freezer", "freezer.state", "FROZEN", "THAWED")]
    found += [(root, "cgroup.freeze", "1", "0") for root in (CGROUPS, CGROUPS / "unified")]
    is_there = {"freezer.state": "tasks", "cgroup.freeze": "cgroup.controllers"}
    return [each for each in found if (each[0] / is_there[each[1]]).exists()]


def pause_by_cgroup(pids: list[int], seconds: float, chance: random.Random) -> None:
    """Freezes processes together."""
    parent, name, frozen, thawed = chance.choice(freezers())
    with cgroup(parent) as group:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
        try:
            (group / name).write_text(frozen)
            time.sleep(seconds)
        finally:
            (group / name).write_text(thawed)


def pause_by_signal(pids: list[int], seconds: float) -> None:
    """Stops processes together."""
    try:
        send(pids, signal.SIGSTOP)
        time.sleep(seconds)
    finally:
        send(pids, signal.SIGCONT)


def send(pids: list[int], number: signal.Signals) -> None:
    """Sends a signal to processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def trace(pid: int, job_: Job) -> str:
    """Lets a debugger stop a process for a while; returns why it could not, empty if it could."""
    tracer = job_.start([sys.executable, str(HERE / "trace_process.py"), str(pid), str(TRACED)])
    return "" if tracer.wait() == 0 or not Path(f"/proc/{pid}").exists() else "ptrace is refused"


def refused(folder: Path) -> dict[str, str]:
    """Returns what cannot be done on this machine, and why."""
    found = {}
    try:
        with cgroup(CGROUPS / "blkio") as group:
            slow_disk(group, folder)
    except OSError as error:
        found[DISK] = f"no disk can be made slow by the cgroup blkio: {error}"
    try:
        parent = next((root for root, *_ in freezers()), CGROUPS)
        with cgroup(parent) as group:
            sleeper = subprocess.Popen(["sleep", "10"])
            try:
                (group / "cgroup.procs").write_text(str(sleeper.pid))
            finally:
                sleeper.kill()
                sleeper.wait()
    except OSError as error:
        found[FREEZE] = f"no cgroup can be frozen: {error}"
    return found


class Outside:
    """The noise around a job.

    Args:
        watched: the job.
        kinds: of noise.
        seed: decides what comes when.
    """

    def __init__(self, watched: Watched, kinds: list[str], seed: int) -> None:
        self.watched, self.kinds = watched, kinds
        self.chance = random.Random(f"{seed} outside")
        self.busy: list[subprocess.Popen[bytes]] = []
        self.happened: list[str] = []
        self.deck: list[str] = []

    def period(self) -> None:
        """Changes the load; then something may happen to the ranks.

        Raises:
            JobFailed: the job has ended.
        """
        begin = time.monotonic()
        self.set_load(self.chance.choice((0, 0, 2, 4, 8)) if BUSY in self.kinds else 0)
        if not self.deck:  # each comes once before any comes again
            self.deck = self.chance.sample((*PAUSES, ""), len(PAUSES) + 1)
        kind = self.deck.pop()
        delay, seconds = self.chance.uniform(1, 5), self.chance.uniform(1, 3)
        rank, is_whole = self.chance.randrange(self.watched.task.ranks), self.chance.random() < 0.5
        self.rest(begin + delay)
        if kind in self.kinds:
            self.happened.append(kind)
            ranks = [int(pid) for pid in self.watched.column("pid")]
            if kind == STOP:
                pause_by_signal(ranks, seconds)
            elif kind == FREEZE:
                pause_by_cgroup(self.whole_job() if is_whole else ranks, seconds, self.chance)
            elif trouble := trace(ranks[rank], self.watched.job):
                self.happened[-1] = f"{TRACE} ({trouble})"
        self.rest(begin + PERIOD)

    def rest(self, until: float) -> None:
        """Waits until a moment."""
        self.watched.wait(lambda: time.monotonic() > until, PERIOD)

    def whole_job(self) -> list[int]:
        """Returns the processes of the job, without those of the noise."""
        ours = {process.pid for process in self.busy}
        return [process.pid for process in self.watched.job.processes() if process.pid not in ours]

    def set_load(self, number: int) -> None:
        """Has a number of busy processes run."""
        for process in self.busy:
            process.kill()
            process.wait()
        program = [sys.executable, "-c", "while True: pass"]
        self.busy = [self.watched.job.start(program) for _ in range(number)]


# A job -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What has come of a job.

    Args:
        task: the job.
        steps: that it has done.
        suspicions: that the wrapper had.
        allowed: restarts, the first one at each place of a request.
        others: all other restarts.
        trouble: with the job as a whole.
    """

    task: Task
    steps: str
    suspicions: int
    allowed: list[Restart]
    others: list[Restart]
    trouble: str


def during_requests(folder: Path, name: str) -> list[tuple[float, float]]:
    """Returns the beginning and end of the requests at one place of the program."""
    path = folder / f"{name}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = []
    for number, record in enumerate(records):
        if record["event"] == "begin":  # the end is missing if the process was killed
            later = records[number + 1]["monotonic"] if number + 1 < len(records) else time.monotonic()
            found.append((record["monotonic"], later))
    return found


def run(task: Task, kinds: list[str], job_: Job) -> Outcome:
    """Runs one job."""
    watched = Watched(job_, HERE / "false_alarms_worker.py", task)
    outside = Outside(watched, kinds, task.seed)
    trouble = ""
    try:
        watched.start()
        end = time.monotonic() + task.seconds
        while time.monotonic() < end:
            outside.period()
        outside.set_load(0)
        trouble = watched.finish()
    except JobFailed as error:
        trouble = str(error)
    restarts = watched.restarts()
    allowed = []
    for place in (request_before_commit, request_after_commit):
        waits = during_requests(job_.folder, place.__name__)
        here = [each for each in restarts if any(begin < each.at <= end for begin, end in waits)]
        allowed += here[:1]
    print(f"from outside: {', '.join(outside.happened)}", flush=True)
    return Outcome(
        task=task,
        steps=str(watched.steps()),
        suspicions=sum(event["event"].startswith("suspi") for event in watched.read()),
        allowed=allowed,
        others=[each for each in restarts if each not in allowed],
        trouble=trouble,
    )


def name_of(task: Task) -> str:
    """Returns a job's name in the table."""
    return f"{'live' if task.live else 'checkpoints'}, {duration(task.step)}"


def print_outcomes(outcomes: list[Outcome]) -> None:
    """Prints the restarts and the table."""
    rows = []
    for outcome in outcomes:
        name = name_of(outcome.task)
        for restart in outcome.allowed:
            print(f"{name}: allowed: {restart.line}")
        for restart in outcome.others:
            print(f"{name}: FALSE ALARM: {restart.line}")
        if outcome.trouble:
            print(f"{name}: {outcome.trouble}")
        counts = (len(outcome.allowed), len(outcome.others), int(bool(outcome.trouble)))
        seconds, suspicions = f"{outcome.task.seconds:g}", str(outcome.suspicions or "-")
        rows.append([name, seconds, outcome.steps, suspicions, *map(str, counts)])
    headers = ["job", "seconds", "steps", "suspicions", "allowed restarts", "false alarms", "failed"]
    print(table(headers, rows))


def main() -> None:
    """Measures and prints; exits with 1 after a restart that is not allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    add = parser.add_argument
    add("--seconds", type=float, default=600.0, metavar="S", help="of each job (default: 600)")
    add("--steps", nargs="+", type=float, default=[0.02], metavar="S", help="seconds (default: 0.02)")
    add("--ranks", type=int, default=4, metavar="N", help="(default: 4)")
    add("--live", action=argparse.BooleanOptionalAction, help="live state only, or checkpoints only")
    add(
        "--noise",
        nargs="*",
        choices=NOISE,
        default=list(NOISE),
        metavar="KIND",
        help=f"of {', '.join(NOISE)}",
    )
    add("--http", action="store_true", help="requests in the main thread, too")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or min(arguments.steps) <= 0 or arguments.seconds <= 0:
        parser.error("at least 2 ranks, and more than 0 seconds")
    own_all_descendants()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="false-alarms-"))
    outcomes = []
    try:
        cannot = {kind: why for kind, why in refused(folder).items() if kind in arguments.noise}
        for kind, why in cannot.items():
            print(f"not here: {kind}: {why}", flush=True)
        kinds = [kind for kind in arguments.noise if kind not in cannot] + [HTTP] * arguments.http
        lives = (True, False) if arguments.live is None else (arguments.live,)
        for step in arguments.steps:
            for live in lives:
                with contextlib.ExitStack() as stack:
                    throttle = ""
                    if DISK in kinds:
                        group = stack.enter_context(cgroup(CGROUPS / "blkio"))
                        slow_disk(group, folder)
                        throttle = str(group)
                    job_ = stack.enter_context(job(folder))
                    task = Task(
                        settings=settings(arguments),
                        folder=str(job_.folder),
                        limit=round(arguments.seconds) + 600,
                        ranks=arguments.ranks,
                        step=step,
                        live=live,
                        checkpoint_every=500,
                        evaluate_every=200,
                        seed=arguments.seed,
                        noise=tuple(kinds),
                        seconds=arguments.seconds,
                        throttle=throttle,
                    )
                    outcomes.append(run(task, kinds, job_))
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print_outcomes(outcomes)
    if any(outcome.others or outcome.trouble for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
