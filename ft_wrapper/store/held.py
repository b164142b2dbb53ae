"""What every store offers beside torch's operations; and the stores that hold another one, with the keys."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import FileStore as TorchFileStore
from torch._C._distributed_c10d import PrefixStore as TorchPrefixStore
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from ..exception import RankShouldRestart
from ..protocol import keys as names
from ..protocol.by_hand import ByHand
from ..protocol.ends import Ends
from ..protocol.entering import Barriers
from ..protocol.operations import Operations, Step, encoded, under
from ..protocol.records import FAULT

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(seconds=30)
_FIRST_LOOK = 0.5  # seconds of waiting until the first look whether the iteration has ended
_LONGEST_LOOK = 4.0


class StoreMixin(Barriers, ByHand):
    """A store: torch's operations, steps, barriers of named groups, and global iterations by hand."""

    place = ""
    """Which store it is, in what its clients seal."""


class HoldingStore(StoreMixin):
    """Hands every operation on to a store that it holds, one of torch's or one of ours.

    Holds rather than is one, because ``clone()`` of a subclass of torch's stores is no such subclass.

    Args:
        store: the store.
        namespace: put in front of every key, so that several jobs can share a store.
    """

    def __init__(self, store: Store | Operations, namespace: str = "") -> None:
        self._store = cast(Operations, store)  # torch's have the same methods
        self.namespace = namespace

    @property
    def torch_store(self) -> Store:
        """A torch store, for ``init_process_group(store=…)`` and ``torch.distributed.PrefixStore``."""
        return self if isinstance(self, Store) else cast(Store, self._store)

    def _full(self, key: str) -> str:
        return self.namespace + key

    def _all_full(self, keys: list[str]) -> list[str]:
        return [self.namespace + key for key in keys]

    def _do(self, what: str, operation: Callable[[Operations], T]) -> T:
        """Carries out an operation; ``what`` names it, should it fail."""
        return operation(self._store)

    def _tell(self, what: str, operation: Callable[[Operations], None]) -> None:
        """Carries out an operation that a server does not answer."""
        self._do(what, operation)

    def set(self, key: str, value: str | bytes) -> None:
        self._tell(f"set {key}", lambda store: store.set(self._full(key), value))

    def get(self, key: str) -> bytes:
        return self._do(f"get {key}", lambda store: store.get(self._full(key)))

    def add(self, key: str, amount: int) -> int:
        return self._do(f"add {key}", lambda store: store.add(self._full(key), amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._tell(f"append {key}", lambda store: store.append(self._full(key), value))

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        full, held = self._full(key), encoded(expected)
        return self._do(f"compare_set {key}", lambda store: store.compare_set(full, held, desired))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = [] if timeout is None else [timeout]
        self._do(f"wait {keys}", lambda store: store.wait(self._all_full(keys), *limit))

    def check(self, keys: list[str]) -> bool:
        return self._do(f"check {keys}", lambda store: store.check(self._all_full(keys)))

    def delete_key(self, key: str) -> bool:
        return self._do(f"delete_key {key}", lambda store: store.delete_key(self._full(key)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._do(f"multi_get {keys}", lambda store: store.multi_get(self._all_full(keys)))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        full = self._all_full(keys)
        self._tell(f"multi_set {keys}", lambda store: store.multi_set(full, values))

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
        return self._store.timeout

    def close(self) -> None:
        del self._store


class FileStore(HoldingStore):
    """Keys in a file on one host or on a file system with working locks.

    For tests and for single nodes without ports. torch's FileStore has no append: logs are rewritten under
    compare_set here, and waiting polls inside torch.

    Args:
        file_name: path of the file; must not exist when the job starts.
        world_size: ignored; accepted so that arguments for torch's FileStore fit.
        timeout: how long operations that wait do so.
    """

    def __init__(
        self, file_name: str, world_size: int | None = None, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        self.file_name = str(file_name)
        store = TorchFileStore(self.file_name)
        store.set_timeout(timeout)
        super().__init__(store)

    def __repr__(self) -> str:
        return f"FileStore({self.file_name})"

    def clone(self) -> "FileStore":
        other = FileStore(self.file_name, timeout=self.timeout)
        other.membership = self.membership
        return other

    def _do(self, what: str, operation: Callable[[Operations], T]) -> T:
        try:
            return operation(self._store)
        except RuntimeError as error:
            # torch's FileStore says so in words only.
            if "timeout" not in str(error).lower():
                raise
            raise DistStoreError(f"{self!r}: {what} timed out: {error}") from None

    def delete_key(self, key: str) -> bool:
        existed = self.check([key])  # torch's FileStore always says yes
        super().delete_key(key)
        return existed

    def append(self, key: str, value: str | bytes) -> None:
        text = value.decode() if isinstance(value, bytes) else value
        while True:
            before = self._read(key) or ""
            # The reply tells what the key holds now, and two appenders may write the same line: a tag of
            # one's own would be needed to know whose it is. Entries are sets, so a line twice does no harm.
            if self.compare_set(key, before, before + text).decode() == before + text:
                return

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


class PrefixStore(HoldingStore, TorchPrefixStore):
    """The keys of one iteration, so that none of an earlier iteration is ever seen.

    A real ``torch.distributed.PrefixStore``, to be passed as ``store=`` to ``init_process_group``; Python
    callers go through the wrapper's own store, with its retries.

    Args:
        iteration: number of the global iteration.
        store: the store that holds the keys.
    """

    def __init__(self, iteration: int, store: Operations) -> None:
        self._iteration = iteration
        prefix = names.iteration_prefix(iteration)
        HoldingStore.__init__(self, store, f"{prefix}/")
        # torch keeps only the C++ half of a store alive; the reference above keeps the rest.
        inner: Any = store
        if isinstance(store, HoldingStore) and not isinstance(store, Store):
            inner, prefix = store.torch_store, store.namespace + prefix
        TorchPrefixStore.__init__(self, prefix, inner)

    def is_over(self) -> bool:
        """Whether a fault has ended the iteration. One that is done has had all whom it needed."""
        return Ends(self._store).outcome_of(self._iteration) == FAULT

    @property
    def _job(self) -> ByHand:
        return cast(ByHand, self._store)._job

    def now(self) -> float:
        return self._store.now()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def hear(self, key: str, seconds: float) -> str | None:
        return super().hear(self.wake_name(key), seconds)

    def wake_name(self, key: str) -> str:
        return self._store.wake_name(self._full(key)).removeprefix(self.namespace)

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        return self._store.execute([under(self.namespace, step) for step in steps])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist, as long as the iteration is on.

        Raises:
            DistStoreError: they do not after the timeout.
            RankShouldRestart: a fault has ended the iteration; a rank that was to write them may be lost.
        """
        deadline = self.now() + (timeout or self.timeout).total_seconds()
        pause = _FIRST_LOOK
        while True:
            seconds = max(0.001, min(pause, deadline - self.now()))
            try:
                super().wait(keys, timedelta(seconds=seconds))
                return
            except DistStoreError:
                if self.is_over():
                    raise RankShouldRestart("the iteration has ended") from None
                if self.now() >= deadline:
                    raise
            pause = min(2 * pause, _LONGEST_LOOK)

    def clone(self) -> "PrefixStore":
        return PrefixStore(self._iteration, self._store.clone())

    def close(self) -> None:
        """The store that it holds stays open."""
