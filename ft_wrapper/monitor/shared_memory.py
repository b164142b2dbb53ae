"""Memory that a rank shares with its monitor: a robust mutex that shows the rank's death, and stamps.

When a process dies, the kernel first releases its *robust* mutexes, then frees its memory, and only then
signals its pidfd and closes its sockets. So the thread that runs the function holds a robust mutex as long as
it lives. A watcher that blocks on it learns of the death within a millisecond, however large the process.

The stamps are seconds of ``time.monotonic()``, one clock for all processes of a host. Each field is aligned
and written in one store. So no reader sees half of a value, and no writer takes a lock.
"""

import array
import ctypes
import enum
import errno
import fcntl
import functools
import mmap
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from .._text import cut
from ..exception import StoreError
from ..protocol.notice import Notice

_SIZE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MUTEX_SIZE = 64  # bytes for a pthread_mutex_t; it has 40 to 48 on the platforms that torch supports
_NO_STEP = 2**64 - 1
_NOTICE_SIZE = 1536  # bytes
_NOTICE_TEXT = 100  # characters of each text in it, which JSON may write with six bytes
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
Step = Callable[[int], None]
_BEGINS = 64  # steps whose beginning a rank remembers
_MAP_FAILED = ctypes.c_void_p(-1).value


class Phase(enum.IntEnum):
    """Whether the monitor watches the stamps.

    Attributes:
        IDLE: the rank waits for others, has not joined, or is between calls: its main stamp is not watched.
        WATCHED: everywhere else. An unchanged stamp means a hang.
    """

    IDLE = 0
    WATCHED = 1


class RankMemory(ctypes.Structure):
    """Memory shared by a rank and the process that watches it.

    The rank makes it. The watcher inherits it by a fork, or maps the passed descriptor with `from_fd`. Each
    side closes its own object. Only on Linux.

    Attributes:
        fd: file descriptor of the memory, to be passed on; -1 after `close`. An exec closes it.
        main_stamp: when the main thread was last seen to run bytecode.
        gil_stamp: when a thread of the rank last had the GIL.
        ping_stamp: when the function last called ``ping``; 0.0 when not in this iteration.
        step_stamp: when the last reported step began, in this or an earlier iteration; 0.0 if there is none.
        monitor_stamp: when the monitor last looked at the rank; 0.0 if it has not yet.
        end_stamp: when the process began to wait, at exit, for the function's leftovers; otherwise 0.0.
        leave_stamp: when interruptions began to make the function leave; 0.0 if it is not being interrupted.
        pings: how often the function has pinged in this iteration.
        votes: votes and broadcasts of live state that the function has begun in this iteration.
        votes_ended: how many of them it has ended.
        active_rank: the rank's number among the active ranks of this iteration.
        active_world_size: how many ranks are active in this iteration.
        is_accused: whether evidence says that the iteration hangs by this rank.
        is_in_function: whether the rank is in the function, or is a spare.
        has_restarted: whether an iteration of the rank's call has ended by a fault.
        phase: whether the stamps are watched. Changed with `enter_phase`.
        iteration: the global restart iteration that the rank is in; -1 for none.
        active: whether the rank calls the function in this iteration, rather than being a spare.
        hang_protection_disabled: how many ``disable_hang_protection`` blocks the rank is in; above 0, no
            timeout applies.
        dump_signal: signal that asks the rank for its main thread's stack; 0 if it cannot be asked.
        dump_fd: the rank's descriptor of the pipe with the answer.
        leave_requested: whether the rank was asked to leave the job (written by the agent), or was excluded
            (written by the rank when its call ends).
        end_requested: whether the next SIGTERM is meant for this rank, which ends by it.
        looks: whether the rank has to look, when a step begins, for what was asked of it.
        notice_stamp: when the newest notice was written; 0.0 if there is none.
        is_life_held: whether the rank is in its call; after its process has ended, whether it ended in one.
        slow: what the rank costs each step, as a share of it; 0.0 if it is not slow. The monitor writes it.
        is_only_holder: whether no other active rank holds the same shard of a live state.
        vote_times: when the last votes ended, in the rank's own object; `vote_begins`: when they began;
            and `ping_times` of its pings.

    Raises:
        RuntimeError: the platform lacks ``memfd_create``.
        OSError: no memory or no file descriptor is free.
    """

    _fields_ = (
        ("_mutex", ctypes.c_char * _MUTEX_SIZE),
        *((f"{name}_stamp", ctypes.c_double) for name in ("main", "gil", "ping", "step")),
        *((f"{name}_stamp", ctypes.c_double) for name in ("monitor", "end", "leave", "notice")),
        *((name, ctypes.c_uint64) for name in ("_step", "_first_step", "pings", "votes", "votes_ended")),
        *((name, ctypes.c_int64) for name in ("phase", "iteration", "_rank", "hang_protection_disabled")),
        *((name, ctypes.c_int64) for name in ("dump_signal", "dump_fd", "active_rank", "active_world_size")),
        *((name, ctypes.c_bool) for name in ("active", "is_in_function", "has_restarted", "is_accused")),
        *((name, ctypes.c_bool) for name in ("is_life_held", "leave_requested", "end_requested", "looks")),
        ("slow", ctypes.c_double),
        ("is_only_holder", ctypes.c_bool),
        ("_newest", ctypes.c_uint64),
        ("_notices", ctypes.c_char * _NOTICE_SIZE * 2),
    )
    main_stamp: float
    gil_stamp: float
    ping_stamp: float
    step_stamp: float
    monitor_stamp: float
    end_stamp: float
    leave_stamp: float
    phase: int
    iteration: int
    _first_step: int
    active: bool
    is_in_function: bool
    has_restarted: bool
    hang_protection_disabled: int
    dump_signal: int
    dump_fd: int
    active_rank: int
    active_world_size: int
    pings: int
    votes: int
    votes_ended: int
    is_accused: bool
    is_only_holder: bool
    slow: float
    leave_requested: bool
    end_requested: bool
    looks: bool
    notice_stamp: float
    _newest: int
    _notices: Any
    fd: int
    vote_times: "array.array[float]"
    vote_begins: "array.array[float]"
    ping_times: "array.array[float]"
    _owner: tuple[int, int] | None = None  # process and thread that hold the life mutex by this object

    def __new__(cls) -> "RankMemory":  # not in memory of ctypes' own
        if not hasattr(os, "memfd_create"):
            raise RuntimeError(f"{sys.platform} lacks memfd_create: ft_wrapper runs on Linux with glibc")
        fd = os.memfd_create("ft_wrapper_rank", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _SIZE)
            # A file that became shorter would end each process that maps it, such as the agent.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = cls._map(fd)
        except BaseException:
            os.close(fd)
            raise
        attributes = ctypes.create_string_buffer(64)
        _pthread("mutexattr_init", attributes)
        _pthread("mutexattr_setpshared", attributes, _PTHREAD_PROCESS_SHARED)
        _pthread("mutexattr_setrobust", attributes, _PTHREAD_MUTEX_ROBUST)
        _pthread("mutex_init", ctypes.byref(memory), attributes)
        memory.iteration = memory._rank = -1
        memory._step = _NO_STEP
        memory.enter_phase(Phase.IDLE)
        memory.gil_stamp = time.monotonic()
        return memory

    @classmethod
    def from_fd(cls, fd: int) -> "RankMemory":
        """Maps a rank's memory in another process.

        Args:
            fd: descriptor of the memory (`fd` of the rank's object), inherited or received. The caller still
                owns it, since it is duplicated.

        Raises:
            ValueError: the descriptor is not that of a rank's memory.
            OSError: the descriptor is not open, or is not a memory file's, or the mapping failed.
        """
        own = os.dup(fd)
        try:
            if os.fstat(own).st_size != _SIZE or fcntl.fcntl(own, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError(f"fd={fd} is not a rank's memory; pass the fd of a RankMemory")
            return cls._map(own)
        except BaseException:
            os.close(own)
            raise

    @classmethod
    def _map(cls, fd: int) -> "RankMemory":
        """Maps the memory.

        It does not use ``mmap.mmap``, which keeps a duplicate of the descriptor: a forked child that closes
        inherited files would close that, too.
        """
        address = _libc().mmap(None, _SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"mapping {_SIZE} bytes of file descriptor {fd}: {os.strerror(code)}")
        memory = cls.from_address(address)
        memory.fd = fd
        for name in ("vote_begins", "vote_times", "ping_times"):
            setattr(memory, name, array.array("d", bytes(8 * _BEGINS)))
        return memory

    # ---- life and death

    def lock_life(self) -> None:
        """Takes the life mutex. From now on any end of the calling thread wakes the watchers.

        The thread that runs the function calls it once, before the monitor is forked or gets the descriptor.
        `close` releases the mutex.
        """
        _pthread("mutex_lock", ctypes.byref(self))
        self.is_life_held = True
        self._owner = _here()

    def wait_for_death(self) -> bool:
        """Blocks until the rank's thread has ended or has closed its memory. Returns whether it has ended.

        Any number of watchers, at once or in turn, get the same answer. No signal ends the wait (not even a
        Ctrl-C in a main thread), so it mostly needs its own thread.
        """
        try:
            _pthread("mutex_lock", ctypes.byref(self))
        except OSError as error:
            if error.errno != errno.EOWNERDEAD:
                raise
            _pthread("mutex_consistent", ctypes.byref(self))
        # Not from EOWNERDEAD: only the first watcher gets it, and a watcher that is killed while it holds the
        # mutex also causes it. Only the owner clears this field.
        has_died = self.is_life_held
        _pthread("mutex_unlock", ctypes.byref(self))
        return has_died

    # ---- fields that are not plain numbers

    @property
    def rank(self) -> int | None:
        """The rank that the rank assignment gave in this iteration; None until it has given one."""
        rank = self._rank  # read once, like all fields that the other side writes
        return None if rank < 0 else rank

    @rank.setter
    def rank(self, value: int | None) -> None:
        self._rank = -1 if value is None else value

    @property
    def notice(self) -> Notice | None:
        """The newest notice, with the seconds that are left now; None if there was none."""
        text = self._notices[self._newest].value.decode()
        try:
            return Notice.from_json(text, "notice").after(time.monotonic()) if text else None
        except StoreError:  # the agent and the rank, which has heard of it from another rank, wrote at once
            return None

    def give(self, notice: Notice) -> None:
        """Writes a notice, which the rank sees when its next step begins; from any process that maps this."""
        self.notice_stamp = now = time.monotonic()
        until = notice.after(-now).seconds  # by the clock
        who, why = (cut(text, _NOTICE_TEXT) for text in (notice.who, notice.why))
        # Whether nodes leave is enough: their names might not fit.
        written = Notice(who, why, until, notice.id, notice.ends, notice.leaving and ("",))
        other = 1 - self._newest  # or a reader would see half of the text
        self._notices[other].value = written.to_json().encode()
        self._newest, self.looks = other, True

    def enter_phase(self, phase: int) -> None:
        """Changes the phase, and resets the stamps: ``main_stamp`` to now, ``ping_stamp`` to none."""
        self.main_stamp = time.monotonic()
        self.ping_stamp = 0.0
        self.phase = phase

    @property
    def step(self) -> int | None:
        """The step that the function last reported in this iteration; None if it has reported none."""
        step = self._step
        return None if step == _NO_STEP else step

    def enter_iteration(self, n: int) -> None:
        """Notes that the rank is in another iteration: it has no number yet, and has reported no step."""
        self._step = _NO_STEP  # before `iteration`, or a watcher would take the old step for a new one
        self.is_in_function, self.has_restarted = False, self.iteration >= 0
        self.pings = self.votes = self.votes_ended = 0
        self.is_accused = self.is_only_holder = False
        self.iteration, self._rank = n, -1

    def leave_iteration(self) -> None:
        """Notes that the rank has left the function because of a fault."""
        self.is_in_function, self.has_restarted, self.leave_stamp = False, True, 0.0

    @property
    def first_step(self) -> int:
        """The first step that the function reported in this iteration, if it reported any."""
        return self._first_step

    @property
    def has_progressed(self) -> bool:
        """Whether the function has pinged; if it reports steps, whether it is past the start of the first."""
        step = self._step
        if step == _NO_STEP:
            return self.ping_stamp > 0.0
        return step != self._first_step or self.ping_stamp > self.step_stamp

    def begins(self) -> list[tuple[int, float, float]]:
        """When the last steps of this iteration began; only in the rank's own object.

        A step begins when a vote of live state has ended; without that, at a ping.

        Returns:
            Of each step its number, when it began, and how long the vote before it took; 0.0 for a ping.
        """
        last, times, since = self.votes_ended, self.vote_times, self.vote_begins
        if not self.votes:
            last, times, since = self.pings, self.ping_times, self.ping_times
        # Without the oldest one, in whose place a newer one may be written meanwhile.
        places = ((n, n % _BEGINS) for n in range(max(1, last - _BEGINS + 2), last + 1))
        return [(n, times[place], times[place] - since[place]) for n, place in places]

    def last_step(self) -> dict[str, Any]:
        """The last reported step, and when it began, as fields of an event; empty if there is none."""
        step, began = self._step, self.step_stamp
        return {} if step == _NO_STEP else {"step": step, "began": began}

    def _view(self, name: str, form: str) -> Any:
        field = vars(type(self))[name]
        return memoryview(self).cast("B")[field.offset : field.offset + field.size].cast(form)  # type: ignore[call-overload]

    def make_ping(
        self, note: Callable[[], None] = lambda: None, look: Step = lambda n: None
    ) -> tuple[Callable[..., None], Step]:
        """Returns ``ping`` and ``step``, which only write the time, and the number of a step.

        They use no lock, queue or system call: about 0.1 microseconds. They may outlive the wrapped call.

        Args:
            note: called after the first step of an iteration is written; and both before and after a number
                lower than the last one is written, because the function has gone back.
            look: called with its number when a step begins, if the rank `looks`.
        """
        now, stamp, pings = time.monotonic, self._view("ping_stamp", "d"), self._view("pings", "Q")
        times = self.ping_times
        number, began = self._view("_step", "Q"), self._view("step_stamp", "d")
        first = self._view("_first_step", "Q")
        looks = self._view("looks", "?")

        def step(n: int) -> None:
            try:
                follows = n > number[0]
                if follows and not looks[0]:
                    number[0] = n
                    began[0] = now()
                    return
                is_step = follows or operator.index(n) >= 0
            except (TypeError, ValueError, OverflowError):
                is_step = False
            if not is_step:
                raise TypeError(
                    f"{n!r}: a step is an integer of at least 0, the number of the step that begins"
                )
            turn(n)

        def turn(n: int) -> None:
            """Begins the first step of an iteration or a lower one, or one at which the rank looks."""
            last = number[0]
            if n == last:
                return  # still the same step
            if looks[0]:
                look(n)
            follows = n > last
            if last == _NO_STEP:
                first[0] = n
            elif not follows:
                note()
            began[0] = now()
            number[0] = n  # written last: it marks the other values as valid
            if not follows:
                note()

        begin = step

        def ping(step: int | None = None) -> None:
            stamp[0] = at = now()
            times[(pings[0] + 1) % _BEGINS] = at
            pings[0] += 1
            if step is None:
                return
            try:  # as in `step`, but without reading the clock again, which would double the time
                if step > number[0] and not looks[0]:
                    number[0] = step
                    began[0] = at
                    return
            except (TypeError, ValueError, OverflowError):
                pass  # `step` raises for it
            begin(step)

        return ping, step

    def progress_stamp(self, slack: float = 0.0) -> float:
        """When the function last made progress, in monotonic seconds.

        The main thread's stamp; after a ``ping`` in this iteration, the older one of both: a function that
        pings promises to continue. Pings are exact, but the main thread's stamp may be as old as the interval
        between two stamps, and would make a hang look longer.

        Args:
            slack: seconds by which the main thread's stamp may be older than a ping without being used.
        """
        main, ping = self.main_stamp, self.ping_stamp
        return min(main + slack, ping) if ping else main

    def close(self) -> None:
        """Closes this side's descriptor, and releases the life mutex if the calling thread holds it.

        The mapping ends with the last reference to this object, such as a ``ping`` or a waiting watcher.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if self._owner == _here():
            # Written while the mutex is held, so that the watcher that gets it next reads this.
            self.is_life_held = False
            self._owner = None
            _pthread("mutex_unlock", ctypes.byref(self))
        if self._owner is None:  # otherwise the kernel reads the mutex when the thread that holds it ends
            weakref.finalize(self, _libc().munmap, ctypes.addressof(self), _SIZE).atexit = False


class Waits:
    """A block in which a rank waits for others, or for the store, and need not make progress.

    Everywhere else, from joining to the end of its call, a rank that makes no progress counts as hung.

    Args:
        memory: the rank's memory.
    """

    def __init__(self, memory: RankMemory) -> None:
        self._enter_phase = memory.enter_phase

    def __enter__(self) -> None:
        self._enter_phase(Phase.IDLE)

    def __exit__(self, *_: object) -> None:
        self._enter_phase(Phase.WATCHED)


class Votes:
    """A block in which a rank waits for the other ranks' votes, or for a broadcast.

    Args:
        memory: the rank's memory.
    """

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory

    def __enter__(self) -> None:
        self._memory.votes += 1
        self._memory.vote_begins[self._memory.votes % _BEGINS] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        memory = self._memory
        memory.vote_times[memory.votes % _BEGINS] = time.monotonic()
        memory.votes_ended = memory.votes


def _here() -> tuple[int, int]:
    # Different in a forked child, which inherits the object but not the mutex.
    return os.getpid(), threading.get_ident()


# ---- calls of the C library that Python lacks; they release the GIL


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def _pthread(name: str, *arguments: object) -> None:
    code = getattr(_libc(), f"pthread_{name}")(*arguments)
    if code != 0:
        raise OSError(code, f"pthread_{name}: {os.strerror(code)}")
