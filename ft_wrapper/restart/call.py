"""One call of the wrapped function: does what its restart loop asks for."""

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from .. import exception
from .._files import replace_broken_streams
from ..abort import close_aborted_sockets, may_hang, release_process_groups
from ..attribution import Interruption, out_of_memory
from ..compose import StatePlugIn
from ..health_check import CudaHealthCheck
from ..monitor.frames import checkpoint_failure, forget_frames, users_part
from ..monitor.interrupt import Interrupter
from ..monitor.shared_memory import Phase
from ..monitor.threads import MonitorThread, WatchedIteration
from ..protocol.entering import Endpoint
from ..protocol.records import Decision, SameFault, View
from ..rank_assignment import RankAssignmentCtx, activate_if_unsaid
from ..state import Mode, State
from ..store import PrefixStore, StoreMixin, StorePlan
from ..store.base import HoldingStore
from ..torch_groups import caches, device, release, warm_up
from ..torch_groups.abort import describe_pending_aborts
from ..torch_groups.collective import current_collective
from . import exit_watch
from .loop import FunctionRun, Hang, RestartedProcess, RestartLoop, describe_same_fault, hang_of
from .on_restart import Reporter, RestartTimes
from .resources import Resources, Services
from .settings import Settings

log = logging.getLogger(__name__)

_ABORTED_SOON = 0.5  # seconds
_USERS_TIMEOUT = timedelta(seconds=300)  # of operations on the function's own client of the iteration's store
# Ranks that hang together do not reach soft_timeout together: from this fraction on, a hang is a cause.
_HANG_IS_CAUSE_FROM = 0.9
# Number of ranks that write where they hung, up to a kilobyte each, into one key.
_WHEREABOUTS = 512
# Seconds into an iteration: a broken job mostly fails sooner, and active ranks need the CPUs to begin.
_WARMS_UP_AFTER = 2.0
# Runs after each fault, in addition to the user's check. It waits for work that an abort left on the device.
# A CUDA context with a sticky error would fail in each iteration, so its process must be replaced.
_check_device = CudaHealthCheck()


class Call(RestartedProcess):
    """One wrapped call, from its start to `close`.

    Args:
        settings: durations, switches and plug-ins.
        plan: the job's store and its host.
        state: this rank's state, from the environment.
        function_name: name of the wrapped function; the same on all ranks.

    Attributes:
        services: for live states and checkpoints.

    Raises:
        RestartError: the store cannot be used, or ranks are missing.
        OSError: this process may not open enough files.
    """

    def __init__(self, settings: Settings, plan: StorePlan, state: State, function_name: str) -> None:
        self.settings = settings
        self.state = state
        began_at = time.monotonic()
        self._current = FunctionRun()
        self._user_store: PrefixStore | None = None
        self.own = Resources(settings, plan, state, function_name, self._begin_thread)
        self.waiting = self.own.waiting
        self._reporter = Reporter(self.own, began_at)
        self._times = RestartTimes(time.monotonic())
        self.services = Services(self.own, self.user_store)

    def close(self, error: BaseException | None) -> None:
        """Releases everything: threads, processes, sockets, handlers, environment variables."""
        with contextlib.ExitStack() as ending:  # runs all of them, last first, whatever raises
            # Its traceback refers to this object and to its store: a cycle until the garbage collector runs.
            ending.callback(setattr, self.state, "fn_exception", None)
            if error is not None:  # the job goes on without this rank
                ending.callback(device.release_device)
            ending.callback(self.services.tracker.close)
            ending.callback(self.services.close_connections)
            ending.callback(self.own.close, error)
            ending.callback(self.services.group.close)

    def user_store(self) -> PrefixStore:
        """The current iteration's store, on a connection for the function only."""
        if self._user_store is None:
            # The iteration's abort frees every thread that waits on this store. The client does not retry.
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_USERS_TIMEOUT)
            self._user_store = PrefixStore(self.own.member.view.n, HoldingStore(client))
        return self._user_store

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls the function until an iteration succeeds.

        Args:
            function: the wrapped function with its arguments.

        Returns:
            The function's result; None on a spare, and if the call had already completed.
        """
        own = self.own
        if not own.is_in_time:
            log.warning(
                "slot %d joined too late: the other ranks have completed the call; it returns None",
                own.member.slot,
            )
            own.remember(self.state)
            return None
        self._function = function
        self._torch_state = caches.TorchState()
        own.signals.hold()
        try:
            return RestartLoop(own.member, self.state, self).run()
        finally:
            del self._function  # with its arguments, some of which refer to this call

    # ---- into the function

    def enter_iteration(self, view: View) -> None:
        own, decision = self.own, view.decision
        own.memory.active = True  # until its mode is known: other ranks may be waiting for it
        own.memory.enter_iteration(view.n)
        self.services.notices.enter()
        is_new = own.member.member in decision.joined or view.is_first
        own.monitor.enter(view, None if is_new else decision)

    def assign(self, state: State, decision: Decision) -> State:
        self.state = state
        own, rank, world_size = self.own, state.rank, state.world_size
        store = PrefixStore(own.member.view.n, own.member.agreement.store)
        assign: Any = self.settings.rank_assignment  # never None: the wrapper has put its default there
        ctx = RankAssignmentCtx(state, store, set(decision.ranks))
        return activate_if_unsaid(assign(ctx), rank, world_size)

    def apply_state(self, state: State) -> bool:
        self.state = state
        self.own.memory.rank = state.rank
        self.own.memory.active = state.mode == Mode.ACTIVE
        self.own.memory.active_rank = -1 if state.active_rank is None else state.active_rank
        self.own.memory.active_world_size = state.active_world_size or 0
        state.set_distributed_vars()
        device.take_device(self.own.memory.active)
        self.services.tracker.enter(state.iteration)
        rank, size = state.active_rank, state.active_world_size or 0
        self.services.notices.place = rank or 0, size
        return rank is not None and caches.reset_compiled_code(rank, size)

    def open_store(self) -> Endpoint:
        return self.own.address, self.own.monitor.serve(self.own.address)

    def point_to_store(self, endpoint: Endpoint) -> None:
        # So a plain `init_process_group(backend)` starts fresh in each iteration, and sees no earlier key.
        # The monitor of active rank 0 has opened the store: an earlier client would back off for a long time.
        host, port = endpoint
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")

    def pause(self, seconds: float) -> None:
        self.own.monitor_lost.wait(seconds)

    # ---- in the function

    def call_function(self, state: State) -> FunctionRun:
        own = self.own
        own.interrupter.reset()
        self._current = run = FunctionRun(time.monotonic(), has_returned=True)
        is_spare = state.mode == Mode.INACTIVE
        entered = functools.partial(self._reporter.entered, state, self._times)
        run.watch = watch = own.thread.watch(own.member.view.n, entered, may_be_done=is_spare)
        run.report = self._reporter.await_report(state, self._times, watch)
        try:
            try:
                run.value = own.interrupter.call(self._body)
            finally:
                own.signals.hold()
                self.note_progress()
                own.memory.leave_stamp = 0.0
                own.memory.enter_phase(Phase.WATCHED)  # from here on the thread's own progress is watched
        except (Exception, exception.RankShouldRestart, exception.JobAbort) as caught:
            if is_spare and isinstance(caught, exception.HealthCheckError):
                raise  # this spare leaves the job without ending the iteration
            self._note_failure(caught, watch)
        except BaseException as caught:
            is_exit = isinstance(caught, SystemExit) and not caught.code
            if not (is_exit or isinstance(caught, exception.RestartAbort)):
                self._note_exit(caught)
            raise
        own.signals.hold()  # again, in case a signal came just now
        watch.may_be_done = watch.may_be_done or run.has_returned
        return run

    def _note_failure(self, caught: BaseException, watch: WatchedIteration) -> None:
        """Notes an exception that left the function: the function's own, or the interruption."""
        run, is_interrupted = self._current, self.own.interrupter.requested
        if not (is_interrupted and watch.is_done):  # not if a spare warmed up until the iteration completed
            run.error, run.has_returned = caught, False
        raised = caught if isinstance(caught, Exception) else caught.__cause__
        if isinstance(raised, Exception):
            self.state.fn_exception = raised
        # A RankShouldRestart that was not requested is the function's own.
        if not (is_interrupted and isinstance(caught, exception.RankShouldRestart)):
            self._count(caught)
            run.own_error = caught
            # Otherwise a collective may have failed because the iteration had ended.
            run.is_cause = watch.ended_at is None
            run.is_out_of_memory = out_of_memory(caught) is not None
        elif run.hang is not None and watch.handled.wait(self.settings.barrier_timeout):
            self._count(caught)  # now it is known which ranks had returned

    def _note_exit(self, caught: BaseException) -> None:
        """Notes a fault by which this rank leaves the job."""
        self._count(caught)
        run, member, limit = self._current, self.own.member, self.settings.limits.max_same_faults
        member.left_by = run.fault or ""
        if run.is_last:
            worst = SameFault(member.left_by, limit or 0, member.member)
            member.ended_job = describe_same_fault(worst, limit)
            log.error("the job ends: %s", member.ended_job)

    def _count(self, error: BaseException) -> None:
        self._current.count(error, self.own.member.view, self.settings.limits.max_same_faults)

    def note_progress(self) -> None:
        """Notes whether the function has made progress, before its stamps are reset."""
        self._current.has_progressed |= self.own.memory.has_progressed

    def _body(self) -> Any:
        """The interruptible part."""
        try:
            with exit_watch.children_end():
                return self._initialize_and_run()
        except BaseException as error:
            if failure := checkpoint_failure(error):
                raise RuntimeError(failure).with_traceback(error.__traceback__) from error
            raise

    def _initialize_and_run(self) -> Any:
        self.own.signals.release()
        self.own.signals.raise_kept()
        if self.settings.initialize is not None:
            self.settings.initialize(self.state.freeze())
        self._run_check(self.settings.health_check)
        self._reporter.tell(self._current.report, self.state, self._times)
        self.own.memory.is_in_function = True
        if self.state.mode == Mode.INACTIVE:
            self.own.member.emit("spare")
            return self._warm_up()
        warm_up.await_imports()
        self.own.member.emit("enter", rank=self.state.active_rank)
        users_groups = self.settings.abort is None  # the user handles them
        with contextlib.nullcontext() if users_groups else release.taking_over_destroy():
            return self._function()

    def _warm_up(self) -> None:
        """Warms a spare up: it has nothing else to do until the iteration ends."""
        watch, users = self._current.watch, self.settings.limits.warm_up
        assert watch is not None
        if users is False:
            return
        with self.waiting:
            if watch.over.wait(_WARMS_UP_AFTER):
                return
        watch.leaves_when_done = True  # the monitor thread reads this after it has set `over`
        if watch.over.is_set():
            return
        warm_up.warm_up(users, lambda: self.own.interrupter.requested)
        if self.settings.limits.collect_garbage:
            caches.collect_garbage("warm-up")

    def _run_check(self, check: StatePlugIn | None) -> None:
        if check is None:
            return
        try:
            check(self.state.freeze())
        except Exception as error:
            where, why = f"rank {self.state.rank} (slot {self.own.member.slot})", exception.in_one_line(error)
            raise exception.HealthCheckError(f"health check failed on {where}: {why}") from error

    # ---- out of the function

    def await_abort(self) -> None:
        self._settle()
        if self.own.store_lost is not None:
            raise self.own.store_lost

    def _settle(self) -> None:
        """Waits until everything is aborted, then cleans up what the function left behind."""
        watch, self._current.watch = self._current.watch, None
        if watch is not None:
            if not watch.handled.wait(_ABORTED_SOON):
                self._log_failure()  # already here: if the abort hangs, this process may be killed
            if not watch.handled.wait(self.settings.barrier_timeout):
                raise exception.InternalError("the abort plug-in did not return within barrier_timeout")
            self.own.store_lost = watch.store_lost
            left = RestartTimes(watch.ended_at or time.monotonic(), watch.ended_at, step=self.own.memory.step)
            self._times = left.end("abort", watch.aborted_at).end("leave")
        self.own.memory.leave_iteration()
        self.own.member.emit("left", **self.own.memory.last_step(), **self.services.end_fields)
        self.services.at_end.close()
        if self.settings.abort is not None or self.services.group.group is not None:
            release_process_groups(aborted=True, kept=self.services.group.group)
        caches.end_checkpoint_process()  # before arriving: the next iteration may write the same files
        self._user_store = None

    def clean_up(self) -> None:
        settings, own = self.settings, self.own
        if settings.finalize is not None or settings.health_check is not None:
            self._restore()  # the function's leftovers would make them fail
        if settings.finalize is not None:
            settings.finalize(self.state.freeze())
        self._run_check(settings.health_check)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._run_check(_check_device)
        if own.monitor_lost.is_set():
            raise exception.InternalError(f"this rank's {own.monitor.name} ended; see {own.monitor.log_of}")
        looked = own.memory.monitor_stamp  # 0.0 if it has not looked yet
        if looked and time.monotonic() - looked > 2 * settings.monitor_process_interval:
            with own.waiting:
                own.monitor.await_answer()
        self._times = self._times.end("arrive")
        self.services.notices.leave_if_over()

    def all_arrived(self) -> None:
        self._times = self._times.end("decide")
        close_aborted_sockets()
        self.services.close_connections()
        self.own.signals.forget()  # they were for the iteration that has ended

    def reset_process(self) -> None:
        self._restore()
        self.own.exit_watch.note()
        if self.settings.limits.collect_garbage:
            caches.collect_garbage("restart")
            self.services.tracker.warn()  # without a collection, FSDP2's models are all alive
        if self._current.is_out_of_memory:
            torch.cuda.empty_cache()  # NCCL's new groups and other processes need memory

    def _restore(self) -> None:
        """Undoes the function's changes to the process, and logs its failure. Both take a while."""
        replace_broken_streams()
        self._log_failure()
        run, error = self._current, self._current.error
        run.error = run.own_error = run.value = None
        if error is not None:
            trace = users_part(error.__traceback__) if run.is_last else None
            forget_frames(error)
            error.__traceback__ = trace  # for when the error leaves the call
        self._torch_state.restore()
        self.own.signals.put_back()
        caches.clear_caches()

    def complete(self) -> None:
        self.own.member.emit("done", **self.own.memory.last_step(), **self.services.end_fields)
        self._current = FunctionRun()  # the returned value may refer to this call
        self.state.fn_exception = None
        if self.settings.completion is not None:
            try:
                self.settings.completion(self.state.freeze())
            except Exception:
                log.exception("completion failed on rank %s; the call had succeeded", self.state.rank)
        self.services.at_end.close()
        if self.settings.abort is not None:
            release_process_groups()
        caches.clear_caches()
        self._user_store = None
        self.own.remember(self.state)

    def leave(self, error: BaseException) -> Interruption | None:
        own, watch = self.own, self._current.watch
        if isinstance(error, Exception):
            self.state.fn_exception = error
        is_expected = isinstance(error, (exception.JobEnded, exception.RankDrained))
        why = exception.in_one_line(error)
        level = logging.INFO if is_expected else logging.ERROR
        log.log(level, "rank %s (slot %d) leaves the job: %s", self.state.rank, own.member.slot, why)
        if isinstance(error, exception.StoreUnavailable):
            own.store_lost = error  # the operation was retried long enough; nothing can be reported
        if watch is not None and not own.memory.active:  # a spare: other ranks end the iteration later
            self._current.watch, own.thread_stays = None, True
        if own.store_lost is None:
            is_unwatched = own.monitor_lost.is_set()
            return Interruption.MONITOR_PROCESS_EXCEPTION if is_unwatched else Interruption.BASE_EXCEPTION
        if self._current.watch is not None:
            self._current.watch = None  # the monitor thread waits for the lost store, and would not abort
            try:
                self._abort()
            except Exception:
                log.exception("abort failed: a collective may hold this rank until hard_timeout")
        return None

    def left_job(self) -> None:
        self._settle()
        self.reset_process()
        self.state.mode = Mode.TERMINATED
        if self.settings.terminate is not None:
            self.settings.terminate(self.state.freeze())

    def _log_failure(self) -> None:
        """Logs, once, the failure by which this rank ended the iteration, if it did."""
        run = self._current
        is_cause, run.is_cause = run.is_cause, False
        if run.error is None or not is_cause or run.repeats:
            return  # a repeat is logged with "trying again", and the restart's line has the failure
        words, state = "rank %s (slot %d) failed in iteration %d", self.state
        raised = (type(run.error), run.error, users_part(run.error.__traceback__))
        log.warning(words, state.rank, self.own.member.slot, state.iteration, exc_info=raised)

    # ---- in the monitor thread

    def _begin_thread(self, store: StoreMixin, interrupter: Interrupter) -> MonitorThread:
        abort, wait = self.settings.abort, self.settings.last_call_wait
        callbacks = self._locate, self._abort, self._publish, lambda: may_hang(abort), describe_pending_aborts
        return MonitorThread(store, interrupter, *callbacks, wait)

    def _locate(self) -> None:
        """On a rank without progress, notes where it hangs: in a collective, or elsewhere."""
        memory, settings, thread = self.own.memory, self.settings, self.own.interrupter.thread
        since = memory.progress_stamp(settings.progress_watchdog_interval)
        stillness = time.monotonic() - since
        if not memory.is_accused and (memory.phase != Phase.WATCHED or stillness < settings.soft / 2):
            return
        if found := current_collective(thread):
            is_cause = memory.is_accused or stillness > _HANG_IS_CAUSE_FROM * settings.soft
            self._current.hang = Hang(*found, hang_of(thread), since, is_cause)

    def _publish(self) -> None:
        """Writes into the store what other ranks need to know. This may wait for the store."""
        self._reporter.ended()  # first: the function's thread may wait for the report
        warm_up.announce_cuda(self.own.thread_agreement.store)  # for the process that replaces a lost rank
        hang, member, ends = self._current.hang, self.own.member, self.own.thread_agreement.ends
        if hang is None:
            return
        is_said = self.own.memory.is_accused  # by the monitor
        if returned := ends.finished_in(member.view.n):
            hang = dataclasses.replace(hang, after=f", when ranks {sorted(returned)} had returned")
            self._current.hang = hang
        if not is_said and (self.state.rank is None or self.state.rank < _WHEREABOUTS):
            stood = f"stood {hang.words}{hang.after}"
            fault = member.fault(self.state.rank, Interruption.SOFT_TIMEOUT, stood)
            ends.log_fault(member.view.n, dataclasses.replace(fault, position=hang.position))

    def _abort(self) -> None:
        self.own.memory.leave_stamp = self.own.memory.leave_stamp or time.monotonic()
        for connection in list(self.services.connections):
            connection.abort()
        if self.settings.abort is not None:
            self.settings.abort(self.state.freeze())
