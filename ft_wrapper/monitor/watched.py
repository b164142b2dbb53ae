"""A rank that is watched for hangs: its pings, what was seen of it, what it said."""

import contextlib
import dataclasses
import json
import socket
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ..protocol.records import View
from ..settings import AllLimits
from .evidence import (
    END,
    VOTE,
    WHERE,
    Hold,
    Kind,
    StepTimings,
    Suspect,
    Wait,
    Whereabouts,
)
from .look import is_lost, look_at, slices
from .shared_memory import Phase, RankMemory
from .slow import PacedRank

_ASK_EVERY = 0.2  # seconds
ITSELF = -1
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
    of: int | None = ITSELF


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
class Watched:
    """A rank of the node.

    Args:
        rank: the rank.
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
        self.at = self.rank.memory.ping_stamp or now
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
        suspect.process(bool(answer and answer.process and is_lost(answer.process)), now)

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
