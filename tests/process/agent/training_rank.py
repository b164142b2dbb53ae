"""A rank of `training.Training`: all active ranks add to each step, so the weights tell whether one was lost.

    training_rank.py FOLDER SETTINGS

The weights are kept after each step in a file of the iteration's own. Its number is a fencing token: what an
iteration that is over still writes is not believed by a later one.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_wrapper import CallWrapper, FrozenState, Limits, Wrapper
from ft_wrapper.initialize import Initialize

ACTIVE = 4
SETTINGS: dict[str, Any] = {
    "heartbeat_timeout": 60,
    "on_join": "now",
    "join_window": 0.3,
    "min_world_size": ACTIVE,
}
_MODULUS = 2**31 - 1


def portion(step: int, rank: int) -> int:
    """What a rank adds in a step."""
    return (step + 1) * (rank + 7) ** 3 % 10_007


def after(weights: int, total: int) -> int:
    """The weights after a step."""
    return (31 * weights + total) % _MODULUS


def expected(steps: int) -> int:
    """The weights after so many steps, none of which was left out or made twice."""
    weights = 1
    for step in range(steps):
        weights = after(weights, sum(portion(step, rank) for rank in range(ACTIVE)))
    return weights


def keep(path: Path, step: int, weights: int) -> None:
    """Writes weights: as a whole or not at all."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps({"step": step, "weights": weights}))
    os.replace(unfinished, path)


def newest(folder: Path) -> Path | None:
    """What the latest iteration has kept."""
    return max(folder.glob("*.weights"), default=None)


class TellsThatItIsIn(Initialize):
    """For spares, too: who has a place has nothing to ask of the store until the iteration ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, state: FrozenState) -> FrozenState:
        (self._folder / f"{state.iteration}.{os.getpid()}.in").touch()
        return state


def train(folder: Path, call_wrapper: CallWrapper) -> None:
    """Trains until there is a file named ``finish``; with one named ``fail`` all ranks fail."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = folder / f"{call_wrapper.iteration:06}.weights"
    begin = [0, 1]
    if rank == 0:
        kept = newest(folder)
        if kept is not None:
            begin = [*json.loads(kept.read_text()).values()]
        keep(own, *begin)  # before anybody trains
    agreed = torch.tensor(begin)
    dist.broadcast(agreed, 0)
    step, weights = agreed.tolist()
    is_last = False
    while not is_last:
        call_wrapper.ping()
        asked = [rank == 0 and (folder / name).exists() for name in ("finish", "fail")]
        total = torch.tensor([portion(step, rank), *asked])
        dist.all_reduce(total)
        if total[2]:
            raise RuntimeError("told to fail")
        step, weights, is_last = step + 1, after(weights, int(total[0])), bool(total[1])
        if rank == 0:
            with call_wrapper.atomic():
                keep(own, step, weights)
        time.sleep(0.02)  # the processors are the other ranks', too


def main() -> None:
    """Trains under the wrapper."""
    folder, settings = Path(sys.argv[1]), {**SETTINGS, **json.loads(sys.argv[2])}
    ours = {name: settings.pop(name) for name in inspect.signature(Limits).parameters if name in settings}
    Wrapper(initialize=TellsThatItIsIn(folder), limits=Limits(**ours), **settings)(train)(folder)


if __name__ == "__main__":
    main()
