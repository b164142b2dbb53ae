"""One rank's course through the steps of a state, recoveries included; without torch or processes.

A `Performer` does what touches tensors and other ranks: `TorchPerformer` in a job, a simulated one in tests.
So both run the same course.

The process may be interrupted at any point outside `Performer.atomic`. So what counts over iterations is
one immutable value, `Kept.held`, and each change of it is one assignment: it is None from before the first
write of an update or a transfer until after the last.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Hashable, Iterator
from typing import Any, Protocol

from .plan import Copy, Held, Holding, Plan, Register, Route, Rung, make_plan

_TRIES = 2  # of each rung, before the one below it


class Kept:
    """What a process keeps of a state over the iterations of a wrapped call.

    Attributes:
        objects: the state, as the performer has it; None before it was built.
        held: what the objects are; None if that is not the state after any step.
        arguments: what the update of a prepared step is called with.
        newest: the newest step known to be committed, whatever is held.
        failures: how often a recovery has failed because of this rank since the last sealed one.
    """

    def __init__(self) -> None:
        self.objects: Any = None
        self.held: Held | None = None
        self.arguments: tuple[Any, ...] = ()
        self.newest = 0
        self.failures = 0


class Performer(Protocol):
    """What the course needs done in a rank's process. An error in a method ends the iteration.

    Attributes:
        rank: the active rank.
    """

    rank: int

    def atomic(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which the rank is not interrupted; raises if it has to leave already."""

    # ---- a step

    def make_ready(self) -> None:
        """Does all of a step that needs other ranks, and waits for what a device still does."""

    def vote(self, step: int) -> None:
        """Returns once all active ranks have called it, with the same step."""

    def update(self, step: int, arguments: tuple[Any, ...]) -> None:
        """Does a step: turns gradients and state into the next state, whose buffers it copies; alone."""

    # ---- a recovery

    def build(self) -> None:
        """Makes the objects in their state before the first step."""

    def gather(self, mine: Holding) -> tuple[list[Holding], Register]:
        """Returns all active ranks' holdings, by rank, and active rank 0's reading of the register."""

    def copies(self) -> tuple[Copy, ...]:
        """Returns the copies in host memory."""

    def drop_step(self) -> None:
        """Drops the remains of an unfinished step: gradients, changed buffers."""

    def move(self, plan: Plan) -> Any:
        """Carries out the plan's transfers; returns what this rank has received, or None."""

    def take_copies(self, plan: Plan) -> Any:
        """The same with copies; returns the rank's own copy where it does not receive one."""

    def rebind(self) -> None:
        """Makes the kept objects fit for this iteration."""

    def adopt(self, received: Any) -> None:
        """Puts what was received into the objects."""

    def overwrite(self, received: Any) -> None:
        """The same with objects of this iteration, which others may refer to."""

    def restore(self) -> int:
        """Loads a checkpoint, if there is one, into the objects as they were built; returns its step."""

    def differing(self, shard: Hashable, receivers: Collection[int] | None) -> tuple[Route, ...]:
        """Compares the states of all active ranks; returns what makes replicas equal.

        Args:
            shard: that this rank holds.
            receivers: the ranks that have just received theirs from others; None: all have built or loaded
                theirs, and the first of a shard's ranks gives it to the other ranks.
        """

    def finish(self, plan: Plan, number: int) -> None:
        """This rank has finished a recovery, and does not know yet whether all have."""

    def seal(self, plan: Plan, register: Register) -> None:
        """All have finished it. Active rank 0 writes the register, before its next vote."""


class Course:
    """A rank's steps and its recovery in one iteration.

    Args:
        kept: what the process keeps.
        performer: does what the course does not do itself.
        number: of the iteration; no number comes twice in the store's life.
    """

    def __init__(self, kept: Kept, performer: Performer, number: int) -> None:
        self.kept = kept
        self.performer = performer
        self.number = number

    # ---- a step

    def commit(self, arguments: tuple[Any, ...] = ()) -> None:
        """Applies the gradients: on all active ranks, or on none.

        A rank that applies them has seen the vote end. So all had entered it, prepared. A rank that does not
        see it end can follow in the recovery, without messages to the other ranks.
        """
        held = self._held()
        self.performer.make_ready()
        with self.performer.atomic():
            self.kept.arguments = arguments
            self.kept.held = dataclasses.replace(held, is_prepared=True)
        self.performer.vote(held.step)
        self._apply()

    def _apply(self) -> None:
        kept = self.kept
        with self.performer.atomic():
            held = self._held()
            kept.held = None
            self.performer.update(held.step, kept.arguments)
            held = dataclasses.replace(held, step=held.step + 1, is_prepared=False)
            kept.arguments = ()
            kept.newest = max(kept.newest, held.step)
            kept.held = held

    def _held(self) -> Held:
        if self.kept.held is None:
            raise RuntimeError("the state is no longer whole: an update has failed in this iteration")
        return self.kept.held

    def compare(self, receivers: Collection[int] | None = ()) -> None:
        """Compares the state with that of the replicas, and makes them equal where they differ.

        Args:
            receivers: see `Performer.differing`.
        """
        held = self._held()
        routes = self.performer.differing(held.shard, receivers)
        if routes and (received := self.performer.move(Plan(Rung.PEERS, routes=routes))) is not None:
            self.kept.held = None
            self.performer.overwrite(received)
            self.kept.held = held

    # ---- a recovery

    def recover(self, needs: Hashable) -> Plan:
        """Brings all active ranks to the same step; at the first start, too.

        Args:
            needs: the shard that belongs to this rank.

        Returns:
            What was done, with the step that all are at.
        """
        kept, performer, n = self.kept, self.performer, self.number
        was_built = kept.objects is None
        if was_built:
            performer.build()
        mine = Holding(needs, kept.held, performer.copies(), kept.newest, kept.failures // _TRIES)
        said, register = performer.gather(mine)
        plan = make_plan(said, register)
        later: Any = None
        if plan.rung is Rung.PEERS:
            later = self._follow(plan, needs)
        elif plan.rung is Rung.COPIES:
            self._go_back(plan, needs)
        else:
            plan = dataclasses.replace(plan, step=self._load(needs, was_built))
        origin = plan.origin if plan.rung is Rung.PEERS else n
        if plan.routes:
            self.compare({route.receiver for route in plan.routes})
        kept.held = dataclasses.replace(self._held(), ready=self._held().ready | {n})
        performer.finish(plan, n)
        performer.vote(plan.step)
        if later is not None:
            kept.held = None
            self._adopt(later)
            kept.held = Held(needs, plan.step, origin=origin, history=n)
        kept.held = dataclasses.replace(self._held(), history=n, ready=frozenset())
        newest = max(one.newest for one in said)
        # All are new, and the store says that others went on before them.
        is_unknown = plan.rung is Rung.CHECKPOINT and register.sealed >= 0 and not newest
        lost = None if is_unknown else max(0, newest - plan.step)
        kept.newest = plan.step
        kept.failures = 0
        performer.seal(plan, Register(n, origin))
        return dataclasses.replace(plan, lost=lost)

    def _follow(self, plan: Plan, needs: Hashable) -> Any:
        """Returns the shard that takes the place of another one, which is kept until all have theirs."""
        kept, rank = self.kept, self.performer.rank
        if rank in plan.rolls:
            self._apply()
        if rank in plan.void:
            kept.held = None
        elif kept.held is not None:
            kept.held = dataclasses.replace(
                kept.held, is_prepared=False, history=plan.history, ready=plan.ready
            )
        self.performer.drop_step()
        received = self.performer.move(plan)
        if plan.route_of(rank) is None:
            with self._counted():
                self.performer.rebind()
            return None
        if kept.held is not None:
            return received
        self._adopt(received)
        kept.held = Held(needs, plan.step, False, plan.origin, plan.history, plan.ready)
        return None

    def _go_back(self, plan: Plan, needs: Hashable) -> None:
        self.kept.held = None
        self.performer.drop_step()
        self._adopt(self.performer.take_copies(plan))
        self.kept.held = Held(needs, plan.step, origin=self.number)

    def _adopt(self, received: Any) -> None:
        with self._counted():
            self.performer.adopt(received)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts errors that no other rank has caused, as they would come back."""
        try:
            yield
        except Exception:
            self.kept.failures += 1
            raise

    def _load(self, needs: Hashable, was_built: bool) -> int:
        self.kept.held = None
        if not was_built:
            self.performer.build()
        step = self.performer.restore()
        self.kept.held = Held(needs, step, origin=self.number)
        self.compare(None)
        return step
