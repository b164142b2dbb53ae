"""Hugging Face's Trainer through faults: see ``docs/transformers.md``."""

import os
import sys
from typing import Any

from ..checkpoints import Checkpoints
from ..exception import JobAbort
from ..live.data import seed_all
from ..wrapper import CallWrapper
from .noticed import begins_noticed

try:
    from transformers import TrainerCallback, __version__
except ImportError as error:
    raise ImportError(f"this needs the Trainer: pip install 'transformers[torch]' ({error})") from error
if __version__.startswith(("3.", "4.")):  # its Trainer has other arguments
    raise ImportError(f"FT needs transformers 5, not {__version__}: pip install 'transformers[torch]>=5'")


class FT:
    """A Trainer's checkpoints, and its callback. Make it in the wrapped function, before the arguments.

    Args:
        call_wrapper: what the wrapped function was given.
        root: the folder of all checkpoints; see `Checkpoints`.
        keep: how many sealed checkpoints stay; all of them with ``load_best_model_at_end``.

    Attributes:
        output_dir: for ``TrainingArguments(output_dir=…)``; each iteration has its own.
        callback: for ``Trainer(callbacks=[…])``. Refuses what does not work with restarts (`JobAbort`); pings
            at each batch, of evaluations, too; seeds each step, alike on all ranks; seals what is saved;
            has a step saved at whose beginning all ranks see a notice.

    Raises:
        JobAbort: as `Checkpoints`.
    """

    def __init__(self, call_wrapper: CallWrapper, root: str | os.PathLike[str], keep: int = 3) -> None:
        self._checkpoints = Checkpoints(call_wrapper, root, keep)
        self.output_dir = str(self._checkpoints.path(0).parent)  # the Trainer has the same names in it
        self.callback = _Callback(call_wrapper, self._checkpoints, self.output_dir)

    def newest(self) -> str | None:
        """For ``train(resume_from_checkpoint=…)``: the newest sealed checkpoint, the same on all ranks."""
        newest = self._checkpoints.newest()
        return None if newest is None else str(newest.path)


class _Callback(TrainerCallback):
    def __init__(self, call_wrapper: CallWrapper, checkpoints: Checkpoints, output_dir: str) -> None:
        self._call_wrapper, self._checkpoints, self._output_dir = call_wrapper, checkpoints, output_dir
        self._sealed = 0
        self._is_noticed = False

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        is_seeded, order = args.accelerator_config.use_seedable_sampler, args.train_sampling_strategy
        for is_wrong, why in (
            (args.output_dir != self._output_dir, f"output_dir={args.output_dir!r} must be FT's output_dir"),
            (args.save_total_limit, "save_total_limit= removes what is still needed: use FT(…, keep=)"),
            (args.save_only_model, "save_only_model=True leaves out what a restart needs: leave it False"),
            (args.save_on_each_node, "save_on_each_node=True writes a file several times: leave it False"),
            (not is_seeded, "use_seedable_sampler=False loses the order of the data: leave it True"),
            (order not in ("random", "sequential"), f"train_sampling_strategy={order!r} does so, too"),
            (state.is_hyper_param_search, "hyperparameter_search() has other folders: wrap single trials"),
            (state.global_step < self._sealed, "a second train() would save a step again: make another FT"),
        ):
            if is_wrong:
                raise JobAbort(f"FT: {why}")
        if args.load_best_model_at_end:
            self._checkpoints.keep = sys.maxsize  # the best one may be any

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._is_noticed = begins_noticed(self._call_wrapper, state.global_step)
        seed_all(args.seed, state.global_step)  # what the loaders have drawn differs if they are new

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_epoch = args.save_strategy == "epoch" and state.epoch % 1 == 0  # which is saved when it ends
        control.should_save |= self._is_noticed and not is_epoch
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, _: Any, control: Any, **__: Any) -> None:
        if self._is_noticed and args.save_strategy == "best":
            control.should_evaluate = False  # it would decide whether the step is saved

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._call_wrapper.ping()

    on_substep_end = on_prediction_step

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._checkpoints.seal(state.global_step)
        self._sealed = state.global_step
