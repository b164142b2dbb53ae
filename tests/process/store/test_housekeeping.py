"""Notes for those who join, and the deletion of past keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from store_jobs import delete_past, formed_in, go_on

from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.entering import Entered
from ft_wrapper.protocol.housekeeping import SETTLES_AFTER, SLICE, Housekeeper, note_active_target
from ft_wrapper.protocol.operations import Delete, Step, read
from ft_wrapper.protocol.records import Member
from ft_wrapper.testing import Clock


def test_the_wanted_size_is_the_largest_that_any_iteration_had(job: Agreement) -> None:
    store = job.store
    assert job.iterations.active_target() == 0
    assert not note_active_target(store, 0)  # no one has entered it
    for n, (world, active) in enumerate([(4, 3), (3, 2), (5, 4)]):
        store.set(keys.meeting(n), f"host 1 {world} {active}")
        assert note_active_target(store, n)
    assert job.iterations.active_target() == 4
    assert job.entering.active_in(1) == 2
    note_active_target(store, 0)
    assert job.iterations.active_target() == 4


def test_an_iteration_settles_after_some_join_windows(
    job: Agreement, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = job.store, Clock()
    monkeypatch.setattr(store, "now", clock.now)
    view, _ = formed_in(store, [0])
    house = Housekeeper(store, join_window=1.0)
    house.keep(view)
    clock.advance(SETTLES_AFTER - 0.1)
    house.keep(view)
    assert job.joining.short_iterations_before(5) == 5
    clock.advance(0.2)
    house.keep(view)
    assert job.joining.short_iterations_before(5) == 4


def test_what_is_past_is_deleted_a_little_at_a_time(job: Agreement) -> None:
    """By a heart, which must not be late."""
    store = job.store
    view, members = formed_in(store, [0, 1])
    for number in range(2 * SLICE):
        store.set(keys.iteration_prefix(0) + f"/{number}", "1")
    for _ in range(2):
        view = go_on(store, view, members)
    house = Housekeeper(store, join_window=100.0)

    def left() -> int:
        return sum(keys.iteration_of(key) == 0 for key in store.list_keys())

    before = left()
    assert before > 2 * SLICE
    for already in range(1, 3):
        house.keep(view)
        assert left() == before - already * SLICE
    house.keep(view)
    assert not left()


def test_nothing_is_deleted_where_nothing_is_past(job: Agreement, monkeypatch: pytest.MonkeyPatch) -> None:
    """On etcd a step without keys is a transaction: one each second, for nothing."""
    view, _ = formed_in(job.store, [0])
    carried_out: list[Step] = []
    execute = job.store.execute

    def note(steps: Sequence[Step]) -> list[str | None]:
        carried_out.extend(steps)
        return execute(steps)

    monkeypatch.setattr(job.store, "execute", note)
    house = Housekeeper(job.store, join_window=100.0)
    for _ in range(5):
        house.keep(view)
    assert [step for step in carried_out if isinstance(step, Delete)] == []


def test_shared_hearts_that_stand_still_go_where_they_are_too_many(
    job: Agreement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each agent that ends without a word leaves one behind. Those that beat come back, if they go, too."""
    store, clock = job.store, Clock()
    monkeypatch.setattr(store, "now", clock.now)
    view, members = formed_in(store, [0, 1])
    hearts = [keys.shared_heart(name) for name in "abc"]

    def left(*beating: str) -> set[str]:
        nonlocal view
        view = go_on(store, view, members)
        house = Housekeeper(store, join_window=1.0)
        house.keep(view)
        for heart in beating:
            job.heartbeats.beat_heart(heart)
        clock.advance(SETTLES_AFTER)
        for _ in range(2):
            house.keep(view)
        return {key for key in store.list_keys() if keys.is_shared_heart(key)}

    for heart in hearts[:2]:
        job.heartbeats.beat_heart(heart)
    assert left() == {keys.heartbeat(heart) for heart in hearts[:2]}
    job.heartbeats.beat_heart(hearts[2])
    assert left(hearts[2]) == {keys.heartbeat(hearts[2])}


def test_keys_do_not_grow_with_the_iterations(job: Agreement) -> None:
    store = job.store
    counts = []
    view, members = formed_in(store, [0, 1, 2])
    for _ in range(6):
        for rank in range(3):
            endpoint = ("host", 1) if rank == 0 else None
            job.entering.enter(view.n, Entered(members[rank], rank), (3, 3), endpoint)
            job.ends.finish(view.n, rank, 99)
            store.set(keys.iteration_prefix(view.n) + "/a user's", "1")
        view = go_on(store, view, members)
        delete_past(store, view)
        counts.append(store.num_keys())
    assert counts[2] == counts[-1]
    left = {keys.iteration_of(key) for key in store.list_keys()}
    # That of the present one, of the one before, whose faults people read; and the first formation.
    assert left == {None, keys.BEFORE_FIRST, view.n - 1, view.n}
    assert job.iterations.read_current() is not None


def test_the_keys_of_superseded_members_and_past_calls_go(job: Agreement) -> None:
    store = job.store
    view, members = formed_in(store, [0, 1])
    job.joining.agree_on_terms(0, 0, {})
    newer = job.joining.register(1)
    assert job.joining.register(1) == Member(1, 2)
    for _ in range(3):
        job.joining.register(2)
    job.ends.say_goodbye(newer)
    assert (
        delete_past(
            store, dataclasses.replace(view, decision=dataclasses.replace(view.decision, n=view.n - 1))
        )
        == 0
    )  # by one who is out
    delete_past(store, view)
    # 1:0 is in this iteration, each of the others may be in the next one, and slot 2 is empty.
    kept = {name for name in map(keys.member_of, store.list_keys()) if name}
    assert kept == {(0, 0), (1, 0), (1, 1), (1, 2), (2, 2)}
    delete_past(store, dataclasses.replace(view, members=(members[0], Member(1, 2))))
    kept = {name for name in map(keys.member_of, store.list_keys()) if name}
    assert kept == {(0, 0), (1, 2), (2, 2)}
    assert read(store, keys.terms(0)) is not None
    job.ends.end_iteration(view.n, "done")
    view = go_on(store, view, members, outcome="done")
    delete_past(store, view)
    assert read(store, keys.terms(0)) is None
