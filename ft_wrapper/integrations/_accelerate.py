"""Random numbers under Accelerate: what its states do not have."""

import random
from typing import Any

from ..exception import JobAbort


class Seeds:
    """The seeds by which an accelerator's loaders shuffle; saved and loaded with its states.

    Accelerate takes them from each process's own random numbers, and does not save them.
    """

    def __init__(self, accelerator: Any) -> None:
        from accelerate.data_loader import SeedableRandomSampler

        samplers = map(_sampler, accelerator._dataloaders)
        self._samplers = [each for each in samplers if isinstance(each, SeedableRandomSampler)]
        accelerator.register_for_checkpointing(self)

    def agree(self) -> None:
        """All ranks take those of rank 0."""
        from accelerate.utils import broadcast_object_list

        self.load_state_dict(*broadcast_object_list([self.state_dict()]))

    def state_dict(self) -> dict[str, list[int]]:
        """What is saved."""
        return {"seeds": [sampler.initial_seed for sampler in self._samplers]}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Takes what was saved."""
        for sampler, seed in zip(self._samplers, state["seeds"], strict=True):
            sampler.initial_seed = seed


def check_prepared(accelerator: Any) -> None:
    """Refuses what would come again in each iteration, or give other weights.

    Raises:
        JobAbort: with the way out.
    """
    from accelerate.data_loader import SeedableRandomSampler

    if not accelerator._models:
        raise JobAbort("no model is prepared: call accelerator.prepare(model, …) before load_newest()")
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise JobAbort("automatic_checkpoint_naming=True saves in a folder of its own: leave it False")
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


def seed(*parts: object) -> None:
    """Makes the random numbers that follow depend on these parts alone."""
    from accelerate.utils import set_seed

    set_seed(random.Random(repr(parts)).getrandbits(32))


def _sampler(loader: Any) -> Any:
    """By what a prepared loader shuffles; Accelerate has put its own batch samplers around it."""
    from torch.utils.data import BatchSampler

    sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while sampler is not None and hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", None)
