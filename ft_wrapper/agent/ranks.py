"""The rank processes of a node: started, replaced one by one or all together, and ended.

One thread waits for all of them, for the template process, for signals and for what is due; nothing is
polled. Log files, tailing and error files are torch's own. Its process contexts are not used, because they
end all ranks when one has failed, nor is its `SubprocessHandler`: its arguments differ between torch's
versions, it cannot tie a rank's life to ours, and closing its files sends a signal to a process that may be
gone.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import selectors
import signal
import time
from contextlib import ExitStack

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs

from .. import events
from .._files import check_open_files
from ..monitor.wire import AGENT_ENV
from ..store.tcp import raise_file_limit
from .environment import Job, of_incarnation
from .failure import Failure, in_order, read_failure
from .group import Group
from .logs import Logs, opened
from .monitors import Monitors
from .nodes import News, Nodes, What
from .orphans import Orphans
from .policy import Action, RestartPolicy
from .processes import RankProcess, start
from .round import Round
from .signals import SignalQueue, signal_name
from .standby import Forked, Program, Request, Standby
from .watched_job import JobInStore

log = logging.getLogger(__name__)

# Seconds that a process may take to vanish after SIGKILL. One that is stuck in the kernel never does.
KILL_TIMEOUT = 10.0
# Seconds that the template may take to import torch, from a slow file system, and to fork a rank.
STANDBY_TIMEOUT = 300.0
# Seconds after which a template that was asked for a rank is slow. It forks one in some ten milliseconds.
SLOW_FORK = 1.0
# Seconds from a start to the fork of the next process ahead, which is not to be in the way of a restart.
SPARE_DELAY = 1.0
# Seconds after which a node that was not known to have its place asks again.
PLACE_DELAY = 1.0
# Of this process, for each rank: its connections to the store, if that is here, and what its monitor has.
_FILES_OF_A_RANK = 12
_FILES_OF_ALL = 16  # what the ranks have in common
# A template that ended sooner than this is not tried again.
STANDBY_SETTLED = 60.0


@dataclasses.dataclass(frozen=True)
class End:
    """How the ranks ended.

    Args:
        failures: those that count, in the order of happening.
        signum: the signal that ended the job, or None.
        forgiven: those that the job finished without.
        again: whether all are to be restarted, in the next round.
        failed: why the job cannot go on, on any node; empty if it can, or has finished.
        ended_by: why another node has ended the job; empty if none has.
        error_elsewhere: the error of another node's rank that ended the job, if that is why all failed here.
        lost: whether no rank of this node is left in a job that goes on elsewhere.
        closed: whether the other nodes wait for no one any more.
        node: what this node is called; empty if there is no other.
    """

    failures: list[Failure]
    signum: int | None
    forgiven: list[Failure]
    again: bool = False
    failed: str = ""
    ended_by: str = ""
    error_elsewhere: str = ""
    lost: bool = False
    closed: bool = False
    node: str = ""


@dataclasses.dataclass
class _Stop:
    """All ranks are being ended.

    Args:
        deadline: when those are killed that still run.
        again: whether all are restarted then.
        killed: whether that has been done.
    """

    deadline: float
    again: bool
    killed: bool = False


@dataclasses.dataclass(frozen=True)
class _Due:
    """A replacement that is to be started.

    Args:
        at: when, in monotonic seconds.
        incarnation: its number.
    """

    at: float
    incarnation: int


class Ranks:
    """The rank processes, from their start to the last one's end; for use in the main thread.

    A context manager: leaving it ends what still runs, and closes what was opened.

    Args:
        program: what each rank runs.
        job: what they have in common.
        policy: what is done about those that fail.
        nodes: the others: their news, and who is told that this node leaves.
        logs_specs: where their streams and errors go.
        shutdown_timeout: seconds from a signal that ends ranks to SIGKILL.
        standby: whether they are forked from a process that has torch imported, where that is possible.
        orphans: what this process has adopted: it is a subreaper.
        group: told what happens.
        log_line_prefix: what is in front of the lines that are shown; see `Logs`.
    """

    def __init__(
        self,
        program: Program,
        job: Job,
        policy: RestartPolicy,
        nodes: Nodes,
        logs_specs: LogsSpecs,
        *,
        shutdown_timeout: float,
        standby: bool,
        orphans: Orphans,
        group: Group,
        log_line_prefix: str | None = None,
    ) -> None:
        self._program = program
        self._job = job
        self._policy = policy
        self._nodes = nodes
        self._shutdown_timeout = shutdown_timeout
        self._orphans = orphans
        self._group = group
        self._running: dict[int, RankProcess] = {}
        self._due: dict[int, _Due] = {}
        self._failures: list[Failure] = []
        self._healed: set[int] = set()  # ranks whose last process exited with 0
        self._signum: int | None = None
        self._stop: _Stop | None = None
        self._asked: set[int] = set()  # ranks that the template was asked for
        self._standby: Standby | None = None
        self._spare_at: float | None = None  # when a process is to be forked ahead
        self._round: Round
        self._in_store: JobInStore | None = None
        self._failed = self._ended_by = ""
        self._closed = False
        self._cleanup = ExitStack()
        try:
            self._selector = self._cleanup.enter_context(selectors.DefaultSelector())
            self._logs = self._cleanup.enter_context(Logs(logs_specs, job.role, log_line_prefix))
            self._monitors = self._cleanup.enter_context(Monitors(job.run_id))
            if standby and program.script is not None:
                self._start_standby()
        except BaseException:
            self._cleanup.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        with self._cleanup:
            self._cleanup.callback(self._close_store)
            self._end_standby()
            self._begin_stop(again=False)  # no one is replaced any more
            self._kill()

    def start(self, where: Round) -> None:
        """Starts all ranks, in a new round: with a store of their own.

        Args:
            where: the round.

        Raises:
            OSError: one cannot be started, or this process may not open as many files as that takes. Those
                that were started end with the context.
            StoreError: the store does not answer.
        """
        self._close_store()
        raise_file_limit()
        nproc = self._job.nproc
        # Otherwise ranks could not reach the store, and the others would call them missing.
        check_open_files(_FILES_OF_ALL + nproc * _FILES_OF_A_RANK, f"with {nproc} ranks this process")
        self._in_store = JobInStore(where.store)
        self._round = where
        self._policy.begin_round(where.restarts, formed=where.formed)
        self._group.count_restarts(self._policy.restarts)
        self._stop = None
        self._failures.clear()
        self._healed.clear()
        ranks = range(self._job.nproc)
        called = where.base_rank if where.node else 0
        self._logs.begin_round({rank: self._environment(rank) for rank in ranks}, called)
        for rank in ranks:
            self._start(rank, 0)

    def wait(self, signals: SignalQueue) -> End:
        """Waits until all ranks have ended, and no one is to be started again alone.

        A signal is forwarded to all that live; those that still do after ``shutdown_timeout`` are killed.

        Args:
            signals: what is to be forwarded; and SIGCHLD, which says that there may be orphans to reap.
        """
        for waited_for in (signals.fd, self._nodes.inbox):
            self._selector.register(waited_for, selectors.EVENT_READ)
        try:
            while self._running or self._awaits_start():
                for key in self._select():
                    if isinstance(key.data, RankProcess):
                        self._take_end(key.data)
                    elif key.data is self._standby and self._standby is not None:
                        self._take_answers(self._standby)
                self._take_signals(signals)
                for news in self._nodes.inbox.take():
                    self._take_news(news)
                self._do_what_is_due()
        finally:
            for waited_for in (signals.fd, self._nodes.inbox):
                self._selector.unregister(waited_for)
        return self._end()

    # Waiting -------------------------------------------------------------------------------------------

    def _awaits_start(self) -> bool:
        """Whether a rank is to be started, or the template is at it.

        A rank that failed is not started again once the others have finished the job. Then the template is
        not waited for either: it may hang.
        """
        to_replace = self._due or (self._asked and self._failures)
        nothing_else = to_replace and not self._running and not self._nodes.out_of_reach()
        if nothing_else and self._store().finished_with() is not None:
            self._due.clear()
            self._give_up_asking()
        return bool(self._due or self._asked)

    def _select(self) -> list[selectors.SelectorKey]:
        """Waits for the next event, or until something is due."""
        moments = [due.at for due in self._due.values()]
        if self._spare_at is not None:
            moments.append(self._spare_at)
        if self._stop is not None and not self._stop.killed:
            moments.append(self._stop.deadline)
        if self._standby is not None and self._asked:
            # Whatever it has answered meanwhile is read first, so it may also be looked at too late.
            moments.append(time.monotonic() + STANDBY_TIMEOUT)
        timeout = max(0.0, min(moments) - time.monotonic()) if moments else None
        return [key for key, _ in self._selector.select(timeout)]

    def _take_signals(self, signals: SignalQueue) -> None:
        for arrived in signals.read():
            if arrived == signal.SIGCHLD:
                self._reap_orphans()
                continue
            log.warning("%s: forwarded to %s", signal_name(arrived), self._names())
            if self._signum is None:
                self._signum = arrived
                self._healed.update(self._running)
                self._end_standby()
                self._begin_stop(again=False)
                # First, so that no one waits for ranks that are about to end.
                self._nodes.leave(f"it was ended by {signal_name(arrived)}")
            self._send(arrived)

    def _take_news(self, news: News) -> None:
        if news.what is What.CLOSED:
            self._closed = True  # the ranks come to their own end
            return
        ends = news.what in (What.OVER, What.LOST)
        if ends:
            self._ended_by = self._ended_by or news.why
        if self._stop is not None:
            self._stop.again = self._stop.again and not ends
            return
        log.warning("%s; %s", news.why, "all ranks end" if ends else f"{self._names()} restart")
        self._begin_stop(again=not ends)
        self._send(signal.SIGTERM)

    def _reap_orphans(self) -> None:
        ours = [process.pid for process in self._running.values()]
        if self._standby is not None:
            self._standby.drop_dead_spare()
            if self._standby.go_on():
                log.warning("the standby process was stopped by a signal: continued")
            pids = self._standby.pids()
            if pids is None:
                return  # one that was just forked is not known yet
            ours += pids
        self._orphans.reap(ours)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._stop is not None and not self._stop.killed and now >= self._stop.deadline:
            if self._running:
                log.warning(
                    "%s: still there %g s after the signal, killed", self._names(), self._shutdown_timeout
                )
            self._stop.killed = True
            self._kill()
        if self._standby is not None and self._standby.overdue(STANDBY_TIMEOUT):
            log.warning("the standby process does not answer: ranks are started without it")
            for request in self._end_standby():
                self._execute_or_fail(request)
        if self._spare_at is not None and now >= self._spare_at:
            self._spare_at = None
            if self._standby is not None and self._stop is None:
                self._standby.ask_ahead()
                self._take_answers(self._standby)
        for rank, due in list(self._due.items()):
            if now < due.at:
                continue
            if self._nodes.has_place():
                del self._due[rank]
                self._start_or_fail(rank, due.incarnation)
            else:  # a new process of its slot would throw out the one that has the place now
                self._due[rank] = _Due(now + PLACE_DELAY, due.incarnation)
        why = self._nodes.out_of_reach()
        if self._due and why and not self._running and not self._asked:
            self._ended_by = f"no rank is left here, and none can be started again: {why}"
            self._begin_stop(again=False)

    # Starting ------------------------------------------------------------------------------------------

    def _environment(self, rank: int) -> dict[str, str]:
        return self._job.environment(rank, self._policy.restarts, self._round)

    def _start(self, rank: int, incarnation: int) -> None:
        """Starts a process, or asks the template for it."""
        files = self._logs.open(rank, incarnation)
        environment = {
            **self._environment(rank),
            **of_incarnation(incarnation, files.error_file, self._policy.replaces(self._round.rank(rank))),
            AGENT_ENV: self._monitors.name,
        }
        request = Request(rank, incarnation, files, environment)
        if self._standby is None:
            self._execute(request)
            return
        self._asked.add(rank)
        self._standby.ask(request)
        self._take_answers(self._standby)

    def _execute(self, request: Request) -> None:
        with ExitStack() as streams:
            stdout, stderr = (opened(path, streams) for path in (request.files.stdout, request.files.stderr))
            popen = start(
                self._program.command_of(request.rank), {**os.environ, **request.environment}, stdout, stderr
            )
        pidfd = os.pidfd_open(popen.pid)
        self._add(RankProcess(request.rank, request.incarnation, popen.pid, pidfd, request.files, popen))

    def _start_or_fail(self, rank: int, incarnation: int) -> None:
        """Starts a process in a job that is on: one that cannot be started is one that has failed."""
        try:
            self._start(rank, incarnation)
        except OSError as error:
            self._logs.close(rank, incarnation)
            self._decide(rank, self._not_started(rank, incarnation, error), lived=0.0)

    def _add(self, process: RankProcess) -> None:
        rank = self._round.rank(process.rank)
        self._running[process.rank] = process
        self._monitors.add(process.pid)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        self._spare_at = time.monotonic() + SPARE_DELAY if self._policy.replaces(rank) else None
        self._group.started(process.rank, process.pid, replaces=process.incarnation > 0)
        self._emit("rank_started", process)

    def _not_started(self, rank: int, incarnation: int, error: Exception) -> Failure:
        words = f"cannot be started: {error}"
        return Failure(self._round.rank(rank), 0, 1, time.time(), words, "", incarnation)

    def _emit(self, event: str, process: RankProcess, **fields: object) -> None:
        rank = self._round.rank(process.rank)
        who = {"rank": rank, "incarnation": process.incarnation, "child": process.pid}
        events.emit(event, job=self._job.run_id, **who, **fields)

    # The template --------------------------------------------------------------------------------------

    def _start_standby(self) -> None:
        self._standby = Standby(self._program, self._job.shared_environment())
        self._selector.register(self._standby, selectors.EVENT_READ, self._standby)

    def _end_standby(self) -> list[Request]:
        if self._standby is None:
            return []
        standby, self._standby = self._standby, None
        self._selector.unregister(standby)
        lost = standby.close(KILL_TIMEOUT)
        self._asked.clear()
        return lost

    def _give_up_asking(self) -> None:
        """No process is needed any more of those that the template was asked for."""
        if self._standby is not None:
            if self._standby.overdue(SLOW_FORK):
                log.warning(
                    "the standby process %d has not answered for %g s, and is ended: the job has finished",
                    self._standby.process.pid,
                    SLOW_FORK,
                )
            self._standby.cancel()
        self._asked.clear()

    def _take_answers(self, standby: Standby) -> None:
        answers = standby.answers()
        if answers is None:
            self._replace_standby(standby)
            return
        for forked in answers:
            self._take_answer(forked)

    def _take_answer(self, forked: Forked) -> None:
        request = forked.request
        self._asked.discard(request.rank)
        if forked.pid is None:
            rank = self._round.rank(request.rank)
            log.warning("rank %d is started without the standby process: %s", rank, forked.error)
            self._execute_or_fail(request)
            return
        pidfd = os.pidfd_open(forked.pid)  # of a child that no one has waited for
        self._add(RankProcess(request.rank, request.incarnation, forked.pid, pidfd, request.files))

    def _execute_or_fail(self, request: Request) -> None:
        try:
            self._execute(request)
        except OSError as error:
            self._logs.close(request.rank, request.incarnation)
            failure = self._not_started(request.rank, request.incarnation, error)
            self._decide(request.rank, failure, lived=0.0)

    def _replace_standby(self, standby: Standby) -> None:
        """The template has ended: another one takes its place, unless that would be a loop."""
        lived = time.monotonic() - standby.started
        lost = self._end_standby()
        how = standby.process.returncode
        log.warning("the standby process %d has ended (%s)", standby.process.pid, how)
        if self._stop is None and lived >= STANDBY_SETTLED:
            try:
                self._start_standby()
            except OSError as error:
                log.warning("there is no standby process any more: %s", error)
        if self._stop is None:
            for request in lost:
                self._execute_or_fail(request)

    # An end --------------------------------------------------------------------------------------------

    def _take_end(self, process: RankProcess) -> None:
        self._selector.unregister(process.pidfd)
        del self._running[process.rank]
        self._monitors.remove(process.pid)
        exitcode = process.reap()
        rank = self._round.rank(process.rank)
        self._logs.close(process.rank, process.incarnation)
        self._emit("rank_ended", process, exitcode=exitcode)
        if exitcode == 0:
            self._healed.add(process.rank)
            self._group.ended(process.rank)
            return
        if self._stop is not None:
            return  # what a signal of ours ended did not fail of its own accord
        failure = read_failure(process, exitcode, rank)
        self._decide(process.rank, failure, lived=time.monotonic() - process.started)

    def _decide(self, rank: int, failure: Failure, lived: float) -> None:
        self._group.failed(rank)
        if self._nodes.have_formed():
            self._policy.note_formed()
        if failure.exitcode == 1:
            ended_by = self._store().ended_by(failure.rank, failure.pid)
            failure = dataclasses.replace(failure, ended_by=ended_by)
        self._failures.append(failure)
        verdict = self._policy.decide(
            failure.rank, failure.pid, lived, self._store(), is_first=failure.incarnation == 0
        )
        if verdict.action is Action.REPLACE:
            self._due[rank] = _Due(time.monotonic() + verdict.delay, failure.incarnation + 1)
            self._do_what_is_due()
        elif verdict.action in (Action.RESTART_GROUP, Action.END_GROUP):
            if verdict.action is Action.END_GROUP:
                self._failed = f"rank {failure.rank}: {failure.how()}"
            self._group.count_restarts(self._policy.restarts)
            self._begin_stop(again=verdict.action is Action.RESTART_GROUP)
            self._send(signal.SIGTERM)
        # Last: no one waits for the words.
        log.log(
            logging.INFO if failure.ended_by else logging.WARNING,
            "rank %d (pid %d): %s%s; %s",
            failure.rank,
            failure.pid,
            failure.how(),
            self._others(),
            verdict.why,
        )

    def _begin_stop(self, *, again: bool) -> None:
        self._stop = _Stop(time.monotonic() + self._shutdown_timeout, again)
        if again:
            self._group.become(WorkerState.STOPPED)
        self._due.clear()
        self._asked.clear()
        if self._standby is not None:
            self._standby.cancel()

    def _send(self, signum: int) -> None:
        for process in self._running.values():
            process.send(signum)

    def _kill(self) -> None:
        """Ends all that run, whatever they do."""
        self._send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT
        with selectors.DefaultSelector() as selector:
            for process in self._running.values():
                selector.register(process.pidfd, selectors.EVENT_READ, process)
            while self._running and (timeout := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(timeout):
                    selector.unregister(key.fd)
                    self._take_end(key.data)
        if self._running:
            log.error("%s: still there %g s after SIGKILL, left behind", self._names(), KILL_TIMEOUT)
            self._running.clear()

    def _store(self) -> JobInStore:
        assert self._in_store is not None, "no round has begun"
        return self._in_store

    def _close_store(self) -> None:
        if self._in_store is not None:
            self._in_store.close()
            self._in_store = None

    def _end(self) -> End:
        """Which failures count."""
        again = self._stop is not None and self._stop.again
        # The store may be gone with the node that has ended the job. And it has to say nothing but this.
        asked = bool(self._failures) and not again and not self._ended_by
        finished = self._store().finished_with() if asked else None
        counted: list[Failure] = []
        forgiven: list[Failure] = []
        for failure in in_order(self._failures):
            if finished is not None:
                # A process that was in the job to its end, and failed then, has lost what it was to do.
                was_in = failure.rank in finished and finished[failure.rank] in (None, failure.pid)
                (counted if was_in else forgiven).append(failure)
            elif failure.rank - self._round.base_rank in self._healed:
                forgiven.append(failure)
            else:
                counted.append(failure)
        own = [failure for failure in counted if not failure.ended_by]
        return End(
            own,
            self._signum,
            forgiven,
            again=again,
            failed=self._failed,
            ended_by=self._ended_by,
            error_elsewhere=counted[0].ended_by if counted and not own else "",
            lost=finished is None
            and not again
            and len({failure.rank for failure in counted}) == self._job.nproc,
            closed=self._closed,
            node=self._round.node,
        )

    def _names(self) -> str:
        ranks = [str(self._round.rank(rank)) for rank in sorted(self._running)]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}" if ranks else "no rank"

    def _others(self) -> str:
        running = sum(not process.has_ended() for process in self._running.values())
        return f"; {running} still running" if running else ""
