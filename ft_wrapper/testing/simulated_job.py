"""A simulated process's part in the job: it tells the invariants what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.membership import Membership
from ..protocol.records import Member
from ..report.restart import waiting_line

if TYPE_CHECKING:
    from .process import SimulatedProcess


class SimulatedJob(Membership):
    """Says, before a process does so, that it publishes a fault or gives up."""

    process: SimulatedProcess

    def wall_clock(self) -> float:
        """Always the same: what is in the store depends on the seed alone."""
        return 0.0

    def __init__(self, *how: Any, **more: Any) -> None:
        super().__init__(*how, **more)
        self.on_missing = self._look_for

    def _look_for(self, missing: Sequence[Member], _: float) -> None:
        waiting_line(self.agreement.store, missing, 0.0, 0.0)  # it reads where they run

    def publish(self, rank: int | None, error: BaseException) -> None:
        """See `Membership`."""
        self.process.simulation.invariants.publishes(self.view.n)
        super().publish(rank, error)

    def await_completion(self, active_rank: int | None, active_world_size: int) -> str:
        """See `Membership`."""
        outcome = super().await_completion(active_rank, active_world_size)
        self.process.simulation.invariants.heard_of_end(self.process, self.view.n)
        self.process.heard = self.view.n
        self.process.simulation.left(self.process)
        self.process.inside = None
        return outcome

    def await_endpoint(self, rank: int | None, look_every: float) -> tuple[str, int] | None:
        """See `Membership`; not every scenario has one."""
        if not self.process.simulation.scenario.endpoint:
            return "host", 1
        return super().await_endpoint(rank, look_every)

    def has_failed(self) -> bool:
        """See `Membership`."""
        return not self.process.broken and super().has_failed()

    def _withdraw(self, error: BaseException) -> None:
        task = self.process.task
        if isinstance(error, AssertionError) or (task is not None and task.crashed):
            return
        self.process.simulation.invariants.leaves(self.process)
        super()._withdraw(error)
