"""Many neighbouring nodes are lost together: the virtual time until they are out. For tests, and by hand.

For example::

    python tests/simulation/rendezvous/lost_rack.py
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import random
import sys
from collections.abc import Sequence

from simulated_nodes import SimulatedNode, World

from ft_wrapper.rendezvous.moves import adopt_rank_policy
from ft_wrapper.rendezvous.record import RoundPolicy
from ft_wrapper.rendezvous.settings import RendezvousSettings
from ft_wrapper.testing import Scheduler

LOST_AT = 100.0
_LONGEST = 1_500.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a loss took.

    Args:
        seconds: virtual seconds until no lost node was in the record.
        round_after: until the next round was complete; None if the round stayed.
        reads: signs of life that were read from the loss on, by each heart that was left.
        healthy_reads: the same in one interval before the loss: the most of one heart.
        changes: how often the record changed until they were out.
    """

    seconds: float
    round_after: float | None
    reads: dict[str, int]
    healthy_reads: int
    changes: int


def lose(seated: int, spares: int, lost: Sequence[int], policy: str, seed: int = 0) -> Outcome:
    """Loses nodes at once, by their number in the order of the ring: first those with seats, then spares."""
    scheduler = Scheduler(seed, max_steps=10_000_000, max_time=_LONGEST + LOST_AT)
    low = max(1, min(seated, seated + spares - len(lost)))
    settings = RendezvousSettings("job", low, seated, join_timeout=10_000.0, last_call_timeout=1.0)
    world = World(scheduler, settings, hosted=False)
    dice = random.Random(seed)
    over: list[float] = []
    reads: collections.Counter[str] = collections.Counter()

    def count(client: str, operation: str, args: Sequence[object]) -> None:
        if operation == "add" and args[1] == 0:
            reads[client] += 1

    world.store.on_operation(count)

    def has_lost_one(node: SimulatedNode) -> bool:  # as our agent sees it: `What.GONE`
        return any(seat.occupant is None for seat in node.state.seats)

    def plan(node: SimulatedNode) -> None:
        number = int(node.node.id)
        scheduler.sleep(dice.uniform(0, 5.0) if number < seated else 20.0 + 0.01 * number)
        node.join()
        if policy is RoundPolicy.RANK:
            node.executor.register.change(adopt_rank_policy)
        while not over:
            node.work(scheduler.now() + 5.0, lambda: policy is RoundPolicy.GROUP and has_lost_one(node))

    nodes = [world.start(str(number), plan) for number in range(seated + spares)]
    outcome: list[Outcome] = []

    def disaster() -> None:
        scheduler.sleep(LOST_AT - 5.0)
        ring = [node.name for node in world.record.nodes]
        assert len(ring) == len(nodes)
        assert world.record.policy == policy
        reads.clear()
        scheduler.sleep(5.0)
        healthy = max(reads.values())
        reads.clear()
        dead = {ring[number] for number in lost}
        number, version = world.record.round, world.record.version
        for node in nodes:
            if node.node.name in dead:
                world.kill(node)
        while dead & {node.name for node in world.record.nodes}:
            scheduler.sleep(0.5)
        seconds, changes = scheduler.now() - LOST_AT, world.record.version - version
        while policy is RoundPolicy.GROUP and not (world.record.complete and world.record.round > number):
            scheduler.sleep(0.5)
        after = scheduler.now() - LOST_AT if policy is RoundPolicy.GROUP else None
        outcome.append(Outcome(seconds, after, dict(reads), healthy, changes))
        over.append(seconds)
        for node in nodes:
            for task in (node.agent, *node.others):
                scheduler.crash(task)

    scheduler.spawn("disaster", disaster)
    scheduler.run()
    return outcome[0]


CASES: dict[str, tuple[int, int, range]] = {
    "64 of 96, survivors at both ends": (96, 0, range(16, 80)),
    "64 of 96, survivors at the start": (96, 0, range(32, 96)),
    "64 of 96, survivors at the end": (96, 0, range(64)),
    "64 of 88 with seats, 8 spares": (88, 8, range(16, 80)),
    "64 of 80 with seats and 8 of 16 spares": (80, 16, range(24, 88)),
    "all 64 with seats, 8 spares left": (64, 8, range(64)),
    "2 of 96": (96, 0, range(16, 18)),
}


def main() -> int:
    """Prints a table."""
    logging.disable(logging.CRITICAL)
    print(f"{'case':42} policy   out after  next round  changes  most reads  healthy")
    for name, (seated, spares, lost) in CASES.items():
        for policy in (RoundPolicy.GROUP, RoundPolicy.RANK):
            if policy is RoundPolicy.GROUP and len(lost) == seated and not spares:
                continue
            got = lose(seated, spares, lost, policy)
            after = "stays" if got.round_after is None else f"{got.round_after:.1f} s"
            print(
                f"{name:42} {policy:7} {got.seconds:7.1f} s  {after:>10}  {got.changes:7}"
                f"  {max(got.reads.values()):10}  {got.healthy_reads:7}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
