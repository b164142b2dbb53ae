"""What ranks agree on when they enter an iteration: active ranks, sizes, the endpoint; and barriers."""

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

_LOOK_EVERY = 1.0  # seconds between checks whether the iteration is over


class BarrierError(RestartError):
    """A barrier failed."""


class BarrierTimeout(BarrierError):
    """Ranks did not reach a barrier in time. The message names the missing ranks."""


class BarrierOverflow(BarrierError):
    """More ranks reached a barrier than it was made for."""


@dataclasses.dataclass(frozen=True)
class Entered:
    """A member that is about to enter an iteration.

    Args:
        member: the member.
        active_rank: its active rank in the iteration; None for a spare.
        promoted: whether it was a spare before; for people.
        recompiles: whether its compiled code was dropped, since ranks have moved; for people.
    """

    member: Member
    active_rank: int | None
    promoted: bool = False
    recompiles: bool = False

    def to_text(self) -> str:
        """The member's entry in the log."""
        rank = "-" if self.active_rank is None else self.active_rank
        notes = [name for name in ("promoted", "recompiles") if getattr(self, name)]
        return f"{self.member} {rank} {','.join(notes) or '-'}"

    @classmethod
    def parse(cls, line: str, key: str) -> "Entered":
        """Reads `to_text`; an error names the key."""
        name, rank, text = split_entry(line, 3, key)
        notes = text.split(",")
        active_rank = None if rank == "-" else to_number(rank, key)
        return cls(Member.parse(name, key), active_rank, "promoted" in notes, "recompiles" in notes)


def _parse_meeting(n: int, text: str) -> tuple[Endpoint, Sizes]:
    """Reads what rank 0 of n published: the endpoint of ``torch.distributed`` and both world sizes."""
    host, *numbers = split_entry(text, 4, keys.meeting(n))
    port, world_size, active_world_size = (to_number(number, keys.meeting(n)) for number in numbers)
    return (host, port), (world_size, active_world_size)


def active_ranks_in(n: int, meeting: str | None) -> int:
    """The number of active ranks of n, from the value of its meeting key; 0 if the key is absent."""
    return 0 if meeting is None else _parse_meeting(n, meeting)[1][1]


def spares_in(store: Operations, n: int) -> tuple[set[Member], int]:
    """The spares of n, and the number of its active ranks, as far as known."""
    active, entered = _active_and_entered(store, n)
    ranks = [one.active_rank for one in entered.values() if one.active_rank is not None]
    spares = {member for member, one in entered.items() if one.active_rank is None}
    return spares, active or 1 + max(ranks, default=-1)


def _active_and_entered(store: Operations, n: int) -> tuple[int, dict[Member, Entered]]:
    """The number of n's active ranks (see `active_ranks_in`), and the members that are about to enter n."""
    meeting, log = store.execute([Read(keys.meeting(n)), ReadLog(keys.entered(n))])
    return active_ranks_in(n, meeting), _entries_in(n, (log or "").splitlines())


def _entries_in(n: int, log: Iterable[str]) -> dict[Member, Entered]:
    entries = (Entered.parse(line, keys.entered(n)) for line in log)
    return {entry.member: entry for entry in entries}


class Entering:
    """The members that enter an iteration, their active ranks, and the endpoint of ``torch.distributed``.

    Args:
        store: a client of the job's store.
        ends: how iterations end.
    """

    def __init__(self, store: Operations, ends: Ends) -> None:
        self.store = store
        self._ends = ends

    def active_in(self, n: int) -> int:
        """The number of active ranks of n; 0 if rank 0 has not entered n yet."""
        return active_ranks_in(n, read(self.store, keys.meeting(n)))

    def may_be_active(self, n: int, member: Member) -> bool:
        """Whether a member may be an active rank of n, for callers that do not know the rank assignment.

        False only if the member is known to be a spare: it entered n as a spare, or other members have all
        the active ranks.

        Args:
            n: the iteration.
            member: the member.
        """
        active, entered = _active_and_entered(self.store, n)
        if member in entered:
            return entered[member].active_rank is not None
        taken = {one.active_rank for one in entered.values()} - {None}
        return not active or len(taken) < active

    def entered_in(self, n: int) -> dict[Member, Entered]:
        """The members that are about to enter n, or have entered it. It reads O(world size)."""
        return _entries_in(n, operations.read_log(self.store, keys.entered(n)))

    def enter(
        self, n: int, entry: Entered, sizes: Sizes, endpoint: Endpoint | None = None
    ) -> Endpoint | None:
        """Claims the active rank in n that the rank assignment gave, and checks it against other members'.

        Args:
            n: the iteration.
            entry: the member and the active rank that it was given.
            sizes: the world size and the active world size that the member was given.
            endpoint: host and port of the store that ``torch.distributed`` uses in n, on active rank 0; None
                on others.

        Returns:
            The endpoint; None if rank 0 has not published it yet.

        Raises:
            InternalError: another member was given the same active rank, or rank 0 was given other sizes.
        """
        member, active_rank = entry.member, entry.active_rank
        publish: list[Step] = []
        if endpoint is not None:
            text = " ".join(str(part) for part in (*endpoint, *sizes))
            publish = [Write({keys.meeting(n): text}), Notify(keys.wake_meeting(n), text)]
        claim = [] if active_rank is None else [SetIfAbsent(keys.seat(n, active_rank), str(member))]
        look = [] if publish else [Read(keys.meeting(n))]
        given = self.store.execute([*publish, *claim, Append(keys.entered(n), entry.to_text()), *look])
        holder = Member.parse(str(given[len(publish)]), claim[0].key) if claim else member
        if holder != member:
            raise InternalError(
                f"rank_assignment gave active rank {active_rank} of iteration {n} to slot {member.slot} and "
                f"to slot {holder.slot}; it must give each active rank once"
            )
        return endpoint or _endpoint_in(n, given[-1], member, sizes)

    def holder_of(self, n: int, active_rank: int) -> Member:
        """The member that holds an active rank in n.

        Raises:
            StoreError: it has not entered n.
        """
        key = keys.seat(n, active_rank)
        return Member.parse(read(self.store, key) or "", key)

    def count_active(self, n: int) -> int:
        """Counts an active rank that has entered n.

        Args:
            n: the iteration.

        Returns:
            The count, this rank included. A hint, since a rank whose answer was lost may be counted twice.
        """
        return int(self.store.execute([Count(keys.count_entered(n))])[0] or 0)

    def await_endpoint(
        self, n: int, member: Member, sizes: Sizes, timeout: float, look_every: float
    ) -> Endpoint | None:
        """Waits until rank 0 has published the endpoint.

        If n has ended as done, this member is a spare that was slow: rank 0 has published the endpoint.

        Args:
            n: the iteration.
            member: the member that waits.
            sizes: the world size and the active world size that the member was given.
            timeout: longest time to wait, in seconds.
            look_every: seconds between checks whether n has ended, since rank 0 may have died.

        Returns:
            The endpoint; None if a fault ended n first.

        Raises:
            InternalError: rank 0 was given other sizes.
            RestartTimeout: there was neither an endpoint nor a fault in time.
        """
        for look in looks(self.store, keys.wake_meeting(n), timeout, first=look_every, longest=look_every):
            if look.value is not None:
                meeting = look.value or present(keys.meeting(n), read(self.store, keys.meeting(n)))
                return _endpoint_in(n, meeting, member, sizes)
            if self._ends.outcome_of(n) == FAULT:
                return None
        raise RestartTimeout(f"rank 0 of iteration {n} opened no store for it within {timeout:g} s")


def _endpoint_in(n: int, meeting: str | None, member: Member, sizes: Sizes) -> Endpoint | None:
    """The endpoint of n by the value of its meeting key; None if the key is absent."""
    if meeting is None:
        return None
    endpoint, others = _parse_meeting(n, meeting)
    if others != sizes:
        raise InternalError(
            f"rank_assignment disagrees in iteration {n}: slot {member.slot} was given world size and active "
            f"world size {sizes}, active rank 0 {others}; it must give the same sizes on every rank"
        )
    return endpoint


class Barriers(Operations):
    """How ranks wait for each other on a store: barriers of named groups, and exchanges."""

    # torch's Store has had a method of this name and another meaning since 2.12.
    def barrier(
        self,
        ranks: Iterable[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Waits until ``rendezvous_count`` ranks have arrived.

        Args:
            ranks: the ranks that arrive with this call.
            group_name: name of the barrier; it can be used once.
            rendezvous_count: number of ranks to wait for.
            timeout: longest time to wait.
            timeout_chunk: time between checks for the iteration's end; a second when None.

        Raises:
            BarrierTimeout: ranks are missing; the message names them.
            BarrierOverflow: more than ``rendezvous_count`` ranks arrived.
            RankShouldRestart: the store belongs to an iteration, which has ended.
        """
        arrived_key, count_key, wake_key = (keys.barrier(group_name, p) for p in ("arrived", "count", "wake"))
        count = 0
        for rank in ranks:
            count = operations.append_counted(self, arrived_key, str(rank), count_key)
        # The count is a hint: a rank whose answer was lost may be counted twice. The log decides.
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
        """A barrier with a fixed name; see `barrier`."""
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
        """Every rank contributes, the last one computes all results, and each rank reads its own result.

        Total traffic is O(count). Either all ranks get their results or none does: if a rank gives up because
        the iteration has ended, no rank gets its result after that.

        Args:
            name: name of the exchange; it can be used once.
            rank: the caller's rank.
            contribution: the caller's contribution, one line.
            count: number of ranks that contribute.
            compute: maps all contributions by rank to all results by rank; the same on every rank.
            timeout: longest time to wait for the other members.

        Raises:
            BarrierTimeout: ranks are missing; the message names them.
            RankShouldRestart: the store belongs to an iteration, which has ended.
        """
        log_key, count_key, wake_key, verdict_key = (
            keys.barrier(name, part) for part in ("arrived", "count", "wake", "verdict")
        )
        if operations.append_counted(self, log_key, json.dumps([rank, contribution]), count_key) >= count:
            contributions = dict(json.loads(line) for line in operations.read_log(self, log_key))
            if len(contributions) == count:
                results = compute(contributions)
                written = {keys.barrier(name, f"result/{peer}"): text for peer, text in results.items()}
                self.execute([Write(written), SetIfAbsent(verdict_key, "computed"), Notify(wake_key, "1")])
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
        if result is None:  # abandoned, or deleted with all keys of an iteration that ended long ago
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
    """Names the missing ranks; or those that arrived, if the ranks are not 0 to count - 1."""
    if here <= set(range(count)):
        return f"missing ranks {sorted(set(range(count)) - here)} of {count}"
    return f"missing {count - len(here)} of {count} ranks, all but {sorted(here)}"
