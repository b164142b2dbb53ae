"""Simulated jobs whose states can be told apart."""

from __future__ import annotations

from typing import Any

from ft_wrapper.attribution import Interruption
from ft_wrapper.rank_assignment import RankAssignment, RankAssignmentCtx
from ft_wrapper.testing import FakeStore
from tests.explorer.process import SimulatedProcess
from tests.explorer.simulation import Simulation

from .states import StateScheduler


class SearchedSimulation(Simulation):
    """A simulation that a search goes through."""

    schedulers = StateScheduler
    scheduler: StateScheduler

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Another rank assignment may remember something.
        if options.get("rank_assignment") is None and self.scenario.exchange != "tree":
            make = self.rank_assignment
            self.rank_assignment = lambda: Forgetting(self, make())
        self._facts: tuple[object, int] = None, 0
        client: Any = self._connect("search")
        store = getattr(client, "torch_store", client)
        if isinstance(store, FakeStore):
            self.scheduler.add_store(store)
        self.scheduler.add_state(self.known)

    @property
    def finished(self) -> bool:
        """Whether every process has come to its end."""
        return not any(process.alive for process in self.processes)

    def known(self) -> object:
        """What monitors and invariants know of the processes otherwise than from the store."""
        return self._hash_of_facts(), self.invariants.history.untold, tuple(map(_state_of, self.processes))

    def _hash_of_facts(self) -> int:
        """What the invariants remember. It is only added to, so how much there is tells whether it is new."""
        history = self.invariants.history
        facts: list[Any] = [
            history.rosters,
            self.invariants._immutable,
            history.decided_at,
            history.ended_at,
            history.outcomes,
            history.sizes,
            history.holders,
        ]
        many: tuple[Any, ...] = (history.heads, history.owners, history.published)
        lengths = *map(len, facts), *map(len, many), sum(map(len, history.returned.values()))
        if self._facts[0] != lengths:
            returned = [(n, frozenset(ranks)) for n, ranks in history.returned.items()]
            owners = [(member, owner.name) for member, owner in history.owners.items()]
            sets = [frozenset(fact.items()) for fact in facts]
            heads, published = tuple(history.heads), frozenset(history.published)
            self._facts = lengths, hash((*sets, frozenset(returned), frozenset(owners), heads, published))
        return self._facts[1]

    def report(self, process: SimulatedProcess, interruption: Interruption) -> None:
        """What the reporter reads, it learns."""
        super().report(process, interruption)
        self.scheduler.forget(self.scheduler.tasks[-1], _state_of(process))


class Forgetting(RankAssignment):
    """A rank assignment, from which on nothing but the last decision counts for a process."""

    def __init__(self, simulation: SearchedSimulation, inner: RankAssignment) -> None:
        self._simulation = simulation
        self._inner = inner

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        scheduler, state = self._simulation.scheduler, ctx.state
        process = next(one for one in self._simulation.processes if one.task is scheduler.current)
        job = process._job
        known = (job.call, job.member, job.view, state.rank, state.world_size)
        scheduler.forget(process.task, (*known, process.facts.entered, tuple(process.completed)))
        return self._inner(ctx)


def _state_of(process: SimulatedProcess) -> tuple[object, ...]:
    """All that its monitor and the invariants know of a process."""
    monitor, facts = process.monitor, process.facts
    told: tuple[object, ...] = ()
    if monitor is not None:
        seen, view = monitor.seen, monitor.view
        head = None if view is None else view.head
        told = head, monitor.rank, monitor.active, monitor.between, monitor.heart.name
        if seen is not None:
            told += None if seen.view is None else seen.view.head, seen.member, seen.rank, seen.is_between
    return (
        (process.fate, facts.disturbed, process.told, process.member, process.inside, facts.last),
        (facts.doomed, facts.called_at, tuple(process.completed)),
        told,
        (facts.started_at, facts.died_at, facts.wants_since),
    )
