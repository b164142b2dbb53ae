"""Which ranks a drain is about, and when it is refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from test_record import begun, come, node

from ft_wrapper.agent.ft_nodes import give_once
from ft_wrapper.protocol.notice import Notice
from ft_wrapper.rendezvous import drains
from ft_wrapper.rendezvous.moves import adopt_rank_policy, close, complete_round, give_notice, remove_nodes
from ft_wrapper.rendezvous.record import Drain, RendezvousRecord


def formed(*names: str, nproc: int = 2, high: int | None = None) -> RendezvousRecord:
    """A job on so many nodes, of two ranks each; those beyond ``high`` are spares."""
    nodes = [node(name, nproc=nproc) for name in names]
    return adopt_rank_policy(complete_round(come(RendezvousRecord(1, high or len(nodes)), *nodes)))


def drain(node_name: str, *slots: int) -> Drain:
    return Drain(node_name, slots, 30.0, "why")


def refusal(record: RendezvousRecord, asked: Drain, slots: Collection[int], least: int) -> str:
    """Why a drain is refused; empty if it is not."""
    try:
        drains.request(record, asked, slots, least)
    except drains.Refused as error:
        return str(error)
    return ""


def test_a_record_with_drains_is_read_as_it_was_written() -> None:
    state = drains.request(
        drains.request(formed("a", "b", "c"), drain("b:0"), range(6), 1), drain("c:0", 4), range(6), 1
    )
    assert state.drains == (drain("b:0"), drain("c:0", 4))
    assert RendezvousRecord.from_json(state.to_json(), "key") == state


def test_the_same_drain_is_there_once_and_goes_with_its_node() -> None:
    state = drains.request(formed("a", "b"), drain("b:0"), range(4), 1)
    assert drains.request(state, drain("b:0"), range(4), 1) == state
    assert remove_nodes(state, [node("b", nproc=2)])[0].drains == ()


def test_a_node_that_is_drained_is_so_in_the_next_round_too() -> None:
    """Another node is lost while it leaves: in the next round it would stay, until its machine is taken."""
    a, b, c = (node(name, nproc=2) for name in "abc")
    state = replace(begun(a, b, c), drains=(drain("b:0"), drain("c:0", 4)))
    state = come(remove_nodes(state, [a])[0], b, c, leaves=state.round)
    assert (state.round, state.drains) == (1, (drain("b:0"),)), "slot 4 is another rank now"


def test_of_two_drains_the_one_that_leaves_less_time_counts() -> None:
    """A cloud's notice of 25 s comes behind a drain that had ten minutes."""
    long, short = replace(drain("b:0"), within=600.0), replace(drain("b:0"), within=25.0)
    state = drains.request(formed("a", "b"), long, range(4), 1)
    state = drains.request(state, short, range(4), 1)
    assert state.drains == (short,)
    assert drains.request(state, long, range(4), 1).drains == (short,)


def test_nodes_and_slots_are_found() -> None:
    state = formed("a", "3")
    assert drains.find(state, "a", 30.0, "why") == drain("a:0")
    assert drains.find(state, "2", 30.0, "why") == drain("3:0", 2)
    assert drains.find(state, "3", 30.0, "why") == drain("3:0"), "a node goes before a slot"
    assert drains.find(state, "slot:3", 30.0, "why") == drain("3:0", 3)
    assert drains.find(state, "node:3", 30.0, "why") == drain("3:0")
    for wrong in ("b", "4", "node:a2", "slot:a", "slot:4", ""):
        with pytest.raises(ValueError, match=r"there is no node or slot .*; nodes: a, 3; slots: 0 to 3"):
            drains.find(state, wrong, 30.0)


def test_a_spare_node_has_no_ranks() -> None:
    with pytest.raises(ValueError, match="node c has no ranks: it waits for a seat"):
        drains.find(formed("a", "b", "c", high=2), "c", 30.0)


def test_a_lost_nodes_slots_are_not_found() -> None:
    state, _ = remove_nodes(formed("a", "b"), [node("b", nproc=2)])
    with pytest.raises(ValueError, match="no node or slot '2'"):
        drains.find(state, "2", 30.0)


@pytest.mark.parametrize(
    ("asked", "living", "least", "why"),
    [
        (drain("b:0"), range(4), 2, ""),
        (drain("b:0"), range(4), 3, "2 ranks would be left, fewer than min_world_size=3"),
        (drain("b:0", 2), range(4), 3, ""),
        (drain("b:0", 2), (0, 2, 3), 3, "2 ranks would be left, fewer than min_world_size=3"),
        (drain("b:0"), (2, 3), 1, "0 ranks would be left, fewer than min_world_size=1"),
        (drain("b:0", 2), (), 1, "no wrapped job has formed yet: only whole nodes can be drained"),
    ],
)
def test_too_few_that_would_be_left(asked: Drain, living: range, least: int, why: str) -> None:
    assert refusal(formed("a", "b"), asked, living, least) == why


def test_two_drains_count_together() -> None:
    state = drains.request(formed("a", "b", "c"), drain("b:0"), range(6), 3)
    assert refusal(state, drain("c:0", 4), range(6), 3) == ""
    with pytest.raises(ValueError, match="2 ranks would be left"):
        drains.request(state, drain("c:0"), range(6), 3)


def test_a_spare_node_that_fits_counts() -> None:
    state = formed("a", "b", "c", high=2)
    assert refusal(state, drain("b:0"), range(4), 4) == ""
    assert refusal(state, drain("b:0", 2), range(4), 4), "the node stays, and so does its seat"
    two = drains.request(state, drain("b:0"), range(4), 2)
    assert refusal(two, drain("a:0"), range(4), 4), "one spare node takes one seat"
    other = replace(state, spares=(node("c", nproc=3),))
    assert refusal(other, drain("b:0"), range(4), 4)


def test_before_a_job_has_formed_nodes_count() -> None:
    state = begun(node("a"), node("b"), low=1)
    assert refusal(state, drain("b:0"), (), 0) == ""
    state = begun(node("a"), node("b"), low=2)
    assert refusal(state, drain("b:0"), (), 0) == "1 node would be left, fewer than --nnodes=2"


def test_nothing_is_drained_once_the_job_is_over() -> None:
    assert refusal(close(formed("a", "b")), drain("b:0"), range(4), 1) == "the job is over"


# Notices --------------------------------------------------------------------------------------------------


def sigterm(name: str, number: str) -> Notice:
    return Notice(f"node {name}", "SIGTERM", 30.0, number, leaving=(f"{name}:0",))


def test_a_record_with_a_notice_is_read_as_it_was_written() -> None:
    state = give_notice(formed("a", "b"), sigterm("a", "1"))
    assert state.notice is not None and RendezvousRecord.from_json(state.to_json(), "key") == state


def test_nodes_that_get_sigterm_together_share_a_notice_and_none_is_drained() -> None:
    state = formed("a", "b", "c")
    for number, name in enumerate("ab"):
        state = give_notice(state, sigterm(name, str(number)))
    assert state.notice is not None and (state.notice.id, state.notice.ends) == ("0", False), "one checkpoint"
    assert state.notice.leaving == ("a:0", "b:0")
    assert refusal(state, drain("c:0"), range(6), 1)
    ends = give_notice(state, replace(sigterm("c", "3"), ends=True))
    assert ends.notice is not None and (ends.notice.id, ends.notice.ends) == ("3 ends", True), "saved again"
    assert give_notice(ends, Notice("node a", "SIGUSR1", None, "4")) == ends, "the job ends"


def test_a_signal_that_all_nodes_get_at_once_is_one_notice() -> None:
    first, second = Notice("node a", "SIGUSR1", None, "1"), Notice("node b", "SIGUSR1", None, "2")
    state = give_once(formed("a", "b"), first, None)
    assert state.notice == first and give_once(state, second, None) == state, "b asked before it knew of it"
    assert give_once(state, second, first).notice == second, "later: all ranks save once more"
    other = replace(second, why="maintenance")
    assert give_once(state, other, None).notice == other
    leaving = give_once(state, replace(second, leaving=("b:0",)), None)
    assert leaving.notice is not None and leaving.notice.leaving == ("b:0",)


def test_the_job_ends_if_all_nodes_that_are_left_are_about_to_leave() -> None:
    """Two of three drain, since the third one goes on; then that one is lost, or is about to leave, too."""
    state = give_notice(replace(formed("a", "b", "c"), hosted=False), sigterm("a", "1"))
    state = give_notice(state, sigterm("b", "2"))
    lost = remove_nodes(state, [node("c", nproc=2)])[0]
    later = give_notice(state, Notice("", "SIGTERM", leaving=("c:0",)))
    for record in (lost, later):
        assert record.notice is not None and record.notice.ends and record.notice.id != "1", "saved again"
        assert record.notice.seconds == 30.0
    two = remove_nodes(state, [node("a", nproc=2)])[0]
    assert two.notice is not None and not two.notice.ends, "c goes on"
    none = remove_nodes(two, [node("b", nproc=2), node("c", nproc=2)])[0]
    assert none.notice is not None and not none.notice.ends, "nodes that come later go on"
    spare = give_notice(formed("a", "b", high=1), sigterm("a", "1"))
    assert spare.notice is not None and not spare.notice.ends, "a spare node takes its seat"


def test_a_node_that_leaves_while_enough_stay_is_drained() -> None:
    state = formed("a", "b", "c", "d")
    for number, name in enumerate("ab"):
        state = give_notice(
            state, Notice(f"node {name}", "SIGTERM", 30.0, str(number), leaving=(f"{name}:0",))
        )
    assert not refusal(state, drain("a:0"), range(8), 4)
    assert refusal(state, drain("a:0"), range(8), 5), "b leaves, too"
    state = remove_nodes(state, [node("a", nproc=2), node("b", nproc=2)])[0]
    state = give_notice(state, Notice("node c", "SIGTERM", 30.0, "2", leaving=("c:0",)))
    assert state.notice is not None and (state.notice.id, state.notice.leaving) == ("2", ("c:0",)), (
        "another one"
    )
