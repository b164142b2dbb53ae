"""Jobs of many wrapped calls, each of them a run: started, ended, and their events by run."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from ft_wrapper import events

from . import warm_ftrun

Record = dict[str, Any]


def digest_of(records: Iterable[Record]) -> str | None:
    """The digest with which a run has finished; None if it did not."""
    return next((record["digest"] for record in records if record["event"] == "finished"), None)


def by_run(records: list[Record]) -> dict[int, list[Record]]:
    """The events of each run that began: those of its iterations."""
    runs = {record["iteration"]: record["run"] for record in records if record["event"] == "entered"}
    found: dict[int, list[Record]] = {}
    for record in records:
        run = record.get("run", runs.get(record.get("iteration", -1)))
        if run is not None:
            found.setdefault(run, []).append(record)
    return found


def run_ftrun(
    words: list[Any], folder: Path, environment: dict[str, str], limit: float
) -> tuple[dict[int, list[Record]], list[str]]:
    """Runs an ftrun to its end.

    Args:
        words: its arguments.
        folder: for its output, its events and its temporary files.
        environment: further variables.
        limit: seconds that it may take.

    Returns:
        The events of each run, and what was wrong.
    """
    environment = {"TMPDIR": str(folder), **environment, events.ENV: str(folder / "events")}
    trouble = []
    with open(folder / "output", "wb") as output:
        ftrun = warm_ftrun.start_ftrun([str(word) for word in words], output.fileno(), folder, environment)
    try:
        code = ftrun.wait(limit)
        trouble += [f"ftrun ended with {code}"] * (code != 0)
    except subprocess.TimeoutExpired:
        trouble.append("the job did not end")
    finally:
        ftrun.kill()
        ftrun.wait()
    trouble += [f"a process was left: {command}" for command in end_left(folder)]
    path = folder / "events"
    return by_run(events.load(str(path)) if path.exists() else []), trouble


def end_left(folder: Path) -> list[str]:
    """Ends what a job has left, and what comes at its end anyway; returns what did not end by itself."""
    mine = [
        each for each in psutil.process_iter() if _environment(each).get(events.ENV) == str(folder / "events")
    ]
    _, left = psutil.wait_procs(mine, timeout=20)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return [str(process) for process in left]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}
