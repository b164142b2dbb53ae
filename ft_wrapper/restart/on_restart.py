"""A restart, told to people: the line in the log, and the report that ``on_restart`` is called with.

The active rank that comes last into an iteration makes the report, logs it, and writes it into the store.
Where ``on_restart`` is set a rank waits for that before it enters the function: only then is it known who
took over.
"""

import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from ..exception import InternalError, StoreError
from ..monitor.threads import WatchedIteration
from ..protocol import Agreement, keys
from ..protocol.operations import Notify, Operations, read
from ..state import State
from .report import RestartReport, began_before, make_report

if TYPE_CHECKING:
    from .resources import Resources

log = logging.getLogger(__name__)


class Phases:
    """What a restart's time goes to on this rank.

    Attributes:
        seconds: by the name of each phase that is over.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def begin(self, at: float | None) -> None:
        """A restart has begun: at some moment, in monotonic seconds; now when None."""
        self.seconds = {}
        self._since = time.monotonic() if at is None else at

    def end(self, phase: str, at: float | None = None) -> None:
        """A phase is over. One that comes again, as not all ranks got in at once, is added up."""
        at = max(self._since, time.monotonic() if at is None else at)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + at - self._since
        self._since = at


class Reporter:
    """The reports of one call's restarts, on one rank.

    Args:
        own: what the call owns.
        began_at: when the call began, in monotonic seconds.

    Attributes:
        phases: of the restart that is under way, or was the last.
        ended_at: when this rank saw the end of the last iteration that it was in, in monotonic seconds.
        step: what its function had come to by then; None if it had told no step.
    """

    def __init__(self, own: "Resources", began_at: float) -> None:
        self.phases = Phases()
        self.ended_at: float | None = None
        self.step: int | None = None
        self._own = own
        self._began_at = began_at
        self._report: RestartReport | None = None
        self._waits = False

    # ---- the thread that runs the function

    def left(self, watch: WatchedIteration) -> None:
        """The iteration has ended by a fault, and this rank is out of the function."""
        self.ended_at = watch.ended_at
        self.phases.begin(watch.ended_at)
        self.phases.end("abort", watch.aborted_at)
        self.phases.end("leave")

    def await_report(self, state: State, watch: WatchedIteration) -> None:
        """Before `tell`, outside of what can be interrupted: waits until all active ranks have come.

        There is no report in a call's first iteration, or if the iteration has ended; nor after
        ``barrier_timeout``, or without the store, which is logged.

        Args:
            state: this rank's.
            watch: of the iteration that begins.
        """
        own, self._report = self._own, None
        if own.settings.on_restart is None or own.member.view.is_first:
            return
        self._waits = True
        try:
            with own.waiting:
                self._report = self._await_report(state, watch)
        except (StoreError, ValueError, KeyError, TypeError):  # the function may do without the store
            log.exception("no report of restart %d could be read: on_restart is not called", state.iteration)
        finally:
            self._waits = False

    def tell(self, state: State) -> None:
        """Calls ``on_restart``, if there is a report, as a part of the function.

        Args:
            state: this rank's.
        """
        report, self._report = self._report, None
        on_restart = self._own.settings.on_restart
        if report is None or on_restart is None:
            return
        self.phases.end("enter")
        try:
            on_restart(dataclasses.replace(report, phases=dict(self.phases.seconds), step=self.step))
        except Exception:
            if self._own.interrupter.requested:
                raise  # in the wake of the interruption, which goes on
            log.exception("on_restart failed on rank %s, and the iteration goes on", state.rank)

    def _await_report(self, state: State, watch: WatchedIteration) -> RestartReport | None:
        store, n, settings = self._own.member.agreement.store, watch.n, self._own.settings
        key, deadline = keys.restarted(n), store.now() + settings.barrier_timeout
        while not watch.over.is_set():
            remaining = deadline - store.now()
            said = store.wait_for(key, min(settings.monitor_thread_interval, remaining))
            if said is not None:
                said = said or read(store, store.wake_name(key))
                return RestartReport.from_json(said) if said else None
            active = state.active_world_size or 0
            entered = Agreement(store).entering.entered_in(n).values()
            missing = set(range(active)) - {one.active_rank for one in entered}
            if not missing:  # the last one's count was wrong: then no rank has made it
                return self._make(store, state, store.now())
            if remaining <= 0:
                log.warning(
                    "on_restart is not called: active ranks %s of %d did not come into iteration %d within "
                    "barrier_timeout=%g s",
                    *(sorted(missing), active, state.iteration, settings.barrier_timeout),
                )
                return None
        return None

    # ---- the monitor thread

    def entered(self, state: State) -> None:
        """On the active rank that came last, logs the restart's line, and tells the others.

        Args:
            state: this rank's.
        """
        view, now = self._own.member.view, self._own.client.now()
        if view.is_first or state.active_rank is None:
            return
        if Agreement(self._own.client).entering.count_active(view.n) != state.active_world_size:
            return
        report = self._make(self._own.client, state, now)
        self._own.client.execute([Notify(keys.restarted(view.n), report.to_json())])
        log.warning("%s", report)
        phases = {} if self.ended_at is None else dict(self.phases.seconds)
        if phases:
            phases.setdefault("enter", max(0.0, report.seconds - sum(phases.values())))
        with contextlib.suppress(InternalError):  # its monitor has ended, which others say
            self._own.monitor.restarted(report.kind, {**phases, "total": report.seconds})
        self._own.member.emit("restarted", line=str(report))

    def ended(self) -> None:
        """The iteration has ended by a fault: its report is waited for no more."""
        if self._waits:
            self._own.client.execute([Notify(keys.restarted(self._own.member.view.n), "")])

    def _make(self, store: Operations, state: State, now: float) -> RestartReport:
        member = self._own.member
        faults = Agreement(store).ends.faults_of(member.view.n - 1)
        seconds = began_before(faults, self._began_at) if self.ended_at is None else now - self.ended_at
        return make_report(store, member.view, state, faults, seconds)
