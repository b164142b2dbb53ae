"""Accelerate through faults: see ``docs/accelerate.md``."""

import sys
from typing import Any

from ..checkpoints import Checkpoints
from ..finalize import Finalize
from ..initialize import Initialize
from ..state import FrozenState
from ..wrapper import CallWrapper
from . import _accelerate


class ForgetAccelerate(Finalize, Initialize):
    """Clears what Accelerate keeps of the old ranks; does nothing if Accelerate is not imported.

    For ``Wrapper(finalize=…)``; as ``initialize=``, too, where a process makes several wrapped calls.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Clears Accelerate's singletons: the next `Accelerator` makes a process group again."""
        if (module := sys.modules.get("accelerate.state")) is not None:
            module.AcceleratorState._reset_state(reset_partial_state=True)
            module.GradientState._reset_state()
        return state


def load_newest(accelerator: Any, checkpoints: Checkpoints, **arguments: Any) -> int:
    """Loads the newest sealed state, and returns its step; 0: there is none.

    Call it once on each rank, when all is prepared. It also sees to it that all ranks, and all iterations,
    shuffle by the same seed.

    Args:
        accelerator: an ``Accelerator``.
        checkpoints: where `save_state` saves.
        arguments: for ``accelerator.load_state``.

    Raises:
        JobAbort: nothing is prepared yet, or a state would not bring back the order of the data.
    """
    _accelerate.check_prepared(accelerator)
    seeds = _accelerate.Seeds(accelerator)
    newest = checkpoints.newest()
    if newest is None:
        seeds.agree()
        return 0
    accelerator.load_state(str(newest.path), **arguments)
    return newest.step


def begin_step(accelerator: Any, call_wrapper: CallWrapper, step: int, seed: int = 0) -> None:
    """Pings, and makes the random numbers of a step depend on the seed, the step and the rank alone.

    Call it behind the loader and before the forward pass: a loader that goes on in the middle of an epoch
    draws numbers that one at its beginning has drawn before.
    """
    call_wrapper.ping(step)
    _accelerate.seed(seed, step, accelerator.process_index)


def save_state(accelerator: Any, checkpoints: Checkpoints, step: int, **arguments: Any) -> None:
    """``accelerator.save_state`` into this iteration's folder, sealed once all ranks have written.

    Args:
        accelerator: an ``Accelerator``.
        checkpoints: say where.
        step: how many are done.
        arguments: for ``accelerator.save_state``.

    Raises:
        JobAbort: as `load_newest`, of what was prepared since.
    """
    _accelerate.check_prepared(accelerator)
    accelerator.save_state(str(checkpoints.path(step)), **arguments)
    checkpoints.seal(step)
