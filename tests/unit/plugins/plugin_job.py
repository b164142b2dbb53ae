"""A job of ranks in threads that go through a rank assignment, restart after restart."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, cast

from ft_wrapper.rank_assignment import RankAssignment, RankAssignmentCtx, RankDiscarded
from ft_wrapper.state import Mode, State
from ft_wrapper.store import PrefixStore, StoreMixin
from ft_wrapper.testing import FakeStore

LIMIT = 20.0

Chooser = Callable[[list[int]], int]


class Exchange:
    """Stands in for a store where a test says which rank computes for all."""

    def __init__(self, choose: Chooser) -> None:
        self.timeout = timedelta(seconds=LIMIT)
        self._choose = choose
        self._changed = threading.Condition()
        self._rounds: dict[str, tuple[dict[int, str], dict[int, Any], dict[int, str]]] = {}

    def compute_once(
        self,
        name: str,
        rank: int,
        contribution: str,
        count: int,
        compute: Callable[[dict[int, str]], dict[int, str]],
        timeout: timedelta,
    ) -> str:
        with self._changed:
            contributions, computes, results = self._rounds.setdefault(name, ({}, {}, {}))
            if rank in contributions or len(contributions) >= count:
                raise RuntimeError(
                    f"{name} serves once: rank {rank} came to {sorted(contributions)} of {count}"
                )
            contributions[rank], computes[rank] = contribution, compute
            if len(contributions) == count:
                results.update(computes[self._choose(sorted(computes))](dict(contributions)))
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: bool(results), timeout.total_seconds()):
                raise TimeoutError(f"{name}: {sorted(contributions)} of {count} came")
            return results[rank]


class Job:
    """All ranks of a job, by slot (the initial rank).

    Args:
        world_size: number of ranks.
        make: makes a rank's own assignment.
        choose: from the ranks that came to the one that computes; None: a real store decides.
    """

    def __init__(
        self, world_size: int, make: Callable[[], RankAssignment], choose: Chooser | None = None
    ) -> None:
        self.states = {slot: State(rank=slot, world_size=world_size) for slot in range(world_size)}
        self.discarded: dict[int, RankDiscarded] = {}
        self._make = make
        self._choose = choose
        self._assignments = {slot: make() for slot in self.states}
        self._store = FakeStore(timeout=timedelta(seconds=LIMIT))
        self._n = -1

    def replace_process(self, slot: int) -> None:
        """A new process takes a slot, and its rank: it knows nothing of what was."""
        old = self.states[slot]
        self.states[slot] = State(
            rank=old.rank,
            world_size=old.world_size,
            initial_rank=slot,
            initial_world_size=old.initial_world_size,
        )
        self._assignments[slot] = self._make()

    def try_enter(self, lost: Collection[int] = ()) -> dict[int, State | BaseException]:
        """Lets all ranks but the lost slots go through the assignment; what becomes of each."""
        self._n += 1
        terminated = {cast(int, self.states.pop(slot).rank) for slot in lost}
        store: Any = Exchange(self._choose) if self._choose else PrefixStore(self._n, self._store)

        def call(slot: int) -> State | BaseException:
            ctx = RankAssignmentCtx(
                dataclasses.replace(self.states[slot]), cast(StoreMixin, store), set(terminated)
            )
            try:
                return self._assignments[slot](ctx).state
            except Exception as ex:
                return ex

        outcomes: dict[int, State | BaseException] = {}
        threads = {
            slot: threading.Thread(target=lambda slot=slot: outcomes.update({slot: call(slot)}), daemon=True)
            for slot in self.states
        }
        for thread in threads.values():
            thread.start()
        deadline = time.monotonic() + LIMIT
        for thread in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        waiting = [slot for slot, thread in threads.items() if thread.is_alive()]
        if waiting:
            # Its clock is virtual: no one waits any longer.
            self._store.clock.advance(10 * LIMIT)
            raise AssertionError(f"slots {waiting} wait for ever; the others got {outcomes}")
        return outcomes

    def enter(self, lost: Collection[int] = ()) -> dict[int, State]:
        """The same, where ranks are assigned or discarded; the assigned ones go on."""
        states = {}
        for slot, outcome in self.try_enter(lost).items():
            if isinstance(outcome, State):
                states[slot] = outcome
            elif isinstance(outcome, RankDiscarded):
                self.discarded[slot] = outcome
            else:
                raise cast(BaseException, outcome)
        self.states = states
        return states

    def ranks(self) -> dict[int, int | None]:
        """Rank by slot."""
        return {slot: state.rank for slot, state in self.states.items()}

    def active(self) -> dict[int, int]:
        """Active rank by slot, of those that have one."""
        return {s: state.active_rank for s, state in self.states.items() if state.active_rank is not None}

    def check(self) -> None:
        """What holds after every assignment."""
        world_size = len(self.states)
        active = self.active()
        assert sorted(cast(int, rank) for rank in self.ranks().values()) == list(range(world_size))
        assert sorted(active.values()) == list(range(len(active)))
        for slot, state in self.states.items():
            assert state.world_size == world_size
            assert state.active_world_size == len(active)
            assert state.mode is (Mode.ACTIVE if slot in active else Mode.INACTIVE)
            assert state.initial_rank == slot
