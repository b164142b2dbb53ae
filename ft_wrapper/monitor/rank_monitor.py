"""Watching one rank from another process: its death, its progress, its heartbeat."""

from __future__ import annotations

import logging
import math
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable

from .. import events
from ..attribution import Interruption
from ..exception import StoreError
from ..store import Fault, Member, StoreMixin, View
from ..store import keys as names
from .death import await_others, report_death
from .heart import Heart
from .neighbours import NeighbourWatch
from .pauses import Pauses
from .settings import MonitorSettings
from .shared_memory import Phase, RankMemory
from .stack_dump import is_stopped, where_it_stands

log = logging.getLogger(__name__)


class RankMonitor:
    """One rank's monitor. Not in the rank's process, so that neither its death nor a held GIL stops it.

    Args:
        connect: makes a client of the store.
        member: the rank's member.
        memory: shared with the rank.
        pid: the rank's process.
        settings: the times to keep.
        job: what the job is called in events; None for what the environment says.
        heart: beats for the rank as for others; None for one of its own.
    """

    def __init__(
        self,
        connect: Callable[[], StoreMixin],
        member: Member,
        memory: RankMemory,
        pid: int,
        settings: MonitorSettings,
        job: str | None = None,
        heart: Heart | None = None,
    ) -> None:
        self.member = member
        self.view: View | None = None
        self.is_between = False  # two calls: the rank is anywhere, and there is no memory to look at
        self._memory = memory
        self._pid = pid
        self._settings = settings
        self._job = {} if job is None else {"job": job}
        self._store = connect()
        self._pauses = Pauses(settings.interval, time.monotonic())
        self._reported = names.BEFORE_FIRST - 1  # iteration whose soft timeout has been published
        self._gone = False
        self._told = False  # whether the others know
        self._left_out_at = math.inf  # when the heart saw that the others went on without this rank
        self._teller: threading.Thread | None = None  # of a soft timeout
        self._has_own_heart = heart is None
        self._heart = heart or Heart(connect, member, settings)
        self._heart.add(self)

    def enter(self, view: View) -> None:
        """The rank goes into an iteration."""
        self.view = view

    @property
    def rank(self) -> int | None:
        """Which it is in the iteration; None until the rank assignment has said so."""
        return self._memory.rank

    def leave_call(self) -> None:
        """The rank has left its call in order, and may take its time until the next one.

        Only its heartbeat and its end matter from now on. Its last iteration has ended well, so nothing ends
        by its death; and the store may end with the job, while this rank still does something else.
        """
        self.is_between = True
        self._store.set_patience(self._settings.termination_grace_time)

    def stop(self) -> None:
        """Stops the heartbeat."""
        self._heart.remove(self)
        if self._has_own_heart:
            self._heart.stop()

    def close(self) -> None:
        """Stops the heartbeat, waits for the end of a heart of its own, and lets go of the store."""
        self.stop()
        if self._has_own_heart:
            self._heart.close()
        if self._teller is not None:
            self._teller.join()
        self._store.close()

    def rank_died(self) -> None:
        """The rank's process has died: tells the others, unless that was done when it was ended.

        Raises:
            StoreError: they cannot be told. May be tried again.
        """
        self.stop()
        # A store that is gone now has ended with the job: no one is left to be told.
        self._store.set_patience(self._settings.termination_grace_time)
        if self._told:
            pass
        elif self.is_between:
            # As it always ends, mostly: no fault. Those who go on to another call must not wait for it.
            self._tell_death(None, active=False, timeout=self._settings.termination_grace_time)
        else:
            self._publish_death(Interruption.TERMINATED, "died")
        self._store.say_goodbye(self.member)  # it cannot do so itself any more

    def await_next(self) -> None:
        """Waits until the others, if there are any, have left the iteration that the rank died in."""
        if self.view is not None:
            await_others(self._store, self.view, self._settings.barrier_timeout)

    def pause(self) -> float:
        """Seconds until `keep_time` has to look again."""
        settings, now = self._settings, time.monotonic()
        left = [settings.interval, settings.termination_grace_time - self._since(self._left_out_at, now)]
        if self._memory.hang_protection_disabled == 0:
            if self._memory.phase == Phase.WATCHED:
                still = self._since(self._memory.progress_stamp(settings.watchdog_interval), now)
                if self._may_be_reported():
                    left.append(settings.soft_timeout - still)
                left.append(settings.hard_timeout - still)
            left.append(settings.hard_timeout - self._since(self._memory.gil_stamp, now))
        pause = max(0.0, min(left))
        self._pauses.expect(now + pause)
        return pause

    def _since(self, moment: float, now: float) -> float:
        """Seconds since a moment in which this monitor ran itself: see `Pauses`."""
        return self._pauses.since(moment, now)

    def keep_time(self, pidfd: int) -> None:
        """Publishes a soft timeout; ends the process at a hard one, or when it is out and does not leave.

        Args:
            pidfd: of the rank's process.
        """
        now = time.monotonic()
        self._pauses.look(now)
        if self._gone:
            return
        if self._since(self._left_out_at, now) >= self._settings.termination_grace_time:
            self._end_rank(pidfd, "did not leave, though the others had gone on without it")
            return
        if self._memory.hang_protection_disabled > 0:
            return
        watched = self._memory.phase == Phase.WATCHED
        progress = self._since(self._memory.progress_stamp(self._settings.watchdog_interval), now)
        gil = self._since(self._memory.gil_stamp, now)
        hard = self._settings.hard_timeout
        if gil >= hard or (watched and progress >= hard):
            what = "held the GIL" if gil >= hard / 2 else "made no progress"
            if is_stopped(self._pid):
                what = "was stopped by a signal"
            self._end_rank(pidfd, f"{what} for hard_timeout={hard:g} s")
        elif watched and progress >= self._settings.soft_timeout and self._may_be_reported():
            self._reported = self._memory.iteration
            # Not here: a store that is out of reach for the moment must not keep the hard timeout waiting.
            self._teller = threading.Thread(
                target=self._publish_soft_timeout, name="ft_wrapper-soft-timeout", daemon=True
            )
            self._teller.start()

    def _may_be_reported(self) -> bool:
        """Whether a soft timeout is to be published: once an iteration, and a spare's ends nothing."""
        return self._memory.active and self._reported < self._memory.iteration

    def await_goodbyes(self) -> None:
        """Waits until all members have said that they need the store no more.

        Those of the last iteration for as long as they live; the dead and those who were left out may still
        be about to say so, and get the grace time.
        """
        watch = NeighbourWatch(self._store, self.member, self._settings.heartbeat_timeout)
        nobody_since = math.inf
        while True:
            current = self._store.read_current()
            if current is None:
                n, members, silent = names.BEFORE_FIRST, self._store.joined_first(), frozenset[Member]()
            else:
                view, _ = current
                n, members, silent = view.n, set(view.members), watch.look(view)
            missing = (members | self._store.joined_first()) - self._store.goodbyes() - {self.member}
            if not missing:
                return
            here = (missing & members) - self._store.deaths_of(n) - silent
            now = time.monotonic()
            nobody_since = math.inf if here else min(now, nobody_since)
            if now - nobody_since >= self._settings.termination_grace_time:
                return
            # One after the other: all that is read above once more only when one lets itself be waited for.
            for member in sorted(here or missing):
                if not self._store.await_goodbye(member, self._settings.heartbeat_interval):
                    break

    def note_left_out(self, left_out: bool) -> None:
        """Hears, from its heart, whether the others have gone on without the rank."""
        if not left_out:
            self._left_out_at = math.inf
        elif self._left_out_at == math.inf:
            self._left_out_at = time.monotonic()

    def _emit_fault(self, view: View, interruption: Interruption) -> None:
        member = {"slot": self.member.slot, "incarnation": self.member.incarnation}
        events.emit("fault", **self._job, iteration=view.n, kind=interruption.name, **member)

    def _publish_soft_timeout(self) -> None:
        view = self.view
        if view is None:
            return
        message = f"made no progress for soft_timeout={self._settings.soft_timeout:g} s"
        fault = self._fault(Interruption.SOFT_TIMEOUT, message)
        self._emit_fault(view, fault.interruption)
        try:
            self._store.report_fault(view.n, fault)
        except StoreError as error:
            log.warning("the others could not be told that %s %s: %s", self._name(), message, error)

    def _publish_death(self, interruption: Interruption, message: str) -> None:
        if self.view is not None and not self._gone:
            self._emit_fault(self.view, interruption)
        self._gone = True
        fault = self._fault(interruption, message)
        self._tell_death(fault, active=self._memory.active, timeout=self._settings.barrier_timeout)

    def _tell_death(self, fault: Fault | None, *, active: bool, timeout: float) -> None:
        report_death(
            self._store,
            self.view,
            self.member,
            fault,
            active=active,
            timeout=timeout,
            returns=self._settings.replaced,
        )
        self._told = True

    def _publish_end(self, message: str) -> None:
        try:
            self._publish_death(Interruption.HARD_TIMEOUT, message)
        except StoreError as error:
            log.warning("the others could not be told that %s is ended: %s", self._name(), error)

    def _end_rank(self, pidfd: int, message: str) -> None:
        """Publishes first, then ends the process: no one waits for its memory to be freed."""
        place = where_it_stands(self._memory, self._pid, pidfd)
        if place is not None:
            message += f" and stood {place}"
        log.warning("%s %s: its process is ended", self._name(), message)
        teller = threading.Thread(
            target=self._publish_end, args=(message,), name="ft_wrapper-hard-timeout", daemon=True
        )
        teller.start()
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    signal.pidfd_send_signal(pidfd, number)
                except ProcessLookupError:
                    break
                if selector.select(self._settings.termination_grace_time):
                    break
        teller.join()

    def _name(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        return f"{self.member.name} ({rank}pid {self._pid})"

    def _fault(self, interruption: Interruption, message: str) -> Fault:
        return Fault(
            self.member, self.rank, interruption, message, socket.gethostname(), self._pid, time.time()
        )
