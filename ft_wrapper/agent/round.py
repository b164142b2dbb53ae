"""A round: what a node needs to know of the others, from one start of all ranks to the next."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Round:
    """One formation of the job, as one node sees it. Alone on one node, its ranks are all there are.

    Args:
        address: ``host:port`` of the store that the ranks of all nodes use.
        world_size: ranks of all nodes.
        base_rank: the first rank of this node, and its slot; those of the others follow.
        group_rank: this node's number.
        group_world_size: number of nodes.
        role_rank: number of the first rank of this node among those of the same role.
        role_world_size: ranks of this role on all nodes.
        formation_size: ranks that the job has begun with; more may have come later.
        restarts: how often all ranks were restarted, if that is known for all nodes; None if each agent
            counts for itself.
        formed: whether the ranks have formed a wrapped job already, which those of this node are to join.
        node: what to call this node in messages; empty if there is no other.
        agreed_in: address of the store in which wrapped ranks agree, if that is another one; it outlives all
            nodes then.
    """

    address: str
    world_size: int
    base_rank: int
    group_rank: int
    group_world_size: int
    role_rank: int
    role_world_size: int
    formation_size: int
    restarts: int | None = None
    formed: bool = False
    node: str = ""
    agreed_in: str = ""

    @property
    def store(self) -> str:
        """Address of the store in which wrapped ranks agree."""
        return self.agreed_in or self.address

    def rank(self, local_rank: int) -> int:
        """The rank, and slot, of one of this node's ranks."""
        return self.base_rank + local_rank


def alone(address: str, nproc: int) -> Round:
    """The round of a job on one node.

    Args:
        address: of its store.
        nproc: number of its ranks.
    """
    return Round(address, nproc, 0, 0, 1, 0, nproc, nproc)
