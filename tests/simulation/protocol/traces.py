"""What every process of 2,000 simulated jobs does to the store, in order: a hash of it for each ten jobs.

A change that is only about where code stands must not change them.
``python tests/simulation/protocol/traces.py`` writes
``traces.json`` again, in a commit that says why the order of operations changes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # it is run as a program, too

from ft_wrapper.testing.scheduler import RandomPolicy, describe
from tests.explorer.explore import Explorer, without_logging

DATA = Path(__file__).with_name("traces.json")
FIRST_SEED = 1_000_000
JOBS = 2_000
GROUP = 10


def hash_of(first: int, count: int = GROUP) -> str:
    """A hash of all operations, in order and with their arguments, in the jobs of some seeds.

    Args:
        first: the first seed.
        count: how many seeds in a row.
    """
    explorer, found = Explorer(), hashlib.sha256()
    for seed in range(first, first + count):
        with without_logging():
            simulation = explorer.simulation(explorer.scenario(seed), RandomPolicy(seed))
            simulation.run()
        for step in simulation.scheduler.trace_steps:
            found.update(f"{step.task} {_without_words(describe(step.what, step.args))}\n".encode())
    return found.hexdigest()[:16]


def _without_words(step: str) -> str:
    """What a fault's message says, for people, names modules and changes with them."""
    return step.partition('"message": ')[0]


def groups() -> list[int]:
    """The first seed of each group."""
    return list(range(FIRST_SEED, FIRST_SEED + JOBS, GROUP))


def expected() -> dict[str, str]:
    """What ``traces.json`` says, by first seed."""
    found: dict[str, str] = json.loads(DATA.read_text())
    return found


if __name__ == "__main__":
    DATA.write_text(json.dumps({str(first): hash_of(first) for first in groups()}, indent=0) + "\n")
