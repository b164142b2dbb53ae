"""The ranks of a node as a group: its state, its processes, what has happened to them.

The agent's main thread writes it. Other threads read: what changes is replaced as a whole.
"""

import bisect
import collections
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.metrics.api import put_metric

from ..monitor.shared_memory import RankMemory
from .rounds import End, Round

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What has happened since the agent began.

    Args:
        failures: processes that failed of their own accord.
        replacements: processes that were started alone, in the place of one that had failed.
        restarts: how often all workers were restarted because some had failed.
        rounds: how often they were started at all, also with other nodes than before.
    """

    failures: int = 0
    replacements: int = 0
    restarts: int = 0
    rounds: int = 0


class Group:
    """The ranks of a node.

    States: INIT before the start; HEALTHY while all run; UNHEALTHY after a rank failed, while others run;
    STOPPED during a restart of all or after a signal; SUCCEEDED or FAILED at the end; UNKNOWN after an error
    of the agent itself.

    Args:
        role: their name.
        nproc: how many there are.
        max_restarts: how often all may be restarted.

    Attributes:
        state: the state now.
        counts: what has happened so far.
        round: the round; None before the first one.
        pids: by local rank what identifies its last process, in this round.
        succeeded: local ranks whose last process, in this round, has exited with 0.
        missing: local ranks whose last process has failed, and was not replaced yet; without those dismissed.
        rank_metrics: what is known of ranks in wrapped calls.
    """

    def __init__(self, role: str, nproc: int, max_restarts: int) -> None:
        self.role = role
        self.nproc = nproc
        self.max_restarts = max_restarts
        self.state = WorkerState.INIT
        self.counts = Counts()
        self.round: Round | None = None
        self.pids: Mapping[int, Any] = {}
        self.missing: frozenset[int] = frozenset()
        self.succeeded: frozenset[int] = frozenset()
        self.rank_metrics = RankMetrics()
        self._is_starting = False

    @property
    def remaining_restarts(self) -> int:
        """How many more times all may be restarted."""
        return max(0, self.max_restarts - self.counts.restarts)

    def begin_round(self, where: Round) -> None:
        """All ranks are about to be started.

        Args:
            where: their place among those of all nodes.
        """
        self.round, self.pids = where, {}
        self.missing = self.succeeded = frozenset()
        self._count("rounds")
        self._is_starting = True

    def all_started(self) -> None:
        """All ranks of the round have been started; meanwhile some may have failed, or all been stopped."""
        if self._is_starting:
            self.become(WorkerState.UNHEALTHY if self.missing else WorkerState.HEALTHY)

    def count_restarts(self, restarts: int) -> None:
        """Notes how often all ranks were restarted because some had failed, or are about to be."""
        self.counts = dataclasses.replace(self.counts, restarts=restarts)

    def started(self, local_rank: int, pid: Any, *, replaces: bool = False) -> None:
        """A rank has been started.

        Args:
            local_rank: which one.
            pid: what identifies its process.
            replaces: whether one before it has failed in this round.
        """
        self.pids = {**self.pids, local_rank: pid}
        self.missing -= {local_rank}
        self.succeeded -= {local_rank}
        self._count("replacements", replaces)
        if self.state is WorkerState.UNHEALTHY and not self.missing:
            self.become(WorkerState.HEALTHY)

    def ended(self, local_rank: int) -> None:
        """A rank has succeeded."""
        self.succeeded |= {local_rank}

    def failed(self, local_rank: int) -> None:
        """A rank has failed of its own accord."""
        self._count("failures")
        self.missing |= {local_rank}
        if self.state is WorkerState.HEALTHY:
            self.become(WorkerState.UNHEALTHY)

    def dismissed(self, local_rank: int) -> None:
        """A rank was asked to leave the job, or was excluded: if its process is gone it is not missing."""
        self.missing -= {local_rank}

    def stopped(self) -> None:
        """All are ended, to be started again."""
        self.become(WorkerState.STOPPED)

    def finished(self, end: End) -> None:
        """This node's part is over."""
        is_good = not end.result().exit_code
        last = WorkerState.SUCCEEDED if is_good else WorkerState.FAILED
        self.become(WorkerState.STOPPED if end.signum is not None else last)

    def become(self, state: WorkerState) -> None:
        """Changes the state, and reports it to torch's metrics."""
        self.state, self._is_starting = state, False
        log.debug("[%s] the workers are %s", self.role, state.name)
        put_metric(f"workers.{self.role}.remaining_restarts", self.remaining_restarts)
        put_metric(f"workers.{self.role}.{state.name.lower()}", 1)

    def _count(self, what: str, more: int = 1) -> None:
        self.counts = dataclasses.replace(self.counts, **{what: getattr(self.counts, what) + more})


# What is known of ranks in wrapped calls, for metrics ------------------------------------------------------
#
# A rank that comes back last from a restart reports it. All else is in the memory that each rank shares with
# its monitor, and is read on request: ranks are not asked.

#: The states of a rank: in the function; a hot spare; between two iterations; in a wrapped call that has not
#: begun for it; in no wrapped call, or without a monitor in the agent; its process has failed and was not
#: replaced yet.
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


class RankMetrics:
    """Counts the restarts of a node's ranks, and reads how far they are; for use in any thread.

    Attributes:
        ranks: where they are found: `MonitorService.ranks`, once there is one.
        states: how many processes are in each of `RANK_STATES`, without those that are gone.
        iteration: the newest one, by its global number; None before there is one.
        step: the last one that was reported; None before that.
        progress: when a rank made progress last, in monotonic seconds; None before that.
        slow: what the slowest rank costs each step, as a share of it; 0.0 if none is slow.
        restarts: by what caused them.
        phases: how long restarts took, by `PHASES`.
    """

    def __init__(self) -> None:
        self.ranks: Callable[[], Iterable[tuple[RankMemory | None, bool]]] = tuple
        self.states: Mapping[str, int] = {}
        self.iteration: int | None = None
        self.step: int | None = None
        self.progress: float | None = None
        self.slow = 0.0
        self.restarts = collections.Counter[str]()
        self.phases = {phase: Histogram() for phase in PHASES}
        self._lock = threading.Lock()

    def restarted(self, cause: str, phases: Mapping[str, float]) -> None:
        """All ranks are back.

        Args:
            cause: what kind of fault it was.
            phases: seconds by `PHASES`, without those that are not known.
        """
        with self._lock:
            self.restarts[cause] += 1
            for phase in self.phases.keys() & phases.keys():
                self.phases[phase].observe(phases[phase])

    def read(self) -> None:
        """Reads the memory of the ranks; what a process had there stays known after its end."""
        with self._lock:
            ranks = list(self.ranks())
            self.states = collections.Counter(
                _state(memory if is_in_call else None) for memory, is_in_call in ranks
            )
            memories = [memory for memory, _ in ranks if memory is not None and memory.iteration >= 0]
            self.iteration = max((memory.iteration for memory in memories), default=self.iteration)
            in_call = [memory for memory, is_in_call in ranks if memory is not None and is_in_call]
            self.slow = max((memory.slow for memory in in_call), default=0.0)
            # A step of the newest iteration counts, even if an older one got further.
            told = [(memory.iteration, memory.step) for memory in memories]
            steps = [(n, step) for n, step in told if step is not None]
            _, self.step = max(steps, default=(0, self.step))
            self.progress = max(self.progress or 0.0, *map(_progress, memories), 0.0) or None


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
