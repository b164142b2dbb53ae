"""All changes of the record. Pure: no store, no clock.

A node appends an admission to a log, and any node that finds it due takes the new admissions into the record
(`fold`) with one compare_set: a thousand nodes that start at once cost a few writes of the record, not a
thousand. `normalize` then makes every move that follows.

Under the policy ``group`` every change of membership is a new round: late nodes wait, and once all nodes have
left a round the next one begins with the waiting nodes. A round is complete at once with
`RendezvousRecord.max_nodes`; with fewer when a node completes it (`complete_round`). Under the policy
``rank`` the round stays: a node takes a seat or loses it, and all others go on. But if the node of group rank
0 hosts the workers' store, the store is lost with that node: the policy is ``group`` again, and all nodes
form a new round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..protocol.notice import Notice
from .record import (
    Admission,
    Drain,
    Node,
    QuarantinedNode,
    RendezvousRecord,
    RoundPolicy,
    Seat,
    Waiting,
    digest,
)

#: Once the record has this many admissions of a log, the next log begins.
MOST_ADMISSIONS = 1000


def fold(record: RendezvousRecord, admissions: Sequence[Admission]) -> RendezvousRecord:
    """Takes new admissions of the log into the record.

    Args:
        record: the record.
        admissions: the whole log of ``record.epoch``, read after the record.
    """
    if record.closed:
        return record
    agreed = digest(record.options)
    for admission in admissions[record.folded :]:
        if admission.digest == agreed:  # a node with other options sees the difference itself, and raises
            record = _admit(record, admission)
    record = replace(record, folded=max(record.folded, len(admissions)))
    record = normalize(record)
    return _next_log(record) if record.folded >= MOST_ADMISSIONS else record


def normalize(record: RendezvousRecord) -> RendezvousRecord:
    """Makes every move that is due: begins and completes rounds, gives spares their seats."""
    if record.closed:
        return record
    if record.policy is RoundPolicy.RANK:
        return _seat_all(record)
    if record.complete and not record.participants:
        record = _begin_round(record)
    record = _call_spares(record)
    return complete_round(record) if len(record.participants) >= record.max_nodes else record


def complete_round(record: RendezvousRecord) -> RendezvousRecord:
    """Completes a round that has enough nodes; does nothing otherwise.

    A node of the last round keeps its group rank if that is below the new size. The other nodes fill the gaps
    from the lowest on: in the order of node ids if all ids are numbers, else in the order of arrival.
    """
    if record.complete or record.closed or len(record.seats) < record.min_nodes:
        return record
    placed, slot = [], 0
    for rank, seat in enumerate(_in_order(record.seats)):
        placed.append(replace(seat, group_rank=rank, base_slot=slot))
        slot += seat.nproc
    return _next_log(replace(record, complete=True, seats=tuple(placed), formation_size=slot, next_slot=slot))


def remove_nodes(
    record: RendezvousRecord, nodes: Iterable[Node]
) -> tuple[RendezvousRecord, tuple[Seat, ...]]:
    """Removes nodes that leave or are evicted, in exactly these incarnations.

    Returns:
        The record, normalized, and the seats that the nodes lost, as they were before.
    """
    names = {node.name for node in nodes}

    def goes(node: Node | None) -> bool:
        return node is not None and node.name in names

    lost = tuple(seat for seat in record.seats if goes(seat.occupant))
    seats = tuple(seat.vacate(record.drains) if goes(seat.occupant) else seat for seat in record.seats)
    if not record.complete:
        seats = tuple(seat for seat in seats if seat.occupant is not None)
    hosts = record.policy is RoundPolicy.RANK and any(record.hosts_workers(seat) for seat in lost)
    left = replace(
        record,
        policy=RoundPolicy.GROUP if hosts else record.policy,
        seats=seats,
        waiting=tuple(waiting for waiting in record.waiting if not goes(waiting.node)),
        spares=tuple(spare for spare in record.spares if not goes(spare)),
        drains=tuple(drain for drain in record.drains if drain.node not in names),
    )
    return normalize(give_notice(left, left.notice)), lost


def may_evict(record: RendezvousRecord, node: Node, silent: Iterable[Node]) -> bool:
    """Whether a node may evict the nodes that it finds silent.

    The node must be in the record. Under policy ``rank``, where an eviction is evidence of the death of all
    ranks of the silent node, the evicting node must have a seat. A spare may evict only if all nodes with
    seats are silent; otherwise the job would wait forever.
    """
    if record.closed or record.place_of(node) is None:
        return False
    if record.policy is RoundPolicy.GROUP or record.seat_of(node) is not None:
        return True
    names = {other.name for other in silent}
    return all(other.name in names for other in record.participants)


def close(record: RendezvousRecord, reason: str = "", result: str = "") -> RendezvousRecord:
    """Closes the rendezvous; the first reason and result are kept."""
    return record if record.closed else replace(record, closed=True, reason=reason, result=result)


def add_drain(record: RendezvousRecord, asked: Drain) -> RendezvousRecord:
    """Adds a drain. Its node carries it out, and leaves if no ranks are left on the node.

    Of two drains of the same ranks the shorter one is kept.
    """
    known = any(asked.node == node.name for node in record.nodes)
    same = [other for other in record.drains if (other.node, other.slots) == (asked.node, asked.slots)]
    if not known or any(other.within <= asked.within for other in same):
        return record
    return replace(record, drains=(*(one for one in record.drains if one not in same), asked))


def give_notice(record: RendezvousRecord, notice: Notice | None) -> RendezvousRecord:
    """Replaces the notice. Nodes that leave at the same time share one, unless the job ends: it saves again.

    One without an id is not for ranks yet: it only says that a node is about to leave. If all nodes that are
    left are about to leave, the job ends: those that were to go on without them are lost.
    """
    last, taking_part = record.notice, {node.name for node in record.participants}
    leaving = [name for name in (last.leaving if last else ()) if name in taking_part]
    if notice is None or record.closed or (last and last.ends):
        return record
    together = tuple(dict.fromkeys((*leaving, *notice.leaving)))
    if last and last.id and leaving and notice.leaving and not notice.ends:
        notice = replace(notice if notice.id else last, id=last.id)
    ends = notice.ends or bool(notice.id and record.nodes and all(n.name in together for n in record.nodes))
    return replace(record, notice=replace(notice, id=notice.id + " ends" * ends, ends=ends, leaving=together))


def quarantine(record: RendezvousRecord, node: Node, reason: str, now: float) -> RendezvousRecord:
    """Puts a node into quarantine, replacing any earlier agent of its id; or changes the reason.

    Args:
        record: the record, in which the node has no place.
        node: the node.
        reason: why it is in quarantine, for people.
        now: seconds since the epoch.
    """
    if record.closed:
        return record
    since = next((one.since for one in record.quarantine if one.node.is_same(node)), now)
    others = (one for one in record.quarantine if one.node.id != node.id)
    nodes = sorted((*others, QuarantinedNode(node, reason, since)), key=lambda one: one.node.id)
    return replace(record, quarantine=tuple(nodes))


def release(record: RendezvousRecord, node: Node) -> RendezvousRecord:
    """Ends the quarantine of a node, or of an earlier agent of its id; a later agent's stays."""
    if record.closed:
        return record
    stay = (
        one for one in record.quarantine if one.node.id != node.id or one.node.incarnation > node.incarnation
    )
    return replace(record, quarantine=tuple(stay))


def adopt_rank_policy(record: RendezvousRecord) -> RendezvousRecord:
    """Changes the policy to ``rank``, in a complete round that no node has begun to leave.

    Changes nothing otherwise, nor if the workers' store is lost with its node: then a new round follows.
    """
    leaving = any(waiting.group_rank is not None for waiting in record.waiting)
    lost = any(record.hosts_workers(seat) and seat.occupant is None for seat in record.seats)
    if record.closed or record.policy is RoundPolicy.RANK or not record.complete or leaving or lost:
        return record
    return normalize(replace(record, policy=RoundPolicy.RANK))


# One node ------------------------------------------------------------------------------------------------


def _admit(record: RendezvousRecord, admission: Admission) -> RendezvousRecord:
    node = admission.node
    before = record.find(node.id)
    if before is not None and before.incarnation > node.incarnation:
        return record  # a superseded agent that does not know this yet
    record = replace(record, restarts=record.restarts + _is_restart(record, admission, before))
    return _let_in(record, admission, before)


def _let_in(record: RendezvousRecord, admission: Admission, before: Node | None) -> RendezvousRecord:
    if record.policy is RoundPolicy.RANK:
        return _admit_to_seat(record, admission, before)
    if record.complete:
        return _admit_to_next_round(record, admission, before)
    return _admit_to_round(record, admission.node, before)


def _is_restart(record: RendezvousRecord, admission: Admission, before: Node | None) -> bool:
    """Whether the admission begins a restart with the same nodes, rather than a change of membership."""
    if not record.complete or record.policy is RoundPolicy.RANK:
        return False  # under policy rank the other nodes go on
    if before is None:
        return any(seat.occupant is None and seat.last == admission.node.id for seat in record.seats)
    if record.seat_of(before) is None:
        return False
    if before != admission.node:
        return True  # the node's agent was started again
    all_there = all(seat.occupant is not None for seat in record.seats)
    return admission.leaves == record.round and all_there and not record.waiting


def _admit_to_round(record: RendezvousRecord, node: Node, before: Node | None) -> RendezvousRecord:
    """While a round forms."""
    if before is not None:
        return _replace_node(record, before, node)
    if len(record.participants) >= record.max_nodes:
        return replace(record, spares=(*record.spares, node))
    return replace(record, seats=(*record.seats, _new_seat(Waiting(node))))


def _admit_to_next_round(
    record: RendezvousRecord, admission: Admission, before: Node | None
) -> RendezvousRecord:
    """While a round is complete, under policy ``group``."""
    node = admission.node
    rank = None
    if before is not None:
        seat = record.seat_of(before)
        if seat is None:
            return _replace_node(record, before, node)
        if before == node and admission.leaves != record.round:
            return record  # an outdated admission
        seats = tuple(one.vacate() if one is seat else one for one in record.seats)
        record, rank = replace(record, seats=seats), seat.group_rank
    elif record.is_full:
        return replace(record, spares=(*record.spares, node))
    else:
        empty = (seat for seat in record.seats if seat.occupant is None and seat.last == node.id)
        rank = next((seat.group_rank for seat in empty), None)
    return replace(record, waiting=(*record.waiting, Waiting(node, rank)))


def _admit_to_seat(record: RendezvousRecord, admission: Admission, before: Node | None) -> RendezvousRecord:
    """Under policy ``rank``."""
    node = admission.node
    if before == node:
        return record
    if before is not None:
        seat = record.seat_of(before)
        hosts = seat is not None and record.hosts_workers(seat)
        if not hosts and (seat is None or replace(seat, occupant=None).fits(node)):
            return _replace_node(record, before, node)
        # The node comes back with another number of ranks, or without the workers' store.
        record, _ = remove_nodes(record, [before])
        return _let_in(record, admission, None)
    seated = _take_seat(record, node)
    return replace(record, spares=(*record.spares, node)) if seated is None else seated


def _take_seat(record: RendezvousRecord, node: Node) -> RendezvousRecord | None:
    """Under policy ``rank``: the node's old seat, else one that fits, else a new one; None without room."""
    if len(record.participants) >= record.max_nodes:
        return None
    fitting = [seat for seat in record.seats if seat.fits(node)]
    if fitting:
        best = next((seat for seat in fitting if seat.last == node.id), fitting[0])
        taken = replace(best, occupant=node, last=node.id, address="", was_drained=False)
        return replace(record, seats=tuple(taken if seat is best else seat for seat in record.seats))
    seat = Seat(len(record.seats), record.next_slot, node.nproc, node.role, node, node.id)
    return replace(record, seats=(*record.seats, seat), next_slot=record.next_slot + node.nproc)


def _replace_node(record: RendezvousRecord, before: Node, node: Node) -> RendezvousRecord:
    """Puts a node in the place of its earlier incarnation."""

    def other(old: Node) -> Node:
        return node if before.is_same(old) else old

    own = record.seat_of(before)
    taken = own and replace(own, occupant=node, nproc=node.nproc, role=node.role)
    return replace(
        record,
        seats=tuple(taken if taken and one is own else one for one in record.seats),
        waiting=tuple(replace(w, node=other(w.node)) for w in record.waiting),
        spares=tuple(map(other, record.spares)),
    )


# Moving --------------------------------------------------------------------------------------------------


def _begin_round(record: RendezvousRecord) -> RendezvousRecord:
    """All nodes have left the round: the next one forms from the waiting nodes.

    A drained node takes part again, and then leaves. Slots have other ranks from now on.
    """
    seats = tuple(map(_new_seat, record.waiting))
    drains = tuple(drain for drain in record.drains if not drain.slots)
    begun = replace(record, round=record.round + 1, complete=False, seats=seats, waiting=(), next_slot=0)
    return replace(begun, drains=drains, notice=None)


def _call_spares(record: RendezvousRecord) -> RendezvousRecord:
    """While there is room, spares take part; if the round is complete, they wait for the next one."""
    room = max(0, record.max_nodes - len(record.participants) - len(record.waiting))
    come = tuple(map(Waiting, record.spares[:room]))
    record = replace(record, spares=record.spares[room:])
    if record.complete:
        return replace(record, waiting=record.waiting + come)
    return replace(record, seats=(*record.seats, *map(_new_seat, come)))


def _seat_all(record: RendezvousRecord) -> RendezvousRecord:
    """Under policy ``rank``: waiting nodes and spares take seats while there is room."""
    candidates = (*(waiting.node for waiting in record.waiting), *record.spares)
    record = replace(record, waiting=(), spares=())
    # Nodes that fit an empty seat come first: if they got a new seat, the empty one would stay empty.
    for by_fit in (True, False):
        left = []
        for node in candidates:
            fits = any(seat.fits(node) for seat in record.seats)
            seated = _take_seat(record, node) if fits or not by_fit else None
            if seated is None:
                left.append(node)
            else:
                record = seated
        candidates = tuple(left)
    return replace(record, spares=candidates)


def _next_log(record: RendezvousRecord) -> RendezvousRecord:
    return replace(record, epoch=record.epoch + 1, folded=0)


def _new_seat(waiting: Waiting) -> Seat:
    node = waiting.node
    return Seat(waiting.group_rank, 0, node.nproc, node.role, node, node.id)


def _in_order(seats: Sequence[Seat]) -> list[Seat]:
    """The seats of a round that is about to complete, in the order of their new group ranks."""
    kept: dict[int | None, Seat] = {}
    for seat in seats:
        if seat.group_rank is not None and seat.group_rank < len(seats):
            kept.setdefault(seat.group_rank, seat)
    others = [seat for seat in seats if kept.get(seat.group_rank) is not seat]
    if all(seat.last.isdecimal() for seat in seats):
        others.sort(key=lambda seat: int(seat.last))
    gaps = iter(others)
    return [kept.get(rank) or next(gaps) for rank in range(len(seats))]
