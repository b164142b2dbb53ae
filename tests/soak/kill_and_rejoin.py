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
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from soak import RESTART, Hammer, Record, Run, Samples, folder_of, make_parser, soak, train

# isort: split
from committed import done_again
from launcher import HOST, Ended, Launcher, run_program
from table import show_table

from ft_wrapper import events
from ft_wrapper.store import TCPStore

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


class LauncherRun(Run):
    """A training run under a launcher, of which processes that end are started again.

    Args:
        folder: for checkpoints, events and the output; must not exist yet.
        args: the command line's.
        options: further options of the training.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, options: Sequence[str]) -> None:
        super().__init__(folder, args.active)
        self.spared = args.active - 1  # ranks before it may be lost, so it always trains
        self.unasked: list[Ended] = []
        self.finished: set[int] = set()
        self.starts = 0
        self._is_live, self._show = args.live, args.verbose
        self._output = open(folder / "output", "w", encoding="utf-8")  # noqa: SIM115  # until `close`
        self._hit: dict[int, str] = {}  # kind of what was done to a process
        self._ended_by = collections.Counter[str]()
        command = [sys.executable, *train(folder, args.active, [*options, *["--live"] * args.live])]
        environment = {events.ENV: str(folder / "events")}
        self.launcher = Launcher(command, args.ranks, environment, self._read)

    def close(self) -> None:
        """Ends what still runs."""
        self.launcher.__exit__()
        self._output.close()

    def start(self) -> None:
        """Starts all ranks."""
        for slot in range(self.launcher.size):
            self._start(slot)

    def _start(self, slot: int) -> None:
        self.launcher.start(slot)
        self.starts += 1

    def hit(self, kind: str, pid: int) -> None:
        """Notes that a process will end because of what is done to it."""
        self._hit[pid] = kind

    def wait(self, seconds: float) -> None:
        """Waits a while; starts again what ends meanwhile, unless it has finished."""
        for ended in self.launcher.wait(seconds):
            if ended.exitcode == 0:
                self.finished.add(ended.rank)
                continue
            kind = self._hit.pop(ended.pid, None)
            if kind is not None:
                self._ended_by[kind] += 1
            else:
                self.unasked.append(ended)
                print(
                    f"  rank {ended.rank}, pid {ended.pid}: exit code {ended.exitcode}, unasked", flush=True
                )
                if len(self.unasked) > 10:
                    self.fail("too many processes end that no one touched")
            self._start(ended.rank)

    def finish(self, seconds: float) -> None:
        """Lets the training come to its end within so many seconds."""
        deadline = time.monotonic() + seconds
        while self.launcher.running:
            left = deadline - time.monotonic()
            if left <= 0:
                self.fail(f"the training did not finish within {seconds:.0f} s")
            self.wait(left)

    def _read(self, line: str) -> None:
        print(line, file=self._output, flush=True)
        if self._show and (restart := RESTART.match(line)):
            print(f"  {restart[1]}", flush=True)

    def wrong(self, records: Sequence[Record], steps: int) -> list[str]:
        """Says which ranks did not finish, and whether a step was done again though all is live."""
        wrong = []
        if self.finished != set(range(self.launcher.size)):
            wrong.append(f"only ranks {sorted(self.finished)} finished")
        committed, again = done_again(records)
        if self._is_live and (committed, again) != (steps, 0):
            wrong.append(f"{committed} of {steps} steps were committed, and {again} of them done again")
        return wrong

    def tell(self, records: Sequence[Record], steps: int) -> None:
        """Prints what happened, and how often."""
        kinds = collections.Counter(strike.kind for strike in self.strikes)
        show_table(
            ("what happened", "times", "ended the process"),
            [[kind, str(kinds[kind]), str(self._ended_by[kind])] for kind in KINDS],
        )
        iterations = max(record["iteration"] for record in self.entered()) + 1
        print(
            f"{self.starts - self.launcher.size} processes were started again, {len(self.unasked)} of them "
            f"had ended though no one touched them; {iterations} iterations, {steps} steps"
        )
        if self._is_live:
            committed, again = done_again(records)
            print(f"live state: {committed} steps committed, {again} of them done again")


class RankSamples(Samples):
    """What the ranks and their monitors have, and the store."""

    def __init__(self, run: LauncherRun) -> None:
        super().__init__([TCPStore(HOST, run.launcher.port)])
        self._run = run

    def take(self) -> None:
        """Takes one of each."""
        super().take()
        self._note_processes("store and launcher", [psutil.Process()])
        ranks, monitors = [], []
        for slot, process in self._run.launcher.running.items():
            monitor = children(process.pid)
            if slot == self._run.spared:
                self._note_processes(f"spared rank {slot}", [psutil.Process(process.pid)])
                self._note_processes("its monitor", monitor)
            elif monitor:
                ranks.append(psutil.Process(process.pid))
                monitors += monitor
        self._note_processes("other ranks", ranks)
        self._note_processes("their monitors", monitors)


class RankHammer(Hammer):
    """What happens to the ranks. One that is dead or stopped when its turn comes is passed over."""

    def __init__(self, run: LauncherRun, seed: int) -> None:
        super().__init__(seed)
        self._run = run
        self._slots = [slot for slot in range(run.launcher.size) if slot != run.spared]

    def try_to_strike(self) -> bool:
        """Does the next thing of the plan, if it can happen now."""
        kind = self._choose.choices(list(KINDS), list(KINDS.values()))[0]
        slot, seconds = self._choose.choice(self._slots), self._choose.random()
        process = self._run.launcher.running.get(slot)
        if process is None or process.pid in self._stopped:
            return False
        monitors = [child.pid for child in children(process.pid)]
        if "monitor" in kind and not monitors:
            kind = "SIGKILL"  # it has only just started
        pids = [process.pid]
        if "monitor" in kind:
            pids = monitors if kind == "SIGKILL of the monitor" else [*monitors, *pids]
        self._run.hit(kind, process.pid)
        self._hit(self._run.strike(kind, pids), slot, seconds)
        return True


def children(pid: int) -> list[psutil.Process]:
    """Returns the children of a process: of a rank, its monitor."""
    try:
        found: list[psutil.Process] = psutil.Process(pid).children()
        return found
    except psutil.NoSuchProcess:
        return []


def main() -> None:
    """Runs it."""
    parser = make_parser(__doc__, every=2.5)
    add = parser.add_argument
    add("--ranks", type=int, default=6, help="processes")
    add("--active", type=int, default=3, help="ranks that train; the others are hot spares")
    add("--live", action="store_true", help="train with live state: no step may be done again")
    add("--verbose", action="store_true", help="show the line that each restart leaves in the log")
    args = parser.parse_args()
    if not 2 <= args.active < args.ranks:
        parser.error(
            f"--active {args.active} --ranks {args.ranks}: at least 2 active ranks and a spare are needed"
        )

    def make(name: str, options: Sequence[str]) -> LauncherRun:
        return LauncherRun(args.folder / name, args, options)

    print(
        f"{args.active} active ranks and {args.ranks - args.active} spares, something every {args.every:g} s "
        f"for {args.minutes:g} minutes (seed {args.seed})",
        flush=True,
    )
    with folder_of(args):
        soak(args, make, lambda run: (RankHammer(run, args.seed), RankSamples(run)))


if __name__ == "__main__":
    run_program(main)
