"""Faults in real processes: now, at a given place of a job, or at random with a seed.

A place is named by the point in the program (`Where`), the rank, the restart iteration and the step. On a
command line or in the environment variable ``FT_WRAPPER_FAULTS`` a fault reads::

    exception:rank=1:step=10,sigkill:rank=0:step=20,sleep:slot=3:iteration=1:where=initialize

The program asks at each of its points whether something is to happen there::

    injector = Injector.from_env(fired_dir=shared_folder)
    ...
    injector.check("step", rank=rank, slot=slot, iteration=call_wrapper.iteration, step=step)

This is for tests, drills and demonstrations: nothing in the wrapper itself imports it.
"""

import concurrent.futures
import ctypes
import dataclasses
import datetime
import enum
import os
import random
import resource
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .. import events
from ..finalize import Finalize
from ..initialize import Initialize
from ..settings import as_limit
from ..state import FrozenState

E = TypeVar("E", bound=enum.Enum)

ENV = "FT_WRAPPER_FAULTS"

# How long an endless fault lasts: longer than any job, short enough for every clock's integers.
_FOREVER = 365 * 24 * 3600.0


class InjectedFault(Exception):
    """What the function raises when the fault is an exception."""


class FaultKind(enum.Enum):
    """What goes wrong. The value is the name used on command lines."""

    EXCEPTION = "exception"
    """`InjectedFault` is raised."""
    EXIT = "exit"
    """The process ends at once with exit code 1: no exception, no cleaning up (``os._exit``)."""
    SIGKILL = "sigkill"
    """The process is killed, as by the kernel when memory runs out."""
    SIGTERM = "sigterm"
    """The process gets SIGTERM, as from a scheduler."""
    SIGSTOP = "sigstop"
    """The process is stopped: it lives, but none of its threads runs."""
    SEGFAULT = "segfault"
    """The process reads address 0."""
    ABORT = "abort"
    """The process ends through ``abort(3)``, as CUDA and C++ libraries do on a failed check."""
    SLEEP = "sleep"
    """A hang that a signal can interrupt: the calling thread sleeps."""
    GIL = "gil"
    """A hang that nothing can interrupt: a C function that never returns and never releases the GIL."""
    COLLECTIVE = "collective"
    """A hang in a collective: an all_reduce that this rank enters and its peer never does.

    It uses its own gloo group of two ranks, both inside this process, of which only one calls. So it
    needs no process group, works anywhere in the program, and cannot pair up with an operation of the job's
    own groups, in whose next collective its peers wait. Shutting down the gloo connections of the process
    frees it: the all_reduce then raises a RuntimeError.
    """


# An interruption may end these; all others end the process, stop it, or hold the GIL.
_INTERRUPTIBLE = frozenset([FaultKind.EXCEPTION, FaultKind.SLEEP, FaultKind.COLLECTIVE])


class Where(enum.Enum):
    """Points of a program where a fault can be put."""

    STEP = "step"
    """In the function, at the beginning of a step."""
    ATOMIC = "atomic"
    """In the function, inside ``call_wrapper.atomic()``."""
    INITIALIZE = "initialize"
    """In the ``initialize`` plug-in, before the function is entered; on spares too."""
    FINALIZE = "finalize"
    """In the ``finalize`` plug-in, after the function was left on a fault; on spares too."""


@dataclasses.dataclass(frozen=True)
class FaultSpec:
    """One fault and the place where it is to happen. A field that is None matches anything.

    Args:
        kind: what goes wrong.
        rank: the active rank in the iteration, as the function sees it. Spares have none.
        slot: the initial rank, which stays with a process for its life. Excludes ``rank``.
        iteration: the restart iteration, as the wrapper counts it.
        step: the step of the function; only with ``where`` ``STEP`` or ``ATOMIC``.
        where: the point in the program.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a number is negative, or two fields contradict each other.
    """

    kind: FaultKind
    rank: int | None = None
    slot: int | None = None
    iteration: int | None = None
    step: int | None = None
    where: Where = Where.STEP

    def __post_init__(self) -> None:
        if not isinstance(self.kind, FaultKind):
            raise TypeError(f"kind={self.kind!r} must be a FaultKind, one of {_known_names(FaultKind)}")
        if not isinstance(self.where, Where):
            raise TypeError(f"where={self.where!r} must be a Where, one of {_known_names(Where)}")
        for name in _NUMBERS:
            as_limit(name, getattr(self, name), 0)
        if self.rank is not None and self.slot is not None:
            raise ValueError(f"rank={self.rank} and slot={self.slot} exclude each other: give one of them")
        if self.step is not None and self.where not in (Where.STEP, Where.ATOMIC):
            raise ValueError(f"step={self.step} needs where=step or where=atomic, not {self.where.value}")

    @classmethod
    def parse(cls, text: str) -> "FaultSpec":
        """Reads one fault: a kind, then any number of ``field=value``, separated by colons.

        Args:
            text: for example ``sigkill:rank=0:step=20``.

        Raises:
            ValueError: the text is malformed; the message names the field, its value and what is allowed.
        """
        try:
            name_of_kind, *parts = text.strip().split(":")
            kind = _one_of(FaultKind, "kind", name_of_kind.strip().lower())
            fields: dict[str, Any] = {}
            for part in parts:
                name, equals, value = (piece.strip() for piece in part.partition("="))
                if not equals or name not in (*_NUMBERS, "where"):
                    names = ", ".join((*_NUMBERS, "where"))
                    raise ValueError(f"{part!r} is not field=value with a field of {names}")
                if name in fields:
                    raise ValueError(f"{name} is given twice")
                if name != "where" and not value.isdecimal():
                    raise ValueError(f"{name}={value!r} is not an integer of at least 0")
                fields[name] = _one_of(Where, name, value.lower()) if name == "where" else int(value)
            return cls(kind, **fields)
        except ValueError as error:
            raise ValueError(f"fault {text!r}: {error}") from None

    def __str__(self) -> str:
        """The text that `parse` reads."""
        numbers = [f"{n}={getattr(self, n)}" for n in _NUMBERS if getattr(self, n) is not None]
        where = [] if self.where is Where.STEP else [f"where={self.where.value}"]
        return ":".join([self.kind.value, *numbers, *where])

    def matches(self, where: Where, **place: int | None) -> bool:
        """Whether the fault belongs to a point, and ``rank``, ``slot``, ``iteration`` and ``step``."""
        return self.where is where and all(getattr(self, n) in (None, place[n]) for n in _NUMBERS)


_NUMBERS = ("rank", "slot", "iteration", "step")


def parse_faults(text: str) -> tuple[FaultSpec, ...]:
    """Reads several faults, separated by commas; none from an empty text.

    Raises:
        ValueError: one of them is malformed; see `FaultSpec.parse`.
    """
    return tuple(FaultSpec.parse(part) for part in text.split(",") if part.strip())


def random_faults(
    seed: int, kinds: Sequence[FaultKind], ranks: Sequence[int], steps: Sequence[int], count: int
) -> tuple[FaultSpec, ...]:
    """Chooses faults at random, always the same ones for a seed, each at a step of its own.

    Args:
        seed: of the choice.
        kinds: dealt like cards: each comes once before any comes again.
        ranks: active ranks to choose from.
        steps: steps to choose from.
        count: how many faults.

    Returns:
        The faults in the order of their steps.

    Raises:
        ValueError: there is nothing to choose from, or fewer steps than faults.
    """
    for name, choice in (("kinds", kinds), ("ranks", ranks)):
        if not choice:
            raise ValueError(f"{name}={choice!r} must not be empty")
    if not 0 <= count <= len(steps):
        raise ValueError(f"count={count} must lie in 0..{len(steps)}, the number of steps to choose from")
    choose = random.Random(seed)
    deck: list[FaultKind] = []
    faults = []
    for step in sorted(choose.sample(steps, count)):
        deck = deck or choose.sample(kinds, len(kinds))
        faults.append(FaultSpec(deck.pop(), rank=choose.choice(ranks), step=step))
    return tuple(faults)


class Injector:
    """Makes each of its faults happen at most once, at the first place that matches.

    Once per process, unless there is a ``fired_dir``; then once for all processes that share the folder,
    and all that come after them. A job needs the folder when a rank may meet the same step twice: after a
    restart other processes may hold the rank.

    Args:
        specs: the faults.
        fired_dir: folder for one empty file per fault that happened; made when needed. None: no folder.
    """

    def __init__(self, specs: Iterable[FaultSpec], fired_dir: str | os.PathLike[str] | None = None) -> None:
        self.specs = tuple(specs)
        self._fired_dir = None if fired_dir is None else Path(fired_dir)
        self._fired: set[int] = set()

    @classmethod
    def from_env(cls, fired_dir: str | os.PathLike[str] | None = None) -> "Injector":
        """Takes the faults from the environment variable ``FT_WRAPPER_FAULTS``; none when it is not set.

        Raises:
            ValueError: the variable is malformed.
        """
        try:
            return cls(parse_faults(os.environ.get(ENV, "")), fired_dir)
        except ValueError as error:
            raise ValueError(f"environment variable {ENV}: {error}") from None

    def check(
        self,
        where: Where | str,
        *,
        rank: int | None = None,
        slot: int | None = None,
        iteration: int | None = None,
        step: int | None = None,
    ) -> None:
        """Injects the fault that belongs here, if there is one that has not happened yet.

        Args:
            where: the point in the program, or its name.
            rank: active rank in this iteration; None on a spare.
            slot: initial rank.
            iteration: number of the restart iteration.
            step: step of the function.

        Raises:
            InjectedFault: that is the fault.
            ValueError: ``where`` is not the name of a point.
        """
        where = _one_of(Where, "where", where)
        place = {"rank": rank, "slot": slot, "iteration": iteration, "step": step}
        for index, spec in enumerate(self.specs):
            if spec.matches(where, **place) and self._begin(index, place):
                inject_fault(spec.kind)

    def _begin(self, index: int, place: dict[str, int | None]) -> bool:
        """Claims a fault; makes it happen at once, unless it is one that an interruption may end."""
        try:
            spec = self.specs[index]
        finally:  # an interruption between the claim and the fault would leave out the fault (seen 1 of 8)
            if claimed := self._claim(index):
                events.emit("inject", kind=spec.kind.value, where=spec.where.value, **place)
                if spec.kind not in _INTERRUPTIBLE:
                    inject_fault(spec.kind)
        return claimed and spec.kind in _INTERRUPTIBLE

    def _claim(self, index: int) -> bool:
        # Before the fault, not after it: most faults leave nothing that could record them.
        if index in self._fired:
            return False
        self._fired.add(index)
        if self._fired_dir is None:
            return True
        self._fired_dir.mkdir(parents=True, exist_ok=True)
        try:
            (self._fired_dir / f"{index}-{self.specs[index]}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class _Inject:
    """A plug-in that asks an injector with the rank, slot and iteration of the state, then hands that on."""

    where: Where

    def __init__(self, injector: Injector) -> None:
        self.injector = injector

    def __call__(self, state: FrozenState) -> FrozenState:
        self.injector.check(
            self.where, rank=state.active_rank, slot=state.initial_rank, iteration=state.iteration
        )
        return state


class InjectInitialize(_Inject, Initialize):
    """Plug-in for ``Wrapper(initialize=…)``: the point ``INITIALIZE``.

    Args:
        injector: asked with the rank, slot and iteration of the state.
    """

    where = Where.INITIALIZE


class InjectFinalize(_Inject, Finalize):
    """Plug-in for ``Wrapper(finalize=…)``: the point ``FINALIZE``.

    Args:
        injector: asked with the rank, slot and iteration of the state.
    """

    where = Where.FINALIZE


def inject_fault(kind: FaultKind, duration: float | None = None) -> None:
    """Injects a fault into the calling thread or its process, now.

    Returns only after a hang with a duration, after a SIGSTOP that was continued, or when the process
    handles or ignores SIGTERM.

    Args:
        kind: what goes wrong.
        duration: seconds that ``SLEEP``, ``GIL`` and ``COLLECTIVE`` last; None: forever. The others have
            none.

    Raises:
        InjectedFault: the kind is ``EXCEPTION``.
        RuntimeError: the kind is ``COLLECTIVE`` and its group was aborted, or the duration is over.
    """
    seconds = _FOREVER if duration is None else duration
    match kind:
        case FaultKind.EXCEPTION:
            raise InjectedFault("injected fault: exception")
        case FaultKind.EXIT:
            os._exit(1)
        case FaultKind.SIGKILL | FaultKind.SIGTERM | FaultKind.SIGSTOP:
            os.kill(os.getpid(), signal.Signals[kind.name])
        case FaultKind.SEGFAULT:
            _no_core_dump()
            ctypes.string_at(0)
        case FaultKind.ABORT:
            _no_core_dump()
            os.abort()
        case FaultKind.SLEEP:
            time.sleep(seconds)
        case FaultKind.GIL:
            _hold_gil(seconds)
        case FaultKind.COLLECTIVE:
            _wait_in_collective(seconds)
        case _:
            raise TypeError(f"kind={kind!r} must be a FaultKind, one of {_known_names(FaultKind)}")


def _hold_gil(seconds: float) -> None:
    # Locking a mutex twice blocks in C, and unlike sleep(3) a signal does not end it. PyDLL, unlike CDLL,
    # keeps the GIL during the call. Zeros are PTHREAD_MUTEX_INITIALIZER; 128 bytes hold any platform's. A
    # timespec is two longs.
    libc = ctypes.PyDLL(None)
    mutex = (ctypes.c_long * 16)()
    until = time.time() + seconds
    deadline = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(deadline))


def _wait_in_collective(seconds: float) -> None:
    # Imported here: the other faults need no torch.
    import torch
    import torch.distributed

    dist: Any = torch.distributed  # its type stubs lack half of what is used here
    store = dist.HashStore()
    timeout = datetime.timedelta(seconds=10)

    # The two connect to each other while they are made. Both stay alive here; only one of them calls.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timeout), range(2)))

    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=seconds)
    groups[0].allreduce([torch.zeros(1)], options).wait()


def _no_core_dump() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _one_of(kinds: type[E], name: str, value: Any) -> E:
    try:
        return kinds(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not one of {_known_names(kinds)}") from None


def _known_names(kinds: type[enum.Enum]) -> str:
    return ", ".join(kind.value for kind in kinds)
