"""A rank of a simulated job: runs the real course, and does for it what touches tensors and other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable
from typing import Any

import greenlet

from ft_wrapper.live.commit import Course, Performer
from ft_wrapper.live.plan import Copy, Holding, Plan, Register, Route, Rung

from .job import State, Value
from .world import Copied, Interrupted, Killed, Meeting, Process, UpdateFailed, Violation, World

KEEPS_COPIES = 2


@dataclasses.dataclass(frozen=True)
class Received:
    """What came over the wire.

    Args:
        recoveries: those that were finished with it at its sender.
    """

    shard: str
    value: Value
    recoveries: frozenset[int]


class Atomic(contextlib.AbstractContextManager[None]):
    """The member is not interrupted in it."""

    def __init__(self, member: Member, what: str) -> None:
        self.member = member
        self.what = what

    def __enter__(self) -> None:
        self.member.point(self.what)
        if self.member.is_aborted:
            raise Interrupted
        self.member.is_atomic = True
        self.member.before = self.member.world.checker.reach(self.member)

    def __exit__(self, *_: object) -> None:
        self.member.is_atomic = False


class Member(Performer):
    """A process in one iteration.

    Attributes:
        at: before which effect, or in which collective it is.
        waiting: says whether what it waits for is there; None if it waits for nothing.
        is_recovering: until its recovery is sealed.
        before: where it could stand as its atomic block began.
        has_read: what it has read of the register.
        writes: the register as it has read it, and what it writes.
        later: what it has received and puts in once all have theirs.
    """

    def __init__(self, world: World, process: Process, rank: int) -> None:
        self.world = world
        self.process = process
        self.rank = rank
        self.at = ""
        self.waiting: Callable[[], bool] | None = None
        self.count = 0  # collectives so far
        self.is_atomic = self.is_aborted = self.is_dead = self.has_left = False
        self.is_recovering = True
        self.before: frozenset[Any] = frozenset()
        self.has_read = Register()
        self.writes: tuple[Register, Register] | None = None
        self.later: Received | None = None
        self.kept = process.kept
        self.kept.member = self
        self.greenlet = greenlet.greenlet(self._live)

    @property
    def state(self) -> State:
        """What it has in memory."""
        state: State = self.kept.objects
        return state

    # ---- running

    def _live(self) -> None:
        try:
            self._train()
        except (Interrupted, Killed, UpdateFailed):
            pass
        except Violation as violation:
            self.world.violation = self.world.violation or violation
        except Exception as error:
            self.world.violation = Violation(f"rank {self.rank} raises {type(error).__name__}: {error}")
        self.has_left = True
        self.world.inside -= 1
        if self in self.world.ready:
            self.world.ready.remove(self)

    def _train(self) -> None:
        job = self.world.job
        course = Course(self.kept, self, self.world.n)
        course.recover(job.shards[self.rank])
        is_first = True
        while (step := self.kept.newest) < job.steps:
            self.forward(step, zeroes=not is_first)
            is_first = False
            course.commit((self.world.n, step))
            self.after_step()

    def point(self, what: str) -> None:
        """Lets the world decide what happens before this member's next effect."""
        self.at = what
        self.world.hub.switch()

    def wait(self, what: str, is_there: Callable[[], bool]) -> None:
        """Waits."""
        if not is_there():
            self.waiting = is_there
            self.world.ready.remove(self)
            self.point(what)

    def meet(self, what: str, value: Any = None, root: int | None = None) -> Meeting:
        """Takes part in a collective; with a root, ranks wait only for it."""
        self.point(what)
        if self.is_aborted:
            raise Interrupted
        meeting = self.world.meeting(self, what)
        meeting.values[self.rank] = value
        if meeting.is_complete or self.rank == root:
            self.world.wake()
        else:
            self.wait(f"in {what}", lambda: meeting.is_complete or root in meeting.values)
        return meeting

    def atomic(self, what: str = "atomic") -> contextlib.AbstractContextManager[Any]:
        """See `Performer`."""
        return Atomic(self, what)

    # ---- a step

    def forward(self, step: int, *, zeroes: bool) -> None:
        """Forward and backward passes of two micro-batches; the gradients are reduced with the second.

        ``zero_grad`` stands behind a step: gradients that are left from one cut short are added to.
        """
        self.point("forward")
        state, n = self.state, self.world.n
        if zeroes:
            state.gradient = ()
        is_clean = state.buffers == step
        state.gradient += ((n, step, "first" if is_clean else "of changed buffers"),)
        state.buffers = ("after a forward pass", step if is_clean else "of changed buffers", self.rank)
        self.meet("reduce")
        state.gradient += ("garbage" if self.is_aborted else (n, step, "second"),)

    def make_ready(self) -> None:
        """See `Performer`: all get rank 0's buffers; rank 0 does not wait."""
        state = self.state
        meeting = self.meet("share", state.buffers, root=0)
        if not self.is_aborted:
            _, step, _ = shared = meeting.values[0]
            state.buffers = step + 1 if isinstance(step, int) else shared

    def vote(self, step: int) -> None:
        """See `Performer`."""
        meeting = self.meet("vote", step)
        if len(set(meeting.values.values())) > 1:
            raise Violation(f"the ranks do not vote on the same step: {meeting.values}")
        if self.is_recovering:
            self.world.checker.sealed(self)

    def update(self, step: int, arguments: tuple[Any, ...]) -> None:
        """See `Performer`."""
        state, checker = self.state, self.world.checker
        gradients = state.gradients
        gradient = checker.updates(self, step, arguments)
        state.gradients = None
        self.point("update")  # can only go on, fail or be killed
        assert gradients is not None
        state.gradients = (*gradients, gradient)
        self.kept.saved = state.buffers
        checker.applied(self, state.gradients)

    def after_step(self) -> None:
        """What the user does behind `commit`: a checkpoint, copies for the buddies."""
        job, step = self.world.job, self.kept.newest
        if job.save_every and step % job.save_every == 0 and self.rank == 0:
            self.point("saves")
            self.world.checkpoint = self.state.value()
        if job.copy_every and step % job.copy_every == 0:
            self.point("copies")
            copy = Copied(self.state.shard, self.state.value(), frozenset({self._origin()}))
            self.keep_copy(copy)
            self.point("copies to its buddy")
            buddy = self.world.members[(self.rank + 1) % self.world.size]
            if not buddy.has_left:
                buddy.keep_copy(copy)

    def _origin(self) -> int:
        assert self.kept.held is not None
        return self.kept.held.origin

    def keep_copy(self, copy: Copied) -> None:
        """Keeps a copy, and of each shard's the newest ones."""
        others = [one for one in self.process.copies if one.shard != copy.shard]
        same = [one for one in self.process.copies if one.shard == copy.shard]
        older = [one for one in same if one.said().step < copy.said().step]  # the others were given up
        self.process.copies = [*others, *[*older, dataclasses.replace(copy)][-KEEPS_COPIES:]]

    # ---- a recovery

    def build(self) -> None:
        """See `Performer`."""
        self.point("builds")
        self.kept.objects = None
        self.kept.saved = None
        self.process.recoveries = frozenset()
        self.kept.objects = State(self.world.job.shards[self.rank], ("built by", self.process.number))

    def gather(self, mine: Holding) -> tuple[list[Holding], Register]:
        """See `Performer`."""
        register = self.read_register() if self.rank == 0 else Register()
        self.world.checker.says(self)
        meeting = self.meet("gather", (mine, register))
        said = [meeting.values[rank][0] for rank in range(self.world.size)]
        register = meeting.values[0][1]
        self.world.checker.planned(said, register)
        return said, register

    def read_register(self) -> Register:
        """Active rank 0 reads it."""
        self.point("reads the register")
        self.has_read = self.world.register
        return self.has_read

    def copies(self) -> tuple[Copy, ...]:
        """See `Performer`."""
        return tuple(one.said() for one in self.process.copies)

    def drop_step(self) -> None:
        """See `Performer`."""
        self.point("drops the step")
        self.state.gradient = ()
        if self.kept.saved is not None:
            self.state.buffers = self.kept.saved

    def move(self, plan: Plan) -> Any:
        """See `Performer`."""
        received = self._exchange(plan, self._sent_by)
        self.later = received if self.kept.held is not None else None
        return received

    def take_copies(self, plan: Plan) -> Any:
        """See `Performer`."""
        shard = self.world.job.shards[self.rank]

        def copy_of(member: Member) -> Received:
            copies = (
                one for one in member.process.copies if (one.shard, one.said().step) == (shard, plan.step)
            )
            copy = next(copies)
            self.world.checker.uses_copy(copy)
            return Received(copy.shard, copy.value, frozenset())

        received = self._exchange(plan, copy_of)
        return copy_of(self) if received is None else received

    def _sent_by(self, member: Member) -> Received:
        state = member.state
        self.world.checker.sends(member)
        return Received(state.shard, state.value(), member.process.recoveries)

    def _exchange(self, plan: Plan, source: Callable[[Member], Received]) -> Received | None:
        """A receiver gets a part from each holder; a holder leaves once its receivers have confirmed."""
        world = self.world
        if not plan.routes:
            return None
        self.meet("offers")
        parts = []
        route = plan.route_of(self.rank)
        for holder in () if route is None else route.holders:
            self.point(f"receives from {holder}")
            sender = world.members[holder]
            if sender.has_left:
                raise Interrupted  # its connection is closed
            parts.append(source(sender))
            world.confirmed.add((self.rank, holder))
            world.wake()
        mine = {(one.receiver, self.rank) for one in plan.routes if self.rank in one.holders}
        self.wait("sends", lambda: mine <= world.confirmed)
        if not parts:
            return None
        if len({(part.shard, part.value) for part in parts}) > 1:
            raise Violation(f"L2: rank {self.rank} receives parts of different states: {parts}")
        together = frozenset[int]().union(*(part.recoveries for part in parts))  # same bits: true of each
        return dataclasses.replace(parts[0], recoveries=together)

    def rebind(self) -> None:
        """See `Performer`."""
        self.kept.objects = self.kept.objects

    def adopt(self, received: Received) -> None:
        """See `Performer`."""
        self.point("adopts")
        state = self.state
        state.gradients = None
        self.kept.saved = None
        self.process.recoveries = received.recoveries | self.finished_with(received)
        self.later = None
        self.point("adopts the rest")
        value = received.value
        state.shard, state.base, state.buffers = received.shard, value.base, value.buffers
        state.gradient, state.gradients = (), value.gradients
        # A rank that holds another shard from now on has finished before.
        self.kept.saved = self.state.buffers

    def finished_with(self, received: Received) -> frozenset[int]:
        """This recovery, if it was finished with what was received and is put in now."""
        is_finished = self.later is received and self.rank in self.world.checker.finishers
        return frozenset({self.world.n}) if is_finished else frozenset()

    def restore(self) -> int:
        """See `Performer`."""
        self.point("restores")
        state, saved = self.state, self.world.checkpoint
        self.process.recoveries = frozenset()
        if saved is not None:
            state.base, state.buffers, state.gradients = saved.base, saved.buffers, saved.gradients
        step = 0 if saved is None else len(saved.gradients)
        if len(set(self.meet("restore", step).values.values())) > 1:
            raise Violation("the ranks load different checkpoints")
        return step

    def differing(self, shard: Hashable, receivers: Collection[int] | None) -> tuple[Route, ...]:
        """See `Performer`."""
        if receivers is None:
            self.meet("equalize")
            if self.state.base[0] == "built by":
                self.state.base = ("of iteration", self.world.n)
            return ()
        mine = self.state.shard, self.state.value()
        values = self.meet("compare", mine).values
        by_shard = dict(values.values())
        if any(by_shard[shard] != value for shard, value in values.values()):
            raise Violation(f"L2: replicas differ: {values}")
        return ()

    def finish(self, plan: Plan, number: int) -> None:
        """See `Performer`."""
        self.point("finishes")
        self.kept.saved = self.state.buffers
        self.world.checker.finished(self, plan)
        if plan.rung is Rung.COPIES:
            self._label_copies(plan, number)

    def _label_copies(self, plan: Plan, number: int) -> None:
        """The copies that lead to the one gone back to belong to the new history, too."""
        for one in self.process.copies:
            if one.said().step <= plan.step and plan.origin in one.origins:
                one.origins |= {number}

    def seal(self, plan: Plan, register: Register) -> None:
        """See `Performer`."""
        self.is_recovering = False
        if self.rank == 0:
            self.write_register(register)
        if plan.rung is not Rung.PEERS:
            self.process.copies = [one for one in self.process.copies if one.said().step <= plan.step]

    def write_register(self, register: Register) -> None:
        """Active rank 0 writes it."""
        world = self.world
        while True:
            self.writes = self.has_read, register
            with self.atomic("writes the register"):
                if not world.job.compares or world.register == self.has_read:
                    world.register = register
                    world.checker.written(register)
                    return
            if self.read_register().sealed > register.sealed:
                raise Interrupted  # it was left out
