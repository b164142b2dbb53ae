"""A rendezvous in memory: nodes of one process meet without a port."""

from __future__ import annotations

import time

from torch._C._distributed_c10d import PrefixStore, Store

from ft_wrapper.rendezvous.backends import Backend
from ft_wrapper.store import StoreMixin
from ft_wrapper.testing.fake_store import FakeStore
from ft_wrapper.testing.scheduler import Clock, Waiter


class RealClock(Clock):
    """Real time, for a `FakeStore` that threads use whose other waits are real."""

    def now(self) -> float:
        """The time, in seconds."""
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Not to be turned by hand."""
        raise RuntimeError("real time goes by itself; use a Clock to turn it")

    def block(self, waiter: Waiter, deadline: float) -> bool:
        """Blocks until the waiter is woken; False if its deadline passed first."""
        with self.lock:
            return self.lock.wait_for(lambda: waiter.woken, max(0.0, deadline - self.now()))


class MemoryBackend(Backend):
    """Keeps the record of a rendezvous in this process, for tests of what uses its handler.

    The stores of the workers are real ones: these are other processes::

        store = FakeStore(RealClock())
        node0 = FtRendezvousHandler(Settings("job", 1, 2), Identity("0"), MemoryBackend(store))
        node1 = FtRendezvousHandler(Settings("job", 1, 2), Identity("1"), MemoryBackend(store))

    Args:
        store: shared by all nodes; on a `RealClock`.
        is_host: whether this node waits in the end until the others have seen it, as a store's host does.
    """

    name = "memory"

    def __init__(self, store: FakeStore, is_host: bool = False) -> None:
        self.is_host = is_host
        self._store = store
        # torch's side of a store finds the methods of its Python side only as long as that is alive.
        self._agents_stores: list[FakeStore] = []

    def connect(self) -> StoreMixin:
        return self._store.clone()

    def agents_store(self, prefix: str) -> Store:
        self._agents_stores.append(self._store.clone())
        return PrefixStore(prefix, self._agents_stores[-1])

    def local_address(self) -> str:
        return "localhost"

    def close(self) -> None:
        """Lets go of what agents use; the others go on."""
        self._agents_stores.clear()
