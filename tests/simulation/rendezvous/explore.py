"""Runs jobs of nodes in orders that are drawn: small ones, and larger ones with more happening to them.

For example::

    python tests/simulation/rendezvous/explore.py --random 1000 --processes 2

See docs/rendezvous.md for what is simulated.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # it is run as a program

from disturbed_worlds import disturbed_world
from explored_nodes import drawn_job
from simulated_nodes import random_world

from ft_wrapper.testing import SchedulerError
from tests.explorer.explore import explore_seeds

_TRACE_LINES = 60
JOBS = (drawn_job, random_world, disturbed_world)


def run(seed: int) -> str:
    """Runs three jobs, each larger than the one before.

    Returns:
        What does not hold, and the last steps; empty if nothing is wrong.
    """
    for make in JOBS:
        try:
            make(seed).scheduler.run()
        except SchedulerError as error:
            steps = str(error).splitlines()[-_TRACE_LINES - 2 : -2]
            lines = [line[:200] for line in steps]
            return "\n".join([*lines, f"seed {seed} goes wrong in {make.__name__}", error.what[:500]])
    return ""


if __name__ == "__main__":
    sys.exit(explore_seeds(run, len(JOBS)))
