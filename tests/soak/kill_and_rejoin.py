"""Trains `train_lm.py` while its ranks are killed and stopped at random, and started again by a plain loop.

    python tests/soak/kill_and_rejoin.py                                    a minute
    python tests/soak/kill_and_rejoin.py --ranks 6 --minutes 10 --seed 7    `make soak`
    python tests/soak/kill_and_rejoin.py --ranks 6 --minutes 10 --live      `make soak-live`

About every ``--every`` seconds something happens to a random rank. At the end of ``--minutes`` the training
finishes, and a second run trains the same number of steps without faults. Then these must hold:

- the final weights are the same, bit for bit;
- no iteration number was used twice;
- keys in the store, memory, file descriptors and threads are what they were in the first minute (from three
  minutes on). One rank is spared: it goes through every restart in the same process, and so does its monitor;
- with ``--live``: no step was repeated, because the spared rank always has the state.
"""

from __future__ import annotations

import argparse
import collections
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
from collections.abc import Sequence
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.append(str(EXAMPLES))

from committed import done_again
from launcher import HOST, Ended, Launcher, no_core_dumps, run_program
from table import duration, show_table

from ft_wrapper import events
from ft_wrapper.store import TCPStore

TRAIN = EXAMPLES / "train_lm.py"
RESTART = re.compile(r"ft_wrapper\S*: (restart \d+: .*)")
FINAL = re.compile(r"final weights sha256 ([0-9a-f]{64})  loss (\S+)  steps (\d+)")

SOFT_TIMEOUT = 3.0
HARD_TIMEOUT = 6.0
HEARTBEAT_TIMEOUT = 4.0
FOREVER = 10**9  # steps
FINISH = 180.0  # seconds that the training gets to finish, once no one is killed any more
SAMPLE_EVERY = 2.0
# What may be there in the last minute beyond what was there in the first. A spare that becomes active has a
# model then; the monitor of one that becomes rank 0 hosts two stores, the iteration's and the next one's.
MORE_MEMORY = 40e6  # bytes
MORE_FDS = 24
MORE_THREADS = 4
MORE_KEYS = 60
LONG = 3  # minutes: in a shorter run much of it is still being made, and it is shown only

# What happens, and how often by comparison.
KINDS = {
    "SIGKILL": 6,
    "SIGABRT": 4,
    "SIGSEGV": 4,
    "SIGKILL, monitor too": 2,  # as if the host were lost: only its heartbeat is missed
    "SIGKILL of the monitor": 1,
    "SIGSTOP, short": 2,  # shorter than any timeout
    "SIGSTOP, long": 1,  # longer than every timeout; its monitor ends it
    "SIGSTOP, long, monitor too": 2,  # when it resumes, the others have gone on without it
}
OUTRIGHT = ("SIGKILL", "SIGABRT", "SIGSEGV")


@dataclasses.dataclass
class Strike:
    """Something that was done to a rank.

    Args:
        kind: one of `KINDS`.
        slot: whose process it was.
        pid: the process.
        at: when, in seconds on this machine's monotonic clock.
        ended: when the process had ended; None if it lived on.
    """

    kind: str
    slot: int
    pid: int
    at: float
    ended: float | None = None


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a process had at a moment: memory in bytes (its proportional share), descriptors, threads."""

    at: float
    pss: float
    fds: float
    threads: float


class Run:
    """A training run under a launcher, of which processes that end are started again.

    Args:
        folder: for checkpoints, events and the output; must not exist yet.
        args: the command line's.
        options: further options of the training.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, options: Sequence[str]) -> None:
        folder.mkdir()
        self.folder = folder
        self.final: tuple[str, str, int] | None = None
        self.restarts = 0
        self.starts: dict[int, tuple[int, float]] = {}  # by pid: slot, when
        self.strikes: list[Strike] = []
        self.unasked: list[Ended] = []
        self.finished: set[int] = set()
        self._show = args.verbose
        self._output = open(folder / "output", "w", encoding="utf-8")  # noqa: SIM115  # until `close`
        self._hit: dict[int, Strike] = {}
        command = [sys.executable, str(TRAIN), "--active", str(args.active), "--min-ranks", str(args.active)]
        command += ["--checkpoint-dir", str(folder / "checkpoints"), *options]
        command += ["--live"] if args.live else []
        command += ["--soft-timeout", str(SOFT_TIMEOUT), "--hard-timeout", str(HARD_TIMEOUT)]
        command += ["--heartbeat-timeout", str(HEARTBEAT_TIMEOUT)]
        environment = {events.ENV: str(folder / "events")}
        self.launcher = Launcher(command, args.ranks, environment, self._read)

    def close(self) -> None:
        """Ends what still runs."""
        self.launcher.__exit__()
        self._output.close()

    def start(self, slot: int) -> None:
        """Starts the process of a slot."""
        self.starts[self.launcher.start(slot)] = slot, time.monotonic()

    def strike(self, kind: str, slot: int) -> Strike:
        """Notes what is about to be done to a slot's process."""
        strike = Strike(kind, slot, self.launcher.running[slot].pid, time.monotonic())
        self.strikes.append(strike)
        self._hit[strike.pid] = strike
        return strike

    def wait(self, timeout: float) -> None:
        """Waits a while; starts again what ends meanwhile, unless it has finished."""
        for ended in self.launcher.wait(timeout):
            if ended.exitcode == 0:
                self.finished.add(ended.rank)
                continue
            strike = self._hit.pop(ended.pid, None)
            if strike is not None:
                strike.ended = time.monotonic()
            else:
                self.unasked.append(ended)
                print(
                    f"  rank {ended.rank}, pid {ended.pid}: exit code {ended.exitcode}, unasked", flush=True
                )
                if len(self.unasked) > 10:
                    fail(self, "too many processes end that no one touched")
            self.start(ended.rank)

    def _read(self, line: str) -> None:
        print(f"{time.monotonic():.3f} {line}", file=self._output, flush=True)
        if restart := RESTART.match(line):
            self.restarts += 1
            if self._show:
                print(f"  {restart[1]}", flush=True)
        if final := FINAL.match(line):
            self.final = final[1], final[2], int(final[3])


class Samples:
    """What the processes have, and the store: a sample every other second.

    Of those that are killed and started again it is the median of all that are there.
    """

    def __init__(self, run: Run, spared: int) -> None:
        self._run = run
        self._spared = spared
        self._store = TCPStore(HOST, run.launcher.port)
        self._keys: list[tuple[float, int]] = []
        self._taken: dict[str, list[Sample]] = collections.defaultdict(list)

    def take(self) -> None:
        """Takes one of each."""
        self._keys.append((time.monotonic(), self._store.num_keys()))
        self._note("store and launcher", [psutil.Process()])
        ranks, monitors = [], []
        for slot, process in self._run.launcher.running.items():
            monitor = children(process.pid)
            if slot == self._spared:
                self._note(f"spared rank {slot}", [psutil.Process(process.pid)])
                self._note("its monitor", monitor)
            elif monitor:
                ranks.append(psutil.Process(process.pid))
                monitors += monitor
        self._note("other ranks", ranks)
        self._note("their monitors", monitors)

    def close(self) -> None:
        """Closes the connection to the store."""
        self._store.close()

    def growth(self) -> tuple[list[list[str]], list[str]]:
        """Returns rows of a table, first minute against last, and what has grown."""
        rows, grown = [], []

        def compare(what: str, values: Sequence[tuple[float, float]], more: float, unit: str) -> None:
            begin, end = self._keys[0][0], self._keys[-1][0]
            span = min(60.0, (end - begin) / 3)
            first = statistics.median([value for at, value in values if at <= begin + span] or [0])
            last = statistics.median([value for at, value in values if at >= end - span] or [0])
            most = max(value for _, value in values)
            rows.append([what, *(unit.format(value) for value in (first, last, most))])
            if last > first + more:
                grown.append(f"{what} grew from {unit.format(first)} to {unit.format(last)}")

        compare("store: keys", self._keys, MORE_KEYS, "{:.0f}")
        for name, samples in self._taken.items():
            compare(f"{name}: PSS", [(s.at, s.pss / 1e6) for s in samples], MORE_MEMORY / 1e6, "{:.1f} MB")
            compare(f"{name}: descriptors", [(s.at, s.fds) for s in samples], MORE_FDS, "{:.0f}")
            compare(f"{name}: threads", [(s.at, s.threads) for s in samples], MORE_THREADS, "{:.0f}")
        return rows, grown

    def _note(self, name: str, processes: Sequence[psutil.Process]) -> None:
        found = []
        for process in processes:
            try:
                found.append((process.memory_full_info().pss, process.num_fds(), process.num_threads()))
            except psutil.Error:
                continue  # it has just ended
        if found:
            pss, fds, threads = (statistics.median(values) for values in zip(*found, strict=True))
            self._taken[name].append(Sample(time.monotonic(), pss, fds, threads))


class Hammer:
    """What happens to the ranks, one thing after the other; always the same plan for a seed.

    A rank that is dead or stopped when its turn comes is passed over for the next one in the plan.
    """

    def __init__(self, run: Run, slots: Sequence[int], seed: int) -> None:
        self._run = run
        self._choose = random.Random(seed)
        self._slots = slots
        self._serial = itertools.count()
        self._later: list[tuple[float, int, list[int]]] = []  # when, serial number, pids to resume
        self._stopped: set[int] = set()

    def due(self) -> float:
        """When a process has to be resumed next."""
        return self._later[0][0] if self._later else float("inf")

    def resume(self, at: float) -> None:
        """Resumes those processes whose time has come."""
        while self._later and self._later[0][0] <= at:
            for pid in heapq.heappop(self._later)[2]:
                send(pid, signal.SIGCONT)
                self._stopped.discard(pid)

    def strike(self) -> None:
        """Does the next thing."""
        for _ in range(100):
            kind = self._choose.choices(list(KINDS), list(KINDS.values()))[0]
            slot, seconds = self._choose.choice(self._slots), self._choose.random()
            process = self._run.launcher.running.get(slot)
            if process is not None and process.pid not in self._stopped:
                break
        else:
            return
        pid = process.pid
        monitors = [child.pid for child in children(pid)]
        if "monitor" in kind and not monitors:
            kind = "SIGKILL"  # it has only just started
        lasting = kind.startswith("SIGSTOP")
        strike = self._run.strike(kind, slot)
        if kind == "SIGKILL of the monitor":
            targets = monitors
        elif "monitor too" in kind:
            targets = [*monitors, pid]
        else:
            targets = [pid]
        for target in targets:
            send(target, signal.SIGSTOP if lasting else getattr(signal, kind[:7]))
        print(f"  {kind}, slot {slot}, pid {pid}", flush=True)
        if lasting:
            past = HARD_TIMEOUT + HEARTBEAT_TIMEOUT + 3.0
            length = 0.1 + seconds if kind == "SIGSTOP, short" else past + 2.0 * seconds
            heapq.heappush(self._later, (strike.at + length, next(self._serial), targets))
            self._stopped.add(pid)

    def choose_pause(self, every: float) -> float:
        """Returns the seconds until the next thing."""
        return every * self._choose.uniform(0.8, 1.2)


def children(pid: int) -> list[psutil.Process]:
    """Returns the children of a process: of a rank, its monitor."""
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def send(pid: int, signum: int) -> None:
    """Sends a signal to a process, if it is there."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def hammer(run: Run, args: argparse.Namespace) -> Samples:
    """Lets the training run, and things happen to it, for as long as was asked for."""
    for slot in range(args.ranks):
        run.start(slot)
    deadline = time.monotonic() + FINISH
    while not (records := entered(run)) or len({r["rank"] for r in records}) < args.active:
        if time.monotonic() >= deadline:
            fail(run, "the training did not begin")
        run.wait(SAMPLE_EVERY)

    spared = args.active - 1  # ranks before it may be lost, so it always trains
    strikes = Hammer(run, [slot for slot in range(args.ranks) if slot != spared], args.seed)
    samples = Samples(run, spared)
    try:
        end = time.monotonic() + 60 * args.minutes
        next_sample = time.monotonic()
        next_strike = time.monotonic() + strikes.choose_pause(args.every)
        while (now := time.monotonic()) < end:
            if now >= next_sample:
                samples.take()
                next_sample = now + SAMPLE_EVERY
            strikes.resume(now)
            if now >= next_strike:
                strikes.strike()
                next_strike = now + strikes.choose_pause(args.every)
            run.wait(max(0.0, min(next_sample, next_strike, strikes.due(), end) - now))
        strikes.resume(float("inf"))
    finally:
        samples.close()
    return samples


def finish(run: Run, seconds: float) -> None:
    """Lets the training come to its end within so many seconds."""
    deadline = time.monotonic() + seconds
    while run.launcher.running:
        left = deadline - time.monotonic()
        if left <= 0:
            fail(run, f"the training did not finish within {seconds:.0f} s")
        run.wait(left)
    if run.final is None:
        fail(run, "no one printed the final weights")


def entered(run: Run) -> list[dict]:
    """Returns who entered the function, when, in which iteration."""
    path = run.folder / "events"
    return [r for r in events.load(str(path)) if r["event"] == "enter"] if path.exists() else []


def used_twice(records: Sequence[dict]) -> list[str]:
    """Says which numbers were used twice, or not in order."""
    wrong = []
    seats = collections.Counter((r["iteration"], r["rank"]) for r in records)
    wrong += [f"rank {rank} entered iteration {n} {c} times" for (n, rank), c in seats.items() if c > 1]
    slots = collections.Counter((r["iteration"], r["slot"]) for r in records)
    wrong += [f"slot {slot} entered iteration {n} {c} times" for (n, slot), c in slots.items() if c > 1]
    last: dict[int, int] = {}
    for r in records:
        if r["iteration"] <= last.get(r["pid"], -1):
            wrong.append(f"process {r['pid']} entered {r['iteration']} after {last[r['pid']]}")
        last[r["pid"]] = r["iteration"]
    return wrong


def times_back(run: Run, active: int) -> list[list[str]]:
    """Returns rows of a table: how long it took, where the events tell."""
    records = events.load(str(run.folder / "events"))
    enters = [r for r in records if r["event"] == "enter"]
    by_iteration: dict[int, list[dict]] = {}
    for r in enters:
        by_iteration.setdefault(r["iteration"], []).append(r)
    complete = {n: max(r["monotonic"] for r in rs) for n, rs in by_iteration.items() if len(rs) == active}
    active_in = {(r["pid"], r["iteration"]) for r in enters}
    asked = {r["pid"]: r["monotonic"] for r in reversed(records) if r["event"] == "join"}
    back: dict[str, list[float]] = {"killed": [], "killed, no one left": [], "other": []}
    for strike in run.strikes:
        on = max((n for n, at in complete.items() if at <= strike.at), default=None)
        began = [r["monotonic"] for n, rs in by_iteration.items() for r in rs if on is not None and n > on]
        if on is None or min(began, default=strike.at) < strike.at:
            continue  # a restart was under way already
        later = min(((at, n) for n, at in complete.items() if n > on), default=None)
        if (strike.pid, on) not in active_in or strike.ended is None or later is None:
            continue
        if strike.kind not in OUTRIGHT:
            how = "other"
        elif any(asked.get(r["pid"], 0.0) > strike.at for r in by_iteration[later[1]]):
            how = "killed, no one left"
        else:
            how = "killed"
        back[how].append(later[0] - strike.at)

    taken_in = {r["pid"]: r["monotonic"] for r in reversed(records) if r["event"] == "decided"}
    first = set(list(run.starts)[: run.launcher.size])
    ready = [at - run.starts[pid][1] for pid, at in asked.items() if pid not in first]
    waited = [taken_in[pid] - at for pid, at in asked.items() if pid in taken_in]
    return [
        ["active rank killed: all back after", *middle_and_most(back["killed"])],
        ["the same, no spare left: a process had to start", *middle_and_most(back["killed, no one left"])],
        ["active rank stopped, or its monitor killed", *middle_and_most(back["other"])],
        ["process started again: wants in after", *middle_and_most(ready)],
        ["and is in, by the next restart, after another", *middle_and_most(waited)],
    ]


def fail(run: Run, what: str) -> None:
    """Ends the program with the end of what the run printed."""
    lines = (run.folder / "output").read_text(encoding="utf-8").splitlines()
    print("\nthe end of the run's output:\n" + "\n".join(lines[-80:]), flush=True)
    sys.exit(f"this is not as it should be: {what}")


def middle_and_most(seconds: Sequence[float]) -> tuple[str, str, str]:
    """Returns how many there are, their median and the longest, in words."""
    if not seconds:
        return "0", "-", "-"
    return str(len(seconds)), duration(statistics.median(seconds)), duration(max(seconds))


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=6, help="processes")
    add("--active", type=int, default=3, help="ranks that train; the others are hot spares")
    add("--minutes", type=float, default=1.0, help="for how long things happen to the ranks")
    add("--every", type=float, default=2.5, help="seconds between two of them, a fifth more or less")
    add("--seed", type=int, default=0, help="decides what happens to whom")
    add(
        "--folder", type=Path, help="where to keep output, events and checkpoints (default: they are removed)"
    )
    add("--live", action="store_true", help="train with live state: no step may be done again")
    add("--verbose", action="store_true", help="show the line that each restart leaves in the log")
    args = parser.parse_args()
    if not 2 <= args.active < args.ranks:
        parser.error(
            f"--active {args.active} --ranks {args.ranks}: at least 2 active ranks and a spare are needed"
        )

    no_core_dumps()
    with tempfile.TemporaryDirectory(prefix="ft-wrapper-soak-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        show(args, folder)


def show(args: argparse.Namespace, folder: Path) -> None:
    """Trains with faults and without, and prints what came out."""
    begin = time.monotonic()
    spares = args.ranks - args.active
    print(
        f"{args.active} active ranks and {spares} spares, something every {args.every:g} s for "
        f"{args.minutes:g} minutes (seed {args.seed})",
        flush=True,
    )
    stop = folder / "stop"
    stop.unlink(missing_ok=True)
    faulty = Run(folder / "faulty", args, ["--steps", str(FOREVER), "--stop-file", str(stop)])
    try:
        samples = hammer(faulty, args)
        stop.touch()
        finish(faulty, FINISH)
    finally:
        faulty.close()
    assert faulty.final is not None
    sha256, loss, steps = faulty.final

    faulty_took = time.monotonic() - begin
    print(f"\nthe same {steps} steps without faults", flush=True)
    clean = Run(folder / "clean", args, ["--steps", str(steps)])
    try:
        for slot in range(args.ranks):
            clean.start(slot)
        finish(clean, faulty_took + FINISH)
    finally:
        clean.close()
    assert clean.final is not None

    wrong = used_twice(entered(faulty))
    rows, grown = samples.growth()
    if args.minutes >= LONG:
        wrong += grown
    if clean.final != faulty.final:
        wrong.append(f"the weights differ: {faulty.final} with faults, {clean.final} without")
    if faulty.finished != set(range(args.ranks)):
        wrong.append(f"only ranks {sorted(faulty.finished)} finished")

    committed, again = done_again(events.load(str(faulty.folder / "events")))
    if args.live and (committed, again) != (steps, 0):
        wrong.append(f"{committed} of {steps} steps were committed, and {again} of them done again")

    kinds = collections.Counter(strike.kind for strike in faulty.strikes)
    ended = collections.Counter(strike.kind for strike in faulty.strikes if strike.ended is not None)
    show_table(
        ("what happened", "times", "ended the process"),
        [[kind, str(kinds[kind]), str(ended[kind])] for kind in KINDS],
    )
    show_table(("", "times", "median", "longest"), times_back(faulty, args.active))
    show_table(("", "first minute", "last minute", "most"), rows)
    iterations = max(r["iteration"] for r in entered(faulty)) + 1
    print(
        f"{len(faulty.starts) - args.ranks} processes were started again, {len(faulty.unasked)} of them had "
        f"ended though no one touched them; {iterations} iterations, {steps} steps"
    )
    if args.live:
        print(f"live state: {committed} steps committed, {again} of them done again")
    print(f"final weights without faults  sha256 {clean.final[0]}  loss {clean.final[1]}")
    print(f"final weights with faults     sha256 {sha256}  loss {loss}", flush=True)
    if wrong:
        fail(faulty, "; ".join(wrong))
    print(f"\nthe same weights, bit for bit, in spite of it all ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    run_program(main)
