"""Bodies in which something happens to a rank, or to its monitor, that is in the middle of a restart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_job import ACTIVE, Trainer
from rank_harness import Rank

from ft_wrapper import CallWrapper, FrozenState, Wrapper
from ft_wrapper.abort import AbortTorchDistributed
from ft_wrapper.compose import Compose
from ft_wrapper.protocol import membership
from ft_wrapper.protocol.global_iteration import GlobalIteration
from ft_wrapper.protocol.records import View
from ft_wrapper.rank_assignment import MaxActiveWorldSize, RankAssignment, RankAssignmentCtx, ShiftRanks
from ft_wrapper.testing.inject_fault import FaultKind, inject_fault


def happen(kind: str, folder: str) -> None:
    """Injects a fault, once in the whole job."""
    fired = Path(folder, "fired")
    fired.mkdir(exist_ok=True)
    try:
        (fired / "in the restart").touch(exist_ok=False)
    except FileExistsError:
        return
    inject_fault(FaultKind(kind))


class InAbort(AbortTorchDistributed):
    """Something happens in the monitor thread, before it aborts."""

    def __init__(self, happen: Callable[[], None]) -> None:
        self.happen = happen

    def __call__(self, state: FrozenState) -> FrozenState:
        """Lets it happen, then aborts."""
        self.happen()
        return super().__call__(state)


class InAssignment(RankAssignment):
    """Something happens in the rank assignment of a restart."""

    def __init__(self, happen: Callable[[], None]) -> None:
        self.happen = happen
        self.inner: Any = Compose(MaxActiveWorldSize(ACTIVE), ShiftRanks())

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Lets it happen, then assigns."""
        if ctx.state.iteration > 0:
            self.happen()
        result: RankAssignmentCtx = self.inner(ctx)
        return result


def trains_through_a_bad_restart(rank: Rank, kind: str, point: str, victim: int, folder: str) -> int | None:
    """An exception on rank 1; then, at a point of the restart, something happens to the victim."""
    trainer = Trainer(rank, "exception:rank=1:step=1", folder)
    here = rank.slot == victim

    def nothing() -> None:
        pass

    let_happen = functools.partial(happen, kind, folder) if here else nothing
    plugins: dict[str, Any] = trainer.settings()
    if point == "abort":
        plugins["abort"] = InAbort(let_happen)
    elif point == "assignment":
        plugins.update(active_world_size=None, rank_assignment=InAssignment(let_happen))
    elif point == "arrived":
        arrive = GlobalIteration.arrive

        def arrive_first(self: GlobalIteration, view: View, *args: Any) -> None:
            if view.n == 0 and not here:
                rank.hear()
            arrive(self, view, *args)
            if view.n == 0 and here:
                rank.say("arrived")
                let_happen()

        GlobalIteration.arrive = arrive_first  # type: ignore[method-assign]
    elif point == "decided":
        await_next = membership.Membership.await_next

        def then_happen(self: membership.Membership, *args: Any) -> None:
            await_next(self, *args)
            let_happen()

        membership.Membership.await_next = then_happen  # type: ignore[method-assign]

    @Wrapper(**plugins)
    def train(call: CallWrapper) -> int:
        return trainer.train(call)

    return train()


# ---- the spare


def trains_with_a_lost_spare(rank: Rank, faults: str, folder: str) -> int | None:
    """All active ranks wait at step 2 of the first iteration until the test has done away with the spare."""

    class Waits(Trainer):
        def before(self, call: CallWrapper, step: int) -> None:
            if step == 2 and call.iteration == 0:
                with call.disable_hang_protection():
                    rank.say("waiting")
                    rank.hear()

    trainer = Waits(rank, faults, folder)

    @Wrapper(**trainer.settings(initialize=lambda state: rank.say("ready", n=state.iteration)))
    def train(call: CallWrapper) -> int:
        return trainer.train(call)

    return train()
