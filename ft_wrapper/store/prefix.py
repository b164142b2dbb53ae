"""A part of a store: the keys of one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore as TorchPrefixStore
from torch.distributed import DistStoreError

from ..exception import RankShouldRestart
from ..protocol import keys as names
from ..protocol.by_hand import ByHand
from ..protocol.evidence import Ends
from ..protocol.operations import Operations, Step, under
from ..protocol.records import FAULT
from .holding import HoldingStore
from .mixin import StoreMixin

_FIRST_LOOK = 0.5  # seconds of waiting until the first look whether the iteration has ended
_LONGEST_LOOK = 4.0


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

    def __init__(self, iteration: int, store: Operations) -> None:
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
        return Ends(self._inner).outcome_of(self._iteration) == FAULT

    @property
    def _job(self) -> ByHand:
        return cast(ByHand, self._inner)._job

    def now(self) -> float:
        return self._inner.now()

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(self._full(key))

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(self._full(key), amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._inner.append(self._full(key), value)

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        return self._inner.execute([under(self._full(""), step) for step in steps])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._inner.compare_set(self._full(key), expected, desired)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist, as long as the iteration is on.

        Raises:
            DistStoreError: they do not after the timeout.
            RankShouldRestart: a fault has ended the iteration; a rank that was to write them may be lost.
        """
        full = [self._full(key) for key in keys]
        deadline = self.now() + (timeout or self.timeout).total_seconds()
        pause = _FIRST_LOOK
        while True:
            seconds = max(0.001, min(pause, deadline - self.now()))
            try:
                self._inner.wait(full, timedelta(seconds=seconds))
                return
            except DistStoreError:
                if self.is_over():
                    raise RankShouldRestart("the iteration has ended") from None
                if self.now() >= deadline:
                    raise
            pause = min(2 * pause, _LONGEST_LOOK)

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
