"""Wrapper: the decorator and its configuration."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pathlib
import types
import typing
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch

from .abort import Abort, AbortProcesses, AbortTorchDistributed
from .call import Call
from .call_wrapper import CallWrapper
from .completion import Completion
from .compose import Compose
from .finalize import Finalize
from .health_check import HealthCheck
from .initialize import Initialize
from .job import formation_size
from .monitor.death import is_replaced
from .monitor.settings import MonitorSettings
from .rank_assignment import ActivateAllRanks, MaxActiveWorldSize, RankAssignment, ShiftRanks
from .state import State
from .store import StoreMixin, TCPStore, plan_store, without_secrets
from .terminate import Terminate
from .tracebacks import drop_own_frames

log = logging.getLogger(__name__)

ACTIVE_ENV = "FT_WRAPPER_ACTIVE_WORLD_SIZE"

F = TypeVar("F", bound=Callable[..., Any])
Duration = timedelta | float
_PARAMETER = "call_wrapper"
_DEFAULT_ABORT: Abort = Compose(AbortProcesses(), AbortTorchDistributed())
ON_JOIN = ("next", "degraded", "now")

_DURATIONS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "soft_timeout",
    "hard_timeout",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "termination_grace_time",
)
# Those that one rank keeps on behalf of others.
_SHARED_DURATIONS = (
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "join_window",
    "rejoin_wait",
)
_DURATIONS_FROM_ZERO = ("last_call_wait", "join_window", "rejoin_wait")
# Each must be shorter than the one behind it.
_SHORTER_THAN = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)


class Wrapper:
    """Keeps a distributed training function going through faults, in the processes that survive them.

    Used as a decorator (bare, with ``()`` or with arguments) or called on a function. On any fault all
    surviving ranks leave the function, abort their process groups, agree who is left, take their new ranks
    and enter it again. Durations are ``timedelta`` or seconds.

    Args:
        store_factory: makes the coordination store; ``ftrun``'s own store comes first.
        store_kwargs: its arguments, ``host_name``, ``port`` and ``timeout`` for the TCPStore.
        initialize: run on each rank before the function, in every iteration.
        abort: run in the monitor thread to free the function's thread from collectives. By default torch's
            groups are aborted, then the function's child processes ended; `AbortTorchDistributed` alone does
            the first only.
        finalize: run on each rank once it has left the function after a fault.
        health_check: run before the function, where raising is a fault; and after ``finalize``, where raising
            ends this rank. A spare ends in both cases.
        completion: run once all ranks have finished.
        terminate: run when this rank leaves the job.
        rank_assignment: who gets which rank, and who is active; all ranks, shifted, when None.
        monitor_thread_interval: how late the monitor thread notices a missed event at the most.
        monitor_process_interval: how late the monitor does, in whatever process.
        heartbeat_interval: between two requests of a heart, which beats and looks at others in turn.
        progress_watchdog_interval: between two automatic time stamps of progress.
        soft_timeout: no progress for so long restarts all ranks.
        hard_timeout: no progress for so long ends the process.
        heartbeat_timeout: no heartbeat for so long, and a rank counts as lost.
        barrier_timeout: how long a restart waits for ranks that live but do not come. Between two wrapped
            calls they are waited for as long as they live; the log says so this often.
        completion_timeout: how long a rank that has finished waits for the others before it restarts them;
            once in a call.
        last_call_wait: how long to gather further faults before aborting.
        termination_grace_time: from SIGTERM to SIGKILL.
        monitor_process_logfile: absolute path; ``{rank}`` is filled in. With this or the next one the rank
            has a monitor process of its own, also where its agent would run the monitor.
        monitor_process_pidfile: absolute path; ``{rank}`` is filled in.
        enabled: False leaves the function as it is.
        use_global_iteration: iteration numbers are unique for the whole life of the store.
        active_world_size: so many ranks are active, the rest are hot spares; short for a rank assignment.
            When None, and without a ``rank_assignment``: what ``ftrun --active-world-size`` or
            ``--spare-nodes`` says, or fewer while there are not so many ranks.
        min_world_size: with fewer ranks than this the call fails rather than going on.
        on_join: what a process causes that joins the running job (which needs ``use_global_iteration``): it
            waits for the ``next`` restart; or it ends the iteration if fewer ranks are active than there were
            (``degraded``), or in any case (``now``).
        join_window: how long joins are gathered before that; longer in a crash loop.
        rejoin_wait: how long a restart waits for an announced replacement.
        max_same_faults: the same fault so many times in a row ends the job with that error: what raises
            the same type at the same line of your code, and without progress before, which is a ``ping()``,
            or a minute in the function. From the second time on the ranks wait before they enter it again:
            0.5 s, and twice as long each time, at most 10 s. None: it is never ended, nor slowed down.
        collect_garbage: run Python's garbage collector between iterations, while this rank waits for the
            others, so that old models in reference cycles are freed before new ones are made. At the first
            call and the first restart what is left is frozen (``gc.freeze``), which makes it cheap.
        warm_up: run without arguments on each spare while it waits, once in a process: what would make its
            first step slow (caches, kernels, files). No collectives, for no other rank takes part. Before it,
            and also when None, a spare does what torch leaves to the first step. It is interrupted, and begun
            again with the next wait, when the spare is needed; what it raises is logged, and the spare waits
            all the same. False: nothing is warmed.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: arguments contradict each other.
    """

    @typing.overload
    def __new__(cls, function: F, /) -> F: ...  # type: ignore[misc]
    @typing.overload
    def __new__(cls, **settings: Any) -> Wrapper: ...
    def __new__(cls, *functions: Any, **settings: Any) -> Any:
        """Makes the bare decorator ``@Wrapper`` work: with a function, wraps it with the defaults."""
        if not functions:
            return super().__new__(cls)
        if len(functions) > 1 or settings or not callable(functions[0]):
            raise TypeError(
                f"Wrapper takes keyword arguments only, not {functions!r}: use @Wrapper, @Wrapper(...), or "
                "Wrapper(...)(function)"
            )
        return cls()(functions[0])

    def __init__(
        self,
        *,
        store_factory: Callable[..., StoreMixin] = TCPStore,
        store_kwargs: Mapping[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = _DEFAULT_ABORT,
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
        rank_assignment: RankAssignment | None = None,
        monitor_thread_interval: Duration = timedelta(seconds=1),
        monitor_process_interval: Duration = timedelta(seconds=1),
        heartbeat_interval: Duration = timedelta(seconds=1),
        progress_watchdog_interval: Duration = timedelta(seconds=1),
        soft_timeout: Duration = timedelta(seconds=60),
        hard_timeout: Duration = timedelta(seconds=90),
        heartbeat_timeout: Duration = timedelta(seconds=30),
        barrier_timeout: Duration = timedelta(seconds=120),
        completion_timeout: Duration = timedelta(seconds=120),
        last_call_wait: Duration = timedelta(seconds=0),
        termination_grace_time: Duration = timedelta(seconds=5),
        monitor_process_logfile: str | None = None,
        monitor_process_pidfile: str | None = None,
        enabled: bool = True,
        use_global_iteration: bool = False,
        active_world_size: int | None = None,
        min_world_size: int = 1,
        on_join: str = "degraded",
        join_window: Duration = timedelta(seconds=1),
        rejoin_wait: Duration = timedelta(seconds=2),
        max_same_faults: int | None = 5,
        collect_garbage: bool = True,
        warm_up: Callable[[], object] | Literal[False] | None = None,
    ) -> None:
        given = dict(locals())
        durations = {
            name: _duration(name, given[name], allow_zero=name in _DURATIONS_FROM_ZERO)
            for name in _DURATIONS + _DURATIONS_FROM_ZERO
        }
        for shorter, longer in _SHORTER_THAN:
            if not durations[shorter] < durations[longer]:
                raise ValueError(
                    f"{shorter}={durations[shorter]} must be shorter than {longer}={durations[longer]}"
                )
        for name, kind in (
            ("initialize", Initialize),
            ("abort", Abort),
            ("finalize", Finalize),
            ("health_check", HealthCheck),
            ("completion", Completion),
            ("terminate", Terminate),
            ("rank_assignment", RankAssignment),
        ):
            if given[name] is not None and not isinstance(given[name], kind):
                raise TypeError(
                    f"{name}={given[name]!r} must be None or a {kind.__module__}.{kind.__name__}: "
                    "derive from it"
                )
        _check_store(store_factory, store_kwargs)
        for name in ("monitor_process_logfile", "monitor_process_pidfile"):
            _check_path(name, given[name])
        for name in ("enabled", "use_global_iteration", "collect_garbage"):
            if not isinstance(given[name], bool):
                raise TypeError(f"{name}={given[name]!r} must be True or False")
        _check_warm_up(warm_up)
        _check_count("min_world_size", min_world_size)
        if max_same_faults is not None:
            _check_count("max_same_faults", max_same_faults)
        if active_world_size is not None:
            _check_count("active_world_size", active_world_size)
            if rank_assignment is not None:
                raise ValueError(
                    f"active_world_size={active_world_size} and rank_assignment={rank_assignment!r} exclude "
                    "each other: put MaxActiveWorldSize into the rank_assignment"
                )
        if not isinstance(on_join, str):
            raise TypeError(f"on_join={on_join!r} must be a string, one of {', '.join(map(repr, ON_JOIN))}")
        if on_join not in ON_JOIN:
            raise ValueError(f"on_join={on_join!r} must be one of {', '.join(map(repr, ON_JOIN))}")
        if not torch.distributed.is_available():
            raise RuntimeError("torch was built without torch.distributed; install a build that has it")

        self.store_factory = store_factory
        self.store_kwargs = store_kwargs
        self.initialize = initialize
        self.abort = abort
        self.finalize = finalize
        self.health_check = health_check
        self.completion = completion
        self.terminate = terminate
        self._launched_active = None
        if active_world_size is None and rank_assignment is None:
            self._launched_active = _launched_active_world_size()
        self.rank_assignment = rank_assignment or _default_assignment(
            active_world_size or self._launched_active
        )
        self.monitor_thread_interval = durations["monitor_thread_interval"]
        self.monitor_process_interval = durations["monitor_process_interval"]
        self.heartbeat_interval = durations["heartbeat_interval"]
        self.progress_watchdog_interval = durations["progress_watchdog_interval"]
        self.soft_timeout = durations["soft_timeout"]
        self.hard_timeout = durations["hard_timeout"]
        self.heartbeat_timeout = durations["heartbeat_timeout"]
        self.barrier_timeout = durations["barrier_timeout"]
        self.completion_timeout = durations["completion_timeout"]
        self.last_call_wait = durations["last_call_wait"]
        self.termination_grace_time = durations["termination_grace_time"]
        self.monitor_process_logfile = monitor_process_logfile
        self.monitor_process_pidfile = monitor_process_pidfile
        self.enabled = enabled
        self.use_global_iteration = use_global_iteration
        self.active_world_size = active_world_size
        self.min_world_size = min_world_size
        self.on_join = on_join
        self.join_window = durations["join_window"]
        self.rejoin_wait = durations["rejoin_wait"]
        self.max_same_faults = max_same_faults
        self.collect_garbage = collect_garbage
        self.warm_up = warm_up

    def __call__(self, function: F) -> F:
        """Wraps a function.

        Raises:
            TypeError: it is a class, a coroutine function or a generator function, or has more than one
                argument annotated with `CallWrapper`.
        """
        if not callable(function):
            raise TypeError(f"Wrapper wraps a function, not {function!r}")
        _check_function(function)
        if not self.enabled:
            return function
        parameter = _call_wrapper_parameter(function)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            state = self._check_environment()
            plan = plan_store(self.store_factory, self.store_kwargs, self.barrier_timeout)
            name = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
            call = Call(self, plan, state, name)
            call.open()
            error: BaseException | None = None
            try:
                return call.run(_filled_in(function, parameter, call.user, args, kwargs))
            except BaseException as caught:
                error = caught
                drop_own_frames(caught)
                raise
            finally:
                call.close(error)
                del error, call

        return cast(F, wrapped)

    def monitor_settings(self) -> MonitorSettings:
        """What a rank's monitor has to know."""
        return MonitorSettings(
            soft_timeout=self.soft_timeout.total_seconds(),
            hard_timeout=self.hard_timeout.total_seconds(),
            termination_grace_time=self.termination_grace_time.total_seconds(),
            interval=self.monitor_process_interval.total_seconds(),
            watchdog_interval=self.progress_watchdog_interval.total_seconds(),
            heartbeat_interval=self.heartbeat_interval.total_seconds(),
            heartbeat_timeout=self.heartbeat_timeout.total_seconds(),
            barrier_timeout=self.barrier_timeout.total_seconds(),
            join_window=self.join_window.total_seconds(),
            replaced=self.use_global_iteration and is_replaced(),
        )

    def shared_settings(self) -> dict[str, object]:
        """The settings that must be the same on all ranks, as they are compared."""
        return {
            "use_global_iteration": self.use_global_iteration,
            "active_world_size": self.active_world_size or self._launched_active,
            "min_world_size": self.min_world_size,
            "max_same_faults": self.max_same_faults,
            "on_join": self.on_join,
            "rank_assignment": _outline(self.rank_assignment),
            **{name: getattr(self, name).total_seconds() for name in _SHARED_DURATIONS},
        }

    def _check_environment(self) -> State:
        """Everything that must hold before a call starts anything."""
        state = State.from_env()
        formation_size(state.world_size)
        state.use_global_iteration = self.use_global_iteration
        for name, value in (
            ("active_world_size", self.active_world_size),
            ("min_world_size", self.min_world_size),
        ):
            if value is not None and value > state.world_size:
                raise ValueError(
                    f"{name}={value} is more than WORLD_SIZE={state.world_size}; start more ranks or lower it"
                )
        self._say_who_wins(state)
        if torch.distributed.is_initialized():
            raise ValueError(
                "a process group is already initialized; call torch.distributed.destroy_process_group() "
                "before the wrapped function, and init_process_group() inside it"
            )
        return state

    def _say_who_wins(self, state: State) -> None:
        """What the code says goes before what ``ftrun`` was told; one rank says so, if that differs."""
        launched = _launched_active_world_size()
        if state.rank != 0 or launched in (None, self.active_world_size, self._launched_active):
            return
        what = (
            "a rank_assignment"
            if self.active_world_size is None
            else f"active_world_size={self.active_world_size}"
        )
        log.warning(
            "%s=%d, as ftrun was told, does not count: the wrapper has %s", ACTIVE_ENV, launched, what
        )


def _launched_active_world_size() -> int | None:
    """How many ranks are to be active as far as ``ftrun`` knows.

    Raises:
        ValueError: the variable is no number of at least 1.
    """
    text = os.environ.get(ACTIVE_ENV)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"environment variable {ACTIVE_ENV}={text!r} must be an integer of at least 1; ftrun sets it by "
            "--active-world-size and --spare-nodes; remove it otherwise"
        )
    return int(text)


def _default_assignment(active_world_size: int | None) -> RankAssignment:
    active = ActivateAllRanks() if active_world_size is None else MaxActiveWorldSize(active_world_size)
    return cast(RankAssignment, Compose(active, ShiftRanks()))


def _outline(plug_in: object) -> str:
    """The classes that a plug-in is made of."""
    if isinstance(plug_in, Compose):
        return f"Compose({', '.join(map(_outline, plug_in.parts))})"
    return type(plug_in).__name__


def _duration(name: str, value: object, *, allow_zero: bool) -> timedelta:
    if isinstance(value, bool) or not isinstance(value, (timedelta, int, float)):
        raise TypeError(f"{name}={value!r} must be a datetime.timedelta or a number of seconds")
    if isinstance(value, (int, float)) and not abs(value) < timedelta.max.total_seconds():
        raise ValueError(f"{name}={value!r} must be a finite number of seconds")
    duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    if duration < timedelta(0) or (duration == timedelta(0) and not allow_zero):
        raise ValueError(f"{name}={value!r} must be {'at least' if allow_zero else 'more than'} 0 seconds")
    return duration


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def _check_path(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be None or a string")
    if not pathlib.Path(value).is_absolute():
        raise ValueError(f"{name}={value!r} must be an absolute path; {{rank}} in it is filled in")


def _check_warm_up(function: object) -> None:
    if function is None or function is False:
        return
    wrong = f"warm_up={function!r} must be None, False or a function that needs no arguments"
    if not callable(function):
        raise TypeError(wrong)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one that is built in
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(f"{wrong}: {error}") from None


def _check_store(factory: object, kwargs: object) -> None:
    if not callable(factory):
        raise TypeError(f"store_factory={factory!r} must be callable, ft_wrapper.store.TCPStore for instance")
    if kwargs is None:
        return
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"store_kwargs={kwargs!r} must be None or a dict of arguments for store_factory")
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        shown = without_secrets(kwargs)
        raise TypeError(f"store_kwargs={shown!r} do not fit store_factory={factory!r}: {error}") from None


def _check_function(function: Callable[..., Any]) -> None:
    if inspect.isclass(function):
        raise TypeError(
            f"{function!r} is a class: a call would make an object and return; wrap the function or the "
            "method that trains"
        )
    for is_kind, kind in (
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
        (inspect.isgeneratorfunction, "a generator function"),
    ):
        if is_kind(function):
            raise TypeError(
                f"{function!r} is {kind}: calling it runs nothing yet, so nothing could be restarted; wrap a "
                "plain function that runs it to its end"
            )


def _call_wrapper_parameter(function: Callable[..., Any]) -> str | None:
    """Name of the argument for the `CallWrapper`.

    The one annotated with ``CallWrapper`` or ``Optional[CallWrapper]``; without any, one that has no
    annotation and is called ``call_wrapper``.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    found = [
        name
        for name, parameter in signature.parameters.items()
        if _means_call_wrapper(parameter.annotation, function)
    ]
    if len(found) > 1:
        raise TypeError(
            f"{function!r} has {len(found)} arguments annotated with CallWrapper ({', '.join(found)}); it "
            "may have one"
        )
    if found:
        return found[0]
    by_name = signature.parameters.get(_PARAMETER)
    if by_name is None or by_name.annotation is not inspect.Parameter.empty:
        return None
    return None if by_name.kind in (by_name.VAR_POSITIONAL, by_name.VAR_KEYWORD) else _PARAMETER


def _means_call_wrapper(annotation: object, function: Callable[..., Any]) -> bool:
    if isinstance(annotation, str):
        text, names = annotation, getattr(inspect.unwrap(function), "__globals__", {})
        try:
            annotation = eval(text, dict(names))
        except Exception:
            # A name that exists for type checkers only.
            parts = text.replace("Optional[", "").rstrip("]").split("|")
            return any(part.strip().rpartition(".")[2] == CallWrapper.__name__ for part in parts)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return CallWrapper in typing.get_args(annotation)
    return annotation is CallWrapper


def _filled_in(
    function: Callable[..., Any],
    parameter: str | None,
    user: CallWrapper,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[], Any]:
    """The function with its arguments, the same at every restart, and the `CallWrapper` filled in."""
    if parameter is None:
        return functools.partial(function, *args, **kwargs)
    signature = inspect.signature(function)
    bound = signature.bind_partial(*args, **kwargs)
    if not isinstance(bound.arguments.get(parameter), (CallWrapper, types.NoneType)):
        # What landed there is the next argument: the caller left this one out.
        others = [p for name, p in signature.parameters.items() if name != parameter]
        bound = signature.replace(parameters=others).bind(*args, **kwargs)
    arguments = {**bound.arguments, parameter: user}
    ordered = {name: arguments[name] for name in signature.parameters if name in arguments}
    filled = inspect.BoundArguments(signature, ordered)
    return functools.partial(function, *filled.args, **filled.kwargs)
