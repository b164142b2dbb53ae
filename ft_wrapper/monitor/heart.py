"""The heart: a thread that sends the heartbeat for the ranks of a node, and watches other nodes' heartbeats.

All ranks of an agent share a heart: one thread, one connection, one heartbeat key. A monitor process has a
heart for its rank alone. A heart beats as long as one of its ranks lives. The end of a single rank is
reported by its monitor (`RankMonitor.rank_died`).
"""

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from ..exception import StoreError
from ..protocol import Agreement
from ..protocol.housekeeping import Housekeeper
from ..protocol.neighbours import NeighbourWatch, Sight
from ..protocol.operations import Operations
from ..protocol.records import Member, View
from ..protocol.silence import beat_lasts
from ..settings import AllLimits
from ..store.bounded import in_background
from .hangs import HangWatch

log = logging.getLogger(__name__)

_TURNS = 8  # a timeout of at least this many intervals lets a heart do one thing per tick
_SIGHTS = (Sight.HEARTS, Sight.HEARTS, Sight.HEAD, Sight.HEARTS, Sight.HEARTS, Sight.END)


class Rank(Protocol):
    """What a heart needs to know about a rank that it beats for. The heart's thread reads it."""

    #: The iteration that the rank is in; None before the first one.
    view: View | None

    @property
    def rank(self) -> int | None:
        """The number of the rank in this iteration; None while unknown."""

    @property
    def member(self) -> Member:
        """The rank's member of the job."""

    @property
    def is_between(self) -> bool:
        """Whether the rank is between two wrapped calls."""

    def note_left_out(self, left_out: bool) -> None:
        """Notes whether the other ranks have gone on without this one."""


class HeartBeat:
    """The ticks of a heart, without its thread: heartbeats, looks at the job and at other hearts.

    A tick is one request to the store, so a heart costs no more than one request per interval. Heartbeats and
    looks take turns, and one look in three is at the job. So silence is noticed within the timeout and half a
    dozen intervals. If the timeout is shorter than eight intervals, each tick does all of it.

    Args:
        agreement: the agreement that has the heartbeats.
        heart: name of the heart.
        settings: the timeouts and intervals.
    """

    def __init__(self, agreement: Agreement, heart: str, settings: AllLimits) -> None:
        self._agreement = agreement
        self._name = heart
        self._takes_turns = settings.heartbeat_timeout >= _TURNS * settings.heartbeat_interval
        between_beats = settings.heartbeat_interval * (2 if self._takes_turns else 1)
        self._lasts = beat_lasts(settings.heartbeat_timeout, between_beats)
        self._late = settings.heartbeat_timeout / 2
        self._sights = itertools.cycle(_SIGHTS)
        self._is_beats_turn = True
        self._last: float | None = None  # when the last tick was carried out; None if it failed
        self.watch = NeighbourWatch(agreement, heart, settings.heartbeat_timeout)
        self._house = Housekeeper(agreement.store, settings.join_window)

    def tick(self, ranks: Collection[Rank]) -> None:
        """Sends a heartbeat, or looks, or both.

        Args:
            ranks: the living ranks of this heart.

        Raises:
            StoreError: the store cannot be used.
        """
        last, self._last = self._last, None
        # After a pause or an outage, the job may have left these ranks behind.
        looks_at_all = not self._takes_turns or (
            last is not None and self._agreement.store.now() - last > self._late
        )
        beats, self._is_beats_turn = self._is_beats_turn or last is None, not self._is_beats_turn
        if beats or looks_at_all:
            self._agreement.heartbeats.beat_heart(self._name, self._lasts)
        if looks_at_all or last is None:
            self._look(ranks, Sight.ALL)
        elif not beats:
            self._look(ranks, next(self._sights))
        elif self.watch.doubts:  # if many were lost together, all should be known soon
            self._look(ranks, Sight.HEARTS)
        for rank in ranks:
            if rank.rank == 0 and rank.view is not None:
                self._house.keep(rank.view)
        self._last = self._agreement.store.now()

    def _look(self, ranks: Collection[Rank], sight: Sight) -> None:
        """Looks at each iteration that some rank is in, the earliest first."""
        placed = sorted(
            ((rank.view, rank) for rank in ranks if rank.view is not None), key=lambda one: one[0].n
        )
        for _, group in itertools.groupby(placed, key=lambda one: one[0].n):
            here = list(group)
            self.watch.look(here[0][0], [rank.member for _, rank in here], sight)
            if Sight.HEAD in sight:
                for _, rank in here:
                    rank.note_left_out(rank.member in self.watch.left_out)


@dataclasses.dataclass(eq=False)
class Heart:
    """A heart with its own thread and its own connection to the store.

    Args:
        connect: makes a client of the store.
        name: name of the heart in the store.
        settings: the timeouts and intervals.

    Attributes:
        hangs: finds hangs of the same ranks.
    """

    connect: Callable[[], Operations]
    name: str
    settings: AllLimits

    def __post_init__(self) -> None:
        self._ranks: tuple[Rank, ...] = ()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_wanted = threading.Event()
        self._is_away = False
        self.hangs = HangWatch(self.connect, self.name)
        self._thread = in_background("heartbeat", self._run)

    @property
    def is_beating(self) -> bool:
        """Whether it beats for any rank."""
        return bool(self._ranks)

    def add(self, rank: Rank) -> None:
        """Starts beating for a rank."""
        with self._lock:
            self._ranks = (*self._ranks, rank)
            self._is_wanted.set()

    def remove(self, rank: Rank) -> None:
        """Stops beating for a rank. A second call is harmless."""
        with self._lock:
            self._ranks = tuple(one for one in self._ranks if one is not rank)

    def close(self) -> None:
        """Ends the thread, and waits for it. The wait is bounded, since the store's retries are."""
        self.hangs.close()
        self._stop.set()
        self._is_wanted.set()
        self._thread.join()

    def _run(self) -> None:
        store: Operations | None = None
        beat: HeartBeat | None = None
        for ranks in self._awaited_ranks():
            whose = ", ".join(rank.member.name for rank in ranks)
            due = time.monotonic() + self.settings.heartbeat_interval
            try:
                if store is None or beat is None:
                    store = self.connect()
                    beat = HeartBeat(Agreement(store), self.name, self.settings)
                # A client with more patience takes longer for each attempt to connect. After an outage,
                # hearts that are back early must see this one in time, even if its last attempt began just
                # before the store was back.
                late = self.settings.heartbeat_timeout / 2
                soon = min(late, self.settings.termination_grace_time)
                store.patience = soon if _are_between(ranks) else late
                beat.tick(ranks)
                if self._is_away:
                    log.warning("%s: heartbeats reach the store again", whose)
                self._is_away = False
                while (pause := beat.watch.leave_out_suspects()) and (left := due - time.monotonic()) > 0:
                    if self._stop.wait(min(pause, left)):
                        break
            except StoreError as error:
                if not self._is_away:
                    # Read again: the ranks may have left their call during the request.
                    level = logging.DEBUG if _are_between(ranks) else logging.WARNING
                    log.log(
                        level,
                        "%s: no heartbeat reaches the store, retrying; evicted after %g s: %s",
                        whose,
                        self.settings.heartbeat_timeout,
                        error,
                    )
                self._is_away = True
            except Exception:
                level = logging.DEBUG if _are_between(ranks) else logging.ERROR
                log.log(level, "%s: a heartbeat failed, retrying", whose, exc_info=True)
            self._stop.wait(max(0.0, due - time.monotonic()))
        if store is not None:
            store.close()

    def _awaited_ranks(self) -> Iterator[tuple[Rank, ...]]:
        """Yields the ranks to beat for, repeatedly until the end. Waits while there are none."""
        while not self._stop.is_set():
            self._is_wanted.wait()
            with self._lock:
                ranks = self._ranks
                if not ranks and not self._stop.is_set():
                    self._is_wanted.clear()
            if ranks:
                yield ranks


def _are_between(ranks: Collection[Rank]) -> bool:
    """Whether all ranks are between two calls: then the store may have ended with the job."""
    return all(rank.is_between for rank in ranks)
