"""How ranks agree on the step at which they see a notice, and what signals do in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from ft_wrapper.exception import RankDrained
from ft_wrapper.monitor.shared_memory import RankMemory
from ft_wrapper.monitor.watch import RankMonitor
from ft_wrapper.protocol import keys
from ft_wrapper.protocol.notice import GRACE_ENV, Notice, step_to_see
from ft_wrapper.restart.notices import Notices, hear_signals
from ft_wrapper.store.secret import AGENT_ENV
from ft_wrapper.testing import FakeStore

ONE, OTHER = Notice("node 1", "SIGTERM", 60.0, "a"), Notice("node 2", "maintenance", id="b")


@pytest.mark.parametrize(("length", "step"), [(10.0, 102), (0.25, 102), (0.2, 103), (0.01, 150)])
def test_the_step_is_half_a_second_ahead_and_at_least_two(length: float, step: int) -> None:
    assert step_to_see(100, length) == step
    assert step_to_see(100, 0.0) > 100_000


class Process:
    """A rank that begins its steps at once."""

    def __init__(self, store: FakeStore, rank: int, size: int) -> None:
        self.memory = RankMemory()
        self.memory.enter_iteration(3)
        self.memory.rank = rank
        self.meetings: list[float] = []
        nothing = contextlib.nullcontext()
        user_store: Any = mock.Mock()
        user_store.return_value.barrier = self.meet
        self.notices = Notices(self.memory, store, nothing, contextlib.nullcontext, user_store)
        self.notices.enter()
        self.notices.place = rank, size
        self.ping = self.memory.make_ping(look=self.notices.look)[0]

    def meet(self, _: Any, __: Any, ___: Any, within: timedelta) -> None:
        self.meetings.append(within.total_seconds())

    def seen(self) -> str | None:
        now = self.notices.current
        return None if now is None else now.id

    def long_step(self, step: int) -> None:
        """A step that has taken ten seconds when the next one begins."""
        self.ping(step)
        self.memory.step_stamp -= 10.0


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def ranks(store: FakeStore) -> Iterator[list[Process]]:
    made = [Process(store.clone(), rank, 3) for rank in range(3)]
    yield made
    for one in made:
        one.memory.close()


def test_the_last_that_knows_of_it_says_where_all_see_it(ranks: list[Process], store: FakeStore) -> None:
    first, second, last = ranks
    for one in ranks:
        one.long_step(10)
    first.memory.give(ONE)
    for step in (11, 12):
        first.long_step(step)
    second.memory.give(ONE)
    for one in (second, last):
        one.long_step(11)
    last.memory.give(ONE)
    last.long_step(12)
    assert store.get(keys.notice(3, 0)).startswith(b"14 "), "two steps behind the one that a rank is at"
    second.long_step(12)
    for step in (13, 14):
        assert [one.seen() for one in ranks] == [None] * 3
        for one in ranks:
            one.long_step(step)
    assert [one.seen() for one in ranks] == ["a"] * 3
    assert not any(one.memory.looks for one in ranks)
    assert last.notices.current is not None and 59 < (last.notices.current.seconds or 0) < 60


def test_while_a_rank_does_not_know_of_it_no_rank_sees_it(ranks: list[Process]) -> None:
    for step in range(50):
        for one in ranks[:2]:
            one.memory.give(ONE)
            one.long_step(step)
    assert [one.seen() for one in ranks[:2]] == [None] * 2


def test_two_notices_come_in_the_same_order_on_all_ranks(ranks: list[Process]) -> None:
    shown: list[list[str | None]] = [[] for _ in ranks]
    for one, notice in zip(ranks, (ONE, OTHER, ONE), strict=True):  # on some a later one has come instead
        one.memory.give(notice)
    for step in range(20):
        for one, said in zip(ranks, shown, strict=True):
            one.long_step(step)
            said.append(one.seen())
        for one in ranks if step == 4 else ():
            one.memory.give(OTHER)
    assert shown == [shown[0]] * 3 and [*dict.fromkeys(shown[0])] == [None, "a", "b"]


def test_once_the_step_is_known_no_rank_asks_the_store(ranks: list[Process]) -> None:
    for one in ranks:
        one.memory.give(ONE)
    for step in range(2):
        for one in ranks:
            one.long_step(step)
    for one in ranks:
        one.notices.store = FakeStore()  # it would find nothing there
    for step in range(2, 9):
        for one in ranks:
            one.long_step(step)
    assert [one.seen() for one in ranks] == ["a"] * 3


def test_without_steps_it_is_seen_at_once(ranks: list[Process]) -> None:
    one = ranks[0]
    one.memory.give(ONE)
    one.ping()
    assert one.seen() == "a"
    one.ping(0)
    assert one.seen() is None, "now all ranks can agree"


def test_with_a_live_state_it_waits_for_that(ranks: list[Process], store: FakeStore) -> None:
    one = ranks[0]
    one.notices.rides = True
    one.memory.give(ONE)
    assert one.seen() is None
    for step in range(9):
        one.long_step(step)
    assert one.seen() is None and not one.memory.looks and store.num_keys() == 0
    ends = dataclasses.replace(ONE, ends=True)
    assert one.notices.new([]) is not None and one.notices.new([ONE]) is None
    one.memory.give(ends)
    one.long_step(9)
    assert one.notices.new([ONE]) is not None and one.notices.new([ONE, ends]) is None


def test_the_ranks_meet_at_the_step_behind_it_before_they_leave(ranks: list[Process]) -> None:
    one, other, spare = ranks
    spare.memory.active = False
    for each in (one, other):
        each.memory.active = True
        each.memory.give(dataclasses.replace(ONE, ends=True))  # the spare does not know of it yet
    one.notices.place, other.notices.place = (0, 2), (1, 2)
    for step in range(3):
        for each in (one, other):
            each.long_step(step)
    assert one.seen() == "a" and not one.meetings and not one.memory.leave_requested
    other.notices.leave_if_over()  # not yet: a fault has come between
    with pytest.raises(RankDrained, match="all ranks leave: node 1: SIGTERM; the job ends"):
        one.ping(3)
    assert 59 < one.meetings[0] < 60
    for each in (other, spare):
        assert not each.memory.leave_requested
        with pytest.raises(RankDrained):
            each.notices.leave_if_over()
    assert [each.memory.leave_requested for each in ranks] == [True] * 3


def test_all_ranks_meet_before_those_of_a_node_leave(ranks: list[Process]) -> None:
    """A rank that left at once would interrupt one that is still saving."""
    first, second, leaves = ranks
    for one in ranks:
        one.memory.give(dataclasses.replace(ONE, leaving=("node-1",)))
    leaves.memory.leave_requested = leaves.memory.looks = True
    for step in range(3):
        for one in ranks:
            one.long_step(step)
    assert [one.seen() for one in ranks] == ["a"] * 3 and not any(one.meetings for one in ranks)
    with pytest.raises(RankDrained):
        leaves.ping(3)
    for step in (3, 4):
        for one in (first, second):
            one.long_step(step)
    assert [len(one.meetings) for one in ranks] == [1] * 3
    assert not first.memory.looks and not second.memory.looks


def test_a_rank_that_is_drained_saves_before_it_leaves_also_after_a_fault(ranks: list[Process]) -> None:
    """All that were to go on without it may be lost: then the job ends, and ranks meet as they leave."""
    for one in ranks:
        one.memory.active = one.memory.leave_requested = True
        with pytest.raises(RankDrained):
            one.notices.leave_if_over()
        one.memory.give(ONE)
        one.notices.leave_if_over()
    for step in range(3):
        for one in ranks:
            one.long_step(step)
    assert [one.seen() for one in ranks] == ["a"] * 3
    with pytest.raises(RankDrained, match="was drained"):
        ranks[0].notices.leave_if_over()
    for one in ranks:
        one.memory.give(dataclasses.replace(ONE, id="a ends", ends=True))
    for step in range(3, 6):
        for one in ranks:
            one.long_step(step)
    with pytest.raises(RankDrained, match="the job ends"):
        ranks[0].ping(6)
    assert ranks[0].meetings


def test_the_next_iteration_begins_anew(ranks: list[Process]) -> None:
    one = ranks[0]
    one.notices.place = 0, 1
    one.memory.give(ONE)
    for step in range(4):
        one.long_step(step)
    one.memory.enter_iteration(4)
    one.notices.enter()
    one.notices.place = 0, 1
    assert one.memory.looks and one.seen() == "a"
    one.long_step(0)
    assert one.seen() is None
    for step in range(1, 4):
        one.long_step(step)
    assert one.seen() == "a"


def test_what_an_agent_asks_for_meanwhile_is_not_lost(ranks: list[Process]) -> None:
    """A rank that looks has said first that it need not look any longer."""
    first = ranks[0]
    for one in ranks:
        one.long_step(0)
        one.memory.give(ONE)

    def asked_to_leave() -> contextlib.nullcontext[None]:
        first.memory.leave_requested = first.memory.looks = True
        return contextlib.nullcontext()

    first.notices.atomic = asked_to_leave
    for step in (1, 2, 3):
        for one in ranks:
            one.long_step(step)
    assert first.seen() == "a", "it saves first"
    for _ in range(2):
        with pytest.raises(RankDrained, match="was drained"):
            first.long_step(4)


# ---- signals


@contextlib.contextmanager
def hearing_signals(memory: RankMemory) -> Iterator[None]:
    with contextlib.ExitStack() as owned:
        hear_signals(memory, owned)
        yield


@pytest.fixture
def memory() -> Iterator[RankMemory]:
    memory = RankMemory()
    memory.rank = 2
    with contextlib.closing(memory):
        yield memory


@pytest.fixture(autouse=True)
def no_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_sigusr1_without_an_agent_is_a_notice_of_this_rank(
    memory: RankMemory, monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    monkeypatch.delenv(AGENT_ENV, raising=False)
    monkeypatch.setenv(GRACE_ENV, "30")
    signal.signal(signal.SIGUSR1, before)
    with hearing_signals(memory):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        for number, age in (("1", 0.0), ("1", 0.0), ("2", 6.0)):
            memory.notice_stamp -= age
            signal.raise_signal(signal.SIGUSR1)
            notice = memory.notice
            assert notice is not None and notice.id == number and memory.looks
            assert (notice.who, notice.why) == ("rank 2", "SIGUSR1") and 29 < (notice.seconds or 0) <= 30
    assert signal.getsignal(signal.SIGUSR1) is before


def test_handlers_of_the_users_stay(memory: RankMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENT_ENV, f"ftrun-{os.getppid()}-x")
    monkeypatch.setenv(GRACE_ENV, "30")
    heard: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: heard.append(signum))
    with hearing_signals(memory):
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(number)
    assert heard == [signal.SIGUSR1, signal.SIGTERM] and memory.notice is None


def forked(body: Callable[[], None]) -> int:
    """A child process that has this one as its agent."""
    pid = os.fork()
    if pid == 0:
        try:
            os.environ |= {AGENT_ENV: f"ftrun-{os.getppid()}-x", GRACE_ENV: "30"}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            body()
        finally:
            os._exit(1)
    return pid


def ended_by(pid: int) -> int:
    """The signal that ends a process."""
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), os.waitstatus_to_exitcode(status)
    return os.WTERMSIG(status)


@pytest.mark.parametrize("is_known", [False, True])
def test_sigusr1_goes_to_the_agent_unless_there_is_a_notice(memory: RankMemory, is_known: bool) -> None:
    def body() -> None:
        if is_known:
            memory.give(ONE)
        with hearing_signals(memory):
            signal.raise_signal(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGKILL)

    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.set())
    try:
        assert ended_by(forked(body)) == signal.SIGKILL
        assert heard.wait(0.0 if is_known else 30.0) != is_known  # the child has sent it before its end
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert memory.notice is None or is_known


def test_an_agent_that_does_not_expect_sigusr1_is_spared(memory: RankMemory) -> None:
    def body() -> None:
        with hearing_signals(memory):
            signal.raise_signal(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended_by(forked(body)) == signal.SIGKILL
    assert memory.notice is not None and memory.notice.id == "1"


def test_sigterm_is_left_to_the_agent(memory: RankMemory) -> None:
    """It ends the function's children, and a rank that its agent or its monitor ends."""

    def body() -> None:
        with hearing_signals(memory):
            signal.raise_signal(signal.SIGTERM)
            child = os.fork()
            if child == 0:
                signal.raise_signal(signal.SIGTERM)
                os._exit(1)
            assert ended_by(child) == signal.SIGTERM
            memory.end_requested = True
            signal.raise_signal(signal.SIGTERM)

    assert ended_by(forked(body)) == signal.SIGTERM
    assert memory.end_requested


def test_a_rank_that_its_monitor_ends_does_not_ignore_that(memory: RankMemory) -> None:
    here, there = os.pipe()

    def body() -> None:
        with hearing_signals(memory):
            os.close(there)
            while True:
                signal.pause()

    pid = forked(body)
    os.close(there)
    os.read(here, 1)  # until the child has its handlers
    os.close(here)
    pidfd = os.pidfd_open(pid)
    monitor = mock.Mock(memory=memory, pid=pid, limits=mock.Mock(termination_grace_time=5.0))
    RankMonitor._end_rank(monitor, pidfd, "made no progress")
    os.close(pidfd)
    assert ended_by(pid) == signal.SIGTERM
