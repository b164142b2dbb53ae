"""What an agent knows of its node's ranks for metrics: their states, how far they are, their restarts.

A rank that comes back last from a restart reports it. All else is in the memory that each rank shares with
its monitor, and is read when somebody asks: ranks are not asked.
"""

import bisect
import collections
import copy
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping

from ..monitor.shared_memory import RankMemory

#: The states of a rank: in the function; a hot spare; between two iterations; in a wrapped call that has not
#: begun for it; in no wrapped call, or without a monitor in the agent; its process has failed, and no other
#: one is there yet.
RANK_STATES = ("active", "spare", "restarting", "waiting", "outside", "gone")
#: Parts of a restart, and all of it.
PHASES = ("abort", "leave", "arrive", "decide", "enter", "total")
#: Seconds: the upper bounds of a histogram's buckets.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclasses.dataclass
class Histogram:
    """How long something took.

    Args:
        counts: how often, by bucket; the last one has no bound.
        sum: seconds, of all.
    """

    counts: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        """Adds one."""
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[int]:
        """How many took no longer than each bound; the last one is all of them."""
        return list(itertools.accumulate(self.counts))


@dataclasses.dataclass
class KnownOfRanks:
    """What is known at a moment.

    Args:
        states: how many processes are in each of `RANK_STATES`, without those that are gone.
        iteration: the newest one, by its global number; None before there is one.
        step: the last one that was reported; None before that.
        progress: when a rank made progress last, in monotonic seconds; None before that.
        restarts: by what caused them.
        phases: how long restarts took, by `PHASES`.
    """

    states: Mapping[str, int] = dataclasses.field(default_factory=dict)
    iteration: int | None = None
    step: int | None = None
    progress: float | None = None
    restarts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    phases: Mapping[str, Histogram] = dataclasses.field(
        default_factory=lambda: {phase: Histogram() for phase in PHASES}
    )


class RankMetrics:
    """Counts the restarts of a node's ranks, and reads how far they are; for use in any thread.

    Attributes:
        ranks: where they are found: `MonitorService.ranks`, once there is one.
    """

    def __init__(self) -> None:
        self.ranks: Callable[[], Iterable[tuple[RankMemory | None, bool]]] = tuple
        self._lock = threading.Lock()
        self._known = KnownOfRanks()  # as it was read last: a rank's memory goes with its process

    def restarted(self, cause: str, phases: Mapping[str, float]) -> None:
        """All ranks are back.

        Args:
            cause: what kind of fault it was.
            phases: seconds by `PHASES`; those that are not known are not there.
        """
        with self._lock:
            self._known.restarts[cause] += 1
            for phase in self._known.phases.keys() & phases.keys():
                self._known.phases[phase].observe(phases[phase])

    def read(self) -> KnownOfRanks:
        """What is known now."""
        with self._lock:
            ranks, known = list(self.ranks()), self._known
            known.states = collections.Counter(
                _state(memory if is_in_call else None) for memory, is_in_call in ranks
            )
            memories = [memory for memory, _ in ranks if memory is not None and memory.iteration >= 0]
            known.iteration = max((memory.iteration for memory in memories), default=known.iteration)
            # A step of the newest iteration counts, though an older one got further.
            told = [(memory.iteration, memory.step) for memory in memories]
            steps = [(n, step) for n, step in told if step is not None]
            _, known.step = max(steps, default=(0, known.step))
            known.progress = max(known.progress or 0.0, *map(_progress, memories), 0.0) or None
            return copy.deepcopy(known)


def _state(memory: RankMemory | None) -> str:
    """The state of a process, by its memory; without that if it is in no call."""
    if memory is None:
        return "outside"
    if memory.is_in_function:
        return "active" if memory.active else "spare"
    return "restarting" if memory.has_restarted else "waiting"


def _progress(memory: RankMemory) -> float:
    """When a rank last made progress, in monotonic seconds; 0.0 if that is not known."""
    told = max(memory.step_stamp, memory.ping_stamp)
    is_silent = memory.step is None and memory.ping_stamp == 0.0
    return max(told, memory.main_stamp) if is_silent and memory.is_in_function and memory.active else told
