"""Puts one-line mistakes into the package, one after the other, and sees whether the explorers find them.

For example, from the root of the repository::

    python -m tests.simulation.mutants --processes 2
    python -m tests.simulation.mutants --only advance-reads-deaths-first

First the package is explored as it is, for as long as a mistake may take to be found: nothing may go wrong.
A mistake is looked for at random, from seeds that are random unless ``--seed`` is given. Those that take
long, or that no search has found lately, are apart: ``--seldom --seconds 900`` looks for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from . import every_mutant
from .mutant import Mutant, copy_to

FINDERS = {
    "job": ["-m", "tests.explorer", "--as-found", "--members", "5"],
    "rendezvous": ["-m", "tests.simulation.rendezvous.explore"],
    "live": ["-m", "tests.simulation.live.explorer"],
}
"""The command line of each finder; ``--random``, ``--seed``, ``--processes`` and ``--seconds`` are added."""

NOTHING = "no violation"
"""What a search that went to its end says of a package in which it found nothing."""

_MANY = 10_000_000
_GRACE = 30.0  # seconds beyond the time allowed in which a finder starts, and shows what it found


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a search.

    Args:
        found: whether something went wrong in it.
        by: the invariant that does not hold, or the first words of what went wrong.
        seconds: how long it took.
        schedules: how many were run; None if that was not told.
        output: all that the finder wrote.
    """

    found: bool
    by: str
    seconds: float
    schedules: int | None
    output: str


def search(mutant: Mutant | None, finder: str, seed: int, processes: int, seconds: float) -> Result:
    """Explores the package with a mistake in it, or as it is.

    Args:
        mutant: the mistake; None for none.
        finder: one of `FINDERS`.
        seed: the first one.
        processes: how many share the work.
        seconds: how long to look.
    """
    with tempfile.TemporaryDirectory(prefix="ft_wrapper-mutant-") as folder:
        copy_to(Path(folder), mutant)
        command = [sys.executable, *FINDERS[finder], "--random", str(_MANY), "--seed", str(seed)]
        command += ["--processes", str(processes), "--seconds", f"{seconds:g}"]
        tests = Path(folder) / "tests"
        path = os.pathsep.join(
            [folder, str(tests), *(str(tests / "simulation" / each) for each in (".", "rendezvous"))]
        )
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=seconds + _GRACE)
            except subprocess.TimeoutExpired:
                process.kill()  # those who share its work end with it
                output, _ = process.communicate()
                return Result(False, "came to no end", time.monotonic() - start, None, output)
        took = time.monotonic() - start
    counted = re.search(r"^(?:after|at random:) ([\d,]+) schedules", output, re.MULTILINE)
    schedules = None if counted is None else int(counted[1].replace(",", ""))
    wrong = re.search(r"^seed \d+ goes wrong.*\n(.*)", output, re.MULTILINE)
    if process.returncode == 0:
        return Result(False, NOTHING, took, schedules, output)
    if process.returncode != 1 or wrong is None:  # it failed itself: that finds nothing
        last = output.strip().splitlines()[-1:] or ["nothing"]
        return Result(False, f"the finder failed ({process.returncode}): {last[0]}", took, schedules, output)
    return Result(True, _kind(wrong[1]), took, schedules, output)


def _kind(what: str) -> str:
    """What went wrong, in a column of a table."""
    invariant = re.search(r"\b[A-Z]\d+[a-z]?: ", what)
    text = what[invariant.start() :] if invariant else what
    return text[:70]


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says; returns the exit code: 1 if a mistake was not found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.mutants",
        description="Puts mistakes into the package and looks for them.",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--finder", choices=FINDERS, help="only those that this one has to find")
    parser.add_argument("--seldom", action="store_true", help="those that take long, or are not found")
    parser.add_argument("--list", action="store_true", help="show them, with what each line is there for")
    parser.add_argument("--processes", type=int, default=2, help="share the work (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=90.0, help="for each (default: %(default)g)")
    parser.add_argument("--seed", type=int, help="the first seed of each search; random by default")
    parser.add_argument("--without-clean", action="store_true", help="do not explore the package as it is")
    options = parser.parse_args(arguments)
    mutants = [m for m in every_mutant() if options.finder in (None, m.finder)]
    if options.only:
        unknown = set(options.only) - {mutant.name for mutant in mutants}
        if unknown:
            parser.error(f"--only {' '.join(sorted(unknown))}: no such mutant; see --list")
        mutants = [mutant for mutant in mutants if mutant.name in options.only]
    elif not options.list:
        mutants = [mutant for mutant in mutants if mutant.seldom == options.seldom]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name} ({mutant.finder}, {mutant.file}): {mutant.why}")
        return 0
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"{len(mutants)} mutants, {options.processes} processes, seeds from {seed}", flush=True)
    missed = []
    clean = [] if options.without_clean else sorted({mutant.finder for mutant in mutants})
    for finder in clean:
        result = search(None, finder, seed, options.processes, options.seconds)
        _show(f"(none, {finder})", result)
        if result.by != NOTHING:
            print(result.output)
            return 1
    for mutant in mutants:
        result = search(mutant, mutant.finder, seed, options.processes, options.seconds)
        _show(mutant.name, result)
        if not result.found:
            missed.append(mutant.name)
    print(f"{len(mutants) - len(missed)} of {len(mutants)} found")
    if missed:
        print(f"not found: {', '.join(missed)}")
    return 1 if missed else 0


def _show(name: str, result: Result) -> None:
    schedules = "?" if result.schedules is None else f"{result.schedules:,}"
    print(f"{name:42} {result.seconds:6.1f} s {schedules:>9}  {result.by}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
