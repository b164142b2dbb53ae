"""The thread that finds hangs by evidence, one for all ranks of a node; `evidence` decides.

As long as steps follow each other, it reads the ranks' pings a few times a second. Under suspicion it looks
at all ranks of the node, at first 20 times a second: Linux announces none of this.

Nodes meet in the store. A node whose active ranks all wait or hang claims so, in one key. A node with a rank
that hangs reads the claims. If they are about all active ranks, the rank is accused.
"""

import contextlib
import dataclasses
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

from .._text import duration
from ..exception import StoreError
from ..protocol import keys
from ..protocol.operations import Append, Operations, Read, Step, Write, read_log
from ..protocol.records import View
from ..settings import AllLimits
from ..store.bounded import in_background
from . import evidence
from .evidence import (
    END,
    VOTE,
    WHERE,
    Claim,
    Hold,
    Kind,
    StepTimes,
    StepTimings,
    Suspect,
    Wait,
    WaitingRanks,
    Whereabouts,
)
from .lateness import Pace, usual_pace
from .look import is_lost, look_at, slices
from .shared_memory import Phase, RankMemory
from .slow import PacedRank, SlowRanks

log = logging.getLogger(__name__)

_FIRST_GAP, _MOST_GAP = 0.05, 0.5  # seconds between two looks; grows with the suspicion
_ASK_EVERY = 0.2  # seconds
_LATE = 0.5  # seconds by which a look is late after a pause of the node
_LEAVES_WITHIN = 0.3  # seconds until an accused rank runs Python again, if it can
_LETS_GO_WITHIN = 5.0  # seconds that it may hold the GIL after that
_CLAIM_AFTER = 0.25  # seconds of suspicion
_SLOW = (Kind.BUSY, Kind.NO_GIL)
_IDLE = 0.1  # seconds until it looks whether the ranks can be watched now
_MOST_WAITS = 4
_UNKNOWN_AFTER = 10.0  # seconds without a ping, while it is not known how long steps take
_COMPILES_FOR = 10.0  # seconds without a movement; C++ compilers are children
_ITSELF = -1
_ALL_WAIT = "all wait"  # in place of a line
_PATIENCE = 5.0  # seconds without the store
_EXCHANGE_EVERY = 10.0  # seconds between two messages to other nodes about slow ranks
_LONGEST_ANSWER = 1 << 16


class Accusation(NamedTuple):
    """What ends an iteration.

    Args:
        n: the iteration.
        message: what the rank did, for people.
        ends: whether to end the rank's process, because it runs no Python.
        holds_gil: whether the rank cannot say where it stands.
        of: which active rank is to blame, if it is another one; None: none is.
    """

    n: int
    message: str
    ends: bool = False
    holds_gil: bool = False
    of: int | None = _ITSELF


class WatchedRank(Protocol):
    """What the watch for hangs needs to know about a rank. Its thread reads it."""

    memory: RankMemory
    pid: int
    limits: AllLimits
    questions: socket.socket
    view: View | None

    def accuse(self, accusation: Accusation) -> None:
        """Ends an iteration because of this rank; from any thread."""

    def note_slow(self, slow: PacedRank) -> None:
        """Notes that the rank has become slow, has been so for long, or has ceased to be."""


@dataclasses.dataclass(eq=False)
class _Watched:
    """A rank of the node.

    Args:
        rank: the rank.
        pings: how often it had pinged.
        at: when it pinged last.
        slices: of its main thread, and since when these are known.
        suspect: the evidence; None while the node is not suspected.
        is_asked: whether an answer is due.
        asked_at: when it was last asked.
        worked: seconds that it took for a step until it waited for other ranks, without a reason.
        slept: seconds that it was asleep at a line of the user's code, and which.
        accused_at: when it was accused; None before.
        accusation: what was said then.
        paced: how its steps go.
    """

    rank: WatchedRank
    pings: int = 0
    at: float = 0.0
    slices: tuple[tuple[int, int], float] = ((0, 0), 0.0)
    suspect: Suspect | None = None
    is_asked: bool = False
    asked_at: float = 0.0
    worked: float = 0.0
    slept: tuple[float, str] = (0.0, "")
    accused_at: float | None = None
    accusation: str = ""

    def __post_init__(self) -> None:
        self.paced = PacedRank(self.rank.memory, self.rank.pid)

    def age(self, now: float) -> float:
        """Seconds since the last ping."""
        memory = self.rank.memory
        pings, at = memory.pings, memory.ping_stamp
        if pings != self.pings:
            self.pings, self.at = pings, at or now
        return now - self.at

    def still(self, now: float) -> float:
        """Seconds since it was last seen to move."""
        return now - self.at if self.suspect is None else self.suspect.still(now)

    def note_slices(self, now: float) -> None:
        """Notes whether the main thread has run since it was last asked."""
        with contextlib.suppress(OSError):
            if (seen := slices(self.rank.pid)) != self.slices[0]:
                self.slices = seen, now

    def ask(self, now: float, question: bytes = WHERE, every: float = _ASK_EVERY) -> None:
        """Hears an answer, if there is one, and asks again."""
        self.hear(now)
        if not self.is_asked and now - self.asked_at >= every:
            self.is_asked, self.asked_at = True, now if question == WHERE else self.asked_at
            with contextlib.suppress(OSError):  # the rank leaves its call
                self.rank.questions.send(question, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def hear(self, now: float) -> None:
        """Hears an answer, if there is one."""
        with contextlib.suppress(OSError):
            if not (said := self.rank.questions.recv(_LONGEST_ANSWER, socket.MSG_DONTWAIT)):
                return  # the rank leaves its call
            fields, self.is_asked = json.loads(said), False
            if fields and "steps" in fields:
                fields["steps"] = {int(n): (*seconds,) for n, seconds in fields["steps"].items()}
                self.paced.heard(StepTimings(**fields), now)
                return
            if fields:
                fields["inside"] = fields["inside"] and (*fields["inside"],)
            answer = Whereabouts(**fields) if fields else None
            if self.suspect is not None:
                self.suspect.heard(answer, now)
            elif answer is not None:
                self.paced.stands(answer)

    def begin(self, now: float) -> Suspect:
        """Begins a suspicion."""
        self.note_slices(now)
        self.suspect, self.worked, self.slept = None, 0.0, (0.0, "")
        self.ask(now)  # what it hears is old
        self.suspect = Suspect(now, self.slices[1])
        return self.suspect

    def look(self, now: float) -> None:
        """Looks at the process, and asks."""
        suspect = self.suspect or self.begin(now)
        self.ask(now)
        answer = suspect.answer
        with contextlib.suppress(OSError):  # it has ended
            suspect.seen(look_at(self.rank.pid, now, answer.thread if answer else 0), now)
        suspect.worker(bool(answer and answer.worker and is_lost(answer.worker)), now)

    def kind(self, now: float, hold: Hold) -> Kind:
        """What it is doing."""
        memory, suspect = self.rank.memory, self.suspect
        if memory.phase == Phase.IDLE:
            return Kind.WAITS  # for the end of the iteration, or in the wrapper
        kind = Kind.UNKNOWN if suspect is None else suspect.kind(now, hold)
        if kind in (Kind.STUCK, Kind.BUSY, Kind.UNKNOWN) and memory.votes > memory.votes_ended:
            return Kind.WAITS
        return kind

    def waits_in(self) -> Wait | None:
        """What it waits in, if that has a number."""
        memory = self.rank.memory
        if memory.phase == Phase.IDLE:
            return END, 1
        if memory.votes > memory.votes_ended:
            return VOTE, memory.votes
        return self.answer.inside if self.answer else None

    @property
    def answer(self) -> Whereabouts | None:
        """Where it said last that it stands."""
        return self.suspect.answer if self.suspect else None

    @property
    def place(self) -> str:
        """The line of the user's code where it stands; empty if it cannot say."""
        return self.answer.place if self.answer else ""

    def begun(self) -> Mapping[str, int] | None:
        """The highest number that it has begun, by what it waits in; None if it cannot say."""
        return {**self.answer.begun, VOTE: self.rank.memory.votes} if self.answer else None


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
        self._exchange_at, self._exchanged_in = 0.0, -1
        self._ranks: dict[WatchedRank, _Watched] = {}
        self._wanted = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._store: Operations | None = None
        self._n = -1  # the iteration that is watched
        self._counted: tuple[int, float] = (0, 0.0)  # pings of the first rank, and when it last pinged
        self._suspected_at: float | None = None
        self._accused_in = -1  # iteration
        self._claimed: Claim | None = None
        self._read_at = 0.0
        self._compiled_at = -math.inf
        self._compiles = self._has_all = False
        self._oldest = 0.0  # seconds since the oldest last ping, when that was read
        self._alarms: dict[str, int | None] = {}  # places, and at which step

    def add(self, rank: WatchedRank) -> None:
        """Begins to watch a rank."""
        with self._wanted:
            self._ranks = {**self._ranks, rank: _Watched(rank)}
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
        if self._store is not None:
            self._store.close()

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

    def _turn(self, watched: list[_Watched], now: float) -> float:
        """Looks once; returns the seconds until the next time."""
        if accused := [one for one in watched if one.accused_at is not None]:
            self._press(accused, now)
            return 2 * _FIRST_GAP
        if (
            not watched
            or not self._is_watchable(watched)
            or self._accused_in == watched[0].rank.memory.iteration
        ):
            self._forget(learns=False)
            return _IDLE
        self._follow(watched[0])
        self._oldest = oldest = max(one.age(now) for one in watched)
        self._learn(watched[0].rank.memory)
        self._has_all = len(watched) == watched[0].rank.memory.active_world_size
        threshold = self.steps.suspect_after if self.steps.median else _UNKNOWN_AFTER
        if oldest < threshold:
            self._forget(learns=True)
            self._excuse(False)
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
        self._judge(watched, now)
        return min(max(_FIRST_GAP, (now - self._suspected_at) / 20), _MOST_GAP)

    def _find_slow(self, watched: Collection[_Watched], now: float) -> None:
        """Follows the ranks' steps, and says which of them are slow."""
        of = {one.paced: one for one in watched}
        for one in watched:
            one.hear(now)

        def ask(question: bytes) -> None:
            for one in watched:
                one.ask(now, question, every=0.0)

        self._exchange(watched, now)
        for paced in self._slow.turn([*of], self._n, self.steps.median, now, ask):
            of[paced].rank.note_slow(paced)

    @staticmethod
    def _is_watchable(watched: Collection[_Watched]) -> bool:
        """Whether all active ranks of the node are in the function of one iteration, past its begin."""
        memories = [one.rank.memory for one in watched]
        return len({memory.iteration for memory in memories}) == 1 and all(
            memory.pings and not memory.leave_stamp and not memory.hang_protection_disabled
            for memory in memories
        )

    def _follow(self, first: _Watched) -> None:
        """Notes a new iteration."""
        n = first.rank.memory.iteration
        if n == self._n:
            return
        self._claimed, self._compiles, self._compiled_at = None, False, -math.inf  # all of the last iteration
        self._forget(learns=False)
        # Not only on the node that ended it: the other nodes' ranks had waited almost as long.
        if self._oldest >= first.rank.limits.soft * self.steps.patience / 2:
            self.steps.patience *= 2
        self._n, self._counted = n, (0, 0.0)

    def _learn(self, memory: RankMemory) -> None:
        pings, at = memory.pings, memory.ping_stamp
        last, since = self._counted
        if (step := memory.step) is not None:
            self.steps.went_on(memory.first_step, step)
        if at and pings != last:
            if 0 < last < pings:
                self.steps.passed(pings - last, at - since)
            self._counted = pings, at

    def _forget(self, *, learns: bool) -> None:
        """Ends a suspicion that was none."""
        if self._suspected_at is None:
            return
        # First: what is claimed must not stay in the store, so a failure leaves it to the next turn.
        self._claim(None)
        self._suspected_at = None
        with self._wanted:
            watched = list(self._ranks.values())
        for one in watched:
            suspect, one.suspect = one.suspect, None
            if learns and suspect is not None:
                self.steps.stretch(one.worked)
                self.steps.slept(*one.slept)

    # ---- a suspicion

    def _judge(self, watched: list[_Watched], now: float) -> None:
        """Decides whether the job hangs because of ranks of this node."""
        kinds = {one: one.kind(now, self._hold(one)) for one in watched}
        if any(kind is Kind.COMPILES and one.still(now) < _COMPILES_FOR for one, kind in kinds.items()):
            self._compiled_at = now
        self._excuse(now - self._compiled_at < _COMPILES_FOR)
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
            self._claim(None)
            return
        if self._suspected_at is None or now - self._suspected_at < _CLAIM_AFTER:
            return
        still = min(one.suspect.still(now) for one in watched if one.suspect)
        moves = (
            any(one.suspect.sends for one in watched if one.suspect) or still < self._hold(watched[0]).stuck
        )
        by_rank = [(one.rank.memory.active_rank, one.waits_in()) for one in wait]
        claim = evidence.claim_of(by_rank, len(watched), _MOST_WAITS, moves)
        self._claim(claim)
        if not hang and (moves or all(rank for rank, _ in by_rank)):
            return  # another node decides
        active = watched[0].rank.memory.active_world_size
        claims = [claim] if self._has_all else self._claims(now)
        waits = evidence.all_waits(claims, active)
        if waits is None:
            return
        guilty = [one for one in hang if evidence.is_behind(one.begun(), waits)]
        for one in guilty:
            self._accuse(one, kinds[one], f"did not come to {_words(waits, wait)}", now)
        if not hang and not any(one.moves for one in claims):
            self._judge_waits(watched, waits, active, now)

    def _judge_waits(
        self, watched: list[_Watched], waits: Mapping[Wait, WaitingRanks], active: int, now: float
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

    def _hold(self, one: _Watched) -> Hold:
        """How long a rank has to be still until it counts: longer at a line where it may sleep."""
        memory = one.rank.memory
        hold = evidence.LIVE if memory.votes else evidence.PLAIN
        # Not at an unknown line: what holds the GIL there is not always the same.
        stuck = max(hold.stuck, self.steps.places.get(one.place, 0.0) if one.place else 0.0)
        # Once more at the same step: it sleeps there each time.
        if evidence.comes_again(self._alarms, one.place, memory.step, memory.pings):
            stuck = max(stuck, one.rank.limits.soft)
        return hold._replace(stuck=stuck)

    def _hangs(self, one: _Watched, kind: Kind, now: float) -> bool:
        if kind in _SLOW:
            starved = one.suspect.starved if one.suspect else 0.0
            return bool(one.rank.memory.votes) and one.age(now) - starved > self.steps.limit(one.place)
        return kind in (Kind.STUCK, Kind.STOPPED)

    # ---- a verdict

    def _accuse(self, one: _Watched, kind: Kind, what: str, now: float) -> None:
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
        elif answer and answer.worker:
            does = f"waiting for its loader's worker {answer.worker}, which is stopped or dead,"
        if kind in _SLOW:
            self.steps.alarm(one.place, memory.step)
        elif kind is Kind.STUCK and answer:
            self._alarms[one.place] = memory.step
        one.accused_at = now
        one.accusation = f"{what}: {does} for {seconds}; steps take {duration(self.steps.median)}"
        holds_gil = answer is None and kind is not Kind.STOPPED
        self._end(one, Accusation(self._n, one.accusation, kind is Kind.STOPPED, holds_gil))

    def _end(self, one: _Watched, accusation: Accusation) -> None:
        self._accused_in = self._n
        one.rank.memory.is_accused = accusation.of == _ITSELF
        one.rank.accuse(accusation)

    def _press(self, accused: Collection[_Watched], now: float) -> None:
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

    # ---- what nodes say to each other

    def _claim(self, claim: Claim | None) -> None:
        """Says what this node's active ranks wait in; None: they do not all wait or hang."""
        if claim == self._claimed:
            return
        if not self._has_all:
            value = "" if claim is None else claim.to_json()
            steps: list[Step] = [Write({keys.claim(self._n, self.name): value})]
            if self._claimed is None:
                steps.append(Append(keys.claims(self._n), self.name))
            self._open().execute(steps)
        self._claimed = claim

    def _excuse(self, compiles: bool) -> None:
        """Says whether a rank of this node compiles."""
        if compiles is not self._compiles:
            self._open().execute([Write({keys.excuse(self._n): "compiling" if compiles else ""})])
            self._compiles = compiles

    def _claims(self, now: float) -> list[Claim]:
        """What all nodes say now; nothing if they were asked a moment ago."""
        if now - self._read_at < _ASK_EVERY:
            return []
        self._read_at = now
        store = self._open()
        names = sorted(set(read_log(store, keys.claims(self._n))))
        said = store.execute([Read(keys.claim(self._n, name)) for name in names])
        return [Claim.from_json(one) for one in said if one]

    def _exchange(self, watched: Collection[_Watched], now: float) -> None:
        """Says how late this node's ranks are, and reads how late ranks of the job usually are."""
        memories, pace = [one.rank.memory for one in watched], self._slow.pace
        if pace is None or now < self._exchange_at or len(watched) == memories[0].active_world_size:
            return
        self._exchange_at = now + _EXCHANGE_EVERY
        store, n = self._open(), self._n
        steps: list[Step] = [Write({keys.pace(n, self.name): pace.to_json()})]
        if self._exchanged_in != n:
            self._exchanged_in = n
            steps.append(Append(keys.paces(n), self.name))
        *_, usual = store.execute([*steps, Read(keys.pace(n))])
        if usual:
            self._slow.heard(Pace.from_json(usual))
        if any(memory.active_rank == 0 for memory in memories):
            names = read_log(store, keys.paces(n))
            said = store.execute([Read(keys.pace(n, name)) for name in names])
            job = usual_pace(Pace.from_json(one) for one in said if one)
            store.execute([Write({keys.pace(n): job.to_json()})])

    def _open(self) -> Operations:
        if self._store is None:
            self._store = self.connect()
            self._store.patience = _PATIENCE
        return self._store


def _words(waits: Mapping[Wait, WaitingRanks], waiting: Collection[_Watched]) -> str:
    """Describes what most of the waiting ranks wait in."""
    what, number = max(waits, key=lambda one: waits[one].ranks)
    if what == VOTE:
        return "the vote of live state"
    if what == END:
        return "the end of the function"
    said = (one.answer.waits for one in waiting if one.answer and one.waits_in() == (what, number))
    known = next(said, "")
    return known or (f"collective #{number} of group {what}" if what else "an operation of all ranks")
