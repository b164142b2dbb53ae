"""The thread that finds hangs by evidence, one for all ranks of a node; `evidence` decides.

As long as steps follow each other, it reads the ranks' pings a few times a second. Under suspicion it looks
at all ranks of the node, at first 20 times a second: Linux announces none of this.

If what all nodes claim is about all active ranks (`exchange`), a rank that hangs is accused.
"""

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from .._text import duration
from ..exception import StoreError
from ..protocol.operations import Operations
from ..store.bounded import in_background
from . import evidence
from .evidence import END, VOTE, Hold, Kind, StepTimes, Wait, WaitingRanks
from .exchange import Exchange
from .shared_memory import RankMemory
from .slow import SlowRanks
from .watched import ITSELF, Accusation, Watched, WatchedRank

log = logging.getLogger(__name__)

_FIRST_GAP, _MOST_GAP = 0.05, 0.5  # seconds between two looks; grows with the suspicion
_LATE = 0.5  # seconds by which a look is late after a pause of the node
_LEAVES_WITHIN = 0.15  # seconds until an accused rank runs Python again, if it can
_LETS_GO_WITHIN = 5.0  # seconds that it may hold the GIL after that
_CLAIM_AFTER = 0.25  # seconds of suspicion
_SLOW = (Kind.BUSY, Kind.NO_GIL)
_IDLE = 0.1  # seconds until it looks whether the ranks can be watched now
_MOST_WAITS = 4
_UNKNOWN_AFTER = 10.0  # seconds without a ping, while it is not known how long steps take
_COMPILES_FOR = 10.0  # seconds without a movement; C++ compilers are children
_BEFORE_TIMEOUT = 0.9  # of it
_ALL_WAIT = "all wait"  # in place of a line


@dataclasses.dataclass(eq=False)
class HangWatch:
    """Finds hangs of a node's ranks, in its own thread.

    Args:
        connect: makes a client of the store.
        name: of the node's heart.

    Attributes:
        steps: what is known of the steps.
    """

    connect: Callable[[], Operations]
    name: str

    def __post_init__(self) -> None:
        self.steps = StepTimes()
        self._slow = SlowRanks()
        self._nodes = Exchange(self.connect, self.name)
        self._ranks: dict[WatchedRank, Watched] = {}
        self._wanted = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._n = -1  # the iteration that is watched
        self._step: int | None = None  # the last one that was seen
        self._counted: tuple[int, float] = (0, 0.0)  # pings of the first rank, and when it last pinged
        self._suspected_at: float | None = None
        self._accused_in = -1  # iteration
        self._compiled_at = -math.inf
        self._oldest = self._longest = 0.0  # seconds since the oldest last ping, now and at most
        self._alarms: dict[str, int | None] = {}  # places, and at which step

    def add(self, rank: WatchedRank) -> None:
        """Begins to watch a rank."""
        with self._wanted:
            self._ranks = {**self._ranks, rank: Watched(rank)}
            if self._thread is None:
                self._thread = in_background("looking for hangs", self._run)
            self._wanted.notify()

    def remove(self, rank: WatchedRank) -> None:
        """Ends the watch of a rank. A second call is harmless."""
        with self._wanted:
            self._ranks = {one: watched for one, watched in self._ranks.items() if one is not rank}

    def close(self) -> None:
        """Ends the thread, and waits for it."""
        with self._wanted:
            self._closing = True
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join()
        self._nodes.close()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._wanted:
                ranks = list(self._ranks.values())
                if self._closing:
                    return
                if not ranks:
                    self._wanted.wait()
                    due = time.monotonic()
                    continue
            now = time.monotonic()
            try:
                if now - due > _LATE:
                    self._forget(learns=False)  # the node was paused
                pause = self._turn([one for one in ranks if one.rank.memory.active], now)
            except StoreError as error:
                log.debug("hangs: the store cannot be asked now: %s", error)
                pause = _MOST_GAP
            except Exception:
                log.exception("looking for hangs failed; soft_timeout and hard_timeout still end them")
                return
            due = now + pause
            with self._wanted:
                if not self._closing:
                    self._wanted.wait(max(0.0, due - time.monotonic()))

    def _turn(self, watched: list[Watched], now: float) -> float:
        """Looks once; returns the seconds until the next time."""
        if accused := [one for one in watched if one.accused_at is not None]:
            self._press(accused, now)
            return _FIRST_GAP
        if (
            not watched
            or not self._is_watchable(watched)
            or self._accused_in == watched[0].rank.memory.iteration
        ):
            self._forget(learns=False)
            return _IDLE
        self._follow(watched[0])
        self._oldest = oldest = max(one.age(now) for one in watched)
        self._longest = max(self._longest, oldest)
        self._learn(watched[0].rank.memory)
        self._nodes.is_alone = len(watched) == watched[0].rank.memory.active_world_size
        threshold = self.steps.suspect_after if self.steps.median else _UNKNOWN_AFTER
        if oldest < threshold:
            self._forget(learns=True)
            self._nodes.excuse(False)
            self._find_slow(watched, now)
            # Once before, so that what is asleep then is known to be so when it is suspected.
            if oldest >= (early := max(threshold - evidence.LIVE.stuck, evidence.SUSPECT_AFTER / 2)):
                for one in watched:
                    one.note_slices(now)
                return min(threshold - oldest, max(0.0, self._slow.due - now))
            first = early - oldest if self.steps.median else _FIRST_GAP
            return min(first, max(0.0, self._slow.due - now))
        if self._suspected_at is None:
            self._suspected_at = now
        for one in watched:
            one.look(now)
        suspected_at = self._suspected_at
        self._judge(watched, now)  # it may have been a pause
        return min(max(_FIRST_GAP, (now - suspected_at) / 20), _MOST_GAP)

    def _find_slow(self, watched: Sequence[Watched], now: float) -> None:
        """Follows the ranks' steps, and says which of them are slow."""
        of = {one.paced: one for one in watched}
        for one in watched:
            one.hear(now)

        def ask(question: bytes) -> None:
            for one in watched:
                one.ask(now, question, every=0.0)

        is_first = any(one.rank.memory.active_rank == 0 for one in watched)
        if usual := self._nodes.paces(self._slow.pace, now, is_first=is_first):
            self._slow.heard(usual)
        if is_first and self.steps.median:
            self._nodes.note_learned(self.steps.words(is_live=watched[0].rank.memory.votes > 0), now)
        for paced in self._slow.turn([*of], self._n, self.steps.median, now, ask):
            of[paced].rank.note_slow(paced)

    @staticmethod
    def _is_watchable(watched: Collection[Watched]) -> bool:
        """Whether all active ranks of the node are in the function of one iteration, past its begin."""
        memories = [one.rank.memory for one in watched]
        return len({memory.iteration for memory in memories}) == 1 and all(
            memory.pings and not memory.leave_stamp and not memory.hang_protection_disabled
            for memory in memories
        )

    def _follow(self, first: Watched) -> None:
        """Notes a new iteration."""
        n = first.rank.memory.iteration
        if n == self._n:
            return
        self._nodes.begin(n)
        self._compiled_at = -math.inf
        self._forget(learns=False)
        # Not only on the node that ended it: the other nodes' ranks had waited almost as long.
        if self._oldest >= (timeout := first.rank.limits.soft * self.steps.patience) / 2:
            self.steps.timed_out(self._step, timeout)
        self._n, self._counted, self._longest = n, (0, 0.0), 0.0

    def _learn(self, memory: RankMemory) -> None:
        pings, at = memory.pings, memory.ping_stamp
        last, since = self._counted
        if (step := memory.step) is not None:
            self._step = step
            self.steps.went_on(memory.first_step, step, self._longest)
        if at and pings != last:
            if 0 < last < pings:
                self.steps.passed(pings - last, at - since)
            self._counted = pings, at

    def _forget(self, *, learns: bool) -> None:
        """Ends a suspicion that was none."""
        if self._suspected_at is None:
            return
        # First: what is claimed must not stay in the store, so a failure leaves it to the next turn.
        self._nodes.claim(None)
        self._suspected_at = None
        with self._wanted:
            watched = list(self._ranks.values())
        for one in watched:
            suspect, one.suspect = one.suspect, None
            if learns and suspect is not None:
                self.steps.stretch(one.worked)
                self.steps.slept(*one.slept)

    # ---- a suspicion

    def _judge(self, watched: list[Watched], now: float) -> None:
        """Decides whether the job hangs because of ranks of this node."""
        kinds = {one: one.kind(now, self._hold(one)) for one in watched}
        if any(kind is Kind.COMPILES and one.still(now) < _COMPILES_FOR for one, kind in kinds.items()):
            self._compiled_at = now
        self._nodes.excuse(now - self._compiled_at < _COMPILES_FOR)
        if not self.steps.median:
            return
        for one, kind in kinds.items():
            if kind in (Kind.WAITS, *evidence.EXPLAINED):
                continue
            # Not what lies before: perhaps the node was paused.
            one.worked = now - (self._suspected_at or now) + self.steps.suspect_after
            if one.suspect is not None:
                one.slept = max(one.slept, (one.suspect.still(now), one.place))
        if len(watched) > 1 and all(kind is Kind.STOPPED for kind in kinds.values()):
            self._forget(learns=False)  # the node is paused
            return
        hang = [one for one, kind in kinds.items() if self._hangs(one, kind, now)]
        wait = [one for one, kind in kinds.items() if kind is Kind.WAITS]
        if len(hang) + len(wait) < len(watched):
            self._nodes.claim(None)
            return
        if self._suspected_at is None or now - self._suspected_at < _CLAIM_AFTER:
            return
        still = min(one.suspect.still(now) for one in watched if one.suspect)
        moves = (
            any(one.suspect.sends for one in watched if one.suspect) or still < self._hold(watched[0]).stuck
        )
        by_rank = [(one.rank.memory.active_rank, one.waits_in()) for one in wait]
        claim = evidence.claim_of(by_rank, len(watched), _MOST_WAITS, moves)
        self._nodes.claim(claim)
        if not hang and (moves or all(rank for rank, _ in by_rank)):
            return  # another node decides
        active = watched[0].rank.memory.active_world_size
        claims = self._nodes.claims(now)
        waits = evidence.all_waits(claims, active)
        if waits is None:
            return
        guilty = [one for one in hang if evidence.is_behind(one.begun(), waits)]
        for one in guilty:
            self._accuse(one, kinds[one], f"did not come to {_words(waits, wait)}", now)
        if not hang and not any(one.moves for one in claims):
            self._judge_waits(watched, waits, active, now)

    def _judge_waits(
        self, watched: list[Watched], waits: Mapping[Wait, WaitingRanks], active: int, now: float
    ) -> None:
        """Decides, on active rank 0's node, whether all ranks wait for each other."""
        first = next(one for one in watched if one.rank.memory.active_rank == 0)
        odd = evidence.odd_waits(waits, active)
        most = _words({one: waits[one] for one in waits if one not in odd}, watched)
        guilty = [one for one in watched if one.waits_in() in odd]
        for one in guilty:
            self._accuse(one, Kind.WAITS, f"did not come to {most}", now)
        if odd and not guilty:
            message = f"did not come to {most}: in {_words({odd[0]: waits[odd[0]]}, watched)}"
            self._end(first, Accusation(self._n, message, of=waits[odd[0]].first))
        elif not odd and first.rank.memory.votes and first.age(now) > self.steps.limit(_ALL_WAIT):
            self.steps.alarm(_ALL_WAIT, first.rank.memory.step)
            message = f"all ranks wait in {most}: one of them skipped an operation before"
            self._end(first, Accusation(self._n, message, of=None))

    def _hold(self, one: Watched) -> Hold:
        """How long a rank has to be still until it counts: longer at a line where it may sleep."""
        memory = one.rank.memory
        hold = evidence.LIVE if memory.votes else evidence.PLAIN
        # Not at an unknown line: what holds the GIL there is not always the same.
        stuck = max(hold.stuck, self.steps.places.get(one.place, 0.0) if one.place else 0.0)
        # Once more at the same step: it sleeps there each time.
        if evidence.comes_again(self._alarms, one.place, memory.step, memory.pings):
            stuck = max(stuck, one.rank.limits.soft)
        return hold._replace(stuck=stuck)

    def _hangs(self, one: Watched, kind: Kind, now: float) -> bool:
        if kind in _SLOW and one.rank.memory.votes:
            starved = one.suspect.starved if one.suspect else 0.0
            return one.age(now) - starved > self.steps.limit(one.place)
        if kind in _SLOW:  # just before the timeout, which could only say which rank was first to notice
            return one.age(now) > one.rank.limits.soft * self.steps.patience * _BEFORE_TIMEOUT
        return kind in (Kind.STUCK, Kind.STOPPED)

    # ---- a verdict

    def _accuse(self, one: Watched, kind: Kind, what: str, now: float) -> None:
        """Ends the iteration because of a rank."""
        assert one.suspect is not None
        answer, memory = one.suspect.answer, one.rank.memory
        seconds = duration(one.age(now) if kind in _SLOW else one.suspect.still(now))
        does = f"{kind.value} {answer.words}" if answer else "holding the GIL"
        if kind is Kind.STOPPED:
            does = kind.value
        elif kind is Kind.WAITS and answer:
            inside = answer.waits or _words({one.waits_in() or ("", 0): WaitingRanks(1, 0)}, [])
            does = f"waiting in {inside}, {answer.words},"
        elif answer and answer.process:
            does = f"waiting for process {answer.process}, which is stopped or dead, {answer.words}"
        if kind in _SLOW:
            self.steps.alarm(one.place, memory.step)
        elif kind is Kind.STUCK and answer:
            self._alarms[one.place] = memory.step
        one.accused_at = now
        one.accusation = f"{what}: {does} for {seconds}; steps take {duration(self.steps.median)}"
        holds_gil = answer is None and kind is not Kind.STOPPED
        self._end(one, Accusation(self._n, one.accusation, kind is Kind.STOPPED, holds_gil))

    def _end(self, one: Watched, accusation: Accusation) -> None:
        self._accused_in = self._n
        one.rank.memory.is_accused = accusation.of == ITSELF
        one.rank.accuse(accusation)

    def _press(self, accused: Collection[Watched], now: float) -> None:
        """Ends the accused ranks that run no Python, so that no interruption reaches them."""
        for one in accused:
            memory, at = one.rank.memory, one.accused_at
            if at is None or not memory.is_accused:  # it is in another iteration
                one.accused_at = None
                continue
            one.ask(now)  # each question makes it stamp
            has_run = memory.main_stamp >= at
            seconds = _LETS_GO_WITHIN if has_run else _LEAVES_WITHIN
            if now - (memory.gil_stamp if has_run else at) > seconds:
                one.accused_at = None
                words = f"{one.accusation}; it ran no Python for {duration(seconds)} when interrupted,"
                one.rank.accuse(Accusation(memory.iteration, words, ends=True))


def _words(waits: Mapping[Wait, WaitingRanks], waiting: Collection[Watched]) -> str:
    """Describes what most of the waiting ranks wait in."""
    what, number = max(waits, key=lambda one: waits[one].ranks)
    if what == VOTE:
        return "the vote of live state"
    if what == END:
        return "the end of the function"
    said = (one.answer.waits for one in waiting if one.answer and one.waits_in() == (what, number))
    known = next(said, "")
    return known or (f"collective #{number} of group {what}" if what else "an operation of all ranks")
