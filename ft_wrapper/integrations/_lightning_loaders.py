"""A Trainer's loaders: in which order they go, and where they stood."""

from typing import Any

from lightning.pytorch.utilities import CombinedLoader

from ._lightning_checks import check_order
from ._lightning_data import LOADERS, of_all_ranks, own_of


class Positions:
    """Where a rank's loaders stand."""

    def __init__(self) -> None:
        self._loaded: list[Any] | None = None
        self._before: list[Any] = []  # a batch ago

    def load(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Takes this rank's from a checkpoint."""
        loop = checkpoint["loops"]["fit_loop"]
        self._loaded = own_of(checkpoint.get(LOADERS, [[]]))
        loop["state_dict"]["combined_loader"] = self._loaded
        for progress in (loop["epoch_progress"]["total"], loop["epoch_progress"]["current"]):
            # With max_steps Lightning goes through the end of an epoch again, and counts it twice.
            progress["processed"] -= trainer.max_steps != -1 and progress["processed"] == progress["ready"]

    def begin(self, trainer: Any) -> None:
        """Behind a restart loaders begin in the epoch, and at the position, that they had.

        Lightning begins them before it tells their samplers the epoch: the order would be that of epoch 0.

        Raises:
            JobAbort: the order cannot be brought back.
        """
        fit_loop, loaders = trainer.fit_loop, _loaders(trainer)
        samplers = [_sampler(loader) for loader in loaders]
        for sampler in samplers:
            check_order(sampler)
        if self._loaded is not None:
            for sampler in samplers:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(fit_loop.epoch_progress.current.processed)
            if fit_loop.restarted_mid_epoch:
                for each, position in zip(filter(_is_stateful, loaders), self._loaded, strict=True):
                    each.load_state_dict(position)
            iter(fit_loop._data_fetcher)
        self.note(trainer)

    def note(self, trainer: Any) -> None:
        """A batch is done; of loaders without a length Lightning has taken the next one already."""
        is_ahead = getattr(trainer.fit_loop._data_fetcher, "batches", None)
        self._before = (
            [each.state_dict() for each in filter(_is_stateful, _loaders(trainer))] if is_ahead else []
        )

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Puts those of all ranks into a checkpoint; called on all ranks."""
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        checkpoint[LOADERS] = of_all_ranks(self._before or state.get("combined_loader", []))


def _loaders(trainer: Any) -> list[Any]:
    return list(CombinedLoader(trainer.train_dataloader).flattened)


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "load_state_dict")


def _sampler(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
