"""A training run survives an exception, killed ranks and a hang without losing anything.

Trains the same model several times, on four processes, one of which is a hot spare:

1. without faults;
2. with an exception, a killed rank 0 and a hang;
3. with more killed ranks than there are spares: ``ftrun`` restarts their processes, and they rejoin the
   running job;
4. with live state (``train_lm.py --live``), without faults and with the faults of 2: no step is repeated.

The final weights of 1 to 3 are the same, bit for bit. So are those of both runs of 4, which makes its random
numbers in a different way. In 1, 2 and 4 ``ftrun`` does not restart dead ranks: only the spare takes over.

    python examples/demo.py                      faults at fixed places
    python examples/demo.py --seed 7             at places chosen at random
    python examples/demo.py --seed 0 --runs 10   ten times, with seeds 0 to 9
"""

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from committed import done_again
from launcher import no_core_dumps, run_program
from table import duration, show_table

from ft_wrapper import events
from ft_wrapper.testing.inject_fault import FaultKind, FaultSpec, random_faults

TRAIN = Path(__file__).with_name("train_lm.py")
PROCESSES = 4
ACTIVE = 3
STEPS = 60
SOFT_TIMEOUT = 3
HARD_TIMEOUT = 8

FAULTS = (
    FaultSpec(FaultKind.EXCEPTION, rank=1, step=15),
    FaultSpec(FaultKind.SIGKILL, rank=0, step=30),
    FaultSpec(FaultKind.SLEEP, rank=2, step=45),
)
KILLS = (
    FaultSpec(FaultKind.SIGKILL, rank=0, step=20),
    FaultSpec(FaultKind.SIGKILL, rank=1, step=40),
)
WORDS = {"exception": "exception", "sigkill": "SIGKILL", "sleep": "sleeping hang"}

RESTART = re.compile(r"ft_wrapper\S*: ((?:restart \d+|live state): .*)")
STEP = re.compile(r"step .*")
FINAL = re.compile(r"final weights sha256 ([0-9a-f]{64})  loss (\S+)")


@dataclasses.dataclass
class Run:
    """One run of the training.

    Args:
        exitcode: ftrun's.
        sha256: of the final weights; None if the run did not get there.
        loss: of the final weights.
        output: everything the run printed.
        events: what happened, see `ft_wrapper.events`.
    """

    exitcode: int
    sha256: str | None
    loss: str | None
    output: list[str]
    events: list[dict]

    @property
    def started(self) -> list[dict]:
        """The processes that were started again: slot, pid, and when."""
        return [
            {"slot": record["rank"], "pid": record["child"], "monotonic": record["monotonic"]}
            for record in self.events
            if record["event"] == "rank_started" and record["incarnation"] > 0
        ]


def train(
    folder: Path,
    faults: Sequence[FaultSpec],
    *options: str,
    show_steps: bool = False,
    start_again: bool = False,
) -> Run:
    """Trains under ftrun, and shows each restart when it happens."""
    folder.mkdir()
    command = [sys.executable, "-m", "ft_wrapper.run", "--nproc-per-node", str(PROCESSES)]
    command += [] if start_again else ["--max-rank-restarts", "0"]
    command += [*training(folder, faults), *options]
    show = Show(show_steps)
    with ftrun(command, {events.ENV: str(folder / "events")}) as process:
        for line in process.stdout:
            show(line)
        exitcode = process.wait()
    return show.run(exitcode, folder)


def training(folder: Path, faults: Sequence[FaultSpec]) -> list[str]:
    """Returns the training's command line."""
    options = [str(TRAIN), "--active", str(ACTIVE), "--steps", str(STEPS), "--checkpoint-dir", str(folder)]
    options += ["--soft-timeout", str(SOFT_TIMEOUT), "--hard-timeout", str(HARD_TIMEOUT)]
    return [*options, "--faults", ",".join(map(str, faults))]


class Show:
    """Takes the lines that a run prints, and shows those that people want to see."""

    def __init__(self, show_steps: bool) -> None:
        self._show_steps = show_steps
        self._output: list[str] = []
        self._final: tuple[str, str] | None = None

    def __call__(self, line: str) -> None:
        line = line.rstrip("\n")
        self._output.append(line + "\n")
        if restart := RESTART.match(line):
            print(
                textwrap.fill(restart[1], 80, initial_indent="  ", subsequent_indent="    "),
                flush=True,
            )
        elif self._show_steps and STEP.match(line):
            print(f"  {line}", flush=True)
        elif final := FINAL.match(line):
            self._final = final[1], final[2]

    def run(self, exitcode: int, folder: Path) -> Run:
        """Returns what has become of the run."""
        sha256, loss = self._final or (None, None)
        return Run(exitcode, sha256, loss, self._output, events.load(str(folder / "events")))


@contextlib.contextmanager
def ftrun(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """Starts ftrun, and never lets it outlive the block."""
    # In a session of its own: ctrl-C in the terminal reaches this program alone, which then ends ftrun.
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def describe(fault: dict, run: Run) -> tuple[str, str, str, str, str]:
    """Returns a row of the table: fault, detected, all back and first step after, who took over."""
    records = run.events
    name = f"{WORDS[fault['kind']]}, rank {fault['rank']}, step {fault['step']}"
    before = fault["iteration"]
    ends = [r["monotonic"] for r in records if r["event"] == "end" and r["iteration"] == before]
    enters = [r for r in records if r["event"] == "enter"]
    after = min((r["iteration"] for r in enters if r["iteration"] > before), default=None)
    if not ends or after is None:
        return name, "-", "-", "-", "no one"
    entered = [r for r in enters if r["iteration"] == after]
    now = {r["rank"]: r["slot"] for r in entered}
    spares = {r["slot"] for r in entered} - {r["slot"] for r in enters if r["iteration"] == before}
    again = {process["pid"] for process in run.started}
    returned = {r["slot"] for r in entered if r["pid"] in again}
    steps = [r["monotonic"] for r in records if r["event"] == "first_step" and r["iteration"] == after]
    if any(r["rank"] == fault["rank"] and r["pid"] == fault["pid"] for r in entered):
        who = "no one: the same process"
    else:
        changed = [(r, s) for r, s in sorted(now.items()) if r == fault["rank"] or s in spares]
        words = {s: "returned " if s in returned else "spare " for s in spares}
        who = ", ".join(f"{words.get(s, '')}slot {s} is rank {r}" for r, s in changed)
    return (
        name,
        duration(min(ends) - fault["monotonic"]),
        duration(max(r["monotonic"] for r in entered) - fault["monotonic"]),
        duration(max(steps) - fault["monotonic"]) if steps else "-",
        who,
    )


def describe_return(started: dict, records: list[dict]) -> tuple[str, str, str, str]:
    """Returns a row of the other table: process, wants in after, is in after, what it does then."""
    own = [record for record in records if record["pid"] == started["pid"]]

    def after(event: str) -> str:
        times = [record["monotonic"] for record in own if record["event"] == event]
        return duration(min(times) - started["monotonic"]) if times else "-"

    ranks = [record["rank"] for record in own if record["event"] == "enter"]
    if ranks:
        does = f"is rank {ranks[0]}"
    elif after("decided") != "-":
        does = "is a spare"
    elif after("join") != "-":
        does = "waited until the training was over"
    else:
        does = "nothing: it came when the training was over"
    return f"slot {started['slot']}, pid {started['pid']}", after("join"), after("decided"), does


def train_live(folder: Path, faults: Sequence[FaultSpec], clean: Run) -> Run:
    """Trains with live state and faults, and ends the demo if a step was done again."""
    print(f"\nlive state, with faults: {', '.join(map(str, faults))}", flush=True)
    run = train(folder, faults, "--live")
    check(run, clean, faults)
    committed, again = done_again(run.events)
    print(f"  {committed} steps committed, {again} of them done again\n", flush=True)
    if (committed, again) != (STEPS, 0):
        sys.exit(f"this is not as it should be: {STEPS} steps should be committed, and none done again")
    return run


def check(run: Run, clean: Run, faults: Sequence[FaultSpec]) -> None:
    """Ends the demo if something is not as it should be, and says what."""
    wrong = []
    happened = sum(record["event"] == "inject" for record in run.events)
    if happened != len(faults):
        wrong.append(f"{happened} of {len(faults)} faults happened")
    if run.sha256 is None:
        wrong.append("the run did not reach its end")
    elif run.sha256 != clean.sha256:
        wrong.append(f"the weights differ: loss {run.loss} with faults, {clean.loss} without")
    if run.exitcode != 0:
        wrong.append(f"the run ended with exit code {run.exitcode}")
    if wrong:
        print("\nthe run's output:\n" + "".join(run.output), flush=True)
        sys.exit("this is not as it should be: " + "; ".join(wrong))


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="put the faults at random places, the same ones for a seed")
    parser.add_argument("--runs", type=int, default=1, help="runs with faults, with one seed after the other")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs {args.runs}: at least one run is needed")
    if args.runs > 1 and args.seed is None:
        parser.error(f"--runs {args.runs}: give --seed too, or all runs are the same")

    no_core_dumps()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ft-wrapper-demo-") as name:
        folder = Path(name)
        print(f"training without faults: {ACTIVE} active ranks and {PROCESSES - ACTIVE} spare", flush=True)
        clean = train(folder / "clean", (), show_steps=True)
        check(clean, clean, ())
        print("\nthe same with live state", flush=True)
        live_clean = train(folder / "live-clean", (), "--live")
        check(live_clean, live_clean, ())
        for number in range(args.runs):
            faults, kills = FAULTS, KILLS
            if args.seed is not None:
                faults, kills = at_random(FAULTS, args.seed + number), at_random(KILLS, args.seed + number)
            print(f"\nthe same with faults: {', '.join(map(str, faults))}", flush=True)
            faulty = train(folder / f"faults-{number}", faults)
            check(faulty, clean, faults)
            print(f"\nthe same, and the dead come back: {', '.join(map(str, kills))}", flush=True)
            killed = train(folder / f"kills-{number}", kills, start_again=True)
            check(killed, clean, kills)
            show_table(
                ("fault", "detected after", "all back after", "first step after", "who took over"),
                [describe(r, run) for run in (faulty, killed) for r in run.events if r["event"] == "inject"],
            )
            show_table(
                ("process started again", "wants in after", "is in after", "and then"),
                [describe_return(started, killed.events) for started in killed.started],
            )
            live = train_live(folder / f"live-{number}", faults, live_clean)
            runs = {
                "without faults": clean,
                "with faults": faulty,
                "with killed ranks that are started again": killed,
                "live state, without faults": live_clean,
                "live state, with faults": live,
            }
            print("final weights, the first half of their sha256")
            for what, run in runs.items():
                print(f"  {what:42}{run.sha256[:32]}", flush=True)
    print(f"\nthe same weights, bit for bit, in spite of the faults ({time.monotonic() - begin:.0f} s)")


def at_random(faults: Sequence[FaultSpec], seed: int) -> Sequence[FaultSpec]:
    """Returns the same kinds of faults at places that the seed decides."""
    kinds = [fault.kind for fault in faults]
    return random_faults(seed, kinds, range(ACTIVE), range(5, STEPS - 5), len(kinds))


if __name__ == "__main__":
    run_program(main)
