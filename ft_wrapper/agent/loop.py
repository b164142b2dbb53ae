"""The agent's loop: waits for what happens to the ranks, and does what `Ranks` answers.

One thread waits for all processes, for the template, for signals, for news of the other nodes and for what is
due; nothing is polled.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from contextlib import ExitStack, closing

from torch.distributed.elastic.multiprocessing import LogsSpecs

from .. import events
from .._files import check_open_files
from ..monitor.line import AGENT_ENV
from ..monitor.service import MonitorService
from ..store.tcp import raise_file_limit
from .actions import (
    Abandoned,
    Action,
    AskPlace,
    CancelStarts,
    Ended,
    EndTemplate,
    Event,
    ForkAhead,
    Forked,
    Kill,
    LeaveJob,
    NotStarted,
    Place,
    RoundBegan,
    Send,
    SignalArrived,
    Start,
    Tell,
    Tick,
)
from .group import Group
from .nodes import End, Nodes, Round
from .outputs import Failure, Logs, opened, read_failure
from .policy import JobInStore, RestartPolicy
from .process import Job, Orphans, Program, RankProcess, of_incarnation, start
from .ranks import Ranks
from .signals import SignalQueue
from .standby import Request, Standby

log = logging.getLogger(__name__)

# Seconds that a process may take to vanish after SIGKILL. One that is stuck in the kernel never does.
KILL_TIMEOUT = 10.0
# Seconds that the template may take to import torch, from a slow file system, and to fork a rank.
STANDBY_TIMEOUT = 300.0
# Seconds after which a template that was asked for a rank is slow. It forks one in some ten milliseconds.
SLOW_FORK = 1.0
# A template that ended sooner than this is not tried again.
STANDBY_SETTLED = 60.0
# Of this process, for each rank: its connections to the store, if that is here, and what its monitor has.
_FILES_OF_A_RANK = 12
_FILES_OF_ALL = 16  # what the ranks have in common


class Loop:
    """The rank processes, from their start to the last one's end; for use in the main thread.

    A context manager: leaving it ends what still runs, and closes what was opened.

    Args:
        program: what each rank runs.
        job: what they have in common.
        policy: what is done about those that fail.
        nodes: the others: their news, and who hears that this node leaves.
        logs_specs: where their streams and errors go.
        shutdown_timeout: seconds from a signal that ends ranks to SIGKILL.
        standby: whether they are forked from a process that has torch imported, where that is possible.
        orphans: what this process has adopted: it is a subreaper.
        group: told what happens.
        log_line_prefix: what comes before the lines that are shown; see `Logs`.
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
        self._nodes = nodes
        self._orphans = orphans
        self._group = group
        self._ranks = Ranks(policy, group, shutdown_timeout)
        self._running: dict[int, RankProcess] = {}  # by local rank
        self._standby: Standby | None = None
        self._in_store: JobInStore | None = None
        self._cleanup = ExitStack()
        try:
            self._selector = self._cleanup.enter_context(selectors.DefaultSelector())
            self._logs = self._cleanup.enter_context(Logs(logs_specs, job.role, log_line_prefix))
            self._monitors = self._cleanup.enter_context(closing(MonitorService(job.run_id)))
            if standby and program.script is not None:
                self._start_standby()
        except BaseException:
            self._cleanup.close()
            raise

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        with self._cleanup:
            self._cleanup.callback(self._close_store)
            self._handle(Abandoned())

    def start(self, where: Round) -> None:
        """Starts all ranks, in a new round: with a store of their own.

        Args:
            where: the round.

        Raises:
            OSError: one cannot be started, or this process may not open as many files as that takes. Those
                that were started end with the context.
            StoreError: the store does not answer.
        """
        self._group.begin_round(where)
        self._close_store()
        raise_file_limit()
        nproc = self._job.nproc
        # Otherwise ranks could not reach the store, and the others would call them missing.
        check_open_files(_FILES_OF_ALL + nproc * _FILES_OF_A_RANK, f"with {nproc} ranks this process")
        self._in_store = JobInStore(where.store, self._nodes.have_formed)
        actions = self._ranks.handle(RoundBegan(where, self._in_store))
        starts = [action for action in actions if isinstance(action, Start)]
        first_rank = where.base_rank if where.node else 0
        self._logs.begin_round({each.rank: self._environment(each) for each in starts}, first_rank)
        for each in starts:
            self._start(each)
        self._group.all_started()

    def wait(self, signals: SignalQueue) -> End:
        """Waits until all ranks have ended, and none is to be started again alone.

        A signal is forwarded to all that live; those that still do after the shutdown timeout are killed.

        Args:
            signals: what is to be forwarded; and SIGCHLD, which says that there may be orphans to reap.
        """
        for waited_for in (signals.fd, self._nodes.inbox):
            self._selector.register(waited_for, selectors.EVENT_READ)
        try:
            self._do_what_is_due()
            while not self._ranks.is_over:
                for key in self._select():
                    if isinstance(key.data, RankProcess):
                        self._take_end(key.data)
                    elif key.data is self._standby and self._standby is not None:
                        self._take_answers(self._standby)
                for signum in signals.read():
                    if signum == signal.SIGCHLD:
                        self._reap_orphans()
                    else:
                        self._handle(SignalArrived(signum))
                for news in self._nodes.inbox.take():
                    self._handle(news)
                self._do_what_is_due()
        finally:
            for waited_for in (signals.fd, self._nodes.inbox):
                self._selector.unregister(waited_for)
        return self._ranks.end()

    # Waiting -------------------------------------------------------------------------------------------

    def _select(self) -> list[selectors.SelectorKey]:
        """Waits for the next event, or until something is due."""
        now = time.monotonic()
        due = self._ranks.due()
        timeout = None if due is None else max(0.0, due - now)
        if self._standby is not None and self._ranks.are_asked_for:
            # Its answers up to then are read first, so looking late whether it is overdue does no harm.
            timeout = STANDBY_TIMEOUT if timeout is None else min(timeout, STANDBY_TIMEOUT)
        return [key for key, _ in self._selector.select(timeout)]

    def _do_what_is_due(self) -> None:
        if self._standby is not None and self._standby.overdue(STANDBY_TIMEOUT):
            log.warning("the standby process does not answer: ranks are started without it")
            for request in self._end_standby():
                self._execute_or_fail(request)
        self._handle(Tick())

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

    # Carrying out --------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for action in self._ranks.handle(event):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start():
                self._start_or_fail(action)
            case CancelStarts():
                self._cancel_starts(action.why)
            case ForkAhead():
                if self._standby is not None:
                    self._standby.ask_ahead()
                    self._take_answers(self._standby)
            case EndTemplate():
                self._end_standby()
            case Send():
                for rank, process in self._running.items():
                    if action.rank in (None, rank):
                        process.send(action.signum)
            case Kill():
                self._kill()
            case AskPlace():
                self._handle(Place(self._nodes.has_place(), self._nodes.out_of_reach()))
            case LeaveJob():
                self._nodes.leave(action.why)
            case Tell():
                self._tell(action)

    def _tell(self, told: Tell) -> None:
        failure = told.failure
        running = sum(not process.has_ended() for process in self._running.values())
        log.log(
            logging.INFO if failure.ended_by else logging.WARNING,
            "rank %d (pid %d): %s%s; %s",
            failure.rank,
            failure.pid,
            failure.how(),
            f"; {running} still running" if running else "",
            told.why,
        )

    # Starting ------------------------------------------------------------------------------------------

    def _environment(self, asked: Start) -> dict[str, str]:
        return self._job.environment(asked.rank, asked.restarts, self._ranks.round)

    def _start(self, asked: Start) -> None:
        """Starts a process, or asks the template for it."""
        if not self._ranks.wants(asked):
            return  # another one could not be started, and so none is
        files = self._logs.open(asked.rank, asked.incarnation)
        environment = {
            **self._environment(asked),
            **of_incarnation(asked.incarnation, files.error_file),
            AGENT_ENV: self._monitors.name,
        }
        request = Request(asked.rank, asked.incarnation, files, environment, asked.is_replaced)
        if self._standby is None:
            self._execute(request)
            return
        self._standby.ask(request)
        self._take_answers(self._standby)

    def _start_or_fail(self, asked: Start) -> None:
        """Starts a process in a job that is on: one that cannot be started is one that has failed."""
        try:
            self._start(asked)
        except OSError as error:
            self._fail_to_start(asked.rank, asked.incarnation, error)

    def _execute(self, request: Request) -> None:
        with ExitStack() as streams:
            stdout, stderr = (opened(path, streams) for path in (request.files.stdout, request.files.stderr))
            popen = start(
                self._program.command_of(request.rank), {**os.environ, **request.environment}, stdout, stderr
            )
        pidfd = os.pidfd_open(popen.pid)
        self._add(
            request, RankProcess(request.rank, request.incarnation, popen.pid, pidfd, request.files, popen)
        )

    def _execute_or_fail(self, request: Request) -> None:
        try:
            self._execute(request)
        except OSError as error:
            self._fail_to_start(request.rank, request.incarnation, error)

    def _fail_to_start(self, rank: int, incarnation: int, error: OSError) -> None:
        self._logs.close(rank, incarnation)
        words, number = f"cannot be started: {error}", self._ranks.round.rank(rank)
        self._handle(NotStarted(rank, Failure(number, 0, 1, time.time(), words, "", incarnation)))

    def _add(self, request: Request, process: RankProcess) -> None:
        self._running[process.rank] = process
        self._monitors.add(process.pid, replaced=request.is_replaced)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        self._emit("rank_started", process)
        self._handle(Forked(process.rank, process.incarnation, process.pid))

    def _emit(self, event: str, process: RankProcess, **fields: object) -> None:
        rank = self._ranks.round.rank(process.rank)
        who = {"rank": rank, "incarnation": process.incarnation, "child": process.pid}
        events.emit(event, job=self._job.run_id, **who, **fields)

    # The template --------------------------------------------------------------------------------------

    def _start_standby(self) -> None:
        self._standby = Standby(self._program, self._job.shared_environment())
        self._selector.register(self._standby, selectors.EVENT_READ, self._standby)

    def _end_standby(self) -> list[Request]:
        """Ends the template; returns what it was asked for, and has not started."""
        if self._standby is None:
            return []
        standby, self._standby = self._standby, None
        self._selector.unregister(standby)
        return standby.close(KILL_TIMEOUT)

    def _cancel_starts(self, why: str) -> None:
        if self._standby is None:
            return
        if why and self._standby.overdue(SLOW_FORK):
            log.warning(
                "the standby process %d has not answered for %g s, and is ended: %s",
                self._standby.process.pid,
                SLOW_FORK,
                why,
            )
        self._standby.cancel()

    def _take_answers(self, standby: Standby) -> None:
        answers = standby.answers()
        if answers is None:
            self._replace_standby(standby)
            return
        for forked in answers:
            request = forked.request
            if forked.pid is None:
                rank = self._ranks.round.rank(request.rank)
                log.warning("rank %d is started without the standby process: %s", rank, forked.error)
                self._execute_or_fail(request)
            else:
                pidfd = os.pidfd_open(forked.pid)  # of a child that is not reaped yet
                self._add(
                    request, RankProcess(request.rank, request.incarnation, forked.pid, pidfd, request.files)
                )

    def _replace_standby(self, standby: Standby) -> None:
        """The template has ended: another one takes its place, unless that would be a loop."""
        lived = time.monotonic() - standby.started
        lost = self._end_standby()
        how = standby.process.returncode
        log.warning("the standby process %d has ended (%s)", standby.process.pid, how)
        if self._ranks.is_stopping:
            return
        if lived >= STANDBY_SETTLED:
            try:
                self._start_standby()
            except OSError as error:
                log.warning("there is no standby process any more: %s", error)
        for request in lost:
            self._execute_or_fail(request)

    # An end --------------------------------------------------------------------------------------------

    def _take_end(self, process: RankProcess) -> None:
        self._selector.unregister(process.pidfd)
        del self._running[process.rank]
        self._monitors.remove(process.pid)
        exitcode = process.reap()
        self._logs.close(process.rank, process.incarnation)
        self._emit("rank_ended", process, exitcode=exitcode)
        failure = None
        if exitcode != 0 and not self._ranks.is_stopping:
            rank = self._ranks.round.rank(process.rank)
            failure = read_failure(rank, process.pid, process.incarnation, exitcode, process.files)
        self._handle(Ended(process.rank, exitcode, failure))

    def _kill(self) -> None:
        """Ends all that run, whatever they do."""
        for process in self._running.values():
            process.send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT
        with selectors.DefaultSelector() as selector:
            for process in self._running.values():
                selector.register(process.pidfd, selectors.EVENT_READ, process)
            while self._running and (timeout := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(timeout):
                    selector.unregister(key.fd)
                    self._take_end(key.data)
        if not self._running:
            return
        log.error("%s: still there %g s after SIGKILL, left behind", self._ranks.names(), KILL_TIMEOUT)
        for rank, process in list(self._running.items()):
            self._selector.unregister(process.pidfd)
            os.close(process.pidfd)
            del self._running[rank]
            self._handle(Ended(rank, -signal.SIGKILL))

    def _close_store(self) -> None:
        if self._in_store is not None:
            self._in_store.close()
            self._in_store = None
