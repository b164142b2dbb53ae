"""Mistakes in the restart loop itself, the one that the wrapper runs: the explorer must find them, too.

A mistake changes what an action of the course is answered with, leaves an action out, or replaces a part of
the loop.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast

from mistakes import Mistake, MistakenSimulation, at_each_step, one_job, raises

from ft_wrapper.protocol.records import DONE
from ft_wrapper.restart.loop import (
    Action,
    Assign,
    CleanUp,
    Course,
    Left,
    Onward,
    RestartLoop,
    Run,
    Settle,
    TidyUp,
    do,
)
from ft_wrapper.state import Mode, State
from ft_wrapper.testing.defaults import SimulatedStore


def changed(course: Course[object], change: Callable[[Action[Any]], Course[Any]]) -> Course[object]:
    """A course of which each action is carried out in another way.

    Args:
        course: the right one.
        change: what is done instead of an action: a course that returns its answer.
    """
    resume, answer = course.send, cast(Any, None)
    while True:
        try:
            action = resume(answer)
        except StopIteration as end:
            return end.value
        try:
            answer = yield from change(action)
            resume = course.send
        except BaseException as error:
            resume, answer = cast(Any, course.throw), error


# A fault is not published


class PublishesNothing(RestartLoop):
    def course(self) -> Course[object]:
        return changed(super().course(), self.change)

    @staticmethod
    def change(action: Action[Any]) -> Course[Any]:
        answer = yield from do(action)
        return dataclasses.replace(answer, error=None) if isinstance(action, Run) else answer


class NothingPublished(MistakenSimulation):
    loops = PublishesNothing


# Ranks are assigned once


class AssignsOnce(RestartLoop):
    def course(self) -> Course[object]:
        assigned: list[State] = []

        def change(action: Action[Any]) -> Course[Any]:
            if not isinstance(action, Assign):
                return (yield from do(action))
            if not assigned:
                assigned.append(copy.copy((yield from do(action))))
            return dataclasses.replace(assigned[0], iteration=action.state.iteration)

        return changed(super().course(), change)


class AssignedOnce(MistakenSimulation):
    loops = AssignsOnce


# The rank says that it has left the function, and is still in it


class ArrivesFirst(RestartLoop):
    def _iterate(self) -> Course[Left | None]:
        member = self.member
        entered = yield from self.enter()
        if entered is not None:
            left = yield from do(Run(member.view, self.state, entered))
            if left.error is not None:
                member.publish(self.state.rank, left.error)
            active = self.state.active_world_size or 0
            if left.has_returned and member.await_completion(self.state.active_rank, active) == DONE:
                return left
        proposed = member.arrive(self.base.rank or 0, self.base.world_size, None)
        if entered is not None:
            yield from do(Settle())
        yield from do(CleanUp())
        yield from do(TidyUp())
        member.await_next(proposed)
        yield from do(Onward())
        return None


class ArrivedFirst(MistakenSimulation):
    loops = ArrivesFirst


# A rank whose function has returned does not ask whether the others' have


class CompletesAlone(RestartLoop):
    def _iterate(self) -> Course[Left | None]:
        entered = yield from self.enter()
        assert entered is not None
        left = yield from do(Run(self.member.view, self.state, entered))
        if left.error is None and left.has_returned and self.state.mode == Mode.ACTIVE:
            return left
        self.member.await_completion(None, 0)
        return left


class CompletedAlone(MistakenSimulation):
    loops = CompletesAlone


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
