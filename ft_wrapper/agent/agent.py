"""The agent of a node: round after round, its loop waits for what happens to the ranks.

It carries out what `Ranks` answers. One thread waits for all processes, for the template, for signals, for
news of the other nodes and for what is due; nothing is polled.
"""

import dataclasses
import logging
import os
import selectors
import shlex
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from multiprocessing import connection

from torch.distributed import DistError
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs

from .. import events
from .._files import check_open_files, raise_file_limit
from .._text import without_secrets
from ..exception import StoreError
from ..log_lines import note_node
from ..monitor.identity import PROCESS_ENV, mark
from ..monitor.service import MonitorService
from ..monitor.signals import handled_signals
from ..protocol.keys import HEAD
from ..store.secret import AGENT_ENV, announce, warn_if_open
from . import health, ranks
from .group import Group
from .job_in_store import JobInStore
from .nodes import CannotStart, Nodes, exit_code_of
from .outputs import ERROR_FILE_ENV, Logs, count_kernel_kills, describe_exit, opened, read_failure
from .policy import RANK_RESTARTS, JobFacts, JobOutcome, Policy, RestartPolicy
from .process import INCARNATION_ENV, Job, Program, RankProcess, Request, adopted, start, with_local_rank
from .rounds import BAD_NODE, DONE, INFRASTRUCTURE, End, Failure, JobResult, News, Round, What, worst
from .signals import NOTICES, SHUTDOWN_TIMEOUT, Signalled, SignalQueue, queued, signal_name
from .standby import Standby
from .torch_api.timers import watchdog

log = logging.getLogger(__name__)

Answer = Callable[[Group, Nodes, str], AbstractContextManager[object]]

# Seconds that a process may take to vanish after SIGKILL. One that is stuck in the kernel never does.
KILL_TIMEOUT = 10.0
# Seconds that the template may take to import torch, from a slow file system, and to fork a rank.
STANDBY_TIMEOUT = 300.0
# Of this process, per rank: connections to the store, if it is hosted here, and the monitor's files.
_FILES_OF_A_RANK = 12
_FILES_OF_ALL = 16  # what the ranks have in common
_KEEPS_OTHERS = "it hosts the store of the other nodes, which end with it"


@dataclasses.dataclass(frozen=True)
class Launch:
    """What an agent runs, and how.

    Args:
        job: what the ranks have in common.
        program: what each rank runs.
        policy: whether a rank that fails is restarted alone, or all are.
        max_rank_restarts: how often each rank may be restarted alone.
        shutdown_timeout: seconds from a signal that ends ranks to SIGKILL.
        drain_timeout: seconds that SIGTERM gives ranks to reach their next step, if the other nodes go on
            without this one; 0: it ends them.
        forks: whether they are forked from a process that has imported torch, where that is possible.
        log_line_prefix: what comes before the lines that are shown; see `Logs`.
        notice_grace: seconds from SIGTERM to the scheduler's SIGKILL, if that is known; else 0.
    """

    job: Job
    program: Program
    policy: Policy
    max_rank_restarts: int = RANK_RESTARTS
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    drain_timeout: float = 0.0
    forks: bool = True
    log_line_prefix: str | None = None
    notice_grace: float = 0.0


def run_agent(
    launch: Launch, specs: LogsSpecs, nodes: Nodes, group: Group | None = None, answer: Answer = health.health
) -> End:
    """Runs the ranks of a job on this node as processes, to their end; in the main thread.

    Args:
        launch: what it runs, and how.
        specs: where their streams and errors go.
        nodes: the other nodes; it is closed at the end.
        group: keeps the state of the ranks, for other threads; a new one when None.
        answer: answers health checks meanwhile.

    Raises:
        CannotStart: the nodes did not meet, or no rank could be started.
        OSError: something that ranks need is not available.
    """
    group = group or Group(launch.job.role, launch.job.nproc, launch.job.max_restarts)
    try:
        with ExitStack() as cleanup:
            queue = cleanup.enter_context(queued(launch.job.signals))
            cleanup.callback(nodes.close)
            launch = dataclasses.replace(launch, job=_served_job(launch, cleanup))
            cleanup.enter_context(answer(group, nodes, launch.job.run_id))
            logs = cleanup.enter_context(Logs(specs, launch.job.role, launch.log_line_prefix))
            end = run_rounds(nodes, Loop(launch, logs, nodes, group, queue, cleanup), queue)
            group.finished(end)
            if (result := end.result()).exit_code:
                events.emit("result", job=launch.job.run_id, line=str(result))
            return end
    except BaseException:
        group.become(WorkerState.UNKNOWN)
        raise


# Round after round -----------------------------------------------------------------------------------------


def run_rounds(nodes: Nodes, loop: "Loop", signals: SignalQueue) -> End:
    """Runs the ranks of this node until the job is over, or this node's part in it.

    Args:
        nodes: the other nodes.
        loop: this node's ranks.
        signals: those that end the job, and those that do not.

    Raises:
        CannotStart: the first round does not form, or its ranks cannot be started; says why.
    """
    is_first = True
    while True:
        try:
            with nodes.inbox.unattended(), signals.raised():
                where = nodes.next_round()
            nodes.store = where.store
            note_node(where.group_rank)
            loop.start(where)
            if where.group_rank == 0:
                log.info("see how the job stands: ftrun status %s", shlex.quote(where.store))
        except Signalled as signalled:
            return _left(End(), signalled.signum, nodes, "before the rendezvous is complete")
        except elastic.RendezvousGracefulExitError as error:
            log.info("%s", error)
            return End(elsewhere=nodes.closed_with())
        except (OSError, StoreError, ValueError, DistError, elastic.RendezvousError) as error:
            why = str(error) or type(error).__name__  # some errors of torch's handlers have no text
            late = nodes.closed_with() if is_first else None
            nodes.leave(f"it could not go on: {why}")
            # A job that is over may have to be tried again: then this node came too early.
            if is_first and (late is None or late.exit_code != INFRASTRUCTURE):
                raise CannotStart(why) from error
            # Others may be done; this node was not.
            code = max(exit_code_of(error), INFRASTRUCTURE)
            own = JobResult(code, f"the next round has not begun: {why}")
            closed = nodes.closed_with()
            return End(
                ended_by=own.why, elsewhere=own if closed is None or closed.verdict == "done" else closed
            )
        is_first = False
        end = loop.wait()
        if end.signum is None and not end.again and not end.ended_by:
            end = _await_others(end, nodes, signals)
        if end.signum is not None or not end.again:
            return end


def _await_others(end: End, nodes: Nodes, signals: SignalQueue) -> End:
    """This node's ranks have ended for good: notifies the other nodes, and waits for them if need be."""
    if end.failed:
        nodes.fail(end.failed, end.result().to_text())
        return end
    if end.drained and not end.preempted and not nodes.keeps_others:
        nodes.leave("it was drained")
        return dataclasses.replace(end, left=JobResult(DONE, "this node was drained", verdict="drained"))
    said = "" if end.lost or (end.drained and not end.preempted) else end.result().to_text()
    if not end.closed and nodes.await_others(said, as_host_only=not said):
        why = "waiting for the other nodes" if said else "it hosts their store"
        log.info("the ranks of this node have ended; %s", why)
        end = _wait(end, nodes, signals)
        if end.again or end.signum is not None or end.ended_by:
            return end
    elif end.lost:
        # Ranks that gave up, or found no others, do so on all nodes.
        is_over = not end.failures or any(one.gave_up or one.was_stranded for one in end.failures)
        if not is_over and nodes.states().get("active", 1) > 1:
            end = dataclasses.replace(end, left=JobResult(BAD_NODE, "its ranks are lost; the job continues"))
        nodes.leave("its ranks are lost")
        return end
    nodes.finish(end.result().to_text())
    return end


def _wait(end: End, nodes: Nodes, signals: SignalQueue) -> End:
    """Waits until all other nodes are done; returns the updated end."""
    while True:
        connection.wait([signals.fd, nodes.inbox.fileno()])
        for signum in signals.read():
            if signum in signals.ending:
                return _left(end, signum, nodes, "after its ranks have ended")
        for news in nodes.inbox.take():
            if news.what in (What.DRAIN, What.LEAVE, What.CHECKPOINT, What.NOTICE):
                continue  # no rank is left here
            if news.why:
                log.warning("%s", news.why)
            if news.what is What.GONE:
                continue  # no node waits for it
            if news.what is What.COME:
                return dataclasses.replace(end, again=True)
            if news.what is What.OVER:
                return dataclasses.replace(end, ended_by=news.why, elsewhere=news.result)
            end = dataclasses.replace(end, closed=True, elsewhere=worst((end.elsewhere, news.result)))
            if end.lost and news.result is not None and news.result.exit_code == DONE:
                return dataclasses.replace(end, failures=[], forgiven=[*end.forgiven, *end.failures])
            return end


def _left(end: End, signum: int, nodes: Nodes, when: str) -> End:
    """A signal has ended this node's part while no rank ran: notifies the other nodes."""
    name = signal_name(signum)
    log.warning("%s: this node leaves %s", name, when)
    nodes.leave(f"it was ended by {name}")
    return dataclasses.replace(end, signum=signum, signal=name)


# One round -------------------------------------------------------------------------------------------------


class Loop:
    """The rank processes, from their start to the last one's end; for use in the main thread.

    Args:
        launch: what they run, and how.
        logs: where their output goes.
        nodes: the other nodes: they send news, and are notified if this node leaves.
        group: keeps the state, for people.
        signals: those to forward; and SIGCHLD, after which there may be orphans to reap.
        cleanup: ends what still runs, and closes what was opened.
    """

    _in_store: JobInStore  # of the round

    def __init__(
        self, launch: Launch, logs: Logs, nodes: Nodes, group: Group, signals: SignalQueue, cleanup: ExitStack
    ) -> None:
        self._program = launch.program
        self._logs = logs
        self._nodes = nodes
        self._group = group
        self._signals = signals
        timing = launch.shutdown_timeout, time.monotonic, launch.drain_timeout, launch.notice_grace
        policy = RestartPolicy(launch.policy, launch.job.max_restarts, launch.max_rank_restarts)
        self._ranks = ranks.Ranks(launch.job.nproc, policy, group, *timing)
        self._running: dict[int, RankProcess] = {}  # by local rank
        self._standby: Standby | None = None
        self._got_by_all: int | None = None  # a signal that its sender has sent to the ranks, too
        self._job = job = launch.job
        cleanup.callback(events.emit, "agent_ended", job=job.run_id)
        self._reap = cleanup.enter_context(adopted())
        self._selector = cleanup.enter_context(selectors.DefaultSelector())
        for waited_for in (signals.fd, nodes.inbox):
            self._selector.register(waited_for, selectors.EVENT_READ)
        reporting = group.rank_metrics.restarted, nodes.agent, count_kernel_kills
        service = MonitorService(job.run_id, *reporting)
        self._monitors = cleanup.enter_context(closing(service))
        group.rank_metrics.ranks = service.ranks
        if launch.forks and launch.program.script is not None:
            self._standby = Standby(launch.program, job.shared_environment())
            self._selector.register(self._standby, selectors.EVENT_READ, self._standby)
        events.emit("agent_started", job=job.run_id, started=events.started())
        self._of_round = cleanup.enter_context(ExitStack())
        cleanup.callback(lambda: self._carry_out(self._ranks.abandoned()))

    def start(self, where: Round) -> None:
        """Starts all ranks in a new round, which has its own store.

        Args:
            where: the round.

        Raises:
            OSError: a rank cannot be started, or this process may not open enough files. Ranks that were
                started end with the context.
            StoreError: the store does not answer.
        """
        self._group.begin_round(where)
        events.emit("round_started", job=self._job.run_id, node=where.node)
        self._of_round.close()
        if where.group_rank == 0:
            warn_if_open(without_secrets(where.store))
        raise_file_limit()
        nproc = self._job.nproc
        # Otherwise ranks could not reach the store, and would be reported as missing.
        check_open_files(_FILES_OF_ALL + nproc * _FILES_OF_A_RANK, f"with {nproc} ranks this process")
        with self._signals.raised():
            in_store = JobInStore(where.store, self._nodes.have_formed, self._signals.interruptible)
            self._in_store = self._of_round.enter_context(closing(in_store))
            announce(self._in_store.store, self._nodes.agent, HEAD)
        starts = self._ranks.begin_round(where)
        first_rank = where.base_rank if where.node else 0
        self._logs.begin_round({each.rank: self._environment(each) for each in starts}, first_rank)
        for each in starts:
            self._start(each)
        self._group.all_started()

    def wait(self) -> End:
        """Waits until all ranks have ended, and none is to be restarted alone.

        A signal that ends the job is forwarded to all ranks that run, unless its sender has signalled them,
        too. Ranks that still run after the shutdown timeout are killed.
        """
        signals = self._signals
        self._do_what_is_due()
        has_orphans = False
        while not self._ranks.is_over:
            # The template's answers are read first, so a late look for an overdue one does no harm. Else
            # epoll waits for at most about 25 days.
            longest = STANDBY_TIMEOUT if self._ranks.are_asked_for else 1e6
            timeout = min(max(0.0, self._ranks.due() - time.monotonic()), longest)
            ready, arrived = self._selector.select(timeout), signals.read()
            for signum in arrived:  # before the ends, which it may have caused
                if signum in signals.ending:
                    self._carry_out(self._ranks.signalled(signum, signal_name(signum)))
                elif signum in NOTICES:
                    self._notify(signum)
            for key, _ in ready:
                if isinstance(key.data, RankProcess):
                    self._take_end(key.data)
                elif key.data is self._standby and self._standby is not None:
                    self._take_answers(self._standby)
            has_orphans = (has_orphans or signal.SIGCHLD in arrived) and not self._reap_orphans()
            for news in self._nodes.inbox.take():
                self._carry_out(self._ranks.take_news(news))
            if signal.SIGUSR1 in {*arrived} - signals.ending:  # unless the news is that other nodes got it
                self._carry_out(self._ranks.noticed("SIGUSR1"))
            self._do_what_is_due()
        return self._ranks.end(self._outcome(self._ranks.needs_outcome_at_end))

    # Waiting -------------------------------------------------------------------------------------------

    def _do_what_is_due(self) -> None:
        if self._standby is not None and self._standby.overdue(STANDBY_TIMEOUT):
            self._do_without_standby("does not answer")
        self._carry_out(self._ranks.tick(self._outcome(self._ranks.needs_outcome)))

    def _outcome(self, is_needed: bool) -> JobOutcome:
        return self._in_store.outcome() if is_needed else JobOutcome()

    def _reap_orphans(self) -> bool:
        """Returns False if it is not known yet which children are orphans."""
        ours = [process.pid for process in self._running.values()]
        if self._standby is not None:
            self._standby.drop_dead_spare()
            pids = self._standby.pids()
            if pids is None:
                return False  # a process that was just forked is not known yet
            ours += pids
        self._reap(ours)
        return True

    # Carrying out --------------------------------------------------------------------------------------

    def _carry_out(self, todo: Iterable[ranks.RankAction]) -> None:
        for action in todo:
            match action:
                case ranks.Start():
                    with self._or_failed(action.rank, action.incarnation):
                        self._start(action)
                case ranks.CancelStarts():
                    if self._standby is not None:
                        self._standby.cancel()
                case ranks.ForkAhead():
                    if self._standby is not None:
                        self._standby.ask_ahead()
                        self._take_answers(self._standby)
                case ranks.EndTemplate():
                    if self._standby is not None and action.signum and self._standby.got(action.signum):
                        self._got_by_all = action.signum
                        log.info("not forwarded: the sender of the signal has signalled each rank, too")
                    self._end_standby()
                case ranks.Send() if action.rank is not None or action.signum != self._got_by_all:
                    for rank, process in self._running.items():
                        if action.rank in (None, rank):
                            self._monitors.about_to_send(action.signum, process.pid)
                            process.send(action.signum)
                case ranks.Kill():
                    self._kill()
                case ranks.AskPlace():
                    is_ours, out_of_reach = self._nodes.look_for_place()
                    self._carry_out(self._ranks.place(is_ours=is_ours, out_of_reach=out_of_reach))
                case ranks.AskEnd():
                    if since := self._monitors.last_end():
                        self._carry_out(self._ranks.waits_at_end(since))
                case ranks.LeaveJob():
                    self._nodes.leave(action.why)
                case ranks.ReportFailure():
                    self._report(action)
                case ranks.Log():
                    log.log(logging.WARNING if action.is_warning else logging.INFO, "%s", action.line)
                case ranks.AskToLeave():
                    if not self._monitors.ask_to_leave(self._running[action.rank].pid):
                        self._ranks.does_not_leave(action.rank)
                case ranks.AskNotice(notice):
                    if (refused := self._nodes.notice(notice)) and notice.id:
                        log.warning("%s: only the ranks of this node get a notice: %s", notice.why, refused)
                        self._carry_out(self._ranks.take_news(News(What.NOTICE, notice=notice)))
                case ranks.Give():
                    events.emit("notice", job=self._job.run_id, line=f"notice from {action.notice}")
                    idle = self._monitors.give(action.notice)
                    for rank, process in self._running.items():
                        if process.pid in idle:
                            self._ranks.does_not_leave(rank)
                case ranks.AskDrain():
                    refused = _KEEPS_OTHERS if self._nodes.keeps_others and action.notice else ""
                    if refused := refused or self._nodes.drain(action.within, action.why, action.notice):
                        self._carry_out(self._ranks.stays(action, refused))

    def _notify(self, signum: int) -> None:
        """Passes a signal to the ranks that have a handler for it: it might end others and their helpers."""
        handle = {rank: one for rank, one in self._running.items() if signum in handled_signals(one.pid)}
        for process in handle.values():
            self._monitors.about_to_send(signum, process.pid)
            signal.pidfd_send_signal(process.pidfd, signum)
        words = "%s: handed to %s; no other running rank of this node has a handler for it"
        log.warning(words, signal_name(signum), self._ranks.names(handle))

    def _report(self, report: ranks.ReportFailure) -> None:
        failure = report.failure
        pidfds = [process.pidfd for process in self._running.values()]
        running = len(pidfds) - len(connection.wait(pidfds, 0))
        level = logging.INFO if failure.ended_by else logging.WARNING
        others = f"; {running} still running on this node" if running else ""
        words = "rank %d (pid %d): %s%s; %s"
        log.log(level, words, failure.rank, failure.pid, failure.how, others, report.why)

    # Starting ------------------------------------------------------------------------------------------

    def _environment(self, asked: ranks.Start) -> dict[str, str]:
        return self._job.environment(asked.rank, asked.restarts, self._ranks.round)

    def _start(self, asked: ranks.Start) -> None:
        """Starts a process, or asks the template for it."""
        if not self._ranks.wants(asked):
            return  # another rank could not be started, so none is
        files = self._logs.open(asked.rank, asked.incarnation)
        environment = {
            **self._environment(asked),
            INCARNATION_ENV: str(asked.incarnation),
            ERROR_FILE_ENV: "" if files.error_file == os.devnull else files.error_file,
            AGENT_ENV: self._monitors.name,
        }
        environment[PROCESS_ENV] = mark({**os.environ, **environment})
        request = Request(asked.rank, asked.incarnation, files, environment, asked.is_replaced)
        if self._standby is None:
            self._execute(request)
        else:
            self._standby.ask(request)
            self._take_answers(self._standby)

    def _execute(self, request: Request) -> None:
        with ExitStack() as streams:
            stdout, stderr = (opened(path, streams) for path in (request.files.stdout, request.files.stderr))
            command = with_local_rank(self._program.command, str(request.rank))
            popen = start(command, {**os.environ, **request.environment}, stdout, stderr)
        popen.returncode = 0  # its pidfd shows its end, as for forked processes
        self._add(request, popen.pid)

    @contextmanager
    def _or_failed(self, rank: int, incarnation: int) -> Iterator[None]:
        """In a running job, a process that cannot be started in the block counts as failed."""
        try:
            yield
        except OSError as error:
            self._logs.close(rank, incarnation)
            words, number = f"cannot be started: {error}", self._ranks.round.rank(rank)
            failure = Failure(number, 0, 1, time.time(), words, "", incarnation, how=describe_exit(1))
            self._carry_out(self._ranks.not_started(rank, failure, self._in_store.facts_of(number, 0)))

    def _execute_or_fail(self, request: Request) -> None:
        with self._or_failed(request.rank, request.incarnation):
            self._execute(request)

    def _add(self, request: Request, pid: int) -> None:
        process = RankProcess(request, pid, os.pidfd_open(pid))  # of a child that is not reaped yet
        self._running[request.rank] = process
        self._monitors.add(pid, replaced=request.is_replaced)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        self._emit("rank_started", process)
        self._carry_out(self._ranks.forked(request.rank, request.incarnation, pid))

    def _emit(self, event: str, process: RankProcess, **fields: object) -> None:
        request = process.request
        rank = self._ranks.round.rank(request.rank)
        who = {"rank": rank, "incarnation": request.incarnation, "child": process.pid}
        events.emit(event, job=self._job.run_id, **who, **fields)

    # The template --------------------------------------------------------------------------------------

    def _end_standby(self) -> list[Request]:
        """Ends the template; returns the requests that it has not carried out."""
        if self._standby is None:
            return []
        standby, self._standby = self._standby, None
        self._selector.unregister(standby)
        return standby.close(KILL_TIMEOUT)

    def _take_answers(self, standby: Standby) -> None:
        answers = standby.answers()
        if answers is None:
            self._do_without_standby(f"{standby.process.pid} has ended")
            return
        for request, answer in answers:
            if isinstance(answer, int):
                self._add(request, answer)
            else:
                rank = self._ranks.round.rank(request.rank)
                log.warning("rank %d is started without the standby process: %s", rank, answer)
                self._execute_or_fail(request)

    def _do_without_standby(self, why: str) -> None:
        log.warning("the standby process %s: ranks are started without it", why)
        for request in self._end_standby():
            self._execute_or_fail(request)

    # An end --------------------------------------------------------------------------------------------

    def _take_end(self, process: RankProcess) -> None:
        asked = process.request
        self._drop(process)
        memory = self._monitors.remove(process.pid)
        was_to_leave = memory is not None and memory.leave_requested
        is_lost = memory is not None and memory.is_life_held  # in its call, whatever the exit code says
        exitcode = process.reap()
        self._logs.close(asked.rank, asked.incarnation)
        self._emit("rank_ended", process, exitcode=exitcode)
        failure = None
        if (exitcode != 0 or is_lost) and not self._ranks.is_stopping:
            rank = self._ranks.round.rank(asked.rank)
            kills = max(0, count_kernel_kills() - asked.kernel_kills)
            failure = read_failure(rank, process.pid, asked.incarnation, exitcode, asked.files, kills)
        facts = JobFacts()
        if failure is not None and self._ranks.decides(asked.rank):
            facts = self._in_store.facts_of(failure.rank, failure.pid)
        actions = self._ranks.ended(asked.rank, exitcode, failure, facts)
        if was_to_leave:
            self._group.dismissed(asked.rank)
        self._carry_out(actions)

    def _drop(self, process: RankProcess) -> None:
        self._selector.unregister(process.pidfd)
        del self._running[process.request.rank]

    def _kill(self) -> None:
        """Kills all running processes, whatever they do."""
        for process in self._running.values():
            process.send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT
        for process in list(self._running.values()):
            if connection.wait([process.pidfd], max(0.0, deadline - time.monotonic())):
                self._take_end(process)
        if self._running:
            log.error("%s: still there %g s after SIGKILL, left behind", self._ranks.names(), KILL_TIMEOUT)
        for process in list(self._running.values()):
            self._drop(process)
            os.close(process.pidfd)
            self._carry_out(self._ranks.ended(process.request.rank, -signal.SIGKILL))


def _served_job(launch: Launch, cleanup: ExitStack) -> Job:
    """The job with what this agent serves its ranks."""
    locks = os.memfd_create("ft_wrapper_devices")
    cleanup.callback(os.close, locks)
    if launch.job.shares_processor():
        log.info("OMP_NUM_THREADS=1 for each rank, so that they share the processor; set it to tune")
    job = dataclasses.replace(launch.job, run_id=launch.job.run_id or str(uuid.uuid4()))
    timers = cleanup.enter_context(watchdog(job.run_id))
    return dataclasses.replace(job, timer_file=timers, locks=f"/proc/{os.getpid()}/fd/{locks}")
