"""I7: what a member does in a restart does not grow with the world; of the proposer's, only the bytes do."""

from __future__ import annotations

from typing import Any

import pytest
from simulation import Disturbance, Job, Scenario

from ft_wrapper.store import keys


def operations_per_restart(members: int, disturbances: tuple[Disturbance, ...] = ()) -> dict[str, int]:
    """How many more store operations each rank does in a job with one restart more."""
    counts = []
    for exceptions in ((), ((1, 1),)):
        scenario = Scenario(members, members - 1, exceptions=exceptions, disturbances=disturbances)
        job = Job(scenario, seed=members).run()
        counts.append({f"rank {rank.slot}": job.operations[f"rank {rank.slot}"] for rank in job.ranks})
    quiet, restarted = counts
    return {name: restarted[name] - quiet[name] for name in quiet}


@pytest.mark.parametrize("members", [4, 16, 64])
def test_restart_costs_each_member_a_constant_number_of_operations(members: int) -> None:
    assert max(operations_per_restart(members).values()) <= 50


@pytest.mark.parametrize("members", [4, 16, 64])
def test_member_reads_the_change_not_the_world(members: int) -> None:
    """Nobody but proposers reads a roster or an arrival list after the formation."""
    job = Job(Scenario(members, members, exceptions=((1, 1),)), seed=members)
    readers = set()

    def note(client: str, operation: str, args: Any) -> None:
        reads = operation in ("get", "check", "compare_set") and isinstance(args[0], str)
        if job.invariants.outcomes and reads and args[0] in (keys.arrived(0), keys.roster(1, nonce())):
            readers.add(client)

    def nonce() -> str:
        heads = job.invariants.heads
        return heads[1].nonce if len(heads) > 1 else ""

    job.store.on_operation(note)
    job.run()
    assert 1 <= len(readers) <= 2
