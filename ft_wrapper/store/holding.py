"""Base of the stores that hold one of torch's own stores."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store

from .mixin import StoreMixin

T = TypeVar("T")


class HoldingStore(StoreMixin):
    """Hands every operation on to a torch store that it holds.

    Holds rather than is one, because ``clone()`` of a subclass of torch's stores is no such subclass.

    Args:
        store: the torch store.
        namespace: put in front of every key, so that several jobs can share a store.
    """

    def __init__(self, store: Store, namespace: str = "") -> None:
        self._store = store
        self.namespace = namespace

    @property
    def torch_store(self) -> Store:
        """The torch store, for ``init_process_group(store=…)`` and ``torch.distributed.PrefixStore``."""
        return self._store

    def _full(self, key: str) -> str:
        return self.namespace + key

    def _all_full(self, keys: list[str]) -> list[str]:
        return [self.namespace + key for key in keys]

    def _do(self, what: str, operation: Callable[[Store], T]) -> T:
        """Carries out an operation; ``what`` names it, should it fail."""
        return operation(self._store)

    def set(self, key: str, value: str | bytes) -> None:
        self._do(f"set {key}", lambda store: store.set(self._full(key), value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._do(f"get {key}", lambda store: store.get(self._full(key)))

    def add(self, key: str, amount: int) -> int:
        return self._do(f"add {key}", lambda store: store.add(self._full(key), amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._do(f"append {key}", lambda store: store.append(self._full(key), value))  # type: ignore[attr-defined]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._do(
            f"compare_set {key}", lambda store: store.compare_set(self._full(key), expected, desired)
        )

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._do(f"wait {keys}", lambda store: store.wait(self._all_full(keys)))
        else:
            self._do(f"wait {keys}", lambda store: store.wait(self._all_full(keys), timeout))

    def check(self, keys: list[str]) -> bool:
        return self._do(f"check {keys}", lambda store: store.check(self._all_full(keys)))

    def delete_key(self, key: str) -> bool:
        return self._do(f"delete_key {key}", lambda store: store.delete_key(self._full(key)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._do(f"multi_get {keys}", lambda store: store.multi_get(self._all_full(keys)))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._do(f"multi_set {keys}", lambda store: store.multi_set(self._all_full(keys), values))  # type: ignore[attr-defined]

    def num_keys(self) -> int:
        return self._do("num_keys", lambda store: store.num_keys())

    def list_keys(self) -> list[str]:
        if not hasattr(self._store, "list_keys"):
            return []  # an older torch
        names: list[str] = self._do("list_keys", lambda store: store.list_keys())
        return [name[len(self.namespace) :] for name in names if name.startswith(self.namespace)]

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        del self._store
