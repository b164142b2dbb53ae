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
from ..exception import StoreError, StoreUnavailable
from ..store import Fault, Member, StoreMixin, View, beat_lasts
from ..store import keys as names
from .death import await_others, report_death
from .housekeeper import Housekeeper
from .neighbours import NeighbourWatch
from .settings import MonitorSettings
from .shared_memory import Phase, RankMemory

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
    """

    def __init__(
        self,
        connect: Callable[[], StoreMixin],
        member: Member,
        memory: RankMemory,
        pid: int,
        settings: MonitorSettings,
        job: str | None = None,
    ) -> None:
        self.member = member
        self.view: View | None = None
        self._rank: int | None = None
        self._memory = memory
        self._pid = pid
        self._settings = settings
        self._job = {} if job is None else {"job": job}
        self._store = connect()
        self._reported = names.BEFORE_FIRST - 1  # iteration whose soft timeout has been published
        self._gone = False
        self._left_out_at = math.inf  # when the heart saw that the others went on without this rank
        self._teller: threading.Thread | None = None  # of a soft timeout
        self._stop = threading.Event()
        self._heart = threading.Thread(
            target=self._beat, args=(connect,), name="ft_wrapper-heartbeat", daemon=True
        )
        self._heart.start()

    def enter(self, view: View, rank: int | None) -> None:
        """The rank goes into an iteration."""
        self.view = view
        self._rank = rank

    def stop(self) -> None:
        """Stops the heartbeat."""
        self._stop.set()

    def close(self) -> None:
        """Stops the heartbeat, waits for its end, and lets go of the store."""
        self.stop()
        self._heart.join()  # bounded: the store is not tried for ever
        if self._teller is not None:
            self._teller.join()
        self._store.close()

    def rank_died(self) -> None:
        """The rank's process has died: tells the others, unless that was done when it was ended."""
        self._stop.set()
        # A store that is gone now has ended with the job: nobody is left to be told.
        self._store.set_patience(self._settings.termination_grace_time)
        if not self._gone:
            self._publish_death(Interruption.TERMINATED, "died")
        self._store.say_goodbye(self.member)  # it cannot do so itself any more

    def await_next(self) -> None:
        """Waits until the others, if there are any, have left the iteration that the rank died in."""
        if self.view is not None:
            await_others(self._store, self.view, self._settings.barrier_timeout)

    def pause(self) -> float:
        """Seconds until `keep_time` has to look again."""
        now = time.monotonic()
        due = [now + self._settings.interval, self._left_out_at + self._settings.termination_grace_time]
        if self._memory.hang_protection_disabled == 0:
            if self._memory.phase == Phase.WATCHED:
                progress = self._memory.progress_stamp(self._settings.watchdog_interval)
                if self._reported < self._memory.iteration:
                    due.append(progress + self._settings.soft_timeout)
                due.append(progress + self._settings.hard_timeout)
            due.append(self._memory.gil_stamp + self._settings.hard_timeout)
        return max(0.0, min(due) - now)

    def keep_time(self, pidfd: int) -> None:
        """Publishes a soft timeout; ends the process at a hard one, or when it is out and does not leave.

        Args:
            pidfd: of the rank's process.
        """
        now = time.monotonic()
        if self._gone:
            return
        if now - self._left_out_at >= self._settings.termination_grace_time:
            self._end_rank(pidfd, "did not leave, though the others had gone on without it")
            return
        if self._memory.hang_protection_disabled > 0:
            return
        watched = self._memory.phase == Phase.WATCHED
        progress = now - self._memory.progress_stamp(self._settings.watchdog_interval)
        gil = now - self._memory.gil_stamp
        hard = self._settings.hard_timeout
        if gil >= hard or (watched and progress >= hard):
            what = "held the GIL or was stopped" if gil >= hard else "made no progress"
            self._end_rank(pidfd, f"{what} for hard_timeout={hard:g} s")
        elif watched and progress >= self._settings.soft_timeout and self._reported < self._memory.iteration:
            self._reported = self._memory.iteration
            # Not here: a store that is out of reach for the moment must not keep the hard timeout waiting.
            self._teller = threading.Thread(
                target=self._publish_soft_timeout, name="ft_wrapper-soft-timeout", daemon=True
            )
            self._teller.start()

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
            self._store.await_goodbye(min(here or missing), self._settings.heartbeat_interval)

    def _beat(self, connect: Callable[[], StoreMixin]) -> None:
        store = self._connected(connect)
        if store is None:
            return
        watch = NeighbourWatch(store, self.member, self._settings.heartbeat_timeout)
        house = Housekeeper(store, self._settings.join_window)
        lasts = beat_lasts(self._settings.heartbeat_timeout, self._settings.heartbeat_interval)
        is_away = False
        while not self._stop.wait(self._settings.heartbeat_interval):
            try:
                store.send_heartbeat(self.member, lasts)
                view = self.view
                if view is not None:
                    watch.look(view)
                    self._note_left_out(watch.left_out)
                    house.keep(view, self._rank)
                if is_away:
                    log.warning("%s is heard again", self.member)
                is_away = False
            except StoreUnavailable as error:
                if not is_away:
                    log.warning("%s is not heard for now: %s", self.member, error)
                is_away = True
            except Exception:
                log.exception("heartbeat of %s failed", self.member)
        store.close()

    def _connected(self, connect: Callable[[], StoreMixin]) -> StoreMixin | None:
        """A client for the heartbeat, as soon as the store can be reached; None if it is stopped before."""
        while True:
            try:
                return connect()
            except StoreError as error:
                log.warning("%s is not heard yet: %s", self.member, error)
            if self._stop.wait(self._settings.heartbeat_interval):
                return None

    def _note_left_out(self, left_out: bool) -> None:
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
            log.warning("nobody could be told that %s %s: %s", self.member, message, error)

    def _publish_death(self, interruption: Interruption, message: str) -> None:
        self._gone = True
        if self.view is not None:
            self._emit_fault(self.view, interruption)
        report_death(
            self._store,
            self.view,
            self.member,
            self._fault(interruption, message),
            active=self._memory.active,
            timeout=self._settings.barrier_timeout,
            returns=self._settings.replaced,
        )

    def _publish_end(self, message: str) -> None:
        try:
            self._publish_death(Interruption.HARD_TIMEOUT, message)
        except StoreError as error:
            log.warning("nobody could be told that %s is ended: %s", self.member, error)

    def _end_rank(self, pidfd: int, message: str) -> None:
        """Publishes first, then ends the process: nobody waits for its memory to be freed."""
        log.warning("%s: %s; ending process %d", self.member, message, self._pid)
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

    def _fault(self, interruption: Interruption, message: str) -> Fault:
        return Fault(self.member, self._rank, interruption, message, socket.gethostname(), self._pid)
