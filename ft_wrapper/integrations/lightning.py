"""Lightning through faults, with Trainer or Fabric: see ``docs/lightning.md``."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoints import Checkpoints
from ..exception import JobAbort, for_good
from ..live.data import seed_all
from ..settings import as_int
from ..wrapper import CallWrapper
from .noticed import begins_noticed

try:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning.pytorch.callbacks import Checkpoint, OnExceptionCheckpoint
    from lightning.pytorch.utilities import CombinedLoader
except ImportError as error:
    raise ImportError(f"this needs Lightning: pip install lightning ({error})") from error


class FT:
    """Checkpoints of a Trainer, or of Fabric. Make it in the wrapped function, before the Trainer.

    Args:
        call_wrapper: what the wrapped function was given.
        root: the folder of all checkpoints; see `Checkpoints`.
        every: steps of the optimizer between two checkpoints of a Trainer.
        keep: how many sealed checkpoints stay.
        seed: of each step's random numbers.

    Attributes:
        callback: for ``Trainer(callbacks=[…])``. Refuses what does not work with restarts (`JobAbort`); pings
            and seeds at each batch, pings in evaluations, too; saves and seals, also the step at whose
            beginning all ranks see a notice.

    Raises:
        JobAbort: as `Checkpoints`, or ``every`` is not a number of steps.
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
        with for_good("FT"):
            every = as_int("every", every, at_least=1)
        self.callback = Callback(call_wrapper, self._checkpoints, every, seed)

    def trainer(self, *plugins: Any) -> dict[str, Any]:
        """For ``Trainer(**…)`` and ``Fabric(**…)``: accelerator, devices, num_nodes; plugins, with yours."""
        cuda = torch.cuda.is_available()
        return {
            "accelerator": "cuda" if cuda else "cpu",
            "devices": [int(os.environ["LOCAL_RANK"])] if cuda else 1,
            "num_nodes": int(os.environ["WORLD_SIZE"]),
            "plugins": [Environment(), WholeFiles(), *plugins],
        }

    def newest(self) -> str | None:
        """For ``fit(ckpt_path=…)``: the newest sealed checkpoint, the same on all ranks, or None."""
        newest = self._checkpoints.newest()
        return None if newest is None else str(file_of(newest.path))

    def begin_step(self, step: int) -> bool:
        """Of Fabric: pings, and seeds a step by its number and the rank. Call it after the loader.

        Returns:
            Whether to `save` at the end of this step, since all ranks see a new notice.
        """
        is_noticed = begins_noticed(self._call_wrapper, step)
        seed_all(self._seed, step, self._call_wrapper.rank)
        return is_noticed

    def save(self, fabric: Any, state: dict[str, Any], step: int, loader: Any = None) -> None:
        """Of Fabric: as ``fabric.save``, with each rank's position in its loader; seals it. All ranks."""
        positions = of_all_ranks(None if loader is None else loader.state_dict())
        fabric.save(file_of(self._checkpoints.path(step)), {**state, LOADERS: positions})
        self._checkpoints.seal(step)

    def load(self, fabric: Any, state: dict[str, Any], loader: Any = None) -> int:
        """Of Fabric: as ``fabric.load`` of the newest state; returns its step, or 0. All ranks."""
        if (newest := self._checkpoints.newest()) is None:
            return 0
        rest = fabric.load(file_of(newest.path), state)
        if loader is not None:
            loader.load_state_dict(own_of(rest[LOADERS]))
        return newest.step


class Environment(TorchElasticEnvironment):
    """Each process is a node of one device: Lightning wants as many ranks on each node, and in a row."""

    def local_rank(self) -> int:
        """The only rank of its node."""
        return 0

    def node_rank(self) -> int:
        """The active rank."""
        return int(os.environ["RANK"])


class WholeFiles(TorchCheckpointIO):
    """Writes alongside, and renames; Lightning moves from ``TMPDIR``: often a copy, which may break off."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Writes a file; on object storage as Lightning does."""
        if storage_options is not None or "://" in os.fspath(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        beside = f"{os.fspath(path)}.tmp"
        try:
            with open(beside, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise


def file_of(folder: Path) -> Path:
    """The checkpoint in its folder, which `Checkpoints` seals; of a sharded one, a folder."""
    return folder / "state.ckpt"


#: In a checkpoint: all ranks' positions in their loaders. Lightning has those of rank 0 alone.
LOADERS = "ft_wrapper.loaders"


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank passes."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_of(values: list[Any]) -> Any:
    """What this rank passed, which may have moved; with another number of ranks it is rank 0's."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return values[rank if len(values) == size else 0]


def check_trainer(trainer: Any) -> None:
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
            why = "saves when there is an exception, and waits for ranks that do not come"
            raise JobAbort(f"FT: {type(each).__name__} {why}: leave save_on_exception=False")


def check_order(sampler: Any) -> None:
    """Refuses a loader's sampler whose order a restart does not restore.

    Raises:
        JobAbort: with the way out.
    """
    sampler = sampler.dataset._sampler if isinstance(sampler, DistributedSamplerWrapper) else sampler
    if hasattr(sampler, "generator"):
        raise JobAbort(
            f"FT: a loader takes its order from a {type(sampler).__name__}, whose random numbers are in no "
            "checkpoint: pass sampler=DistributedSampler(…), or one whose order depends on set_epoch"
        )


def _loaders(trainer: Any) -> list[Any]:
    return list(CombinedLoader(trainer.train_dataloader).flattened)


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "load_state_dict")


def _sampler(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "sampler", None) or getattr(loader, "sampler", None)


class Callback(Checkpoint):
    """See `FT`."""

    def __init__(self, call_wrapper: CallWrapper, checkpoints: Checkpoints, every: int, seed: int) -> None:
        self._call_wrapper, self._checkpoints = call_wrapper, checkpoints
        self._every, self._seed = every, seed
        self._step = 0  # of the newest checkpoint
        self._noticed: int | None = None  # the step, not saved yet, at whose beginning there was a notice
        self._loaded: list[Any] | None = None  # positions of the loaders
        self._before: list[Any] = []  # the same, a batch ago
        self._sigterm: Any = None

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._sigterm = signal.getsignal(signal.SIGTERM)
        check_trainer(trainer)

    def on_load_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        loop = checkpoint["loops"]["fit_loop"]
        self._loaded = own_of(checkpoint.get(LOADERS, [[]]))
        loop["state_dict"]["combined_loader"] = self._loaded
        for progress in (loop["epoch_progress"]["total"], loop["epoch_progress"]["current"]):
            # With max_steps Lightning goes through the end of an epoch again, and counts it twice.
            progress["processed"] -= trainer.max_steps != -1 and progress["processed"] == progress["ready"]

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._forget_handler()
        self._begin_loaders(trainer)
        if not self._step and (newest := self._checkpoints.newest()) is not None:
            self._step = newest.step
        if trainer.global_step < self._step:
            raise JobAbort(
                f"FT: begins at step {trainer.global_step}, but step {self._step} is saved: pass "
                "fit(…, ckpt_path=ft.newest()); for another training make another FT, with another root"
            )

    def on_train_batch_start(self, trainer: Any, _: Any, __: Any, batch_idx: int) -> None:
        # Ranks wait for each other once in a batch; there each of several optimizers makes a step of its own.
        if begins_noticed(self._call_wrapper, trainer.global_step // max(1, len(trainer.optimizers))):
            self._noticed = trainer.global_step
        seed_all(self._seed, trainer.global_step, batch_idx, trainer.global_rank)  # generators are not saved

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.is_last_batch:  # from there Lightning would go on with the epoch after the next
            self.on_train_epoch_end(trainer)
        self._note_positions(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        is_noticed = self._noticed is not None and step > self._noticed  # a step may have several batches
        if step > self._step and (is_noticed or step % self._every == 0):
            trainer.save_checkpoint(file_of(self._checkpoints.path(step)))
            self._checkpoints.seal(step)
            self._step, self._noticed = step, None

    def on_save_checkpoint(self, _: Any, __: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        checkpoint[LOADERS] = of_all_ranks(self._before or state.get("combined_loader", []))

    def on_validation_batch_start(self, *_: Any) -> None:
        self._call_wrapper.ping()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _begin_loaders(self, trainer: Any) -> None:
        """After a restart loaders begin in the epoch, and at the position, that they had.

        Lightning begins them before it sets their samplers' epoch: the order would be that of epoch 0.

        Raises:
            JobAbort: the order cannot be restored.
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
        self._note_positions(trainer)

    def _note_positions(self, trainer: Any) -> None:
        """A batch is done; of loaders without a length Lightning has taken the next one already."""
        is_ahead = getattr(trainer.fit_loop._data_fetcher, "batches", None)
        self._before = (
            [each.state_dict() for each in filter(_is_stateful, _loaders(trainer))] if is_ahead else []
        )

    def _forget_handler(self, *_: Any) -> None:
        # Lightning's waits for all ranks, whatever a rank is doing, and for the end of the step.
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = _forget_handler
