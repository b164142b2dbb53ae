"""Joining a running job: who gets in, when, and who never does. Where time counts, on a fake store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import pytest
from store_jobs import Script, delete_past, formed, formed_in, go_on

from ft_wrapper.exception import StoreError, TimeoutError
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.global_iteration import OnMissing
from ft_wrapper.protocol.joining import Entry
from ft_wrapper.protocol.membership import Membership
from ft_wrapper.protocol.records import DONE, FAULT, Decision, Member, View
from ft_wrapper.rank_assignment import RankDiscarded
from ft_wrapper.settings import AllLimits, OnJoin
from ft_wrapper.store import StoreMixin
from ft_wrapper.testing import FakeStore

LIMITS = AllLimits(barrier_timeout=60.0, heartbeat_timeout=10.0, completion_timeout=60.0, rejoin=True)


def terms(
    on_join: str, join_window: float, heartbeat_timeout: float, patience: float
) -> tuple[AllLimits, float]:
    """How a process joins."""
    limits = AllLimits(
        on_join=OnJoin(on_join), join_window=join_window, heartbeat_timeout=heartbeat_timeout, rejoin_wait=0.0
    )
    return limits, patience


TERMS = terms("now", 1.0, 10.0, 60.0)
NEXT = terms("next", 1.0, 1e6, 60.0)


def at(store: FakeStore, when: float, action: Callable[[], Any]) -> None:
    """Lets something happen at a time of the store's clock."""
    cast(Script, store.clock).at(when, action)


def ends(store: FakeStore, n: int) -> list[float]:
    """When somebody ends iteration n."""
    times: list[float] = []

    def note(client: str, operation: str, args: Sequence[Any]) -> None:
        if operation == "compare_set" and args[0] == keys.end(n):
            times.append(store.now())

    store.on_operation(note)
    return times


def test_who_comes_now_ends_the_iteration_after_the_window() -> None:
    job, view, members = formed([0, 1])
    newcomer = job.joining.register(2)
    ended = ends(job.store, 0)
    at(job.store, 1.5, lambda: go_on(job.store, view, members))
    entry, entered = job.joining.await_entry(newcomer, 0, *TERMS)
    assert ended[0] == 1.0
    assert (entry, entered.n, entered.decision.joined, entered.decision.joined_ranks) == (
        Entry.IN,
        1,
        (newcomer,),
        (2,),
    )


@pytest.mark.parametrize(("active", "lacks"), [(2, True), (3, False)])
def test_who_comes_degraded_ends_it_only_if_ranks_lack(active: int, lacks: bool) -> None:
    job, view, members = formed([0, 1, 2])
    job.store.set(keys.ACTIVE_TARGET, "3")
    job.store.set(keys.meeting(0), f"host 1 3 {active}")
    ended = ends(job.store, 0)
    at(job.store, 50.0, lambda: go_on(job.store, view, members))
    newcomer = job.joining.register(3)
    assert job.joining.await_entry(newcomer, 0, *terms("degraded", 1.0, 1e6, 60.0))[0] is Entry.IN
    assert ended[0] == (1.0 if lacks else 50.0)


def test_the_window_grows_in_a_crash_loop() -> None:
    job, view, members = formed([0, 1])
    for _ in range(4):
        view = go_on(job.store, view, members)
    newcomer = job.joining.register(2)
    ended = ends(job.store, 4)
    at(job.store, 50.0, lambda: go_on(job.store, view, members))
    job.joining.await_entry(newcomer, 0, *terms("now", 1.0, 1e6, 60.0))
    assert ended[0] == 8.0


def test_a_joiner_takes_its_predecessors_place_at_once_and_ends_the_iteration(job: Agreement) -> None:
    view, members = formed_in(job.store, [0, 1])
    newer = job.joining.register(0)

    def look() -> None:
        assert job.ends.deaths_of(0) == {members[0]}
        assert job.ends.outcome_of(0) == "fault"
        [fault] = job.ends.faults_of(0)
        assert fault.message == "gave way to a newer process"
        job.iterations.arrive(view, members[0], 0, 2)  # the older one still runs, and is not believed
        job.iterations.arrive(view, members[1], 1, 2)

    at(job.store, 0.1, look)
    entry, entered = job.joining.await_entry(newer, 0, *NEXT)
    assert (entry, entered.members) == (Entry.IN, (newer, members[1]))
    assert (entered.decision.removed, entered.decision.joined_ranks, entered.decision.world_size) == (
        (members[0],),
        (0,),
        2,
    )


def test_an_older_process_of_the_slot_is_told(job: Agreement) -> None:
    formed_in(job.store, [0, 1])
    older, newer = (job.joining.register(2), job.joining.register(2))
    assert job.joining.await_entry(older, 0, *TERMS)[0] is Entry.TAKEN_OVER
    assert job.joining.newest_of(2) == newer


@pytest.mark.parametrize("late", [False, True])
def test_a_completed_call_lets_nobody_in(job: Agreement, late: bool) -> None:
    view, members = formed_in(job.store, [0, 1])
    newcomer = job.joining.register(2)
    if late:
        go_on(job.store, view, members, outcome="done")
        assert job.joining.await_entry(newcomer, 0, *TERMS)[0] is Entry.DONE
    else:
        # It asks in time, the call completes nevertheless: the next one is not the one that it asked for.
        at(job.store, 0.1, lambda: go_on(job.store, view, members, outcome="done"))
        entry, current = job.joining.await_entry(newcomer, 0, *NEXT)
        assert entry is Entry.DONE
        assert newcomer in job.iterations.joins_of(0)
        assert (current.call, current.members, current.decision.joined) == (1, tuple(members), ())


def test_who_comes_for_the_next_call_is_in_it(job: Agreement) -> None:
    view, members = formed_in(job.store, [0, 1])
    job.ends.end_iteration(0, "done")
    newcomer = job.joining.register(2)
    at(job.store, 0.1, lambda: go_on(job.store, view, members, outcome="done"))
    entry, current = job.joining.await_entry(newcomer, 1, *TERMS)
    assert (entry, current.decision.joined) == (Entry.IN, (newcomer,))
    assert (current.call, current.decision.first) == (1, 1)


@pytest.mark.parametrize("waits", ["member", "joiner"])
def test_a_member_that_is_heard_may_take_its_time_between_calls(
    waits: str, caplog: pytest.LogCaptureFixture
) -> None:
    job, view, members = formed([0, 1])
    job.ends.end_iteration(0, "done")
    for second in range(700):
        at(job.store, second, lambda: job.heartbeats.beat_heart(str(members[1])))
    at(job.store, 600.0, lambda: job.iterations.arrive(view, members[1], 1, 2))
    if waits == "member":
        step = await_next(job.store, view, members[0], timeout=60.0)
        assert step is not None and step.members == tuple(members)
    else:
        job.ends.log_deaths(0, {members[0]: None}, ends=False)
        newcomer = job.joining.register(0)
        entry, entered = job.joining.await_entry(newcomer, 1, *TERMS)
        assert (entry, entered.members) == (Entry.IN, (newcomer, members[1]))
    assert 600.0 <= job.store.now() < 620.0
    told = [record.message for record in caplog.records if "waits for slots [1]" in record.message]
    assert 8 <= len(told) <= 10, "once each timeout of 60 s"


@pytest.mark.parametrize(("waits", "comes_after", "says"), [(2, 5.0, False), (1, 0.9, False), (1, 5.0, True)])
def test_one_who_waits_says_once_for_whom(waits: int, comes_after: float, says: bool) -> None:
    """The first of those who are here does: not the dead one."""
    job, view, members = formed([0, 1, 2, 3])
    job.ends.end_iteration(0, "fault")
    job.ends.log_deaths(0, {members[0]: None}, ends=False)
    job.iterations.arrive(view, members[3 - waits], 3 - waits, 4)
    at(job.store, comes_after, lambda: job.iterations.arrive(view, members[3], 3, 4))
    said: list[tuple[list[Member], bool]] = []

    def say(missing: Sequence[Member], waited: float) -> None:
        said.append((list(missing), 1.0 <= waited < 2.0))

    assert await_next(job.store, view, members[waits], timeout=60.0, on_missing=say) is not None
    assert said == [([members[3]], True)] * says


def test_a_wait_between_two_calls_is_no_restart() -> None:
    job, view, members = formed([0, 1])
    job.ends.end_iteration(0, "done")
    at(job.store, 5.0, lambda: job.iterations.arrive(view, members[1], 1, 2))
    said: list[Sequence[Member]] = []
    await_next(job.store, view, members[0], timeout=60.0, on_missing=lambda missing, _: said.append(missing))
    assert said == []


@pytest.mark.parametrize("heard_for", [0, 200])
def test_a_member_that_falls_silent_between_calls_is_gone_on_without(heard_for: int) -> None:
    job, view, members = formed([0, 1])
    job.ends.end_iteration(0, "done")
    for second in range(heard_for):
        at(job.store, second, lambda: job.heartbeats.beat_heart(str(members[1])))
    step = await_next(job.store, view, members[0], timeout=60.0)
    assert step is not None and step.members == (members[0],)
    assert heard_for + 10.0 <= job.store.now() < heard_for + 30.0  # heartbeat_timeout, and the next looks


def await_next(
    store: StoreMixin,
    view: View,
    member: Member,
    timeout: float,
    rejoin_wait: float = 0.0,
    on_missing: OnMissing | None = None,
) -> View | None:
    Agreement(store).iterations.arrive(view, member, view.members.index(member), len(view.members))
    limits = AllLimits(heartbeat_timeout=10.0, barrier_timeout=timeout, rejoin_wait=rejoin_wait)
    return Agreement(store).iterations.await_next(view, member, limits, on_missing=on_missing)


def test_one_that_the_job_is_to_grow_by_waits_for_the_first_decision(job: Agreement) -> None:
    joining = job.joining
    first, second, grower = (joining.register(slot) for slot in range(3))
    joining.join_first(first, [0, 1])
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 are missing"):
        joining.await_first(grower, [0, 1], 0.0)
    joining.join_first(second, [0, 1])
    assert joining.await_first(grower, [0, 1], 20.0) is None
    view = job.iterations.read_current()
    assert view is not None and view.members == (first, second)


def test_who_was_passed_over_needs_a_new_incarnation() -> None:
    job, view, members = formed([0, 1])
    newcomer = job.joining.register(2)

    def two_decisions() -> None:
        # It sleeps meanwhile; in the first one it is in, and is found dead.
        current = go_on(job.store, view, members)
        assert current.members == (*members, newcomer)
        job.ends.log_deaths(1, {newcomer: None}, ends=True)
        job.iterations.count_deaths(current)
        go_on(job.store, current, members)

    at(job.store, 0.1, two_decisions)
    entry, current = job.joining.await_entry(newcomer, 0, *NEXT)
    assert (entry, current.n) == (Entry.PASSED, 2)


def test_a_job_whose_members_all_died_goes_on_with_those_who_come_back(job: Agreement) -> None:
    _, members = formed_in(job.store, [0, 1])
    for member in members:
        job.ends.log_deaths(0, {member: None}, ends=True)
    back = [job.joining.register(slot) for slot in (0, 1)]
    degraded = terms("degraded", 30.0, 1e6, 60.0)
    joining, entries = job.joining, list[Any]()
    at(job.store, 0.1, lambda: entries.append(joining.await_entry(back[1], 0, *degraded)))
    entries.append(joining.await_entry(back[0], 0, *degraded))
    for entry, view in entries:
        assert (entry, view.n, view.members) == (Entry.IN, 1, tuple(back))
    assert job.store.now() < 1.0  # no window: everybody is back


def test_who_comes_back_alone_waits_for_the_others_and_goes_on_then() -> None:
    job, _, members = formed([0, 1])
    for member in members:
        job.ends.log_deaths(0, {member: None}, ends=True)
    back = job.joining.register(0)
    entry, view = job.joining.await_entry(back, 0, *terms("degraded", 5.0, 1e6, 60.0))
    assert (entry, view.members) == (Entry.IN, (back,))
    assert job.store.now() >= 5.0


@pytest.mark.parametrize("beats", [False, True])
def test_members_that_fell_silent_all_together_are_given_up_by_who_wants_in(beats: bool) -> None:
    job, view, members = formed([0, 1, 2])
    job.ends.log_deaths(0, {members[1]: None}, ends=False)  # a spare
    job.iterations.count_deaths(view)
    newcomer = job.joining.register(3)
    ended = ends(job.store, 0)
    if beats:
        for second in range(100):
            at(job.store, second, lambda: job.heartbeats.beat_heart(str(members[2])))
        at(job.store, 80.0, lambda: go_on(job.store, view, [members[0], members[2]]))
    entry, view = job.joining.await_entry(newcomer, 0, *terms("next", 1.0, 10.0, 100.0))
    assert entry is Entry.IN
    assert ended[0] == 80.0 if beats else 10.0 <= ended[0] <= 40.0
    assert beats or view.members == (newcomer,)


# ---- waiting for announced replacements


def dies_and_returns(store: StoreMixin) -> tuple[View, list[Member]]:
    """A job of two, the second of which has died, and is to come back."""
    view, members = formed_in(store, [0, 1])
    store.set(keys.ACTIVE_TARGET, "2")
    Agreement(store).ends.log_deaths(0, {members[1]: None}, ends=True, returns=True)
    store.add(keys.count_gone(0), 1)
    return view, members


def test_a_restart_waits_for_an_announced_replacement(job: Agreement) -> None:
    view, members = dies_and_returns(job.store)
    back = job.joining.register(1)
    at(job.store, 0.1, lambda: job.joining.await_entry(back, 0, *TERMS))
    step = await_next(job.store, view, members[0], timeout=100.0, rejoin_wait=30.0)
    assert step is not None and step.members == (members[0], back)
    assert job.store.now() == 0.1


def test_a_restart_does_not_wait_for_long_for_an_announced_replacement() -> None:
    store = FakeStore(Script())
    view, members = dies_and_returns(store)
    Agreement(store).joining.register(1)
    step = await_next(store, view, members[0], timeout=100.0, rejoin_wait=2.0)
    assert step is not None and step.members == (members[0],)
    assert store.now() == 2.0


def test_no_restart_waits_for_a_replacement_that_nobody_lacks(job: Agreement) -> None:
    view, members = formed_in(job.store, [0, 1, 2])
    job.store.set(keys.ACTIVE_TARGET, "2")  # and a spare
    job.ends.log_deaths(0, {members[1]: None}, ends=True, returns=True)
    job.iterations.count_deaths(view)
    current = go_on(job.store, view, [members[0], members[2]])
    assert current.members == (members[0], members[2])


# ---- terms, versions, garbage


def test_terms_that_differ_are_named(job: Agreement) -> None:
    joining = job.joining
    joining.agree_on_terms(0, 0, {"function": "f", "size": 3})
    joining.agree_on_terms(1, 0, {"function": "f", "size": 3})
    with pytest.raises(
        ValueError, match="slot 1 cannot take part in the job's call 0: size=4, the job has 3;"
    ):
        joining.agree_on_terms(1, 0, {"function": "f", "size": 4})
    with pytest.raises(ValueError, match="size=None, the job has 3;"):
        joining.agree_on_terms(1, 0, {"function": "f"})
    joining.agree_on_terms(0, 1, {"function": "g"})


def test_another_version_is_refused(job: Agreement) -> None:
    job.store.set(keys.VERSION, "0")
    before = job.store.list_keys()
    with pytest.raises(StoreError, match="version 0 of the keys, this process version 1"):
        Membership(job, 0, [0, 1], AllLimits()).register()
    assert job.store.list_keys() == before


def _decision_key(view: View) -> str:
    return keys.decision(view.n, view.nonce)


def _roster_key(view: View) -> str:
    return keys.roster(view.n, view.nonce)


@pytest.mark.parametrize(
    ("key", "read"),
    [
        (keys.HEAD, lambda at, view: at.iterations.read_head()),
        (_decision_key, lambda at, view: at.iterations.read_decision(view.head)),
        (_roster_key, lambda at, view: at.iterations.read_iteration(view.head)),
        (keys.end(0), lambda at, view: at.ends.outcome_of(0)),
        (keys.member("0:0"), lambda at, view: at.heartbeats.heart_of(view.members[0])),
        (keys.terms(0), lambda at, view: at.joining.agree_on_terms(0, 0, {})),
        (keys.join(0), lambda at, view: at.iterations.joins_of(0)),
        (keys.dead(0), lambda at, view: at.ends.deaths_of(0)),
        (keys.arrived(0), lambda at, view: at.iterations.arrivals_of(0)),
        (keys.ACTIVE_TARGET, lambda at, view: at.iterations.active_target()),
        (keys.meeting(3), lambda at, view: at.entering.active_in(3)),
        (keys.SETTLED, lambda at, view: at.joining.short_iterations_before(3)),
        (keys.finished(3), lambda at, view: at.ends.finished_in(3)),
    ],
)
def test_garbage_is_an_error_that_names_the_key(
    key: str | Callable[[View], str], read: Callable[[Agreement, View], object]
) -> None:
    job, view, _ = formed([0, 1])
    name = key if isinstance(key, str) else key(view)
    for garbage in ("nonsense x", '["x"]', b"\xff\xfe"):
        job.store.set(name, garbage)
        with pytest.raises(StoreError) as caught:
            read(job, view)
        assert name in str(caught.value), garbage


def test_nobody_goes_on_over_garbage() -> None:
    for key in (keys.join(0), keys.dead(0), keys.arrived(0)):
        job, view, members = formed([0, 1])
        job.ends.end_iteration(0, "fault")
        job.store.append(key, "garbage\n")
        with pytest.raises(StoreError, match="garbage"):
            for rank, member in enumerate(members):
                job.iterations.arrive(view, member, rank, 2)
        assert job.iterations.read_head() == view.head


def test_a_decision_on_another_iteration_is_none(job: Agreement) -> None:
    store = job.store
    view, members = formed_in(store, [0, 1])
    other = go_on(store, view, members)
    store.set(_decision_key(other), store.get(_decision_key(view)))
    with pytest.raises(StoreError, match="holds a decision on iteration 0"):
        job.iterations.read_decision(other.head)


# ---- a member that was paused


@pytest.mark.parametrize("active_rank", [0, None])
def test_who_wakes_in_an_iteration_whose_keys_are_gone_is_told_nothing_of_it(
    job: Agreement, active_rank: int | None
) -> None:
    store = job.store
    view, members = formed_in(store, [0, 1])
    here = Membership(job, 0, [0, 1], LIMITS)
    here.member, here.view = members[0], view
    job.ends.log_deaths(0, {members[0]: None}, ends=True)
    job.iterations.count_deaths(view)
    job.iterations.arrive(view, members[1], 1, 2)
    for _ in range(2):
        current = job.iterations.read_current()
        assert current is not None
        view = go_on(store, current, [members[1]])
    delete_past(store, view)

    if active_rank is None:
        at(store, 0.1, lambda: job.ends.end_iteration(0, "fault"))  # as its monitor does
    # It is the only active rank that it knows of: all have finished.
    with pytest.raises(RankDiscarded, match="slot 0 was left out after iteration 0"):
        here.await_completion(active_rank, 1)


# ---- completion


def test_a_rank_that_always_takes_longer_than_completion_timeout_is_waited_for() -> None:
    job, view, members = formed([0, 1])
    here = Membership(job, 0, [0, 1], dataclasses.replace(LIMITS, barrier_timeout=90.0))
    here.member, here.view = members[0], view
    assert here.await_completion(0, 2) == FAULT
    assert job.store.now() == 60.0
    assert [fault.message for fault in job.ends.faults_of(0)] == [
        "raised ft_wrapper.exception.RestartError: ranks [1] did not finish within completion_timeout=60 s"
    ]
    here.view = go_on(job.store, view, members)
    at(job.store, 300.0, lambda: job.ends.finish(1, 1, 2))
    assert here.await_completion(0, 2) == DONE, "a restart has not helped, and would not help again"
    assert job.store.now() == 300.0


# ---- giving up before being in


def test_one_that_gives_up_tells_the_others_until_they_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, view, members = formed([0, 1])
    here = Membership(job, 2, [0, 1], LIMITS)
    here.register()

    def gives_up(*_: object) -> NoReturn:
        # It has asked to be let in. A proposal is under way that has read the deaths, and not yet decided.
        job.iterations.ask_to_join(0, here.member, 0)
        job.ends.end_iteration(0, FAULT)
        decision = Decision(0, 1, 0, (), (), (here.member,), (2,), (2,), 3, 1)
        at(job.store, 5.0, lambda: job.iterations.decide(view.head, decision, (*members, here.member)))
        raise KeyboardInterrupt

    monkeypatch.setattr(job.joining, "await_entry", gives_up)
    with pytest.raises(KeyboardInterrupt):
        here.join()
    current = job.iterations.read_current()
    assert current is not None and here.member in current.members
    assert job.ends.deaths_of(1) == {here.member}, "or the others would wait for its heartbeat to time out"


# ---- a job that does not form


@pytest.mark.parametrize(("slot", "looks_for_others"), [(0, True), (1, False), (4, True), (63, False)])
def test_a_few_look_for_all_whether_a_job_can_form(job: Agreement, slot: int, looks_for_others: bool) -> None:
    reads: list[float] = []

    def note(client: str, operation: str, args: Sequence[Any]) -> None:
        if args and keys.join(keys.BEFORE_FIRST) in args[0] and operation != "append":
            reads.append(job.store.now())

    member = job.joining.register(slot)
    job.joining.join_first(member, range(64))
    job.store.on_operation(note)
    with pytest.raises(TimeoutError, match="are missing"):
        job.joining.await_first(member, range(64), 60.0)
    assert (min(reads) < 60.0) == looks_for_others, "but to say who is missing"


def test_nobody_forms_a_job_with_those_who_gave_up(job: Agreement) -> None:
    early, late = (job.joining.register(slot) for slot in (0, 1))
    job.joining.join_first(early, [0, 1])
    job.ends.give_up(keys.BEFORE_FIRST, early)
    job.joining.join_first(late, [0, 1])
    assert job.iterations.read_head() is None
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 are missing"):
        job.joining.await_first(late, [0, 1], 0.0)


def test_who_gave_up_is_not_the_reason_for_it(job: Agreement) -> None:
    for member in [job.joining.register(slot) for slot in (0, 2)]:
        job.joining.join_first(member, [0, 1, 2])
    job.ends.give_up(keys.BEFORE_FIRST, Member(0, 0))
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 3 are missing"):
        job.joining.await_first(Member(2, 0), [0, 1, 2], 0.0)


def test_a_slot_that_is_not_expected_takes_no_expected_ones_place(job: Agreement) -> None:
    stranger, early, late = (job.joining.register(slot) for slot in (7, 0, 1))
    job.iterations.ask_to_join(keys.BEFORE_FIRST, stranger, 0)
    job.joining.join_first(early, [0, 1])
    assert not job.joining.form(frozenset([0, 1])), "slot 1 is not there yet"
    job.joining.join_first(late, [0, 1])
    current = job.iterations.read_current()
    assert current is not None and {early, late} <= set(current.members)


def test_ranks_of_which_some_were_assigned_and_some_were_not_go_on_by_slot(job: Agreement) -> None:
    store = job.store
    view, members = formed_in(store, [0, 1, 2])
    job.ends.end_iteration(0, "fault")
    job.ends.log_deaths(0, {members[0]: None}, ends=True)
    job.iterations.count_deaths(view)
    job.iterations.arrive(view, members[1], 0, 2)  # its rank assignment was through: two ranks are left
    job.iterations.arrive(view, members[2], 2, 3)  # this one's was cut short
    current = job.iterations.read_current()
    assert current is not None
    decision = current.decision
    assert current.members == tuple(members[1:])
    assert [decision.rank_of(members[1], 0), decision.rank_of(members[2], 2)] == [0, 1]
    assert (decision.world_size, decision.removed) == (2, (members[0],))
