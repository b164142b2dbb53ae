"""Global iterations by hand, and their coordinator: ranks 0 to 2 work, rank 3 is a spare, and one fails.

Each process has a client of its own, and is a task of the scheduler, as in a user's tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
from ranks import in_many_orders
from torch.distributed import DistNetworkError

from ft_wrapper.exception import RestartError, TimeoutError
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.records import DONE, FAULT, Member
from ft_wrapper.store import PrefixStore, StoreMixin
from ft_wrapper.testing import FakeStore, Scheduler, Task

WORLD_SIZE = 4
TIMEOUT = timedelta(seconds=90)


class SkewedStore(FakeStore):
    """A client whose own clock shows another time than its peers'."""

    skew = 0.0

    def now(self) -> float:
        return super().now() + self.skew


@pytest.fixture
def job() -> Job:
    """A job of the first seed."""
    return Job()


def _or_error(act: Callable[[int], Any], rank: int) -> Any:
    try:
        return act(rank)
    except (RestartError, DistNetworkError, ValueError) as error:
        return error


class Job:
    """Simulated processes.

    Args:
        seed: of the interleaving.
        world_size: number of ranks that join it.
    """

    def __init__(self, seed: int = 0, world_size: int = WORLD_SIZE) -> None:
        self.scheduler = Scheduler(seed)
        self.world_size = world_size
        self.store: Any = SkewedStore(self.scheduler, use_libuv=bool(seed % 2), client="bystander")
        self.clients: dict[int, Any] = {}
        for rank in range(world_size):
            self.new_process(rank)
        assert set(self.each(range(world_size), self.join).values()) == {0}

    def new_process(self, rank: int) -> SkewedStore:
        """Each has a clock hours away from the others'."""
        client: SkewedStore = self.store.clone(f"rank {rank}")
        client.skew = 5_000.0 * (rank * 7 % 5 - 2)
        self.clients[rank] = client
        return client

    def each(self, ranks: Iterable[int], act: Callable[[int], Any]) -> dict[int, Any]:
        tasks = {rank: self.start(rank, act) for rank in ranks}
        self.scheduler.run()
        return {rank: task.result for rank, task in tasks.items() if not task.crashed}

    def start(self, rank: int, act: Callable[[int], Any]) -> Task:
        """For once the scheduler runs."""
        return self.scheduler.spawn(f"rank {rank}", _or_error, act, rank)

    def one(self, rank: int, act: Callable[[int], Any]) -> Any:
        """The same for one rank alone."""
        return self.each([rank], act)[rank]

    def join(self, rank: int) -> int:
        """What a process does first."""
        return int(self.clients[rank].handle_rank_restart(self.world_size, TIMEOUT, rank=rank))

    def advance(self, rank: int) -> int:
        """What a process does when it has left the function."""
        client = self.clients[rank]
        return int(client.coordinate_global_iteration_advance(self.world_size, TIMEOUT, rank == 0))

    def train_until_in(self, rank: int, member: Member, within: float | None = None) -> int:
        """Goes on whenever the iteration ends, until somebody else is in."""
        client, n = self.clients[rank], self.join(rank)
        while member not in Agreement(client).iterations.read_current().members:
            assert Agreement(client).ends.wait_for_end(n, within or 10.0), (
                "anyone who wants in ends the iteration"
            )
            n = self.advance(rank)
        return n

    def elect(self, rank: int) -> int:
        """Whom a process takes for the coordinator."""
        return int(self.clients[rank].elect_coordinator(self.world_size, TIMEOUT))

    def dies(self, rank: int) -> None:
        """The monitor's evidence of a death."""
        n = self.store.get_global_iteration()
        Agreement(self.store).ends.log_deaths(n, {self.member(rank): None}, ends=True)

    def member(self, rank: int) -> Member:
        """The process that holds a rank in the iteration that is on."""
        return next(member for member in self.members() if member.slot == rank)

    def members(self) -> tuple[Member, ...]:
        """The processes of the iteration that is on."""
        current = Agreement(self.store).iterations.read_current()
        assert current is not None
        members: tuple[Member, ...] = current.members
        return members

    def pass_time(self, seconds: int, alive: Iterable[int]) -> None:
        """Lets time pass, in which only some ranks send heartbeats; all of them watch the others."""

        def beat(rank: int) -> None:
            for _ in range(seconds):
                self.clients[rank].update_coordinator_heartbeat()
                self.scheduler.sleep(1.0)
                self.elect(rank)

        for rank, error in self.each(alive, beat).items():
            assert error is None, f"rank {rank}: {error}"

    def all_but_propose(self, ranks: Iterable[int]) -> None:
        """All ranks leave the function, and the last one is cut off before it can propose."""
        Agreement(self.store).ends.end_iteration(self.store.get_global_iteration(), FAULT)
        for rank in ranks:
            client, current = self.clients[rank], Agreement(self.store).iterations.read_current()
            assert current is not None
            self.store.fail("add", "*/count/gone/*", client=client.client)
            with pytest.raises(DistNetworkError):
                Agreement(client).iterations.arrive(current, self.member(rank), rank, self.world_size)


in_orders = in_many_orders("job", Job, range(6))


# The number


def test_number_before_and_after_the_first_decision() -> None:
    store = FakeStore()
    assert store.get_global_iteration() == 0
    assert store.get_current_coordinator() is None and not store.is_coordinator_alive()
    assert store.increment_global_iteration() == 0  # which decides nothing
    assert Agreement(store).iterations.read_head() is None
    assert Job().store.get_global_iteration() == 0


def test_ready_once_decided() -> None:
    scheduler = Scheduler()
    store = FakeStore(scheduler)

    def wait() -> str:
        with pytest.raises(TimeoutError) as caught:
            store.wait_for_global_iteration_ready(TIMEOUT)
        return str(caught.value)

    rank_2 = store.clone("rank 2")
    Agreement(rank_2).joining.join_first(Agreement(rank_2).joining.register(2), range(WORLD_SIZE))
    task = scheduler.spawn("waits", wait)
    scheduler.run()
    assert "iteration 0 was not decided" in task.result and "only the ranks [2] have joined" in task.result
    assert Job().store.wait_for_global_iteration_ready(TIMEOUT) == 0


def test_waiting_names_who_has_not_left() -> None:
    job = Job()

    def wait(rank: int) -> int:
        return job.clients[rank].wait_for_global_iteration_ready(timedelta(seconds=5), iteration=1)

    assert "iteration 0 is still running" in str(job.one(0, wait))
    job.all_but_propose([0, 2])
    Agreement(job.store).ends.log_deaths(0, {Member(3, 0): None}, ends=True)
    error = job.one(0, wait)
    assert isinstance(error, TimeoutError) and "ranks [1] have not left iteration 0" in str(error)


@pytest.mark.parametrize("signalled", [True, False])
def test_signal_wakes_those_whom_a_lost_proposer_did_not(signalled: bool) -> None:
    job = Job()
    job.all_but_propose(range(4))
    started = job.scheduler.now()

    def wait(rank: int) -> float:
        assert job.clients[rank].wait_for_global_iteration_ready(TIMEOUT, iteration=1) == 1
        return job.scheduler.now() - started

    def propose(rank: int) -> None:
        job.scheduler.sleep(0.1)  # by now the other one waits
        job.store.fail("set", keys.wake_head(1))  # lost between deciding and waking
        with pytest.raises(DistNetworkError):
            job.clients[rank].increment_global_iteration()
        if signalled:
            job.clients[rank].signal_global_iteration_ready(1)

    # With libuv the decision itself changes no key that they wait for.
    waits, proposes = job.start(1, wait), job.start(0, propose)
    job.scheduler.run()
    assert proposes.result is None
    assert (waits.result < 0.2) is signalled


def test_nothing_is_ready_that_was_not_decided(job: Job) -> None:
    with pytest.raises(ValueError, match=r"iteration=0 .*: none has"):
        FakeStore().signal_global_iteration_ready(0)
    with pytest.raises(ValueError, match=r"iteration=1 .*: the last one is 0"):
        job.store.signal_global_iteration_ready(1)
    assert not job.store.check([keys.wake_head(1)])  # or all who wait for it would spin
    job.each(range(4), job.advance)
    job.store.delete_key(keys.wake_head(0))
    job.store.signal_global_iteration_ready(0)  # long past
    assert not job.store.check([keys.wake_head(0)])


# Increments


def test_no_increment_while_a_live_rank_is_in_the_function() -> None:
    job = Job()
    assert job.clients[0].increment_global_iteration() == job.store.increment_global_iteration() == 0
    job.all_but_propose([0, 1, 2])
    assert [client.increment_global_iteration() for client in job.clients.values()] == [0] * 4
    assert job.store.increment_global_iteration() == 0
    job.all_but_propose([3])
    assert job.clients[0].increment_global_iteration() == 1


def test_who_has_arrived_leaves_out_the_silent_and_a_bystander_nobody() -> None:
    job = Job()
    job.all_but_propose([1, 2, 3])
    job.store.get_active_ranks_for_coordination(4, TIMEOUT)
    for _ in range(3):
        job.pass_time(15, alive=[1, 2, 3])
        seen = job.store.get_active_ranks_for_coordination(4, TIMEOUT)
    assert seen == {1, 2, 3}
    assert job.store.increment_global_iteration() == 0
    assert job.clients[1].increment_global_iteration() == 1


# Going on


@in_orders
def test_all_ranks_go_on_together(job: Job) -> None:
    for n in (1, 2, 3):
        assert job.each(range(4), job.advance) == dict.fromkeys(range(4), n)


def test_rank_that_lives_but_does_not_come_is_left_out_at_the_timeout_and_learns_it() -> None:
    job = Job()

    def heart() -> None:
        while True:
            job.clients[1].update_coordinator_heartbeat()
            job.scheduler.sleep(1.0)

    job.scheduler.spawn("heart 1", heart, daemon=True)
    started = job.scheduler.now()
    assert job.each([0, 2, 3], job.advance) == dict.fromkeys([0, 2, 3], 1)
    assert 0.0 <= job.scheduler.now() - started - TIMEOUT.total_seconds() < 20.0
    for late in (job.advance, job.join):
        error = job.one(1, late)
        assert isinstance(error, RestartError) and "slot 1 was left out after iteration 0" in str(error)
    assert job.store.get_global_iteration() == 1


def test_client_that_has_not_joined_cannot_advance(job: Job) -> None:
    for act in (
        lambda s: s.coordinate_global_iteration_advance(4, TIMEOUT),
        lambda s: s.update_coordinator_heartbeat(),
    ):
        with pytest.raises(RestartError, match="has not joined the job: call handle_rank_restart"):
            act(job.store)


# Who is there


def test_silent_ranks_are_not_active_whatever_the_clocks_show() -> None:
    job = Job()
    job.pass_time(29, alive=[0, 2, 3])
    for rank in (0, 2, 3):
        assert job.clients[rank].get_active_ranks_for_coordination(4, TIMEOUT) == {0, 1, 2, 3}
    job.pass_time(2, alive=[0, 2, 3])
    for rank in (0, 2, 3):
        assert job.clients[rank].get_active_ranks_for_coordination(4, TIMEOUT) == {0, 2, 3}
        longer = job.clients[rank].get_active_ranks_for_coordination(4, TIMEOUT, heartbeat_timeout=60.0)
        assert longer == {0, 1, 2, 3}
    # Rank 1 was only cut off: it may declare the others silent, never itself.
    assert 1 in job.clients[1].get_active_ranks_for_coordination(4, TIMEOUT)
    job.clients[1].update_coordinator_heartbeat()
    assert job.clients[0].get_active_ranks_for_coordination(4, TIMEOUT) == {0, 1, 2, 3}


# The coordinator


def test_coordinator_is_the_lowest_live_rank(job: Job) -> None:
    assert job.store.get_active_ranks_for_coordination(2, TIMEOUT) == {0, 1}
    assert job.store.get_current_coordinator() == job.elect(3) == 0
    job.dies(0)
    assert job.store.get_active_ranks_for_coordination(4, TIMEOUT) == {1, 2, 3}
    assert job.store.get_current_coordinator() == job.elect(3) == 1
    job.dies(2)
    job.dies(1)
    assert job.store.get_current_coordinator() == job.elect(3) == 3
    job.dies(3)
    assert job.store.get_current_coordinator() is None
    assert not job.store.is_coordinator_alive()
    assert job.store.get_coordinator_heartbeat() == 0
    with pytest.raises(RestartError, match="no rank below world_size=4 lives"):
        job.elect(3)


def test_handover_from_a_coordinator_that_falls_silent() -> None:
    job = Job()
    assert all(client.is_coordinator_alive() for client in job.clients.values())
    job.pass_time(31, alive=[1, 2, 3])
    for rank in (1, 2, 3):
        assert not job.clients[rank].is_coordinator_alive()
        assert job.clients[rank].is_coordinator_alive(timeout_seconds=60)
        assert job.elect(rank) == 1
    assert job.store.get_current_coordinator() == 0  # silence is one client's suspicion, no evidence
    assert job.each([1, 2, 3], job.advance) == dict.fromkeys([1, 2, 3], 1)
    assert job.store.get_current_coordinator() == 1
    assert all(job.clients[rank].is_coordinator_alive() for rank in (1, 2, 3))


def test_heartbeat_is_a_count_of_the_coordinators_own(job: Job) -> None:
    before = job.store.get_coordinator_heartbeat()
    job.clients[0].update_coordinator_heartbeat()
    job.clients[0].update_coordinator_heartbeat()
    job.clients[1].update_coordinator_heartbeat()
    assert job.store.get_coordinator_heartbeat() == before + 2
    job.dies(0)
    assert job.store.get_coordinator_heartbeat() == Agreement(job.store).heartbeats.get_heartbeat(
        Member(1, 0)
    )


# Coming back


@in_orders
def test_rank_restarts_after_the_others_have_gone_on(job: Job) -> None:
    job.dies(1)
    job.each([0, 2, 3], job.advance)
    assert (job.store.get_iteration_for_rank(1), job.store.get_global_iteration()) == (0, 1)
    process = job.new_process(1)
    back = job.start(1, lambda rank: process.catch_up_restarting_rank(TIMEOUT, rank=rank))
    others = job.each([0, 2, 3], lambda rank: job.train_until_in(rank, Member(1, 1)))
    assert {*others.values(), back.result} == {2}
    assert job.store.get_iteration_for_rank(1) == 2


@in_orders
def test_rank_restarts_while_the_others_go_on(job: Job) -> None:
    """Rank 1 crashes at any step of its advance, and its next process begins at any step of theirs."""
    crashes = job.start(1, job.advance)

    def again(rank: int) -> int:
        job.scheduler.crash(crashes)
        job.new_process(rank)
        return job.join(rank)

    def go_on(rank: int) -> int:
        job.advance(rank)
        return job.train_until_in(rank, Member(1, 1))

    back = job.start(1, again)
    others = job.each([0, 2, 3], go_on)
    assert len({*others.values(), back.result}) == 1 and back.result in (1, 2)


def test_older_process_of_a_rank_is_out(job: Job) -> None:
    """It was only paused: it acts for no one any more, least of all for its successor."""
    zombie = job.clients[1]
    job.new_process(1)
    job.start(1, job.join)
    job.each([0, 2, 3], job.advance)
    head = Agreement(job.store).iterations.read_head()
    arrived = Agreement(job.store).iterations.arrivals_of(1)
    job.clients[1] = zombie
    beats = Agreement(job.store).heartbeats.get_heartbeat(Member(1, 1))
    zombie.update_coordinator_heartbeat()
    assert Agreement(job.store).heartbeats.get_heartbeat(Member(1, 1)) == beats
    for act in (job.advance, job.join):
        assert "slot 1 was taken over by process" in str(job.one(1, act))
    assert Agreement(job.store).iterations.arrivals_of(1) == arrived == set()
    assert Agreement(job.store).ends.outcome_of(1) is None
    assert Agreement(job.store).iterations.read_head() == head


def test_nothing_to_catch_up_with() -> None:
    store = FakeStore()
    with pytest.raises(RestartError, match="there is no job to catch up with yet: call handle_rank_restart"):
        store.catch_up_restarting_rank(TIMEOUT, rank=1)
    assert store.num_keys() == 0
    job = Job()
    Agreement(job.store).ends.end_iteration(0, DONE)
    job.new_process(1)
    error = job.one(1, job.join)
    assert isinstance(
        error, RestartError
    ) and "slot 1 (process 2) cannot join: the call has completed" in str(error)


def test_clone_is_the_same_process(store: StoreMixin) -> None:
    assert store.handle_rank_restart(1, TIMEOUT, rank=0) == 0
    assert store.coordinate_global_iteration_advance(1, TIMEOUT) == 1
    clone = store.clone()
    assert clone.handle_rank_restart(1, TIMEOUT, rank=0) == 1
    assert Agreement(store).joining.newest_of(0) == Member(0, 0)
    clone.close()


def test_rank_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore(Scheduler())
    monkeypatch.delenv("RANK", raising=False)
    for act in (
        lambda: store.handle_rank_restart(1, TIMEOUT),
        lambda: store.catch_up_restarting_rank(TIMEOUT),
    ):
        with pytest.raises(ValueError, match="pass rank=, or set the environment variable RANK"):
            act()
    monkeypatch.setenv("RANK", "0")
    job = Job(world_size=1)
    process = job.store.clone("again")
    again = job.scheduler.spawn("again", process.handle_rank_restart, 1, TIMEOUT)
    job.scheduler.run()
    assert again.result == 1 and job.members() == (Member(0, 1),)


# Which iteration a rank was in


def test_recorded_iteration_of_a_rank(job: Job) -> None:
    for _ in range(3):
        job.each(range(4), job.advance)
    assert [job.store.get_iteration_for_rank(rank) for rank in range(4)] == [3] * 4  # by coordinate_...
    assert job.store.get_iteration_for_rank(17) == 3  # nothing is recorded: the current one
    job.store.record_iteration_for_rank(17, 1)
    assert job.store.get_iteration_for_rank(17) == 1
    job.store.record_iteration_for_rank(17, 3)
    job.store.record_iteration_for_rank(17, 2)  # late
    assert job.store.get_iteration_for_rank(17) == 3


def test_no_number_is_recorded_that_head_has_not_reached(job: Job) -> None:
    for wrong in (1, -1):
        with pytest.raises(ValueError, match=f"iteration={wrong} of rank 2 must lie in 0..0"):
            job.store.record_iteration_for_rank(2, wrong)
    assert job.store.get_iteration_for_rank(2) == 0


@in_orders
def test_the_highest_of_records_made_at_once_stays(job: Job) -> None:
    for _ in range(3):
        job.each(range(4), job.advance)
    job.store.delete_key(keys.last_iteration(0))
    job.each(range(4), lambda rank: job.clients[rank].record_iteration_for_rank(0, rank))
    assert job.store.get_iteration_for_rank(0) == 3


# Inside a wrapped function


def test_store_of_an_iteration_speaks_of_the_whole_job(job: Job) -> None:
    job.each(range(4), job.advance)
    store = PrefixStore(1, job.store)
    assert store.get_global_iteration() == store.increment_global_iteration() == 1
    assert store.wait_for_global_iteration_ready(TIMEOUT) == 1
    store.signal_global_iteration_ready(1)
    assert store.get_active_ranks_for_coordination(4, TIMEOUT) == {0, 1, 2, 3}
    assert store.elect_coordinator(4, TIMEOUT) == store.get_current_coordinator() == 0
    assert store.is_coordinator_alive()
    assert 0 < store.get_coordinator_heartbeat() <= job.store.get_coordinator_heartbeat()
    store.record_iteration_for_rank(7, 1)
    assert store.get_iteration_for_rank(7) == job.store.get_iteration_for_rank(7) == 1
    assert not [key for key in job.store.list_keys() if key.startswith(keys.iteration_prefix(1))]


def test_job_of_the_wrapper_is_joined_by_the_wrapper_only() -> None:
    store = FakeStore(Scheduler())
    Agreement(store).joining.agree_on_terms(0, 0, {"function": "train"})
    with pytest.raises(RestartError, match="the job is the wrapper's"):
        store.handle_rank_restart(1, TIMEOUT, rank=0)
    assert (
        Agreement(store).iterations.read_head() is None
        and Agreement(store).joining.newest_of(0).incarnation == -1
    )
    with pytest.raises(ValueError, match="the job has 'by hand'"):  # nor the other way round
        Agreement(Job().store).joining.agree_on_terms(0, 0, {"function": "train"})


def test_wrapped_function_cannot_join_or_leave_by_itself(job: Job) -> None:
    store, before = PrefixStore(0, job.clients[1]), contents(job.store)
    for act, why in (
        (lambda: store.handle_rank_restart(4, TIMEOUT, rank=1), "the wrapper has joined"),
        (lambda: store.catch_up_restarting_rank(TIMEOUT, rank=1), "the wrapper has joined"),
        (lambda: store.coordinate_global_iteration_advance(4, TIMEOUT), "leave it to the wrapper"),
        (store.update_coordinator_heartbeat, "leave it to the wrapper"),
    ):
        with pytest.raises(RestartError, match=why):
            act()
    assert contents(job.store) == before


def contents(store: StoreMixin) -> dict[str, bytes]:
    """All that a store holds."""
    names = store.list_keys()
    return dict(zip(names, store.multi_get(names), strict=True))
