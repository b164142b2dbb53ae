"""The record that all nodes agree on. Pure.

In the terms of torch's elastic agents, the participants are the occupied seats, the wait list is
`RendezvousRecord.waiting`, and the redundancy list is `RendezvousRecord.spares`.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterable

from ..exception import StoreError
from ..protocol.notice import Notice
from ..protocol.records import Record

FORMAT = 4


class RoundPolicy(enum.StrEnum):
    """What a change of membership does.

    Attributes:
        GROUP: a new round begins: late nodes wait for it, and all other nodes leave the old round.
        RANK: the round goes on: a node takes a seat or loses it, and the other nodes notice nothing.
    """

    GROUP = "group"
    RANK = "rank"


class NodePlace(enum.Enum):
    """A node's place in the record."""

    SEAT = "seat"
    WAITING = "waiting"
    SPARE = "spare"


@dataclasses.dataclass(frozen=True)
class Node:
    """One agent, with the ranks that it starts.

    Args:
        id: name of the node. An agent that is started again on the node has the same id.
        incarnation: how many agents had this id before. The agent with the highest number counts.
        address: host name or address at which other nodes reach this one.
        nproc: number of ranks that the agent starts.
        role: name of what these ranks do.
    """

    id: str
    incarnation: int = 0
    address: str = ""
    nproc: int = 1
    role: str = "default"

    @property
    def name(self) -> str:
        """Id and incarnation: ``id:incarnation``."""
        return f"{self.id}:{self.incarnation}"

    def __str__(self) -> str:
        return f"{self.id} ({self.address})" if self.address else self.id

    def is_same(self, other: "Node | None") -> bool:
        """Whether another node is the same agent, by id and incarnation."""
        return other is not None and self.id == other.id and self.incarnation == other.incarnation


@dataclasses.dataclass(frozen=True)
class Seat:
    """A place for a node in the group.

    Args:
        group_rank: number of the seat. Before the round is complete, the group rank that the node had in the
            last round; None if it had none.
        base_slot: first slot of the seat's ranks; the others follow.
        nproc: number of slots.
        role: name of what the ranks do.
        occupant: the node that has the seat; None if that node was lost.
        last: id of the last node that had the seat.
        address: of the node that has left the seat; empty while there is an occupant.
        was_drained: whether that node was asked to leave.
    """

    group_rank: int | None
    base_slot: int
    nproc: int
    role: str
    occupant: Node | None
    last: str
    address: str = ""
    was_drained: bool = False

    def vacate(self, drains: Iterable["Drain"] = ()) -> "Seat":
        """The seat once its occupant has left, possibly because one of these drains asked it to."""
        name, address = (self.occupant.name, self.occupant.address) if self.occupant else ("", "")
        asked = {drain.node for drain in drains}
        return dataclasses.replace(self, occupant=None, address=address, was_drained=name in asked)

    def fits(self, node: Node) -> bool:
        """Whether a node could take the seat."""
        return self.occupant is None and self.nproc == node.nproc and self.role == node.role


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A node that waits for the next round.

    Args:
        node: the node.
        group_rank: group rank that the node had in the round that it left; None if it had none.
    """

    node: Node
    group_rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Drain:
    """A request that ranks leave the job and are not started again.

    Args:
        node: name of their node: id and incarnation.
        slots: slots of the ranks; empty for all ranks of the node, which then leaves, too.
        within: seconds after which ranks that have not left are ended.
        why: the reason, for people.
    """

    node: str
    slots: tuple[int, ...]
    within: float
    why: str = ""


@dataclasses.dataclass(frozen=True)
class QuarantinedNode:
    """A node that has not passed its check.

    Args:
        node: the node, which has no place in the record.
        reason: why the check failed, for people.
        since: when the check first failed, in seconds since the epoch, by the node's clock.
    """

    node: Node
    reason: str
    since: float


@dataclasses.dataclass(frozen=True)
class Admission(Record):
    """An entry of the log: a node asks to take part.

    Args:
        node: the node.
        leaves: the round that the node leaves; None if it is in none.
        digest: digest of the options that the node was started with.
    """

    node: Node
    leaves: int | None = None
    digest: str = ""


class Format(int):
    """Version of a record's text, in which it is a number."""

    @classmethod
    def parse(cls, found: object, key: str) -> "Format":
        """Reads the version; an error names the key."""
        if found != FORMAT:
            raise StoreError(
                f"store key {key!r}: another version of ft_wrapper wrote it, in format {found!r} instead of "
                f"{FORMAT}; use one version on all nodes"
            )
        return cls(FORMAT)


@dataclasses.dataclass(frozen=True)
class RendezvousRecord(Record):
    """What all nodes agree on.

    Args:
        min_nodes: fewest nodes of a round.
        max_nodes: most nodes that have seats.
        options: options that must be the same on all nodes.
        version: number of changes so far.
        round: number of the round that forms or is complete, from 0.
        complete: whether the round has formed.
        closed: whether the rendezvous is over. Final.
        reason: why it was closed; empty if the ranks ended on their own.
        result: how the job has ended, for agents; empty if that is not known.
        policy: what a change of membership does.
        formation_size: number of ranks of the last round that formed under `RoundPolicy.GROUP`; nodes that
            take seats later do not change it.
        next_slot: the first slot that no seat has.
        restarts: how often the same nodes had to form a round again.
        epoch: number of the log to which new admissions are appended.
        folded: how many admissions of that log are in the record.
        seats: all seats, in the order of their group ranks once the round is complete.
        waiting: nodes that wait for the next round, in the order of arrival.
        spares: nodes that wait for a free seat, in the order of arrival.
        writer: unique name of the write, by which a node recognizes its own.
        hosted: whether the node of group rank 0 hosts the workers' store; otherwise it outlives all nodes.
        drains: drains of this round, of nodes that are in the record.
        quarantine: nodes in quarantine, in the order of their ids. No node waits for them.
        notice: the newest notice; None if there was none.
        format: version of the text: always written, and read before all else.
    """

    format: Format = dataclasses.field(default_factory=lambda: Format(FORMAT), kw_only=True)
    min_nodes: int
    max_nodes: int
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    version: int = 0
    round: int = 0
    complete: bool = False
    closed: bool = False
    reason: str = ""
    result: str = ""
    policy: RoundPolicy = RoundPolicy.GROUP
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
    drains: tuple[Drain, ...] = ()
    quarantine: tuple[QuarantinedNode, ...] = ()
    notice: Notice | None = None

    @property
    def participants(self) -> tuple[Node, ...]:
        """The nodes that have a seat."""
        return tuple(seat.occupant for seat in self.seats if seat.occupant is not None)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in the record: with a seat, waiting, spare."""
        return (*self.participants, *(waiting.node for waiting in self.waiting), *self.spares)

    @property
    def may_start_over(self) -> bool:
        """Whether the job has ended with exit code 75: its nodes try again."""
        return self.result.startswith("{") and json.loads(self.result).get("exit_code") == 75

    def find(self, node_id: str) -> Node | None:
        """The node with this id, whatever its incarnation; None if it is not in the record."""
        return next((node for node in self.nodes if node.id == node_id), None)

    def seat_of(self, node: Node) -> Seat | None:
        """The node's seat; None if it has none."""
        return next((seat for seat in self.seats if node.is_same(seat.occupant)), None)

    def place_of(self, node: Node) -> NodePlace | None:
        """The node's place; None if it is not in the record."""
        if self.seat_of(node) is not None:
            return NodePlace.SEAT
        if any(node.is_same(waiting.node) for waiting in self.waiting):
            return NodePlace.WAITING
        return NodePlace.SPARE if any(map(node.is_same, self.spares)) else None

    def hosts_workers(self, seat: Seat) -> bool:
        """Whether the node in this seat hosts the workers' store."""
        return self.hosted and seat.group_rank == 0

    @property
    def is_full(self) -> bool:
        """Whether there are ``max_nodes`` participants and waiting nodes."""
        return len(self.participants) + len(self.waiting) >= self.max_nodes


def digest(options: dict[str, str]) -> str:
    """A short text that is the same for the same options."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]


def differences(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """Options that differ between two nodes, for people: ``name is … here, but … there``."""
    names = [name for name in sorted(theirs | ours) if theirs.get(name) != ours.get(name)]
    return [
        f"{name} is {ours.get(name, 'not set')} here, but {theirs.get(name, 'not set')} there"
        for name in names
    ]
