"""The slow ranks of a node, found while all is well, for `hangs.HangWatch` in its thread.

Each rank answers how long it took to its first collective in each of its last steps; `lateness` decides.
What a rank does meanwhile is sampled from outside, and costs it nothing.
"""

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .evidence import STEPS, WHERE, StepTimings, Whereabouts
from .lateness import (
    HOLD,
    STARVED,
    STEADY,
    WINDOW,
    Cause,
    Lateness,
    Pace,
    Signs,
    judge_rank,
    named_from,
    typical,
)
from .look import is_held, processor_times, throttled_for
from .shared_memory import RankMemory

log = logging.getLogger(__name__)

_EVERY = 0.8  # seconds between two questions to a rank, at least: an answer takes it 0.3 to 1.6 ms
_LOOK = 1.0  # seconds of a closer look, before a rank is named
_LOOK_AGAIN = 10.0  # seconds
_GAP = 0.05  # seconds between two questions in it
_STEPS = 10  # between two questions
_REMEMBERED = 48  # collectives between two questions: flight recorder remembers 64
_PULSES = 3  # stops by a signal; fewer are somebody's who looks at the process
_KNOWN = 32  # collectives a step; of two steps flight recorder remembers all
_ENOUGH = 100  # steps before losses are said
_STEPS_UNTIL, _UNTIL = 100, 10.0  # of being slow until something is done about it


class SlowRank(NamedTuple):
    """How slow a rank is, and why.

    Args:
        share: what it costs each step, as a share of it.
        step: what a step takes, in seconds.
        cause: why.
        words: the line where it was most often seen; empty if that is not known.
        rank: its number in its iteration.
        slot: its rank at the start of the job.
        host: where it runs.
    """

    share: float
    step: float
    cause: str
    words: str = ""
    rank: int = -1
    slot: int = -1
    host: str = ""

    def __str__(self) -> str:
        """For people."""
        where = f", most often {self.words}" if self.words else ""
        cost = f"it costs {self.share * self.step * 1e3:.3g} ms of each step of {self.step * 1e3:.3g} ms"
        return f"{cost} ({self.share:.0%}): {Cause[self.cause.upper()].value}{where}"


class _Sample(NamedTuple):
    at: float
    run: int
    waited: int
    throttled: int


@dataclasses.dataclass(eq=False)
class PacedRank:
    """A rank of the node, and what it did lately.

    Args:
        memory: shared with the rank.
        pid: its process.
        slow: how slow it was when that was last said; None if it is not slow.
        since: since when it is slow, in monotonic seconds, and how many steps it has done since.
        cost: seconds that it has cost so far.
        is_lasting: whether it has been slow for long enough to do something about it.
    """

    memory: RankMemory
    pid: int
    slow: SlowRank | None = None
    since: tuple[float, int] = (0.0, 0)
    cost: float = 0.0
    is_lasting: bool = False

    def __post_init__(self) -> None:
        self.last: StepTimings | None = None
        self.steps: dict[int, tuple[float, float]] = {}
        self._samples: collections.deque[_Sample] = collections.deque()
        self._stops: collections.deque[tuple[float, bool]] = collections.deque()
        self._places: list[tuple[str, bool]] = []  # in a closer look: lines; and whether in the loader

    def heard(self, said: StepTimings, now: float) -> None:
        """Notes an answer."""
        self.last = said
        self.steps |= said.steps
        with contextlib.suppress(OSError):
            self._samples.append(_Sample(now, *processor_times(self.pid), throttled_for(self.pid)))

    def look(self, now: float, seconds: float) -> None:
        """Looks whether a signal has stopped it, and forgets what is older than some seconds."""
        self._stops.append((now, is_held(self.pid)))
        for seen in (self._samples, self._stops):
            while len(seen) > 2 and seen[0][0] < now - seconds:
                seen.popleft()

    def signs(self) -> Signs:
        """What it did lately."""
        if not self._samples or self._samples[-1].at - self._samples[0].at < HOLD / 2:
            return Signs()
        first, last = self._samples[0], self._samples[-1]
        took = (last.at - first.at) * 1e9
        run, waited, throttled = ((b - a) / took for a, b in zip(first[1:], last[1:], strict=True))
        stops = [each for _, each in self._stops]
        is_once = self.slow is None and sum(b and not a for a, b in itertools.pairwise(stops)) < _PULSES
        stopped = 0.0 if is_once else statistics.mean(stops)
        count = max(1, len(self._places))
        loader = sum(in_loader for _, in_loader in self._places) / count
        own = sum(bool(words) for words, _ in self._places) / count
        return Signs(run, waited, throttled, stopped, loader, own)

    def look_closer(self) -> None:
        """Forgets where it was seen in the last closer look."""
        self._places = []

    def stands(self, answer: Whereabouts) -> None:
        """Notes where it stands in a closer look."""
        waits = bool(answer.waits) or self.memory.votes > self.memory.votes_ended
        self._places.append(("" if waits else answer.words, bool(answer.process)))

    def goes_on(self, slow: SlowRank, steps: int, now: float) -> bool:
        """Notes that it was slow for some more steps; returns whether that is news."""
        begins = self.slow is None
        if begins:
            self.since, self.cost = (now, 0), 0.0
        self.cost += slow.share * slow.step * steps
        self.since = self.since[0], self.since[1] + steps
        is_long = self.since[1] >= _STEPS_UNTIL and now - self.since[0] >= _UNTIL
        lasts = is_long and not self.is_lasting and slow.cause != Cause.LINK.name.lower()
        self.is_lasting |= lasts
        if begins or lasts:
            often = collections.Counter(words for words, _ in self._places if words).most_common(1)
            self.slow = slow._replace(words=often[0][0] if often else "")
        return begins or lasts


class SlowRanks:
    """Which ranks of a node are slow in the present iteration.

    Attributes:
        due: when the ranks are to be asked next, in monotonic seconds.
    """

    def __init__(self) -> None:
        self.due = self._asks_at = 0.0
        self._looked_at = -math.inf
        self._n: tuple[int, int] = (-1, 0)  # the iteration, and how many active ranks the node has
        self._lateness = Lateness()
        self._has_said: set[str] = set()

    def turn(
        self, ranks: Sequence[PacedRank], n: int, step: float, now: float, ask: Callable[[bytes], None]
    ) -> Iterator[PacedRank]:
        """Compares what the ranks have answered, and asks them again when that is due.

        Args:
            ranks: the active ranks of the node.
            n: the iteration.
            step: seconds of a step, unless the ranks know better.
            now: monotonic seconds.
            ask: asks all of them a question.

        Yields:
            Ranks that have become slow, have been so for long, or have ceased to be slow.
        """
        if self._n != (n, len(ranks)):
            yield from self.end(ranks, now)
            self._n, self._last = (n, len(ranks)), 0
            self._lateness, self._at_vote = Lateness(), Lateness()
            self._compared, self._lost, self._signs, self._usual = 0, 0, Signs(), Pace(0.0, Signs())
            self._behind: collections.deque[float] = collections.deque(maxlen=2)
        answers = [one.last for one in ranks if one.last is not None]
        step = statistics.median([one.step for one in answers] or [0.0]) or step
        self._step = step
        for one in ranks:
            one.look(now, max(HOLD, WINDOW * step))
        yield from self._compare(ranks, step, now)
        is_looking = now - self._looked_at < _LOOK
        if now >= self._asks_at:
            each = max((one.collectives for one in answers), default=1.0)
            steps = min(_STEPS, max(1.0, _REMEMBERED // max(1.0, each)))
            # At random, or it would meet the ranks at the same place of each step.
            self._asks_at = now + max(_EVERY, steps * step * random.uniform(0.7, 1.0))
            ask(STEPS)
        elif is_looking:
            ask(WHERE)
        self.due = now + _GAP if is_looking else self._asks_at

    def end(self, ranks: Sequence[PacedRank], now: float) -> Iterator[PacedRank]:
        """Ends an iteration: no rank is known to be slow.

        Yields:
            Those that were slow.
        """
        for one in ranks:
            one.steps, one.last = {}, None
            if one.slow is not None:
                one.slow, one.is_lasting = None, False
                yield one

    @property
    def pace(self) -> Pace | None:
        """What the ranks of this node usually do; None before that is known."""
        return None if self._lateness.usual is None else Pace(self._lateness.usual, self._signs)

    def heard(self, usual: Pace) -> None:
        """Notes what ranks of the whole job usually do."""
        if self._lateness.usual is not None and self._step:
            self._usual = usual
            self._behind.append((self._lateness.usual - usual.run_up) / self._step)

    def _compare(self, ranks: Sequence[PacedRank], step: float, now: float) -> Iterator[PacedRank]:
        """Compares the steps that all ranks have answered for."""
        known = set[int].intersection(*(set(one.steps) for one in ranks))
        common = sorted(n for n in known if n > self._last)
        if not common or not step:
            return
        for n in common:
            self._lateness.step({place: one.steps[n][0] for place, one in enumerate(ranks)}, step, now)
            # The rank that comes last waits least.
            self._at_vote.step({place: -one.steps[n][1] for place, one in enumerate(ranks)}, step, now)
        self._lost += common[-1] - self._last - len(common) if self._last else 0
        self._compared, self._last = self._compared + len(common), common[-1]
        signs = [one.signs() for one in ranks]
        usual = self._signs = typical(signs)
        late, behind = dict(self._lateness.named), min(self._behind) if len(self._behind) == 2 else 0.0
        if behind > STEADY / 2:  # all ranks of this node are late
            usual = self._usual.signs
            costs = [behind + self._lateness.excess(place) for place in range(len(ranks))]
            slow = [one.slow is not None for one in ranks]
            late |= {
                place: cost for place, cost in enumerate(costs) if cost > named_from(is_slow=slow[place])
            }
        for place, one in enumerate(ranks):
            one.steps = {n: each for n, each in one.steps.items() if n > self._last}
            own = late.get(place), self._at_vote.named.get(place)
            found = judge_rank(*own, signs[place], usual, is_slow=one.slow is not None)
            if found is None:
                if one.slow is not None:
                    one.slow, one.is_lasting = None, False
                    yield one
            elif usual.waited > STARVED and found[1] in (Cause.PROCESSOR, Cause.LINK):
                share = f"{usual.waited:.0%}"
                self._say("all", f"all ranks of this node wait for a processor for {share} of the time")
            elif one.slow is None and now - self._looked_at > _LOOK_AGAIN:
                self._looked_at = now
                for each in ranks:
                    each.look_closer()
            elif one.slow is None and now - self._looked_at < _LOOK:
                continue
            elif one.goes_on(SlowRank(found[0], step, found[1].name.lower()), len(common), now):
                yield one
        count = max(one.last.collectives for one in ranks if one.last is not None)
        if count > _KNOWN and self._compared + self._lost > _ENOUGH and self._lost > self._compared:
            words = "slow ranks are found late: %d of %d steps were forgotten, each with some %d collectives;"
            words %= self._lost, self._compared + self._lost, count
            self._say("lost", f"{words} set TORCH_FR_BUFFER_SIZE=256")

    def _say(self, kind: str, words: str) -> None:
        if kind not in self._has_said:
            self._has_said.add(kind)
            log.warning("%s", words)
