"""What a node does next: an operation names the next action, by the record. Pure.

Time is handed in, by the node's own clock; no time of another host counts. An operation is asked again after
each action and after each change of the record, until it answers `Action.FINISH` or an error.
"""

import dataclasses
import enum
import math

from .record import Node, NodePlace, RendezvousRecord, RoundPolicy


class Action(enum.Enum):
    """What to do next. The names are those of torch's elastic agents, and `TAKE_SEAT`."""

    ADD_TO_PARTICIPANTS = "take part in the round that forms"
    ADD_TO_WAIT_LIST = "wait for the next round"
    ADD_TO_REDUNDANCY_LIST = "wait as a spare"
    REMOVE_FROM_PARTICIPANTS = "leave the round"
    REMOVE_FROM_WAIT_LIST = "stop waiting for the next round"
    REMOVE_FROM_REDUNDANCY_LIST = "stop being a spare"
    MARK_RENDEZVOUS_COMPLETE = "complete the round"
    SYNC = "wait until something changes"
    FINISH = "nothing is left to do"
    ERROR_CLOSED = "the rendezvous is closed"
    ERROR_TIMEOUT = "it took too long"
    TAKE_SEAT = "take a seat in the running job"


#: The actions that take this node out of the record, by where it is.
REMOVAL = {
    NodePlace.SEAT: Action.REMOVE_FROM_PARTICIPANTS,
    NodePlace.WAITING: Action.REMOVE_FROM_WAIT_LIST,
    NodePlace.SPARE: Action.REMOVE_FROM_REDUNDANCY_LIST,
}


@dataclasses.dataclass(frozen=True)
class Announced:
    """This node has appended itself to a log.

    Args:
        epoch: which log.
        number: how many admissions the log had then, by the count. A hint.
        at: when, by this node's clock.
    """

    epoch: int
    number: int
    at: float


@dataclasses.dataclass(frozen=True)
class Context:
    """What an operation looks at.

    Args:
        node: whose next action it is.
        record: the record.
        now: this node's clock, in seconds.
        deadline: when the operation times out.
        leaving: the round that this node was in and leaves; None if it was in none.
        announced: the log that it has appended itself to; None if it has not.
        enough_since: since when it knows of enough nodes for the round; None if it does not.
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
        """Where this node is in the record; None also while it leaves the round that it has its seat in."""
        place = self.record.place_of(self.node)
        if place is NodePlace.SEAT and self.is_leaving:
            return None
        return place

    @property
    def is_leaving(self) -> bool:
        """Whether the round that it leaves is still on."""
        record = self.record
        return record.policy is RoundPolicy.GROUP and record.complete and self.leaving == record.round

    @property
    def is_announced(self) -> bool:
        """Whether it is in the current log."""
        return self.announced is not None and self.announced.epoch == self.record.epoch

    @property
    def pending(self) -> int:
        """How many admissions, up to its own, are in the log and not in the record yet. A hint."""
        if self.announced is None or not self.is_announced or self.place is not None:
            return 0
        return self.announced.number - self.record.folded

    @property
    def has_enough(self) -> bool:
        """Whether there are enough nodes for the round, those of the log counted."""
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
        """When this node takes the log into the record, if no other node has."""
        if self.announced is None or not self.is_announced or self.place is not None:
            return math.inf
        return self.announced.at + self.patience

    @property
    def next_timer(self) -> float:
        """When `join` may answer differently though the record has not changed."""
        deadline = math.inf if self.place is NodePlace.SPARE else self.deadline
        return min(deadline, self.patience_ends, self.last_call_ends if self.has_enough else math.inf)


def join(context: Context) -> Action:
    """Takes part in the next round; under policy ``rank``, in the running one."""
    record = context.record
    place = context.place
    if record.closed:
        return Action.ERROR_CLOSED
    if place is NodePlace.SPARE:
        return Action.SYNC  # for as long as it takes
    if place is NodePlace.SEAT and record.complete:
        return Action.FINISH
    if context.has_enough and context.now >= min(context.last_call_ends, context.deadline):
        return Action.MARK_RENDEZVOUS_COMPLETE
    if context.now >= context.deadline:
        if place is None and not context.is_announced:
            return Action.ERROR_TIMEOUT
        return REMOVAL[place or NodePlace.SEAT]
    if place is not None:
        return Action.SYNC
    return Action.SYNC if context.is_announced and not is_due(context) else _way_in(context)


def _way_in(context: Context) -> Action:
    record = context.record
    if record.policy is RoundPolicy.RANK:
        return Action.TAKE_SEAT
    if not record.complete:
        return Action.ADD_TO_PARTICIPANTS
    if context.is_leaving or not record.is_full:
        return Action.ADD_TO_WAIT_LIST
    return Action.ADD_TO_REDUNDANCY_LIST


def is_due(context: Context) -> bool:
    """Whether it is up to this node to take the log into the record.

    Where many nodes start at once, exactly one of them should. Each knows its number: it is the node that
    makes them enough, or the last one; and any node that has waited too long. A wrong guess costs one more
    write or a little delay.
    """
    record = context.record
    if context.now >= context.patience_ends:
        return True
    if not record.complete:
        return len(record.participants) + context.pending in (record.min_nodes, record.max_nodes)
    if record.policy is RoundPolicy.RANK:
        return context.pending == 1
    # The first one makes the others leave; the rest can wait for the last of them.
    return context.pending == len(record.participants) or (not record.waiting and context.pending == 1)


def succeed(still: float, known_for: float, limit: float) -> Action:
    """Takes the place of the agent that has this node's id, which a scheduler gave both, once it is lost.

    Args:
        still: seconds for which no heartbeat of it has come.
        known_for: seconds since this node has seen it first.
        limit: seconds without a heartbeat after which a node is lost.
    """
    if still >= limit:
        return Action.TAKE_SEAT
    # It may have died since the first look; not if it beats even now.
    return Action.ERROR_TIMEOUT if still == 0.0 and known_for >= 2 * limit else Action.SYNC


def exit_(context: Context) -> Action:
    """Gives up the place that this node has or is about to get."""
    place = context.record.place_of(context.node)
    if place is None and not context.is_announced:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if context.now >= context.deadline else REMOVAL[place or NodePlace.SEAT]


def nodes_waiting(record: RendezvousRecord, node: Node, round_number: int) -> int:
    """How many nodes wait for the next round. If it is not 0, this node has to join again.

    A node that was taken out of its round counts itself.

    Args:
        record: the record.
        node: this node.
        round_number: the round that it joined.
    """
    if record.closed:
        return 0
    waiting = len(record.waiting) if record.complete and record.policy is RoundPolicy.GROUP else 0
    if record.round == round_number and record.complete and record.place_of(node) is NodePlace.SEAT:
        return waiting
    return max(1, waiting)
