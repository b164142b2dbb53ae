"""A Trainer's callback: what it refuses, when it pings, seeds and saves."""

import signal
from typing import Any

from lightning.pytorch.callbacks import Checkpoint

from ..checkpoints import Checkpoints, step_of
from ..exception import JobAbort
from ..wrapper import CallWrapper
from ._lightning import file_of
from ._lightning_checks import check
from ._lightning_data import LOADERS, begin_loaders, of_all_ranks, own_of, seed


class Callback(Checkpoint):
    """See `FT`."""

    def __init__(self, call_wrapper: CallWrapper, checkpoints: Checkpoints, every: int, seed: int) -> None:
        self._call_wrapper, self._checkpoints = call_wrapper, checkpoints
        self._every, self._seed = every, seed
        self._step = 0  # of the newest checkpoint
        self._positions: list[Any] | None = None  # of the loaders in what was loaded
        self._sigterm: Any = None

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._sigterm = signal.getsignal(signal.SIGTERM)
        check(trainer)

    def on_load_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        loop = checkpoint["loops"]["fit_loop"]
        self._positions = own_of(checkpoint.get(LOADERS, [[]]))
        loop["state_dict"]["combined_loader"] = self._positions
        for progress in (loop["epoch_progress"]["total"], loop["epoch_progress"]["current"]):
            # With max_steps Lightning goes through the end of an epoch again, and counts it twice.
            progress["processed"] -= trainer.max_steps != -1 and progress["processed"] == progress["ready"]

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._forget_handler()
        begin_loaders(trainer, self._positions)
        if not self._step and (newest := self._checkpoints.newest()) is not None:
            self._step = step_of(newest)
        if trainer.global_step < self._step:
            raise JobAbort(
                f"FT: begins at step {trainer.global_step}, but step {self._step} is saved: pass "
                "fit(…, ckpt_path=ft.newest()); for another training make another FT, with another root"
            )

    def on_train_batch_start(self, trainer: Any, _: Any, __: Any, batch_idx: int) -> None:
        self._call_wrapper.ping()
        seed(self._seed, trainer.global_step, batch_idx, trainer.global_rank)  # generators are not saved

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.is_last_batch:  # from there Lightning would go on with the epoch after the next
            self.on_train_epoch_end(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if step > self._step and step % self._every == 0:  # a step may have several batches
            trainer.save_checkpoint(file_of(self._checkpoints.folder(step)))
            self._checkpoints.seal(step)
            self._step = step

    def on_save_checkpoint(self, _: Any, __: Any, checkpoint: dict[str, Any]) -> None:
        positions = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        checkpoint[LOADERS] = of_all_ranks(positions)

    def on_validation_batch_start(self, *_: Any) -> None:
        self._call_wrapper.ping()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _forget_handler(self, *_: Any) -> None:
        # Lightning's waits for all ranks, in the midst of whatever a rank does, and for the end of the step.
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = _forget_handler
