"""Old public names work for one release, and warn with the new one."""

from __future__ import annotations

import pytest

from ft_wrapper import Leak, Limits, RestartReport, Wrapper, events, exception
from ft_wrapper.restart import report as reports
from ft_wrapper.testing import inject_fault, scheduler

REPORT = RestartReport(
    iteration=1,
    cause="rank 1 died",
    lost_slots=(1,),
    joined_slots=(2,),
    promoted=(reports.Promotion(4, 1),),
    recompiled_ranks=(3,),
    active_world_size=4,
    world_size=4,
    seconds=0.5,
)


@pytest.mark.parametrize(
    ("owner", "old", "new"),
    [
        (exception, "Drained", "RankDrained"),
        (exception, "Excluded", "RankExcluded"),
        (events, "read", "load"),
        (events, "check", "check_events_file"),
        (inject_fault, "Fault", "FaultKind"),
        (reports, "TookOver", "Promotion"),
        (scheduler, "Policy", "TurnPolicy"),
        (REPORT, "lost", "lost_slots"),
        (REPORT, "joined", "joined_slots"),
        (REPORT, "took_over", "promoted"),
        (REPORT, "recompiling", "recompiled_ranks"),
        (REPORT.promoted[0], "initial_rank", "slot"),
        (REPORT.promoted[0], "active_rank", "rank"),
        (Leak("DeviceMesh", 0, None), "what", "kind"),
        (Leak("DeviceMesh", 0, None), "held_by", "referrer"),
    ],
)
def test_an_old_name_gives_what_the_new_one_does(owner: object, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is {new} now"):
        assert getattr(owner, old) is getattr(owner, new)


@pytest.mark.parametrize(
    ("old", "new", "value"), [("unwind_grace", "cleanup_timeout", 3.0), ("max_faults", "max_faults", 3)]
)
def test_an_argument_that_has_moved_is_taken_as_one_of_the_limits(old: str, new: str, value: object) -> None:
    with pytest.warns(DeprecationWarning, match=rf"limits=Limits\({new}=\)") as warned:
        assert getattr(Wrapper(**{old: value}).limits, new) == value
    assert warned[0].filename == __file__


@pytest.mark.parametrize("other", [{"cleanup_timeout": 3}, {"limits": Limits(max_faults=3)}])
def test_both_at_once_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="'unwind_grace': 3"), pytest.warns(DeprecationWarning):
        Wrapper(**{"unwind_grace": 3, **other})


def test_a_name_that_never_was_is_none() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Drain'"):
        _ = exception.Drain  # type: ignore[attr-defined]


def test_nvrx_calls_a_timeout_so() -> None:
    assert exception.TimeoutError is exception.RestartTimeout
    assert issubclass(exception.RestartTimeout, TimeoutError)
