"""What the soaks share: a training that is hammered, what its processes have meanwhile, and a judge."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import heapq
import itertools
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.append(str(EXAMPLES))

from launcher import no_core_dumps
from table import duration, show_table

from ft_wrapper import events

RESTART = re.compile(r"ft_wrapper\S*: (restart \d+: .*)")
FINAL = re.compile(r"final weights sha256 ([0-9a-f]{64})  loss (\S+)  steps (\d+)")

SOFT_TIMEOUT = 3.0
HARD_TIMEOUT = 6.0
HEARTBEAT_TIMEOUT = 4.0
PAST = HARD_TIMEOUT + HEARTBEAT_TIMEOUT + 3.0
FOREVER = 10**9  # steps
FINISH = 180.0  # seconds that the training gets to finish, once no one is killed any more
SAMPLE_EVERY = 2.0
# What may be there in the last minute beyond what was there in the first. A spare that becomes active has a
# model then; the monitor of one that becomes rank 0 hosts two stores, the iteration's and the next one's.
MORE = {"PSS": (40.0, "{:.1f} MB"), "descriptors": (24, "{:.0f}"), "threads": (4, "{:.0f}")}
MORE_KEYS = 60
LONG = 3  # minutes: in a shorter run much of it is still being made, and it is shown only
OUTRIGHT = ("SIGKILL", "SIGABRT", "SIGSEGV")

Record = dict[str, Any]


@dataclasses.dataclass
class Strike:
    """Something that was done, at a moment of this machine's monotonic clock, to these processes."""

    kind: str
    at: float
    pids: Sequence[int]


def train(folder: Path, active: int, options: Sequence[str]) -> list[str]:
    """The training's command line."""
    script = [str(EXAMPLES / "train_lm.py"), "--active", str(active), "--min-ranks", str(active)]
    script += ["--checkpoint-dir", str(folder / "checkpoints"), *options]
    script += ["--soft-timeout", str(SOFT_TIMEOUT), "--hard-timeout", str(HARD_TIMEOUT)]
    return [*script, "--heartbeat-timeout", str(HEARTBEAT_TIMEOUT)]


class Run:
    """A training run, of which what ends is started again.

    Args:
        folder: for checkpoints, events and the output; must not exist yet.
        active: how many ranks train.
    """

    def __init__(self, folder: Path, active: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.active = active
        self.strikes: list[Strike] = []

    def close(self) -> None:
        """Ends what still runs."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts it."""
        raise NotImplementedError

    def wait(self, seconds: float) -> None:
        """Waits a while; ends the program if something ends that should not."""
        raise NotImplementedError

    def finish(self, seconds: float) -> None:
        """Lets the training come to its end within so many seconds."""
        raise NotImplementedError

    def wrong(self, records: Sequence[Record], steps: int) -> list[str]:
        """Says what is not as it should be, beside what is looked at in each run."""
        raise NotImplementedError

    def tell(self, records: Sequence[Record], steps: int) -> None:
        """Prints what happened, and how often."""
        raise NotImplementedError

    def strike(self, kind: str, pids: Sequence[int]) -> Strike:
        """Notes what is about to be done to processes."""
        strike = Strike(kind, time.monotonic(), pids)
        self.strikes.append(strike)
        return strike

    def printed(self) -> str:
        """What was printed so far."""
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")

    def final(self) -> tuple[str, str, int]:
        """The final weights, their loss, and the number of steps."""
        found = FINAL.findall(self.printed())
        if len(found) != 1:
            self.fail(f"the final weights were printed {len(found)} times")
        sha256, loss, steps = found[0]
        return sha256, loss, int(steps)

    def entered(self) -> list[Record]:
        """Returns who entered the function, when, in which iteration."""
        path = self.folder / "events"
        return [r for r in events.load(str(path)) if r["event"] == "enter"] if path.exists() else []

    def await_begin(self) -> None:
        """Waits until all active ranks have entered the function."""
        deadline = time.monotonic() + FINISH
        while len({record["rank"] for record in self.entered()}) < self.active:
            if time.monotonic() >= deadline:
                self.fail("the training did not begin")
            self.wait(SAMPLE_EVERY)

    def await_all(self) -> None:
        """Waits until all ranks take part, if one that comes after the end would be turned away."""

    def fail(self, what: str) -> NoReturn:
        """Ends the program with the end of what the run printed."""
        print("\nthe end of the run's output:\n" + "\n".join(self.printed().splitlines()[-80:]), flush=True)
        sys.exit(f"this is not as it should be: {what}")


class Samples:
    """What the processes have, and the stores: a sample every other second.

    Of those that are killed and started again it is the median of all that are there.

    Args:
        stores: are closed with it.
    """

    def __init__(self, stores: Sequence[Any]) -> None:
        self._stores = stores
        self._taken: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)  # when, how much
        self._limits: dict[str, tuple[float, str]] = {}

    def take(self) -> None:
        """Takes one of each."""
        keys = sum(store.num_keys() for store in self._stores)
        self._note("stores: keys", keys, MORE_KEYS, "{:.0f}")

    def close(self) -> None:
        """Closes the connections to the stores."""
        for store in self._stores:
            store.close()

    def growth(self) -> tuple[list[list[str]], list[str]]:
        """Returns rows of a table, first minute against last, and what has grown."""
        rows, grown = [], []
        times = [at for at, _ in self._taken["stores: keys"]]
        span = min(60.0, (times[-1] - times[0]) / 3)
        for what, values in self._taken.items():
            more, unit = self._limits[what]
            first = statistics.median([value for at, value in values if at <= times[0] + span] or [0])
            last = statistics.median([value for at, value in values if at >= times[-1] - span] or [0])
            most = max(value for _, value in values)
            rows.append([what, *(unit.format(value) for value in (first, last, most))])
            if last > first + more:
                grown.append(f"{what} grew from {unit.format(first)} to {unit.format(last)}")
        return rows, grown

    def _note(self, what: str, value: float, more: float, unit: str) -> None:
        self._taken[what].append((time.monotonic(), value))
        self._limits[what] = more, unit

    def _note_processes(self, name: str, processes: Sequence[psutil.Process]) -> None:
        found = []
        for process in processes:
            try:
                pss = process.memory_full_info().pss / 1e6
                found.append((pss, process.num_fds(), process.num_threads()))
            except psutil.Error:
                continue  # it has just ended
        for (what, limit), values in zip(MORE.items(), zip(*found, strict=True), strict=False):
            self._note(f"{name}: {what}", statistics.median(values), *limit)


class Hammer:
    """What happens, one thing after the other; always the same plan for a seed.

    What cannot happen when its turn comes is passed over for the next thing in the plan.
    """

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)
        self._serial = itertools.count()
        self._later: list[tuple[float, int, Any]] = []  # when, serial number, who goes on
        self._stopped: set[int] = set()

    def try_to_strike(self) -> bool:
        """Does the next thing of the plan, if it can happen now."""
        raise NotImplementedError

    def strike(self) -> None:
        """Does the next thing that can happen."""
        for _ in range(100):
            if self.try_to_strike():
                return

    def due(self) -> float:
        """When somebody has to go on next."""
        return self._later[0][0] if self._later else float("inf")

    def resume(self, at: float) -> None:
        """Lets those go on whose time has come."""
        while self._later and self._later[0][0] <= at:
            self._resume(heapq.heappop(self._later)[2])

    def _resume(self, who: Any) -> None:
        for pid in who:
            send(pid, signal.SIGCONT)
            self._stopped.discard(pid)

    def _resume_after(self, strike: Strike, seconds: float, who: Any) -> None:
        heapq.heappush(self._later, (strike.at + seconds, next(self._serial), who))

    def _hit(self, strike: Strike, slot: int, seconds: float) -> None:
        """Sends the signal that the kind begins with to the struck processes, of which the last is a rank."""
        signame, lasting = strike.kind[:7], strike.kind.startswith("SIGSTOP")
        for pid in strike.pids:
            send(pid, signal.SIGSTOP if lasting else getattr(signal, signame))
        print(f"  {strike.kind}, slot {slot}, pid {strike.pids[-1]}", flush=True)
        if lasting:
            length = 0.1 + seconds if "short" in strike.kind else PAST + 2.0 * seconds
            self._resume_after(strike, length, strike.pids)
            self._stopped.update(strike.pids)

    def choose_pause(self, every: float) -> float:
        """Returns the seconds until the next thing."""
        return every * self._choose.uniform(0.8, 1.2)


def hammer(run: Run, hits: Hammer, samples: Samples, args: argparse.Namespace) -> None:
    """Lets things happen to a training for as long as was asked for; then all take part again."""
    end = time.monotonic() + 60 * args.minutes
    next_sample = time.monotonic()
    next_strike = time.monotonic() + hits.choose_pause(args.every)
    while (now := time.monotonic()) < end:
        if now >= next_sample:
            samples.take()
            next_sample = now + SAMPLE_EVERY
        hits.resume(now)
        if now >= next_strike:
            hits.strike()
            next_strike = now + hits.choose_pause(args.every)
        run.wait(max(0.0, min(next_sample, next_strike, hits.due(), end) - time.monotonic()))
    hits.resume(float("inf"))
    run.await_all()


def send(pid: int, signum: int) -> None:
    """Sends a signal to a process, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def used_twice(records: Sequence[Record]) -> list[str]:
    """Says which numbers were used twice, or not in order."""
    wrong = []
    for what in ("rank", "slot"):
        seats = collections.Counter((r["iteration"], r[what]) for r in records)
        wrong += [f"{what} {who} entered iteration {n} {c} times" for (n, who), c in seats.items() if c > 1]
    last: dict[int, int] = {}
    for r in records:
        if r["iteration"] <= last.get(r["pid"], -1):
            wrong.append(f"process {r['pid']} entered {r['iteration']} after {last[r['pid']]}")
        last[r["pid"]] = r["iteration"]
    return wrong


def times_back(run: Run) -> list[list[str]]:
    """Returns rows of a table: from a strike at somebody who trained to the moment when all train again."""
    by_iteration: dict[int, list[Record]] = {}
    for record in run.entered():
        by_iteration.setdefault(record["iteration"], []).append(record)
    complete = {n: max(r["monotonic"] for r in rs) for n, rs in by_iteration.items() if len(rs) == run.active}
    back = collections.defaultdict(list)
    for strike in run.strikes:
        on = max((n for n, at in complete.items() if at <= strike.at), default=-1)
        later = min((at for n, at in complete.items() if n > on), default=None)
        trained = {record["pid"] for record in by_iteration.get(on, ())}
        if later is not None and not trained.isdisjoint(strike.pids) and strike.kind != "SIGSTOP, short":
            back["killed" if strike.kind in OUTRIGHT else strike.kind].append(later - strike.at)
    return [
        [f"{kind}: all back after", str(len(all_)), duration(statistics.median(all_)), duration(max(all_))]
        for kind, all_ in back.items()
    ]


def train_both(
    folder: Path, make: Callable[[str, Sequence[str]], Any], act: Callable[[Any], None], *options: str
) -> Any:
    """Trains with faults, and the same steps without.

    Args:
        folder: for both.
        make: makes a run that has a name, with options of the training.
        act: what happens to the one with faults, once it trains.
        options: of that one.

    Returns:
        That one; its final weights have been compared.
    """
    begin, stop = time.monotonic(), folder / "stop"
    stop.unlink(missing_ok=True)
    endless = ["--steps", str(FOREVER), "--stop-file", str(stop)]
    with contextlib.closing(make("faulty", [*endless, *options])) as faulty:
        faulty.start()
        faulty.await_begin()
        act(faulty)
        stop.touch()
        faulty.finish(FINISH)
    sha256, loss, steps = faulty.final()
    print(f"\nthe same {steps} steps without faults", flush=True)
    with contextlib.closing(make("clean", ["--steps", str(steps)])) as clean:
        clean.start()
        clean.finish(time.monotonic() - begin + FINISH)
    print(f"final weights without faults  sha256 {clean.final()[0]}  loss {clean.final()[1]}")
    print(f"final weights with faults     sha256 {sha256}  loss {loss}", flush=True)
    if clean.final() != faulty.final():
        faulty.fail("the weights differ")
    return faulty


def soak(
    args: argparse.Namespace,
    make: Callable[[str, Sequence[str]], Run],
    play: Callable[[Any], tuple[Hammer, Samples]],
    *options: str,
) -> None:
    """Trains with faults and without, prints what came out, and ends the program if anything is wrong.

    Args:
        args: those of `make_parser`.
        make: makes a run that has a name, with options of the training.
        play: makes what happens to the one with faults, and what is looked at meanwhile.
        options: of that one.
    """
    begin, samples = time.monotonic(), Samples([])

    def act(run: Run) -> None:
        nonlocal samples
        hits, samples = play(run)
        with contextlib.closing(samples):
            hammer(run, hits, samples, args)

    run: Run = train_both(args.folder, make, act, *options)
    records, steps = events.load(str(run.folder / "events")), run.final()[2]
    rows, grown = samples.growth()
    run.tell(records, steps)
    show_table(("", "times", "median", "longest"), times_back(run))
    show_table(("", "first minute", "last minute", "most"), rows)
    wrong = used_twice(run.entered()) + run.wrong(records, steps) + grown * (args.minutes >= LONG)
    if wrong:
        run.fail("; ".join(wrong))
    print(f"\nthe same weights, bit for bit, in spite of it all ({time.monotonic() - begin:.0f} s)")


def make_parser(about: str, every: float) -> argparse.ArgumentParser:
    """The options that all soaks have."""
    parser = argparse.ArgumentParser(
        description=about.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, help="for how long things happen")
    add("--every", type=float, default=every, help="seconds between two of them, a fifth more or less")
    add("--seed", type=int, default=0, help="decides what happens to whom")
    add(
        "--folder", type=Path, help="where to keep output, events and checkpoints (default: they are removed)"
    )
    return parser


@contextlib.contextmanager
def folder_of(args: argparse.Namespace) -> Iterator[None]:
    """The folder that was asked for, or a temporary one."""
    no_core_dumps()
    with tempfile.TemporaryDirectory(prefix="ft-wrapper-soak-") as temporary:
        args.folder = args.folder or Path(temporary)
        args.folder.mkdir(parents=True, exist_ok=True)
        yield
