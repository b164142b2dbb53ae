"""What is done about the ranks of a node: from events with facts to actions. Pure.

Each rank of a round is in one state, or in none once it has ended for good:

    asked for --Forked--> running --Ended--> due --Place--> asked for ...

A stop ends those that run, and takes back what is asked for or due. It is followed by the next round
(`Ranks._again`) or by the end. `ft_wrapper.agent.agent` waits for what happens, and carries actions out.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from ..protocol.notice import SAME_WITHIN, Notice
from .policy import JobFacts, JobOutcome, Remedy, RestartPolicy
from .rounds import PROGRAM, End, Failure, JobResult, News, Round, What, in_order

# Actions: data, carried out by `ft_wrapper.agent.agent` -----------------------------------------------------


class RankAction:
    """What is to be done."""


@dataclasses.dataclass(frozen=True)
class Start(RankAction):
    """Starts a process, or asks the template for it: `Ranks.forked` or `not_started` follows.

    Args:
        rank: its local rank.
        incarnation: number of this process of the rank, from 0.
        restarts: how often all ranks have been restarted.
        is_replaced: whether another one is started if it dies.
    """

    rank: int
    incarnation: int
    restarts: int
    is_replaced: bool


@dataclasses.dataclass(frozen=True)
class CancelStarts(RankAction):
    """Withdraws all requests to the template."""


@dataclasses.dataclass(frozen=True)
class ForkAhead(RankAction):
    """Has a process forked ahead, for the next replacement."""


@dataclasses.dataclass(frozen=True)
class EndTemplate(RankAction):
    """Ends the template: no process is started after it.

    Args:
        signum: the signal that causes this, if one does. If the template got it, too, its sender has
            signalled each process, and the `Send` of it to all ranks is not carried out.
    """

    signum: int | None = None


@dataclasses.dataclass(frozen=True)
class Send(RankAction):
    """Sends a signal to a local rank; to all that run when None."""

    signum: int
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Kill(RankAction):
    """Kills all that run, and waits: `Ranks.ended` follows for each, even if stuck in the kernel."""


@dataclasses.dataclass(frozen=True)
class AskPlace(RankAction):
    """Asks whether this node has its place among the other nodes: `Ranks.place` follows."""


@dataclasses.dataclass(frozen=True)
class AskEnd(RankAction):
    """Asks since when all running ranks wait at their end: `Ranks.waits_at_end` follows if they do."""


@dataclasses.dataclass(frozen=True)
class LeaveJob(RankAction):
    """Notifies the other nodes that this one leaves the job."""

    why: str


@dataclasses.dataclass(frozen=True)
class ReportFailure(RankAction):
    """Logs a failure, and what follows. The last action: a log line is not worth waiting for."""

    failure: Failure
    why: str


@dataclasses.dataclass(frozen=True)
class Log(RankAction):
    """Logs a line."""

    line: str
    is_warning: bool = True


@dataclasses.dataclass(frozen=True)
class AskToLeave(RankAction):
    """Asks a local rank to leave the job at its next step; `Ranks.does_not_leave` follows if it will not."""

    rank: int


@dataclasses.dataclass(frozen=True)
class AskDrain(RankAction):
    """Asks the other nodes that this one may leave, in order: `Ranks.stays` follows if it may not.

    Args:
        within: seconds after which ranks that have not left are ended.
        why: for people.
        signum: the signal that caused it, if one did.
        notice: what all ranks get first, if the grace time is known.
    """

    within: float
    why: str
    signum: int | None = None
    notice: Notice | None = None


@dataclasses.dataclass(frozen=True)
class AskNotice(RankAction):
    """Has all nodes pass a notice to their ranks: news of it follows.

    Args:
        notice: the notice. Without an id it is not for ranks: it says that this node is about to end.
    """

    notice: Notice


@dataclasses.dataclass(frozen=True)
class Give(RankAction):
    """Passes a notice to this node's ranks: `Ranks.does_not_leave` follows for those with none to save."""

    notice: Notice


#: Signals.
TERM, KILL = 15, 9
#: Seconds from a start to the next fork ahead, which must not get in the way of a restart.
SPARE_DELAY = 1.0
#: Seconds for which ranks may wait at their end if another rank has failed for good.
END_LIMIT = 60.0
#: Seconds after which a node that does not know whether it has its place asks again.
PLACE_DELAY = 1.0
#: Seconds from SIGTERM to the drain: by then it is known which other nodes got the signal, too.
TOGETHER = 1.0


# States ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Asked:
    incarnation: int


@dataclasses.dataclass(frozen=True)
class _Running:
    started: float


@dataclasses.dataclass(frozen=True)
class _Due:
    incarnation: int
    at: float


_State = TypeVar("_State", _Asked, _Running, _Due)
_UNKNOWN = JobFacts()


@dataclasses.dataclass
class _Leaving:
    """A rank that was asked to leave the job.

    Args:
        at: when it is sent a signal, if it still runs.
        signum: which one.
    """

    at: float
    signum: int = TERM


class Notes(Protocol):
    """Keeps state and counts of the ranks, for people: a `ft_wrapper.agent.group.Group`."""

    def count_restarts(self, restarts: int) -> None: ...
    def started(self, local_rank: int, pid: int, *, replaces: bool = False) -> None: ...
    def ended(self, local_rank: int) -> None: ...
    def failed(self, local_rank: int) -> None: ...
    def dismissed(self, local_rank: int) -> None: ...
    def stopped(self) -> None: ...


class Ranks:
    """The state of a node's ranks, round after round.

    A failure is decided with what the ranks' store says of it (`JobFacts`), which the caller has asked for.

    Args:
        nproc: how many there are.
        policy: what to do about those that fail.
        group: keeps state and counts, for people.
        shutdown_timeout: seconds from the signal that ends ranks to `Kill`.
        clock: monotonic seconds.
        drain_timeout: seconds that SIGTERM gives ranks to reach their next step, if the other nodes go on
            without this one; 0: it ends them.
        grace: seconds from SIGTERM to SIGKILL, if that is known; else 0. If so, ranks get a notice first, and
            the whole job leaves if it cannot go on without this node.

    Attributes:
        round: the current round; set by the first `begin_round`.
    """

    round: Round

    def __init__(
        self,
        nproc: int,
        policy: RestartPolicy,
        group: Notes,
        shutdown_timeout: float,
        clock: Callable[[], float],
        drain_timeout: float = 0.0,
        grace: float = 0.0,
    ) -> None:
        self._nproc = nproc
        self._policy = policy
        self._group = group
        self._shutdown_timeout = shutdown_timeout
        self._drain_timeout = drain_timeout
        self._clock = clock
        self._grace = grace
        self._until = float("inf")  # when the grace time of a SIGTERM is over
        self._later: dict[type[RankAction], tuple[float, RankAction]] = {}  # when which actions are due
        self._noticed: dict[str, float] = {}  # when notices of a kind were last asked for
        self._given: set[tuple[str, bool]] = set()  # notices, and whether the job ends
        self._ranks: dict[int, _Asked | _Running | _Due] = {}  # by local rank
        self._failures: list[Failure] = []
        self._before: set[int] = set()  # exit codes in the round before
        self._healed: set[int] = set()  # local ranks whose last process exited with 0
        self._leaving: dict[int, _Leaving] = {}  # by local rank, those that are gone as well
        self._again: bool | None = None  # while all ranks are being ended: whether they are restarted then
        self._out_of_reach = ""
        self._outcome = End()  # what has been said of the whole job so far

    # For the loop --------------------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether all ranks are being ended."""
        return self._again is not None

    @property
    def is_over(self) -> bool:
        """Whether no rank runs, is asked for or is due: see `end`."""
        return not self._ranks

    @property
    def are_asked_for(self) -> bool:
        """Whether a process was asked for that does not run yet."""
        return self._has(_Asked)

    def wants(self, start: Start) -> bool:
        """Whether a start is still wanted."""
        return self._ranks.get(start.rank) == _Asked(start.incarnation)

    def due(self) -> float:
        """When the next `tick` is due, in the clock's seconds; infinity if only events count."""
        moments = [state.at for state in self._ranks.values() if isinstance(state, _Due)]
        moments += [at for at, _ in self._later.values()]
        moments += [leaving.at for leaving in self._running_but_leaving().values()]
        return min(moments, default=math.inf)

    def decides(self, rank: int) -> bool:
        """Whether a failure of a local rank leads to a decision, which takes `JobFacts`."""
        return not self.is_stopping and rank not in self._leaving

    @property
    def needs_outcome(self) -> bool:
        """Whether `tick` has to know if the job has finished: a rank that failed is to be started again.

        It is not once the other nodes have finished the job. Then the template is not awaited either: it may
        hang.
        """
        waits = self._has(_Due) or (self._has(_Asked) and self._failures)
        return bool(waits) and not self._has(_Running) and not self._out_of_reach

    @property
    def needs_outcome_at_end(self) -> bool:
        """Whether `end` has to know how the job has ended."""
        # The store may be gone with the node that ended the job. And it has to say nothing but this.
        is_ended = self._outcome.ended_by or self._outcome.signum is not None
        return bool(self._failures or self._leaving) and not self._again and not is_ended

    def end(self, outcome: JobOutcome) -> End:
        """How the round has ended, and which failures count.

        Args:
            outcome: how the job has ended, where `needs_outcome_at_end`.
        """
        again, finished = bool(self._again), outcome.finished
        counted: list[Failure] = []
        forgiven: list[Failure] = []
        for failure in in_order(self._failures):
            if finished is not None:
                # A process that was in the job to its end, and then failed, has lost the work it had left.
                counts = failure.rank in finished and finished[failure.rank] in (None, failure.pid)
            else:
                counts = failure.rank - self.round.base_rank not in self._healed
            (counted if counts else forgiven).append(failure)
        own = [failure for failure in counted if not failure.ended_by]
        all_failed = len({failure.rank for failure in counted}) == self._nproc
        # Ranks that were asked to leave too late have reached the job's end instead.
        left = {self.round.rank(rank) for rank in self._leaving}.difference(finished or ())
        drained = not again and len(left) == self._nproc
        preempted = self._outcome.preempted if drained else ""
        return dataclasses.replace(
            self._outcome,
            failures=own,
            forgiven=[failure for failure in forgiven if failure.rank not in left],
            again=again,
            elsewhere=self._outcome.elsewhere
            or (JobResult(PROGRAM, counted[0].ended_by) if counted and not own else None),
            # A plain script needs all its ranks.
            lost=all_failed and finished is None and not again and outcome.formed and not preempted,
            drained=drained,
            preempted=preempted,
            node=self.round.node,
        )

    def names(self, of: Iterable[int] | None = None) -> str:
        """Some local ranks, in words; those that run when None."""
        ranks = [str(self.round.rank(rank)) for rank in sorted(self._of(_Running) if of is None else of)]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}" if ranks else "no rank"

    # Events: each returns what is to be done, in this order ----------------------------------------------

    def begin_round(self, where: Round) -> list[Start]:
        """The nodes have met: all ranks are to be started.

        Args:
            where: the round.
        """
        self.round = where
        self._policy.begin_round(where.restarts, formed=where.formed)
        self._group.count_restarts(self._policy.restarts)
        self._again = None
        self._before = {failure.exitcode for failure in self._failures}
        self._failures.clear()
        self._healed.clear()
        self._leaving.clear()
        self._later.pop(Kill, None)
        self._later.pop(AskEnd, None)
        return [self._start(rank, 0) for rank in range(self._nproc)]

    def forked(self, rank: int, incarnation: int, pid: int) -> list[RankAction]:
        """A process that was asked for runs."""
        now = self._clock()
        self._ranks[rank] = _Running(now)
        self._group.started(rank, pid, replaces=incarnation > 0)
        if self._policy.replaces(self.round.rank(rank)):
            self._later[ForkAhead] = now + SPARE_DELAY, ForkAhead()
        if self.is_stopping:  # it came too late for the signal that the other ranks got
            return [Send(self._outcome.signum or TERM, rank)]
        return [AskToLeave(rank)] if rank in self._leaving else []

    def not_started(self, rank: int, failure: Failure, facts: JobFacts) -> list[RankAction]:
        """A process that was asked for could not be started; ``failure`` says why."""
        self._ranks.pop(rank, None)
        return [] if self.is_stopping else self._decide(rank, failure, 0.0, facts)

    def ended(
        self, rank: int, exitcode: int, failure: Failure | None = None, facts: JobFacts = _UNKNOWN
    ) -> list[RankAction]:
        """A process has ended.

        Args:
            rank: its local rank.
            exitcode: its exit code, or minus the number of the signal that ended it.
            failure: how it failed; None if it did not, or if a stop ended it.
            facts: what the store says of that.
        """
        process = self._ranks.pop(rank)
        if (exitcode == 0 and failure is None) or rank in self._leaving:
            self._healed.add(rank)
            self._group.ended(rank)
        if rank in self._leaving and not self.is_stopping:
            self._failures += [failure] if failure is not None else []  # for `end`: it may not have left
            line = f"rank {self.round.rank(rank)} has left the job, as it was asked to"
            return [Log(line, is_warning=False)]
        if failure is None or self.is_stopping:
            return []  # a process that our signal ended did not fail on its own
        assert isinstance(process, _Running)
        return self._decide(rank, failure, self._clock() - process.started, facts)

    def signalled(self, signum: int, name: str) -> list[RankAction]:
        """A signal arrived that ends the job; or drains this node, once, where that is wanted."""
        now = self._clock()
        if signum == TERM and self._drain_timeout and not self.is_stopping:
            within, self._drain_timeout = self._drain_timeout, 0.0
            if not self._grace:
                return [AskDrain(within, name, signum)]
            self._noticed[name], self._until = now, now + self._grace
            asked = AskDrain(within, name, signum, self._notice(name, self._grace))
            self._later[AskDrain] = now + min(TOGETHER, within / 2), asked
            return [AskNotice(Notice("", name))]
        if signum == TERM and now < self._noticed.get(name, -TOGETHER) + TOGETHER:
            return []  # SLURM's scancel sends a step's signal twice if another job is queued: 30 of 30 times
        self._later.pop(AskDrain, None)
        line = Log(f"{name}: forwarded to {self.names()}")
        if self._outcome.signum is not None:
            return [line, Send(signum)]
        self._note(signum=signum, signal=name)
        self._healed.update(self._of(_Running))
        # Other nodes are notified first, so that none waits for ranks that are about to end.
        leave = LeaveJob(f"it was ended by {name}")
        return [line, *self._begin_stop(again=False), leave, EndTemplate(signum), Send(signum)]

    def take_news(self, news: News) -> list[RankAction]:
        """The other nodes have done something."""
        if news.what is What.CLOSED:
            self._note(closed=True, elsewhere=news.result)  # the ranks end on their own
            return []
        if news.what is What.LEAVE:
            return [] if self.is_stopping else [AskDrain(news.within, news.why)]
        if news.what is What.CHECKPOINT:
            return self.noticed(news.why, news.within)
        if news.notice is not None:
            return self._give(news.notice)
        if news.what is What.DRAIN:
            return [] if self.is_stopping else self._drain(news)
        ends = news.what.ends
        if ends:
            self._note(ended_by=self._outcome.ended_by or news.why, elsewhere=news.result)
        if self._again is not None:
            self._again = self._again and not ends
            return []
        line = Log(f"{news.why}; {'all ranks end' if ends else f'{self.names()} restart'}")
        return [line, *self._begin_stop(again=not ends), Send(TERM)]

    def noticed(self, why: str, seconds: float = 0.0) -> list[RankAction]:
        """Somebody asks for a checkpoint.

        Args:
            why: for people.
            seconds: how long there is; 0: the grace time, if that is known.
        """
        now = self._clock()
        if self.is_stopping or now < self._noticed.get(why, -SAME_WITHIN) + SAME_WITHIN:
            return []
        self._noticed[why] = now
        return [AskNotice(self._notice(why, seconds or self._grace or None))]

    def _notice(self, why: str, seconds: float | None, *, ends: bool = False) -> Notice:
        who = f"node {self.round.node}" if self.round.node else "ftrun"
        return Notice(who, why, seconds, f"{self.round.group_rank} {self._clock()}", ends)

    def _give(self, notice: Notice) -> list[RankAction]:
        if self.is_stopping or not notice.id or (notice.id, notice.ends) in self._given:
            return []
        self._given.add((notice.id, notice.ends))
        if not notice.leaving:
            self._noticed[notice.why] = self._clock()  # its sender may signal this node, too
        if notice.ends:
            self._later.pop(AskDrain, None)
            seconds = min(notice.seconds or 0.0, self._until - self._clock())  # it may be older than it says
            notice = dataclasses.replace(notice, seconds=max(0.0, seconds))
            self._note(preempted=str(notice))
            self._begin_leaving(range(self._nproc), max(0.0, seconds - self._shutdown_timeout))
        return [Log(f"notice from {notice}"), Give(notice)]

    def place(self, *, is_ours: bool, out_of_reach: str = "") -> list[RankAction]:
        """The answer to `AskPlace`.

        Args:
            is_ours: whether this node is known to have its place among the other nodes.
            out_of_reach: why that could not be found out; empty if it could.
        """
        self._out_of_reach = out_of_reach
        now = self._clock()
        starts: list[RankAction] = []
        for rank, due in self._of(_Due).items():
            if due.at > now:
                continue
            if is_ours:
                starts.append(self._start(rank, due.incarnation))
            else:  # a new process of its slot would supersede the one that has the place now
                self._ranks[rank] = _Due(due.incarnation, now + PLACE_DELAY)
        return starts or self._give_up_if_alone()

    def does_not_leave(self, rank: int) -> None:
        """A rank has no next step at which to leave: the next tick signals it, if it was asked to leave."""
        if rank in self._leaving:
            self._leaving[rank].at = self._clock()

    def waits_at_end(self, since: float) -> list[RankAction]:
        """All running ranks wait at their end, where leftovers of an interrupted function may hang forever.

        Args:
            since: when the last of them came there, in the clock's seconds.
        """
        if self.is_stopping or self._clock() - since < END_LIMIT:
            return []
        waited = f"waited {END_LIMIT:g} s to exit and are ended: another rank of this node failed for good"
        return [Log(f"{self.names()}: {waited}"), *self._begin_stop(again=False), Send(TERM)]

    def stays(self, asked: AskDrain, why: str) -> list[RankAction]:
        """The other nodes cannot go on without this one, or do not answer: a signal does what it always does.

        Args:
            asked: what was asked.
            why: for people.
        """
        line = Log(f"{asked.why}: this node is not drained: {why}")
        if asked.signum is None:
            return [line]
        if self._grace:
            return [line, AskNotice(self._notice(asked.why, self._grace - TOGETHER, ends=True))]
        return [line, *self.signalled(asked.signum, asked.why)]

    def abandoned(self) -> list[RankAction]:
        """The loop is left, whatever runs."""
        return [EndTemplate(), *self._begin_stop(again=False), Kill()]

    def tick(self, outcome: JobOutcome) -> list[RankAction]:
        """Handles what is due, once all events so far were handled. Comes before each wait.

        Args:
            outcome: how the job has ended, where `needs_outcome`.
        """
        actions: list[RankAction] = []
        if self.needs_outcome and outcome.finished is not None:
            self._ranks.clear()
            actions.append(CancelStarts())
        now = self._clock()
        for kind, (at, action) in list(self._later.items()):
            if now < at:
                continue
            del self._later[kind]
            if kind is Kill and self._has(_Running):
                after = f"{self._shutdown_timeout:g} s after the signal"
                actions.append(Log(f"{self.names()}: still there {after}, killed"))
            if kind is AskEnd:
                self._later[kind] = now + END_LIMIT, action
            if kind is not ForkAhead or not self.is_stopping:
                actions.append(action)
        for rank, leaving in self._running_but_leaving().items():
            if now >= leaving.at:
                actions.append(Send(leaving.signum, rank))
                leaving.at, leaving.signum = now + self._shutdown_timeout, KILL
        if any(due.at <= now for due in self._of(_Due).values()):
            return [*actions, AskPlace()]
        return [*actions, *self._give_up_if_alone()]

    # ---------------------------------------------------------------------------------------------------

    def _start(self, rank: int, incarnation: int) -> Start:
        self._ranks[rank] = _Asked(incarnation)
        return Start(rank, incarnation, self._policy.restarts, self._policy.replaces(self.round.rank(rank)))

    def _decide(self, rank: int, failure: Failure, lived: float, facts: JobFacts) -> list[RankAction]:
        self._group.failed(rank)
        failure = dataclasses.replace(
            failure,
            error=failure.error or facts.error,
            ended_by=facts.ended_by if failure.exitcode == 1 else "",  # a JobEnded exits with it
            came_before=failure.exitcode in self._before and not facts.formed,
            gave_up=facts.gave_up,
            was_stranded=facts.stranded,
        )
        self._failures.append(failure)
        verdict = self._policy.decide(failure.rank, lived, facts, is_first=failure.incarnation == 0)
        actions: list[RankAction] = []
        if verdict.remedy is Remedy.REPLACE:
            self._ranks[rank] = _Due(failure.incarnation + 1, self._clock() + verdict.delay)
            if not verdict.delay:
                actions.append(AskPlace())
        elif verdict.remedy is Remedy.LEAVE_OUT:
            self._later[AskEnd] = self._clock() + END_LIMIT, AskEnd()
        else:
            again = verdict.remedy is Remedy.RESTART_GROUP
            if not again:
                self._note(failed=f"rank {failure.rank}: {failure.how}")
            self._group.count_restarts(self._policy.restarts)
            actions += [*self._begin_stop(again=again), Send(TERM)]
        return [*actions, ReportFailure(failure, verdict.why)]

    def _drain(self, news: News) -> list[RankAction]:
        now = self._clock()
        named = [rank for rank in range(self._nproc) if not news.slots or self.round.rank(rank) in news.slots]
        for rank in self._leaving.keys() & named:
            leaving = self._leaving[rank]
            if leaving.signum == TERM:  # it is in each record, also after the signal
                leaving.at = min(leaving.at, now + news.within)
        asked = [rank for rank in named if rank not in self._leaving]
        if not asked:
            return []  # the news came before
        names = ", ".join(str(self.round.rank(rank)) for rank in asked)
        line = Log(f"{news.why}: rank {names} to leave the job within {news.within:g} s")
        self._begin_leaving(asked, news.within)
        return [line, *(AskToLeave(rank) for rank in asked if rank in self._of(_Running))]

    def _begin_leaving(self, ranks: Iterable[int], within: float) -> None:
        for rank in ranks:
            self._leaving[rank] = _Leaving(self._clock() + within)
            self._group.dismissed(rank)
            if isinstance(self._ranks.get(rank), _Due):
                del self._ranks[rank]

    def _running_but_leaving(self) -> dict[int, _Leaving]:
        running = self._of(_Running) if not self.is_stopping else {}
        return {rank: leaving for rank, leaving in self._leaving.items() if rank in running}

    def _begin_stop(self, *, again: bool) -> list[RankAction]:
        self._again = again
        self._later[Kill] = self._clock() + self._shutdown_timeout, Kill()
        if again:
            self._group.stopped()
        self._ranks = dict(self._of(_Running))
        return [CancelStarts()]

    def _give_up_if_alone(self) -> list[RankAction]:
        """Ends the job here if no rank runs and this node cannot find out whether it has its place."""
        if not self._out_of_reach or not self._has(_Due) or self._has(_Asked, _Running):
            return []
        why = f"no rank is left here, and none can be started again: {self._out_of_reach}"
        self._note(ended_by=why)
        return self._begin_stop(again=False)

    def _note(self, **said: object) -> None:
        self._outcome = dataclasses.replace(self._outcome, **said)  # type: ignore[arg-type]

    def _has(self, *kinds: type) -> bool:
        return any(isinstance(state, kinds) for state in self._ranks.values())

    def _of(self, kind: type[_State]) -> dict[int, _State]:
        return {rank: state for rank, state in self._ranks.items() if isinstance(state, kind)}
