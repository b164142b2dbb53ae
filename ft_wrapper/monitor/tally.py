"""What an agent knows of its ranks for metrics: how they stand, which step they are at, their restarts.

Ranks are not asked for that: it is in the memory that each shares with its monitor, and is read when
somebody asks.
"""

import bisect
import collections
import copy
import dataclasses
import itertools
import threading
from collections.abc import Mapping
from typing import Any

from ..protocol.records import View
from .shared_memory import RankMemory

#: How a rank may stand, and what that means.
RANK_STATES = {
    "active": "in the function",
    "spare": "a hot spare",
    "restarting": "between two iterations",
    "waiting": "in a wrapped call that has not begun for it",
    "outside": "in no wrapped call, or without a monitor in the agent",
    "gone": "its process died in a call, and no other one is there yet",
}
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


@dataclasses.dataclass(frozen=True)
class Tallied:
    """What is known at a moment.

    Args:
        ranks: how many ranks are in each of `RANK_STATES`.
        iteration: the newest one, by its global number; None before there is one.
        step: the last one that was reported; None before that.
        progress: when a rank made progress last, in monotonic seconds; None before that.
        restarts: by what caused them.
        phases: how long restarts took, by `PHASES`.
    """

    ranks: Mapping[str, int]
    iteration: int | None
    step: int | None
    progress: float | None
    restarts: Mapping[str, int]
    phases: Mapping[str, Histogram]


class Tally:
    """All that is known of an agent's ranks; for use in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[int, int] = {}  # the agent's, and the local rank of each
        # The newest one of each; None for a process that has none yet, and stands in for one that is gone.
        self._accounts: dict[int, RankAccount | None] = {}
        self._gone = set[int]()  # by local rank
        self._drained: set[int] = set()  # local ranks that no process comes back for in this round
        self._iteration: int | None = None
        self._step: int | None = None
        self._progress = 0.0
        self._restarts: collections.Counter[str] = collections.Counter()
        self._phases = {phase: Histogram() for phase in PHASES}

    # ---- what happens

    def begin_round(self) -> None:
        """All ranks are about to be started, also those that were drained."""
        with self._lock:
            self._drained.clear()

    def started(self, pid: int, rank: int) -> None:
        """A process was started for a local rank."""
        with self._lock:
            self._processes[pid] = rank
            if rank in self._gone:
                self._accounts[pid] = None
            self._gone.discard(rank)

    def ended(self, pid: int) -> None:
        """A rank's process has ended."""
        with self._lock:
            rank = self._processes.pop(pid, None)
            was_in_call, account = pid in self._accounts, self._accounts.pop(pid, None)
            is_lost = was_in_call and not (account and account.is_over)
            if is_lost and rank is not None and rank not in self._drained:
                self._gone.add(rank)

    def drained(self, rank: int) -> None:
        """A local rank was asked to leave the job: it is not missed, whether its process lives or not."""
        with self._lock:
            self._drained.add(rank)
            self._gone.discard(rank)

    def open(self, pid: int, memory: RankMemory) -> "RankAccount":
        """A process has a monitor now.

        Args:
            pid: the agent's process that it is, or is below.
            memory: which it shares with its monitor; not used any more once the account is closed.
        """
        with self._lock:
            account = self._accounts[pid] = RankAccount(self, memory)
            return account

    def restarted(self, cause: str, phases: Mapping[str, float]) -> None:
        """All ranks are back.

        Args:
            cause: what kind of fault it was.
            phases: seconds by `PHASES`; those that are not known are not there.
        """
        with self._lock:
            self._restarts[cause] += 1
            for phase in self._phases.keys() & phases.keys():
                self._phases[phase].observe(phases[phase])

    def read(self) -> Tallied:
        """What is known now."""
        with self._lock:
            accounts = [self._accounts.get(pid) for pid in self._processes]
            states = collections.Counter("outside" if one is None else one.state for one in accounts)
            states["gone"] = len(self._gone)
            self.look(*(one.memory for one in accounts if one is not None and one.memory is not None))
            return Tallied(
                {state: states[state] for state in RANK_STATES},
                self._iteration,
                self._step,
                self._progress or None,
                dict(self._restarts),
                copy.deepcopy(self._phases),
            )

    # ---- for the accounts, which have the lock

    def look(self, *memories: RankMemory) -> None:
        """Notes how far ranks are, as their memory says it."""
        steps = [(memory.iteration, memory.step) for memory in memories if memory.step is not None]
        if steps:
            _, self._step = max(steps)
        self._progress = max(self._progress, *map(_progress, memories), 0.0)

    def enter(self, view: View) -> None:
        """A rank is in an iteration."""
        self._iteration = view.n


class RankAccount:
    """What is known of one rank's process in one wrapped call.

    Args:
        tally: of all.
        memory: which the process shares with its monitor.

    Attributes:
        memory: it; None once the rank has left its call.
    """

    def __init__(self, tally: Tally, memory: RankMemory) -> None:
        self._tally = tally
        self.memory: RankMemory | None = memory
        self._view: View | None = None
        self._was_over = False

    @property
    def is_over(self) -> bool:
        """Whether its process is not missed once it has ended: the call has completed, or it was to leave."""
        memory = self.memory
        return self._was_over if memory is None else memory.has_returned or memory.leaves

    @property
    def state(self) -> str:
        """How it stands, see `RANK_STATES`; with the lock."""
        if self.memory is None:
            return "outside"
        if self.memory.is_inside and self._view is not None:
            return "active" if self.memory.active else "spare"
        is_first = self._view is None or self._view.n == self._view.first
        return "waiting" if is_first and not self.memory.has_left else "restarting"

    def decided(self, view: View) -> None:
        """It is in an iteration, and will enter the function."""
        with self._tally._lock:
            self._view = view
            self._tally.enter(view)

    def restarted(self, message: Mapping[str, Any]) -> None:
        """It came back last: so it tells of the restart."""
        self._tally.restarted(message["cause"], message["phases"])

    def leave(self) -> None:
        """It has left its call, or has died."""
        with self._tally._lock:
            if self.memory is not None:
                self._tally.look(self.memory)
                self._was_over = self.is_over
                self.memory = None


def _progress(memory: RankMemory) -> float:
    """When a rank last made progress, in monotonic seconds; 0.0 if that is not known."""
    told = max(memory.step_stamp, memory.ping_stamp)
    is_silent = memory.step is None and memory.ping_stamp == 0.0
    return max(told, memory.main_stamp) if is_silent and memory.is_inside and memory.active else told
