"""The base of all stores, on torch's operations; the stores that wrap another store."""

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import FileStore as TorchFileStore
from torch._C._distributed_c10d import PrefixStore as TorchPrefixStore
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from .. import events
from ..exception import RankShouldRestart
from ..protocol import keys as names
from ..protocol import operations
from ..protocol.by_hand import ByHand
from ..protocol.ends import Ends
from ..protocol.entering import Barriers
from ..protocol.operations import Operations, Step, encoded, sealed, to_text, under
from ..protocol.records import FAULT
from ..protocol.seal import Seal, forged

DEFAULT_TIMEOUT = timedelta(seconds=30)
_FIRST_LOOK = 0.5  # seconds of waiting until the first check whether the iteration has ended
_LONGEST_LOOK = 4.0
#: The steps that give the value of a register.
_Register = operations.SetIfAbsent | operations.CompareAndSet
#: A value that no key has.
NEVER = "\x00no key holds this"


def describe_call(name: str, args: Sequence[Any]) -> str:
    """An operation and its keys, for messages."""
    return f"{name} {args[0]}" if args else name


class StoreMixin(Barriers, ByHand):
    """A store: torch's operations, steps, barriers of named groups, and global iterations by hand.

    A custom store implements torch's operations. It may override ``execute`` to carry out several steps at
    once, or to improve a step, and ``wait_for`` if it knows the value of a notification key.
    """

    patience = 0.0
    nonces: Iterator[str] = iter(lambda: secrets.token_hex(6), "")
    namespace = ""
    """Prefix of every key."""
    place = ""
    """Name of the store, which is part of each seal."""
    is_private = False
    """Whether only the job's own processes can reach the store."""
    reads_by_compare_set = False
    """Whether a compare_set that fails is used to read a key, in one request; `check` and `get` take three.

    It changes nothing and returns the key's value, or the expected value if the key is absent.
    """

    # torch's operations --------------------------------------------------------------------------------

    def _call(self, name: str, *args: Any) -> Any:
        """Calls one of torch's operations of this store, on keys that already have the namespace."""
        own = getattr(self, name)
        if getattr(own, "__func__", own) is getattr(StoreMixin, name):
            raise NotImplementedError(f"{type(self).__name__} has no {name}")
        return own(*args)

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a key and wakes its waiters."""
        self._call("set", self.namespace + key, value)

    def get(self, key: str) -> bytes:
        """Reads a key; waits for it up to the store's timeout, then raises ``DistStoreError``."""
        return bytes(self._call("get", self.namespace + key))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", self.namespace + key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to a key, atomically."""
        self._call("append", self.namespace + key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        """Writes a key if it has the expected value (``""``: is absent). Read the key to see the winner."""
        return bytes(self._call("compare_set", self.namespace + key, encoded(expected), desired))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = [] if timeout is None else [timeout]
        self._call("wait", self._all_full(keys), *limit)

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", self._all_full(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", self.namespace + key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Reads several keys at once; waits like ``get``."""
        return list(self._call("multi_get", self._all_full(keys)))

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Writes several keys at once."""
        self._call("multi_set", self._all_full(keys), values)

    def num_keys(self) -> int:
        """Number of keys in the store."""
        return int(self._call("num_keys"))

    def list_keys(self) -> list[str]:
        found = self._call("list_keys")
        return [key.removeprefix(self.namespace) for key in found if key.startswith(self.namespace)]

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that wait."""
        raise NotImplementedError

    @property
    def timeout(self) -> timedelta:
        """The timeout of operations that wait."""
        raise NotImplementedError

    def _all_full(self, keys: list[str]) -> list[str]:
        return [self.namespace + key for key in keys]

    # Steps ---------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic()

    def wall_clock(self) -> float:
        return time.time()

    def host_and_pid(self) -> tuple[str, int]:
        return socket.gethostname(), os.getpid()

    @property
    def launched_rank(self) -> str:  # type: ignore[override]
        return os.environ.get("RANK", "")

    emit = staticmethod(events.emit)
    warn = staticmethod(logging.getLogger("ft_wrapper.protocol").warning)

    def wait_for(self, key: str, seconds: float) -> str | None:
        if self.seal is not None:
            key = self.wake_name(key)
        if seconds <= 0:
            return "" if self.check([key]) else None
        try:
            self.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except DistStoreError:
            return None
        return ""

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        if self.seal is None:
            return self._perform(steps)
        closed = [sealed(step, self.seal) for step in steps]
        # In order if strangers can write: a notification must not overtake its cause.
        given = list[str | None]()
        for group in [closed] if self.is_private else [[step] for step in closed]:
            held = self._perform(group)
            given += [self._own(step, each, self.seal) for step, each in zip(group, held, strict=True)]
        return given

    def _own(self, step: Step, held: str | None, seal: Seal) -> str | None:
        """A step's result without what strangers wrote; overwrites a register that a stranger wrote."""
        if held is None or not isinstance(step, operations.Read | operations.ReadLog | _Register):
            return held
        if not held and isinstance(step, operations.ReadLog | operations.CompareAndSet):
            return held
        text = seal.check(step.key, held)
        if text is None and isinstance(step, _Register) and not self.is_private:
            if isinstance(step, operations.CompareAndSet) and not step.expected:
                raise forged(step.key)  # replacing it would start a job, though one may be running
            written = self.compare_set(step.key, held, step.desired)
            text = seal.check(step.key, to_text(written, step.key, is_ours=False))
        return seal.latest(step.key, text)

    def _perform(self, steps: Sequence[Step]) -> list[str | None]:
        """Carries out steps, already sealed, with torch's operations."""
        prefix, is_ours = self.namespace, self.seal is None
        given: list[str | None] = []
        for step in steps:
            held: str | None = None
            match step:
                case operations.Read(key):
                    held = self._read(key)
                case operations.Append(key, entry):
                    self._call("append", prefix + key, entry + "\n")
                case operations.Write(values) if len(values) > 1:
                    self._call("multi_set", [prefix + key for key in values], [*values.values()])
                case operations.Write(values):
                    for key, value in values.items():
                        self._call("set", prefix + key, value)
                case operations.Notify(key, value):
                    self._call("set", prefix + key, value)
                case operations.SetIfAbsent(key, desired):
                    held = to_text(self._call("compare_set", prefix + key, "", desired), key, is_ours)
                case operations.CompareAndSet(key, expected, desired):
                    was = self._call("compare_set", prefix + key, encoded(expected), desired)
                    held = to_text(was, key, is_ours)
                case operations.ReadLog(key):
                    held = (self._read(key) or "").removesuffix("\n")
                case operations.Count(key):
                    held = str(self._call("add", prefix + key, 1))
                case operations.Heartbeat(key):
                    self._call("add", prefix + key, 1)
                case operations.ReadHeartbeat(key):
                    held = str(self._call("add", prefix + key, 0))
                case operations.Delete(keys):
                    for key in keys:
                        self._call("delete_key", prefix + key)
            given.append(held)
        return given

    def _read(self, key: str) -> str | None:
        """Reads a key without waiting for it; None if it is absent."""
        full = self.namespace + key
        if self.reads_by_compare_set:
            text = to_text(self._call("compare_set", full, NEVER, NEVER), key, self.seal is None)
            return None if text == NEVER else text
        try:
            return to_text(self._call("get", full), key, self.seal is None) if self.check([key]) else None
        except DistStoreError:
            return None  # the key was just deleted


class HoldingStore(StoreMixin):
    """Forwards every operation to an inner store, torch's or one of this package.

    It wraps a store instead of subclassing it, because ``clone()`` of a subclass of torch's stores returns
    torch's class.

    Args:
        store: the inner store.
        namespace: prefix of every key, so that several jobs can share a store.
    """

    def __init__(self, store: Store | Operations, namespace: str = "") -> None:
        self._store = cast(StoreMixin, store)  # torch's have the same methods
        self.namespace = namespace

    @property
    def torch_store(self) -> Store:
        """A torch store, for ``init_process_group(store=…)`` and ``torch.distributed.PrefixStore``."""
        return self if isinstance(self, Store) else cast(Store, self._store)

    def _call(self, name: str, *args: Any) -> Any:
        return getattr(self._store, name)(*args)

    def list_keys(self) -> list[str]:
        # Older versions of torch cannot list keys.
        return super().list_keys() if hasattr(self._store, "list_keys") else []

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def close(self) -> None:
        del self._store


class _File(TorchFileStore):
    """torch's FileStore with the operations that it lacks."""

    def append(self, key: str, value: str | bytes) -> None:
        before, text = "", value.decode() if isinstance(value, bytes) else value
        # The answer is the key's value. If two clients append the same line, neither knows whose line it is.
        # Logs are read as sets, so a duplicate line does no harm.
        while (held := self.compare_set(key, before, before + text).decode()) != before + text:
            before = "" if held == before else held  # empty if the key was just deleted

    def delete_key(self, key: str) -> bool:
        existed = self.check([key])  # torch's delete_key always returns True
        super().delete_key(key)
        return existed

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


class FileStore(HoldingStore):
    """Keys in a file on one host or on a file system with working locks.

    For tests and for single nodes without ports. Each append rewrites the log with compare_set, and waiting
    polls inside torch.

    Args:
        file_name: path of the file, which must not exist when the job starts.
        world_size: ignored; accepted so that arguments for torch's FileStore fit.
        timeout: how long to wait in operations that wait.
    """

    def __init__(
        self, file_name: str, world_size: int | None = None, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        self.file_name = str(file_name)
        super().__init__(_File(self.file_name))
        self.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"FileStore({self.file_name})"

    def clone(self) -> "FileStore":
        other = FileStore(self.file_name, timeout=self.timeout)
        other.membership = self.membership
        return other

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return super()._call(name, *args)
        except RuntimeError as error:
            # torch's FileStore reports a timeout only by the error's text.
            if "timeout" not in str(error).lower():
                raise
            raise DistStoreError(f"{self!r}: {describe_call(name, args)} timed out: {error}") from None


class PrefixStore(HoldingStore, TorchPrefixStore):
    """The keys of one iteration, so that keys of an earlier iteration are never seen.

    It is a real ``torch.distributed.PrefixStore``, to be passed as ``store=`` to ``init_process_group``.
    Calls from Python use the wrapper's store, with its retries.

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
        """Whether a fault has ended the iteration. After ``done`` no rank waits for a lost one."""
        return Ends(self._store).outcome_of(self._iteration) == FAULT

    @property
    def _job(self) -> ByHand:
        return cast(ByHand, self._store)._job

    def now(self) -> float:
        return self._store.now()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def wait_for(self, key: str, seconds: float) -> str | None:
        return super().wait_for(self.wake_name(key), seconds)

    def wake_name(self, key: str) -> str:
        return self._store.wake_name(self.namespace + key).removeprefix(self.namespace)

    def execute(self, steps: Sequence[Step]) -> list[str | None]:
        return self._store.execute([under(self.namespace, step) for step in steps])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist, while the iteration runs.

        Raises:
            DistStoreError: some keys do not exist at the timeout.
            RankShouldRestart: a fault has ended the iteration; the rank that should write a key may be lost.
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
        """Does nothing: the inner store stays open."""
