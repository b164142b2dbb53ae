"""Wrapper: the decorator and its configuration; `CallWrapper`: the wrapped function's view of its call."""

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from . import check
from .attribution import InterruptionRecord, by_blame
from .check import WATCHDOG
from .compose import known_signature
from .exception import RestartAbort
from .monitor import identity
from .monitor.frames import drop_own_frames
from .protocol.notice import Notice
from .protocol.records import Member
from .restart.call import Call
from .restart.settings import Limits, Settings, check_together, default_assignment, name_of
from .settings import AUTO, about
from .state import FrozenState, Mode, State, formation_size, launched_active_world_size
from .store import PrefixStore
from .store.base import HoldingStore
from .store.plan import plan_store
from .store.secret import AGENT_ENV
from .torch_groups.device import own_device

log = logging.getLogger(__name__)
c10d: Any = torch.distributed

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
_PARAMETER = "call_wrapper"
_CHECKS_PATIENCE = 1.0  # seconds that the end of a call waits for a lookup


def _taking(settings: Callable[P, Settings]) -> Callable[[Any], Callable[Concatenate[Any, P], "Wrapper"]]:
    """Shows type checkers and editors that a function takes the arguments of the settings."""
    return lambda function: function


class CallWrapper:
    """Handed to the wrapped function through the argument annotated with this class."""

    def __init__(self, call: Call) -> None:
        self._call, self.services = call, call.services  # these for live states and checkpoints alone
        memory, emit = call.own.memory, _weakly(call.own.member.emit)  # a ping may outlive the call
        look = _weakly(call.services.notices.look)
        ping, step = memory.make_ping(lambda: emit("step", **memory.last_step()), look)
        # They replace the methods, which would add the time of a call.
        vars(self).update(ping=ping, step=step)

    def ping(self, step: int | None = None) -> None:
        """Reports progress: ``call_wrapper.ping(step)`` when a step begins, ``ping()`` in between.

        From the first call in an iteration on, the function must keep calling it: if a rank does not for
        ``soft_timeout``, all ranks restart; if it does not for ``hard_timeout``, its process is terminated.
        Takes 0.1 to 0.2 µs: it only writes a time stamp.

        Args:
            step: the number of the step that begins, on all active ranks. With it ``ftrun report``
                distinguishes repeated steps from new ones, and loading from training. Numbers increase by
                one, starting from the loaded state. The same number twice in a row is one step; a lower one
                means that the function has gone back. One line is written to disk in each iteration, when
                the steps begin.

        Raises:
            TypeError: the step is not an integer of at least 0.
            RankDrained: this rank was asked to leave.
        """

    def step(self, n: int) -> None:
        """Reports that a step begins, as ``ping(n)`` does, but without counting as progress.

        The name is from nvidia-resiliency-ext. Use ``ping(n)``.
        """

    @property
    def rank(self) -> int:
        """This rank among the active ones, for ``init_process_group(rank=)``; -1 on a spare."""
        active = self.state.active_rank
        return -1 if active is None else active

    @property
    def world_size(self) -> int:
        """The number of active ranks, for ``init_process_group(world_size=)``."""
        return self.state.active_world_size or 0

    @property
    def is_spare(self) -> bool:
        """Whether this rank waits as a hot spare, so that it does not run the function in this iteration."""
        return self.state.mode is Mode.INACTIVE

    @property
    def iteration(self) -> int:
        """Number of the restart iteration; with ``rejoin`` unique over the store's lifetime."""
        return self._call.state.iteration

    @property
    def state(self) -> FrozenState:
        """This rank's state, read-only."""
        return self._call.state.freeze()

    @property
    def device(self) -> torch.device:
        """This rank's GPU: the one that ``LOCAL_RANK`` names, if the process sees it; ``cpu`` without CUDA.

        On a node with more ranks than GPUs, a promoted spare gets a GPU that no active rank of the node has.
        Read it in the function, in each iteration.
        """
        return own_device()

    @property
    def store(self) -> PrefixStore:
        """A store for this iteration only; can be passed to ``init_process_group`` as ``store=``."""
        return self._call.user_store()

    def process_group(self, backend: str = "gloo", **options: Any) -> Any:
        """Makes the default process group of the active ranks, in place of ``init_process_group``.

        Experimental: with ``Limits(keep_groups=True)`` a process makes it once. In later iterations the same
        object, and everything built on it, gets the new peers. Make other groups and meshes again in each
        iteration.

        Args:
            backend: as for ``init_process_group``.
            options: its other arguments, except those that the wrapper sets.

        Returns:
            The group.

        Raises:
            TypeError: the wrapper sets this option itself, or a kept group was made with different ones.
        """
        n, rank, size = self._call.own.member.view.n, self.rank, self.world_size
        return self.services.group.enter(backend, options, n=n, rank=rank, size=size, store=self.store)

    @property
    def faults(self) -> tuple[InterruptionRecord, ...]:
        """What ended the previous iteration, the likeliest cause first; empty in the first one."""
        member = self._call.own.member
        view = member.view
        if view.is_first:
            return ()
        records = member.agreement.ends.faults_of(view.n - 1)
        return tuple(dict.fromkeys(by_blame(fault.record for fault in records)))

    @property
    def notice(self) -> Notice | None:
        """That there may not be much time left: save a checkpoint. None as long as there is no notice.

        All active ranks see a notice at the same step, if they report steps: from ``ping(step)`` to the next
        one it is the same on all. With a `LiveState` they see it behind a ``commit``. A function that reports
        no steps sees it at once, each rank at a moment of its own. After a restart it is seen again.

        ``str(notice)`` says where it comes from, why, and how many seconds are left; the last is
        ``notice.seconds``, None if it is not known. A later notice has another ``notice.id``. If
        ``notice.ends``, all ranks leave when the next step begins.
        """
        return self.services.notices.current

    def atomic(self) -> contextlib.AbstractContextManager[Any]:
        """A block that no restart interrupts; may be nested.

        If the iteration ends during the block, the function is interrupted at the end of the block, and its
        process groups are aborted only then. Keep it short and without collectives: the other ranks wait.

        Raises:
            RankShouldRestart: on entry, if the iteration has ended; at the end, if it ended during the block.
        """
        return self._call.own.interrupter.atomic()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """A block without ``soft_timeout`` and ``hard_timeout``, for work that may take long."""
        memory = self._call.own.memory
        memory.hang_protection_disabled += 1
        try:
            yield
        finally:
            self._call.note_progress()
            memory.enter_phase(memory.phase)
            memory.hang_protection_disabled -= 1


class Unwrapped(CallWrapper):
    """What the function gets with ``enabled=False``: nothing is watched or restarted."""

    iteration, faults, notice = 0, (), None

    def __init__(self) -> None:
        own = State.from_env()
        own.active_rank, own.active_world_size, own.mode = own.rank, own.world_size, Mode.ACTIVE
        self._state = own.freeze()

    @property
    def services(self) -> Any:  # type: ignore[override]
        raise RestartAbort("enabled=False: LiveState and Checkpoints need the wrapper, also on one rank")

    @property
    def state(self) -> FrozenState:
        return self._state

    @functools.cached_property
    def store(self) -> PrefixStore:
        store = c10d.HashStore() if self._state.world_size == 1 else next(c10d.rendezvous("env://"))[0]
        return PrefixStore(0, HoldingStore(store))

    def process_group(self, backend: str = "gloo", **options: Any) -> Any:
        if self._state.world_size == 1 and not options.keys() & {"store", "init_method"}:
            options = {"store": self.store, "rank": 0, "world_size": 1, **options}  # works without a launcher
        c10d.init_process_group(backend, **options)
        return c10d.group.WORLD

    def atomic(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    disable_hang_protection: Any = atomic


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method; it does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)
    return lambda *given, **named: (found := reference()) and found(*given, **named)


class Wrapper:
    """Keeps a distributed training function going through faults, in the processes that survive them.

    Use it as a decorator (bare, with ``()`` or with arguments) or call it on a function. On any fault all
    surviving ranks leave the function, abort their process groups, agree on the remaining members, take new
    ranks and enter the function again. Durations are ``timedelta`` or seconds.

    Args:
        rejoin: a restarted process joins the running job, and iteration numbers are unique over the store's
            lifetime. When None: True under ``ftrun``, which restarts lost processes.
        use_global_iteration: another name for ``rejoin``, which takes precedence over it.
        active_world_size: how many ranks are active; the rest are hot spares. Short for a rank assignment.
            When None, and without a ``rank_assignment``: the number from ``ftrun --active-world-size`` or
            ``--spare-nodes``, or fewer while there are not enough ranks.
        min_world_size: with fewer ranks than this the call fails instead of continuing.
        soft_timeout: without progress for this long, all ranks restart. ``"auto"``: as soon as all ranks wait
            for one that is stuck; with live state also for one that is busy for much longer than ever before;
            at the latest after 60 s, which doubles each time.
        hard_timeout: without progress for this long, the process is terminated. ``"auto"``: 90 s, but at
            least half as long again as ``soft_timeout``.
        on_restart: called with a `RestartReport` on every rank, spares too, in each iteration but the call's
            first, before the function is entered, and once all active ranks have arrived. An ``Exception``
            that it raises is logged; a fault interrupts it as it interrupts the function; a hang in it counts
            as a hang in the function.
        rank_assignment: which member gets which rank, and which are active; all ranks, shifted, when None.
        health_check: run before the function, where raising is a fault; and after ``finalize``, where raising
            ends this rank. A spare ends in both cases.
        limits: settings that few jobs need: `Limits`.
        enabled: False calls the function once, with a `CallWrapper` that watches and restarts nothing.
        store_factory: makes the coordination store; ``ftrun``'s own store comes first.
        store_kwargs: its arguments, ``host_name``, ``port`` and ``timeout`` for the TCPStore.
        initialize: run on each rank before the function, in every iteration.
        abort: run in another thread to free the function's thread from collectives. By default it
            aborts torch's groups, then ends the function's child processes; `AbortTorchDistributed` does only
            the first.
        finalize: run on each rank once it has left the function after a fault.
        completion: run once all ranks have finished.
        terminate: run when this rank leaves the job.
        heartbeat_timeout: without a heartbeat for this long, a rank counts as lost.
        barrier_timeout: how long a restart waits for ranks that are alive but do not arrive. Between two
            wrapped calls it waits as long as they are alive, and logs that at this interval.
        completion_timeout: how long a finished rank waits for the rest before it causes a restart; once per
            call.
        last_call_wait: how long to gather further faults before aborting.
        termination_grace_time: from SIGTERM to SIGKILL.
        monitor_thread_interval: the longest delay until the monitor thread notices a missed event.
        monitor_process_interval: the same for the monitor, in whichever process it runs.
        heartbeat_interval: between two requests of a monitor, alternately a heartbeat and a check.
        progress_watchdog_interval: between two automatic time stamps of progress.
        monitor_process_logfile: absolute path; ``{rank}`` is filled in. With this or the next one the rank
            has its own monitor process, even if its agent would run the monitor.
        monitor_process_pidfile: absolute path; ``{rank}`` is filled in.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: arguments contradict each other.
    """

    @typing.overload
    def __new__(cls, function: Callable[Concatenate[CallWrapper, P], R], /) -> Callable[P, R]: ...  # type: ignore[misc]
    @typing.overload
    def __new__(cls, function: F, /) -> F: ...  # type: ignore[misc]
    @typing.overload
    @_taking(Settings)
    def __new__(cls, **arguments: Any) -> "Wrapper": ...
    def __new__(cls, *functions: Any, **arguments: Any) -> Any:
        """Makes the bare decorator ``@Wrapper`` work: with a function, wraps it with the defaults."""
        if not functions:
            return super().__new__(cls)
        if len(functions) > 1 or arguments or not callable(functions[0]):
            raise TypeError(
                f"Wrapper takes keyword arguments, not {functions!r}: use @Wrapper or @Wrapper(...)"
            )
        return cls()(functions[0])

    __new__.__wrapped__ = Settings.__init__  # type: ignore[attr-defined]  # for `inspect.signature`

    if not TYPE_CHECKING:  # they read `__new__`, which the bare decorator needs

        def __init__(self, **arguments):
            if moved := [name for name in arguments if name in about(Limits)]:
                given = f"Wrapper(limits=Limits({'=..., '.join(moved)}=...))"
                raise TypeError(f"{moved[0]} is an argument of Limits now: {given}")
            for name in arguments.keys() - about(Settings).keys():
                raise TypeError(f"Wrapper() got an unexpected keyword argument {name!r}")
            self.settings = Settings(**arguments)
            check_together(self.settings)
            if not torch.distributed.is_available():
                raise RuntimeError("torch was built without torch.distributed; install a build that has it")

    settings: Settings

    def __getattr__(self, name: str) -> Any:
        """Each argument, by its name; durations as ``timedelta``."""
        known = about(Settings) | about(Limits)
        if name not in known:
            raise AttributeError(f"'Wrapper' object has no attribute {name!r}")
        owner = self.settings.limits if name in about(Limits) else self.settings
        value = getattr(owner, name)
        return timedelta(seconds=value) if known[name].is_duration and value != AUTO else value

    @typing.overload
    def __call__(self, function: Callable[Concatenate[CallWrapper, P], R]) -> Callable[P, R]: ...
    @typing.overload
    def __call__(self, function: F) -> F: ...
    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function.

        Raises:
            TypeError: it is a class, a coroutine function or a generator function, or has more than one
                argument annotated with `CallWrapper`.
        """
        if not callable(function):
            raise TypeError(f"Wrapper wraps a function, not {function!r}")
        _check_function(function)
        parameter = _call_wrapper_parameter(function)
        if not self.enabled and parameter is None:
            return function

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self.enabled:
                return _filled_in(function, parameter, Unwrapped(), args, kwargs)()
            state = self._check_environment()
            settings = as_launched(self.settings, is_first=state.rank == 0)
            state.use_global_iteration = bool(settings.rejoin)
            plan = plan_store(self.store_factory, self.store_kwargs, self.barrier_timeout)
            call = Call(settings, plan, state, name_of(function))
            error: BaseException | None = None
            checks, quiet = None, _quiet_watchdog()
            try:
                checks = check.log_once(self.settings.hard, is_wanted=_begins_job(call))
                result = call.run(_filled_in(function, parameter, CallWrapper(call), args, kwargs))
            except BaseException as caught:
                error = caught
                drop_own_frames(caught)
                raise
            finally:
                call.close(error)
                for variable in quiet:
                    os.environ.pop(variable, None)
                if checks is not None:
                    checks.join(_CHECKS_PATIENCE)
                del error, call
            _check_function(function, result)
            return result

        return wrapped

    def _check_environment(self) -> State:
        """Checks everything that must hold before a call starts anything."""
        identity.check_own_environment()
        state = State.from_env()
        formation_size(state.world_size)
        wanted = self.settings.active_world_size if launched_active_world_size() is None else None
        for name, value in (("active_world_size", wanted), ("min_world_size", self.settings.min_world_size)):
            if value is not None and value > state.world_size:
                raise ValueError(
                    f"{name}={value} is more than WORLD_SIZE={state.world_size}; start more ranks or lower it"
                )
        if torch.distributed.is_initialized():
            raise ValueError(
                "a process group is already initialized; call torch.distributed.destroy_process_group() "
                "before the wrapped function, and init_process_group() inside it. TrainingArguments(), "
                "Accelerator() and Fabric.launch() make one: create them inside the function"
            )
        return state


def as_launched(settings: Settings, *, is_first: bool) -> Settings:
    """The settings of a call, completed from the launcher's options.

    ``ftrun --active-world-size`` replaces ``active_world_size``, but not a ``rank_assignment``.

    Args:
        settings: the settings in the user's code.
        is_first: whether this is rank 0, which logs what is ignored.
    """
    launched, active = launched_active_world_size(), settings.active_world_size
    if launched is not None and is_first and settings.rank_assignment is not None:
        log.warning("ftrun's active world size %d does not count: the code has a rank_assignment", launched)
    elif launched is not None and is_first and active not in (None, launched):
        log.warning("active_world_size=%d does not count: ftrun says %d", active, launched)
    if settings.rank_assignment is None:
        active = launched or active
    named = [one for one in (settings.rejoin, settings.use_global_iteration) if one is not None]
    rejoin = named[0] if named else AGENT_ENV in os.environ
    assignment = settings.rank_assignment or default_assignment(active)
    return dataclasses.replace(settings, active_world_size=active, rank_assignment=assignment, rejoin=rejoin)


def _begins_job(call: Call) -> bool:
    """Whether this process is rank 0 of the job's first iteration, as far as it can know."""
    member = call.own.member
    is_first = call.own.is_in_time and member.view.is_first and member.member == Member(0, 0)
    return is_first and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def _quiet_watchdog() -> list[str]:
    """Leaves NCCL's errors to the restart, unless the user wants otherwise.

    A peer's death and a timeout are such errors. The watchdog of either NCCL backend ends the process (1,
    torchrun's setting, and 3, torch's default), or aborts the communicators (1 and 2) while another thread
    does so for the restart. With 0 it does neither, but it still dumps its flight recorder, and keeps a
    released group meanwhile. Groups read the variables when they are made. ``ftrun`` does not set them: a
    script without a wrapper needs the watchdog to end a hang.

    Returns:
        The variables that it set.
    """
    unset = [names[0] for names in WATCHDOG if not any(name in os.environ for name in names)]
    os.environ.update(dict.fromkeys(unset, "0"))
    return unset


def _check_function(function: Callable[..., Any], result: object = None) -> None:
    """Refuses classes, coroutines and generators; under a decorator only the result shows what it is."""
    if inspect.isclass(function):
        raise TypeError(f"{function!r} is a class: a call only makes an object; wrap a function or method")
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    begins = any(is_kind(one) for is_kind in kinds for one in (function, type(function).__call__))
    if begins or isinstance(result, types.CoroutineType | types.AsyncGeneratorType | types.GeneratorType):
        raise TypeError(
            f"{function!r} is a coroutine or generator function: calling it runs nothing yet, so nothing "
            "could be restarted; wrap a plain function that runs it to completion"
        )


def _call_wrapper_parameter(function: Callable[..., Any]) -> str | None:
    """Name of the argument for the `CallWrapper`.

    The one annotated with ``CallWrapper`` or ``Optional[CallWrapper]``; without any, one that has no
    annotation and is called ``call_wrapper``.
    """
    signature = known_signature(function)
    parameters = {} if signature is None else signature.parameters
    found = [name for name, one in parameters.items() if _means_call_wrapper(one.annotation, function)]
    if len(found) > 1:
        raise TypeError(
            f"{function!r} has {len(found)} arguments annotated with CallWrapper ({', '.join(found)}); it "
            "may have one"
        )
    if not found and (own := parameters.get(_PARAMETER)) is not None and own.annotation is own.empty:
        found = [_PARAMETER] if own.kind not in (own.VAR_POSITIONAL, own.VAR_KEYWORD) else []
    return found[0] if found else None


def _means_call_wrapper(annotation: object, function: Callable[..., Any]) -> bool:
    if isinstance(annotation, str):
        text, names = annotation, getattr(inspect.unwrap(function), "__globals__", {})
        try:
            annotation = eval(text, dict(names))
        except Exception:
            # A name that exists only for type checkers.
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
    given, own = bound.arguments.get(parameter), signature.parameters[parameter]
    if not isinstance(given, CallWrapper) and (given is not None or own.default is own.empty):
        # The next argument landed there, because the caller left this one out.
        others = [p for p in signature.parameters.values() if p is not own]
        # Or the caller passed None for it: then the rest does not fit without it.
        with contextlib.suppress(*[TypeError] if given is None else []):
            bound = signature.replace(parameters=others).bind(*args, **kwargs)
    filled = inspect.BoundArguments(signature, {**bound.arguments, parameter: user})
    return functools.partial(function, *filled.args, **filled.kwargs)
