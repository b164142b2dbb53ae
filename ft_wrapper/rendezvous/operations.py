"""What a node does next: an operation derives the next action from the record. Pure.

Times are arguments, by the node's own clock; other hosts' clocks do not count. An operation is called again
after each action and each change of the record, until it returns `Action.FINISH` or an error.
"""

import dataclasses
import enum
import math

from .record import Node, NodePlace, RendezvousRecord, RoundPolicy


class Action(enum.Enum):
    """What to do next."""

    ASK = "ask for a place"
    LEAVE = "give up the place"
    COMPLETE = "complete the round"
    SYNC = "wait until something changes"
    FINISH = "nothing is left to do"
    ERROR_CLOSED = "the rendezvous is closed"
    ERROR_TIMEOUT = "it took too long"


@dataclasses.dataclass(frozen=True)
class Announced:
    """This node has appended an admission to a log.

    Args:
        epoch: number of the log.
        number: count of the log's admissions with this one. A hint.
        at: time of the append, by this node's clock.
    """

    epoch: int
    number: int
    at: float


@dataclasses.dataclass(frozen=True)
class Context:
    """The input of an operation.

    Args:
        node: this node.
        record: the record.
        now: this node's clock, in seconds.
        deadline: when the operation times out, by this node's clock.
        leaving: the round that this node leaves; None if it was in none.
        announced: this node's admission in a log; None if it has appended none.
        enough_since: since when this node has known of enough nodes for the round; None if it knows too few.
        last_call: seconds that a round waits for more nodes once there are enough.
        patience: seconds after which an announced node takes the log into the record itself.
    """

    node: Node
    record: RendezvousRecord
    now: float
    deadline: float = math.inf
    leaving: int | None = None
    announced: Announced | None = None
    enough_since: float | None = None
    last_call: float = 0.0
    patience: float = 1.0

    @property
    def place(self) -> NodePlace | None:
        """This node's place in the record; None also while it leaves the round in which it has a seat."""
        place = self.record.place_of(self.node)
        if place is NodePlace.SEAT and self.is_leaving:
            return None
        return place

    @property
    def is_leaving(self) -> bool:
        """Whether the round that this node leaves is still the current one."""
        record = self.record
        return record.policy is RoundPolicy.GROUP and record.complete and self.leaving == record.round

    @property
    def is_announced(self) -> bool:
        """Whether this node's admission is in the current log."""
        return self.announced is not None and self.announced.epoch == self.record.epoch

    @property
    def pending(self) -> int:
        """How many admissions, up to this node's, are in the log but not in the record yet. A hint."""
        if self.announced is None or not self.is_announced or self.place is not None:
            return 0
        return self.announced.number - self.record.folded

    @property
    def has_enough(self) -> bool:
        """Whether there are enough nodes for the round, with those of the log."""
        record = self.record
        takes_part = self.place is NodePlace.SEAT or self.is_announced
        known = len(record.participants) + self.pending
        return not record.complete and takes_part and known >= record.min_nodes

    @property
    def last_call_ends(self) -> float:
        """When this node completes the round."""
        return math.inf if self.enough_since is None else self.enough_since + self.last_call

    @property
    def patience_ends(self) -> float:
        """When this node takes the log into the record, unless another node has."""
        if self.announced is None or not self.is_announced or self.place is not None:
            return math.inf
        return self.announced.at + self.patience

    @property
    def next_timer(self) -> float:
        """When `join` may return another action though the record has not changed."""
        deadline = math.inf if self.place is NodePlace.SPARE else self.deadline
        return min(deadline, self.patience_ends, self.last_call_ends if self.has_enough else math.inf)


def join(context: Context) -> Action:
    """Takes part in the next round, or in the running one under policy ``rank``."""
    record = context.record
    place = context.place
    if record.closed:
        return Action.ERROR_CLOSED
    if place is NodePlace.SPARE:
        return Action.SYNC  # for as long as it takes
    if place is NodePlace.SEAT and record.complete:
        return Action.FINISH
    if context.has_enough and context.now >= min(context.last_call_ends, context.deadline):
        return Action.COMPLETE
    if context.now >= context.deadline:
        if place is None and not context.is_announced:
            return Action.ERROR_TIMEOUT
        return Action.LEAVE
    if place is not None:
        return Action.SYNC
    return Action.SYNC if context.is_announced and not is_due(context) else Action.ASK


def is_due(context: Context) -> bool:
    """Whether this node should take the log into the record.

    If many nodes start at once, exactly one of them should. Each node knows its number: the node that makes
    up the minimum, or the last one, takes the log; so does any node that has waited too long. A wrong guess
    costs one more write or a little delay.
    """
    record = context.record
    if context.now >= context.patience_ends:
        return True
    if not record.complete:
        return len(record.participants) + context.pending in (record.min_nodes, record.max_nodes)
    if record.policy is RoundPolicy.RANK:
        return context.pending == 1
    # The first admission makes the other nodes leave the round; the rest can be taken with the last one.
    return context.pending == len(record.participants) or (not record.waiting and context.pending == 1)


def exit_(context: Context) -> Action:
    """Gives up the place that this node has, or is about to get."""
    place = context.record.place_of(context.node)
    if place is None and not context.is_announced:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if context.now >= context.deadline else Action.LEAVE


def nodes_waiting(record: RendezvousRecord, node: Node, round_number: int) -> int:
    """How many nodes wait for the next round. If any do, this node has to join again.

    A node that was evicted from its round counts itself.

    Args:
        record: the record.
        node: this node.
        round_number: the round that this node joined.
    """
    if record.closed:
        return 0
    waiting = len(record.waiting) if record.complete and record.policy is RoundPolicy.GROUP else 0
    if record.round == round_number and record.complete and record.place_of(node) is NodePlace.SEAT:
        return waiting
    return max(1, waiting)
