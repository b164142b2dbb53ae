"""A loader gives the batches of any step, as a run does that has read it from the first step."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import pickle
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
    WeightedRandomSampler,
    get_worker_info,
)

from ft_wrapper.exception import JobAbort
from ft_wrapper.live.data import _copy, endless

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
    """Loads whole batches, which would draw by the batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        raise AssertionError


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
        options = {
            name: value for name, value in options.items() if name in ("num_workers", "persistent_workers")
        }
    return DataLoader(rows, **chosen, **options)


SAMPLERS = (
    *("in order", "shuffle", "generator", "distributed"),
    *("weighted", "own generator", "batches", "all along"),
)


def plain(batch: Any) -> Any:
    """A batch as lists."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(each) for each in batch] if isinstance(batch, (list, tuple)) else batch


def read(loader: Any, seed: int | None, step: int, count: int) -> list[Any]:
    found = []
    with closing(endless(loader, seed, step, rank=1, ranks=2)) as batches:
        for at, batch in enumerate(itertools.islice(batches, count), step):
            found.append(plain(batch))
            if seed is not None:  # as a step does
                random.seed(at)
                np.random.seed(at)
                torch.manual_seed(at)
    return found


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


@settings(max_examples=3, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(LOADERS, BEGINS, st.booleans())
def test_any_step_is_found_in_the_process_and_with_workers(
    make: Callable[..., Any], begins: list[int], stay: bool
) -> None:
    workers = functools.partial(make, num_workers=2, persistent_workers=stay)
    # What is drawn does not depend on the workers: neither their number, nor whether they stay.
    assert check(workers, begins[:1]) == check(make, begins[1:])


@pytest.mark.parametrize(("workers", "batch_size"), [(0, 3), (2, None)])
def test_an_iterable_dataset_is_replayed(workers: int, batch_size: int | None) -> None:
    stay = workers > 0
    check(lambda: DataLoader(Stream(), batch_size, num_workers=workers, persistent_workers=stay), [3, 14])


def test_any_iterable_with_a_length_is_replayed() -> None:
    whole = check(Own, [1, 5, 6, 8])
    assert len({str(numbers) for _, *numbers in whole}) == len(whole)


def test_a_loader_of_torchdatas_is_found_as_one_of_torchs() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = functools.partial(stateful.StatefulDataLoader, Rows(), 2, shuffle=True)
    workers = functools.partial(loader, num_workers=2, persistent_workers=True)
    assert check(loader, [3, 7, 10]) == check(workers, [3, 7, 10])


def test_batches_come_in_order_even_if_they_need_not() -> None:
    loader = functools.partial(DataLoader, Slow(), batch_size=2, num_workers=2, in_order=False)
    assert [plain(batch)[0][0] for batch in read(loader(), 1, 4, 4)] == [8, 10, 0, 2]


class Slow(Rows):
    """The second worker has its batch first."""

    def __getitem__(self, index: int) -> list[float]:
        if index % 4 == 0:
            list(range(1 << 20))
        return super().__getitem__(index)


# ---- what is drawn for a sample


def test_a_sample_that_comes_again_is_augmented_in_another_way() -> None:
    sampler = WeightedRandomSampler([1.0] * ROWS, 10 * ROWS)
    samples = read(DataLoader(Rows(), None, sampler=sampler), 5, 0, 20 * ROWS)
    assert len({tuple(sample) for sample in samples}) == len(samples)
    on_other_rank = [next(endless(DataLoader(Rows(), None), 5, 0, rank, 3)) for rank in range(3)]
    assert len({str(sample) for sample in on_other_rank}) == 3


def test_a_sample_is_augmented_in_the_same_way_by_any_number_of_ranks() -> None:
    found = []
    for ranks in (1, 2, 3):
        samples: dict[int, Any] = {}
        for rank in range(ranks):
            sampler: Any = DistributedSampler(Rows(), num_replicas=ranks, rank=rank)
            loader = DataLoader(Rows(), 2, sampler=sampler)
            with closing(endless(loader, 5, 0, rank, ranks)) as batches:
                for batch in itertools.islice(batches, len(loader)):
                    for sample in zip(*plain(batch), strict=True):
                        samples.setdefault(sample[0], sample)  # the last ones fill up
        found.append(samples)
    assert found[0] == found[1] == found[2] and len(found[0]) == ROWS


def test_collating_draws_the_same() -> None:
    def collate(samples: list[Any]) -> list[Any]:
        return [*samples, *drawn()]

    check(lambda: DataLoader(Rows(), 2, shuffle=True, collate_fn=collate), [1, 4, 8])


def test_without_a_seed_nothing_is_seeded() -> None:
    class Quiet(Rows):
        def __getitem__(self, index: int) -> list[float]:
            return [index, self.epoch]

    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore
    loader = DataLoader(Quiet(), None, generator=torch.Generator().manual_seed(3))
    assert read(loader, None, 9, 3) == [[9, 0], [10, 0], [0, 1]]
    assert before[0] == random.getstate() and torch.equal(before[1], torch.get_rng_state())
    assert before[2] == np.random.get_state()[1].tolist()  # type: ignore
    drawing = [read(of_rows(Rows(), "shuffle"), None, 3, 3) for _ in range(2)]
    assert drawing[0] != drawing[1]


# ---- what users expect


def test_what_is_done_is_not_loaded() -> None:
    loaded: list[int] = []

    class Counts(Rows):
        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    read(DataLoader(Counts(), 2), 5, 4, 2)
    assert loaded == [8, 9, 10]


def test_the_loader_is_left_as_it_is() -> None:
    loader = of_rows(Rows(), "shuffle", batch_size=2)
    before = dict(vars(loader))
    read(loader, 5, 3, 7)
    assert vars(loader) == before and loader.generator is None


def test_a_loader_that_is_in_use_stays_in_use() -> None:
    loader = of_rows(Rows(), "in order", batch_size=2, num_workers=2, persistent_workers=True)
    theirs = iter(loader)
    assert plain(next(theirs))[0] == [0, 1]
    assert plain(read(loader, 5, 3, 1)[0])[0] == [6, 7]
    assert plain(next(theirs))[0] == [2, 3]
    theirs._shutdown_workers()


def begin(worker: int) -> None:
    info: Any = get_worker_info()
    assert type(info.dataset) is InWorkers
    info.dataset.worker = worker


class InWorkers(Rows):
    worker = -1

    def __getitem__(self, index: int) -> list[int]:
        return [self.worker, self.epoch, index]


def test_workers_know_their_dataset_and_epoch() -> None:
    loader = DataLoader(InWorkers(), 6, num_workers=2, worker_init_fn=begin, persistent_workers=True)
    batches = read(loader, 5, 3, 3)  # in the middle of an epoch
    assert [(set(workers), set(epochs)) for workers, epochs, _ in batches] == [
        ({0}, {1}),
        ({0}, {2}),
        ({1}, {2}),
    ]


def test_what_workers_are_given_can_be_pickled() -> None:
    copied = _copy(DataLoader(InWorkers(), num_workers=2, worker_init_fn=begin), [], 5)
    samples, begins = pickle.loads(pickle.dumps((copied.dataset, copied.worker_init_fn)))
    assert samples[7, 0, 3] == [-1, 3, 7] and callable(begins)


def test_workers_end_with_the_loop() -> None:
    loaders = [DataLoader(Rows(), 2, num_workers=2, persistent_workers=stay) for stay in (False, True)]
    for loader in (*loaders, Adapter(DataLoader(Rows(), 2, num_workers=2))):
        batches = endless(loader, 5, 0)
        next(batches)
        assert len(multiprocessing.active_children()) == 2
        batches.close()
        assert not multiprocessing.active_children()


class Fails(Rows):
    def __getitem__(self, index: int) -> list[float]:
        if index == 8:
            raise ValueError
        return super().__getitem__(index)


def test_workers_end_while_somebody_holds_the_error() -> None:
    with pytest.raises(ValueError) as caught:
        read(DataLoader(Fails(), 2, num_workers=2), 5, 3, 3)
    assert not multiprocessing.active_children() and caught.tb


class Adapter:
    """Is a DataLoader by name only, as Accelerate's are, and adds to what another one gives."""

    def __init__(self, base: DataLoader[Any]) -> None:
        self.base = base

    @property
    def __class__(self) -> Any:
        return DataLoader

    def __getattr__(self, name: str) -> Any:
        if name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[Any]:
        return (2 * batch[0] for batch in self.base)


def test_a_way_of_its_own_through_an_epoch_stays() -> None:
    check(lambda: Adapter(of_rows(Rows(), "shuffle", batch_size=2)), [1, 4, 8])
    assert read(Adapter(of_rows(Rows(), "in order", batch_size=2)), 5, 4, 2) == [[16, 18], [20]]


class HasNoLength(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Lies(Own):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ((n for n in range(3)), "generator has no len"),
        (DataLoader(HasNoLength()), "DataLoader has no len"),
        ([], "list has no len(), or is empty"),
        (Lies(7), "epoch 0 must have len(loader)=7 batches"),
        (Lies(5), "epoch 0 must have len(loader)=5 batches"),
        (DataLoader(Rows(), batch_sampler=itertools.repeat([1])), "DataLoader has no len"),  # type: ignore
    ],
)
def test_a_loader_without_positions_is_refused(loader: Any, text: str) -> None:
    with pytest.raises(JobAbort) as caught:
        read(loader, 5, 0, 20)
    assert text in str(caught.value)


class Endless(DrawsAllAlong):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [1]


def test_a_sampler_that_does_not_end_is_refused() -> None:
    with pytest.raises(JobAbort, match=r"epoch 0 must have len\(loader\)=70 batches"):
        read(DataLoader(Rows(), batch_sampler=Endless()), 5, 0, 71)
