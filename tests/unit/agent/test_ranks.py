"""What follows when something happens to a rank, event by event: no process, no thread, our own clock."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from ft_wrapper.agent.elastic import WorkerState
from ft_wrapper.agent.group import Group
from ft_wrapper.agent.policy import JobFacts, JobOutcome, Policy, RestartPolicy
from ft_wrapper.agent.ranks import (
    END_LIMIT,
    PLACE_DELAY,
    SPARE_DELAY,
    TOGETHER,
    AskDrain,
    AskEnd,
    AskNotice,
    AskPlace,
    AskToLeave,
    CancelStarts,
    EndTemplate,
    ForkAhead,
    Give,
    Kill,
    LeaveJob,
    Log,
    RankAction,
    Ranks,
    ReportFailure,
    Send,
    Start,
)
from ft_wrapper.agent.rounds import DONE, INFRASTRUCTURE, PROGRAM, End, Failure, JobResult, News, What, alone
from ft_wrapper.protocol.notice import SAME_WITHIN, Notice

ROLE = "trainer"
GRACE = 5.0  # seconds from a signal to SIGKILL
TERM = Send(signal.SIGTERM)
NOTICE = Notice("node 3", "SIGTERM", 30.0, "a")
NOTICED = News(What.NOTICE, notice=NOTICE)


@dataclasses.dataclass
class Job:
    """What the ranks' store says."""

    formed: bool = True
    open: bool = True
    given_up: int | None = None
    finished: dict[int, int | None] | None = None
    by: str = ""
    error: str = ""

    def facts(self, failure: Failure | None) -> JobFacts:
        gave_up = failure is not None and failure.pid == self.given_up
        return JobFacts(self.formed, self.open, gave_up, ended_by=self.by, error=self.error)


class AskedRanks(Ranks):
    """Gets facts where it wants them, and only these; logs nothing."""

    def __init__(self, job: Job, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.job = job

    def _asked(self, is_needed: bool) -> JobOutcome:
        return JobOutcome(self.job.finished, self.job.formed) if is_needed else JobOutcome()

    def end(self) -> End:  # type: ignore[override]
        return super().end(self._asked(self.needs_outcome_at_end))

    def tick(self) -> list[RankAction]:  # type: ignore[override]
        return unlogged(super().tick(self._asked(self.needs_outcome)))

    def ended(self, rank: int, exitcode: int, failure: Failure | None = None) -> list[RankAction]:  # type: ignore[override]
        facts = self.job.facts(failure) if failure and self.decides(rank) else JobFacts()
        return unlogged(super().ended(rank, exitcode, failure, facts))

    def not_started(self, rank: int, failure: Failure) -> list[RankAction]:  # type: ignore[override]
        return unlogged(super().not_started(rank, failure, self.job.facts(failure)))

    def signalled(self, signum: int, name: str = "") -> list[RankAction]:
        return unlogged(super().signalled(signum, name or signal.Signals(signum).name))

    def take_news(self, news: News) -> list[RankAction]:
        return unlogged(super().take_news(news))

    def waits_at_end(self, since: float) -> list[RankAction]:
        return unlogged(super().waits_at_end(since))

    def noticed(self, why: str, seconds: float = 0.0) -> list[RankAction]:
        return unlogged(super().noticed(why, seconds))

    def stays(self, asked: AskDrain, why: str) -> list[RankAction]:
        return unlogged(super().stays(asked, why))


def unlogged(actions: list[RankAction]) -> list[RankAction]:
    return [action for action in actions if not isinstance(action, Log)]


class Node:
    """A node with some ranks, and a clock that stands still."""

    def __init__(
        self,
        nproc: int = 2,
        policy: Policy = Policy.RANK,
        *,
        restarts: int = 1,
        drain: float = 0.0,
        grace: float = 0.0,
    ) -> None:
        self.now = 100.0
        self.job = Job()
        self.nproc = nproc
        self.group = Group(ROLE, nproc, restarts)
        deciding = RestartPolicy(policy, restarts, 10)
        self.ranks = AskedRanks(self.job, nproc, deciding, self.group, GRACE, lambda: self.now, drain, grace)

    def begin(self) -> list[Start]:
        """Starts a round; no process runs yet."""
        where = alone("host:1", self.nproc)
        self.group.begin_round(where)
        starts = self.ranks.begin_round(where)
        assert all(isinstance(start, Start) for start in starts)
        return [start for start in starts if isinstance(start, Start)]

    def run(self) -> Node:
        """Starts a round, whose processes run."""
        for start in self.begin():
            assert self.forked(start.rank) == []
        self.group.all_started()
        assert self.tick() == []
        return self

    def forked(self, rank: int, incarnation: int = 0) -> list[RankAction]:
        return self.ranks.forked(rank, incarnation, pid(rank, incarnation))

    def fails(self, rank: int, incarnation: int = 0, exitcode: int = 7) -> list[RankAction]:
        return self.ranks.ended(rank, exitcode, failure(rank, incarnation, exitcode))

    def own_notice(self, why: str, seconds: float | None) -> Notice:
        return Notice("ftrun", why, seconds, f"0 {self.now}")

    def succeeds(self, rank: int) -> list[RankAction]:
        return self.ranks.ended(rank, 0)

    def tick(self, later: float = 0.0) -> list[RankAction]:
        self.now += later
        return self.ranks.tick()


def pid(rank: int, incarnation: int = 0) -> int:
    return 1000 + 10 * rank + incarnation


def failure(rank: int, incarnation: int = 0, exitcode: int = 7) -> Failure:
    how = f"exit code {exitcode}"
    return Failure(rank, pid(rank, incarnation), exitcode, 0.0, "", "", incarnation, how=how)


def without_words(actions: Sequence[RankAction]) -> list[RankAction]:
    """The actions but for the words, which have to be the last."""
    *others, last = actions
    assert isinstance(last, ReportFailure)
    return others


# A round -----------------------------------------------------------------------------------------------


def test_a_round_starts_all_and_is_over_when_all_have_ended() -> None:
    node = Node()
    assert node.begin() == [Start(0, 0, 0, True), Start(1, 0, 0, True)]
    assert node.ranks.are_asked_for
    assert not node.ranks.is_over
    assert [node.forked(0), node.forked(1)] == [[], []]
    assert not node.ranks.are_asked_for
    assert node.ranks.names() == "ranks 0, 1"
    assert node.succeeds(0) == node.succeeds(1) == []
    assert node.ranks.is_over
    end = node.ranks.end()
    assert (end.failures, end.again, end.failed, end.signum) == ([], False, "", None)
    assert node.group.succeeded == {0, 1}


def test_a_process_is_forked_ahead_a_while_after_the_last_start() -> None:
    node = Node().run()
    due = node.ranks.due()
    assert due == node.now + SPARE_DELAY
    assert node.tick(SPARE_DELAY) == [ForkAhead()]
    assert node.tick() == []
    assert node.ranks.due() == math.inf
    assert Node(policy=Policy.GROUP).run().ranks.due() == math.inf, "none is replaced"


# A rank is replaced ------------------------------------------------------------------------------------


def test_a_failed_rank_is_started_again_once_the_node_has_its_place() -> None:
    node = Node().run()
    actions = node.fails(1)
    assert without_words(actions) == [AskPlace()]
    assert node.group.state is WorkerState.UNHEALTHY
    assert node.ranks.place(is_ours=True) == [Start(1, 1, 0, True)]
    assert node.forked(1, 1) == []
    assert node.group.state is WorkerState.HEALTHY
    assert (node.succeeds(0), node.succeeds(1)) == ([], [])
    end = node.ranks.end()
    assert end.failures == []
    assert [one.rank for one in end.forgiven] == [1]


def test_the_place_is_asked_for_again_while_it_is_not_known() -> None:
    node = Node().run()
    node.fails(1)
    assert node.ranks.place(is_ours=False) == []
    assert node.ranks.due() == node.now + PLACE_DELAY
    assert node.tick(PLACE_DELAY / 2) == []
    assert AskPlace() in node.tick(PLACE_DELAY / 2)
    assert node.ranks.place(is_ours=True) == [Start(1, 1, 0, True)]


def test_a_crash_loop_waits_before_it_asks() -> None:
    node = Node().run()
    node.fails(1)
    node.ranks.place(is_ours=True)
    node.forked(1, 1)
    assert without_words(node.fails(1, 1)) == [], "not at once"
    assert node.ranks.due() == node.now + 0.5
    assert node.tick(0.5) == [AskPlace()]
    assert node.ranks.place(is_ours=True) == [Start(1, 2, 0, True)]


def test_one_that_cannot_be_started_has_failed() -> None:
    node = Node().run()
    node.fails(1)
    node.ranks.place(is_ours=True)
    actions = node.ranks.not_started(1, failure(1, 1, 1))
    assert without_words(actions) == []
    assert node.ranks.due() == node.now + 0.5
    assert node.group.counts.failures == 2


def test_none_is_left_and_none_can_be_started() -> None:
    node = Node(1).run()
    node.fails(0)
    assert node.ranks.place(is_ours=False, out_of_reach="etcd is silent") == [CancelStarts()]
    assert node.ranks.is_over
    assert "none can be started again: etcd is silent" in node.ranks.end().ended_by


def test_a_node_that_cannot_be_reached_goes_on_with_its_other_ranks() -> None:
    node = Node().run()
    node.fails(1)
    assert node.ranks.place(is_ours=False, out_of_reach="etcd is silent") == []
    assert not node.ranks.is_stopping
    assert node.succeeds(0) == []
    assert node.tick() == [CancelStarts()], "the last one has ended meanwhile"
    assert node.ranks.is_over


def test_a_finished_job_needs_no_replacement() -> None:
    node = Node().run()
    node.fails(1)
    node.ranks.place(is_ours=False)
    node.succeeds(0)
    assert node.tick() == []
    assert not node.ranks.is_over
    node.job.finished = {0: pid(0)}
    assert node.tick() == [CancelStarts()]
    assert node.ranks.is_over
    assert [one.rank for one in node.ranks.end().forgiven] == [1]


def test_a_finished_job_waits_for_no_template() -> None:
    node = Node().run()
    node.fails(1)
    (start,) = node.ranks.place(is_ours=True)
    assert isinstance(start, Start)
    node.succeeds(0)
    node.job.finished = {0: pid(0)}
    assert node.tick() == [CancelStarts()]
    assert not node.ranks.wants(start)


def test_the_error_of_another_rank_is_named() -> None:
    node = Node(1, Policy.GROUP, restarts=0).run()
    node.job.by = "rank 5: out of memory"
    (*_, report) = node.fails(0, exitcode=1)
    assert isinstance(report, ReportFailure)
    assert report.failure.ended_by == "rank 5: out of memory"
    end = node.ranks.end()
    assert end.failures == []
    assert end.result() == JobResult(PROGRAM, "rank 5: out of memory")


def test_an_exception_that_the_job_knows_is_the_error_unless_the_process_has_written_one() -> None:
    node = Node().run()
    node.job.error = "ValueError: no data"
    (*_, report) = node.fails(0)
    assert isinstance(report, ReportFailure) and report.failure.error == "ValueError: no data"
    written = dataclasses.replace(failure(1), error="KeyError: 7")
    (*_, report) = node.ranks.ended(1, 7, written)
    assert isinstance(report, ReportFailure) and report.failure.error == "KeyError: 7"


# The group ---------------------------------------------------------------------------------------------


def test_a_group_is_ended_and_then_restarted() -> None:
    node = Node(3, Policy.GROUP).run()
    assert without_words(node.fails(1)) == [CancelStarts(), TERM]
    assert node.group.state is WorkerState.STOPPED
    assert node.fails(0, exitcode=-15) == [], "ended by us"
    assert not node.ranks.is_over
    assert node.fails(2, exitcode=-15) == []
    assert node.ranks.is_over
    assert node.ranks.end().again
    assert node.begin()[0] == Start(0, 0, 1, False)
    assert not node.ranks.is_stopping


def test_a_group_that_has_no_restarts_left_fails_for_all_nodes() -> None:
    node = Node(policy=Policy.GROUP, restarts=0).run()
    assert without_words(node.fails(1)) == [CancelStarts(), TERM]
    node.fails(0, exitcode=-15)
    end = node.ranks.end()
    assert (end.failed, end.again) == ("rank 1: exit code 7", False)
    assert [one.rank for one in end.failures] == [1]


def test_who_does_not_end_in_time_is_killed_once() -> None:
    node = Node(policy=Policy.GROUP).run()
    node.fails(1)
    assert node.ranks.due() == node.now + GRACE
    assert node.tick(GRACE) == [Kill()]
    assert node.tick(GRACE) == []
    assert node.ranks.due() == math.inf
    assert node.fails(0, exitcode=-9) == []
    assert node.ranks.is_over


def test_what_was_asked_for_is_not_wanted_after_a_stop() -> None:
    node = Node(policy=Policy.GROUP)
    first, second = node.begin()
    assert node.ranks.wants(second)
    assert without_words(node.ranks.not_started(first.rank, failure(0))) == [CancelStarts(), TERM]
    assert not node.ranks.wants(second)
    assert node.ranks.is_over


def test_one_that_comes_too_late_gets_the_signal_that_the_others_got() -> None:
    node = Node(policy=Policy.GROUP)
    node.begin()
    node.ranks.not_started(0, failure(0))
    assert node.forked(1) == [Send(signal.SIGTERM, 1)]
    assert not node.ranks.is_over


# Signals and news --------------------------------------------------------------------------------------


def test_a_signal_leaves_the_job_before_it_is_forwarded() -> None:
    node = Node().run()
    leave = LeaveJob("it was ended by SIGTERM")
    assert node.ranks.signalled(15) == [CancelStarts(), leave, EndTemplate(15), TERM]
    assert node.ranks.signalled(2) == [Send(2)]
    assert node.fails(0, exitcode=-15) == node.fails(1, exitcode=-15) == []
    end = node.ranks.end()
    assert (end.signum, end.failures, end.again) == (15, [], False)


def test_a_failure_from_before_a_signal_is_forgiven_if_its_rank_ran() -> None:
    node = Node().run()
    node.fails(1)
    node.ranks.place(is_ours=True)
    node.forked(1, 1)
    node.ranks.signalled(15)
    node.fails(0, exitcode=-15)
    node.fails(1, 1, exitcode=-15)
    assert node.ranks.end().failures == []


@pytest.mark.parametrize("what", [What.COME, What.GONE])
def test_the_nodes_meet_again(what: What) -> None:
    node = Node().run()
    assert node.ranks.take_news(News(what, "node b is lost")) == [CancelStarts(), TERM]
    assert node.group.state is WorkerState.STOPPED
    node.fails(0, exitcode=-15)
    node.fails(1, exitcode=-15)
    assert node.ranks.end().again


@pytest.mark.parametrize("what", [What.OVER, What.LOST])
def test_news_of_the_end_count_during_a_stop_too(what: What) -> None:
    node = Node(policy=Policy.GROUP).run()
    node.fails(1)
    assert node.ranks.take_news(News(what, "rank 9 failed")) == []
    node.fails(0, exitcode=-15)
    end = node.ranks.end()
    assert (end.again, end.ended_by) == (False, "rank 9 failed")


def test_the_end_elsewhere_leaves_the_ranks_to_their_own() -> None:
    node = Node().run()
    assert node.ranks.take_news(News(What.CLOSED)) == []
    assert not node.ranks.is_stopping
    node.succeeds(0)
    node.succeeds(1)
    assert node.ranks.end().closed


def test_a_loop_that_is_left_leaves_nothing() -> None:
    assert Node().run().ranks.abandoned() == [EndTemplate(), CancelStarts(), Kill()]


# Which failures count ----------------------------------------------------------------------------------


def test_a_node_whose_ranks_are_all_left_out_is_lost() -> None:
    node = Node().run()
    node.job.open = False
    assert without_words(node.fails(0)) == without_words(node.fails(1)) == []
    assert node.ranks.is_over
    end = node.ranks.end()
    assert end.lost
    assert [one.rank for one in end.failures] == [0, 1]


def test_a_process_that_was_in_the_job_to_its_end_has_to_succeed() -> None:
    node = Node().run()
    node.job.open = False
    node.fails(0)
    node.fails(1)
    node.job.finished = {0: pid(0), 1: pid(1, 5)}
    end = node.ranks.end()
    assert [one.rank for one in end.failures] == [0], "another process of rank 1 was in"
    assert [one.rank for one in end.forgiven] == [1]
    assert not end.lost


# Ranks that leave the job ------------------------------------------------------------------------------

DRAIN = News(What.DRAIN, "ftrun drain", (1,), within=30.0)


def test_one_that_is_drained_is_asked_once_and_not_started_again() -> None:
    node = Node().run()
    assert node.ranks.take_news(DRAIN) == [AskToLeave(1)]
    assert node.ranks.take_news(DRAIN) == []
    assert node.succeeds(1) == []
    assert node.tick(60.0) == [ForkAhead()]
    assert node.succeeds(0) == []
    end = node.ranks.end()
    assert (end.failures, end.drained) == ([], False)


def test_a_second_drain_may_leave_it_less_time() -> None:
    node = Node().run()
    node.ranks.take_news(DRAIN)
    node.tick(SPARE_DELAY)
    at = node.ranks.due()
    assert node.ranks.take_news(News(What.DRAIN, "a notice", within=300.0)) == [AskToLeave(0)]
    assert node.ranks.due() == at, "it leaves more"
    assert node.ranks.take_news(News(What.DRAIN, "a notice", (1,), within=5.0)) == []
    assert node.ranks.due() == node.now + 5.0


def test_a_drain_that_comes_again_leaves_the_whole_time_after_the_signal() -> None:
    """Each new record tells of all drains in it."""
    node = Node().run()
    drain = News(What.DRAIN, "a notice", (1,), within=1.0)
    node.ranks.take_news(drain)
    assert Send(signal.SIGTERM, 1) in node.tick(SPARE_DELAY + 1.0)
    kills_at = node.now + GRACE
    assert node.ranks.take_news(drain) == []
    assert node.ranks.due() == kills_at


def test_one_that_failed_is_missing_until_another_process_has_its_place() -> None:
    node = Node(3).run()
    assert node.group.missing == set()
    for rank in (0, 1):
        node.fails(rank)
    assert node.group.missing == {0, 1}
    node.forked(1, 1)
    assert node.group.missing == {0}, "the other one's"
    node.fails(1, incarnation=1)
    assert node.group.missing == {0, 1}, "it has failed before it could join anything"
    node.begin()
    assert node.group.missing == set()


def test_one_that_is_drained_while_its_process_is_gone_is_not_missed() -> None:
    node = Node().run()
    node.fails(1)
    assert node.group.missing == {1}
    node.ranks.take_news(DRAIN)
    assert node.group.missing == set()
    node.run().fails(1)
    assert node.group.missing == {1}, "in the next round it is wanted"


def test_what_a_drained_one_dies_of_is_no_failure() -> None:
    node = Node().run()
    node.ranks.take_news(DRAIN)
    assert node.fails(1, exitcode=-9) == []
    assert node.group.counts.failures == 0
    node.succeeds(0)
    assert node.ranks.end().failures == []


def test_one_that_does_not_leave_in_time_is_ended() -> None:
    node = Node().run()
    node.ranks.take_news(DRAIN)
    node.tick(SPARE_DELAY)
    assert node.ranks.due() == node.now + 30.0 - SPARE_DELAY
    assert node.tick(30.0 - SPARE_DELAY) == [Send(signal.SIGTERM, 1)]
    assert node.tick() == []
    assert node.ranks.due() == node.now + GRACE
    assert node.tick(GRACE) == [Send(signal.SIGKILL, 1)]


def test_one_that_has_no_step_to_leave_at_is_ended_at_once() -> None:
    node = Node().run()
    node.ranks.take_news(DRAIN)
    node.ranks.does_not_leave(1)
    assert node.ranks.due() == node.now
    assert node.tick() == [Send(signal.SIGTERM, 1)]


def test_one_that_waits_for_its_next_process_is_not_started_any_more() -> None:
    node = Node().run()
    node.fails(1)
    assert node.ranks.take_news(DRAIN) == []
    assert node.ranks.place(is_ours=True) == []


def test_one_that_is_being_started_is_asked_as_soon_as_it_runs() -> None:
    node = Node()
    node.begin()
    assert node.ranks.take_news(DRAIN) == []
    assert (node.forked(0), node.forked(1)) == ([], [AskToLeave(1)])


def test_a_node_is_drained_when_all_of_its_ranks_are() -> None:
    node = Node().run()
    assert node.ranks.take_news(News(What.DRAIN, "ftrun drain", within=30.0)) == [
        AskToLeave(0),
        AskToLeave(1),
    ]
    node.succeeds(0)
    assert not node.ranks.is_over
    node.succeeds(1)
    assert node.ranks.is_over and node.ranks.end().drained


def test_what_comes_to_the_end_of_the_job_was_not_drained() -> None:
    for exitcode, failures in ((0, 0), (3, 1), (-15, 1)):
        node = Node().run()
        node.ranks.take_news(News(What.DRAIN, "ftrun drain", within=30.0))
        node.succeeds(0)
        node.fails(1, exitcode=exitcode) if exitcode else node.succeeds(1)
        node.job.finished = {0: None, 1: None}
        end = node.ranks.end()
        assert (len(end.failures), end.drained, end.lost) == (failures, False, False)
        node.job.finished = {2: None}  # without this node
        end = node.ranks.end()
        assert (end.failures, end.forgiven, end.drained) == ([], [], True)


def test_nobody_goes_on_without_the_ranks_of_a_plain_script() -> None:
    for formed in (True, False):
        node = Node().run()
        node.job.formed = formed
        for rank in (0, 1):
            node.job.given_up = pid(rank)
            node.fails(rank)
        assert node.ranks.end().lost == formed


def test_the_next_round_starts_all_again() -> None:
    node = Node().run()
    node.ranks.take_news(DRAIN)
    node.ranks.take_news(News(What.COME, "the nodes meet again"))
    node.succeeds(0)
    node.succeeds(1)
    assert node.ranks.end().again and not node.ranks.end().drained
    node.run()
    assert node.ranks.due() == node.now + SPARE_DELAY


def test_sigterm_asks_the_others_first_and_the_second_one_ends_the_job() -> None:
    node = Node(drain=60.0).run()
    asked = AskDrain(60.0, "SIGTERM", signal.SIGTERM)
    assert node.ranks.signalled(signal.SIGTERM) == [asked]
    assert node.ranks.signalled(signal.SIGTERM)[-1] == TERM
    other = Node(drain=60.0).run()
    assert other.ranks.signalled(signal.SIGINT)[-1] == Send(signal.SIGINT)
    assert Node().run().ranks.signalled(signal.SIGTERM)[-1] == TERM


def test_sigterm_ends_the_job_where_the_others_cannot_go_on() -> None:
    node = Node(drain=60.0).run()
    (asked,) = node.ranks.signalled(signal.SIGTERM)
    assert isinstance(asked, AskDrain)
    assert node.ranks.stays(asked, "too few would be left")[-1] == TERM


def test_a_drain_that_is_refused_changes_nothing() -> None:
    node = Node().run()
    (asked,) = node.ranks.take_news(News(What.LEAVE, "asked by HTTP", within=30.0))
    assert asked == AskDrain(30.0, "asked by HTTP")
    assert node.ranks.stays(asked, "too few would be left") == []
    assert not node.ranks.is_stopping


# Notices --------------------------------------------------------------------------------------------------


def test_sigterm_gives_a_notice_and_then_drains_this_node() -> None:
    node = Node(drain=25.0, grace=30.0).run()
    notice = node.own_notice("SIGTERM", 30.0)
    assert node.ranks.signalled(signal.SIGTERM) == [AskNotice(Notice("", "SIGTERM"))]
    assert node.ranks.take_news(News(What.NOTICE, notice=dataclasses.replace(NOTICE, id=""))) == []
    assert node.ranks.due() == node.now + TOGETHER
    assert AskDrain(25.0, "SIGTERM", signal.SIGTERM, notice) in node.tick(TOGETHER)
    assert node.ranks.take_news(NOTICED) == [Give(NOTICE)]
    assert node.ranks.take_news(NOTICED) == [], "it is in each record"
    assert node.ranks.take_news(News(What.DRAIN, "SIGTERM", within=25.0)) == [AskToLeave(0), AskToLeave(1)]
    assert [node.succeeds(rank) for rank in (0, 1)] == [[], []]
    end = node.ranks.end()
    assert end.drained and end.result().exit_code == DONE


@pytest.mark.parametrize("leave", [True, False])
def test_a_job_that_cannot_go_on_without_this_node_leaves_as_a_whole(leave: bool) -> None:
    node = Node(drain=25.0, grace=30.0).run()
    node.ranks.signalled(signal.SIGTERM)
    (asked,) = (one for one in node.tick(TOGETHER) if isinstance(one, AskDrain))
    at_its_end = dataclasses.replace(node.own_notice("SIGTERM", 30.0 - TOGETHER), ends=True)
    assert node.ranks.stays(asked, "no other node would be left") == [AskNotice(at_its_end)]
    ends = dataclasses.replace(NOTICE, seconds=29.0, ends=True)
    assert node.ranks.take_news(News(What.NOTICE, notice=ends)) == [Give(ends)]
    assert node.ranks.due() == node.now + 29.0 - GRACE
    node.ranks.does_not_leave(1)
    assert Send(signal.SIGTERM, 1) in node.tick()
    assert node.ranks.ended(1, -signal.SIGTERM, failure(1, exitcode=-signal.SIGTERM)) == []
    if leave:
        assert node.succeeds(0) == []
    else:
        assert Send(signal.SIGTERM, 0) in node.tick(29.0 - GRACE)
        assert Send(signal.SIGKILL, 0) in node.tick(GRACE)
        node.ranks.ended(0, -signal.SIGKILL, failure(0, exitcode=-signal.SIGKILL))
    result = node.ranks.end().result()
    assert (result.exit_code, result.verdict) == (INFRASTRUCTURE, "preempted")


def test_the_end_gives_no_more_time_than_the_signal_had() -> None:
    """A node that was to go on is lost ten seconds later: then the notice of the drain is the end's."""
    node = Node(drain=25.0, grace=30.0).run()
    node.ranks.signalled(signal.SIGTERM)
    node.tick(TOGETHER)
    node.ranks.take_news(News(What.DRAIN, "SIGTERM", within=25.0))
    node.tick(10.0)
    ends = dataclasses.replace(NOTICE, ends=True)
    left = dataclasses.replace(ends, seconds=30.0 - TOGETHER - 10.0)
    assert node.ranks.take_news(News(What.NOTICE, notice=ends)) == [Give(left)]
    assert node.ranks.due() == node.now + 30.0 - TOGETHER - 10.0 - GRACE


def test_a_job_that_finishes_meanwhile_is_done() -> None:
    node = Node(drain=25.0, grace=30.0).run()
    node.ranks.take_news(News(What.NOTICE, notice=dataclasses.replace(NOTICE, ends=True)))
    node.job.finished = {0: pid(0), 1: pid(1)}
    assert [node.succeeds(rank) for rank in (0, 1)] == [[], []]
    assert node.ranks.end().result().exit_code == DONE


def test_the_second_sigterm_ends_the_job_at_once() -> None:
    node = Node(drain=25.0, grace=30.0).run()
    node.ranks.signalled(signal.SIGTERM)
    assert node.ranks.signalled(signal.SIGTERM) == [], "one that comes at the same time is the same"
    assert any(isinstance(action, AskDrain) for action in node.tick(TOGETHER))
    ended = [CancelStarts(), LeaveJob("it was ended by SIGTERM"), EndTemplate(signal.SIGTERM), TERM]
    assert node.ranks.signalled(signal.SIGTERM) == ended


def test_another_signal_ends_the_job_at_once() -> None:
    node = Node(drain=25.0, grace=30.0).run()
    node.ranks.signalled(signal.SIGTERM)
    assert LeaveJob("it was ended by SIGINT") in node.ranks.signalled(signal.SIGINT)
    assert not any(isinstance(action, AskDrain) for action in node.tick(TOGETHER))


def test_signals_to_many_processes_are_one_notice() -> None:
    node = Node(grace=30.0).run()
    assert node.ranks.noticed("SIGUSR1") == [AskNotice(node.own_notice("SIGUSR1", 30.0))]
    node.now += SAME_WITHIN - 0.5
    assert node.ranks.noticed("SIGUSR1") == []
    asked = News(What.CHECKPOINT, "asked by HTTP", within=45.0)
    assert node.ranks.take_news(asked) == [AskNotice(node.own_notice("asked by HTTP", 45.0))]
    node.now += 0.5
    assert node.ranks.noticed("SIGUSR1") == [AskNotice(node.own_notice("SIGUSR1", 30.0))]
    node = Node().run()
    assert node.ranks.noticed("SIGUSR1") == [AskNotice(node.own_notice("SIGUSR1", None))], (
        "not known how long"
    )


def test_a_signal_to_all_nodes_is_one_notice() -> None:
    """Another node was quicker: what it asked for is here already. A drain of its own is another matter."""
    node = Node(grace=30.0).run()
    node.ranks.take_news(News(What.NOTICE, notice=Notice("node b", "SIGUSR1", 30.0, "1")))
    assert node.ranks.noticed("SIGUSR1") == []
    node.now += SAME_WITHIN
    assert node.ranks.noticed("SIGUSR1") == [AskNotice(node.own_notice("SIGUSR1", 30.0))]
    node = Node(drain=25.0, grace=30.0).run()
    node.ranks.take_news(News(What.NOTICE, notice=Notice("node b", "SIGTERM", 30.0, "1", leaving=("b:0",))))
    assert node.ranks.signalled(signal.SIGTERM) == [AskNotice(Notice("", "SIGTERM"))]


def test_ranks_that_wait_at_their_end_are_ended_once_another_one_has_failed_for_good() -> None:
    node = Node(3).run()
    assert node.tick(SPARE_DELAY) == [ForkAhead()]
    assert node.ranks.due() == math.inf, "no rank has failed"
    node.job.given_up = pid(2)
    assert without_words(node.fails(2)) == []
    assert node.tick(END_LIMIT) == [AskEnd()]
    assert node.ranks.waits_at_end(node.now - END_LIMIT + 1) == [], "not for long enough"
    assert node.ranks.due() == node.now + END_LIMIT
    assert node.tick(END_LIMIT) == [AskEnd()]
    assert node.ranks.waits_at_end(node.now - END_LIMIT) == [CancelStarts(), TERM]
    assert node.ranks.waits_at_end(node.now - END_LIMIT) == [], "once"
