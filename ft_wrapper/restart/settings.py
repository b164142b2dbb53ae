"""The settings of one wrapped call: the plug-ins, the store and the files, beside the `AllLimits`."""

import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

from ..abort import Abort, AbortProcesses, AbortTorchDistributed
from ..completion import Completion
from ..compose import Compose, StatePlugIn, check_arguments, check_plug_in
from ..finalize import Finalize
from ..health_check import HealthCheck
from ..initialize import Initialize
from ..rank_assignment import ActivateAllRanks, MaxActiveWorldSize, RankAssignment, RankPlugIn, ShiftRanks
from ..settings import AllLimits, about, argument, as_switch, settings
from ..store import StoreMixin, TCPStore, without_password
from ..terminate import Terminate
from .report import RestartReport


def _check_factory(name: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"{name}={value!r} must be callable, ft_wrapper.store.TCPStore for instance")
    return value


def _check_kind(name: str, value: Any, kind: type, words: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be None or {words}")
    return value


def _check_path(name: str, value: Any) -> str | None:
    path: str | None = _check_kind(name, value, str, "a string")
    if path is not None and not pathlib.Path(path).is_absolute():
        raise ValueError(f"{name}={value!r} must be an absolute path; {{rank}} in it is filled in")
    return path


def _check_function(name: str, value: Any, words: str, *arguments: object) -> Any:
    """Checks what is to be called with some arguments, or is None."""
    if value is not None:
        wrong = f"{name}={value!r} must be None{words}"
        if not callable(value):
            raise TypeError(wrong)
        check_arguments(wrong, value, *arguments)
    return value


def _check_warm_up(name: str, value: Any) -> Any:
    words = ", False or a function that needs no arguments"
    return value if value is False else _check_function(name, value, words)


def _check_on_restart(name: str, value: Any) -> Any:
    return _check_function(name, value, " or a function of one argument, the RestartReport", None)


def _plug_in(kind: type, default: object = None, *, is_shared: bool = False) -> Any:
    return argument(default, functools.partial(check_plug_in, kind=kind), is_shared=is_shared)


_mapping = functools.partial(_check_kind, kind=Mapping, words="a dict of arguments for store_factory")


@settings
class Settings(AllLimits):
    """All that a wrapped call is told by its `Wrapper`.

    Args:
        store_factory: makes the coordination store; ``ftrun``'s own store comes first.
        store_kwargs: its arguments, ``host_name``, ``port`` and ``timeout`` for the TCPStore.
        initialize: run on each rank before the function, in every iteration.
        abort: run in another thread to free the function's thread from collectives. By default it
            aborts torch's groups, then ends the function's child processes; `AbortTorchDistributed` does only
            the first.
        finalize: run on each rank once it has left the function after a fault.
        health_check: run before the function, where raising is a fault; and after ``finalize``, where raising
            ends this rank. A spare ends in both cases.
        completion: run once all ranks have finished.
        terminate: run when this rank leaves the job.
        rank_assignment: who gets which rank, and who is active; all ranks, shifted, when None.
        monitor_process_logfile: absolute path; ``{rank}`` is filled in. With this or the next one the rank
            has its own monitor process, even if its agent would run the monitor.
        monitor_process_pidfile: absolute path; ``{rank}`` is filled in.
        enabled: False calls the function once, with a `CallWrapper` that watches and restarts nothing.
        collect_garbage: run Python's garbage collector between iterations, while this rank waits for the
            others, so that old models in reference cycles are freed before new ones are made. At the first
            call and the first restart what is left is frozen (``gc.freeze``), which makes it cheap.
        keep_groups: ``call_wrapper.process_group()`` makes one default group, which survives restarts and
            gets its new peers, with torch >= 2.15 and a backend that can. Otherwise each iteration makes a
            new one.
        warm_up: run without arguments on each spare while it waits, once in a process: for work that would
            slow down its first step (caches, kernels, files). No collectives, because no other rank takes
            part. Before it, and also when None, a spare does what torch leaves to the first step. If the
            spare is needed, it is interrupted, and starts again at the next wait; what it raises is logged,
            and the spare keeps waiting. False: no warming up.
        on_restart: called with a `RestartReport` on every rank, spares too, in each iteration but the call's
            first, before the function is entered, and once all active ranks have arrived. An ``Exception``
            that it raises is logged; a fault interrupts it as it interrupts the function; a hang in it counts
            as a hang in the function.
    """

    store_factory: Callable[..., StoreMixin] = argument(TCPStore, _check_factory)
    store_kwargs: Mapping[str, Any] | None = argument(None, _mapping)
    initialize: StatePlugIn | None = _plug_in(Initialize)
    abort: StatePlugIn | None = _plug_in(Abort, Compose(AbortProcesses(), AbortTorchDistributed()))
    finalize: StatePlugIn | None = _plug_in(Finalize)
    health_check: StatePlugIn | None = _plug_in(HealthCheck)
    completion: StatePlugIn | None = _plug_in(Completion)
    terminate: StatePlugIn | None = _plug_in(Terminate)
    rank_assignment: RankPlugIn | None = _plug_in(RankAssignment, is_shared=True)
    monitor_process_logfile: str | None = argument(None, _check_path)
    monitor_process_pidfile: str | None = argument(None, _check_path)
    enabled: bool = argument(True, as_switch)
    collect_garbage: bool = argument(True, as_switch)
    keep_groups: bool = argument(False, as_switch, is_shared=True)
    warm_up: Callable[[], object] | Literal[False] | None = argument(None, _check_warm_up)
    on_restart: Callable[[RestartReport], object] | None = argument(None, _check_on_restart)

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on all ranks, as JSON has it."""
        return {**super().shared, "rank_assignment": _outline(self.rank_assignment)}


def check_together(settings: Settings) -> None:
    """Checks what a user passed as a whole.

    Raises:
        TypeError: ``store_kwargs`` do not fit ``store_factory``.
        ValueError: durations contradict each other, or who is active is said in two ways.
    """
    for name, known in about(Settings).items():
        for longer in known.shorter_than:
            if not getattr(settings, name) < getattr(settings, longer):
                durations = [timedelta(seconds=getattr(settings, one)) for one in (name, longer)]
                raise ValueError(f"{name}={durations[0]} must be shorter than {longer}={durations[1]}")
    if settings.active_world_size is not None and settings.rank_assignment is not None:
        raise ValueError(
            f"active_world_size={settings.active_world_size} and "
            f"rank_assignment={settings.rank_assignment!r} exclude each other: put MaxActiveWorldSize into "
            "the rank_assignment"
        )
    if settings.store_kwargs is None:
        return
    try:
        inspect.signature(settings.store_factory).bind(**settings.store_kwargs)
    except TypeError as error:
        shown, factory = without_password(settings.store_kwargs), settings.store_factory
        raise TypeError(f"store_kwargs={shown!r} do not fit store_factory={factory!r}: {error}") from None


def default_assignment(active_world_size: int | None) -> RankAssignment:
    """The ranks move up, and all or the first ones are active."""
    active = ActivateAllRanks() if active_world_size is None else MaxActiveWorldSize(active_world_size)
    made: RankAssignment = Compose(active, ShiftRanks())
    return made


def _outline(plug_in: Any) -> str:
    """The classes and functions that a plug-in is made of."""
    if isinstance(plug_in, Compose):
        return f"Compose({', '.join(map(_outline, plug_in.parts))})"
    return name_of(plug_in).rpartition(".")[2]


def name_of(function: Callable[..., Any]) -> str:
    """What the terms of a job call a function: without an address, which differs from rank to rank."""
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
