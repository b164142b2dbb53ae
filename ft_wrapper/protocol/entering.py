"""What ranks agree on when they enter an iteration: who has which rank, where to meet; and barriers."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from ..exception import InternalError, RankShouldRestart, RestartError, RestartTimeout
from . import keys, operations
from .ends import Ends
from .operations import Append, Count, Notify, Operations, Read, ReadLog, SetIfAbsent, Step, Write, read
from .records import FAULT, Member, present, split_entry, to_number
from .waiting import looks

Endpoint = tuple[str, int]
Sizes = tuple[int, int]  # world size and active world size

_LOOK_EVERY = 1.0  # seconds between looks whether waiting has lost its point


class BarrierError(RestartError):
    """A barrier failed."""


class BarrierTimeout(BarrierError):
    """Not everybody came to a barrier in time. The message names who was missing."""


class BarrierOverflow(BarrierError):
    """More ranks came to a barrier than it was made for."""


@dataclasses.dataclass(frozen=True)
class Entered:
    """A member that is about to enter an iteration.

    Args:
        member: who.
        active_rank: its active rank there; None for a spare.
        promoted: whether it was a spare before; noted for people.
        recompiles: whether its compiled code was dropped, since ranks have moved; noted for people.
    """

    member: Member
    active_rank: int | None
    promoted: bool = False
    recompiles: bool = False

    def to_text(self) -> str:
        """An entry of a log."""
        rank = "-" if self.active_rank is None else self.active_rank
        notes = [name for name in ("promoted", "recompiles") if getattr(self, name)]
        return f"{self.member} {rank} {','.join(notes) or '-'}"

    @classmethod
    def parse(cls, line: str, key: str) -> "Entered":
        """Reads `to_text`; an error names the key it came from."""
        name, rank, text = split_entry(line, 3, key)
        notes = text.split(",")
        active_rank = None if rank == "-" else to_number(rank, key)
        return cls(Member.parse(name, key), active_rank, "promoted" in notes, "recompiles" in notes)


def _parse_meeting(n: int, text: str) -> tuple[Endpoint, Sizes]:
    """What rank 0 of n tells: where ``torch.distributed`` meets; world size and active world size."""
    host, *numbers = split_entry(text, 4, keys.meeting(n))
    port, world_size, active_world_size = (to_number(number, keys.meeting(n)) for number in numbers)
    return (host, port), (world_size, active_world_size)


def active_ranks_in(n: int, meeting: str | None) -> int:
    """The number of active ranks of n, by what its key of the meeting holds; 0 if that is absent."""
    return 0 if meeting is None else _parse_meeting(n, meeting)[1][1]


def spares_in(store: Operations, n: int) -> tuple[set[Member], int]:
    """The members that are spares in n; and the number of its active ranks, as far as that is known."""
    active, entered = _active_and_entered(store, n)
    ranks = [one.active_rank for one in entered.values() if one.active_rank is not None]
    spares = {member for member, one in entered.items() if one.active_rank is None}
    return spares, active or 1 + max(ranks, default=-1)


def _active_and_entered(store: Operations, n: int) -> tuple[int, dict[Member, Entered]]:
    """The number of n's active ranks, see `active_ranks_in`; and the members that are about to enter it."""
    meeting, log = store.execute([Read(keys.meeting(n)), ReadLog(keys.entered(n))])
    return active_ranks_in(n, meeting), _entries_in(n, (log or "").splitlines())


def _entries_in(n: int, log: Iterable[str]) -> dict[Member, Entered]:
    entries = (Entered.parse(line, keys.entered(n)) for line in log)
    return {entry.member: entry for entry in entries}


class Entering:
    """Who enters an iteration, with which rank, and where ``torch.distributed`` meets in it.

    Args:
        store: where.
        ends: how iterations end.
    """

    def __init__(self, store: Operations, ends: Ends) -> None:
        self.store = store
        self._ends = ends

    def active_in(self, n: int) -> int:
        """The number of active ranks of n; 0 if its rank 0 has not entered it yet."""
        return active_ranks_in(n, read(self.store, keys.meeting(n)))

    def may_be_active(self, n: int, member: Member) -> bool:
        """Whether a member may be an active rank of n, for those who do not know the rank assignment.

        False only once others have all of the active ranks: then it is a spare in n.

        Args:
            n: the iteration.
            member: who.
        """
        active, entered = _active_and_entered(self.store, n)
        if member in entered:
            return entered[member].active_rank is not None
        taken = {one.active_rank for one in entered.values()} - {None}
        return not active or len(taken) < active

    def entered_in(self, n: int) -> dict[Member, Entered]:
        """The members that are about to enter n, or have entered it: O(world size)."""
        return _entries_in(n, operations.read_log(self.store, keys.entered(n)))

    def enter(
        self, n: int, entry: Entered, sizes: Sizes, endpoint: Endpoint | None = None
    ) -> Endpoint | None:
        """Takes the place in n that a rank assignment gave, and checks that it fits the others'.

        Args:
            n: the iteration.
            entry: who is about to enter, with the active rank that it was given.
            sizes: the world size and the active world size that it was given.
            endpoint: from active rank 0: host and port of the store that ``torch.distributed`` uses in n.

        Returns:
            That endpoint; None if rank 0 has not told it so far.

        Raises:
            InternalError: another rank was given the same active rank, or rank 0 other sizes.
        """
        member, active_rank = entry.member, entry.active_rank
        told: list[Step] = []
        if endpoint is not None:
            text = " ".join(str(part) for part in (*endpoint, *sizes))
            told = [Write({keys.meeting(n): text}), Notify(keys.wake_meeting(n), text)]
        claim = [] if active_rank is None else [SetIfAbsent(keys.seat(n, active_rank), str(member))]
        look = [] if told else [Read(keys.meeting(n))]
        given = self.store.execute([*told, *claim, Append(keys.entered(n), entry.to_text()), *look])
        holder = Member.parse(str(given[len(told)]), claim[0].key) if claim else member
        if holder != member:
            raise InternalError(
                f"rank_assignment gave active rank {active_rank} of iteration {n} to slot {member.slot} and "
                f"to slot {holder.slot}; it must give each active rank once"
            )
        return endpoint or _endpoint_in(n, given[-1], member, sizes)

    def count_active(self, n: int) -> int:
        """Counts an active rank that has entered n.

        Args:
            n: the iteration.

        Returns:
            How many have been counted, with this one: a hint, as an answer that was lost may count twice.
        """
        return int(self.store.execute([Count(keys.count_entered(n))])[0] or 0)

    def await_endpoint(
        self, n: int, member: Member, sizes: Sizes, timeout: float, look_every: float
    ) -> Endpoint | None:
        """Waits for the endpoint that rank 0 tells; None if a fault ended n before it came.

        Where n is done already, this member is a spare that was slow to look: its rank 0 has been here.

        Args:
            n: the iteration.
            member: who waits.
            sizes: the world size and the active world size that it was given.
            timeout: seconds to wait at the longest.
            look_every: seconds between looks whether n has ended, should its rank 0 have died.

        Raises:
            InternalError: rank 0 was given other sizes.
            RestartTimeout: neither came.
        """
        for look in looks(self.store, keys.wake_meeting(n), timeout, first=look_every, longest=look_every):
            if look.value is not None:
                meeting = look.value or present(keys.meeting(n), read(self.store, keys.meeting(n)))
                return _endpoint_in(n, meeting, member, sizes)
            if self._ends.outcome_of(n) == FAULT:
                return None
        raise RestartTimeout(f"rank 0 of iteration {n} opened no store for it within {timeout:g} s")


def _endpoint_in(n: int, meeting: str | None, member: Member, sizes: Sizes) -> Endpoint | None:
    """Where n's ranks meet, by what its key of the meeting holds; None if that is absent."""
    if meeting is None:
        return None
    endpoint, told = _parse_meeting(n, meeting)
    if told != sizes:
        raise InternalError(
            f"rank_assignment disagrees in iteration {n}: slot {member.slot} was given world size and active "
            f"world size {sizes}, active rank 0 {told}; it must give the same sizes on every rank"
        )
    return endpoint


class Barriers(Operations):
    """What a store offers to those who wait for each other: barriers of named groups, and exchanges."""

    # torch's Store has had a method of this name and another meaning since 2.12.
    def barrier(
        self,
        ranks: Iterable[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Waits until so many ranks have come.

        Args:
            ranks: the ranks on whose behalf the caller comes.
            group_name: name of the barrier; it serves once.
            rendezvous_count: number of ranks to wait for.
            timeout: how long to wait at the longest.
            timeout_chunk: how often to look whether the iteration has ended meanwhile.

        Raises:
            BarrierTimeout: somebody is missing; the message names the ranks.
            BarrierOverflow: more ranks came than ``rendezvous_count``.
            RankShouldRestart: the store belongs to an iteration and that has ended.
        """
        arrived_key, count_key, wake_key = (keys.barrier(group_name, p) for p in ("arrived", "count", "wake"))
        count = 0
        for rank in ranks:
            count = operations.append_counted(self, arrived_key, str(rank), count_key)
        # The count wakes, the log decides: a reply that was lost may have counted twice.
        if count >= rendezvous_count:
            here = len(set(operations.read_log(self, arrived_key)))
            if here > rendezvous_count:
                raise BarrierOverflow(
                    f"barrier {group_name!r} is for rendezvous_count={rendezvous_count} ranks and {here} came"
                )
            if here == rendezvous_count:
                self.execute([Notify(wake_key, "1")])
        chunk = _LOOK_EVERY if timeout_chunk is None else timeout_chunk.total_seconds()
        if not _wait_unless_over(self, wake_key, timeout.total_seconds(), chunk):
            came = set(map(int, operations.read_log(self, arrived_key)))
            missing = _missing(rendezvous_count, came)
            raise BarrierTimeout(f"barrier {group_name!r} timed out after {timeout}: {missing}")

    def _barrier_named(self, group_name: str, ranks: Iterable[int], *args: Any, **more: Any) -> None:
        """The barrier of that name; see `barrier`."""
        self.barrier(ranks, group_name, *args, **more)

    initial_barrier = functools.partialmethod(_barrier_named, "initial")
    completion_barrier = functools.partialmethod(_barrier_named, "completion")
    iteration_barrier = functools.partialmethod(_barrier_named, "iteration")
    termination_barrier = functools.partialmethod(_barrier_named, "termination")

    def compute_once(
        self,
        name: str,
        rank: int,
        contribution: str,
        count: int,
        compute: Callable[[dict[int, str]], dict[int, str]],
        timeout: timedelta,
    ) -> str:
        """Everyone contributes, the last one computes for all, and each reads its own result.

        Total traffic is O(count). Either all ranks get their result or none does: a rank that gives up
        because the iteration has ended rules out that others get theirs later.

        Args:
            name: name of the exchange; it serves once.
            rank: the caller's rank.
            contribution: what it contributes, one line.
            count: number of ranks that contribute.
            compute: from all contributions by rank to all results by rank; the same on every rank.
            timeout: how long to wait for the others at the longest.

        Raises:
            BarrierTimeout: somebody is missing; the message names the ranks.
            RankShouldRestart: the store belongs to an iteration and that has ended.
        """
        log_key, count_key, wake_key, verdict_key = (
            keys.barrier(name, part) for part in ("arrived", "count", "wake", "verdict")
        )
        if operations.append_counted(self, log_key, json.dumps([rank, contribution]), count_key) >= count:
            contributions = dict(json.loads(line) for line in operations.read_log(self, log_key))
            if len(contributions) == count:
                results = compute(contributions)
                said = {keys.barrier(name, f"result/{peer}"): text for peer, text in results.items()}
                self.execute([Write(said), SetIfAbsent(verdict_key, "computed"), Notify(wake_key, "1")])
        try:
            if not _wait_unless_over(self, wake_key, timeout.total_seconds(), _LOOK_EVERY):
                here = {json.loads(line)[0] for line in operations.read_log(self, log_key)}
                raise BarrierTimeout(f"exchange {name!r} timed out after {timeout}: {_missing(count, here)}")
        except (RankShouldRestart, BarrierTimeout):
            if operations.set_if_absent(self, verdict_key, "abandoned") != "computed":
                raise
        result = None
        if read(self, verdict_key) == "computed":
            result = read(self, keys.barrier(name, f"result/{rank}"))
        if result is None:  # or deleted since, with all else of an iteration that is long over
            raise RankShouldRestart(f"exchange {name!r} was abandoned by a rank: its iteration has ended")
        return result


def _wait_unless_over(store: Operations, key: str, seconds: float, chunk: float) -> bool:
    for look in looks(store, key, seconds, first=chunk, longest=chunk):
        if look.value is not None:
            return True
        if store.is_over():
            raise RankShouldRestart("the iteration has ended")
    return False


def _missing(count: int, here: set[int]) -> str:
    """Names who did not come; only those who came are known where the ranks are not 0 to count - 1."""
    if here <= set(range(count)):
        return f"missing ranks {sorted(set(range(count)) - here)} of {count}"
    return f"missing {count - len(here)} of {count} ranks, all but {sorted(here)}"
