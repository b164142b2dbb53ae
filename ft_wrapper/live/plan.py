"""The plan of a recovery: a pure function of what the members hold."""

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

_MOST_HOLDERS = 8  # that one receiver is served by


class Rung(enum.Enum):
    """Where a recovery takes the state from; the higher rungs lose less."""

    PEERS = "living peers"
    """The living processes have all of it: no step is lost."""
    COPIES = "copies in memory"
    """All go back to a step for which a copy of every shard is left; see ``buddies``."""
    CHECKPOINT = "checkpoint"
    """It is built, and loaded if there is a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Held:
    """A state that is whole, and where it comes from.

    Args:
        shard: which shard of the state it is; replicas say the same.
        step: the number of steps that made it.
        is_prepared: the complete gradients of the next step are there, and its update has not begun.
        origin: number of the recovery that began its history: nothing was given up since.
        history: number of the last recovery that is known to be sealed; -1: none.
        ready: numbers of the recoveries that were finished with this state since, whose seal was not seen.
    """

    shard: Hashable
    step: int
    is_prepared: bool = False
    origin: int = -1
    history: int = -1
    ready: frozenset[int] = frozenset()

    @property
    def reach(self) -> set[int]:
        """The steps that the holder can be at without messages from others."""
        return {self.step, self.step + self.is_prepared}


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a shard in host memory, of the rank's own or of another's.

    Args:
        shard: which one.
        step: the number of steps that made it.
        origins: numbers of the recoveries that began the histories it belongs to: several, since a history
            that goes back to a copy and on from there has it, too.
    """

    shard: Hashable
    step: int
    origins: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Holding:
    """What one active rank reports at the start of a recovery; its place in the list is its active rank.

    Args:
        needs: the shard that belongs to its rank.
        held: what it holds; None if nothing, or only part of an update or a transfer.
        copies: what it has in host memory.
        newest: the newest step that it knows to be committed.
        gave_up: how many rungs have failed on this rank.
    """

    needs: Hashable
    held: Held | None = None
    copies: tuple[Copy, ...] = ()
    newest: int = 0
    gave_up: int = 0


@dataclasses.dataclass(frozen=True)
class Register:
    """What the store has of a state in this call, written by active rank 0 after each recovery.

    Args:
        sealed: number of the last recovery that may have been gone on from; -1: none.
        origin: number of the recovery that began its history; -1: none.
    """

    sealed: int = -1
    origin: int = -1


@dataclasses.dataclass(frozen=True)
class Route:
    """One rank's way to its shard.

    Args:
        receiver: the rank that receives it.
        holders: the ranks that send a part each, in the order of the parts.
    """

    receiver: int
    holders: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all ranks do in a recovery.

    Args:
        rung: where the state comes from.
        step: the step of all afterwards; with a checkpoint that is its step, which the plan does not know.
        origin: of all that count or receive, and of the copies that are used; -1: there are none.
        history: of all that count or receive, from then on.
        ready: the same.
        rolls: the ranks that apply the gradients they have kept.
        routes: the transfers. A rank without one stays with what it has: its state, or its own copy.
        void: the ranks whose state cannot be used: it is of a history that was given up.
        missing: the shards without a holder that counts.
        lost: how many committed steps are done again, as far as the remaining ranks know; None if none of
            them was there when one was committed.
    """

    rung: Rung
    step: int = 0
    origin: int = -1
    history: int = -1
    ready: frozenset[int] = frozenset()
    rolls: frozenset[int] = frozenset()
    routes: tuple[Route, ...] = ()
    void: frozenset[int] = frozenset()
    missing: tuple[Hashable, ...] = ()
    lost: int | None = 0

    def route_of(self, rank: int) -> Route | None:
        """How a rank receives its shard; None if it does not."""
        return next((route for route in self.routes if route.receiver == rank), None)


def copy_of(said: Mapping[str, Any]) -> Copy:
    """A copy that has been a dictionary in JSON."""
    return Copy(**{**said, "origins": frozenset(said["origins"])})


def holding_of(said: Mapping[str, Any]) -> Holding:
    """A holding that has been a dictionary in JSON."""
    held = said["held"] and Held(**{**said["held"], "ready": frozenset(said["held"]["ready"])})
    return Holding(**{**said, "held": held, "copies": tuple(map(copy_of, said["copies"]))})


def make_plan(holdings: Sequence[Holding], register: Register) -> Plan:
    """Makes the plan of a recovery: the same on every rank, since all have gathered the same holdings.

    A holder counts if it took part in the newest recovery that anyone may have gone on from. Others are
    void: they were spares meanwhile, and would bring back what was given up. Of the steps that every shard
    can reach it takes the newest that every holder can reach, so that no state is overwritten; without such a
    step, the newest.

    A rung at which a recovery has failed on its own is left out, with those above it.

    Args:
        holdings: of all active ranks, in their order.
        register: as the store has it.
    """
    held = {rank: one.held for rank, one in enumerate(holdings) if one.held is not None}
    newest = max([register.sealed, *(one.history for one in held.values())])
    counts = {rank: one for rank, one in held.items() if newest >= 0 and newest in (one.history, *one.ready)}
    void = frozenset(held.keys() - counts.keys())
    needed = tuple(dict.fromkeys(one.needs for one in holdings))
    able: dict[tuple[Hashable, int], list[int]] = {}  # ranks by shard and step
    for rank, one in counts.items():
        for step in one.reach:
            able.setdefault((one.shard, step), []).append(rank)
    steps = [step for step in {step for _, step in able} if all((shard, step) in able for shard in needed)]
    given_up = max(one.gave_up for one in holdings)
    if not steps or given_up:
        shards = {one.shard for one in counts.values()}
        missing = tuple(shard for shard in needed if shard not in shards)
        sealed_origins = (one.origin for one in held.values() if one.history >= one.origin)
        plan = _plan_of_copies(holdings, needed, max([register.origin, *sealed_origins]), given_up)
        return dataclasses.replace(
            plan, void=frozenset(held), missing=missing or (() if given_up else needed)
        )
    step = max([step for step in steps if all(step in one.reach for one in counts.values())] or steps)
    stay = {rank for rank, one in counts.items() if one.shard == holdings[rank].needs and step in one.reach}
    some = next(iter(counts.values()))
    return Plan(
        Rung.PEERS,
        step,
        some.origin,
        newest,
        frozenset[int]().union(*(one.ready for one in counts.values())),  # the same bits, so true of each
        rolls=frozenset(rank for rank, one in counts.items() if step in one.reach and step != one.step),
        routes=tuple(
            Route(rank, _some(able[one.needs, step], rank))
            for rank, one in enumerate(holdings)
            if rank not in stay
        ),
        void=void | {rank for rank, one in counts.items() if step not in one.reach},
    )


def _some(holders: Sequence[int], receiver: int) -> tuple[int, ...]:
    """A few of many holders, others per receiver: a thousand connections cost more than they bring."""
    first = _MOST_HOLDERS * receiver if len(holders) > _MOST_HOLDERS else 0
    places = range(first, first + min(_MOST_HOLDERS, len(holders)))
    return tuple(holders[place % len(holders)] for place in places)


def _plan_of_copies(
    holdings: Sequence[Holding], needed: Iterable[Hashable], origin: int, given_up: int = 0
) -> Plan:
    """Goes back to the newest step for which a copy of every shard is left; a rank's own copy comes first."""
    have: dict[int, dict[Hashable, list[int]]] = {}
    for rank, one in enumerate(holdings):
        for copy in one.copies:
            if origin in copy.origins:
                have.setdefault(copy.step, {}).setdefault(copy.shard, []).append(rank)
    whole = [step for step, shards in have.items() if all(shard in shards for shard in needed)]
    if origin < 0 or not whole or given_up > 1:
        return Plan(Rung.CHECKPOINT)
    step = max(whole)
    routes = [
        Route(rank, _some(have[step][one.needs], rank))
        for rank, one in enumerate(holdings)
        if rank not in have[step][one.needs]
    ]
    return Plan(Rung.COPIES, step, origin, routes=tuple(routes))
