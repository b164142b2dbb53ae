"""The batches of a loader from any step on, as in a run that has read them from the first step.

A loader cannot begin in the middle of an epoch, and what its workers draw depends on what each of them has
loaded before. So a copy of it takes the same indices, skips those of finished steps, and seeds the
generators before each sample by the sample's place in the epoch: a sample that an epoch has several times is
augmented differently each time.
"""

import copy
import itertools
import operator
import random
import sys
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..exception import JobAbort


def endless(loader: Any, seed: int | None, step: int, rank: int = 0, ranks: int = 1) -> Generator[Any]:
    """Iterates over the batches of one epoch after another, from that of a step on.

    Close it to end the workers.

    Args:
        loader: its length is the number of steps in an epoch.
        seed: of all that the loader draws; None: nothing is seeded.
        step: whose batch comes first.
        rank: that the loader's batches are for.
        ranks: that share an epoch.

    Raises:
        JobAbort: the loader has no length, or an epoch has more or fewer batches.
    """
    if not (length := operator.length_hint(loader)):
        raise JobAbort(f"batches(): {type(loader).__name__} has no len(), or is empty; use live.steps(n)")
    keys = list[Any]()  # of the epoch; persistent workers keep their sampler
    source, iterator = _copy(loader, keys, seed), None
    try:
        for epoch in itertools.count(step // length):
            done = max(0, step - epoch * length)
            _begin(seed, epoch, "epoch", [loader])
            if isinstance(getattr(source, "dataset", None), _Samples):
                keys[:] = itertools.islice(_keys(loader, epoch, rank, ranks), done, length + 1)
            iterator = iter(source)
            for n in range(done if keys else 0, length + 1):
                _begin(seed, epoch, f"batch {n}", [])  # iterables draw at any time, and so do steps
                found = [*itertools.islice(iterator, 1)]  # none at the end of the epoch
                if bool(found) == (n == length):
                    raise JobAbort(f"batches(): epoch {epoch} must have len(loader)={length} batches")
                if n >= done:
                    yield from found
    finally:
        getattr(iterator, "_shutdown_workers", lambda: None)()  # even if a worker's error is still referenced


def _copy(loader: Any, keys: list[Any], seed: int | None) -> Any:
    # Classes with an __iter__ of their own, such as Accelerate's, are left alone.
    way = isinstance(loader, DataLoader) and type(loader).__iter__.__module__.split(".")[0]
    if way not in ("torch", "torchdata"):
        return loader
    copied = copy.copy(loader)
    vars(copied).update(_iterator=None, in_order=True)  # it refuses to set some fields
    if isinstance(loader.dataset, IterableDataset):
        vars(copied).update(persistent_workers=False)  # only with new ones an epoch can be replayed
    else:
        samples = _Samples(loader.dataset, seed, loader.worker_init_fn)
        vars(copied).update(dataset=samples, worker_init_fn=samples.begin_worker)
        vars(copied)["sampler" if loader.batch_sampler is None else "batch_sampler"] = keys
    return copied


def _keys(loader: DataLoader[Any], epoch: int, rank: int, ranks: int) -> Iterator[Any]:
    places, epochs = itertools.count(rank, ranks), itertools.repeat(epoch)
    if loader.batch_sampler is None:
        return zip(loader.sampler, places, epochs, strict=False)
    return (list(zip(indices, places, epochs, strict=False)) for indices in loader.batch_sampler)


class _Samples:
    """A dataset that draws the same for a sample in any worker, whatever was loaded before."""

    def __init__(self, dataset: Any, seed: int | None, worker_init_fn: Any) -> None:
        self.dataset, self.seed, self.worker_init_fn = dataset, seed, worker_init_fn
        self.epoch = -1

    def __getitem__(self, key: tuple[Any, int, int]) -> Any:
        index, place, epoch = key
        if epoch != self.epoch:  # a persistent worker does not see the main process's set_epoch()
            _begin(self.seed, epoch, "epoch", [self.dataset])
            self.epoch = epoch
        _begin(self.seed, epoch, f"sample {place}", [])
        return self.dataset[index]

    def begin_worker(self, worker: int) -> None:
        object.__setattr__(get_worker_info(), "dataset", self.dataset)  # as the user's function expects it
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)


def seed_host(seed: int | None, *parts: object) -> None:
    """Makes random draws on the host depend on these alone; a forked worker must not touch CUDA."""
    if seed is not None:
        random.seed(repr((seed, *parts)))
        torch.default_generator.manual_seed(random.getrandbits(63))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(random.getrandbits(32))


def seed_all(seed: int | None, *parts: object) -> None:
    """The same for draws on this rank's devices, too; None: leaves them as they are."""
    seed_host(seed, *parts)
    if seed is not None and torch.accelerator.is_available():
        module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
        (getattr(module, "manual_seed_all", None) or module.manual_seed)(torch.initial_seed())


def _begin(seed: int | None, epoch: int, what: str, parts: list[Any]) -> None:
    """Seeds this process, and begins an epoch in the parts of a loader and in their inner parts."""
    seed_host(seed, epoch, what)
    for part in parts:
        getattr(part, "set_epoch", lambda epoch: None)(epoch)
        if seed is not None and isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(torch.initial_seed())
        inner = [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset")]
        parts += [each for each in inner if all(each is not other for other in parts)]
