"""A loader gives the batches of any step, as a run does that has read it from the first step."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from ft_wrapper.exception import JobAbort
from ft_wrapper.live.data import endless

ROWS = 11


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Torch handles SIGCHLD from the first loader with workers on, for good."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


def drawn() -> list[float]:
    """One number of each generator that a dataset may draw from."""
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


class Rows(Dataset[Any]):
    """Its samples say which they are, in which epoch, and what was drawn for them."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> list[float]:
        drawn()  # not as many for each
        return [index, self.epoch, *drawn(), *(drawn() if index % 3 else drawn()[::-1])]


class Many(Rows):
    """Loads whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    """Workers share it; it draws all along."""

    def __len__(self) -> int:
        return ROWS + 1

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, by = (0, 1) if info is None else (info.id, info.num_workers)
        order = [*range(len(self))]
        random.Random(torch.initial_seed() if info is None else info.seed - info.id).shuffle(order)
        for index in order[first::by]:
            yield [index, *drawn()]


class DrawsAllAlong(Sampler[Any]):
    """A batch sampler that draws at each batch, from the generators of the process."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(70):
            yield [random.randrange(ROWS), np.random.randint(ROWS), int(torch.randint(ROWS, ()))]

    def __len__(self) -> int:
        return 70


class Own:
    """A loader that is none of torch's."""

    def __init__(self) -> None:
        self.sampler = DistributedSampler(Rows(), num_replicas=2, rank=1)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        for index in self.sampler:
            yield [index, *drawn()]


def of_rows(rows: Dataset[Any], sampler: str, **options: Any) -> Any:
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "in order": dict,
        "shuffle": lambda: {"shuffle": True},
        "generator": lambda: {"shuffle": True, "generator": torch.Generator()},
        "distributed": lambda: {"sampler": DistributedSampler(rows, num_replicas=2, rank=1)},  # type: ignore
        "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * ROWS, 2 * ROWS)},
        "own generator": lambda: {"sampler": RandomSampler(rows, generator=torch.Generator())},  # type: ignore
        "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(rows), 3, False)},  # type: ignore
        "all along": lambda: {"batch_sampler": DrawsAllAlong()},
    }
    chosen = ways[sampler]()
    if "batch_sampler" in chosen:
        options = {name: value for name, value in options.items() if name in ("num_workers", "persistent_workers")}
    return DataLoader(rows, **chosen, **options)


SAMPLERS = ("in order", "shuffle", "generator", "distributed", "weighted", "own generator", "batches", "all along")


def plain(batch: Any) -> Any:
    """A batch as lists."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


def read(loader: Any, seed: int | None, step: int, count: int) -> list[Any]:
    with closing(endless(loader, seed, step, rank=1, ranks=2)) as batches:
        return [plain(batch) for batch in itertools.islice(batches, count)]


def check(make: Callable[[], Any], begins: list[int]) -> list[Any]:
    """Any begin gives the same batches as the first, whatever the process has drawn before."""
    epoch = len(make())
    steps = 2 * epoch + 2
    whole = read(make(), 5, 0, steps)
    for begin in begins:
        begin %= steps
        drawn()
        assert read(make(), 5, begin, min(5, steps - begin)) == whole[begin : begin + 5], begin
    assert whole != read(make(), 6, 0, steps)
    return whole


# ---- any step


BEGINS = st.lists(st.integers(1, 200), min_size=1, max_size=3)


def options(sampler: str, batch_size: int | None, drop_last: bool, kind: type[Rows]) -> Callable[[], Any]:
    many: dict[str, Any] = {"batch_size": batch_size}
    if batch_size is not None:
        many["drop_last"] = drop_last
    return functools.partial(of_rows, kind(), sampler, **many)


LOADERS = st.builds(
    options,
    st.sampled_from(SAMPLERS),
    st.sampled_from([None, 1, 2, 4]),
    st.booleans(),
    st.sampled_from([Rows, Many]),
)


@settings(max_examples=60, deadline=None, database=None)
@given(LOADERS, BEGINS)
def test_any_step_is_found_in_the_process(make: Callable[[], Any], begins: list[int]) -> None:
    check(make, begins)


@settings(max_examples=6, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(LOADERS, BEGINS, st.booleans())
def test_any_step_is_found_with_workers(make: Callable[..., Any], begins: list[int], stay: bool) -> None:
    workers = functools.partial(make, num_workers=2, persistent_workers=stay)
    # What is drawn does not depend on the workers: neither their number, nor whether they stay.
    assert check(workers, begins[:1]) == check(make, [])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_an_iterable_dataset_is_replayed(workers: int, batch_size: int | None) -> None:
    stay = workers > 0
    check(lambda: DataLoader(Stream(), batch_size, num_workers=workers, persistent_workers=stay), [3, 4, 7, 14])


def test_any_iterable_with_a_length_is_replayed() -> None:
    check(Own, [1, 5, 6, 8])
