"""Reports a restart: the line in the log, and the report that ``on_restart`` gets.

The active rank that enters an iteration last makes the report, logs it, and writes it into the store. With
``on_restart`` set, each rank waits for the report before it enters the function.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

from ..exception import InternalError, StoreError
from ..monitor.threads import WatchedIteration
from ..protocol import Agreement, keys
from ..protocol.housekeeping import note_active_target
from ..protocol.operations import Notify, read
from ..protocol.records import Fault
from ..state import State
from .report import RestartReport, evictions, make_report
from .resources import Resources

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RestartTimes:
    """How long the phases of a restart have taken on this rank so far.

    The function's thread replaces the value at the end of each phase, and passes it to the monitor thread
    when an iteration begins.

    Args:
        until: when the last phase ended, in monotonic seconds.
        began_at: when this rank saw the end of its last iteration; None if it was in none.
        phases: seconds of each completed phase, by its name.
        step: the function's step when that iteration ended; None if it reported none.
    """

    until: float
    began_at: float | None = None
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step: int | None = None

    def end(self, phase: str, at: float | None = None) -> "RestartTimes":
        """Ends a phase. A phase that repeats, because not all ranks got in at once, is added up."""
        at = max(self.until, time.monotonic() if at is None else at)
        seconds = self.phases.get(phase, 0.0) + at - self.until
        return dataclasses.replace(self, until=at, phases={**self.phases, phase: seconds})


class Reporter:
    """Reports a call's restarts, on one rank. It holds no state shared between threads.

    Args:
        own: the call's resources.
        began_at: when the call began, in monotonic seconds.
    """

    def __init__(self, own: Resources, began_at: float) -> None:
        self._own = own
        self._began_at = began_at

    # ---- the thread that runs the function

    def await_report(
        self, state: State, times: RestartTimes, watch: WatchedIteration
    ) -> RestartReport | None:
        """Waits for the report, until all active ranks have entered. Nothing interrupts this wait.

        There is no report in a call's first iteration, or if the iteration has ended. There is also none
        after ``barrier_timeout``, or without the store; both are logged.

        Args:
            state: this rank's state.
            times: this rank's times so far.
            watch: the iteration that begins.
        """
        own = self._own
        if own.settings.on_restart is None or own.member.view.is_first:
            return None
        try:
            with own.waiting:
                return self._await_report(state, times, watch)
        except (StoreError, ValueError, KeyError, TypeError):  # the function may do without the store
            log.exception("no report of restart %d could be read: on_restart is not called", state.iteration)
            return None

    def tell(self, report: RestartReport | None, state: State, times: RestartTimes) -> None:
        """Calls ``on_restart``, if there is a report, as part of the function.

        Args:
            report: the result of `await_report`.
            state: this rank's state.
            times: this rank's times so far.
        """
        on_restart = self._own.settings.on_restart
        if report is None or on_restart is None:
            return
        try:
            on_restart(dataclasses.replace(report, phases=times.end("enter").phases, step=times.step))
        except Exception:
            if self._own.interrupter.requested:
                raise  # the interruption, or an error that it caused
            log.exception("on_restart failed on rank %s; the iteration goes on", state.rank)

    def _await_report(
        self, state: State, times: RestartTimes, watch: WatchedIteration
    ) -> RestartReport | None:
        agreement, n, settings = self._own.member.agreement, watch.n, self._own.settings
        store = agreement.store
        key, deadline = keys.restarted(n), store.now() + settings.barrier_timeout
        while not watch.over.is_set():
            remaining = deadline - store.now()
            said = store.wait_for(key, min(settings.monitor_thread_interval, remaining))
            if said is not None:
                said = said or read(store, store.wake_name(key))
                return RestartReport.from_json(said) if said else None
            active = state.active_world_size or 0
            entered = agreement.entering.entered_in(n).values()
            missing = set(range(active)) - {one.active_rank for one in entered}
            if not missing:  # a count was lost, so no rank has made the report
                return self._make(agreement, state, times, store.now())
            if remaining <= 0:
                log.warning(
                    "on_restart is not called: active ranks %s of %d did not enter iteration %d within "
                    "barrier_timeout=%g s",
                    *(sorted(missing), active, state.iteration, settings.barrier_timeout),
                )
                return None
        return None

    # ---- the monitor thread

    def entered(self, state: State, times: RestartTimes) -> None:
        """Makes the report, logs it and writes it into the store, if this active rank entered last.

        Args:
            state: this rank's state.
            times: this rank's times as it entered.
        """
        view, agreement = self._own.member.view, self._own.thread_agreement
        if state.active_rank == 0:  # here, because this rank may be lost before its monitor does it
            note_active_target(agreement.store, view.n)
        now = agreement.store.now()
        if view.is_first or state.active_rank is None:
            return
        if agreement.entering.count_active(view.n) != state.active_world_size:
            return
        report = self._make(agreement, state, times, now)
        agreement.store.execute([Notify(keys.restarted(view.n), report.to_json())])
        log.warning("%s", report)
        phases: dict[str, float] = {}
        if times.began_at is not None:
            phases = {**times.phases, "enter": max(0.0, report.seconds - sum(times.phases.values()))}
        with contextlib.suppress(InternalError):  # the monitor has ended, which is logged elsewhere
            self._own.monitor.restarted(report.kind, {**phases, "total": report.seconds})
        slots = {"culprits": report.culprit_slots, "lost": report.lost_slots, "joined": report.joined_slots}
        slots["promoted"] = tuple(one.slot for one in report.promoted)
        self._own.member.emit("restarted", kind=report.kind, cause=report.cause, line=str(report), **slots)

    def ended(self) -> None:
        """Ends the wait for the report, since a fault has ended the iteration."""
        own = self._own
        if own.settings.on_restart is not None and not own.memory.is_in_function:
            own.thread_agreement.store.execute([Notify(keys.restarted(own.member.view.n), "")])

    def _make(self, agreement: Agreement, state: State, times: RestartTimes, now: float) -> RestartReport:
        view = self._own.member.view
        entered = agreement.entering.entered_in(view.n).values()
        faults = agreement.ends.faults_of(view.n - 1)
        faults += evictions(agreement.store, view.decision, faults)
        return make_report(view.decision, state, entered, faults, self._seconds(times, faults, now))

    def _seconds(self, times: RestartTimes, faults: Sequence[Fault], now: float) -> float:
        """How long ago the last iteration ended."""
        if times.began_at is not None:
            return now - times.began_at
        # The process that this one replaces may have run on another host, with a different monotonic clock.
        began = min((fault.at for fault in faults if fault.at), default=None)
        return now - self._began_at if began is None else max(0.0, time.time() - began)
