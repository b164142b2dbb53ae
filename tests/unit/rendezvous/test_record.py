"""The record and what changes it: rules by example, and for whatever happens in whatever order."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_nodes import check_change, check_record

from ft_wrapper.exception import StoreError
from ft_wrapper.rendezvous.moves import (
    MOST_ADMISSIONS,
    adopt_rank_policy,
    close,
    complete_round,
    fold,
    normalize,
    remove_nodes,
)
from ft_wrapper.rendezvous.record import Admission, Node, RendezvousRecord, RoundPolicy, digest


def node(node_id: int | str, incarnation: int = 0, nproc: int = 1, role: str = "default") -> Node:
    return Node(str(node_id), incarnation, "", nproc, role)


def come(state: RendezvousRecord, *nodes: Node, leaves: int | None = None) -> RendezvousRecord:
    """The nodes are in the log, and it is taken into the record."""
    old = [Admission(node("old"))] * state.folded
    return fold(state, [*old, *(Admission(one, leaves, digest(state.options)) for one in nodes)])


def begun(*nodes: Node, low: int = 1, high: int | None = None) -> RendezvousRecord:
    """A complete round."""
    return complete_round(come(RendezvousRecord(low, high or len(nodes)), *nodes))


def ranks(state: RendezvousRecord) -> dict[str, int | None]:
    return {seat.occupant.id: seat.group_rank for seat in state.seats if seat.occupant}


def ids(nodes: tuple[Node, ...]) -> list[str]:
    return [one.id for one in nodes]


# Rounds --------------------------------------------------------------------------------------------------


def test_complete_at_most_at_once_and_not_before() -> None:
    state = come(RendezvousRecord(1, 3), node("a"), node("b"))
    assert not state.complete
    state = come(state, node("c"))
    assert state.complete
    assert (state.formation_size, state.next_slot) == (3, 3)


def test_complete_with_enough_only() -> None:
    assert not complete_round(come(RendezvousRecord(2, 3), node("a"))).complete
    assert complete_round(come(RendezvousRecord(2, 3), node("a"), node("b"))).complete


def test_numbered_nodes_have_their_rank_others_the_order_of_coming() -> None:
    assert ranks(begun(node(10), node(9), node(2))) == {"2": 0, "9": 1, "10": 2}
    assert ranks(begun(node("z"), node("a"))) == {"z": 0, "a": 1}


def test_slots_follow_each_other() -> None:
    state = begun(node(0, nproc=4), node(1, nproc=2))
    assert [(seat.base_slot, seat.nproc) for seat in state.seats] == [(0, 4), (4, 2)]
    assert state.formation_size == 6


def test_one_too_many_is_a_spare() -> None:
    state = come(RendezvousRecord(1, 2), *map(node, range(3)))
    assert (ids(state.participants), ids(state.spares)) == (["0", "1"], ["2"])


def test_late_node_waits_and_does_not_come_into_the_group() -> None:
    state = come(begun(node("a"), high=2), node("b"))
    assert ids(state.participants) == ["a"]
    assert [waiting.node.id for waiting in state.waiting] == ["b"]


def test_next_round_begins_when_all_have_left_and_stayers_keep_their_ranks() -> None:
    state = come(begun(node("a"), node("b"), node("c"), high=4), node("d"))
    for leaver in "cb":
        state = come(state, node(leaver), leaves=0)
        assert state.round == 0
    state = come(state, node("a"), leaves=0)
    assert (state.round, state.complete) == (1, True)
    assert ranks(state) == {"a": 0, "b": 1, "c": 2, "d": 3}


def test_rank_beyond_the_new_size_becomes_the_lowest_gap() -> None:
    state = begun(*map(node, "abc"))
    state, lost = remove_nodes(state, [node("b")])
    assert [(seat.group_rank, seat.base_slot) for seat in lost] == [(1, 1)]
    for leaver in "ca":
        state = come(state, node(leaver), leaves=0)
    assert ranks(complete_round(state)) == {"a": 0, "c": 1}


def test_spare_moves_up_with_the_next_round() -> None:
    state = come(begun(node("a"), node("b")), node("s"))
    state, _ = remove_nodes(state, [node("b")])
    assert [waiting.node.id for waiting in state.waiting] == ["s"]
    state = come(state, node("a"), leaves=0)
    assert ranks(state) == {"a": 0, "s": 1}


def test_entry_of_an_earlier_round_takes_nobody_out() -> None:
    state = begun(node("a"), node("b"))
    for _ in range(2):
        for leaver in "ab":
            state = come(state, node(leaver), leaves=state.round)
    assert state.round == 2
    assert come(state, node("a"), leaves=0).seats == state.seats


def test_newer_incarnation_supersedes_older_does_not() -> None:
    state = come(RendezvousRecord(1, 3), node("a"), node("b"))
    state = come(state, node("a", 1))
    assert [one.name for one in state.participants] == ["a:1", "b:0"]
    assert [one.name for one in come(state, node("a", 0)).participants] == ["a:1", "b:0"]


def test_other_options_do_not_come_in() -> None:
    state = RendezvousRecord(1, 2, {"nnodes": "1:2"})
    assert fold(state, [Admission(node("a"), None, digest({"nnodes": "1:3"}))]).participants == ()


def test_closed_is_final() -> None:
    state = close(come(begun(node("a"), high=3), node("b")))
    assert come(state, node("c")) == state
    assert adopt_rank_policy(state) == state
    assert remove_nodes(state, [node("a"), node("b")])[0].closed


def test_long_log_begins_anew() -> None:
    state = fold(begun(node("a")), [Admission(node("x"), None, "other")] * MOST_ADMISSIONS)
    assert (state.epoch, state.folded) == (2, 0)


# Restarts ------------------------------------------------------------------------------------------------


def test_same_nodes_again_are_one_restart() -> None:
    state = begun(node("a"), node("b"))
    for leaver in "ab":
        state = come(state, node(leaver), leaves=0)
    assert (state.round, state.restarts) == (1, 1)


def test_leaving_and_coming_back_counts() -> None:
    state, _ = remove_nodes(begun(node("a"), node("b")), [node("b")])
    assert come(state, node("b", 1)).restarts == 1
    assert come(begun(node("a"), node("b")), node("b", 1)).restarts == 1


def test_where_the_others_go_on_nothing_is_restarted() -> None:
    state, _ = remove_nodes(adopt_rank_policy(begun(node("a"), node("b"))), [node("b")])
    assert come(state, node("b", 1)).restarts == 0


def test_change_of_membership_does_not_count() -> None:
    grown = come(begun(node("a"), high=2), node("b"))
    assert come(grown, node("a"), leaves=0).restarts == 0
    shrunk, _ = remove_nodes(begun(node("a"), node("b"), high=2), [node("b")])
    assert come(shrunk, node("a"), leaves=0).restarts == 0


# Policy rank ---------------------------------------------------------------------------------------------


def test_policy_moves_in_a_round_that_nobody_has_begun_to_leave() -> None:
    state = begun(node("a"), node("b"))
    assert adopt_rank_policy(state).policy is RoundPolicy.RANK
    assert adopt_rank_policy(come(state, node("a"), leaves=0)).policy is RoundPolicy.GROUP
    assert adopt_rank_policy(RendezvousRecord(1, 2)).policy is RoundPolicy.GROUP


def test_those_who_waited_are_seated_when_the_policy_moves() -> None:
    state = adopt_rank_policy(come(begun(node("a"), high=2), node("b")))
    assert (ranks(state), state.round) == ({"a": 0, "b": 1}, 0)


def test_seat_order_old_seat_then_one_that_fits_then_a_new_one_then_spare() -> None:
    state = adopt_rank_policy(begun(node("a"), node("b"), node("c"), high=4))
    state, _ = remove_nodes(state, [node("b"), node("c")])
    state = come(state, node("c", 1))
    assert ranks(state) == {"a": 0, "c": 2}, "its old seat"
    state = come(state, node("x"))
    assert ranks(state)["x"] == 1, "an empty one"
    state = come(state, node("y", nproc=2))
    assert ranks(state)["y"] == 3, "a new one"
    assert (state.next_slot, state.formation_size) == (5, 3)
    assert ids(come(state, node("z")).spares) == ["z"]


def test_other_size_or_role_does_not_fit() -> None:
    state = adopt_rank_policy(begun(node("a"), node("b"), high=3))
    state, _ = remove_nodes(state, [node("b")])
    assert ranks(come(state, node("x", nproc=2)))["x"] == 2
    assert ranks(come(state, node("x", role="reader")))["x"] == 2
    assert ranks(come(state, node("b", 1, nproc=2)))["b"] == 2


def test_lost_seat_goes_to_the_first_spare_that_fits_in_the_same_change() -> None:
    state = adopt_rank_policy(begun(node("a"), node("b")))
    state = come(state, node("big", nproc=8), node("s"), node("t"))
    state, lost = remove_nodes(state, [node("b")])
    assert (ranks(state), ids(state.spares)) == ({"a": 0, "s": 1}, ["big", "t"])
    assert [seat.occupant for seat in lost] == [node("b")]


def test_with_the_store_of_the_workers_the_policy_is_lost() -> None:
    state = adopt_rank_policy(begun(node("a"), node("b"), node("c")))
    lost, _ = remove_nodes(state, [node("a")])
    again = come(state, node("a", 1))
    for shrunk in (lost, again):
        assert (shrunk.policy, shrunk.round, shrunk.complete) == (RoundPolicy.GROUP, 0, True)
        assert ranks(shrunk) == {"b": 1, "c": 2}
        assert adopt_rank_policy(shrunk) == shrunk, "its seat is empty"
        assert come(shrunk, node("b"), node("c"), leaves=0).round == 1
    assert ids(tuple(waiting.node for waiting in again.waiting)) == ["a"]
    assert again.restarts == 0, "the policy was rank"
    alone = remove_nodes(adopt_rank_policy(begun(node("a"))), [node("a")])[0]
    assert (alone.policy, alone.round, alone.complete) == (RoundPolicy.GROUP, 1, False)


# Text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("garbage", "garbage"),
        ("[]", "not a rendezvousrecord"),
        ("{}", "min_nodes"),
        ('{"min_nodes": 1, "seats": [[1]], "format": 99}', "another version of ft_wrapper wrote it"),
        ('{"min_nodes": 1, "max_nodes": 1, "seats": 3}', "3 is no"),
    ],
)
def test_garbage_is_an_error_that_shows_it(text: str, why: str) -> None:
    with pytest.raises(StoreError, match=f"'key'.*{why}"):
        RendezvousRecord.from_json(text, "key")


# Whatever happens ----------------------------------------------------------------------------------------

node_ids = st.integers(0, 4)
steps = st.one_of(
    st.tuples(st.just("come"), node_ids, st.integers(0, 1), st.integers(1, 2)),
    st.tuples(st.just("leave for the next"), node_ids),
    st.tuples(st.just("lost"), node_ids),
    st.tuples(st.sampled_from(["complete", "rank policy", "close", "normalize"])),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 4), st.integers(0, 3), st.lists(steps, max_size=25))
def test_whatever_happens(low: int, more: int, script: list[tuple]) -> None:
    state = RendezvousRecord(low, low + more)
    for what, *args in script:
        before = state
        known = state.find(str(args[0])) if args else None
        if what == "come":
            state = come(state, node(args[0], (known.incarnation if known else 0) + args[1], args[2]))
        elif what == "leave for the next" and known is not None:
            state = come(state, known, leaves=state.round)
        elif what == "lost" and known is not None:
            state, _ = remove_nodes(state, [known])
        elif what == "complete":
            state = complete_round(state)
        elif what == "rank policy":
            state = adopt_rank_policy(state)
        elif what == "close" and len(script) > 20:
            state = close(state)
        state = dataclasses.replace(state, version=before.version + 1)
        check_record(state)
        check_change(before, state)
        assert normalize(state) == state, "not all was moved"
        assert RendezvousRecord.from_json(state.to_json(), "key") == state
