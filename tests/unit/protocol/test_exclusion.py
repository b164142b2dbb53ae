"""Who is left out because of too many faults; pure."""

from __future__ import annotations

import dataclasses

from ft_wrapper.attribution import Interruption
from ft_wrapper.protocol.history import culprit_of, judge, why_out
from ft_wrapper.protocol.records import Blamed, Decision, Fault, Member, View

NOW = 1000.0
MEMBERS = tuple(Member(slot, 0) for slot in range(4))
HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
DIED, RAISED = Interruption.TERMINATED, Interruption.EXCEPTION


def fault(slot: int, kind: Interruption = DIED, at: float = 1000.0, host: str | None = None) -> Fault:
    return Fault(Member(slot, 0), slot, kind, "died", HOSTS[slot] if host is None else host, 7, at)


def host_of(member: Member) -> str:
    return HOSTS[member.slot]


def view(*blamed: tuple[int, float], least: int = 1) -> View:
    there = tuple(Blamed(slot, HOSTS[slot], at) for slot, at in blamed)
    return View(dataclasses.replace(decision(*there), n=9, min_world_size=least), "nonce", MEMBERS)


def changed(view: View, **fields: object) -> View:
    return dataclasses.replace(view, decision=dataclasses.replace(view.decision, **fields))


def decision(*blamed: Blamed) -> Decision:
    return Decision(0, 10, 0, (), (), (), (), (), 4, 1, max_faults=3, fault_window=100.0, blamed=blamed)


def test_the_likeliest_cause_is_blamed_and_one_that_left_in_order_is_not() -> None:
    assert culprit_of([fault(0, RAISED), fault(2), fault(1)]) == fault(2)
    assert culprit_of([fault(3, RAISED), fault(1, RAISED)]) == fault(3, RAISED)
    assert culprit_of([fault(0, RAISED), fault(1, Interruption.BASE_EXCEPTION)]) is None
    assert culprit_of([]) is None


def test_the_third_fault_of_a_slot_excludes_it() -> None:
    verdict = judge(view((2, 950.0), (0, 960.0), (2, 970.0)), [fault(2)], MEMBERS, (), host_of, NOW)
    assert (verdict.out, verdict.slot) == ({MEMBERS[2]}, 2)
    assert verdict.words == "slot 2 on b is excluded, after 3 faults within 100 s (max_faults=3)"
    assert verdict.blamed[-1] == Blamed(2, "b", 1000.0)


def test_faults_before_the_window_do_not_count_and_are_forgotten() -> None:
    verdict = judge(view((2, 899.0), (2, 900.0)), [fault(2)], MEMBERS, (), host_of, NOW)
    assert (verdict.out, verdict.words) == (frozenset(), "")
    assert [one.at for one in verdict.blamed] == [900.0, 1000.0]


def test_a_slot_that_was_on_another_host_begins_anew() -> None:
    verdict = judge(view((2, 950.0), (2, 970.0)), [fault(2, host="c")], MEMBERS, (), host_of, NOW)
    assert verdict.words == ""


def test_faults_of_several_slots_exclude_their_host() -> None:
    verdict = judge(view((2, 950.0), (3, 970.0)), [fault(2)], MEMBERS, (), host_of, NOW)
    assert verdict.out == set(MEMBERS[2:])
    assert verdict.words.startswith("host b is excluded, after 3 faults")


def test_one_stays_without_whom_too_few_would_be_left() -> None:
    before = view((2, 950.0), (2, 970.0), least=4)
    verdict = judge(before, [fault(2)], MEMBERS, (), host_of, NOW)
    assert (verdict.out, verdict.slot) == (frozenset(), None)
    assert verdict.words.startswith("slot 2 on b stays, after 3 faults within 100 s")
    assert verdict.words.endswith("; without it 3 of min_world_size=4 ranks would be left")


def test_a_slots_own_next_process_does_not_make_up_for_it() -> None:
    before = view((2, 950.0), (2, 970.0), least=4)
    kept = (MEMBERS[0], MEMBERS[1], MEMBERS[3])
    assert "stays" in judge(before, [fault(2)], kept, (Member(2, 1),), host_of, NOW).words
    assert (
        "is excluded"
        in judge(view((2, 950.0), (2, 970.0), least=3), [fault(2)], kept, (), host_of, NOW).words
    )


def test_a_host_that_is_not_known_excludes_none_but_its_slot() -> None:
    nowhere = [Blamed(2, "", 950.0), Blamed(3, "", 960.0), Blamed(3, "", 970.0)]
    assert why_out(decision(*nowhere), 0, "") == ""


def test_a_process_knows_by_the_decision_that_it_is_out() -> None:
    slot = decision(*[Blamed(2, "b", at) for at in (950.0, 960.0, 970.0)])
    assert why_out(slot, 2, "b").startswith("slot 2 on b is excluded")
    assert (why_out(slot, 3, "b"), why_out(slot, 2, "a")) == ("", "")
    host = decision(Blamed(2, "b", 950.0), Blamed(3, "b", 960.0), Blamed(3, "b", 970.0))
    assert why_out(host, 2, "b") == why_out(host, 7, "b") != ""
    assert why_out(host, 2, "a") == ""


def test_it_is_out_for_no_longer_than_its_faults_count() -> None:
    slot = decision(*[Blamed(2, "b", at) for at in (950.0, 960.0, 970.0)])
    assert why_out(slot, 2, "b", 1050.0).startswith("slot 2 on b is excluded")
    assert why_out(slot, 2, "b", 1051.0) == "", "no fault since then has made anyone forget these"
    host = decision(Blamed(2, "b", 950.0), Blamed(3, "b", 960.0), Blamed(3, "b", 970.0))
    assert why_out(host, 7, "b", 1050.0) and not why_out(host, 7, "b", 1051.0)


def test_as_many_faults_are_remembered_as_it_takes() -> None:
    before = changed(view(*[(2, 950.0)] * 99), max_faults=100)
    assert "is excluded, after 100 faults" in judge(before, [fault(2)], MEMBERS, (), host_of, NOW).words


def test_faults_of_others_do_not_push_out_those_of_a_slot() -> None:
    """Slot 2 on b fails between 200 faults of other slots and hosts."""
    now = view((2, 950.0))
    for number in range(200):
        if number == 100:
            now = changed(now, blamed=(*now.decision.blamed, Blamed(2, "b", 950.0)))
        other = [fault(number + 4, host=f"h{number}")]
        now = changed(now, blamed=judge(now, other, MEMBERS, (), host_of, NOW).blamed)
    assert "slot 2 on b is excluded" in judge(now, [fault(2)], MEMBERS, (), host_of, NOW).words


def test_of_a_slot_no_more_faults_are_remembered_than_it_takes() -> None:
    verdict = judge(
        view(*[(2, 950.0 + at) for at in range(9)], least=4), [fault(2)], MEMBERS, (), host_of, NOW
    )
    assert [one.at for one in verdict.blamed] == [957.0, 958.0, 1000.0]


def test_a_decision_is_read_as_it_was_written() -> None:
    made = decision(Blamed(2, "b", 950.5))
    assert Decision.from_json(made.to_json(), "key") == made
    assert View.from_json(View(made, "nonce", MEMBERS).to_json(), "key").decision == made
    without = Decision(0, 10, 0, (), (), (), (), (), 4, 1)
    assert "blamed" not in without.to_json() and "max_faults" not in without.to_json()
