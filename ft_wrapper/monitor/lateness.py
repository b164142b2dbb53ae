"""The score that names slow ranks: from numbers alone.

A rank's *run-up* to a step is the time from the end of its vote, or from its ping, to its first collective
after that. In it a rank waits for no other rank, so a long one names the rank itself; a slow link makes its
victim late only at later collectives. Run-ups are durations, so hosts need no common clock.

Of 30 steps the longest run-up does not count, or a single stall would be a slow rank. On a machine that did
not have enough processors the thresholds named no rank of 6,871 clean steps.
"""

import collections
import enum
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

WINDOW = 30  # steps
HOLD = 3.0  # seconds
# Of a step. Steady: mean excess, and by how much it is behind in most steps. Bursts: the same, and two steps.
STEADY, _BEHIND = 0.08, 0.05
_BURSTS, _FAR = 0.10, 0.5
_MOST, _FEW = 0.7, 0.3  # of the steps, or of the windows
STARVED = 0.25  # of the time


class Cause(enum.StrEnum):
    """Why a rank is slow, for people."""

    THROTTLED = "throttled by its cgroup's quota"
    STOPPED = "stopped by signals again and again"
    WORKS = "runs more than other ranks: garbage collection, or work of its own"
    PROCESSOR = "waits for a processor"
    LOADER = "waits for its data loader, or another process of its own"
    LINK = "late at the vote alone: the link into it is slow, or the link out of a rank before it"
    ASLEEP = "asleep: I/O, or a device"


class Signs(NamedTuple):
    """What a rank's main thread did, as shares of the time.

    Args:
        run: it ran.
        waited: it waited for a processor.
        throttled: its cgroup was throttled.
        stopped: it was stopped by a signal.
        loader: it waited for a loader's worker, or another process of its own.
        own: it did not wait for other ranks.
    """

    run: float = 0.0
    waited: float = 0.0
    throttled: float = 0.0
    stopped: float = 0.0
    loader: float = 0.0
    own: float = 0.0


def lower_median(values: Iterable[float]) -> float:
    """The median; of an even number, the lower one of the two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def typical(signs: Iterable[Signs]) -> Signs:
    """The median of each sign."""
    return Signs(*map(lower_median, zip(*signs, strict=True)))


def cause_of(mine: Signs, usual: Signs, excess: float) -> Cause:
    """Why a rank is slow.

    Args:
        mine: of this rank.
        usual: of a typical rank.
        excess: what the rank costs each step, as a share of it.
    """
    more = Signs(*(own - other for own, other in zip(mine, usual, strict=True)))
    if more.throttled > excess / 2:
        return Cause.THROTTLED
    if more.stopped > min(excess / 3, _BEHIND):
        return Cause.STOPPED
    if more.loader > excess / 3:
        return Cause.LOADER
    if more.run > excess / 4:  # what runs more also waits more for a processor
        return Cause.WORKS
    if more.waited > excess / 2:
        return Cause.PROCESSOR
    return Cause.ASLEEP


class Pace(NamedTuple):
    """What ranks usually do, on a node or in the whole job.

    Args:
        run_up: seconds to the first collective.
        signs: what they do meanwhile.
    """

    run_up: float
    signs: Signs

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> "Pace":
        """Reads `to_json`."""
        run_up, signs = json.loads(text)
        return cls(run_up, Signs(*signs))


def usual_pace(paces: Iterable[Pace]) -> Pace:
    """The median of each field."""
    paces = list(paces)
    return Pace(lower_median(one.run_up for one in paces), typical(one.signs for one in paces))


def named_from(*, is_slow: bool) -> float:
    """From which share of a step on a rank counts as slow; less if it does already."""
    return STEADY / 2 if is_slow else STEADY


def judge_rank(
    late: float | None, at_vote: float | None, mine: Signs, usual: Signs, *, is_slow: bool
) -> tuple[float, Cause] | None:
    """What a rank costs each step, as a share of it, and why; None if it is not slow.

    A rank that is kept from running is slow whenever it would run. The first collective alone missed a third
    of such ranks, whose run-ups were short. A rank that is late at the vote alone, and has only waited for
    data meanwhile, is a link's victim.

    Args:
        late: the excess at the first collective, of a rank that `Lateness` names; otherwise None.
        at_vote: the same at the vote.
        mine: of this rank.
        usual: of a typical rank.
        is_slow: whether it was slow until now.
    """
    more = [own - other for own, other in zip(mine, usual, strict=True)]
    held = max(mine.throttled - usual.throttled, mine.stopped - usual.stopped)
    if late is not None or held > named_from(is_slow=is_slow):
        share = max(late or 0.0, held)
        return share, cause_of(mine, usual, share)
    return (at_vote, Cause.LINK) if at_vote is not None and max(more) < at_vote / 2 else None


class Lateness:
    """How late each of some ranks is.

    Attributes:
        named: the ranks that are slow, each with its excess.
        usual: the mean of the typical rank's run-ups, in seconds; None before 30 steps.
    """

    def __init__(self) -> None:
        self.named: dict[int, float] = {}
        self.usual: float | None = None
        self._bases: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._late: collections.deque[Mapping[int, float]] = collections.deque(maxlen=WINDOW)
        self._windows: collections.deque[tuple[float, dict[int, float], set[int]]] = collections.deque()

    def step(self, run_ups: Mapping[int, float], step: float, now: float) -> None:
        """Notes a step.

        Args:
            run_ups: seconds, by rank; of the same ranks each time.
            step: what a step takes, in seconds.
            now: monotonic seconds.
        """
        base = lower_median(run_ups.values())
        self._bases.append(base)
        self._late.append({rank: max(0.0, one - base) / step for rank, one in run_ups.items()})
        if len(self._late) < WINDOW:
            return
        self.usual = (sum(self._bases) - max(self._bases)) / (WINDOW - 1)
        late = {rank: [one[rank] for one in self._late] for rank in run_ups}
        means = {rank: (sum(own) - max(own)) / (WINDOW - 1) for rank, own in late.items()}
        base = lower_median(means.values())
        excess = {rank: mean - base for rank, mean in means.items()}
        self._windows.append((now, excess, {one for one in late if _is_slow(excess[one], late[one])}))
        while len(self._windows) > WINDOW and self._windows[1][0] <= now - HOLD:
            self._windows.popleft()
        if len(self._windows) < WINDOW or self._windows[0][0] > now - HOLD:
            return
        self.named = {rank: self.excess(rank) for rank in run_ups if self._holds(rank)}

    def excess(self, rank: int) -> float:
        """What a rank cost each of the last 30 steps, as a share of it."""
        return max(0.0, self._windows[-1][1][rank]) if self._windows else 0.0

    def _holds(self, rank: int) -> bool:
        share = sum(rank in slow for _, _, slow in self._windows) / len(self._windows)
        return share >= (_FEW if rank in self.named else _MOST)


def _is_slow(excess: float, late: list[float]) -> bool:
    is_steady = excess > STEADY and sum(one > _BEHIND for one in late) >= _MOST * len(late)
    return is_steady or (excess > _BURSTS and sum(one > _FAR for one in late) >= 2)
