"""Barriers, the exchange, the check of rank assignments, the formation: directly, each with its errors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from ranks import Simulated, Threads, in_many_orders

from ft_wrapper.exception import InternalError, RankShouldRestart, StoreError, TimeoutError
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.deaths import report_lost
from ft_wrapper.protocol.entering import Entered
from ft_wrapper.protocol.operations import Append
from ft_wrapper.protocol.records import DONE, FAULT, Decision, Fault, Head, Member, View, roster_from_json
from ft_wrapper.store import BarrierOverflow, BarrierTimeout, PrefixStore, StoreMixin
from ft_wrapper.testing import FakeStore, Scheduler

SHORT = timedelta(seconds=10)
SEEDS = range(8)

Run = Simulated | Threads
in_orders = in_many_orders("run", Simulated, SEEDS)


def outcome(task: Callable[[], Any]) -> Any:
    """What a function returns, or the error that it raises."""
    try:
        return task()
    except (RankShouldRestart, Exception) as error:
        return error


# Barriers


@in_orders
def test_nobody_leaves_a_barrier_before_all_have_come(run: Run) -> None:
    here: set[int] = set()

    def come(rank: int) -> Callable[[StoreMixin], None]:
        def task(store: StoreMixin) -> None:
            here.add(rank)
            store.barrier([rank], "all", 4, SHORT)
            assert here == {0, 1, 2, 3}

        return task

    run({f"rank {rank}": come(rank) for rank in range(4)})


def test_one_may_come_for_several_ranks(run: Run) -> None:
    run(
        {
            "node 0": lambda store: store.barrier([0, 1], "all", 3, SHORT),
            "node 1": lambda store: store.barrier([2], "all", 3, SHORT),
        }
    )


def test_barrier_names_the_missing_ranks(run: Run) -> None:
    def come(rank: int) -> Callable[[StoreMixin], Any]:
        return lambda store: outcome(lambda: store.barrier([rank], "all", 4, run.short))

    for error in run({"rank 0": come(0), "rank 2": come(2)}).values():
        assert isinstance(error, BarrierTimeout)
        assert "'all'" in str(error) and "missing ranks [1, 3] of 4" in str(error)


def test_barrier_with_too_many_ranks(run: Run) -> None:
    def come(rank: int) -> Callable[[StoreMixin], Any]:
        return lambda store: outcome(lambda: store.barrier([rank], "all", 2, run.brief))

    results = run({f"rank {rank}": come(rank) for rank in range(3)}).values()
    overflows = [result for result in results if isinstance(result, BarrierOverflow)]
    assert overflows and "rendezvous_count=2 ranks and 3 came" in str(overflows[0])


@pytest.mark.parametrize(
    "name, function",
    [
        ("initial", StoreMixin.initial_barrier),
        ("completion", StoreMixin.completion_barrier),
        ("iteration", StoreMixin.iteration_barrier),
        ("termination", StoreMixin.termination_barrier),
    ],
)
def test_named_barriers_do_not_meet(run: Run, name: str, function: Callable[..., None]) -> None:
    def wrong(store: StoreMixin) -> Any:
        return outcome(lambda: store.barrier([1], "another", 2, run.brief))

    def named(store: StoreMixin) -> Any:
        return outcome(lambda: function(store, [0], 2, run.brief))

    results = run({"rank 0": named, "rank 1": wrong})
    assert f"barrier {name!r}" in str(results["rank 0"])
    assert "barrier 'another'" in str(results["rank 1"])


def test_barrier_of_an_iteration_that_ends(run: Run) -> None:
    def come(store: StoreMixin) -> Any:
        return outcome(lambda: PrefixStore(5, store).barrier([0], "all", 2, timedelta(hours=1)))

    results = run({"rank 0": come, "other": lambda store: Agreement(store).ends.end_iteration(5, FAULT)})
    assert isinstance(results["rank 0"], RankShouldRestart)


def test_lost_reply_of_a_barrier_does_no_harm() -> None:
    for seed in SEEDS:
        scheduler = Scheduler(seed)
        store = FakeStore(scheduler)
        store.repeat("add", client="rank 0")
        for rank in range(3):
            scheduler.spawn(f"rank {rank}", store.clone(f"rank {rank}").barrier, [rank], "all", 3, SHORT)
        scheduler.run()


# compute_once


def exchange(
    rank: int, count: int, n: int | None = None, timeout: timedelta = SHORT
) -> Callable[[StoreMixin], Any]:
    def double(given: dict[int, str]) -> dict[int, str]:
        assert sorted(given) == list(range(count))
        return {peer: f"{peer}:{text}{text}" for peer, text in given.items()}

    def task(store: StoreMixin) -> Any:
        part = store if n is None else PrefixStore(n, store)
        return outcome(lambda: part.compute_once("x", rank, f"v{rank}", count, double, timeout))

    return task


@in_orders
def test_each_gets_its_own_result(run: Run) -> None:
    results = run({f"rank {rank}": exchange(rank, 5) for rank in range(5)})
    assert [*results.values()] == [f"{rank}:v{rank}v{rank}" for rank in range(5)]


def test_exchange_names_the_missing_ranks(run: Run) -> None:
    error = run({"rank 1": exchange(1, 3, timeout=run.brief)})["rank 1"]
    assert isinstance(error, BarrierTimeout)
    assert "missing ranks [0, 2] of 3" in str(error)


def test_all_or_nobody_gets_a_result() -> None:
    seen = set()
    for seed in range(60):
        names = {f"rank {rank}": exchange(rank, 3, n=7, timeout=timedelta(hours=1)) for rank in range(3)}
        scheduler = Scheduler(seed)
        store = FakeStore(scheduler)
        tasks = [scheduler.spawn(name, task, store.clone(name)) for name, task in names.items()]
        # The iteration ends at some step, and somebody is stopped for longer than the looks of the others.
        ender = scheduler.spawn("ender", Agreement(store.clone("ender")).ends.end_iteration, 7, FAULT)
        scheduler.pause_at(tasks[seed % 3], seed % 13 + 1, 5.0)
        scheduler.pause_at(ender, 1, (seed % 4) * 1.0)
        scheduler.run()
        got = [isinstance(task.result, str) for task in tasks]
        assert all(got) or not any(got), scheduler.trace()
        assert all(isinstance(task.result, str | RankShouldRestart) for task in tasks)
        seen.add(all(got))
    assert seen == {True, False}


# The check of rank assignments


HERE = ("host", 29)


def assigned(store: StoreMixin, slot: int, active_rank: int | None, world: int, active: int) -> Any:
    endpoint = HERE if active_rank == 0 else None
    entry = Entered(Member(slot, 0), active_rank)
    return outcome(lambda: Agreement(store).entering.enter(3, entry, (world, active), endpoint))


def test_assignments_that_agree(store: StoreMixin) -> None:
    assert [assigned(store, slot, rank, 3, 2) for slot, rank in ((0, 1), (1, 0), (2, None))] == [
        None,  # rank 0 has not come so far
        HERE,
        HERE,
    ]
    assert assigned(store, 0, 1, 3, 2) == HERE, "a repeated check of the same rank must agree with itself"


def test_active_ranks_that_have_entered_are_counted(store: StoreMixin) -> None:
    entering = Agreement(store).entering
    assert [entering.count_active(3), entering.count_active(3), entering.count_active(4)] == [1, 2, 1]


@pytest.mark.parametrize("world, active", [(4, 2), (3, 3)])
def test_assignments_with_different_sizes(store: StoreMixin, world: int, active: int) -> None:
    given = f"slot 1 was given world size and active world size {(world, active)}, active rank 0 (3, 2)"
    assert assigned(store, 0, 0, 3, 2) == HERE
    error = assigned(store, 1, 1, world, active)
    assert isinstance(error, InternalError)
    assert "rank_assignment" in str(error) and given in str(error)


@pytest.mark.parametrize("sizes", [(4, 2), (3, 3)])
def test_different_sizes_that_rank_0_tells_later(store: StoreMixin, sizes: tuple[int, int]) -> None:
    entering, late = Agreement(store).entering, Member(1, 0)
    assert entering.enter(3, Entered(late, 1), sizes) is None
    assert assigned(store, 0, 0, 3, 2) == HERE
    with pytest.raises(InternalError, match="slot 1 was given"):
        entering.await_endpoint(3, late, sizes, 60.0, 1.0)
    assert entering.await_endpoint(3, late, (3, 2), 60.0, 1.0) == HERE


def test_assignments_that_give_a_rank_twice(store: StoreMixin) -> None:
    assert assigned(store, 0, 0, 3, 2) == HERE
    error = assigned(store, 2, 0, 3, 2)
    assert isinstance(error, InternalError)
    assert "active rank 0" in str(error) and "slot 2" in str(error) and "slot 0" in str(error)


# A spare that is slow to look


@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("at_barrier", [False, True])
def test_who_looks_once_all_is_done_still_gets_what_was_there_for_it(step: int, at_barrier: bool) -> None:
    """Stopped between a wait that found nothing and its look at the end, it must not see a fault."""
    scheduler = Scheduler(step)
    store = FakeStore(scheduler)
    part = PrefixStore(1, store)

    def spare() -> Any:
        if not at_barrier:
            return Agreement(store).entering.await_endpoint(1, Member(1, 0), (2, 1), 60.0, 1.0)
        part.barrier([0], "all", 2, timedelta(seconds=60), timedelta(seconds=1))
        return "through"

    def others() -> None:
        scheduler.sleep(1.5)
        if at_barrier:
            part.barrier([1], "all", 2, SHORT)
        else:
            Agreement(store).entering.enter(1, Entered(Member(0, 0), 0), (2, 1), HERE)
        Agreement(store).ends.end_iteration(1, DONE)

    waits = scheduler.spawn("spare", spare)
    scheduler.pause_at(waits, step, 5.0)
    scheduler.spawn("others", others)
    scheduler.run()
    assert waits.result == ("through" if at_barrier else HERE)


# The formation


def join(slot: int, slots: range, timeout: float = 10.0) -> Callable[[StoreMixin], Any]:
    def task(store: StoreMixin) -> Any:
        member = Agreement(store).joining.register(slot)
        Agreement(store).joining.join_first(member, slots)
        return outcome(lambda: Agreement(store).joining.await_first(member, slots, timeout))

    return task


@in_orders
def test_all_form_the_same_world(run: Run) -> None:
    views = set(run({f"rank {slot}": join(slot, range(4)) for slot in range(4)}).values())
    assert len(views) == 1
    assert views.pop().members == tuple(Member(slot, 0) for slot in range(4))


def test_formation_names_the_missing_ranks(run: Run) -> None:
    seconds = run.short.total_seconds()
    for error in run({f"rank {slot}": join(slot, range(5), seconds) for slot in (0, 3)}).values():
        assert isinstance(error, TimeoutError)
        assert "ranks [1, 2, 4] of 5 are missing" in str(error)
        assert f"within {seconds:g} s" in str(error) and "barrier_timeout" in str(error)


def test_dead_rank_is_missing_from_the_formation(store: StoreMixin) -> None:
    dead = Agreement(store).joining.register(1)
    Agreement(store).joining.join_first(dead, range(2))
    Agreement(store).ends.log_deaths(keys.BEFORE_FIRST, {dead: None}, ends=False)
    assert not Agreement(store).joining.form(frozenset(range(2)))
    alive = Agreement(store).joining.register(0)
    Agreement(store).joining.join_first(alive, range(2))
    assert Agreement(store).iterations.read_head() is None
    error = outcome(lambda: Agreement(store).joining.await_first(alive, range(2), 0.0))
    assert isinstance(error, TimeoutError) and "ranks [1] of 2 are missing" in str(error)


def test_slot_started_twice_joins_with_its_last_incarnation(store: StoreMixin) -> None:
    for _ in range(2):
        Agreement(store).joining.join_first(Agreement(store).joining.register(0), range(2))
    Agreement(store).joining.join_first(Agreement(store).joining.register(1), range(2))
    head = Agreement(store).iterations.read_head()
    assert head is not None
    assert Agreement(store).iterations.read_iteration(head).members == (Member(0, 1), Member(1, 0))
    assert Agreement(store).joining.await_first(Member(0, 0), range(2), 1.0) is None


# Records


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (Member.parse, ["", "3", "3:", ":1", "a:0", "3:-1", "3:0:1"]),
        (Head.parse, ["", "1:2", "a:1:n", "1:b:n", "1:2:n:m"]),
        (Fault.from_json, ["", "{", "[]", "{}", '{"member": "1:0"}', "nonsense"]),
        (Decision.from_json, ["", "{", "[]", "{}", '{"member": "1:0"}', "nonsense"]),
        (roster_from_json, ["", "{}", '["x"]', "[1]"]),
    ],
)
def test_garbage_in_a_record_is_an_error_that_names_the_key(
    parse: Callable[[str, str], Any], texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(StoreError, match="'the/key'"):
            parse(text, "the/key")


def test_errors_name_the_key_they_read(store: StoreMixin) -> None:
    store.set(keys.HEAD, "nonsense")
    with pytest.raises(StoreError, match=keys.HEAD):
        Agreement(store).iterations.read_head()
    store.append(keys.faults(4), "nonsense\n")
    with pytest.raises(StoreError, match=keys.faults(4)):
        Agreement(store).ends.faults_of(4)
    store.append(keys.dead(4), "nonsense\n")
    with pytest.raises(StoreError, match=keys.dead(4)):
        Agreement(store).ends.deaths_of(4)


# Deaths


def ended_by_a_fault(store: StoreMixin, size: int) -> tuple[list[Member], View]:
    """Forms a job and ends its first iteration by a fault; its members, and that iteration."""
    agreement = Agreement(store)
    members = [agreement.joining.register(slot) for slot in range(size)]
    for member in members:
        agreement.joining.join_first(member, range(size))
    first = agreement.joining.await_first(members[0], range(size), 1.0)
    assert first is not None
    agreement.ends.end_iteration(first.n, FAULT)
    return members, first


def test_no_proposal_keeps_who_was_logged_dead_before_it_arrived() -> None:
    """The reporter logs the death, finds that the member has not arrived, and leaves it at that."""
    store = FakeStore(client="proposer")
    members, view = ended_by_a_fault(store, 2)
    store.execute([Append(keys.arrived(view.n), f"{members[0]} 0 2")])
    other = store.clone("other")
    read: list[str] = []

    def between_the_two_reads(client: str, operation: str, args: Any) -> None:
        key = args[0][0] if isinstance(args[0], list) else args[0]
        if client != "proposer" or key not in (keys.arrived(view.n), keys.dead(view.n)) or key in read:
            return
        read.append(key)
        if len(read) == 2:
            Agreement(other).ends.log_deaths(view.n, {members[1]: None}, ends=True)
            assert members[1] not in Agreement(other).iterations.arrivals_of(view.n)
            other.execute([Append(keys.arrived(view.n), f"{members[1]} 1 2")])

    store.on_operation(between_the_two_reads)
    assert Agreement(store).iterations.advance(view, members[0])
    assert len(read) == 2
    head = Agreement(store).iterations.read_head()
    assert head is not None
    assert Agreement(store).iterations.read_iteration(head).members == (members[0],)


def test_ranks_that_are_lost_together_cost_one_restart() -> None:
    """One of them had arrived: no proposal may see that another is dead, and not that this one is."""
    store = FakeStore(client="agent")
    members, view = ended_by_a_fault(store, 4)
    for rank in (1, 2, 3):
        Agreement(store).iterations.arrive(view, members[rank], rank, 4)
    survivor = Agreement(store.clone("survivor"))

    def propose(client: str, operation: str, args: Any) -> None:
        if client == "agent":
            survivor.iterations.advance(view, members[2])

    store.on_operation(propose)
    report_lost(Agreement(store), dict.fromkeys(members[:2], "its node was lost"), returns=False)
    head = Agreement(store).iterations.read_head()
    assert head is not None and head.n == view.n + 1
    assert Agreement(store).iterations.read_iteration(head).members == (members[2], members[3])


def test_the_first_to_come_back_waits_for_the_others() -> None:
    """Where no member is left, the death that was the last to be counted does not decide."""
    store = FakeStore()
    members, view = ended_by_a_fault(store, 2)
    agreement = Agreement(store)
    newcomers = [agreement.joining.register(slot) for slot in range(2)]
    agreement.ends.log_deaths(view.n, {members[1]: None}, ends=True)
    agreement.iterations.count_deaths(view)
    assert agreement.joining.supersede(view, newcomers[0])
    agreement.iterations.ask_to_join(view.n, newcomers[0], 0)
    agreement.iterations.count_deaths(view)
    assert agreement.iterations.read_head() == view.head
    agreement.iterations.ask_to_join(view.n, newcomers[1], 0)
    assert agreement.iterations.advance(view, None)
    current = agreement.iterations.read_current()
    assert current is not None and current.members == tuple(newcomers)
