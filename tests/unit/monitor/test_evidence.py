"""What evidence proves: who hangs, who waits, and how long a rank may take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_wrapper.monitor import evidence
from ft_wrapper.monitor.evidence import (
    LIVE,
    PLAIN,
    Claim,
    Hold,
    Kind,
    Look,
    StepTimes,
    Suspect,
    Wait,
    WaitingRanks,
    Whereabouts,
)

MS = 1_000_000
LINE = "data.py:41"
GAP = 0.05


def looks(suspect: Suspect, seconds: float, *, begin: float = 0.0, **fields: object) -> float:
    """Looks each 50 ms; fields that are functions take the time in ms. Returns the time of the last look."""
    now, end = begin, begin + seconds
    while now <= end + 1e-9:
        same = Look(round(now * 1e9), "S", 5, 5, 5, 0, 0, 0, False, False, False)
        given = {
            name: value(round(now * 1000)) if callable(value) else value for name, value in fields.items()
        }
        suspect.seen(same._replace(**given), now)
        now += GAP
    return now - GAP


def kind_of(
    answer: Whereabouts | None = None, *, seconds: float = 1.0, hold: Hold = LIVE, **fields: object
) -> Kind:
    suspect = Suspect(0.0, 0.0)
    now = looks(suspect, seconds, **fields)
    if answer is not None:
        suspect.heard(answer, now - 0.2)
        suspect.heard(answer, now)
    return suspect.kind(now, hold)


IN_USER_CODE = Whereabouts(1, "train.py:7", "at train.py:7 in train")
IN_COLLECTIVE = Whereabouts(1, "train.py:7", "in all_reduce", "all_reduce #3", ("0", 3), begun={"0": 3})


@pytest.mark.parametrize(
    ("kind", "answer", "fields"),
    [
        (Kind.STUCK, IN_USER_CODE, {}),
        (Kind.WAITS, IN_COLLECTIVE, {}),
        (Kind.BUSY, IN_USER_CODE, {"state": "R"}),
        (Kind.BUSY, IN_USER_CODE, {"slices": lambda ms: ms}),
        (Kind.BUSY, IN_COLLECTIVE, {"slices": lambda ms: ms}),
        (Kind.BUSY, IN_USER_CODE, {"elsewhere": lambda ms: ms * MS}),
        (Kind.BUSY, IN_USER_CODE, {"are_others_ready": True}),
        (Kind.BUSY, IN_USER_CODE, {"ends_soon": True}),
        (Kind.WAITS, IN_COLLECTIVE, {"ends_soon": True}),
        (Kind.FILE, IN_USER_CODE, {"is_in_file": True}),
        (Kind.FILE, IN_USER_CODE, {"state": "D", "is_in_file": True}),
        (Kind.FILE, IN_USER_CODE, {"state": "R", "copied": lambda ms: ms * 100_000}),
        (Kind.BUSY, IN_USER_CODE, {"state": "R", "copied": lambda ms: ms}),
        (Kind.STOPPED, IN_USER_CODE, {"state": "T"}),
        (Kind.STOPPED, None, {"state": "T"}),
        (Kind.STOPPED, IN_COLLECTIVE, {"state": "F"}),
        (Kind.TRACED, None, {"state": "t"}),
        (Kind.STUCK, None, {}),
        (Kind.NO_GIL, None, {"state": "R", "run": lambda ms: ms * MS}),
        (Kind.COMPILES, Whereabouts(compiles=True), {}),
        (Kind.PROCESS, Whereabouts(process=12), {}),
        (Kind.COMPILES, Whereabouts(compiles=True, process=12), {}),
        (Kind.WAITS, Whereabouts(waits="all_reduce #3", inside=("0", 3), on_device=True), {"state": "R"}),
    ],
)
def test_what_a_rank_does(kind: Kind, answer: Whereabouts | None, fields: dict[str, object]) -> None:
    assert kind_of(answer, **fields) is kind


def test_a_rank_whose_loaders_worker_is_lost_is_stuck() -> None:
    suspect = Suspect(0.0, 0.0)
    now = looks(suspect, 0.5)
    suspect.heard(Whereabouts(process=12), now)
    assert suspect.kind(now, LIVE) is Kind.PROCESS
    suspect.process(True, now)
    assert suspect.kind(now, LIVE) is Kind.PROCESS, "it may have sent what the rank waits for"
    suspect.heard(Whereabouts(process=12), now + 0.3)
    suspect.process(True, now + 0.3)
    assert suspect.kind(now + 0.3, LIVE) is Kind.STUCK
    suspect.process(False, now + 0.3)
    assert suspect.kind(now + 0.3, LIVE) is Kind.PROCESS


@pytest.mark.parametrize(("hold", "seconds"), [(LIVE, 0.8), (PLAIN, 5.0)])
def test_a_rank_is_stuck_once_it_has_been_asleep_for_long_enough(hold: Hold, seconds: float) -> None:
    assert kind_of(IN_USER_CODE, seconds=seconds - 2 * GAP, hold=hold) is Kind.UNKNOWN
    assert kind_of(IN_USER_CODE, seconds=seconds + GAP, hold=hold) is Kind.STUCK


def test_what_was_known_before_the_suspicion_counts() -> None:
    """A rank that was asleep before is stuck sooner; not one that runs, however little its counters move."""
    for state, kind in (("S", Kind.STUCK), ("R", Kind.BUSY)):
        suspect = Suspect(10.0, 9.5)
        now = looks(suspect, 0.3, begin=10.0, state=state)
        suspect.heard(IN_USER_CODE, now - 0.2)
        suspect.heard(IN_USER_CODE, now)
        assert suspect.kind(now, LIVE) is kind


def test_an_answer_may_take_half_a_second() -> None:
    suspect = Suspect(0.0, 0.0)
    assert suspect.kind(looks(suspect, 0.4, state="R"), LIVE) is Kind.UNKNOWN
    assert suspect.kind(looks(suspect, 0.2, begin=0.45, state="R"), LIVE) is Kind.NO_GIL


def test_a_rank_that_fails_to_say_where_it_stands_is_not_stuck() -> None:
    suspect = Suspect(0.0, 0.0)
    now = looks(suspect, 2.0)
    suspect.heard(None, now)
    assert suspect.kind(now, LIVE) is suspect.kind(now + 5, LIVE) is Kind.UNKNOWN


def test_a_rank_that_is_continued_is_no_longer_stopped() -> None:
    suspect = Suspect(0.0, 0.0)
    now = looks(suspect, 1.0, state="T")
    assert suspect.kind(now, LIVE) is Kind.STOPPED
    suspect.heard(IN_USER_CODE, now)
    now = looks(suspect, 0.05, begin=now + GAP, slices=6)
    assert suspect.kind(now, LIVE) is not Kind.STOPPED


def test_time_without_a_processor_is_counted() -> None:
    suspect = Suspect(0.0, 0.0)
    looks(suspect, 1.0, state="R", waited=lambda ms: ms * MS // 2)
    assert suspect.starved == pytest.approx(0.5)


# ---- who hangs


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[list[Wait | None]], int]:
    """Nodes, each with its ranks: what they wait in, or None for a rank that hangs."""
    groups = st.tuples(st.sampled_from(["0", "7", evidence.VOTE]), st.integers(1, 3))
    nodes = draw(st.lists(st.lists(st.none() | groups, min_size=1, max_size=4), min_size=1, max_size=4))
    return nodes, sum(map(len, nodes))


def claims_of(nodes: Sequence[Sequence[Wait | None]]) -> list[Claim]:
    first, claims = 0, []
    for node in nodes:
        waits = [(first + number, one) for number, one in enumerate(node) if one]
        claims.append(evidence.claim_of(waits, len(node), 4, False))
        first += len(node)
    return claims


@given(jobs())
def test_a_job_hangs_only_if_all_its_nodes_say_so(job: tuple[list[list[Wait | None]], int]) -> None:
    nodes, active = job
    said = claims_of(nodes)
    waits = evidence.all_waits(said, active)
    expected = [one for node in nodes for one in node if one]
    assert waits is not None and sum(how.ranks for how in waits.values()) == len(expected)
    by_rank = [one for node in nodes for one in node]
    assert all(waits[one] == WaitingRanks(expected.count(one), by_rank.index(one)) for one in expected)
    for left_out in range(len(said)):
        assert evidence.all_waits(said[:left_out] + said[left_out + 1 :], active) is None


@given(jobs())
def test_claims_survive_the_store(job: tuple[list[list[Wait | None]], int]) -> None:
    for claim in claims_of(job[0]):
        assert Claim.from_json(claim.to_json()) == claim


def test_a_rank_is_behind_if_it_has_not_begun_what_others_wait_in() -> None:
    assert evidence.is_behind({"0": 2}, [("0", 3)])
    assert not evidence.is_behind({"0": 3}, [("0", 3)])
    assert evidence.is_behind({"0": 3}, [("0", 3), ("vote", 1)])
    assert evidence.is_behind({}, [("end", 1)])
    assert evidence.is_behind(None, [("0", 3)]), "it cannot say"
    assert evidence.is_behind({"0": 3}, [("", 0)]), "what others wait in has no number"
    assert not evidence.is_behind({"0": 3}, []), "no rank waits"
    assert not evidence.is_behind(None, [])


def test_a_rank_sleeps_again_only_in_the_step_that_is_done_again() -> None:
    assert evidence.comes_again({LINE: 7}, LINE, 7, 1)
    assert not evidence.comes_again({LINE: 7}, LINE, 8, 2)
    assert not evidence.comes_again({LINE: 7}, "another", 7, 1)
    assert evidence.comes_again({LINE: None}, LINE, None, 1)
    assert not evidence.comes_again({LINE: None}, LINE, None, 50), "steps have no numbers"


@given(jobs())
def test_the_odd_ones_are_fewer_than_half(job: tuple[list[list[Wait | None]], int]) -> None:
    nodes, active = job
    waits = evidence.all_waits(claims_of(nodes), active)
    assert waits is not None
    odd = evidence.odd_waits(waits, active)
    number = sum(waits[one].ranks for one in odd)
    assert 2 * number < active
    if odd:
        assert all(node.count(None) == 0 for node in nodes), "a rank that hangs is the culprit"
        rest = {one[0] for one in waits if one not in odd}
        assert len(rest) == 1 and rest.isdisjoint(one[0] for one in odd)


# ---- how long a rank may take


def known(step: float, steps: int = 50) -> StepTimes:
    known = StepTimes()
    for _ in range(steps):
        known.passed(1, step)
    return known


def test_nothing_is_suspected_before_a_few_steps_are_known() -> None:
    assert known(0.02, 4).median == 0.0
    assert known(0.02, 5).median == 0.02


@given(st.floats(0.001, 10.0))
def test_a_rank_is_suspected_after_four_steps(step: float) -> None:
    assert known(step).suspect_after == pytest.approx(max(4 * step, 0.15))


@given(st.floats(0.001, 1.0), st.lists(st.floats(0.0, 100.0), max_size=20))
def test_a_stretch_as_long_as_one_before_is_within_the_limit(step: float, stretches: list[float]) -> None:
    steps = known(step)
    for stretch in stretches:
        steps.stretch(stretch)
    assert steps.limit() > max([30 * step, *stretches])
    assert steps.limit() >= 2 * max([0.0, *stretches])


@given(st.floats(0.001, 1.0), st.floats(1.0, 1e4))
def test_each_alarm_doubles_the_limit_until_the_work_gets_through(step: float, work: float) -> None:
    steps, alarms = known(step), 0
    while steps.limit(LINE) < work:
        before = steps.limit(LINE)
        steps.alarm(LINE, None)
        assert steps.limit(LINE) > 2 * before
        alarms += 1
    assert alarms <= 14  # log2(1e4)
    assert steps.limit("another") == known(step).limit()


def test_an_alarm_that_was_right_is_forgotten() -> None:
    """The step is done again, and takes no longer than others."""
    steps = known(0.02)
    before = steps.limit(LINE)
    steps.alarm(LINE, 7)
    steps.stretch(0.5)  # the first step after a restart
    steps.went_on(8, 9, 0.5)
    assert steps.limit(LINE) > before, "it was not done again"
    steps.went_on(7, 7, 0.5)
    assert steps.limit(LINE) > before, "it is not done"
    steps.went_on(7, 8, 0.5)
    assert steps.limit(LINE) == max(before, 2.0)


def test_an_alarm_that_was_wrong_is_learned() -> None:
    steps = known(0.02)
    steps.alarm(LINE, 7)
    steps.stretch(3.0)  # it takes as long again
    steps.went_on(7, 8, 3.0)
    assert steps.limit(LINE) >= 2 * 3.0


@pytest.mark.parametrize(("step", "longest", "patience"), [(7, 1.0, 1.0), (7, 61.0, 2.0), (None, 1.0, 2.0)])
def test_a_timeout_doubles_until_its_step_is_quick(step: int | None, longest: float, patience: float) -> None:
    """A checkpoint of 61 s has a reason, and is not learned; its timeout has to stay."""
    steps = known(0.02)
    steps.timed_out(step, 60.0)
    steps.went_on(5, 7, 1.0)
    assert steps.patience == 2.0, "it is not done"
    steps.went_on(5, 8, longest)
    assert steps.patience == patience


def test_the_longest_stretch_counts_half_after_two_thousand() -> None:
    steps = known(0.02)
    steps.stretch(40.0)
    for _ in range(200):
        steps.passed(10, 0.2)
    assert steps.longest == pytest.approx(20.0)


def test_a_line_where_a_rank_slept_is_learned() -> None:
    steps = known(0.02)
    steps.slept(0.7, LINE)
    steps.slept(0.2, LINE)
    steps.slept(5.0, "")
    assert steps.places == {LINE: 1.4}
