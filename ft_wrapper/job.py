"""This process's part in the job: joining, leaving an iteration, going on to the next, the goodbye."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import traceback

from . import events
from .attribution import Interruption
from .exception import RestartError
from .monitor.death import await_others, report_death
from .rank_assignment import RankDiscarded
from .store import Decision, Fault, Member, StoreMixin, View

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long this process waits for the others, in seconds.

    Args:
        barrier: for those that live but do not come.
        heartbeat: until a missing one counts as silent.
        completion: for the others to finish, once this one has.
        min_world_size: fewer members than this do not go on.
    """

    barrier: float
    heartbeat: float
    completion: float
    min_world_size: int


@dataclasses.dataclass(frozen=True)
class Remembered:
    """What a process remembers of its last wrapped call, for the next one on the same store.

    Args:
        member: who it was.
        view: the iteration that ended well.
        rank: its rank there.
        world_size: number of ranks there.
    """

    member: Member
    view: View
    rank: int
    world_size: int


class Job:
    """A member of the job and what it knows of the iteration it is in.

    Args:
        store: the coordination store.
        slot: the initial rank.
        slots: the slots that the job begins with.
        patience: how long to wait for the others.
    """

    def __init__(self, store: StoreMixin, slot: int, slots: list[int], patience: Patience) -> None:
        self.store = store
        self.slot = slot
        self.slots = slots
        self.host = socket.gethostname()
        self.member: Member
        self.view: View
        self.decision: Decision
        self._patience = patience

    def register(self) -> None:
        """Takes the slot: this process is its next incarnation.

        Raises:
            RankDiscarded: the job is on already.
        """
        self.member = self.store.register(self.slot, json.dumps({"host": self.host, "pid": os.getpid()}))
        if self.store.read_head() is not None:
            raise RankDiscarded(
                f"slot {self.slot} came as {self.member} when the job was already on; a process that is "
                "started again cannot join a running job yet: start the whole job again"
            )

    def form(self) -> None:
        """Takes part in the job's first decision.

        Raises:
            TimeoutError: not all slots joined in time.
            RankDiscarded: another process holds the slot.
        """
        smallest = self._patience.min_world_size
        self.store.join_first(self.member, self.slots, smallest)
        view = self.store.await_first(self.member, self.slots, self._patience.barrier, smallest)
        if view is None:
            raise RankDiscarded(f"another process holds slot {self.slot} of this job")
        assert view.head is not None
        self.view, self.decision = view, self.store.read_decision(view.head)

    def go_on(self, rank: int, world_size: int) -> None:
        """Says that this member has left the function, and waits for the next decision.

        Args:
            rank: its rank, in a world of
            world_size: so many, before the next rank assignment.

        Raises:
            RankDiscarded: the others go on without this member.
            TimeoutError: too few members are left.
        """
        events.emit("arrive", iteration=self.view.n, slot=self.slot)
        self.store.arrive(self.view, self.member, rank, world_size)
        step = self.store.await_next(
            self.view,
            self.member,
            timeout=self._patience.barrier,
            heartbeat_timeout=self._patience.heartbeat,
        )
        if step is None:
            raise RankDiscarded(
                f"slot {self.slot} was left out after iteration {self.view.n}: it was declared dead, or took "
                f"longer than barrier_timeout={self._patience.barrier:g} s to leave the function"
            )
        self.decision, self.view = step
        events.emit("decided", iteration=self.view.n, slot=self.slot)

    def publish(self, rank: int | None, error: BaseException) -> None:
        """Publishes an exception of this member and ends the iteration, if it is still on."""
        events.emit("fault", iteration=self.view.n, slot=self.slot, kind=Interruption.EXCEPTION.name)
        self.store.report_fault(self.view.n, self._raised(rank, Interruption.EXCEPTION, error))

    def leave(
        self, rank: int | None, interruption: Interruption, error: BaseException, *, ends: bool
    ) -> None:
        """Says that this member leaves the job in order; the others go on without it."""
        fault = self._raised(rank, interruption, error)
        try:
            # A proposal under way may keep this member, if it had arrived already.
            report_death(
                self.store, self.view, self.member, fault, active=ends, timeout=self._patience.barrier
            )
        except RestartError:
            log.exception("the others could not be told that slot %d leaves", self.slot)

    def await_others(self) -> None:
        """Waits until the others have gone on from the iteration that this member has left for good."""
        try:
            await_others(self.store, self.view, self._patience.barrier)
        except RestartError:
            log.debug("the store is gone", exc_info=True)

    def await_completion(self, active_rank: int | None, active_world_size: int) -> str:
        """Waits for the end of the iteration; says before, on an active rank, that the function returned.

        Returns:
            ``done`` or ``fault``.
        """
        n = self.view.n
        if active_rank is None:
            return self._await_end()
        self.store.finish(n, active_rank, active_world_size)
        outcome = self.store.wait_for_end(n, self._patience.completion)
        if outcome is None:
            self.store.complete(n, active_world_size)
            missing = sorted(set(range(active_world_size)) - self.store.finished_in(n))
            late = RestartError(
                f"ranks {missing} did not finish within completion_timeout={self._patience.completion:g} s"
            )
            if missing:
                self.publish(active_rank, late)
            outcome = self._await_end()
        return outcome

    def remember(self, rank: int, world_size: int) -> Remembered:
        """What the next wrapped call on the same store has to know."""
        return Remembered(self.member, self.view, rank, world_size)

    def say_goodbye(self) -> None:
        """This process needs the store no more."""
        try:
            self.store.say_goodbye(self.member)
        except RestartError:
            log.debug("no goodbye: the store is gone", exc_info=True)

    def _await_end(self) -> str:
        outcome = None
        while outcome is None:
            outcome = self.store.wait_for_end(self.view.n, 86400.0)
        return outcome

    def fault(self, rank: int | None, interruption: Interruption, message: str) -> Fault:
        """A fault of this member."""
        return Fault(self.member, rank, interruption, message, self.host, os.getpid())

    def _raised(self, rank: int | None, interruption: Interruption, error: BaseException) -> Fault:
        text = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
        return self.fault(rank, interruption, f"raised {text}")
