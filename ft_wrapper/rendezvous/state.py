"""The record that all nodes agree on, and everything that can change it. Pure: no store, no clock.

A node appends itself to a log, and any node that thinks it is time takes the new entries of the log into the
record (`fold`) with one compare_set; so a thousand nodes that come at once cost a few writes of the record,
not a thousand. `normalize` does all moving that follows by itself.

Under the policy ``group`` every change of membership is a new round: nodes that come late wait, and once all
nodes have left a round the next one begins with those who wait. A round is complete at `State.max_nodes` at
once, with fewer when somebody says so (`complete`). Under the policy ``rank`` the round stays: a node takes
a seat, or loses it, and the others go on. But where the node of group rank 0 hosts the store of the workers,
that is lost with it: then the policy is ``group`` again, and the others come to a new round.

The words of torch's elastic agents: the participants are the occupied seats, the wait list is
`State.waiting`, the redundancy list is `State.spares`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

GROUP = "group"
RANK = "rank"

SEAT = "seat"
WAITING = "waiting"
SPARE = "spare"

FORMAT = 1
MOST_ENTRIES = 1000
"""So many entries of a log are in the record: then another log is begun."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One agent, with the ranks that it starts.

    Args:
        id: which node it is. Outlives the agent: one that is started again in its place has the same.
        incarnation: how many agents had this id before it. The highest one counts.
        address: how the others reach it, a host's name or address.
        nproc: ranks that it starts.
        role: what they do.
    """

    id: str
    incarnation: int = 0
    address: str = ""
    nproc: int = 1
    role: str = "default"

    @property
    def name(self) -> str:
        """The node and its incarnation: ``id:incarnation``."""
        return f"{self.id}:{self.incarnation}"

    def __str__(self) -> str:
        return f"{self.id} ({self.address})" if self.address else self.id


@dataclasses.dataclass(frozen=True)
class Seat:
    """A place for a node in the group.

    Args:
        group_rank: its number. Before the round is complete: the one that the node had in the last round,
            None if it had none.
        base_slot: the first slot of its ranks; those of the others follow.
        nproc: number of its slots.
        role: what its ranks do.
        occupant: who has it; no one if the node was lost.
        last: id of the last one who had it.
    """

    group_rank: int | None
    base_slot: int
    nproc: int
    role: str
    occupant: Node | None
    last: str

    def fits(self, node: Node) -> bool:
        """Whether the node could take it."""
        return self.occupant is None and self.nproc == node.nproc and self.role == node.role


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A node that waits for the next round.

    Args:
        node: the node.
        group_rank: the one that it had in the round that it left; None if it had none.
    """

    node: Node
    group_rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the log: a node that wants to take part.

    Args:
        node: the node.
        leaves: the round that it leaves for that; None if it is in none.
        digest: of the options that it was started with.
    """

    node: Node
    leaves: int | None = None
    digest: str = ""

    def to_text(self) -> str:
        """One line."""
        return json.dumps([_node_to_json(self.node), self.leaves, self.digest], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Entry:
        """Reads a line.

        Raises:
            ValueError: it is no entry.
        """
        with _readable("entry of the log", text):
            node, leaves, digest = json.loads(text)
            return cls(_node_from_json(node), None if leaves is None else int(leaves), str(digest))


@dataclasses.dataclass(frozen=True)
class State:
    """The record.

    Args:
        min_nodes: a round is not complete with fewer nodes.
        max_nodes: no more nodes have seats.
        options: what all nodes have to agree on.
        version: how many changes there were.
        round: number of the round that forms or is complete, from 0.
        complete: whether the round has formed.
        closed: whether all is over. Final.
        reason: why it was closed; empty if the job has ended well.
        policy: `GROUP` or `RANK`.
        formation_size: ranks of the last round that formed under `GROUP`; from then on fixed for the job.
        next_slot: the first slot that no seat has.
        restarts: how often the same nodes had to meet again.
        epoch: which log new entries go to.
        folded: how many entries of it are in the record.
        seats: all seats, in the order of their group rank once the round is complete.
        waiting: who waits for the next round, in the order of coming.
        spares: who waits for a seat to become free, in the order of coming.
        writer: who made this change, unlike any other: so that it can tell that it was made.
        hosted: whether the node of group rank 0 hosts the store of the workers; else that outlives all nodes.
    """

    min_nodes: int
    max_nodes: int
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    version: int = 0
    round: int = 0
    complete: bool = False
    closed: bool = False
    reason: str = ""
    policy: str = GROUP
    formation_size: int = 0
    next_slot: int = 0
    restarts: int = 0
    epoch: int = 0
    folded: int = 0
    seats: tuple[Seat, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    spares: tuple[Node, ...] = ()
    writer: str = ""
    hosted: bool = True

    # Looking ---------------------------------------------------------------------------------------------

    @property
    def participants(self) -> tuple[Node, ...]:
        """Who has a seat."""
        return tuple(seat.occupant for seat in self.seats if seat.occupant is not None)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All that are in the record: with seats, waiting, spare."""
        return (*self.participants, *(waiting.node for waiting in self.waiting), *self.spares)

    def find(self, node_id: str) -> Node | None:
        """The node of this id, of whatever incarnation; None if it is not in the record."""
        return next((node for node in self.nodes if node.id == node_id), None)

    def seat_of(self, node: Node) -> Seat | None:
        """The seat that the node has."""
        return next((seat for seat in self.seats if _is(seat.occupant, node)), None)

    def place_of(self, node: Node) -> str | None:
        """`SEAT`, `WAITING` or `SPARE`; None if it is not in the record."""
        if self.seat_of(node) is not None:
            return SEAT
        if any(_is(waiting.node, node) for waiting in self.waiting):
            return WAITING
        return SPARE if any(_is(spare, node) for spare in self.spares) else None

    @property
    def is_full(self) -> bool:
        """Whether one node more would be too many, counting those who wait."""
        return len(self.participants) + len(self.waiting) >= self.max_nodes

    @property
    def can_complete(self) -> bool:
        """Whether there are enough nodes for the round."""
        return not self.complete and not self.closed and len(self.participants) >= self.min_nodes

    # Text ------------------------------------------------------------------------------------------------

    def to_text(self) -> str:
        """The record as JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["seats"] = [_seat_to_json(seat) for seat in self.seats]
        fields["waiting"] = [[_node_to_json(w.node), w.group_rank] for w in self.waiting]
        fields["spares"] = [_node_to_json(node) for node in self.spares]
        return json.dumps({"format": FORMAT, **fields}, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> State:
        """Reads a record.

        Raises:
            ValueError: it is none, or one of another version of this package.
        """
        with _readable("record", text):
            fields = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise ValueError("another version of ft_wrapper wrote it; use one version on all nodes")
            fields["seats"] = tuple(map(_seat_from_json, fields["seats"]))
            fields["waiting"] = tuple(Waiting(_node_from_json(n), rank) for n, rank in fields["waiting"])
            fields["spares"] = tuple(map(_node_from_json, fields["spares"]))
            return cls(**fields)


# Changes -------------------------------------------------------------------------------------------------


def fold(state: State, entries: Sequence[Entry]) -> State:
    """Takes those entries of the log that are not yet in the record into it.

    Args:
        state: the record.
        entries: the whole log of ``state.epoch``, as it was read after the record.
    """
    if state.closed:
        return state
    agreed = digest(state.options)
    for entry in entries[state.folded :]:
        if entry.digest == agreed:  # otherwise its node learns so from the record, and says so
            state = _admit(state, entry)
    state = dataclasses.replace(state, folded=max(state.folded, len(entries)))
    state = normalize(state)
    return _next_log(state) if state.folded >= MOST_ENTRIES else state


def normalize(state: State) -> State:
    """Does what follows by itself: rounds begin and are complete, spares move up."""
    if state.closed:
        return state
    if state.policy == RANK:
        return _seat_all(state)
    if state.complete and state.participants:
        return _call_spares(state)
    if state.complete:
        state = _begin_round(state)
    state = _fill(state)
    return complete(state) if len(state.participants) >= state.max_nodes else state


def complete(state: State) -> State:
    """Completes a round that has enough nodes; does nothing otherwise.

    A node of the last round keeps its group rank. Where that lies beyond the new size, and for the others,
    it is the lowest gap; nodes whose ids are all numbers in the order of these, others in the order of
    coming.
    """
    if not state.can_complete or state.policy == RANK:
        return state
    seats = [seat for seat in state.seats if seat.occupant is not None]
    ranks = _ranks(seats)
    ordered = sorted(zip(ranks, seats, strict=True), key=lambda pair: pair[0])
    placed, slot = [], 0
    for rank, seat in ordered:
        placed.append(dataclasses.replace(seat, group_rank=rank, base_slot=slot))
        slot += seat.nproc
    done = dataclasses.replace(state, complete=True, seats=tuple(placed), formation_size=slot, next_slot=slot)
    return _next_log(done)


def remove(state: State, nodes: Iterable[Node]) -> tuple[State, tuple[Seat, ...]]:
    """Takes nodes out: they leave, or were silent for too long.

    Args:
        state: the record.
        nodes: who goes; of exactly these incarnations.

    Returns:
        The record, normalized, and the seats that they lost: as they were.
    """
    names = {node.name for node in nodes}

    def goes(node: Node | None) -> bool:
        return node is not None and node.name in names

    lost = tuple(seat for seat in state.seats if goes(seat.occupant))
    if state.complete:
        seats = tuple(_emptied(seat) if goes(seat.occupant) else seat for seat in state.seats)
    else:
        seats = tuple(seat for seat in state.seats if not goes(seat.occupant))
    hosts = state.policy == RANK and any(_hosts(state, seat) for seat in lost)
    left = dataclasses.replace(
        state,
        policy=GROUP if hosts else state.policy,
        seats=seats,
        waiting=tuple(waiting for waiting in state.waiting if not goes(waiting.node)),
        spares=tuple(spare for spare in state.spares if not goes(spare)),
    )
    return normalize(left), lost


def may_unseat(state: State, node: Node, silent: Iterable[Node]) -> bool:
    """Whether a node may take those out that are silent in its eyes.

    It must be in the record itself. Under `RANK`, where to be taken out is evidence of the death of all ranks
    of a node, it must have a seat; only if all that have one are silent may a spare, or the job would wait
    for ever.

    Args:
        state: the record.
        node: who asks.
        silent: whom it would take out.
    """
    place = state.place_of(node)
    if state.closed or place is None:
        return False
    if state.policy == GROUP or place == SEAT:
        return True
    names = {other.name for other in silent}
    return all(other.name in names for other in state.participants)


def close(state: State, reason: str = "") -> State:
    """Ends it all; the first reason stands."""
    return state if state.closed else dataclasses.replace(state, closed=True, reason=reason)


def adopt_rank_policy(state: State) -> State:
    """Goes over to the policy `RANK`, in a complete round which no one has begun to leave.

    Otherwise, or if the store of the workers is lost with its node, the next round is on its way, and nothing
    is changed.
    """
    leaving = any(waiting.group_rank is not None for waiting in state.waiting)
    if state.closed or state.policy == RANK or not state.complete or leaving:
        return state
    if any(_hosts(state, seat) and seat.occupant is None for seat in state.seats):
        return state
    return normalize(dataclasses.replace(state, policy=RANK))


def digest(options: dict[str, str]) -> str:
    """A few letters that are the same for the same options."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]


def differences(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """What two nodes do not agree on, for people: ``name: theirs is …, ours is …``."""
    names = sorted(theirs.keys() | ours.keys())
    return [
        f"{name} is {ours.get(name, 'not set')} here, but {theirs.get(name, 'not set')} there"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def _hosts(state: State, seat: Seat) -> bool:
    """Whether the one that has this seat hosts the store of the workers."""
    return state.hosted and seat.group_rank == 0


# One node ------------------------------------------------------------------------------------------------


def _admit(state: State, entry: Entry) -> State:
    node = entry.node
    before = state.find(node.id)
    if before is not None and before.incarnation > node.incarnation:
        return state  # an agent that was superseded, and does not know it yet
    state = dataclasses.replace(state, restarts=state.restarts + _is_restart(state, entry, before))
    if state.policy == RANK:
        return _admit_to_seat(state, entry, before)
    if state.complete:
        return _admit_to_next_round(state, entry, before)
    return _admit_to_round(state, node, before)


def _is_restart(state: State, entry: Entry, before: Node | None) -> bool:
    """Whether the entry begins a restart with the same nodes, rather than a change of membership."""
    if not state.complete:
        return False
    if state.policy == RANK:
        return False  # the others go on
    if before is None:
        return any(seat.occupant is None and seat.last == entry.node.id for seat in state.seats)
    if not any(_is(seat.occupant, before) for seat in state.seats):
        return False
    if before != entry.node:
        return True  # its agent was started again
    all_there = all(seat.occupant is not None for seat in state.seats)
    return entry.leaves == state.round and all_there and not state.waiting


def _admit_to_round(state: State, node: Node, before: Node | None) -> State:
    """While a round forms."""
    if before is not None:
        return _replace_node(state, before, node)
    if len(state.participants) >= state.max_nodes:
        return dataclasses.replace(state, spares=(*state.spares, node))
    return dataclasses.replace(state, seats=(*state.seats, _new_seat(Waiting(node))))


def _admit_to_next_round(state: State, entry: Entry, before: Node | None) -> State:
    """While a round is complete, under `GROUP`."""
    node = entry.node
    rank = None
    if before is not None:
        seat = state.seat_of(before)
        if seat is None:
            return _replace_node(state, before, node)
        if before == node and entry.leaves != state.round:
            return state  # an entry of long ago
        seats = tuple(_emptied(other) if other is seat else other for other in state.seats)
        state, rank = dataclasses.replace(state, seats=seats), seat.group_rank
    elif state.is_full:
        return dataclasses.replace(state, spares=(*state.spares, node))
    else:
        empty = (seat for seat in state.seats if seat.occupant is None and seat.last == node.id)
        rank = next((seat.group_rank for seat in empty), None)
    return dataclasses.replace(state, waiting=(*state.waiting, Waiting(node, rank)))


def _admit_to_seat(state: State, entry: Entry, before: Node | None) -> State:
    """Under `RANK`."""
    node = entry.node
    if before == node:
        return state
    if before is not None:
        seat = state.seat_of(before)
        hosts = seat is not None and _hosts(state, seat)
        if not hosts and (seat is None or dataclasses.replace(seat, occupant=None).fits(node)):
            return _replace_node(state, before, node)
        # It comes back with another number of ranks, or without the store of the workers.
        state, _ = remove(state, [before])
        if state.policy == GROUP and state.complete:
            return _admit_to_next_round(state, entry, None)
        if state.policy == GROUP:
            return _admit_to_round(state, node, None)
    seated = _take_seat(state, node)
    return dataclasses.replace(state, spares=(*state.spares, node)) if seated is None else seated


def _take_seat(state: State, node: Node) -> State | None:
    """Under `RANK`: its old seat; else an empty one that fits; else a new one. None if there is no room."""
    if len(state.participants) >= state.max_nodes:
        return None
    fitting = [number for number, seat in enumerate(state.seats) if seat.fits(node)]
    if fitting:
        old = [number for number in fitting if state.seats[number].last == node.id]
        place = (old or fitting)[0]
        seat = dataclasses.replace(state.seats[place], occupant=node, last=node.id)
        return dataclasses.replace(state, seats=(*state.seats[:place], seat, *state.seats[place + 1 :]))
    seat = Seat(len(state.seats), state.next_slot, node.nproc, node.role, node, node.id)
    return dataclasses.replace(state, seats=(*state.seats, seat), next_slot=state.next_slot + node.nproc)


def _replace_node(state: State, before: Node, node: Node) -> State:
    """Puts a node where its earlier incarnation was."""

    def other(old: Node) -> Node:
        return node if _is(old, before) else old

    def other_seat(seat: Seat) -> Seat:
        if not _is(seat.occupant, before):
            return seat
        return dataclasses.replace(seat, occupant=node, nproc=node.nproc, role=node.role)

    return dataclasses.replace(
        state,
        seats=tuple(map(other_seat, state.seats)),
        waiting=tuple(dataclasses.replace(w, node=other(w.node)) for w in state.waiting),
        spares=tuple(map(other, state.spares)),
    )


# Moving --------------------------------------------------------------------------------------------------


def _begin_round(state: State) -> State:
    """No one is left in the round: the next one forms of those who wait."""
    seats = tuple(map(_new_seat, state.waiting))
    return dataclasses.replace(
        state, round=state.round + 1, complete=False, seats=seats, waiting=(), next_slot=0
    )


def _fill(state: State) -> State:
    """While a round forms: those who wait take part, as long as there is room."""
    room = max(0, state.max_nodes - len(state.participants))
    come, stay = state.spares[:room], state.spares[room:]
    if not come:
        return state
    seats = (*state.seats, *(_new_seat(Waiting(node)) for node in come))
    return dataclasses.replace(state, seats=seats, spares=stay)


def _call_spares(state: State) -> State:
    """While a round is complete, under `GROUP`: spares wait for the next one if there is room in it."""
    room = max(0, state.max_nodes - len(state.participants) - len(state.waiting))
    come, stay = state.spares[:room], state.spares[room:]
    if not come:
        return state
    return dataclasses.replace(state, waiting=(*state.waiting, *map(Waiting, come)), spares=stay)


def _seat_all(state: State) -> State:
    """Under `RANK`: those who wait for anything take seats, as long as there are any."""
    candidates = (*(waiting.node for waiting in state.waiting), *state.spares)
    state = dataclasses.replace(state, waiting=(), spares=())
    # First those whom an empty seat fits: a new seat would leave that one empty for good.
    for by_fit in (True, False):
        left = []
        for node in candidates:
            fits = any(seat.fits(node) for seat in state.seats)
            seated = _take_seat(state, node) if fits or not by_fit else None
            if seated is None:
                left.append(node)
            else:
                state = seated
        candidates = tuple(left)
    return dataclasses.replace(state, spares=candidates)


def _next_log(state: State) -> State:
    return dataclasses.replace(state, epoch=state.epoch + 1, folded=0)


def _new_seat(waiting: Waiting) -> Seat:
    node = waiting.node
    return Seat(waiting.group_rank, 0, node.nproc, node.role, node, node.id)


def _emptied(seat: Seat) -> Seat:
    return dataclasses.replace(seat, occupant=None)


def _ranks(seats: Sequence[Seat]) -> list[int]:
    """The group rank of each of the seats of a round that is to be complete."""
    size = len(seats)
    taken: dict[int, int] = {}
    for number, seat in enumerate(seats):
        if seat.group_rank is not None and seat.group_rank < size:
            taken.setdefault(seat.group_rank, number)
    ranks = {number: rank for rank, number in taken.items()}
    gaps = (rank for rank in range(size) if rank not in taken)
    ids = [seat.last for seat in seats]
    by_id: Callable[[int], Any] = (
        (lambda number: int(ids[number])) if all(i.isdecimal() for i in ids) else (lambda number: number)
    )
    for number in sorted((number for number in range(size) if number not in ranks), key=by_id):
        ranks[number] = next(gaps)
    return [ranks[number] for number in range(size)]


def _is(one: Node | None, other: Node) -> bool:
    return one is not None and one.id == other.id and one.incarnation == other.incarnation


# JSON ----------------------------------------------------------------------------------------------------


class _readable:
    """Turns whatever goes wrong while a text is read into a ValueError that shows the text."""

    def __init__(self, what: str, text: str) -> None:
        self._what, self._text = what, text

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (ValueError, TypeError, KeyError, AttributeError)):
            shown = self._text if len(self._text) <= 200 else self._text[:200] + "…"
            raise ValueError(f"no {self._what}: {shown!r}: {error}") from error


def _node_to_json(node: Node) -> list[Any]:
    return [node.id, node.incarnation, node.address, node.nproc, node.role]


def _node_from_json(fields: list[Any]) -> Node:
    node_id, incarnation, address, nproc, role = fields
    return Node(str(node_id), int(incarnation), str(address), int(nproc), str(role))


def _seat_to_json(seat: Seat) -> list[Any]:
    occupant = None if seat.occupant is None else _node_to_json(seat.occupant)
    return [seat.group_rank, seat.base_slot, seat.nproc, seat.role, occupant, seat.last]


def _seat_from_json(fields: list[Any]) -> Seat:
    group_rank, base_slot, nproc, role, occupant, last = fields
    node = None if occupant is None else _node_from_json(occupant)
    return Seat(group_rank, int(base_slot), int(nproc), str(role), node, str(last))
