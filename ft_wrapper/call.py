"""One call of the wrapped function, and its restart loop (DESIGN.md 4)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import socket
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import torch_state
from ._addresses import own_address
from ._files import check_open_files, replace_broken_streams
from ._garbage import collect_garbage
from ._torch_caches import end_checkpoint_process, forget_compiled_ranks, forget_old_ranks
from ._warm_up import warm_up
from .abort import (
    close_aborted_sockets,
    protect_children,
    protect_process,
    release_process_groups,
    wait_for_released_groups,
)
from .attribution import Interruption
from .call_wrapper import CallWrapper
from .exception import (
    HealthCheckError,
    InternalError,
    JobEnded,
    RankShouldRestart,
    RestartAbort,
    StoreError,
    StoreUnavailable,
)
from .exit_watch import ExitWatch
from .iteration_store import Environment, connect, point_to
from .job import Job, Patience, Remembered, formation_size
from .monitor.interrupt import Interrupter
from .monitor.kept_signals import KeptSignals
from .monitor.line import MonitorLine, line_to_agent
from .monitor.process import MonitorProcess
from .monitor.process_main import MonitorFiles
from .monitor.progress_watchdog import ProgressWatchdog
from .monitor.settings import MonitorSettings
from .monitor.shared_memory import Phase, RankMemory
from .monitor.stack_dump import StackDump
from .monitor.thread import MonitorThread, Watch
from .monitor.whereabouts import whereabouts
from .rank_assignment import RankAssignmentCtx, RankDiscarded, activate_if_unsaid
from .restart_report import evictions, restart_line
from .same_faults import PROGRESS_AFTER, in_words, kind_and_place, pause_before_entering
from .state import Mode, State
from .store import BarrierTimeout, Fault, PrefixStore, StorePlan
from .store.records import DONE, FAULT
from .tracebacks import checkpoint_failure, forget_frames, interruptions_unreported, users_part

if TYPE_CHECKING:
    from .wrapper import Wrapper

log = logging.getLogger(__name__)

_ABORTED_SOON = 0.5  # seconds
# Seconds in an iteration. An import cannot be cut short, and a job that does not work mostly fails soon;
# other ranks need the processors to begin.
_WARMS_UP_AFTER = 2.0
_FILES_OF_A_CALL = 18  # with what its monitor, if that is a process, opens for itself
# What this process knows of its last wrapped call, by store.
_remembered: dict[str, Remembered] = {}


class Call:
    """Everything that one wrapped call owns, from `open` to `close`, and its restart loop.

    Args:
        wrapper: the settings and plug-ins.
        plan: which store, and who hosts it.
        state: this rank's state as the environment has it.
        function_name: of the wrapped function: it must be the same on all ranks.
    """

    def __init__(self, wrapper: Wrapper, plan: StorePlan, state: State, function_name: str) -> None:
        self.wrapper = wrapper
        self.plan = plan
        self._function_name = function_name
        # Ranks in `base` are those that the last decision speaks of: before this iteration's assignment.
        self.base = state
        self.state = state
        self._owned = contextlib.ExitStack()
        self._user_store: PrefixStore | None = None
        self._watch: Watch | None = None
        self._monitor_lost = threading.Event()
        self._completed = False
        self._was_active = True
        self._entered = 0
        self._thread = threading.get_ident()
        self._ended_at: float | None = None
        self._came_at = time.monotonic()
        self._store_lost: StoreError | None = None
        self._thread_stays = False
        self._error: BaseException | None = None  # by which the function was left
        self._is_cause = False  # whether that ended the iteration, as far as this rank can see
        self._fault: str | None = None  # of the iteration that ended, if it is to be counted
        self._fault_trace: types.TracebackType | None = None
        self._entered_at = 0.0
        self._signals = KeptSignals()
        self.pinged = False  # before a block without hang protection, which sets new stamps
        self._ended_job: str | None = None

    # ---- what the call owns

    def open(self) -> None:
        """Gets a monitor, joins the job, takes part in the decision of the first iteration.

        Raises:
            RestartError: the store cannot be used, or somebody is missing.
            OSError: this process may not open as many files as that takes.
        """
        # Otherwise its monitor or a client of the store would fail half-way, and the others call it missing.
        check_open_files(_FILES_OF_A_CALL, f"rank {self.base.initial_rank}")
        if self.wrapper.collect_garbage:
            collect_garbage("call")
        settings = self._settings = self.wrapper.monitor_settings()
        slot = self.base.initial_rank or 0
        remembered = _remembered.pop(self.plan.description, Remembered(call=0))
        if self.plan.port is not None:
            remembered = dataclasses.replace(remembered, call=0)  # each call has a store of its own
        slots = list(range(formation_size(self.base.world_size)))
        if remembered.view is not None:
            slots = [member.slot for member in remembered.view.members]
        with contextlib.ExitStack() as since_last_call, contextlib.ExitStack() as owned:
            if remembered.monitor is not None:
                since_last_call.callback(
                    remembered.monitor.close, self.wrapper.termination_grace_time.total_seconds()
                )
            owned.enter_context(interruptions_unreported())
            owned.callback(self._signals.forget)
            owned.callback(self._signals.release)  # once all is closed: the monitor's end is a signal, too
            owned.callback(self._let_go)
            owned.callback(Environment().restore)
            self.memory = RankMemory()
            owned.callback(self.memory.close)
            self.memory.lock_life()
            owned.callback(close_aborted_sockets)
            owned.callback(wait_for_released_groups)
            self._hosts = self.plan.port is not None and slot == min(slots)
            self.monitor = self._find_monitor(settings, slot)
            owned.push(self._end_monitor)
            owned.enter_context(protect_process(self.monitor.pid))
            owned.enter_context(protect_children())
            self._exit_watch = ExitWatch()
            store = self.plan.connect()
            owned.callback(store.close)
            # A store that is on no one host says nothing of the way to the other ranks.
            towards = getattr(store, "host_name", None) or os.environ.get("MASTER_ADDR", "localhost")
            self._address = own_address(towards)
            self.interrupter = Interrupter()
            self.interrupter.install()
            owned.callback(self.interrupter.close)
            if threading.current_thread() is threading.main_thread():
                owned.callback(StackDump(self.memory).close)
            watchdog = ProgressWatchdog(
                self.memory,
                self.wrapper.progress_watchdog_interval.total_seconds(),
                watches_main_thread=threading.current_thread() is threading.main_thread(),
            )
            watchdog.start()
            owned.callback(watchdog.stop)
            terms = self._terms()
            self.job = Job(store, slot, slots, self._patience(settings), remembered.call, terms)
            self.job.heart = self.monitor.heart
            self.job.on_member = self.monitor.join
            owned.callback(self._say_goodbye)  # once the monitor thread is through with the store
            self.thread_client = store.clone()
            self.thread = MonitorThread(
                self.thread_client,
                self.interrupter,
                self._note_whereabouts,
                self._abort,
                self.wrapper.last_call_wait.total_seconds(),
            )
            owned.callback(self._end_thread, settings.barrier_timeout)
            self.user = CallWrapper(self)
            self._has_come_late = not self._join(remembered, since_last_call)
            self._owned = owned.pop_all()

    def close(self, error: BaseException | None) -> None:
        """Gives back everything: threads, processes, sockets, handlers, variables."""
        if error is None:
            self._owned.__exit__(None, None, None)
        else:  # with its traceback: what of this is a generator puts that back which it was given
            self._owned.__exit__(type(error), error, error.__traceback__)

    def _let_go(self) -> None:
        """Drops what refers to this object: it would stay, with its store, until the collector comes."""
        self.state.fn_exception = self._store_lost = None  # their frames do so, too
        self.__dict__.pop("thread", None)
        self.__dict__.pop("user", None)

    def user_store(self) -> PrefixStore:
        """The present iteration's store, on a connection of the function's own."""
        if self._user_store is None:
            self._user_store = connect(self.job.view.n)
        return self._user_store

    def _patience(self, settings: MonitorSettings) -> Patience:
        return Patience(
            barrier=settings.barrier_timeout,
            heartbeat=settings.heartbeat_timeout,
            completion=self.wrapper.completion_timeout.total_seconds(),
            min_world_size=self.wrapper.min_world_size,
            max_same_faults=self.wrapper.max_same_faults,
            on_join=self.wrapper.on_join,
            join_window=self.wrapper.join_window.total_seconds(),
            rejoin_wait=self.wrapper.rejoin_wait.total_seconds(),
            admits=self.wrapper.use_global_iteration,
            replaced=settings.replaced,
            hard=settings.hard_timeout,
        )

    def _terms(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        return {
            "function": self._function_name,
            "formation_size": formation_size(self.base.world_size),
            **self.wrapper.shared_settings(),
        }

    def _find_monitor(self, settings: MonitorSettings, slot: int) -> MonitorLine:
        """The monitor inside the agent, if there is one; otherwise one in a process of its own."""
        files = MonitorFiles(
            _filled_in(self.wrapper.monitor_process_logfile, slot),
            _filled_in(self.wrapper.monitor_process_pidfile, slot),
        )
        if files == MonitorFiles():  # those are a process's
            line = line_to_agent(settings, self.plan, self.memory, self._on_monitor_lost)
            if line is not None:
                return line
        try:
            return self._monitor_process(settings, files)
        except StoreError:
            # This process may have been started again: then its predecessor's monitor still has the port. Or
            # the user's store is there.
            if not (self._hosts and self.plan.is_served(by_rank=self.wrapper.use_global_iteration)):
                raise
            self._hosts = False
            return self._monitor_process(settings, files)

    def _monitor_process(self, settings: MonitorSettings, files: MonitorFiles) -> MonitorProcess:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "CUDA is already initialized in this process, so the monitor process cannot be forked "
                "safely; call the wrapped function before anything that touches CUDA, or start the script "
                "with ftrun, which runs the monitor itself (without monitor_process_logfile and _pidfile)"
            )
        return MonitorProcess(
            settings,
            self.plan,
            hosts=self._hosts,
            memory=self.memory,
            files=files,
            on_lost=self._on_monitor_lost,
        )

    def _join(self, remembered: Remembered, since_last_call: contextlib.ExitStack) -> bool:
        """Gets into the job; False if the call has completed already.

        Args:
            remembered: what is known of the last call.
            since_last_call: lets go of the monitor that has kept watch since then.
        """
        job = self.job
        if remembered.member is not None and remembered.view is not None and self.plan.port is None:
            # The store outlived the last call: its last members go on to the next call's first iteration.
            job.check_terms()
            job.member, job.view = remembered.member, remembered.view
            self.base.rank, self.base.world_size = remembered.rank, remembered.world_size
            job.say_who()
            self.monitor.join(job.member)
            since_last_call.close()
            try:
                job.go_on(remembered.rank, remembered.world_size)
            except RankDiscarded:
                raise
            except BaseException as error:
                job.leave(remembered.rank, Interruption.BASE_EXCEPTION, error, ends=False)
                raise
            return True
        self._came_at = time.monotonic()
        job.register()
        return job.join()

    def _say_goodbye(self) -> None:
        if not hasattr(self.job, "member") or self._store_lost is not None:
            return
        port = self.plan.port
        if self._completed and port is not None and not self._hosts and self._is_hosted_by_rank():
            # The host's monitor closes the port once all have said goodbye. A wrapped function that is called
            # next must not meet the old server there.
            host = getattr(self.job.store, "host_name", "")
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0) as line:
                line.settimeout(self.wrapper.completion_timeout.total_seconds())
                self.job.say_goodbye()
                line.recv(1)
            return
        self.job.say_goodbye()

    def _is_hosted_by_rank(self) -> bool:
        try:
            return self.plan.is_hosted_by_rank(self.job.store)
        except StoreError:
            log.debug("the store is gone", exc_info=True)
            return False

    def _end_monitor(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._completed and kind is None and self.plan.port is None and self.monitor.between():
            # Those who go on to the next call on this store wait for this rank, as long as it lives.
            last = _remembered[self.plan.description]
            _remembered[self.plan.description] = dataclasses.replace(last, monitor=self.monitor)
        elif self._hosts and kind is not None and hasattr(self, "job") and hasattr(self.job, "view"):
            self.monitor.detach()  # the others go on, and need the store that it hosts
        else:
            # One that hosts nothing has nothing left to do; it may still look for a store that has ended.
            patience = self.wrapper.barrier_timeout if self._hosts else self.wrapper.termination_grace_time
            self.monitor.close(patience.total_seconds())

    def _end_thread(self, patience: float) -> None:
        # It waits for the store, too, or for an end that this rank does not bring about.
        self.thread.stop(0.0 if self._store_lost is not None or self._thread_stays else patience)

    def _on_monitor_lost(self) -> None:
        """In a thread of its own: no one would notice this rank's faults any more, so it leaves the job."""
        self._monitor_lost.set()
        if not (hasattr(self, "job") and hasattr(self.job, "view")):
            return  # not in yet: the rank finds out when it wants to tell the monitor that it is
        if self._hosts:
            return  # nor is there a store any more: all ranks find out at once
        try:
            store = self.plan.connect()
        except StoreError:
            log.exception("the monitor and the store are lost: this rank leaves the job")
            return
        try:
            store.end_iteration(self.job.view.n, FAULT)
        finally:
            store.close()

    # ---- the restart loop

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls the function until an iteration ends well.

        Args:
            function: the wrapped function with its arguments.

        Returns:
            What the function returned; None on a spare, and where the call had completed already.
        """
        if self._has_come_late:
            log.warning(
                "slot %d is not needed any more: the other ranks have completed the call without it",
                self.job.slot,
            )
            _remembered[self.plan.description] = Remembered(self.job.call + 1)
            return None
        self._torch_state = torch_state.snapshot()
        try:
            self._signals.hold()
            while True:
                outcome, result = self._iterate(function)
                if outcome == DONE:
                    break
                self._clean_up()
                assert self.base.rank is not None
                self.job.go_on(self.base.rank, self.base.world_size, self._fault, self._tidy_up)
                close_aborted_sockets()  # everybody has left
                self._signals.forget()  # the iteration that it may be about is over
                self._consider_same_faults()
        except BaseException as error:
            self._leave(error)
            raise
        self._complete()
        return result

    def _iterate(self, function: Callable[[], Any]) -> tuple[str, Any]:
        """One iteration: how it ended, and what the function returned."""
        result: Any = None
        if not (self._assign_ranks() and self._make_ready()):
            return FAULT, None
        self.interrupter.reset()
        self._fault, self._is_cause = None, False
        self.pinged, self._entered_at = False, time.monotonic()
        self.memory.enter_phase(Phase.WATCHED)
        is_spare = self.state.mode == Mode.INACTIVE
        self._watch = watch = self.thread.watch(self.job.view.n, self._report_entry, may_be_done=is_spare)
        try:
            try:
                result = self.interrupter.call(self._body, function)
            finally:
                self._signals.hold()
        except (Exception, RankShouldRestart) as caught:
            if is_spare and isinstance(caught, HealthCheckError):
                raise  # it leaves, and ends nothing by it; else it is asked again, now that there is a fault
            was_done = self.interrupter.requested and watch.is_done  # while this spare warmed up
            self._error = None if was_done else caught
            raised = caught if isinstance(caught, Exception) else caught.__cause__
            if isinstance(raised, Exception):
                self.state.fn_exception = raised
            # A RankShouldRestart that no one asked for is the function's own.
            if isinstance(caught, Exception) or not self.interrupter.requested:
                self._note_fault(caught)
                # A store that is out of reach is no lack of progress: it is tried for barrier_timeout.
                self.memory.enter_phase(Phase.IDLE)
                self._publish(caught)
                self.memory.enter_phase(Phase.WATCHED)
        self._signals.hold()  # again, if a signal came just then
        if self._error is None:
            self.memory.enter_phase(Phase.IDLE)
            active = self.state.active_world_size or 0
            watch.may_be_done = True
            if self.job.await_completion(self.state.active_rank, active) == DONE:
                return DONE, result
            self.memory.enter_phase(Phase.WATCHED)
        self._settle()
        if self._store_lost is not None:
            raise self._store_lost
        return FAULT, None

    def _note_fault(self, error: BaseException) -> None:
        """Names a fault that counts: there was no progress before it, and it follows from no other fault."""
        limit = self.wrapper.max_same_faults
        if limit is None or (self._watch is not None and self._watch.ended_at is not None):
            return
        if self.pinged or self.memory.ping_stamp or time.monotonic() - self._entered_at > PROGRESS_AFTER:
            return
        self._fault = kind_and_place(error)
        if self._times_before() + 1 >= limit:  # then it leaves the call
            self._fault_trace = users_part(error.__traceback__)

    def _times_before(self) -> int:
        """How often in a row this rank's fault had ended iterations before."""
        return next((f.count for f in self.job.view.same_faults if f.what == self._fault), 0)

    def _consider_same_faults(self) -> None:
        """Ends the job, or backs off, if the same fault comes again and again; the same on all ranks."""
        trace, self._fault_trace = self._fault_trace, None
        limit, hopeless = self.wrapper.max_same_faults, self.job.hopeless()
        if limit is None or not self.job.decision.same_faults:
            return
        if hopeless is not None:
            self._ended_job = in_words(hopeless, limit)
            if hopeless.member == self.job.member:
                log.error("the job ends: %s", self._ended_job)
                error = self.state.fn_exception
                if error is None:  # the function's own RankShouldRestart, which stays inside
                    raise RestartAbort(self._ended_job)
                raise error.with_traceback(trace)
            raise JobEnded(f"another rank's error ended the job: {self._ended_job}")
        worst = self.job.decision.same_faults[0]
        pause = min(pause_before_entering(worst.count), self.wrapper.barrier_timeout.total_seconds() / 4)
        if pause:
            if worst.member == self.job.member:
                log.warning("%s; trying again in %g s", in_words(worst, limit), pause)
            self._monitor_lost.wait(pause)

    def _assign_ranks(self) -> bool:
        """Runs the rank assignment; False if the iteration ended before all ranks had theirs."""
        job = self.job
        n, decision = job.view.n, job.decision
        self.memory.active = True  # until it is known: others may be waiting for this rank
        has_joined = job.member in decision.joined
        self.base.rank = decision.rank_of(job.member, self.base.rank)
        self.base.world_size = decision.world_size
        if decision.joined:
            self.base.active_world_size = None  # there may be more active ranks again
        fresh = copy.copy(self.base)
        fresh.fn_exception = None
        fresh.mode = Mode.INITIALIZED  # until the rank assignment says what the rank does
        fresh.iteration = n if self.wrapper.use_global_iteration else n - decision.first
        context = RankAssignmentCtx(fresh, PrefixStore(n, job.store), set(decision.ranks))
        # Before ranks that exchange wait for each other: one that is lost there is a fault of this iteration.
        self.memory.iteration, self.memory.rank = n, None
        self.monitor.enter(job.view, None if has_joined or n == decision.first else decision)
        self.memory.enter_phase(Phase.WATCHED)  # the others wait for a rank that hangs here
        try:
            self.state = activate_if_unsaid(
                self.wrapper.rank_assignment(context), self.base.rank, self.base.world_size
            )
        except Exception as error:
            if not self._is_others_fault(error):
                raise
            self.state = fresh
            return False
        except RankShouldRestart:
            self.state = fresh
            return False
        finally:
            self.memory.enter_phase(Phase.IDLE)
        self.memory.rank = self.state.rank
        self._was_active = has_joined or n == decision.first or self.base.mode == Mode.ACTIVE
        self.base = copy.copy(self.state)
        self.memory.active = self.state.mode == Mode.ACTIVE
        return True

    def _is_others_fault(self, error: Exception) -> bool:
        """Whether a rank assignment failed because of another rank; its iteration has ended by that."""
        job = self.job
        if isinstance(error, BarrierTimeout):
            job.publish(self.base.rank, error)  # whom it waited for lives, and does not come
            return True
        return not isinstance(error, StoreUnavailable) and job.store.outcome_of(job.view.n) == FAULT

    def _make_ready(self) -> bool:
        """Checks the ranks and points ``torch.distributed`` to this iteration; False if it has ended."""
        job, state = self.job, self.state
        n = job.view.n
        if state.mode not in (Mode.ACTIVE, Mode.INACTIVE) or state.active_world_size is None:
            raise InternalError(f"rank_assignment must make each rank ACTIVE or INACTIVE; it gave {state}")
        if state.active_world_size < 1:
            raise InternalError(
                f"rank_assignment left no rank active of {state.world_size}; RetryController can end the job "
                "before it comes to that"
            )
        if state.active_world_size > (state.world_size or 0):
            # The others would wait for ranks that are not there.
            raise InternalError(
                f"rank_assignment gave active_world_size={state.active_world_size}, which is more than "
                f"world_size={state.world_size}"
            )
        endpoint: tuple[str, int] | None = None
        if state.active_rank == 0:
            endpoint = self._address, self.monitor.serve(self._address)
        state.set_distributed_vars()
        recompiles = state.active_rank is not None and forget_compiled_ranks(
            state.active_rank, state.active_world_size
        )
        self._entered = job.store.check_assignment(
            n,
            job.member,
            state.active_rank,
            state.world_size,
            state.active_world_size,
            promoted=not self._was_active,
            recompiles=recompiles,
            endpoint=endpoint,
        )
        if endpoint is None:
            look_every = self.wrapper.monitor_thread_interval.total_seconds()
            endpoint = job.await_endpoint(state.rank, look_every)
        if endpoint is not None:
            point_to(*endpoint)
        return endpoint is not None

    def _body(self, function: Callable[[], Any]) -> Any:
        """What runs interruptibly."""
        try:
            return self._enter(function)
        except BaseException as error:
            failure = checkpoint_failure(error)
            if failure is not None:
                raise RuntimeError(failure).with_traceback(error.__traceback__) from error
            raise

    def _enter(self, function: Callable[[], Any]) -> Any:
        self._signals.release()
        self._signals.raise_kept()
        if self.wrapper.initialize is not None:
            self.wrapper.initialize(self.state.freeze())
        self._check_health()
        if self.state.mode == Mode.INACTIVE:
            return self._warm_up()
        self.job.emit("enter", rank=self.state.active_rank)
        return function()

    def _warm_up(self) -> None:
        """On a spare, which has nothing else to do until the iteration ends."""
        watch, users = self._watch, self.wrapper.warm_up
        assert watch is not None
        if users is False:
            return
        self.memory.enter_phase(Phase.IDLE)  # it makes no progress meanwhile
        if watch.over.wait(_WARMS_UP_AFTER):
            return
        self.memory.enter_phase(Phase.WATCHED)
        watch.leaves_when_done = True  # the monitor thread looks at it once it has said whether it is over
        if watch.over.is_set():
            return
        warm_up(users, lambda: self.interrupter.requested)
        if self.wrapper.collect_garbage:
            collect_garbage("warm-up")

    def _settle(self) -> None:
        """Waits until everything is aborted, then ends what the function left behind."""
        watch, self._watch = self._watch, None
        if watch is not None:
            if not watch.handled.wait(_ABORTED_SOON):
                self._log_failure()  # the abort may hang, and this process be killed for that
            if not watch.handled.wait(self.wrapper.barrier_timeout.total_seconds()):
                raise InternalError("the abort plug-in did not return within barrier_timeout")
            self._ended_at = watch.ended_at
            self._store_lost = watch.store_lost
        self.job.emit("left")
        if self.wrapper.abort is not None:
            release_process_groups(aborted=True)
        end_checkpoint_process()  # before the others go on, or it writes beside the next iteration's
        self._user_store = None

    def _clean_up(self) -> None:
        """Between leaving the function and telling the others so."""
        self.memory.enter_phase(Phase.WATCHED)
        if self.wrapper.finalize is not None or self.wrapper.health_check is not None:
            self._restore()  # what the function has left would fail them
        if self.wrapper.finalize is not None:
            self.wrapper.finalize(self.state.freeze())
        self._check_health()
        if self._monitor_lost.is_set():
            raise InternalError(f"this rank's {self.monitor.name} ended; see {self.monitor.log_of}")
        self.memory.enter_phase(Phase.IDLE)

    def _tidy_up(self) -> None:
        """What only this rank's next entry needs, while the others are waited for."""
        self._restore()
        self._exit_watch.note()
        if self.wrapper.collect_garbage:
            collect_garbage("restart")

    def _restore(self) -> None:
        """Undoes what the function has done to the process, and says what has failed: that takes its time."""
        replace_broken_streams()
        self._log_failure()
        error, self._error = self._error, None
        if error is not None:
            forget_frames(error)
        self._torch_state.restore()
        forget_old_ranks()

    def _complete(self) -> None:
        """All ranks have finished."""
        self._completed = True
        self.job.emit("done")
        self._watch = None
        self.state.fn_exception = None
        if self.wrapper.completion is not None:
            try:
                self.wrapper.completion(self.state.freeze())
            except Exception:
                log.exception("completion failed on rank %s; the call had ended well", self.state.rank)
        if self.wrapper.abort is not None:
            release_process_groups()
        forget_old_ranks()
        self._user_store = None
        assert self.base.rank is not None
        _remembered[self.plan.description] = self.job.remember(self.base.rank, self.base.world_size)

    def _leave(self, error: BaseException) -> None:
        """This rank leaves the job; the others are told and go on."""
        self.memory.enter_phase(Phase.IDLE)
        if isinstance(error, Exception):
            self.state.fn_exception = error
        level = logging.INFO if isinstance(error, JobEnded) else logging.ERROR
        log.log(level, "rank %s (slot %d) leaves the job: %r", self.state.rank, self.job.slot, error)
        if isinstance(error, StoreUnavailable):
            self._store_lost = error  # it was tried for long enough; no one can be told
        # A discarded rank is in no one's plans. One whose monitor thread awaits the end must bring it about;
        # but not a spare, whose thread then stays until the others end the iteration.
        is_spare = not self.memory.active
        ends = not is_spare and (not isinstance(error, RankDiscarded) or self._watch is not None)
        if is_spare and self._watch is not None:
            self._watch, self._thread_stays = None, True
        interruption = (
            Interruption.MONITOR_PROCESS_EXCEPTION
            if self._monitor_lost.is_set()
            else Interruption.BASE_EXCEPTION
        )
        if self._store_lost is None:
            self.job.leave(self.state.rank, interruption, error, ends=ends, ended_job=self._ended_job)
            if ends and self.state.active_rank == 0:
                self.job.await_others()  # they may yet connect to the store that this rank's monitor serves
        elif self._watch is not None:  # whose thread waits for the store, too, and would abort nothing
            self._watch = None
            try:
                self._abort()
            except Exception:
                log.exception("abort failed: a collective may hold this rank until hard_timeout")
        self._settle()
        self._tidy_up()
        self.state.mode = Mode.TERMINATED
        if self.wrapper.terminate is not None:
            self.wrapper.terminate(self.state.freeze())

    def _publish(self, error: BaseException) -> None:
        # And not merely a collective that fails because the iteration is over.
        self._is_cause = self._watch is None or self._watch.ended_at is None
        self.job.publish(self.state.rank, error)

    def _log_failure(self) -> None:
        """Says, once, how this rank has ended the iteration, if it has."""
        error, is_cause = self._error, self._is_cause
        self._is_cause = False
        if error is None or not is_cause:
            return
        if self._fault is not None and self._times_before():
            return  # another line says that it has come again, and the restart's line what it was
        log.warning(
            "rank %s (slot %d) failed in iteration %d",
            self.state.rank,
            self.job.slot,
            self.state.iteration,
            exc_info=(type(error), error, users_part(error.__traceback__)),
        )

    def _check_health(self) -> None:
        if self.wrapper.health_check is None:
            return
        try:
            self.wrapper.health_check(self.state.freeze())
        except Exception as error:
            raise HealthCheckError(
                f"health check failed on rank {self.state.rank} (slot {self.job.slot}): {error!r}"
            ) from error

    # ---- in the monitor thread

    def _note_whereabouts(self) -> None:
        """Of a rank that made no progress, says where it stood: waiting for the others, or not."""
        stillness = time.monotonic() - self.memory.progress_stamp(self._settings.watchdog_interval)
        if self.memory.phase != Phase.WATCHED or stillness < self._settings.soft_timeout / 2:
            return
        place = whereabouts(self._thread)
        if place is not None:
            fault = self.job.fault(self.state.rank, Interruption.SOFT_TIMEOUT, f"stood {place}")
            self.thread_client.log_fault(self.job.view.n, fault)

    def _abort(self) -> None:
        if self.wrapper.abort is not None:
            self.wrapper.abort(self.state.freeze())

    def _report_entry(self) -> None:
        """The active rank that came last logs the restart's line."""
        view, state, store = self.job.view, self.state, self.thread_client
        if state.active_rank == 0:
            store.note_wanted(view.n)  # at once: this rank may be lost before its monitor does so
        if view.n == view.first or state.active_rank is None:
            return
        active = state.active_world_size or 0
        if self._entered != active:
            return
        entered = store.entered_in(view.n).values()
        faults = store.faults_of(view.n - 1)
        promoted = [
            (one.member.slot, one.active_rank)
            for one in entered
            if one.promoted and one.active_rank is not None
        ]
        log.warning(
            restart_line(
                state.iteration,
                [*faults, *evictions(store, self.job.decision.removed, faults)],
                promoted,
                self.job.decision.joined,
                state.world_size,
                active,
                self._seconds_since_end(faults),
                [one.active_rank for one in entered if one.recompiles and one.active_rank is not None],
            )
        )

    def _seconds_since_end(self, faults: Sequence[Fault]) -> float:
        """How long ago the last iteration ended."""
        if self._ended_at is not None:
            return self.thread_client.now() - self._ended_at
        # This process has come since. What it has come in place of may have run on another host.
        began = min((fault.at for fault in faults if fault.at), default=None)
        return time.monotonic() - self._came_at if began is None else max(0.0, time.time() - began)


def _filled_in(path: str | None, rank: int) -> str | None:
    return None if path is None else path.replace("{rank}", str(rank))
