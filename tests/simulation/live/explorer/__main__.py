"""Runs each kind of job once for each seed: ``python -m tests.simulation.live.explorer --random 10000``."""

from __future__ import annotations

import sys

from tests.explorer.explore import explore_seeds

from .job import JOBS
from .search import at_random


def run(seed: int) -> str:
    """Runs the jobs of a seed.

    Returns:
        What does not hold; empty if nothing is wrong.
    """
    for name, job in JOBS.items():
        failure = at_random(job, [seed]).failure
        if failure is not None:
            return "\n".join([*failure.trace, f"seed {seed} goes wrong in {name}", failure.what])
    return ""


if __name__ == "__main__":
    sys.exit(explore_seeds(run, len(JOBS)))
