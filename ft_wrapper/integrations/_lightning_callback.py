"""A Trainer's callback: what it refuses, when it pings, seeds and saves."""

import signal
from typing import Any

from lightning.pytorch.callbacks import Checkpoint

from ..checkpoints import Checkpoints, step_of
from ..exception import JobAbort
from ..wrapper import CallWrapper
from ._lightning import file_of
from ._lightning_checks import check
from ._lightning_data import seed
from ._lightning_loaders import Positions


class Callback(Checkpoint):
    """See `FT`."""

    def __init__(self, call_wrapper: CallWrapper, checkpoints: Checkpoints, every: int, seed: int) -> None:
        self._call_wrapper, self._checkpoints = call_wrapper, checkpoints
        self._every, self._seed = every, seed
        self._step = 0  # of the newest checkpoint
        self._positions = Positions()
        self._sigterm: Any = None

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._sigterm = signal.getsignal(signal.SIGTERM)
        check(trainer)

    def on_load_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        self._positions.load(trainer, checkpoint)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._forget_handler()
        self._positions.begin(trainer)
        if not self._step and (newest := self._checkpoints.newest()) is not None:
            self._step = step_of(newest)
        if trainer.global_step < self._step:
            raise JobAbort(
                f"FT: begins at step {trainer.global_step}, but step {self._step} is saved: pass "
                "fit(…, ckpt_path=ft.newest()); for another training make another FT, with another root"
            )

    def on_train_batch_start(self, trainer: Any, _: Any, __: Any, batch_idx: int) -> None:
        self._call_wrapper.ping(trainer.global_step)
        seed(self._seed, trainer.global_step, batch_idx, trainer.global_rank)  # generators are not saved

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.is_last_batch:  # from there Lightning would go on with the epoch after the next
            self.on_train_epoch_end(trainer)
        self._positions.note(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if step > self._step and step % self._every == 0:  # a step may have several batches
            trainer.save_checkpoint(file_of(self._checkpoints.folder(step)))
            self._checkpoints.seal(step)
            self._step = step

    def on_save_checkpoint(self, _: Any, __: Any, checkpoint: dict[str, Any]) -> None:
        self._positions.save(checkpoint)

    def on_validation_batch_start(self, *_: Any) -> None:
        self._call_wrapper.ping()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _forget_handler(self, *_: Any) -> None:
        # Lightning's waits for all ranks, in the midst of whatever a rank does, and for the end of the step.
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = _forget_handler
