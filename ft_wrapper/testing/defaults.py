"""What a simulated job runs on unless something else is tested: its store, and its rank assignment."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from .. import rank_assignment as ranks
from ..compose import Compose
from ..protocol.operations import Step, keys_of
from ..state import State
from ..store import StoreMixin
from .fake_store import FakeStore
from .history import Violation
from .scenario import Scenario
from .scheduler import Scheduler

Connect = Callable[[str], StoreMixin]
StoreFactory = Callable[[Scheduler, Scenario], Connect]
"""Makes the shared contents for one run, and returns what connects a client, by its name, to them."""

_EXCHANGE_TIMEOUT = timedelta(seconds=20)


class SimulatedStore(FakeStore):
    """A client that reads as `TCPStore` does: in one step."""

    def _read(self, key: str) -> str | None:
        # With libuv this wakes those who wait for an absent key.
        if not self._contents.use_libuv:
            return super()._read(key)
        value = self.compare_set(key, "never", "never").decode()
        return None if value == "never" else value


class TransactionStore(SimulatedStore):
    """One that carries out several operations as one, as etcd does; a lost answer repeats all of them."""

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        if len(steps) == 1:
            return super().execute(steps)
        keys = [key for step in steps for key in keys_of(step)]
        return self._operate("execute", keys, (keys, steps), lambda: self._at_once(steps))

    def _at_once(self, steps: Sequence[Step]) -> list[str | None]:
        before, self.clock.aside = self.clock.aside, True
        try:
            return super().execute(steps)
        finally:
            self.clock.aside = before


def simulated_stores(scheduler: Scheduler, scenario: Scenario) -> Connect:
    """The usual stores of a simulation: one that reads as a TCPStore does, or one with transactions."""
    kind = TransactionStore if scenario.transactions else SimulatedStore
    return kind(scheduler, use_libuv=scenario.use_libuv).clone


def simulated_assignment(scenario: Scenario) -> ranks.RankAssignment:
    """The first ranks are active, and all move up, with or without an exchange between them."""

    def node_of(state: State) -> str:
        return str((state.initial_rank or 0) // scenario.node_size)

    reserve = ranks.LayerFlag.RESERVE
    if scenario.exchange == "tree":
        all_ranks = ranks.Layer(1, scenario.active, flag=reserve)
        return ranks.Tree([all_ranks, ranks.Layer(1, key_or_fn=node_of, flag=reserve)])
    parts: list[ranks.RankAssignment] = [ranks.MaxActiveWorldSize(scenario.active), ranks.ShiftRanks()]
    if scenario.exchange == "plain":
        parts.append(Exchange())
    if scenario.exchange == "filter":
        parts.append(ranks.FilterCountGroupedByKey(node_of, lambda count: count >= 1, _EXCHANGE_TIMEOUT))
    made: ranks.RankAssignment = Compose(*parts)
    return made


class Exchange(ranks.RankAssignment):
    """Changes nothing, but lets all ranks wait for each other."""

    def __call__(self, ctx: ranks.RankAssignmentCtx) -> ranks.RankAssignmentCtx:
        """Exchanges ranks; see `RankAssignment`."""
        mine = str(ctx.state.rank)
        count = ctx.state.world_size - len(ctx.terminated_ranks)
        assert ctx.state.rank is not None
        got = ctx.store.compute_once("exchange", ctx.state.rank, mine, count, dict, _EXCHANGE_TIMEOUT)
        if got != mine:
            raise Violation(f"compute_once gave rank {mine} the result of another: {got}")
        return ctx
