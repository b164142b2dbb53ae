"""How often in a row an iteration ended by the same fault: members say what they had, a decision counts."""

from __future__ import annotations

from store_jobs import formed

from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.records import FOR_GOOD, Decision, SameFault, View
from ft_wrapper.testing import FakeStore

HERE, THERE = "ValueError at train.py:4 in step", "KeyError at <string>:1 in f g"


def go_on(store: FakeStore, view: View, *faults: str | None, outcome: str = "fault") -> View:
    job = Agreement(store)
    job.ends.end_iteration(view.n, outcome)
    for rank, fault in enumerate(faults):
        job.iterations.arrive(view, view.members[rank], rank, len(view.members), fault)
    current = job.iterations.read_current()
    assert current is not None and current.n == view.n + 1
    assert current == view.after(current.decision, current.nonce)
    return current


def test_the_same_one_is_counted_on_whoever_has_it() -> None:
    job, view, members = formed([0, 1, 2])
    view = go_on(job.store, view, None, HERE, None)
    assert view.decision.same_faults == (SameFault(HERE, 1, members[1]),)
    view = go_on(job.store, view, HERE, THERE, HERE)
    assert view.decision.same_faults == (SameFault(HERE, 2, members[0]), SameFault(THERE, 1, members[1]))
    view = go_on(job.store, view, THERE, None, None)
    assert view.decision.same_faults == (SameFault(THERE, 2, members[0]),)
    view = go_on(job.store, view, None, None, None)
    assert view.decision.same_faults == ()


def test_where_a_rank_is_lost_nothing_is_counted() -> None:
    """What the others raise then, they raise because of the loss."""
    job, view, members = formed([0, 1, 2])
    view = go_on(job.store, view, HERE, HERE, HERE)
    job.ends.log_deaths(view.n, {members[2]: None}, ends=True)
    job.iterations.count_deaths(view)
    view = go_on(job.store, view, HERE, HERE)
    assert view.decision.same_faults == ()


def test_what_ends_the_job_for_good_does_so_where_a_rank_is_lost_too() -> None:
    job, view, members = formed([0, 1, 2])
    job.ends.log_deaths(view.n, {members[2]: None}, ends=True)
    job.iterations.count_deaths(view)
    view = go_on(job.store, view, HERE, FOR_GOOD + HERE)
    assert view.decision.same_faults == (SameFault(FOR_GOOD + HERE, 1, members[1]),)


def test_what_ends_the_job_for_good_is_never_left_out() -> None:
    job, view, members = formed(range(6))
    view = go_on(job.store, view, "A", "B", "C", "D", "E", FOR_GOOD + HERE)
    assert view.decision.same_faults[0] == SameFault(FOR_GOOD + HERE, 1, members[5])


def test_few_are_counted() -> None:
    job, view, _ = formed(range(8))
    view = go_on(job.store, view, *(f"E{rank}" for rank in range(8)))
    view = go_on(job.store, view, *(f"E{rank}" if rank in (0, 2) else f"F{rank}" for rank in range(8)))
    assert [(fault.what, fault.count) for fault in view.decision.same_faults] == [
        ("E0", 2),
        ("E2", 2),
        ("F1", 1),
        ("F3", 1),
    ]
    assert Decision.from_json(view.decision.to_json(), "key") == view.decision


def test_a_decision_without_any_says_nothing_of_them() -> None:
    job, view, _ = formed([0, 1])
    view = go_on(job.store, view, None, None)
    assert "same_faults" not in view.decision.to_json()
