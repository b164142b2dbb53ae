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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._addresses import own_address
from .abort import close_aborted_sockets, protect_process, release_process_groups, wait_for_released_groups
from .attribution import Interruption
from .call_wrapper import CallWrapper
from .exception import HealthCheckError, InternalError, RankShouldRestart, StoreError, StoreUnavailable
from .iteration_store import Environment, connect, point_to
from .job import Job, Patience, Remembered, formation_size
from .monitor.interrupt import Interrupter
from .monitor.line import MonitorLine, line_to_agent
from .monitor.process import MonitorProcess
from .monitor.process_main import MonitorFiles
from .monitor.progress_watchdog import ProgressWatchdog
from .monitor.settings import MonitorSettings
from .monitor.shared_memory import Phase, RankMemory
from .monitor.thread import MonitorThread, Watch
from .rank_assignment import RankAssignmentCtx, RankDiscarded
from .restart_report import restart_line
from .state import Mode, State
from .store import PrefixStore, StorePlan
from .store import keys as names
from .store.records import DONE, FAULT
from .tracebacks import forget_frames, users_part
from .whereabouts import whereabouts

if TYPE_CHECKING:
    from .wrapper import Wrapper

log = logging.getLogger(__name__)

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
        self._store_lost: StoreError | None = None

    # ---- what the call owns

    def open(self) -> None:
        """Gets a monitor, joins the job, takes part in the decision of the first iteration.

        Raises:
            RestartError: the store cannot be used, or somebody is missing.
        """
        settings = self.wrapper.monitor_settings()
        slot = self.base.initial_rank or 0
        remembered = _remembered.pop(self.plan.description, Remembered(call=0))
        if self.plan.port is not None:
            remembered = dataclasses.replace(remembered, call=0)  # each call has a store of its own
        slots = list(range(formation_size(self.base.world_size)))
        if remembered.view is not None:
            slots = [member.slot for member in remembered.view.members]
        with contextlib.ExitStack() as owned:
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
            store = self.plan.connect()
            owned.callback(store.close)
            # A store that is on no one host says nothing of the way to the other ranks.
            towards = getattr(store, "host_name", None) or os.environ.get("MASTER_ADDR", "localhost")
            self._address = own_address(towards)
            self.interrupter = Interrupter()
            self.interrupter.install()
            owned.callback(self.interrupter.close)
            watchdog = ProgressWatchdog(
                self.memory,
                self.wrapper.progress_watchdog_interval.total_seconds(),
                watches_main_thread=threading.current_thread() is threading.main_thread(),
            )
            watchdog.start()
            owned.callback(watchdog.stop)
            terms = self._terms()
            self.job = Job(store, slot, slots, self._patience(settings), remembered.call, terms)
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
            self._has_come_late = not self._join(remembered)
            self._owned = owned.pop_all()

    def close(self, error: BaseException | None) -> None:
        """Gives back everything: threads, processes, sockets, handlers, variables."""
        self._owned.__exit__(None if error is None else type(error), error, None)

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
            on_join=self.wrapper.on_join,
            join_window=self.wrapper.join_window.total_seconds(),
            rejoin_wait=self.wrapper.rejoin_wait.total_seconds(),
            admits=self.wrapper.use_global_iteration,
            replaced=settings.replaced,
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
            if not (self._hosts and self.wrapper.use_global_iteration):
                raise
            # This process may have been started again: then its predecessor's monitor still has the port.
            self._hosts = False
            return self._monitor_process(settings, files)

    def _monitor_process(self, settings: MonitorSettings, files: MonitorFiles) -> MonitorProcess:
        return MonitorProcess(
            settings,
            self.plan,
            hosts=self._hosts,
            memory=self.memory,
            files=files,
            on_lost=self._on_monitor_lost,
        )

    def _join(self, remembered: Remembered) -> bool:
        """Gets into the job; False if the call has completed already."""
        job = self.job
        if remembered.member is not None and remembered.view is not None and self.plan.port is None:
            # The store outlived the last call: its last members go on to the next call's first iteration.
            job.check_terms()
            job.member, job.view = remembered.member, remembered.view
            self.base.rank, self.base.world_size = remembered.rank, remembered.world_size
            self.monitor.join(job.member)
            try:
                job.go_on(remembered.rank, remembered.world_size)
            except RankDiscarded:
                raise
            except BaseException as error:
                job.leave(remembered.rank, Interruption.BASE_EXCEPTION, error, ends=False)
                raise
            return True
        job.register()
        return job.join()

    def _say_goodbye(self) -> None:
        if not hasattr(self.job, "member") or self._store_lost is not None:
            return
        if self._completed and self.plan.port is not None and not self._hosts:
            # The host's monitor closes the port once all have said goodbye. Whoever calls a wrapped function
            # next must not meet the old server there.
            host, port = getattr(self.job.store, "host_name", ""), self.plan.port
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0) as line:
                line.settimeout(self.wrapper.completion_timeout.total_seconds())
                self.job.say_goodbye()
                line.recv(1)
            return
        self.job.say_goodbye()

    def _end_monitor(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._hosts and kind is not None and hasattr(self, "job") and hasattr(self.job, "view"):
            self.monitor.detach()  # the others go on, and need the store that it hosts
        else:
            # One that hosts nothing has nothing left to do; it may still look for a store that has ended.
            patience = self.wrapper.barrier_timeout if self._hosts else self.wrapper.termination_grace_time
            self.monitor.close(patience.total_seconds())

    def _end_thread(self, patience: float) -> None:
        self.thread.stop(patience if self._store_lost is None else 0.0)  # else it waits for the store, too

    def _on_monitor_lost(self) -> None:
        """In a thread of its own: nobody would notice this rank's faults any more, so it leaves the job."""
        self._monitor_lost.set()
        if not (hasattr(self, "job") and hasattr(self.job, "view")):
            return  # not in yet: the rank finds out when it wants to tell the monitor that it is
        if self._hosts:
            return  # nor is there a store any more: all ranks find out at once
        try:
            store = self.plan.connect()
        except StoreError:
            log.exception("the store is lost as well")
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
                "slot %d came when call %d of the job had completed: there is nothing left to do in it",
                self.job.slot,
                self.job.call,
            )
            _remembered[self.plan.description] = Remembered(self.job.call + 1)
            return None
        try:
            while True:
                outcome, result = self._iterate(function)
                if outcome == DONE:
                    break
                self._clean_up()
                assert self.base.rank is not None
                self.job.go_on(self.base.rank, self.base.world_size)
                close_aborted_sockets()  # everybody has left
        except BaseException as error:
            self._leave(error)
            raise
        self._complete()
        return result

    def _iterate(self, function: Callable[[], Any]) -> tuple[str, Any]:
        """One iteration: how it ended, and what the function returned."""
        result: Any = None
        error: BaseException | None = None
        if not (self._assign_ranks() and self._make_ready()):
            return FAULT, None
        self.interrupter.reset()
        self.memory.enter_phase(Phase.WATCHED)
        is_spare = self.state.mode == Mode.INACTIVE
        self._watch = self.thread.watch(self.job.view.n, self._report_entry, may_be_done=is_spare)
        try:
            result = self.interrupter.call(self._body, function)
        except HealthCheckError:
            raise
        except RankShouldRestart as caught:
            error = caught
            if isinstance(caught.__cause__, Exception):
                self.state.fn_exception = caught.__cause__
        except Exception as caught:
            error = self.state.fn_exception = caught
            # A store that is out of reach is no lack of progress: it is tried for barrier_timeout.
            self.memory.enter_phase(Phase.IDLE)
            self._publish(caught)
            self.memory.enter_phase(Phase.WATCHED)
        if error is None:
            self.memory.enter_phase(Phase.IDLE)
            active = self.state.active_world_size or 0
            self._watch.may_be_done = True
            if self.job.await_completion(self.state.active_rank, active) == DONE:
                return DONE, result
            self.memory.enter_phase(Phase.WATCHED)
        self._settle(error)
        if self._store_lost is not None:
            raise self._store_lost
        return FAULT, None

    def _assign_ranks(self) -> bool:
        """Runs the rank assignment; False if the iteration ended before all ranks had theirs."""
        job = self.job
        n, decision = job.view.n, job.decision
        self.memory.active = True  # until it is known: others may be waiting for this rank
        has_joined = job.member in decision.joined
        if has_joined:
            self.base.rank = decision.rank_of(job.member)
        elif self.base.rank is not None:
            self.base.rank = decision.rank_after(self.base.rank)
        self.base.world_size = decision.world_size
        if decision.joined:
            self.base.active_world_size = None  # there may be more active ranks again
        fresh = copy.copy(self.base)
        fresh.fn_exception = None
        fresh.iteration = n if self.wrapper.use_global_iteration else n - decision.first
        context = RankAssignmentCtx(fresh, PrefixStore(n, job.store), set(decision.ranks))
        self.memory.enter_phase(Phase.WATCHED)  # the others wait for a rank that hangs here
        try:
            self.state = self.wrapper.rank_assignment(context).state
        except RankShouldRestart:
            self.state = fresh
            self._was_active = fresh.mode == Mode.ACTIVE
            return False
        finally:
            self.memory.enter_phase(Phase.IDLE)
            self.memory.iteration = n
            self.monitor.enter(
                job.view, None if has_joined or n == decision.first else decision, self.state.rank
            )
        self._was_active = has_joined or n == decision.first or self.base.mode == Mode.ACTIVE
        self.base = copy.copy(self.state)
        self.memory.active = self.state.mode == Mode.ACTIVE
        return True

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
        self._entered = job.store.check_assignment(
            n,
            job.member,
            state.active_rank,
            state.world_size,
            state.active_world_size,
            promoted=not self._was_active,
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
        if self.wrapper.initialize is not None:
            self.wrapper.initialize(self.state.freeze())
        self._check_health()
        if self.state.mode == Mode.INACTIVE:
            return None
        self.job.emit("enter", rank=self.state.active_rank)
        return function()

    def _settle(self, error: BaseException | None) -> None:
        """Waits until everything is aborted, then clears what the function left behind."""
        watch, self._watch = self._watch, None
        if watch is not None:
            if not watch.handled.wait(self.wrapper.barrier_timeout.total_seconds()):
                raise InternalError("the abort plug-in did not return within barrier_timeout")
            self._ended_at = watch.ended_at
            self._store_lost = watch.store_lost
        self.job.emit("left")
        if self.wrapper.abort is not None:
            release_process_groups(aborted=True)
        self._user_store = None
        if error is not None:
            forget_frames(error)

    def _clean_up(self) -> None:
        """Between leaving the function and telling the others so."""
        self.memory.enter_phase(Phase.WATCHED)
        if self.wrapper.finalize is not None:
            self.wrapper.finalize(self.state.freeze())
        self._check_health()
        if self._monitor_lost.is_set():
            raise InternalError(f"this rank's {self.monitor.name} ended; see {self.monitor.log_of}")
        self.memory.enter_phase(Phase.IDLE)

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
        self._user_store = None
        assert self.base.rank is not None
        _remembered[self.plan.description] = self.job.remember(self.base.rank, self.base.world_size)

    def _leave(self, error: BaseException) -> None:
        """This rank leaves the job; the others are told and go on."""
        self.memory.enter_phase(Phase.IDLE)
        if isinstance(error, Exception):
            self.state.fn_exception = error
        log.error("rank %s (slot %d) leaves the job: %r", self.state.rank, self.job.slot, error)
        if isinstance(error, StoreUnavailable):
            self._store_lost = error  # it was tried for long enough; nobody can be told
        # A discarded rank is in nobody's plans. One whose monitor thread awaits the end must bring it about.
        ends = not isinstance(error, RankDiscarded) or self._watch is not None
        interruption = (
            Interruption.MONITOR_PROCESS_EXCEPTION
            if self._monitor_lost.is_set()
            else Interruption.BASE_EXCEPTION
        )
        if self._store_lost is None:
            self.job.leave(self.state.rank, interruption, error, ends=ends)
            if ends and self.state.active_rank == 0:
                self.job.await_others()  # they may yet connect to the store that this rank's monitor serves
        elif self._watch is not None:  # whose thread waits for the store, too, and would abort nothing
            self._watch = None
            try:
                self._abort()
            except Exception:
                log.exception("abort failed")
        self._settle(None)
        self.state.mode = Mode.TERMINATED
        if self.wrapper.terminate is not None:
            self.wrapper.terminate(self.state.freeze())

    def _publish(self, error: Exception) -> None:
        cause = self._watch is None or self._watch.ended_at is None
        self.job.publish(self.state.rank, error)
        if cause:  # and not merely a collective that fails because the iteration is over
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
        settings = self.wrapper.monitor_settings()
        stillness = time.monotonic() - self.memory.progress_stamp(settings.watchdog_interval)
        if self.memory.phase != Phase.WATCHED or stillness < settings.soft_timeout / 2:
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
        promoted = [line.split() for line in store.log_read(names.promoted(view.n))]
        log.warning(
            restart_line(
                state.iteration,
                store.faults_of(view.n - 1),
                [(int(slot), int(rank)) for slot, rank in promoted],
                self.job.decision.joined,
                state.world_size,
                active,
                None if self._ended_at is None else store.now() - self._ended_at,
            )
        )


def _filled_in(path: str | None, rank: int) -> str | None:
    return None if path is None else path.replace("{rank}", str(rank))
