"""The ranks of a node as a group: its state, its processes, what has happened to them.

The agent's main thread writes it. Other threads read: what changes is replaced as a whole.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerState

from .rank_metrics import RankMetrics
from .rounds import End, Round


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
        on_state: called with each new state.

    Attributes:
        state: the state now.
        counts: what has happened so far.
        round: the round; None before the first one.
        pids: by local rank what identifies its last process, in this round.
        succeeded: local ranks whose last process, in this round, has exited with 0.
        missing: local ranks whose last process has failed, and was not replaced yet; without those dismissed.
        rank_metrics: what is known of ranks in wrapped calls.
    """

    def __init__(
        self,
        role: str,
        nproc: int,
        max_restarts: int,
        on_state: Callable[["Group"], object] = lambda _: None,
    ) -> None:
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
        self._on_state = on_state
        self._is_starting = False

    @property
    def remaining_restarts(self) -> int:
        """How often all may be restarted yet."""
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
        """A rank has done what it had to."""
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
        """Changes the state."""
        self.state, self._is_starting = state, False
        self._on_state(self)

    def _count(self, what: str, more: int = 1) -> None:
        self.counts = dataclasses.replace(self.counts, **{what: getattr(self.counts, what) + more})
