"""The line that a restart leaves in the log."""

from collections.abc import Sequence

import pytest

from ft_wrapper.agent.metrics import CAUSES
from ft_wrapper.attribution import Interruption
from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.entering import Entered
from ft_wrapper.protocol.records import Decision, Fault, Member, MemberRecord
from ft_wrapper.restart.report import (
    Promotion,
    RestartReport,
    culprit_slots,
    duration,
    make_report,
    waiting_line,
)
from ft_wrapper.state import State
from ft_wrapper.testing.fake_store import FakeStore

SIZES = {"active_world_size": 1, "world_size": 1}


def fault(slot: int, interruption: Interruption, message: str, rank: int | None = None) -> Fault:
    return Fault(Member(slot, 0), slot if rank is None else rank, interruption, message, "host7", 100 + slot)


def said(
    n: int,
    faults: Sequence[Fault],
    promoted: Sequence[tuple[int, int]],
    world_size: int,
    active: int,
    seconds: float,
) -> str:
    """The line of an iteration that no one has joined, and no one else has left."""
    entered = [Entered(Member(slot, 0), rank, promoted=True) for slot, rank in promoted]
    decision = Decision(0, n, 0, (), (), (), (), (), world_size, 1)
    state = State(0, world_size, active_world_size=active, iteration=n)
    return str(make_report(decision, state, entered, faults, seconds))


def test_names_what_failed_where_who_took_over_and_how_long_it_took() -> None:
    faults = [
        fault(1, Interruption.EXCEPTION, "raised RuntimeError: connection closed"),
        fault(0, Interruption.TERMINATED, "died"),
    ]
    assert said(2, faults, [(3, 2)], 3, 3, 0.0081) == (
        "restart 2: rank 0 (slot 0 on host7 pid 100) died (and 1 fault in its wake); "
        "spare slot 3 took over as rank 2; 3 active + 0 spare ranks, back in 8.1 ms"
    )


def test_a_replacement_that_takes_the_rank_of_a_lost_one_is_named() -> None:
    """Slot 0 had come back as a spare-to-be when rank 1 in slot 2 died, and slot 5 came beside it."""
    gone, waiting, further = Member(2, 0), Member(0, 1), Member(5, 0)
    decision = Decision(0, 2, 0, (gone,), (), (waiting, further), (1, 2), (2,), 3, 1)
    entered = [Entered(Member(1, 0), 0), Entered(waiting, 1), Entered(further, 2)]
    state = State(0, 3, active_world_size=3, iteration=2)
    report = make_report(decision, state, entered, [fault(2, Interruption.TERMINATED, "died", 1)], 0.01)
    assert (report.culprit_slots, report.lost_slots, report.joined_slots) == ((2,), (2,), (0, 5))
    assert (report.replacements, report.promoted) == ((Promotion(0, 1),), ())
    assert str(report) == (
        "restart 2: rank 1 (slot 2 on host7 pid 102) died; slot 5 joined; the replacement in slot 0 took "
        "over as rank 1; 3 active + 0 spare ranks, back in 10.0 ms"
    )


def test_the_slots_of_the_likeliest_cause() -> None:
    """A survivor's collective fails first; of ranks that hang, the one that stands alone is the cause."""
    reset = fault(0, Interruption.EXCEPTION, "raised RuntimeError: Connection reset by peer")
    assert culprit_slots([reset, fault(1, Interruption.TERMINATED, "died")]) == (1,)
    hung = [fault(slot, Interruption.SOFT_TIMEOUT, "stood in all_reduce") for slot in (0, 3)]
    assert culprit_slots([*hung, fault(2, Interruption.SOFT_TIMEOUT, "stood at a.py:7")]) == (2,)
    assert culprit_slots([fault(slot, Interruption.TERMINATED, "died") for slot in (4, 2)]) == (2, 4)
    asked = Fault(
        Member(0, 0), None, Interruption.REQUESTED, "all ranks were asked to restart: ftrun restart"
    )
    assert culprit_slots([asked]) == culprit_slots([]) == ()
    assert said(1, [asked], [], 2, 2, 0.01).startswith("restart 1: all ranks were asked to restart: ftrun")


def test_of_several_exceptions_the_first_is_the_cause() -> None:
    faults = [fault(slot, Interruption.EXCEPTION, f"raised E{slot}") for slot in (2, 0, 1)]
    line = said(1, faults, [], 4, 3, 0.01)
    assert (
        "rank 2 (slot 2 on host7 pid 102) raised E2 (and 2 faults in its wake); no spare stepped in;" in line
    )
    assert "3 active + 1 spare rank, back in 10.0 ms" in line


def test_of_a_hang_the_odd_one_out_comes_first() -> None:
    still, waits = "made no progress for soft_timeout=3 s", "stood in all_reduce, called at a.py:5 in train"
    words = [(0, still), (1, still), (2, still), (0, waits), (2, waits), (1, "stood at a.py:7 in train")]
    faults = [fault(slot, Interruption.SOFT_TIMEOUT, each) for slot, each in words]
    line = said(1, faults, [], 3, 3, 0.01)
    assert line.startswith(
        "restart 1: rank 1 (slot 1 on host7 pid 101) made no progress for soft_timeout=3 s and stood at "
        "a.py:7 in train; rank 0 (slot 0 on host7 pid 100), rank 2 (slot 2 on host7 pid 102) made no "
        "progress for soft_timeout=3 s and stood in all_reduce, called at a.py:5 in train; "
    )


def test_says_for_whom_a_restart_waits_and_how_long_at_the_most() -> None:
    store = FakeStore()
    members = [
        Agreement(store).joining.register(slot, MemberRecord("host7", 100 + slot)) for slot in range(9)
    ]
    assert waiting_line(store, members[:1], 8.5, 128.0) == (
        "the restart waits for slot 0 (on host7 pid 100) to leave the function: ended within 8.5 s if hung, "
        "evicted within 2 min 8 s if the host is lost"
    )
    line = waiting_line(store, members, 8.5, 28.5)
    assert ", slot 3 (on host7 pid 103), and 5 more to leave the function: ended within" in line


def test_a_thousand_ranks_fit_in_a_line() -> None:
    faults = [fault(slot, Interruption.TERMINATED, "died") for slot in range(1000)]
    line = said(1, faults, [(slot, slot) for slot in range(50)], 3, 3, 0.01)
    assert "and 996 more died" in line and "and 46 more" in line and len(line) < 600


def test_no_fault_and_no_rank_are_said_so() -> None:
    assert "no fault was published" in said(1, [], [], 1, 1, 0.01)
    silent = Fault(Member(4, 0), None, Interruption.UNRESPONSIVE, "sent no heartbeat for 30 s", "", 0)
    assert "slot 4 sent no heartbeat for 30 s;" in said(1, [silent], [], 1, 1, 0.01)


@pytest.mark.parametrize(
    ("interruption", "joined", "kind"),
    [
        (Interruption.HARD_TIMEOUT, (), "hard_timeout"),
        (Interruption.TERMINATED, (3,), "terminated"),
        (Interruption.DRAINED, (), "drained"),
        (Interruption.REQUESTED, (), "requested"),
        (None, (3,), "join"),
        (None, (), "unknown"),
    ],
)
def test_what_a_restart_is_counted_by(
    interruption: Interruption | None, joined: tuple[int, ...], kind: str
) -> None:
    report = RestartReport(
        iteration=1, cause="words", interruption=interruption, joined_slots=joined, seconds=0.1, **SIZES
    )
    assert report.kind == kind
    assert kind in CAUSES


@pytest.mark.parametrize("interruption", [None, Interruption.HARD_TIMEOUT])
def test_a_report_goes_through_json(interruption: Interruption | None) -> None:
    report = RestartReport(
        iteration=7,
        cause="rank 1 died",
        interruption=interruption,
        lost_slots=(1, 2),
        joined_slots=(4,),
        promoted=(Promotion(5, 1),),
        culprit_slots=(1,),
        replacements=(Promotion(4, 0),),
        recompiled_ranks=(1,),
        active_world_size=3,
        world_size=4,
        seconds=0.25,
        phases={"enter": 0.125},
        step=12,
    )
    assert RestartReport.from_json(report.to_json()) == report
    assert "\n" not in report.to_json()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0081, "8.1 ms"),
        (0.0994, "99.4 ms"),
        (0.1862, "186 ms"),
        (0.9994, "999 ms"),
        (9.8842, "9.9 s"),
        (59.94, "59.9 s"),
        (200.0, "3 min 20 s"),
        (3599.9, "59 min 59 s"),
        (25_300.0, "7 h 1 min"),
    ],
)
def test_durations_are_in_the_unit_that_a_person_would_choose(seconds: float, words: str) -> None:
    assert duration(seconds) == words
