"""The settings of one wrapped call: the plug-ins, the store, the files, the limits."""

import functools
import pathlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

from .. import settings as checks
from ..abort import Abort, AbortProcesses, AbortTorchDistributed
from ..completion import Completion
from ..compose import Compose, StatePlugIn, check_arguments, check_plug_in
from ..finalize import Finalize
from ..health_check import HealthCheck
from ..initialize import Initialize
from ..monitor.slow import SlowRank
from ..rank_assignment import ActivateAllRanks, MaxActiveWorldSize, RankAssignment, RankPlugIn, ShiftRanks
from ..settings import AllLimits, MainLimits, RareLimits, about, argument, settings
from ..store import StoreMixin, TCPStore, without_password
from ..terminate import Terminate
from .report import RestartReport

REPLACE = "replace"


def _check_path(name: str, value: Any) -> str | None:
    path: str | None = checks.check_kind(name, value, str | None, "None or a string")
    if path is not None and not pathlib.Path(path).is_absolute():
        raise ValueError(f"{name}={value!r} must be an absolute path; {{rank}} in it is filled in")
    return path


def _check_function(name: str, value: Any, words: str, takes: tuple[object, ...] = ()) -> Any:
    """Checks that a value is None or can be called with the given arguments."""
    if value is not None:
        checks.check_kind(name, value, Callable, words)
        check_arguments(f"{name}={value!r} must be {words}", value, takes, {})
    return value


def _check_warm_up(name: str, value: Any) -> Any:
    words = "None, False or a function that needs no arguments"
    return value if value is False else _check_function(name, value, words)


def _check_on_slow(name: str, value: Any) -> Any:
    words = f"None, {REPLACE!r} or a function of one argument, the SlowRank"
    return value if value == REPLACE else _check_function(name, value, words, (None,))


def _plug_in(kind: type, default: object = None, *, is_shared: bool = False) -> Any:
    return argument(default, functools.partial(check_plug_in, kind=kind), is_shared=is_shared)


_mapping = functools.partial(checks.check_kind, kind=Mapping | None, words="None or a dict for store_factory")
_factory = functools.partial(checks.check_kind, kind=Callable, words="callable, such as store.TCPStore")
_words = "None or a function of one argument, the RestartReport"
_on_restart = functools.partial(_check_function, words=_words, takes=(None,))


@settings
class Limits(RareLimits):
    """The arguments of `Wrapper` that few jobs need: ``Wrapper(limits=Limits(max_faults=3))``.

    Args:
        cleanup_timeout: how long the clean-up of an interrupted function (``finally`` and ``except`` blocks,
            a framework's teardown) may take before it is interrupted, too.
        on_join: what happens when a process joins the running job (which needs ``rejoin``): it waits for the
            ``next`` restart; or it ends the iteration if fewer ranks are active than before (``degraded``),
            or in any case (``now``).
        join_window: how long joins are gathered before that; longer in a crash loop.
        rejoin_wait: how long a restart waits for an announced replacement.
        max_same_faults: the same fault this many times in a row ends the job with that error. The same means:
            the same type, at the same line of your code, without progress before it. Progress is a ``ping()``
            (after the start of its first step, if the function reports steps), a second step, or a minute in
            the function. From the second time on the ranks wait before they enter the function again: 0.5 s,
            doubled each time, at most 10 s. None: the job never ends or slows down.
        max_faults: a slot or host that causes this many restarts within ``fault_window`` is excluded: its
            ranks leave and are not restarted; a spare takes over. Not if fewer than ``min_world_size`` ranks
            would be left. None: no exclusion.
        fault_window: how long a fault counts towards ``max_faults``.
        collect_garbage: run Python's garbage collector between iterations, while this rank waits for the
            others, so that old models in reference cycles are freed before new ones are made. At the first
            call and the first restart the remaining objects are frozen (``gc.freeze``) to make this cheap.
        keep_groups: experimental. ``call_wrapper.process_group()`` makes one default group, which survives
            restarts and gets its new peers, with torch >= 2.15 and a backend that supports it. Otherwise each
            iteration makes a new one.
        hang_evidence: whether ``soft_timeout="auto"`` looks for what ranks are doing. False leaves its 60 s
            and 90 s for ``hard_timeout``.
        on_slow: what happens when a rank has cost each step more than 8 % for some seconds, which needs
            ``hang_evidence`` and ``soft_timeout="auto"``. None: the log says which rank, how much and why.
            ``"replace"``: after 100 steps and 10 s it also leaves the job, as by ``ftrun drain``, if a spare
            can take over and another rank has its shard too. A function: called in the slow rank's process,
            in a thread of its own, with a `SlowRank`; its errors are logged.
        warm_up: run without arguments on each spare while it waits, once per process: for work that would
            slow down its first step (caches, kernels, files). No collectives, because no other rank takes
            part. Before it, and also when None, a spare does the work that torch leaves to the first step. If
            the spare is needed, the warm-up is interrupted, and runs again at the next wait. Its errors are
            logged, and the spare keeps waiting. False: no warm-up.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: it has a wrong value.
    """

    warm_up: Callable[[], object] | Literal[False] | None = argument(None, _check_warm_up)
    on_slow: Callable[[SlowRank], object] | Literal["replace"] | None = argument(None, _check_on_slow)


_check_limits = functools.partial(checks.check_kind, kind=Limits, words="ft_wrapper.Limits(...)")


@settings
class Settings(MainLimits):
    """The arguments of `Wrapper`, which documents them."""

    store_factory: Callable[..., StoreMixin] = argument(TCPStore, _factory)
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
    enabled: bool = argument(True, checks.as_switch)
    use_global_iteration: bool | None = argument(None, checks.as_choice)
    on_restart: Callable[[RestartReport], object] | None = argument(None, _on_restart)
    limits: Limits = argument(Limits(), _check_limits)

    @property
    def all_limits(self) -> AllLimits:
        """The settings that the monitor and the protocol need to know."""
        main = {name: getattr(self, name) for name in about(MainLimits)}
        rare = {name: getattr(self.limits, name) for name in about(RareLimits)}
        return AllLimits(**main, **rare, replaces_slow=self.limits.on_slow == REPLACE)

    @property
    def terms(self) -> dict[str, object]:
        """The settings that must be the same on all ranks, as JSON values."""
        return {**self.all_limits.shared, "rank_assignment": _outline(self.rank_assignment)}


def check_together(settings: Settings) -> None:
    """Checks a user's arguments against each other.

    Raises:
        TypeError: ``store_kwargs`` do not fit ``store_factory``.
        ValueError: durations contradict each other, or the active ranks are set in two ways.
    """
    limits = settings.all_limits
    for name, known in about(AllLimits).items():
        for longer in known.shorter_than:
            if not limits.seconds(name) < limits.seconds(longer):
                durations = [timedelta(seconds=limits.seconds(one)) for one in (name, longer)]
                raise ValueError(f"{name}={durations[0]} must be shorter than {longer}={durations[1]}")
    if settings.active_world_size is not None and settings.rank_assignment is not None:
        raise ValueError(
            f"active_world_size={settings.active_world_size} and "
            f"rank_assignment={settings.rank_assignment!r} exclude each other: put MaxActiveWorldSize into "
            "the rank_assignment"
        )
    if settings.store_kwargs is None:
        return
    shown, factory = without_password(settings.store_kwargs), settings.store_factory
    wrong = f"store_kwargs={shown!r} do not fit store_factory={factory!r}"
    check_arguments(wrong, factory, (), settings.store_kwargs)


def default_assignment(active_world_size: int | None) -> RankAssignment:
    """The default assignment: ranks move up to fill gaps, and all or the first ones are active."""
    active = ActivateAllRanks() if active_world_size is None else MaxActiveWorldSize(active_world_size)
    made: RankAssignment = Compose(active, ShiftRanks())
    return made


def _outline(plug_in: Any) -> str:
    """The classes and functions that a plug-in is made of."""
    if isinstance(plug_in, Compose):
        return f"Compose({', '.join(map(_outline, plug_in.parts))})"
    return name_of(plug_in).rpartition(".")[2]


def name_of(function: Callable[..., Any]) -> str:
    """A function's name in the terms of a job: without its address, which differs between ranks."""
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
