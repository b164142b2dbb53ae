"""A store in memory, for tests: all operations, a clock that a test advances, faults that a test injects."""

import dataclasses
import fnmatch
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Self, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from ..protocol.operations import encoded
from ..store import StoreMixin

T = TypeVar("T")
Raised = BaseException | None
Hook = Callable[[str, str, Sequence[Any]], None]

DEFAULT_TIMEOUT = timedelta(seconds=30)
_PATIENCE = 5.0  # real seconds


@dataclasses.dataclass(eq=False)
class Waiter:
    """A wait for keys.

    Args:
        missing: keys that must still come.
        woken: whether all have come. Stays true, even where a key is deleted again meanwhile.
        task: whose it is, if a scheduler runs it.
        patience: real seconds without a turn of the clock after which the wait is given up; None: forever.
    """

    missing: set[str]
    woken: bool = False
    task: Any = None
    patience: float | None = None


class Clock:
    """Virtual time for threads. It stands still until `advance` turns it.

    Args:
        start: the first time that it shows, in seconds.
        lock: held while a store carries out an operation; its own when None.

    Attributes:
        aside: whether the current look at a store is outside the simulation: no step, no hook, no fault.
    """

    def __init__(self, start: float = 0.0, lock: Any = None) -> None:
        self._now = start
        self._sleepers = 0
        self._turned = threading.Condition()
        self.lock = lock or self._turned
        self.aside = False

    def now(self) -> float:
        """The time that it shows, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Turns the clock forward; waiters whose deadline has passed wake up.

        Args:
            seconds: by how much.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds} must not be negative: time only goes forward")
        with self._turned:
            self._now += seconds
            self._turned.notify_all()

    def wait_for_sleepers(self, count: int, timeout: float = 30.0) -> None:
        """Waits until enough threads wait by this clock: before that, turning it would not reach them.

        Args:
            count: how many threads at least.
            timeout: the most real seconds to wait.

        Raises:
            TimeoutError: fewer threads came to wait.
        """
        with self._turned:
            if not self._turned.wait_for(lambda: self._sleepers >= count, timeout):
                raise TimeoutError(f"{self._sleepers} of {count} threads wait after {timeout:g} s")

    def sleep(self, seconds: float) -> None:
        """Sleeps until the clock has been turned by this many seconds."""
        self.block(Waiter(set()), self.now() + seconds)

    def step(self, client: str, operation: str, args: Sequence[Any]) -> None:
        """Comes before each operation of a store. Does nothing here; a scheduler lets others go first."""

    def observe(self, result: Any) -> None:
        """Comes after each operation of a store. Does nothing here; a scheduler notes it in the trace."""

    def block(self, waiter: Waiter, deadline: float) -> bool:
        """Blocks until the waiter is woken; False if its deadline passed first.

        Raises:
            RuntimeError: the waiter's patience has run out.
        """
        with self._turned:
            self._sleepers += 1
            self._turned.notify_all()
            try:
                now = self._now
                while not self._turned.wait_for(
                    lambda: waiter.woken or self._now >= deadline, waiter.patience
                ):
                    if self._now == now:
                        raise RuntimeError(
                            f"would block for ever: in {waiter.patience:g} s no one has written "
                            f"{sorted(waiter.missing)} nor turned the clock; its time is virtual: let "
                            "another thread write the keys, or call clock.advance()"
                        )
                    now = self._now
            finally:
                self._sleepers -= 1
            return waiter.woken

    def woke(self, waiter: Waiter) -> None:
        """A waiter was woken; called with `lock` held."""
        self._turned.notify_all()


@dataclasses.dataclass
class _Injected:
    when: Literal["before", "after", "again"]
    operation: str
    key: str
    client: str
    times: int
    error: Raised

    def matches(self, client: str, operation: str, keys: Sequence[str]) -> bool:
        return (
            self.times > 0
            and fnmatch.fnmatchcase(operation, self.operation)
            and fnmatch.fnmatchcase(client, self.client)
            and any(fnmatch.fnmatchcase(key, self.key) for key in keys or [""])
        )


class _Contents:
    """What all clients of one store share."""

    def __init__(self, clock: Clock, use_libuv: bool) -> None:
        self.clock = clock
        self.use_libuv = use_libuv
        self.values: dict[str, bytes] = {}
        self.waiters: list[Waiter] = []
        self.faults: list[_Injected] = []
        self.hooks: list[Hook] = []

    def wake(self, key: str) -> None:
        if not self.waiters:
            return
        for waiter in self.waiters:
            waiter.missing.discard(key)
            if not waiter.missing:
                waiter.woken = True
                self.clock.woke(waiter)
        self.waiters = [waiter for waiter in self.waiters if not waiter.woken]


class FakeStore(Store, StoreMixin):
    """A store in memory that behaves like torch's TCPStore, its oddities included.

    Time is virtual: a wait for a missing key lasts until a test turns the clock past its timeout::

        store = FakeStore()
        store.clock.advance(30.0)

    A ``get`` of a missing key raises after 5 real seconds if no thread turns the clock or writes the key.

    What it imitates of TCPStore (torch 2.13): ``compare_set`` on an absent key returns the value that was
    *expected*; with ``use_libuv=False`` a key that ``compare_set`` creates wakes no waiter; with
    ``use_libuv=True`` a failed ``compare_set`` on an absent key wakes its waiters, and a ``get`` that is
    woken this way returns nothing. A waiter stays woken, even if the key is deleted before it looks.

    Args:
        clock: tells the time, and which task runs next; a new `Clock` when None.
        use_libuv: which of TCPStore's two servers to imitate.
        timeout: how long operations wait.
        client: name of this client, for hooks and faults.
    """

    # Since torch 2.12 its Store has a method of this name with another meaning.
    barrier = StoreMixin.barrier

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        use_libuv: bool = True,
        timeout: timedelta = DEFAULT_TIMEOUT,
        client: str = "",
    ) -> None:
        super().__init__()
        self._contents = _Contents(clock or Clock(), use_libuv)
        self._timeout = timeout
        self.client = client

    def __repr__(self) -> str:
        return f"FakeStore({self.client!r})" if self.client else "FakeStore()"

    @property
    def clock(self) -> Clock:
        """The clock that all clients go by."""
        return self._contents.clock

    def now(self) -> float:
        return self._contents.clock.now()

    def clone(self, client: str | None = None) -> Self:
        """Another client of the same store.

        Args:
            client: its name; this one's when None.
        """
        other = type(self).__new__(type(self))
        Store.__init__(other)
        other.__dict__.update(self.__dict__)
        if client is not None:
            other.client = client
        return other

    def snapshot(self) -> dict[str, bytes]:
        """All keys with their values, as they are now. No operation: no step, no hook, no fault."""
        with self.clock.lock:
            return dict(self._contents.values)

    # Faults ------------------------------------------------------------------------------------------------

    def on_operation(self, hook: Hook) -> None:
        """Calls a hook before each operation of any client.

        Args:
            hook: called with the client's name, the operation's name and its arguments. If it raises, so does
                the operation, without being carried out.
        """
        self._contents.hooks.append(hook)

    def fail(
        self, operation: str = "*", key: str = "*", *, client: str = "*", times: int = 1, error: Raised = None
    ) -> None:
        """Makes operations fail without being carried out.

        Args:
            operation: name of the operation (``set``, ``compare_set`` …), with wildcards.
            key: name of the key, with wildcards.
            client: name of the client, with wildcards.
            times: how many operations.
            error: what is raised; a ``DistNetworkError`` that names operation and key when None.
        """
        self._contents.faults.append(_Injected("before", operation, key, client, times, error))

    def lose_reply(
        self, operation: str = "*", key: str = "*", *, client: str = "*", times: int = 1, error: Raised = None
    ) -> None:
        """Makes operations fail although they are carried out. Arguments as in `fail`."""
        self._contents.faults.append(_Injected("after", operation, key, client, times, error))

    def repeat(self, operation: str = "*", key: str = "*", *, client: str = "*", times: int = 1) -> None:
        """Carries out operations twice: a reply was lost and the client tried again.

        Others may run in between. Arguments as in `fail`.
        """
        self._contents.faults.append(_Injected("again", operation, key, client, times, None))

    # Operations --------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._operate("set", [key], (key, value), lambda: self._write(key, encoded(value)))

    def get(self, key: str) -> bytes:
        return self._operate("get", [key], (key,), lambda: self._values([key]))[0]

    def add(self, key: str, amount: int) -> int:
        def act() -> int:
            before = self._contents.values.get(key, b"0")
            try:
                after = int(before) + amount
            except ValueError:
                raise DistStoreError(f"add: key {key!r} holds {before!r}, which is no number") from None
            self._write(key, str(after).encode())
            return after

        return self._operate("add", [key], (key, amount), act)

    def append(self, key: str, value: str | bytes) -> None:
        def act() -> None:
            self._write(key, self._contents.values.get(key, b"") + encoded(value))

        self._operate("append", [key], (key, value), act)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        def act() -> bytes:
            contents = self._contents
            before = contents.values.get(key)
            if before is None and expected:
                if contents.use_libuv and not contents.clock.aside:
                    contents.wake(key)
                return encoded(expected)
            if before is not None and before != encoded(expected):
                return before
            contents.values[key] = encoded(desired)
            if contents.use_libuv:
                contents.wake(key)
            return contents.values[key]

        return self._operate("compare_set", [key], (key, expected, desired), act)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout if timeout is None else timeout
        args = (keys,) if timeout is None else (keys, timeout)
        self._operate("wait", keys, args, lambda: self._await("wait", list(keys), limit))

    def check(self, keys: list[str]) -> bool:
        values = self._contents.values
        return self._operate("check", keys, (keys,), lambda: all(key in values for key in keys))

    def delete_key(self, key: str) -> bool:
        values = self._contents.values
        return self._operate("delete_key", [key], (key,), lambda: values.pop(key, None) is not None)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._operate("multi_get", keys, (keys,), lambda: self._values(list(keys)))

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        def act() -> None:
            for key, value in zip(keys, values, strict=True):
                self._write(key, encoded(value))

        self._operate("multi_set", keys, (keys, values), act)

    def num_keys(self) -> int:
        return self._operate("num_keys", [], (), lambda: len(self._contents.values))

    def list_keys(self) -> list[str]:
        return self._operate("list_keys", [], (), lambda: sorted(self._contents.values))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        """Tells torch that append, multi_get and multi_set exist."""
        return True

    # torch's C++ PrefixStore knows these two under its own names.
    deleteKey = delete_key
    getNumKeys = num_keys

    # Steps -------------------------------------------------------------------------------------------------

    def _operate(self, operation: str, keys: Sequence[str], args: Sequence[Any], act: Callable[[], T]) -> T:
        contents, clock = self._contents, self._contents.clock
        if clock.aside:
            return act()
        clock.step(self.client, operation, args)
        for hook in contents.hooks:
            hook(self.client, operation, args)
        try:
            with clock.lock:
                fault = self._take_fault(operation, keys) if contents.faults else None
                if fault is not None and fault.when == "before":
                    raise fault.error or _injected("failed", operation, keys)
                result = act()
            if fault is not None and fault.when == "after":
                raise fault.error or _injected("lost its reply", operation, keys)
        except Exception as error:
            clock.observe(type(error).__name__)
            raise
        clock.observe(result)
        if fault is not None:
            return self._operate(operation, keys, args, act)
        return result

    def _take_fault(self, operation: str, keys: Sequence[str]) -> _Injected | None:
        faults = self._contents.faults
        fault = next((f for f in faults if f.matches(self.client, operation, keys)), None)
        if fault is not None:
            fault.times -= 1
            if not fault.times:
                faults.remove(fault)
        return fault

    def _write(self, key: str, value: bytes) -> None:
        self._contents.values[key] = value
        self._contents.wake(key)

    def _values(self, keys: list[str]) -> list[bytes]:
        self._await("get", keys, self._timeout, _PATIENCE)
        # Nothing, if a failed compare_set woke us or the key is gone again: as on TCPStore.
        return [self._contents.values.get(key, b"") for key in keys]

    def _await(
        self, operation: str, keys: list[str], timeout: timedelta, patience: float | None = None
    ) -> None:
        contents = self._contents
        waiter = Waiter({key for key in keys if key not in contents.values}, patience=patience)
        if not waiter.missing:
            return
        seconds = timeout.total_seconds()
        contents.waiters.append(waiter)
        try:
            woken = contents.clock.block(waiter, contents.clock.now() + seconds)
        finally:
            contents.waiters = [other for other in contents.waiters if other is not waiter]
        if not woken:
            raise DistStoreError(f"{operation} timed out after {seconds:g} s: keys {sorted(waiter.missing)}")


def _injected(what: str, operation: str, keys: Sequence[str]) -> DistNetworkError:
    return DistNetworkError(f"injected fault: {operation} {', '.join(keys)} {what}")
