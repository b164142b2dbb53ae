"""What a Trainer is refused: what would come again in each iteration."""

from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from ..exception import JobAbort
from ..settings import as_int
from ._lightning import Environment, WholeFiles


def as_every(every: Any) -> int:
    """Checks it; what is wrong would come again in each iteration."""
    try:
        return as_int("every", every, at_least=1)
    except (TypeError, ValueError) as error:
        raise JobAbort(f"FT: {error}") from error


def check(trainer: Any) -> None:
    """Refuses what cannot work.

    Raises:
        JobAbort: with the way out.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    is_placed = trainer.world_size == 1 or isinstance(environment, Environment)
    if not is_placed or not isinstance(trainer.strategy.checkpoint_io, WholeFiles):
        raise JobAbort("FT: the Trainer has no arguments of FT: Trainer(**ft.trainer(), …)")
    for each in trainer.callbacks:
        if isinstance(each, OnExceptionCheckpoint) or getattr(each, "save_on_exception", False):
            raise JobAbort(
                f"FT: {type(each).__name__} saves when there is an exception, and then waits for ranks "
                "that do not come: leave save_on_exception=False"
            )


def check_order(sampler: Any) -> None:
    """Refuses a loader's sampler whose order a restart does not bring back.

    Raises:
        JobAbort: with the way out.
    """
    sampler = sampler.dataset._sampler if isinstance(sampler, DistributedSamplerWrapper) else sampler
    if hasattr(sampler, "generator"):
        raise JobAbort(
            f"FT: a loader takes its order from a {type(sampler).__name__}, whose random numbers are in no "
            "checkpoint: pass sampler=DistributedSampler(…), or one whose order depends on set_epoch"
        )
