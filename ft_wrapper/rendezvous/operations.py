"""What a node does next: each operation looks at the record and says the next action. Pure.

Time is handed in, of the node's own clock; no time of another host is looked at. An operation is asked again
after each action and after each change of the record, until it says `Action.FINISH` or an error.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from .state import GROUP, RANK, SEAT, SPARE, WAITING, Node, State


class Action(enum.Enum):
    """What to do next. The names are those of torch's elastic agents, and `TAKE_SEAT`."""

    KEEP_ALIVE = "say that this node lives"
    ADD_TO_PARTICIPANTS = "take part in the round that forms"
    ADD_TO_WAIT_LIST = "wait for the next round"
    ADD_TO_REDUNDANCY_LIST = "wait as a spare"
    REMOVE_FROM_PARTICIPANTS = "leave the round"
    REMOVE_FROM_WAIT_LIST = "wait no more"
    REMOVE_FROM_REDUNDANCY_LIST = "be no spare any more"
    MARK_RENDEZVOUS_COMPLETE = "complete the round"
    MARK_RENDEZVOUS_CLOSED = "end it all"
    SYNC = "wait until something changes"
    FINISH = "nothing is left to do"
    ERROR_CLOSED = "all is over"
    ERROR_TIMEOUT = "it took too long"
    TAKE_SEAT = "take a seat in the running job"


ADDING = frozenset(
    {
        Action.ADD_TO_PARTICIPANTS,
        Action.ADD_TO_WAIT_LIST,
        Action.ADD_TO_REDUNDANCY_LIST,
        Action.TAKE_SEAT,
    }
)
"""Actions that put this node into the record."""

REMOVING = frozenset(
    {
        Action.REMOVE_FROM_PARTICIPANTS,
        Action.REMOVE_FROM_WAIT_LIST,
        Action.REMOVE_FROM_REDUNDANCY_LIST,
    }
)
"""Actions that take it out."""

_REMOVAL = {
    SEAT: Action.REMOVE_FROM_PARTICIPANTS,
    WAITING: Action.REMOVE_FROM_WAIT_LIST,
    SPARE: Action.REMOVE_FROM_REDUNDANCY_LIST,
}


@dataclasses.dataclass(frozen=True)
class Announced:
    """This node has written itself into a log.

    Args:
        epoch: which log.
        number: how many entries the log had then, by the count. A hint.
        at: when, by this node's clock.
    """

    epoch: int
    number: int
    at: float


@dataclasses.dataclass(frozen=True)
class Context:
    """What an operation looks at.

    Args:
        node: who asks.
        state: the record.
        now: this node's clock, in seconds.
        deadline: when the operation has taken too long.
        leaving: the round that this node was in and leaves; None if it was in none.
        announced: whether it has written itself into a log.
        enough_since: since when it has known of enough nodes for the round; None if it does not.
        last_call: seconds that a round waits for more nodes once there are enough.
        patience: seconds after which an announced node sees to it itself that it gets into the record.
        last_beat: when it last said that it lives; None if never.
        beat_interval: seconds between two such words.
    """

    node: Node
    state: State
    now: float
    deadline: float = math.inf
    leaving: int | None = None
    announced: Announced | None = None
    enough_since: float | None = None
    last_call: float = 0.0
    patience: float = 1.0
    last_beat: float | None = None
    beat_interval: float = 5.0

    @property
    def place(self) -> str | None:
        """Where this node is in the record; None as well for the seat of a round that it leaves."""
        place = self.state.place_of(self.node)
        if place == SEAT and self.is_leaving:
            return None
        return place

    @property
    def is_leaving(self) -> bool:
        """Whether the round that it leaves is still the present one."""
        state = self.state
        return state.policy == GROUP and state.complete and self.leaving == state.round

    @property
    def is_announced(self) -> bool:
        """Whether it is in the log of which the next entries are taken."""
        return self.announced is not None and self.announced.epoch == self.state.epoch

    @property
    def pending(self) -> int:
        """How many entries up to its own are in the log and not yet in the record. A hint."""
        if self.announced is None or not self.is_announced or self.place is not None:
            return 0
        return self.announced.number - self.state.folded

    @property
    def has_enough(self) -> bool:
        """Whether there are enough nodes for the round, those of the log counted."""
        state = self.state
        takes_part = self.place == SEAT or self.is_announced
        return not state.complete and takes_part and len(state.participants) + self.pending >= state.min_nodes

    @property
    def last_call_ends(self) -> float:
        """When this node completes the round."""
        return math.inf if self.enough_since is None else self.enough_since + self.last_call

    @property
    def patience_ends(self) -> float:
        """When this node takes the log into the record, if no one does."""
        if self.announced is None or not self.is_announced or self.place is not None:
            return math.inf
        return self.announced.at + self.patience

    @property
    def next_timer(self) -> float:
        """When the answer to `join` may be another one though the record has not changed."""
        times = (
            math.inf if self.place == SPARE else self.deadline,
            self.last_call_ends if self.has_enough else math.inf,
            self.patience_ends,
        )
        return min(times)


def join(context: Context) -> Action:
    """Takes part in the next round; under `RANK`, in the running one."""
    state = context.state
    place = context.place
    if state.closed:
        return Action.ERROR_CLOSED
    if place == SPARE:
        return Action.SYNC  # for as long as it takes
    if place == SEAT and state.complete:
        return Action.FINISH
    if context.has_enough and context.now >= min(context.last_call_ends, context.deadline):
        return Action.MARK_RENDEZVOUS_COMPLETE
    if context.now >= context.deadline:
        if place is None and not context.is_announced:
            return Action.ERROR_TIMEOUT
        return _REMOVAL[place or SEAT]
    if place is not None:
        return Action.SYNC
    return Action.SYNC if context.is_announced and not is_due(context) else _way_in(context)


def _way_in(context: Context) -> Action:
    state = context.state
    if state.policy == RANK:
        return Action.TAKE_SEAT
    if not state.complete:
        return Action.ADD_TO_PARTICIPANTS
    if context.is_leaving or not state.is_full:
        return Action.ADD_TO_WAIT_LIST
    return Action.ADD_TO_REDUNDANCY_LIST


def is_due(context: Context) -> bool:
    """Whether it is up to this node to take the log into the record.

    Where many come at once exactly one of them should. Each knows its number, so it is the one with which
    there are enough, or which is the last; and any that has waited too long. If it is wrong, nothing but a
    write more or a little delay comes of it.
    """
    state = context.state
    if context.now >= context.patience_ends:
        return True
    if not state.complete:
        size = len(state.participants) + context.pending
        return size in (state.min_nodes, state.max_nodes)
    if state.policy == RANK:
        return context.pending == 1
    # The first one is why the others will leave; the rest can wait for the last of them.
    return context.pending == len(state.participants) or (not state.waiting and context.pending == 1)


def exit_(context: Context) -> Action:
    """Leaves: whatever place this node has, or is about to get."""
    place = context.state.place_of(context.node)
    if place is None and not context.is_announced:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if context.now >= context.deadline else _REMOVAL[place or SEAT]


def keep_alive(context: Context) -> Action:
    """Says that this node lives, once in an interval."""
    due = context.last_beat is None or context.now >= context.last_beat + context.beat_interval
    return Action.KEEP_ALIVE if due else Action.FINISH


def close(context: Context) -> Action:
    """Ends it all."""
    if context.state.closed:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if context.now >= context.deadline else Action.MARK_RENDEZVOUS_CLOSED


def nodes_waiting(state: State, node: Node, round_number: int) -> int:
    """How many nodes wait for the next round, as an agent wants to know it: not 0, and it has to come again.

    A node that was taken out of the round that it believes to be in counts itself.

    Args:
        state: the record.
        node: who asks.
        round_number: the round that it was given.
    """
    if state.closed:
        return 0
    waiting = len(state.waiting) if state.complete and state.policy == GROUP else 0
    if state.round == round_number and state.complete and state.place_of(node) == SEAT:
        return waiting
    return max(1, waiting)
