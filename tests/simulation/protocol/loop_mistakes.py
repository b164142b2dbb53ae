"""Mistakes in the restart loop itself, the one that the wrapper runs: the explorer must find them, too.

A mistake does something else than the loop asks for, or replaces a part of the loop.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from mistakes import Mistake, MistakenSimulation, at_each_step, one_job, raises

from ft_wrapper.protocol.records import DONE, Decision
from ft_wrapper.restart.loop import FunctionResult, RestartLoop
from ft_wrapper.state import Mode, State
from tests.explorer.process import SimulatedJob, SimulatedProcess
from tests.explorer.stores import SimulatedStore


class Mistaken:
    """A process that does one thing in another way than its loop asks for.

    Args:
        process: does the rest.
    """

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


# A fault is not published


class PublishesNothing(Mistaken):
    def call_function(self, state: State) -> FunctionResult:
        return dataclasses.replace(self._process.call_function(state), error=None)


class NothingPublished(MistakenSimulation):
    def restart_loop(self, member: SimulatedJob, base: State, process: SimulatedProcess) -> RestartLoop:
        return RestartLoop(member, base, PublishesNothing(process))


# Ranks are assigned once


class AssignsOnce(Mistaken):
    assigned: State | None = None

    def assign(self, state: State, decision: Decision) -> State:
        if self.assigned is None:
            self.assigned = copy.copy(self._process.assign(state, decision))
        return dataclasses.replace(self.assigned, iteration=state.iteration)


class AssignedOnce(MistakenSimulation):
    def restart_loop(self, member: SimulatedJob, base: State, process: SimulatedProcess) -> RestartLoop:
        return RestartLoop(member, base, AssignsOnce(process))


# The rank says that it has left the function, and is still in it


class ArrivesFirst(RestartLoop):
    def _iterate(self) -> FunctionResult | None:
        member = self.member
        entered = self.assign_and_meet()
        if entered:
            left = self.process.call_function(self.state)
            if left.error is not None:
                member.publish(self.state.rank, left.error)
            active = self.state.active_world_size or 0
            if left.has_returned and member.await_completion(self.state.active_rank, active) == DONE:
                return left
        proposed = member.arrive(self.base.rank or 0, self.base.world_size, None)
        if entered:
            self.process.await_abort()
        self.process.clean_up()
        self.process.reset_process()
        member.await_next(proposed)
        self.process.all_arrived()
        return None


class ArrivedFirst(MistakenSimulation):
    def restart_loop(self, member: SimulatedJob, base: State, process: SimulatedProcess) -> RestartLoop:
        return ArrivesFirst(member, base, process)


# A rank whose function has returned does not ask whether the others' have


class CompletesAlone(RestartLoop):
    def _iterate(self) -> FunctionResult | None:
        entered = self.assign_and_meet()
        assert entered
        left = self.process.call_function(self.state)
        if left.error is None and left.has_returned and self.state.mode == Mode.ACTIVE:
            return left
        self.member.await_completion(None, 0)
        return left


class CompletedAlone(MistakenSimulation):
    def restart_loop(self, member: SimulatedJob, base: State, process: SimulatedProcess) -> RestartLoop:
        return CompletesAlone(member, base, process)


LOOP_MISTAKES = [
    Mistake(
        "a fault is not published",
        "no one else hears of it: they wait in the function for the rank that has left",
        "I10",
        SimulatedStore,
        one_job(disturbances=raises(1, 1)),
        simulation=NothingPublished,
    ),
    Mistake(
        "ranks are assigned once, and kept over a restart",
        "a survivor keeps its rank beside those that have moved up",
        "I2",
        SimulatedStore,
        at_each_step("crash", range(20, 30), slots=[0]),
        simulation=AssignedOnce,
    ),
    Mistake(
        "a rank arrives before its function's thread is free",
        "the others go on, and it is in the function of an iteration that is over",
        "I12",
        SimulatedStore,
        one_job(disturbances=raises(1, 1)),
        simulation=ArrivedFirst,
    ),
    Mistake(
        "a rank completes as soon as its own function has returned",
        "one returns while another's fault restarts the rest",
        "I9",
        SimulatedStore,
        one_job(members=2, active=2, steps=2, disturbances=raises(1, 1)),
        simulation=CompletedAlone,
    ),
]
