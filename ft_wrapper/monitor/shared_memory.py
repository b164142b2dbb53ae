"""Memory that a rank shares with its monitor: a robust mutex that tells of the rank's death, and stamps.

The kernel frees a dead process's memory before it signals the process's pidfd or closes its sockets, but it
releases a *robust* mutex before that. So the thread that runs the function holds one as long as it lives,
and a watcher that blocks on it learns of the death within a millisecond, whatever the process's size.

The stamps are seconds of ``time.monotonic()``, one clock for all processes of a host. Each field is eight
aligned bytes written in one store, so that no reader sees half of a value and no writer takes a lock.
"""

from __future__ import annotations

import enum
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable

from ..exception import TimeoutError
from . import libc

logger = logging.getLogger(__name__)

_SIZE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAGIC = 0x66745F72616E6B33
_MUTEX = 0  # byte offset; all below are indices of eight-byte fields after the mutex
_FIRST = libc.MUTEX_SIZE // 8
_MAIN, _GIL, _PING, _PHASE, _ITERATION, _RANK, _ACTIVE = range(_FIRST, _FIRST + 7)
_HANG_PROTECTION, _LIFE, _DUMP_SIGNAL, _DUMP_FD, _MAGIC_FIELD = range(_FIRST + 7, _FIRST + 12)


class Phase(enum.IntEnum):
    """Whether the stamps mean anything at present."""

    IDLE = 0
    """In the protocol, or between calls: the main stamp is not watched."""
    WATCHED = 1
    """In the function, in a plug-in around it, or warming up: a stamp that stands still is a hang."""


class _Life(enum.IntEnum):
    NEVER = 0
    HELD = 1
    RELEASED = 2


class _Stamp:
    """A field of seconds of ``time.monotonic()``."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, memory: RankMemory, owner: type) -> float:
        return memory._floats[self._index]

    def __set__(self, memory: RankMemory, value: float) -> None:
        memory._floats[self._index] = value


class _Number:
    """A field of one whole number."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, memory: RankMemory, owner: type) -> int:
        return memory._ints[self._index]

    def __set__(self, memory: RankMemory, value: int) -> None:
        memory._ints[self._index] = value


class RankMemory:
    """Memory shared by a rank and the process that watches it.

    Made by the rank. The watcher inherits it by a fork, or maps the passed descriptor with `from_fd`. Each
    side closes its own object. Only on Linux.

    Raises:
        RuntimeError: the platform lacks ``memfd_create`` or robust mutexes.
        OSError: no memory or no file descriptor is free.
    """

    main_stamp = _Stamp(_MAIN)
    """When the main thread was last seen to run bytecode."""
    gil_stamp = _Stamp(_GIL)
    """When a thread of the rank last had the GIL."""
    ping_stamp = _Stamp(_PING)
    """When the function last called ``ping``; 0.0 when not in this iteration."""
    iteration = _Number(_ITERATION)
    """The global restart iteration that the rank is in; -1 for none."""
    hang_protection_disabled = _Number(_HANG_PROTECTION)
    """How many ``disable_hang_protection`` blocks the rank is in; above 0, no timeout applies."""

    def __init__(self) -> None:
        libc.require()
        fd = os.memfd_create("ft_wrapper_rank", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _SIZE)
            # A file that became shorter would end each process that maps it, such as the agent.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map(fd)
        except BaseException:
            os.close(fd)
            raise
        libc.mutex_init(self._address + _MUTEX)
        self._ints[_ITERATION] = self._ints[_RANK] = -1
        self._ints[_MAGIC_FIELD] = _MAGIC
        self.enter_phase(Phase.IDLE)
        self.gil_stamp = time.monotonic()

    @classmethod
    def from_fd(cls, fd: int) -> RankMemory:
        """Maps a rank's memory in another process.

        Args:
            fd: descriptor of the memory (`fd` of the rank's object), inherited or received. It is duplicated:
                the caller still owns it.

        Raises:
            ValueError: the descriptor is not one of a rank's memory.
            OSError: the descriptor is not open, or the mapping failed.
        """
        libc.require()
        size = os.fstat(fd).st_size
        if size != _SIZE:
            raise ValueError(
                f"fd={fd} is no rank's memory: {size} bytes instead of {_SIZE}; pass the fd of a RankMemory"
            )
        if not _is_sealed(fd):
            raise ValueError(f"fd={fd} is no rank's memory: it can shrink; pass the fd of a RankMemory")
        memory = cls.__new__(cls)
        own = os.dup(fd)
        try:
            memory._map(own)
        except BaseException:
            os.close(own)
            raise
        if memory._ints[_MAGIC_FIELD] != _MAGIC:
            memory.close()
            raise ValueError(
                f"fd={fd} is no rank's memory, or one of another version; pass the fd of a RankMemory"
            )
        return memory

    def _map(self, fd: int) -> None:
        self._address = libc.map_shared(fd, _SIZE)
        self._fd = fd
        self._floats, self._ints = _views(self._address)
        self._owner: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._watchers = 0
        self._closed = False

    @property
    def fd(self) -> int:
        """File descriptor of the memory, to be passed on; -1 after `close`. Not inherited over an exec."""
        return self._fd

    # ---- life and death

    def lock_life(self) -> None:
        """Takes the mutex: from now on the end of the calling thread, however it comes, wakes the watchers.

        Called by the thread that runs the function, before anyone watches: before the monitor is forked or
        is passed the descriptor.

        Raises:
            RuntimeError: it is taken already, or its owner died.
        """
        if self._held_here():
            raise RuntimeError("lock_life() was called already in this process; call unlock_life() before")
        libc.mutex_lock(self._address + _MUTEX)
        if self._ints[_LIFE] == _Life.HELD:
            libc.mutex_unlock(self._address + _MUTEX)
            raise RuntimeError("the owner of this memory died; a new process needs a RankMemory of its own")
        self._ints[_LIFE] = _Life.HELD
        self._owner = (os.getpid(), threading.get_ident())

    def unlock_life(self) -> None:
        """Gives the mutex back: the watchers see an end in order. Called by the thread that took it.

        Raises:
            RuntimeError: the calling thread does not hold it.
        """
        if self._owner != (os.getpid(), threading.get_ident()):
            raise RuntimeError("unlock_life() must be called by the thread that called lock_life()")
        # Written while the mutex is held: a watcher that gets it afterwards reads what it means.
        self._ints[_LIFE] = _Life.RELEASED
        self._owner = None
        libc.mutex_unlock(self._address + _MUTEX)

    def wait_for_death(self, timeout: float | None = None) -> bool:
        """Blocks until the rank's thread has ended or has called `unlock_life`.

        Any number of watchers, at once or one after the other, get the same answer. Signals do not end the
        wait (in a main thread, Ctrl-C neither): give it a thread of its own where the process has other
        things to do.

        Args:
            timeout: seconds to wait at most; for ever when None.

        Returns:
            True when the owner died; False when it unlocked in order.

        Raises:
            RuntimeError: `lock_life` was never called, or the calling process is the one that holds it.
            ValueError: the memory is closed.
            ft_wrapper.exception.TimeoutError: neither happened within the timeout.
        """
        if self._held_here():
            raise RuntimeError("wait_for_death() is for another process than the one that called lock_life()")
        with self._lock:
            if self._closed:
                raise ValueError("wait_for_death() on a closed RankMemory")
            self._watchers += 1
        try:
            if not libc.mutex_lock(self._address + _MUTEX, timeout):
                raise TimeoutError(f"the watched rank neither died nor unlocked its life within {timeout} s")
            # Not the mutex's own verdict: that is spent on the first watcher, and a watcher killed while it
            # holds the mutex leaves one behind too. Only the owner changes the field from HELD.
            life = _Life(self._ints[_LIFE])
            libc.mutex_unlock(self._address + _MUTEX)
        finally:
            with self._lock:
                self._watchers -= 1
                self._release_if_unused()
        if life is _Life.NEVER:
            raise RuntimeError(
                "this memory's mutex is not held: the rank must call lock_life() before it is watched"
            )
        return life is _Life.HELD

    def _held_here(self) -> bool:
        # A forked child inherits the field, but not the mutex.
        return self._owner is not None and self._owner[0] == os.getpid()

    # ---- fields that are more than a number

    @property
    def phase(self) -> Phase:
        """Whether the stamps count. Changed with `enter_phase`."""
        return Phase(self._ints[_PHASE])

    @property
    def rank(self) -> int | None:
        """The rank that the rank assignment gave in this iteration; None until it has given one."""
        rank = self._ints[_RANK]
        return None if rank < 0 else rank

    @rank.setter
    def rank(self, value: int | None) -> None:
        self._ints[_RANK] = -1 if value is None else value

    @property
    def active(self) -> bool:
        """Whether the rank calls the function in this iteration, rather than being a spare."""
        return bool(self._ints[_ACTIVE])

    @active.setter
    def active(self, value: bool) -> None:
        self._ints[_ACTIVE] = int(value)

    @property
    def dump(self) -> tuple[int, int] | None:
        """How to ask the rank where it stands: a signal, and its descriptor that the answer comes by."""
        signum = self._ints[_DUMP_SIGNAL]
        return (signum, self._ints[_DUMP_FD]) if signum else None

    @dump.setter
    def dump(self, value: tuple[int, int] | None) -> None:
        signum, fd = value or (0, 0)
        self._ints[_DUMP_FD] = fd
        self._ints[_DUMP_SIGNAL] = signum

    def enter_phase(self, phase: Phase) -> None:
        """Changes the phase. The stamps are new: ``main_stamp`` is now, and there was no ``ping`` yet."""
        self._floats[_MAIN] = time.monotonic()
        self._floats[_PING] = 0.0
        self._ints[_PHASE] = int(phase)

    def make_ping(self) -> Callable[[], None]:
        """Returns a function that writes the present time to `ping_stamp` and does nothing else.

        No lock, no queue, no system call: about 0.1 microseconds. Once the memory is closed it does
        nothing at all, so that it may outlive the wrapped call.
        """
        floats, index, now = self._floats, _PING, time.monotonic

        def ping() -> None:
            try:
                floats[index] = now()
            except ValueError:  # closed: the view was released
                pass

        return ping

    def progress_stamp(self, slack: float = 0.0) -> float:
        """When the function last made progress, in monotonic seconds.

        The main thread's stamp; once there was a ``ping`` in this iteration, the older of the two: a function
        that pings promises to go on doing so. Pings are exact, while the main thread's stamp may be as old as
        the time between two of them, and would make a hang seem longer than it is.

        Args:
            slack: seconds by which the main thread's stamp may be older than a ping and yet say nothing.
        """
        main, ping = self._floats[_MAIN], self._floats[_PING]
        return min(main + slack, ping) if ping else main

    # ---- the end

    def close(self) -> None:
        """Closes this side's descriptor and mapping; again is harmless.

        Unlocks the life if the calling thread holds it. While another thread of this process holds it the
        mapping stays, since the kernel will look there when that thread ends; while a watcher waits on it,
        until the watcher is through.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._fd)
            self._fd = -1
            if self._owner == (os.getpid(), threading.get_ident()):
                self.unlock_life()
            if self._held_here():
                logger.warning(
                    "closing a rank's memory while another thread holds its life: the mapping stays"
                )
            self._release_if_unused()

    def _release_if_unused(self) -> None:
        if not self._closed or self._watchers or self._held_here():
            return
        # The views first: what still refers to one of them gets a ValueError instead of a crash.
        self._floats.release()
        self._ints.release()
        libc.unmap(self._address, _SIZE)


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False  # no memory file


def _views(address: int) -> tuple[memoryview[float], memoryview[int]]:
    """The memory as float64 and as int64."""
    whole = libc.view(address, _SIZE)
    return whole.cast("d"), whole.cast("q")
