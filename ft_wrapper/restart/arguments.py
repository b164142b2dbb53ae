"""All arguments of the wrapper: the plug-ins, the store and the files, beside the numbers of `Limits`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal

from ..abort import Abort, AbortProcesses, AbortTorchDistributed
from ..completion import Completion
from ..compose import Compose
from ..finalize import Finalize
from ..health_check import HealthCheck
from ..initialize import Initialize
from ..rank_assignment import ActivateAllRanks, MaxActiveWorldSize, RankAssignment, ShiftRanks
from ..settings import About, Limits, check_switch, said
from ..store import StoreMixin, TCPStore, without_secrets
from ..terminate import Terminate

_DEFAULT_ABORT: Abort = Compose(AbortProcesses(), AbortTorchDistributed())


def _check_plug_in(name: str, value: object, *, kind: type) -> object:
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{name}={value!r} must be None or a {kind.__module__}.{kind.__name__}: derive from it"
        )
    return value


def _check_factory(name: str, value: object) -> object:
    if not callable(value):
        raise TypeError(f"{name}={value!r} must be callable, ft_wrapper.store.TCPStore for instance")
    return value


def _check_kwargs(name: str, value: object) -> object:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r} must be None or a dict of arguments for store_factory")
    return value


def _check_path(name: str, value: object) -> object:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be None or a string")
    if value is not None and not pathlib.Path(value).is_absolute():
        raise ValueError(f"{name}={value!r} must be an absolute path; {{rank}} in it is filled in")
    return value


def _check_warm_up(name: str, value: object) -> object:
    if value is None or value is False:
        return value
    wrong = f"{name}={value!r} must be None, False or a function that needs no arguments"
    if not callable(value):
        raise TypeError(wrong)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # one that is built in
        return value
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(f"{wrong}: {error}") from None
    return value


def _plug_in(kind: type, doc: str, is_shared: bool = False) -> dict[str, About]:
    return said(About(functools.partial(_check_plug_in, kind=kind), doc, is_shared=is_shared))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Limits):
    """All that a wrapped call is told by its `Wrapper`."""

    store_factory: Callable[..., StoreMixin] = field(
        default=TCPStore,
        metadata=said(
            About(_check_factory, "makes the coordination store; ``ftrun``'s own store comes first.")
        ),
    )
    store_kwargs: Mapping[str, Any] | None = field(
        default=None,
        metadata=said(
            About(_check_kwargs, "its arguments, ``host_name``, ``port`` and ``timeout`` for the TCPStore.")
        ),
    )
    initialize: Initialize | None = field(
        default=None,
        metadata=_plug_in(Initialize, "run on each rank before the function, in every iteration."),
    )
    abort: Abort | None = field(
        default=_DEFAULT_ABORT,
        metadata=_plug_in(
            Abort,
            "run in the monitor thread to free the function's thread from collectives. By default torch's "
            "groups are aborted, then the function's child processes ended; `AbortTorchDistributed` alone "
            "does the first only.",
        ),
    )
    finalize: Finalize | None = field(
        default=None,
        metadata=_plug_in(Finalize, "run on each rank once it has left the function after a fault."),
    )
    health_check: HealthCheck | None = field(
        default=None,
        metadata=_plug_in(
            HealthCheck,
            "run before the function, where raising is a fault; and after ``finalize``, where raising ends "
            "this rank. A spare ends in both cases.",
        ),
    )
    completion: Completion | None = field(
        default=None, metadata=_plug_in(Completion, "run once all ranks have finished.")
    )
    terminate: Terminate | None = field(
        default=None, metadata=_plug_in(Terminate, "run when this rank leaves the job.")
    )
    rank_assignment: RankAssignment | None = field(
        default=None,
        metadata=_plug_in(
            RankAssignment,
            "who gets which rank, and who is active; all ranks, shifted, when None.",
            is_shared=True,
        ),
    )
    monitor_process_logfile: str | None = field(
        default=None,
        metadata=said(
            About(
                _check_path,
                "absolute path; ``{rank}`` is filled in. With this or the next one the rank has a monitor "
                "process of its own, also where its agent would run the monitor.",
            )
        ),
    )
    monitor_process_pidfile: str | None = field(
        default=None, metadata=said(About(_check_path, "absolute path; ``{rank}`` is filled in."))
    )
    enabled: bool = field(
        default=True, metadata=said(About(check_switch, "False leaves the function as it is."))
    )
    collect_garbage: bool = field(
        default=True,
        metadata=said(
            About(
                check_switch,
                "run Python's garbage collector between iterations, while this rank waits for the others, so "
                "that old models in reference cycles are freed before new ones are made. At the first call "
                "and the first restart what is left is frozen (``gc.freeze``), which makes it cheap.",
            )
        ),
    )
    warm_up: Callable[[], object] | Literal[False] | None = field(
        default=None,
        metadata=said(
            About(
                _check_warm_up,
                "run without arguments on each spare while it waits, once in a process: what would make its "
                "first step slow (caches, kernels, files). No collectives, for no other rank takes part. "
                "Before it, and also when None, a spare does what torch leaves to the first step. It is "
                "interrupted, and begun again with the next wait, when the spare is needed; what it raises "
                "is logged, and the spare waits all the same. False: nothing is warmed.",
            )
        ),
    )

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on all ranks, as JSON has it."""
        return {**super().shared, "rank_assignment": _outline(self.rank_assignment)}


def check_together(settings: Settings) -> None:
    """Checks what a user passed as a whole.

    Raises:
        TypeError: ``store_kwargs`` do not fit ``store_factory``.
        ValueError: who is active is said in two ways.
    """
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
        shown, factory = without_secrets(settings.store_kwargs), settings.store_factory
        raise TypeError(f"store_kwargs={shown!r} do not fit store_factory={factory!r}: {error}") from None


def default_assignment(active_world_size: int | None) -> RankAssignment:
    """The ranks move up, and all or the first ones are active."""
    active = ActivateAllRanks() if active_world_size is None else MaxActiveWorldSize(active_world_size)
    made: RankAssignment = Compose(active, ShiftRanks())
    return made


def _outline(plug_in: object) -> str:
    """The classes that a plug-in is made of."""
    if isinstance(plug_in, Compose):
        return f"Compose({', '.join(map(_outline, plug_in.parts))})"
    return type(plug_in).__name__
