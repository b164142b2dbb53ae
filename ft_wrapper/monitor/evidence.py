"""The evidence about ranks under suspicion, which proves that the job hangs because of one. Pure.

A rank is *suspected* once a step takes four times as long as most steps do. Then it is looked at from outside
(`look`), and asked where it stands (`Whereabouts`). A hang is proved if all ranks wait, except for some that
are stuck, stopped, or busy for too long, and that have not begun what the waiting ranks wait in.

A collective that has begun and not ended shows that a rank waits: from outside it cannot be told from a lock.
"""

import collections
import dataclasses
import enum
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .._text import duration

SUSPECT_AFTER = 0.15  # seconds, at least
_STEPS = 4  # median steps until a rank is suspected
_ENOUGH = 5  # measured steps before any rank is
_REMEMBERED = 200
_HALVES_AFTER = 2000  # stretches until the longest one counts half
_LOOKS = 0.1  # seconds without movement until a rank counts as asleep
_ANSWERS_WITHIN = 0.5  # seconds
_WORKS = 0.05  # share of a look's time that other threads or children run
_SENDS = 0.02  # the same of gloo's thread
_COPIES = 1 << 20  # bytes to or from files between two looks
_FILE_FOR = 1.0  # seconds that this counts
_SECONDS = 1e-9

Wait = tuple[str, int]
"""What a rank waits in: a group's name, ``vote`` or ``end``; and the number of the operation in it."""
VOTE, END = "vote", "end"


class Kind(enum.Enum):
    """What a suspected rank is doing."""

    UNKNOWN = "not known yet"
    STOPPED = "stopped by a signal"
    TRACED = "held by a debugger"
    FILE = "working on a file"
    COMPILES = "compiling"
    PROCESS = "waiting for a process of its own that lives"
    BUSY = "busy"
    NO_GIL = "busy with the GIL held"
    WAITS = "waiting for other ranks"
    STUCK = "asleep"


#: Ranks of these kinds have a reason, so only timeouts end them; and what they take is not learned.
EXPLAINED = (Kind.TRACED, Kind.FILE, Kind.COMPILES, Kind.PROCESS)
#: The questions to a rank: where the function's thread stands, and how its last steps went. The third says
#: that it is slow, and gets no answer.
WHERE, STEPS, IS_SLOW = b"?", b"s", b"!"
_STILL = (Kind.STUCK, Kind.STOPPED)


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """Where the function's thread of a rank stands, as another thread of the rank sees it.

    Args:
        thread: the thread that answers, by its native id.
        place: the innermost line of the user's code.
        words: the innermost function, and that line.
        waits: the operation with other ranks that it is in; empty if it is in none.
        inside: what it waits in; None if that has no number.
        on_device: whether the operation runs on a device, so that the thread may do something else.
        begun: the highest number that has begun, by what it waits in.
        compiles: whether it compiles code.
        process: what it waits for: a loader's worker, or a program that it has started; 0 for none.
    """

    thread: int = 0
    place: str = ""
    words: str = ""
    waits: str = ""
    inside: Wait | None = None
    on_device: bool = False
    begun: Mapping[str, int] = dataclasses.field(default_factory=dict)
    compiles: bool = False
    process: int = 0


@dataclasses.dataclass(frozen=True)
class StepTimings:
    """What a rank knows of its last steps.

    Args:
        steps: by number, seconds from the begin of each step to the first collective, and of the vote before.
        step: what a step takes, in seconds; 0.0 if that is not known.
        collectives: how many a step has.
    """

    steps: Mapping[int, tuple[float, float]]
    step: float
    collectives: float


class Look(NamedTuple):
    """One look at a process. Times are in nanoseconds.

    Args:
        at: when it was made.
        state: of the main thread, as ``/proc`` has it; ``F``: frozen.
        run: how long the main thread has run.
        waited: how long it has waited for a processor.
        slices: how often it got one.
        elsewhere: how long other threads and descendants have run.
        transport: how long gloo's thread has run.
        copied: bytes that it has read and written by files' calls.
        are_others_ready: whether another thread or descendant runs, or waits for a processor or a disk.
        is_in_file: whether the main thread is in a call that works on files.
        ends_soon: whether it is in a call that ends by a timeout.
    """

    at: int
    state: str
    run: int
    waited: int
    slices: int
    elsewhere: int
    transport: int
    copied: int
    are_others_ready: bool
    is_in_file: bool
    ends_soon: bool


class Hold(NamedTuple):
    """How long a rank has to be still until it counts.

    Args:
        stuck: seconds asleep.
        stopped: seconds stopped by a signal.
    """

    stuck: float
    stopped: float


LIVE = Hold(0.8, 0.3)  # a wrong alarm costs a tenth of a second
PLAIN = Hold(5.0, 2.0)  # it costs the steps since the last checkpoint


class Suspect:
    """The evidence about one rank since it was suspected.

    Args:
        since: monotonic seconds.
        still_since: since when it is known not to have moved; at most ``since``.
    """

    def __init__(self, since: float, still_since: float) -> None:
        self._since, self._moved_at, self._heard_at = since, still_since, since
        self._stopped_at: float | None = None
        self._copied_at = -math.inf
        self._first: Look | None = None
        self._last: Look | None = None
        self._answers: collections.deque[Whereabouts] = collections.deque(maxlen=2)
        self._sends = self._failed = False
        self.starved = 0.0
        self._process_lost_at: float | None = None

    @property
    def answer(self) -> Whereabouts | None:
        """The last answer."""
        return self._answers[-1] if self._answers else None

    @property
    def sends(self) -> bool:
        """Whether gloo moved data between the last two looks."""
        return self._sends

    def heard(self, answer: Whereabouts | None, now: float) -> None:
        """Notes an answer; None if the rank has failed to say where it stands."""
        self._heard_at = now
        self._failed = answer is None
        if answer is not None:
            self._answers.append(answer)

    def process(self, is_lost: bool, now: float) -> None:
        """Notes whether the process that it waits for is stopped, or has ended.

        One that has just ended may have sent what the rank waits for.
        """
        self._process_lost_at = (self._process_lost_at or now) if is_lost else None

    def seen(self, seen: Look, now: float) -> None:
        """Notes a look."""
        last, self._last = self._last, seen
        if seen.state in "RD" or seen.is_in_file:
            self._moved_at = now
        if self._first is None or last is None:
            self._first = seen
            return
        self.starved = (seen.waited - self._first.waited) * _SECONDS
        took = max(1, seen.at - last.at)
        if seen.copied - last.copied > _COPIES:
            self._copied_at = now
        self._sends = seen.transport - last.transport > _SENDS * took
        if seen.state in "TtF":
            self._stopped_at = self._stopped_at or now
            return
        self._stopped_at = None
        if (
            (seen.run, seen.waited, seen.slices) != (last.run, last.waited, last.slices)
            or seen.elsewhere - last.elsewhere > _WORKS * took
            or (seen.are_others_ready and last.are_others_ready)
        ):
            self._moved_at = now

    def still(self, now: float) -> float:
        """Seconds since it was last seen to move."""
        return now - (self._moved_at if self._stopped_at is None else self._stopped_at)

    def kind(self, now: float, hold: Hold) -> Kind:
        """What it is doing, as far as that is known."""
        last, answer = self._last, self.answer
        if last is None:
            return Kind.UNKNOWN
        if last.state == "t":
            return Kind.TRACED
        if self._stopped_at is not None:
            return Kind.STOPPED if self.still(now) >= hold.stopped else Kind.UNKNOWN
        if self._failed:
            return Kind.UNKNOWN
        still = self.still(now)
        if answer is None or now - self._heard_at > _ANSWERS_WITHIN:
            if now - self._since < _ANSWERS_WITHIN:
                return Kind.UNKNOWN
            if still < _LOOKS:
                return Kind.NO_GIL
            return Kind.STUCK if still >= hold.stuck else Kind.UNKNOWN
        if answer.inside and answer.on_device and len(self._answers) > 1:
            is_same = all(one.inside == answer.inside for one in self._answers)
            return Kind.WAITS if is_same else Kind.UNKNOWN
        if answer.compiles:  # first: a compiler may be another process
            return Kind.COMPILES
        if answer.process:
            lost_at = now if self._process_lost_at is None else self._process_lost_at
            return Kind.STUCK if now - lost_at >= hold.stopped else Kind.PROCESS
        if last.is_in_file or now - self._copied_at < _FILE_FOR:
            return Kind.FILE
        if still < _LOOKS:
            return Kind.BUSY
        if answer.waits:
            return Kind.WAITS
        if last.ends_soon:
            return Kind.BUSY  # perhaps in a loop of such waits
        return Kind.STUCK if still >= hold.stuck and len(self._answers) > 1 else Kind.UNKNOWN


@dataclasses.dataclass
class StepTimes:
    """What a node knows of its ranks' steps: when to suspect a rank, and how long it may be busy.

    A *stretch* lies between two pings. The limit is ``max(2 L, 30 medians) + 1 s``, where L is the longest
    stretch, which loses half of its weight in 2000 stretches. It gave no false alarm in simulations of 20,000
    steps with evaluations and checkpoints.

    Attributes:
        longest: L, in seconds.
        patience: by how much the timeouts of `MainLimits` have grown.
        places: seconds that a rank may spend at a line of the user's code; "" for an unknown one.
    """

    longest: float = 0.0
    patience: float = 1.0
    _timed_out: tuple[int, float, float] | None = None
    places: dict[str, float] = dataclasses.field(default_factory=dict)
    _alarms: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)
    _steps: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_REMEMBERED)
    )

    @property
    def median(self) -> float:
        """The median step in seconds; 0.0 while too few are known."""
        return statistics.median(self._steps) if len(self._steps) >= _ENOUGH else 0.0

    @property
    def suspect_after(self) -> float:
        """Seconds since its last ping after which a rank is suspected."""
        return max(_STEPS * self.median, SUSPECT_AFTER)

    def limit(self, place: str = "") -> float:
        """Seconds that a rank may be busy at a line while other ranks wait for it."""
        return max(2 * self.longest, 30 * self.median, self.places.get(place, 0.0)) + 1.0

    def words(self, *, is_live: bool) -> str:
        """Describes what is known; busy ranks have a limit only with live state."""
        busy = f"; a rank that is busy for {duration(self.limit())} hangs" if is_live else ""
        return f"steps take {duration(self.median)}{busy}"

    def passed(self, stretches: int, seconds: float) -> None:
        """Learns from the time that some stretches took together."""
        self._steps.append(seconds / stretches)
        fades = 0.5 ** (stretches / _HALVES_AFTER)
        self.longest *= fades
        self.places = {place: seconds * fades for place, seconds in self.places.items()}

    def stretch(self, seconds: float) -> None:
        """Learns from one long stretch, which has ended by itself."""
        self.longest = max(self.longest, seconds)

    def slept(self, seconds: float, place: str) -> None:
        """Learns that a rank may sleep at a line."""
        if place:
            self.places[place] = max(self.places.get(place, 0.0), 2 * seconds)

    def alarm(self, place: str, step: int | None) -> None:
        """Notes that the limit ended an iteration: or what takes longer would never get through.

        Args:
            place: the line where the rank was.
            step: the step that took too long.
        """
        if step is not None:
            self._alarms[place] = step, self.places.get(place, 0.0)
        self.places[place] = 2 * self.limit(place)

    def timed_out(self, step: int | None, seconds: float) -> None:
        """The same for a timeout of so many seconds, which doubles."""
        self._timed_out = None if step is None else (step, seconds, self.patience)
        self.patience *= 2

    def went_on(self, first: int, step: int, longest: float) -> None:
        """Forgets alarms that were right: their steps were done again, and took no longer than others.

        Args:
            first: the first step of the iteration.
            step: the step that the rank has come to.
            longest: seconds of the longest stretch in the iteration, with and without a reason.
        """
        for place, (at, before) in list(self._alarms.items()):
            if first <= at < step:
                del self._alarms[place]
                if 2 * self.longest < self.places[place]:
                    self.places[place] = before
        if self._timed_out is not None and first <= self._timed_out[0] < step:
            _, seconds, before = self._timed_out
            self._timed_out = None
            if 2 * longest < seconds:
                self.patience = before


class WaitingRanks(NamedTuple):
    """Ranks that wait in the same.

    Args:
        ranks: how many.
        first: the lowest of them, among the active ranks.
    """

    ranks: int
    first: int


class Claim(NamedTuple):
    """What one node says of its active ranks while each of them waits or hangs.

    Args:
        ranks: how many there are.
        waits: what those that wait wait in.
        moves: whether some rank has moved, or moved data, lately.
    """

    ranks: int
    waits: Mapping[Wait, WaitingRanks]
    moves: bool

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps([self.ranks, [[*wait, *how] for wait, how in self.waits.items()], self.moves])

    @classmethod
    def from_json(cls, text: str) -> "Claim":
        """Reads `to_json`."""
        ranks, waits, moves = json.loads(text)
        return cls(ranks, {(what, number): WaitingRanks(*how) for what, number, *how in waits}, moves)


def claim_of(waits: Iterable[tuple[int, Wait | None]], ranks: int, most: int, moves: bool) -> Claim:
    """What a node says.

    Args:
        waits: its waiting ranks, by number among the active ones, each with what it waits in.
        ranks: how many active ranks it has, all of which wait or hang.
        most: how many different waits are said; the most frequent ones.
        moves: whether some rank has moved, or moved data, lately.
    """
    found = _together([{wait or ("", 0): WaitingRanks(1, rank)} for rank, wait in waits])
    often = sorted(found.items(), key=lambda one: -one[1].ranks)[:most]
    return Claim(ranks, dict(often), moves)


def all_waits(claims: Iterable[Claim], active: int) -> dict[Wait, WaitingRanks] | None:
    """What the waiting ranks of the job wait in; None unless all active ranks wait or hang.

    Args:
        claims: of all nodes that say something.
        active: how many active ranks there are.
    """
    claims = list(claims)
    if sum(claim.ranks for claim in claims) != active:
        return None
    return _together([claim.waits for claim in claims])


def _together(parts: Iterable[Mapping[Wait, WaitingRanks]]) -> dict[Wait, WaitingRanks]:
    found: dict[Wait, WaitingRanks] = {}
    for part in parts:
        for wait, how in part.items():
            known = found.get(wait, WaitingRanks(0, how.first))
            found[wait] = WaitingRanks(known.ranks + how.ranks, min(known.first, how.first))
    return found


def comes_again(alarms: Mapping[str, int | None], place: str, step: int | None, pings: int) -> bool:
    """Whether a rank is asleep at a line again in the step in which that was an alarm before.

    Args:
        alarms: by line, the step of the last alarm; None if steps have no numbers.
        place: the line.
        step: the step that the rank is in.
        pings: how often it has pinged in its iteration: without numbers, its first step is done again.
    """
    if place not in alarms:
        return False
    return pings == 1 if alarms[place] is None else step == alarms[place]


def is_behind(begun: Mapping[str, int] | None, waits: Iterable[Wait]) -> bool:
    """Whether a rank that hangs has not begun what others wait in; without numbers, whether any rank waits.

    Args:
        begun: the highest number that the rank has begun, by what; None if it cannot say.
        waits: what the waiting ranks wait in.
    """
    waits = list(waits)
    numbered = [one for one in waits if one[0]]
    if begun is None or not numbered:
        return bool(waits)
    return any(begun.get(what, 0) < number for what, number in numbered)


def odd_waits(waits: Mapping[Wait, WaitingRanks], active: int) -> Sequence[Wait]:
    """Where the minority waits, if all active ranks wait and more than half of them in one group.

    Args:
        waits: what they wait in.
        active: how many active ranks there are.
    """
    by_group: collections.Counter[str] = collections.Counter()
    for (what, _), how in waits.items():
        by_group[what] += how.ranks
    ((most, count),) = by_group.most_common(1) or [("", 0)]
    if not most or 2 * count <= active or by_group.total() < active:
        return ()
    return [one for one in waits if one[0] != most]
