"""Lightning's Trainer and Fabric through faults: see ``docs/lightning.md``."""

import os
from typing import Any

from ..checkpoints import Checkpoints, step_of
from ..wrapper import CallWrapper

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    raise ImportError(f"this needs Lightning: pip install lightning ({error})") from error

from ._lightning import arguments, file_of
from ._lightning_callback import Callback
from ._lightning_checks import as_every
from ._lightning_data import LOADERS, of_all_ranks, own_of
from ._lightning_data import seed as seed_by


class FT:
    """Checkpoints of a Trainer, or of Fabric. Make it in the wrapped function, before the Trainer.

    Args:
        call_wrapper: what the wrapped function was given.
        root: the folder of all checkpoints; see `Checkpoints`.
        every: steps of the optimizer between two checkpoints of a Trainer.
        keep: so many sealed checkpoints stay.
        seed: of each step's random numbers.

    Attributes:
        checkpoint: for ``Trainer(callbacks=[…])``. Refuses what does not go with restarts (`JobAbort`); pings
            and seeds at each batch, pings in evaluations, too; saves and seals.

    Raises:
        JobAbort: as `Checkpoints`, or ``every`` is no number of steps.
    """

    def __init__(
        self,
        call_wrapper: CallWrapper,
        root: str | os.PathLike[str],
        every: int = 100,
        keep: int = 3,
        seed: int = 0,
    ) -> None:
        self._checkpoints = Checkpoints(call_wrapper, root, keep)
        self._call_wrapper, self._seed = call_wrapper, seed
        self.checkpoint = Callback(call_wrapper, self._checkpoints, as_every(every), seed)

    def trainer(self, *plugins: Any) -> dict[str, Any]:
        """For ``Trainer(**…)`` and ``Fabric(**…)``: accelerator, devices, num_nodes; plugins, with yours."""
        return arguments(plugins)

    def newest(self) -> str | None:
        """For ``fit(ckpt_path=…)``: the newest sealed checkpoint, the same on all ranks, or None."""
        newest = self._checkpoints.newest()
        return None if newest is None else str(file_of(newest))

    def begin_step(self, step: int) -> None:
        """Of Fabric: pings, and seeds a step by its number and the rank. Call it behind the loader."""
        self._call_wrapper.ping(step)
        seed_by(self._seed, step, self._call_wrapper.state.active_rank)

    def save(self, fabric: Any, state: dict[str, Any], step: int, loader: Any = None) -> None:
        """Of Fabric: as ``fabric.save``, with each rank's position in its loader; seals it. All ranks."""
        positions = of_all_ranks(None if loader is None else loader.state_dict())
        fabric.save(file_of(self._checkpoints.folder(step)), {**state, LOADERS: positions})
        self._checkpoints.seal(step)

    def load(self, fabric: Any, state: dict[str, Any], loader: Any = None) -> int:
        """Of Fabric: as ``fabric.load`` of the newest state; returns its step, or 0. All ranks."""
        newest = self._checkpoints.newest()
        if newest is None:
            return 0
        rest = fabric.load(file_of(newest), state)
        if loader is not None:
            loader.load_state_dict(own_of(rest[LOADERS]))
        return step_of(newest)
