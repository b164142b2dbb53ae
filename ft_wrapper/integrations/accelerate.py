"""Accelerate through faults: see ``docs/accelerate.md``."""

import sys
from typing import Any

from ..checkpoints import Checkpoints
from ..exception import JobAbort
from ..finalize import Finalize
from ..initialize import Initialize
from ..live.data import seed_all
from ..state import FrozenState
from ..wrapper import CallWrapper
from .noticed import begins_noticed


class ForgetAccelerate(Finalize, Initialize):
    """Clears what Accelerate keeps from the old ranks; does nothing if Accelerate is not imported.

    For ``Wrapper(finalize=…)``; as ``initialize=``, too, if a process makes several wrapped calls.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Clears Accelerate's singletons: the next `Accelerator` makes a process group again."""
        if (module := sys.modules.get("accelerate.state")) is not None:
            module.AcceleratorState._reset_state(reset_partial_state=True)
            module.GradientState._reset_state()
        return state


def load_newest(accelerator: Any, checkpoints: Checkpoints, **arguments: Any) -> int:
    """Loads the newest sealed state, and returns its step; 0: there is none.

    Call it once on each rank, when all is prepared. It also makes all ranks, and all iterations, shuffle by
    the same seed.

    Args:
        accelerator: an ``Accelerator``.
        checkpoints: where `save_state` saves.
        arguments: for ``accelerator.load_state``.

    Raises:
        JobAbort: nothing is prepared yet, or a state would not restore the order of the data.
    """
    _check_prepared(accelerator)
    seeds = _Seeds(accelerator)
    newest = checkpoints.newest()
    if newest is None:
        seeds.agree()
        return 0
    accelerator.load_state(str(newest.path), **arguments)
    return newest.step


def begin_step(accelerator: Any, call_wrapper: CallWrapper, step: int, seed: int = 0) -> bool:
    """Pings, and makes the random numbers of a step depend on the seed, the step and the rank alone.

    Call it after the loader and before the forward pass: a loader that continues in the middle of an epoch
    draws numbers that one at its beginning drew earlier. With gradient accumulation call it at each batch.

    Args:
        accelerator: an ``Accelerator``.
        call_wrapper: what the wrapped function was given.
        step: how many batches are done.
        seed: of the random numbers.

    Returns:
        Whether to call `save_state` once the optimizer has made its next step, since all ranks see a new
        notice.
    """
    # Ranks wait for each other once in a step of the optimizer, not at each batch.
    is_noticed = begins_noticed(call_wrapper, step // accelerator.gradient_accumulation_steps)
    seed_all(seed, step, accelerator.process_index)
    return is_noticed


def save_state(accelerator: Any, checkpoints: Checkpoints, step: int, **arguments: Any) -> None:
    """``accelerator.save_state`` into this iteration's folder, sealed once all ranks have written.

    Args:
        accelerator: an ``Accelerator``.
        checkpoints: where to save.
        step: how many are done.
        arguments: for ``accelerator.save_state``.

    Raises:
        JobAbort: as `load_newest`, of what was prepared since.
    """
    _check_prepared(accelerator)
    accelerator.save_state(str(checkpoints.path(step)), **arguments)
    checkpoints.seal(step)


# Random numbers: what Accelerate's states do not have -------------------------------------------------------


class _Seeds:
    """The seeds by which an accelerator's loaders shuffle; saved and loaded with its states.

    Accelerate takes them from each process's own random numbers, and does not save them.
    """

    def __init__(self, accelerator: Any) -> None:
        from accelerate.data_loader import SeedableRandomSampler

        samplers = map(_sampler, accelerator._dataloaders)
        self._samplers = [each for each in samplers if isinstance(each, SeedableRandomSampler)]
        accelerator.register_for_checkpointing(self)

    def agree(self) -> None:
        """All ranks adopt those of rank 0."""
        from accelerate.utils import broadcast_object_list

        self.load_state_dict(*broadcast_object_list([self.state_dict()]))

    def state_dict(self) -> dict[str, list[int]]:
        """What is saved."""
        return {"seeds": [sampler.initial_seed for sampler in self._samplers]}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Takes what was saved."""
        for sampler, seed in zip(self._samplers, state["seeds"], strict=True):
            sampler.initial_seed = seed


def _check_prepared(accelerator: Any) -> None:
    """Refuses what would fail again in each iteration, or give different weights.

    Raises:
        JobAbort: says what to do.
    """
    from accelerate.data_loader import SeedableRandomSampler

    if not accelerator._models:
        raise JobAbort("no model is prepared: call accelerator.prepare(model, …) before load_newest()")
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise JobAbort("automatic_checkpoint_naming=True saves in its own folder: leave it False")
    for number, loader in enumerate(accelerator._dataloaders):
        sampler, name = _sampler(loader), f"the loader that was prepared as number {number + 1}"
        if getattr(loader, "use_stateful_dataloader", False):
            raise JobAbort(
                f"use_stateful_dataloader=True: all ranks would write the position of {name} into one file; "
                "leave it False, and use accelerator.skip_first_batches"
            )
        if hasattr(sampler, "generator") and not isinstance(sampler, SeedableRandomSampler):
            raise JobAbort(
                f"{name} takes its order from a {type(sampler).__name__}, whose random numbers are in no "
                "checkpoint: with shuffle=True pass dataloader_config=DataLoaderConfiguration("
                "use_seedable_sampler=True), else a sampler whose order depends on set_epoch"
            )


def _sampler(loader: Any) -> Any:
    """The sampler of a prepared loader; Accelerate has put its own batch samplers around it."""
    from torch.utils.data import BatchSampler

    sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while sampler is not None and hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", None)
