"""What a node does next, in each situation."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ft_wrapper.rendezvous.moves import adopt_rank_policy, complete_round, fold, remove_nodes
from ft_wrapper.rendezvous.moves import close as closed
from ft_wrapper.rendezvous.operations import (
    Action,
    Announced,
    Context,
    exit_,
    is_due,
    join,
    nodes_waiting,
)
from ft_wrapper.rendezvous.record import Admission, Node, RendezvousRecord, digest

ME = Node("me")
A, B, C = Node("a"), Node("b"), Node("c")


def record(low: int, high: int, *nodes: Node) -> RendezvousRecord:
    state = RendezvousRecord(low, high)
    return fold(state, [Admission(node, None, digest({})) for node in nodes])


def context(state: RendezvousRecord, **more: object) -> Context:
    return Context(ME, state, now=10.0, deadline=100.0, last_call=5.0, **more)  # type: ignore[arg-type]


def announced(state: RendezvousRecord, number: int, at: float = 10.0) -> Announced:
    return Announced(state.epoch, number, at)


ONE = complete_round(record(1, 2, A))
TWO = record(2, 2, A, B)
MINE = record(2, 2, A, ME)


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (record(2, 3, A), Action.ASK),
        (ONE, Action.ASK),
        (TWO, Action.ASK),
        (adopt_rank_policy(TWO), Action.ASK),
        (MINE, Action.FINISH),
        (record(2, 3, ME), Action.SYNC),
        (record(2, 2, A, B, ME), Action.SYNC),
        (closed(TWO), Action.ERROR_CLOSED),
    ],
)
def test_join(state: RendezvousRecord, action: Action) -> None:
    assert join(context(state)) is action


def test_who_leaves_a_round_waits_for_the_next_unless_the_round_goes_on() -> None:
    assert join(context(MINE, leaving=0)) is Action.ASK
    assert join(context(MINE, leaving=5)) is Action.FINISH
    assert join(context(adopt_rank_policy(MINE), leaving=0)) is Action.FINISH


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (record(2, 3, A), Action.ERROR_TIMEOUT),
        (record(2, 3, ME), Action.LEAVE),
        (record(2, 3, A, ME), Action.COMPLETE),
        (fold(ONE, [Admission(ME, None, digest({}))]), Action.LEAVE),
        (record(2, 2, A, B, ME), Action.SYNC),
    ],
)
def test_join_too_late(state: RendezvousRecord, action: Action) -> None:
    enough = 100.0 if len(state.participants) >= 2 else None
    late = dataclasses.replace(context(state), now=100.0, enough_since=enough)
    assert join(late) is action


def test_own_last_call() -> None:
    state = record(1, 3, ME)
    assert join(context(state, enough_since=5.1)) is Action.SYNC
    assert join(context(state, enough_since=5.0)) is Action.COMPLETE
    assert context(state, enough_since=5.1).next_timer == pytest.approx(10.1)
    assert context(state).next_timer == 100.0
    assert context(record(1, 1, A, ME)).next_timer == math.inf, "a spare waits for as long as it takes"


def test_exactly_one_of_many_takes_the_log() -> None:
    """A hundred at once: the one with which there are enough, and the last one."""
    state = RendezvousRecord(40, 100)
    due = [n for n in range(1, 101) if is_due(context(state, announced=announced(state, n)))]
    assert due == [40, 100]
    due = [n for n in range(1, 101) if is_due(context(ONE, announced=announced(ONE, n)))]
    assert due == [1]
    seated = adopt_rank_policy(ONE)
    due = [n for n in range(1, 101) if is_due(context(seated, announced=announced(seated, n)))]
    assert due == [1]


def test_who_waits_too_long_takes_the_log() -> None:
    state = RendezvousRecord(40, 100)
    assert not is_due(context(state, announced=announced(state, 7, at=9.1)))
    assert is_due(context(state, announced=announced(state, 7, at=9.0)))
    assert join(context(state, announced=announced(state, 7, at=9.1))) is Action.SYNC
    assert join(context(state, announced=announced(state, 7, at=9.0))) is Action.ASK


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (MINE, Action.LEAVE),
        (fold(ONE, [Admission(ME, None, digest({}))]), Action.LEAVE),
        (record(2, 2, A, B, ME), Action.LEAVE),
        (TWO, Action.FINISH),
    ],
)
def test_exit(state: RendezvousRecord, action: Action) -> None:
    assert exit_(context(state)) is action
    late = Action.FINISH if action is Action.FINISH else Action.ERROR_TIMEOUT
    assert exit_(dataclasses.replace(context(state), now=100.0)) is late


def test_exit_of_one_who_is_in_the_log_only() -> None:
    assert exit_(context(TWO, announced=announced(TWO, 1))) is Action.LEAVE


def test_nodes_waiting() -> None:
    waiting = fold(complete_round(record(1, 3, ME)), [Admission(A, None, digest({}))])
    assert nodes_waiting(waiting, ME, 0) == 1
    assert nodes_waiting(MINE, ME, 0) == 0
    assert nodes_waiting(remove_nodes(MINE, [ME])[0], ME, 0) == 1, "it was taken out: it has to come again"
    assert nodes_waiting(closed(waiting), ME, 0) == 0
    assert nodes_waiting(adopt_rank_policy(waiting), ME, 0) == 0
