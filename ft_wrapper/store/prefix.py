"""A part of a store: the keys of one iteration."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore as TorchPrefixStore

from . import keys as names
from .coordinator import CoordinatorMixin
from .holding import HoldingStore
from .mixin import StoreMixin
from .records import FAULT


class PrefixStore(TorchPrefixStore, StoreMixin):
    """The keys of one iteration, so that none of an earlier iteration is ever seen.

    A real ``torch.distributed.PrefixStore``, to be passed as ``store=`` to ``init_process_group``; Python
    callers go through the wrapper's own store, with its retries.

    Args:
        iteration: number of the global iteration.
        store: the store that holds the keys.
    """

    # torch's Store has had a method of this name and another meaning since 2.12.
    barrier = StoreMixin.barrier

    def __init__(self, iteration: int, store: StoreMixin) -> None:
        self._iteration = iteration
        self._inner = store
        self._prefix = names.iteration_prefix(iteration)
        # torch keeps only the C++ half of a store alive; the reference above keeps the rest.
        inner: Any = store
        namespace = ""
        if isinstance(store, HoldingStore):
            inner, namespace = store.torch_store, store.namespace
        super().__init__(namespace + self._prefix, inner)

    def is_over(self) -> bool:
        """Whether a fault has ended the iteration. One that is done has had all whom it needed."""
        return self._inner.outcome_of(self._iteration) == FAULT

    @property
    def _job(self) -> CoordinatorMixin:
        return self._inner._job

    def now(self) -> float:
        return self._inner.now()

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        return self._inner.get(self._full(key))

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(self._full(key), amount)

    def beat(self, key: str, lasts: float) -> None:
        self._inner.beat(self._full(key), lasts)

    def beats(self, key: str) -> int:
        return self._inner.beats(self._full(key))

    def append(self, key: str, value: str | bytes) -> None:
        self._inner.append(self._full(key), value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._inner.compare_set(self._full(key), expected, desired)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait([self._full(key) for key in keys], timeout)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check([self._full(key) for key in keys])

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(self._full(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._inner.multi_get([self._full(key) for key in keys])

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._inner.multi_set([self._full(key) for key in keys], values)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def list_keys(self) -> list[str]:
        prefix = self._full("")
        return [name[len(prefix) :] for name in self._inner.list_keys() if name.startswith(prefix)]

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._inner.timeout

    def clone(self) -> PrefixStore:
        return PrefixStore(self._iteration, self._inner.clone())
