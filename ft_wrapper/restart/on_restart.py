"""A restart, told to people: the line in the log, and the report that ``on_restart`` is called with.

The active rank that comes last into an iteration makes the report, logs it, and writes it into the store.
Where ``on_restart`` is set a rank waits for that before it enters the function: only then is it known who
took over.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..exception import InternalError, StoreError
from ..monitor.threads import WatchedIteration
from ..protocol import Agreement, keys
from ..protocol.operations import Notify, read
from ..protocol.records import Fault
from ..state import State
from .report import RestartReport, evictions, make_report

if TYPE_CHECKING:
    from .resources import Resources

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RestartTimes:
    """What a restart has taken of this rank's time so far.

    The function's thread puts a new one in its place at each phase's end, and hands the present one to the
    monitor thread with each iteration.

    Args:
        until: when the last of the phases was over, in monotonic seconds.
        began_at: when this rank saw the end of the last iteration that it was in; None if it was in none.
        phases: the seconds of each phase that is over, by its name.
        step: what its function had come to when that iteration ended; None if it had told no step.
    """

    until: float
    began_at: float | None = None
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step: int | None = None

    def end(self, phase: str, at: float | None = None) -> "RestartTimes":
        """A phase is over. One that comes again, as not all ranks got in at once, is added up."""
        at = max(self.until, time.monotonic() if at is None else at)
        seconds = self.phases.get(phase, 0.0) + at - self.until
        return dataclasses.replace(self, until=at, phases={**self.phases, phase: seconds})


class Reporter:
    """The reports of one call's restarts, on one rank. Its threads share nothing that changes.

    Args:
        own: what the call owns.
        began_at: when the call began, in monotonic seconds.
    """

    def __init__(self, own: "Resources", began_at: float) -> None:
        self._own = own
        self._began_at = began_at

    # ---- the thread that runs the function

    def await_report(
        self, state: State, times: RestartTimes, watch: WatchedIteration
    ) -> RestartReport | None:
        """Before `tell`, outside of what can be interrupted: waits until all active ranks have come.

        There is no report in a call's first iteration, or if the iteration has ended; nor after
        ``barrier_timeout``, or without the store, which is logged.

        Args:
            state: this rank's.
            times: this rank's, so far.
            watch: of the iteration that begins.
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
        """Calls ``on_restart``, if there is a report, as a part of the function.

        Args:
            report: what `await_report` gave.
            state: this rank's.
            times: this rank's, so far.
        """
        on_restart = self._own.settings.on_restart
        if report is None or on_restart is None:
            return
        try:
            on_restart(dataclasses.replace(report, phases=times.end("enter").phases, step=times.step))
        except Exception:
            if self._own.interrupter.requested:
                raise  # in the wake of the interruption, which goes on
            log.exception("on_restart failed on rank %s, and the iteration goes on", state.rank)

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
            if not missing:  # the last one's count was wrong: then no rank has made it
                return self._make(agreement, state, times, store.now())
            if remaining <= 0:
                log.warning(
                    "on_restart is not called: active ranks %s of %d did not come into iteration %d within "
                    "barrier_timeout=%g s",
                    *(sorted(missing), active, state.iteration, settings.barrier_timeout),
                )
                return None
        return None

    # ---- the monitor thread

    def entered(self, state: State, times: RestartTimes) -> None:
        """On the active rank that came last, logs the restart's line, and tells the others.

        Args:
            state: this rank's.
            times: this rank's, as it entered.
        """
        view, agreement = self._own.member.view, self._own.thread_agreement
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
        with contextlib.suppress(InternalError):  # its monitor has ended, which others say
            self._own.monitor.restarted(report.kind, {**phases, "total": report.seconds})
        self._own.member.emit("restarted", line=str(report))

    def ended(self) -> None:
        """The iteration has ended by a fault: its report is waited for no more."""
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
        # What this process has come in place of may have run on another host.
        began = min((fault.at for fault in faults if fault.at), default=None)
        return now - self._began_at if began is None else max(0.0, time.time() - began)
