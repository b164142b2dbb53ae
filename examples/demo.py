"""A training run survives an exception, a killed rank 0 and a hang, and loses nothing by it.

Trains the same model twice, on four processes of which one is a hot spare: once left alone, once with faults
put in. The final weights are the same, bit for bit.

    python examples/demo.py                      three faults, at fixed places
    python examples/demo.py --seed 7             at places chosen at random
    python examples/demo.py --seed 0 --runs 10   ten such runs, with seeds 0 to 9
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
import time
from collections.abc import Iterator
from pathlib import Path

from ft_wrapper import events
from ft_wrapper.testing.inject_fault import Fault, FaultSpec, random_faults

TRAIN = Path(__file__).with_name("train_lm.py")
PROCESSES = 4
ACTIVE = 3
STEPS = 60
SOFT_TIMEOUT = 3
HARD_TIMEOUT = 8

FAULTS = (
    FaultSpec(Fault.EXCEPTION, rank=1, step=15),
    FaultSpec(Fault.SIGKILL, rank=0, step=30),
    FaultSpec(Fault.SLEEP, rank=2, step=45),
)
WORDS = {"exception": "exception", "sigkill": "SIGKILL", "sleep": "sleeping hang"}

RESTART = re.compile(r"ft_wrapper\S*: (restart \d+: .*)")
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


def train(folder: Path, faults: tuple[FaultSpec, ...], show_steps: bool) -> Run:
    """Trains under ftrun, and shows each restart when it happens."""
    folder.mkdir()
    command = [sys.executable, "-m", "ft_wrapper.run", "--nproc-per-node", str(PROCESSES)]
    command += [str(TRAIN), "--active", str(ACTIVE), "--steps", str(STEPS), "--checkpoint-dir", str(folder)]
    command += ["--soft-timeout", str(SOFT_TIMEOUT), "--hard-timeout", str(HARD_TIMEOUT)]
    command += ["--faults", ",".join(map(str, faults))]
    events_file = folder / "events"
    output, final = [], None
    with started(command, {events.ENV: str(events_file)}) as process:
        for line in process.stdout:
            output.append(line)
            if restart := RESTART.match(line):
                print(f"  {restart[1]}", flush=True)
            elif show_steps and STEP.match(line):
                print(f"  {line}", end="", flush=True)
            final = FINAL.match(line) or final
        exitcode = process.wait()
    sha256, loss = final.groups() if final else (None, None)
    return Run(exitcode, sha256, loss, output, events.read(str(events_file)))


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen]:
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


def describe(fault: dict, records: list[dict]) -> tuple[str, str, str, str]:
    """Returns a row of the table: fault, detected after, everyone back after, who took over."""
    name = f"{WORDS[fault['kind']]}, rank {fault['rank']}, step {fault['step']}"
    before = fault["iteration"]
    ends = [r["monotonic"] for r in records if r["event"] == "end" and r["iteration"] == before]
    enters = [r for r in records if r["event"] == "enter"]
    after = min((r["iteration"] for r in enters if r["iteration"] > before), default=None)
    if not ends or after is None:
        return name, "-", "-", "nobody"
    entered = [r for r in enters if r["iteration"] == after]
    now = {r["rank"]: r["slot"] for r in entered}
    spares = {r["slot"] for r in entered} - {r["slot"] for r in enters if r["iteration"] == before}
    successor = now.get(fault["rank"])
    if successor == fault["slot"]:
        who = "nobody: the same process"
    else:
        changed = [(r, s) for r, s in sorted(now.items()) if r == fault["rank"] or s in spares]
        who = ", ".join(f"{'spare ' if s in spares else ''}slot {s} is rank {r}" for r, s in changed)
    return (
        name,
        duration(min(ends) - fault["monotonic"]),
        duration(max(r["monotonic"] for r in entered) - fault["monotonic"]),
        who,
    )


def duration(seconds: float) -> str:
    """Returns a duration as people write it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def show_table(rows: list[tuple[str, ...]]) -> None:
    """Prints the table, with rich if it is there."""
    header = ("fault", "detected after", "everyone back after", "who took over")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def check(run: Run, clean: Run, faults: tuple[FaultSpec, ...]) -> None:
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
        wrong.append(f"ftrun ended with exit code {run.exitcode}")
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

    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ft-wrapper-demo-") as folder:
        print(f"training without faults: {ACTIVE} active ranks and {PROCESSES - ACTIVE} spare", flush=True)
        clean = train(Path(folder, "clean"), (), show_steps=True)
        check(clean, clean, ())
        for number in range(args.runs):
            faults = FAULTS
            if args.seed is not None:
                kinds, steps = [fault.kind for fault in FAULTS], range(5, STEPS - 5)
                faults = random_faults(args.seed + number, kinds, range(ACTIVE), steps, len(kinds))
            print(f"\nthe same with faults: {', '.join(map(str, faults))}", flush=True)
            run = train(Path(folder, f"faults-{number}"), faults, show_steps=False)
            show_table([describe(record, run.events) for record in run.events if record["event"] == "inject"])
            print(f"final weights without faults  sha256 {clean.sha256}")
            print(f"final weights with faults     sha256 {run.sha256}", flush=True)
            check(run, clean, faults)
    print(f"\nthe same weights, bit for bit, in spite of the faults ({time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
