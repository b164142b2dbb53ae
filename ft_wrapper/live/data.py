"""The batches of a loader from any step on, as in a run that has read them from the first step.

A loader cannot begin in the middle of an epoch, and what its workers draw depends on what each of them has
loaded before. So a copy of it takes the same indices, skips those of steps that are done, and seeds the
generators before each sample by the sample's place in the epoch: a sample that an epoch has several times is
augmented differently each time.
"""

import copy
import functools
import itertools
import operator
import random
import sys
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..exception import JobAbort

_END = object()
_Key = tuple[int, int, Any]  # epoch, place in it, index or batch of indices


def endless(
    loader: Any, seed: int | None, step: int, rank: int = 0, ranks: int = 1
) -> Generator[Any, None, None]:
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
    length = operator.length_hint(loader)
    if not length:
        raise JobAbort(
            f"batches(loader): {type(loader).__name__} has no len(), or is empty, so the batch of a step "
            "cannot be found; give it a len(), or load the batch by the step of `for step in live.steps(n)`"
        )
    epoch, done = divmod(step, length)
    keys = list[_Key]()  # of the epoch: an iterator with workers that stay asks the same sampler in each
    source, iterator = _copy(loader, keys, seed, ranks), None
    try:
        while True:
            _enter(epoch, _seed(seed, "epoch", epoch), loader)
            if isinstance(getattr(source, "dataset", None), _Samples):
                keys[:] = itertools.islice(_draw(loader, epoch, rank, ranks), done, length + 1)
            iterator = iter(source)
            for n in itertools.count(done if keys else 0):
                _seed(seed, "batch", epoch, n)  # an iterable may draw all along, and steps do between
                batch = next(iterator, _END)
                if (batch is _END) != (n == length):
                    raise JobAbort(
                        f"batches(loader): len(loader) is {length}, and epoch {epoch} has "
                        f"{'more' if n == length else n} batches; let len() be the number in each epoch"
                    )
                if n == length:
                    break
                if n >= done:
                    yield batch
            epoch, done = epoch + 1, 0
    finally:
        for name in ("_shutdown_workers", "close"):
            getattr(iterator, name, lambda: None)()


def _copy(loader: Any, keys: list[_Key], seed: int | None, ranks: int) -> Any:
    # A class with a way of its own through an epoch, such as Accelerate's, is left as it is.
    if not isinstance(loader, DataLoader) or not type(loader).__iter__.__module__.startswith(
        ("torch.", "torchdata.")
    ):
        return loader
    changes: dict[str, Any] = {"_iterator": None, "in_order": True}
    if isinstance(loader.dataset, IterableDataset):
        changes["persistent_workers"] = False  # only with new ones an epoch can be replayed
    else:
        changes["dataset"] = _Samples(loader.dataset, seed, ranks)
        changes["sampler" if loader.batch_sampler is None else "batch_sampler"] = keys
        changes["worker_init_fn"] = functools.partial(_begin_worker, loader.worker_init_fn)
    copied = copy.copy(loader)
    vars(copied).update(changes)  # it refuses to have some of them set
    return copied


def _draw(loader: DataLoader[Any], epoch: int, place: int, ranks: int) -> Iterator[_Key]:
    is_batched = loader.batch_sampler is not None
    for indices in loader.batch_sampler or loader.sampler:
        yield epoch, place, indices
        place += ranks * (len(indices) if is_batched else 1)


class _Samples:
    """A dataset that draws the same for a sample in any worker, whatever was loaded before."""

    def __init__(self, dataset: Any, seed: int | None, ranks: int) -> None:
        self.dataset = dataset
        self._seed, self._ranks = seed, ranks
        self._epoch = -1

    def __getitem__(self, key: _Key) -> Any:
        self._begin(*key)
        return self.dataset[key[-1]]

    def __getitems__(self, key: _Key) -> Any:
        epoch, place, indices = key
        many = getattr(self.dataset, "__getitems__", None)
        if not callable(many):
            return [self[epoch, place + n * self._ranks, index] for n, index in enumerate(indices)]
        self._begin(*key)
        return many(indices)

    def _begin(self, epoch: int, place: int, _index: object) -> None:
        if epoch != self._epoch:  # a worker that stays does not see what is set in the main process
            _enter(epoch, _seed(self._seed, "epoch", epoch), self.dataset)
            self._epoch = epoch
        _seed(self._seed, "sample", epoch, place)


def _begin_worker(users: Any, worker: int) -> None:
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # as the user's function expects it
    if users is not None:
        users(worker)


def _enter(epoch: int, number: int | None, *parts: Any) -> None:
    """Sets the epoch, and seeds the generators, of loaders or datasets and of all that they draw from."""
    found = list(parts)
    for part in found:
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
        if number is not None and isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(number)
        inner = [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset")]
        found += [each for each in inner if each is not None and all(each is not other for other in found)]


def _seed(seed: int | None, *parts: object) -> int | None:
    """Seeds what runs on the CPU: a forked worker must not touch CUDA."""
    if seed is None:
        return None
    random.seed(repr((seed, *parts)))
    number = random.getrandbits(63)
    torch.default_generator.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)
    return number
