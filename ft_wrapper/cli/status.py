"""A job's status: its nodes, its ranks, the last fault; read from its store, without torch."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator

from ..attribution import Interruption
from ..protocol import Agreement, keys
from ..protocol.operations import Operations, read, read_log
from ..protocol.records import FAULT
from ..rendezvous.record import Node, NodePlace, QuarantinedNode, RendezvousRecord
from ..report import table
from ..restart.report import describe_faults, evictions, host_and_pid

NOT_FORMED = "not formed"
RUNNING = "running"
RESTARTING = "restarting"
COMPLETED = "completed"
LOST = "lost"
DRAINED = "drained"
LEAVING = "leaving"
KEPT_OUT = "kept out"


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """A node.

    Args:
        id: names the node.
        place: ``seat``, or ``leaving`` if it was asked to leave that; ``waiting`` for the next round;
            ``spare``; if it has left its seat, ``drained`` if it was asked to, else ``lost``; ``kept out`` if
            it has not passed its check.
        group_rank: its number; None if it has no seat, or its round is not complete.
        slots: the first and the last slot of its ranks; None without a seat in a complete round.
        incarnation: how many agents had this id before; None for a lost one.
        address: where the other nodes reach it; empty if that is not known.
        reason: why it is kept out.
        since: when that began, in seconds since the epoch by its own clock.
    """

    id: str
    place: str
    group_rank: int | None = None
    slots: tuple[int, int] | None = None
    incarnation: int | None = None
    address: str = ""
    reason: str = ""
    since: float | None = None


#: The nodes, the last notice, and whether the job has ended.
NodesSeen = tuple[tuple[NodeStatus, ...], str, bool]


@dataclasses.dataclass(frozen=True)
class RankStatus:
    """A member of the job.

    Args:
        slot: its rank at the start of the job, which never changes.
        incarnation: which of the slot's processes holds it, from 0.
        active_rank: its rank in the function; None for a spare, and for one that is not in it yet.
        host: where it runs; empty if that is not known.
        pid: its process; None if that is not known.
        left: how it has left this iteration: ``died`` or ``drained``; empty if it has not.
    """

    slot: int
    incarnation: int
    active_rank: int | None
    host: str
    pid: int | None
    left: str


@dataclasses.dataclass(frozen=True)
class Status:
    """A job.

    Args:
        state: ``not formed``, ``running``, ``restarting`` or ``completed``.
        call: number of the wrapped call; None before the job has formed.
        iteration: number of the global iteration; None before the job has formed.
        world_size: how many ranks there are, spares included.
        active_world_size: how many of them are in the function; None while that is being agreed on.
        ranks: all of them, by slot.
        last_faults: what ended the previous iteration, or the current one if it has ended; in words.
        nodes: all nodes that have or had a place in the rendezvous, and those that are kept out; none if its
            store was not asked.
        last_notice: who asked for a checkpoint last, and why; empty if there was no notice.
        slow: each rank that is slow now: how slow, and why.
        learned: how long steps take, and from when on a rank hangs; empty if that is not known.
    """

    state: str
    call: int | None = None
    iteration: int | None = None
    world_size: int = 0
    active_world_size: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    last_faults: str | None = None
    nodes: tuple[NodeStatus, ...] = ()
    last_notice: str = ""
    slow: tuple[str, ...] = ()
    learned: str = dataclasses.field(default="", compare=False)  # no change of it is news

    def to_json(self) -> str:
        """All of it, as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Status":
        """Reads `to_json`.

        Raises:
            ValueError: it is not JSON.
            TypeError: its fields differ from this version's.
        """
        fields = json.loads(text)
        fields["ranks"] = tuple(RankStatus(**rank) for rank in fields["ranks"])
        nodes = (node | {"slots": node["slots"] and tuple(node["slots"])} for node in fields["nodes"])
        fields["nodes"] = tuple(NodeStatus(**node) for node in nodes)
        fields["slow"] = tuple(fields["slow"])
        return cls(**fields)

    def to_text(self) -> str:
        """Some lines for people, without control characters, as in a host's name."""
        lines = "\n".join([*self._of_the_ranks(), *self._of_the_nodes()])
        return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in lines)

    def _of_the_ranks(self) -> list[str]:
        if self.iteration is None:
            return [f"{self.state}: no wrapped function has been entered by all ranks yet"]
        active = "?" if self.active_world_size is None else self.active_world_size
        where = f"iteration {self.iteration} of call {self.call}"
        lines = [f"{self.state}: {where}, {active} of {self.world_size} ranks active"]
        rows: list[tuple[object, ...]] = [("slot", "incarnation", "active rank", "host", "pid")]
        for rank in self.ranks:
            rows.append((rank.slot, rank.incarnation, rank.left or rank.active_rank, rank.host, rank.pid))
        lines += table(rows, "  ")
        if self.last_faults is not None:
            lines.append(f"last fault: {self.last_faults}")
        return lines + [f"slow: {one}" for one in self.slow] + [self.learned] * bool(self.learned)

    def _of_the_nodes(self) -> list[str]:
        if not self.nodes:
            return []
        rows: list[tuple[object, ...]] = [("node", "place", "group rank", "slots", "address")]
        reasons = [f"last notice: {self.last_notice}"] * bool(self.last_notice)
        for node in self.nodes:
            slots = node.slots and f"{node.slots[0]}..{node.slots[1]}"
            rows.append((node.id, node.place, node.group_rank, slots, node.address))
            if node.since is not None:
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(node.since))
                reasons.append(f"node {node.id} is {node.place} since {when}: {node.reason}")
        return ["nodes:", *table(rows, "  "), *reasons]


def read_status(store: Operations) -> Status:
    """Reads a job's status.

    Args:
        store: the job's.

    Raises:
        StoreError: it cannot be read.
    """
    agreement = Agreement(store)
    view = agreement.iterations.read_current()
    if view is None:
        return Status(NOT_FORMED)
    n, members = view.n, view.members
    outcome = agreement.ends.outcome_of(n)
    state = RUNNING if outcome is None else RESTARTING if outcome == FAULT else COMPLETED
    places = {str(one): entered.active_rank for one, entered in agreement.entering.entered_in(n).items()}
    drained = [one.member for one in agreement.ends.faults_of(n) if one.interruption is Interruption.DRAINED]
    left = dict.fromkeys(agreement.ends.deaths_of(n), "died") | dict.fromkeys(drained, DRAINED)
    ended = n if outcome == FAULT else n - 1
    faults = agreement.ends.faults_of(ended) if ended >= view.decision.first else []
    if ended < n:  # as the line of the restart has it
        faults += evictions(store, view.decision, faults)
    ranks = []
    for member in members:
        host, pid = host_and_pid(store, member)
        where = (places.get(str(member)), host, pid or None)
        ranks.append(RankStatus(member.slot, member.incarnation, *where, left.get(member, "")))
    active, cause = agreement.entering.active_in(n) or None, describe_faults(faults) if faults else None
    slow = dict[int, str](json.loads(entry) for entry in read_log(store, keys.slow(n)))
    lines = tuple(filter(None, slow.values()))
    learned = read(store, keys.learned(n)) or ""
    return Status(state, view.call, n, len(members), active, tuple(ranks), cause, slow=lines, learned=learned)


def watch(
    store: Operations, longest: float, read_nodes: Callable[[], NodesSeen | None] = lambda: ((), "", False)
) -> Iterator[Status]:
    """Reads a job's status whenever it changes: an iteration ends, another one begins.

    Args:
        store: the job's.
        longest: seconds after which to read it, and the nodes, in any case.
        read_nodes: reads what is seen of the nodes; None if they have begun another round, whose ranks use
            another store.

    Yields:
        What was read, if it differs from the last one. Ends when the job has ended, or begun another round.

    Raises:
        StoreError: the store cannot be read, or no longer.
    """
    last = None
    while True:
        # Nodes first: once the job has ended, the ranks write no more.
        if (found := read_nodes()) is None:
            return
        nodes, notice, has_ended = found
        status = dataclasses.replace(read_status(store), nodes=nodes, last_notice=notice)
        if status != last:
            yield status
        last = status
        if has_ended or status.state == COMPLETED:
            return
        n = -1 if status.iteration is None else status.iteration
        store.wait_for(keys.wake_end(n) if status.state == RUNNING else keys.wake_head(n + 1), longest)


def nodes_in(record: RendezvousRecord) -> tuple[NodeStatus, ...]:
    """The nodes that have or had a place, and those that are kept out.

    Args:
        record: what they agree on.
    """
    found = []
    quarantine = {one.node.id: one for one in record.quarantine if _is_outside(record, one.node)}
    leaving = {drain.node for drain in record.drains if not drain.slots}
    leaving.update(record.notice.leaving if record.notice else ())
    for seat in record.seats:
        status = NodeStatus(seat.last, DRAINED if seat.was_drained else LOST, address=seat.address)
        if seat.occupant is not None:
            stays = seat.occupant.name not in leaving
            status = _of_node(seat.occupant, NodePlace.SEAT.value if stays else LEAVING)
        elif seat.last in quarantine:  # it has given this seat up
            status = _quarantined(quarantine.pop(seat.last))
        if record.complete:
            slots = (seat.base_slot, seat.base_slot + seat.nproc - 1)
            status = dataclasses.replace(status, group_rank=seat.group_rank, slots=slots)
        found.append(status)
    found += [_of_node(one.node, NodePlace.WAITING.value) for one in record.waiting]
    found += [_of_node(node, NodePlace.SPARE.value) for node in record.spares]
    return (*found, *map(_quarantined, quarantine.values()))


def _is_outside(record: RendezvousRecord, node: Node) -> bool:
    """Whether neither it nor a later agent of its id has a place."""
    inside = record.find(node.id)
    return inside is None or inside.incarnation < node.incarnation


def _of_node(node: Node, place: str) -> NodeStatus:
    return NodeStatus(node.id, place, incarnation=node.incarnation, address=node.address)


def _quarantined(one: QuarantinedNode) -> NodeStatus:
    return dataclasses.replace(_of_node(one.node, KEPT_OUT), reason=one.reason, since=one.since)
