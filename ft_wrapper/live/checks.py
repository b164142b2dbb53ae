"""Finds what users forget in ``build`` or before a commit, before it costs a step."""

import hashlib
import itertools
import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .plan import Route
from .state import Form, Objects, optimizers
from .tree import named

Outline = tuple[tuple[str, str], ...]
"""What must be the same on all ranks: what it is about, and what it is."""


def check_built(objects: object, form: Form, *, has_update: bool) -> None:
    """Checks what ``build`` has returned.

    Args:
        objects: its result.
        form: how its parameters are found.
        has_update: whether the user passes ``update``.

    Raises:
        TypeError: it is not a dictionary of objects with a state, or one of them cannot be kept.
        ValueError: an optimizer, a scheduler and what they work on are not all there.
    """
    if not isinstance(objects, Mapping) or not objects:
        raise TypeError(f"build() returned {objects!r}; it must return a dict such as {{'model': model}}")
    for name, value in objects.items():
        _check_object(name, value)
    objects = dict(objects)
    parameters = form.parameters(objects)
    for name, parameter in parameters.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"build(): {name!r} has no shape yet; call its lazy module once in build()")
    if lost := strangers(objects, parameters):
        raise ValueError(f"build(): {lost}")
    schedulers = [each for each in objects.values() if isinstance(each, torch.optim.lr_scheduler.LRScheduler)]
    for name, optimizer in optimizers(objects):
        is_scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if is_scheduled and not any(each.optimizer is optimizer for each in schedulers):
            raise ValueError(f"build(): {name!r} has a scheduler that build() did not return; return it, too")
    for each in schedulers:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) and not has_update:
            raise ValueError("a ReduceLROnPlateau, whose step() takes a metric: pass update= to LiveState")
    form.export(objects)  # raises if there is something that cannot be sent


def _check_object(name: object, value: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"build() returned the key {name!r}; keys must be strings")
    inner = value.modules() if isinstance(value, torch.nn.Module) else (value,)
    for base in {base.__name__ for each in inner for base in type(each).__mro__} & _ELSEWHERE.keys():
        raise TypeError(f"build(): {name!r} is a {base}, {_ELSEWHERE[base]}")
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise TypeError(f"build(): {name!r} is {type(value).__name__}, without state_dict or load_state_dict")
    if not isinstance(value, torch.nn.Module):
        try:
            with _NoCollectives():  # type: ignore[no-untyped-call]
                value.state_dict()
        except Exception as error:
            raise TypeError(f"build(): {name!r}.state_dict() fails: {error}, on a single rank") from error


# What cannot belong to a state, why, and what to use in its place.
_ELSEWHERE = {
    "DistributedDataParallel": "which belongs to one iteration's process group; return its module, and wrap "
    "that: DistributedDataParallel(live[...])",
    "FullyShardedDataParallel": "of which no rank has all; use fully_shard, and pass mesh=",
    "ZeroRedundancyOptimizer": "of which no rank has all; use its optimizer_class, or fully_shard and mesh=",
}


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises if a rank communicates with others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"it calls the collective {func}")
        return func(*args, **(kwargs or {}))


def strangers(objects: Objects, parameters: Mapping[str, torch.nn.Parameter]) -> str | None:
    """Names an optimizer that updates parameters of no module; None: there is none."""
    known = set(map(id, parameters.values()))
    for name, optimizer in optimizers(objects):
        lost = sum(id(each) not in known for group in optimizer.param_groups for each in group["params"])
        if lost:
            return f"{name!r} updates {lost} parameters of no module that build() returned; return it, too"
    return None


def outline(objects: Objects, form: Form) -> Outline:
    """The part of what ``build`` returned that must be the same on all ranks: names, shapes and order.

    Args:
        objects: that result.
        form: takes them apart.
    """
    described = form.describe(objects)
    kinds = ", ".join(f"{name}: {type(each).__name__}" for name, each in objects.items())
    return (
        ("what build() returned", kinds),
        *((path, f"{tuple(each.shape)} {each.dtype}") for path, each in named(described)),
        # Parameters from a set() come in another order in each process, and so do their updates.
        *(
            (f"parameters of group {number} of {name}", ", ".join(group["params"]))
            for name, each in described["optimizers"].items()
            for number, group in enumerate(each["groups"])
        ),
    )


def outline_of_arguments(update: Callable[..., object], settings: Mapping[str, Any]) -> Outline:
    """The same for what the user passes: the update's code, and values.

    Args:
        update: as the user passed it, or the default.
        settings: further values, by the name of the argument.
    """
    code = getattr(getattr(update, "__func__", update), "__code__", type(update))
    arguments = ((f"argument {name}", repr(value)) for name, value in settings.items())
    name = getattr(update, "__name__", type(update).__name__)
    return (*arguments, ("update", f"{name} {digest_of(_plain(code))[:16]}"))


def _plain(constant: Any) -> Any:
    """What is the same in all processes: of code its parts; of a set, whose order differs, a list."""
    if isinstance(constant, types.CodeType):
        return constant.co_name, constant.co_code, constant.co_names, [*map(_plain, constant.co_consts)]
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)


def digest_of(one: object) -> str:
    """A short text that differs where outlines do."""
    return hashlib.sha256(repr(one).encode()).hexdigest()[:32]


def first_difference(outlines: list[Outline]) -> str:
    """Says where the ranks' outlines first differ, and how.

    Args:
        outlines: by active rank; they do differ.
    """
    for there in itertools.zip_longest(*outlines, fillvalue=("the end", "nothing more")):
        usual = max(there, key=there.count)
        odd = next((rank for rank, one in enumerate(there) if one != usual), None)
        if odd is not None:
            return (
                f"active rank {odd} has {there[odd][0]} = {there[odd][1]}, and active rank "
                f"{there.index(usual)} has {usual[0]} = {usual[1]}"
            )
    return "nowhere"


class Marks:
    """Notices what a loop may not change in parameters.

    Args:
        built: shapes of those that ``build`` made, by name.
    """

    def __init__(self, built: Mapping[str, tuple[int, ...]]) -> None:
        self._built = built
        self._seen: dict[str, tuple[torch.nn.Parameter, int]] = {}

    def set(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Notes how the parameters are after a commit."""
        self._seen = {name: (each, each._version) for name, each in parameters.items()}

    def changed(self, parameters: Mapping[str, torch.nn.Parameter]) -> str | None:
        """Names a change since then that only the update or ``build`` may make; None: there is none."""
        shapes = {name: tuple(each.shape) for name, each in parameters.items()}
        for name in self._built.keys() | shapes.keys():
            now, built = shapes.get(name, "gone"), self._built.get(name, "nothing")
            if now != built:
                return f"parameter {name!r} is {now}, and build() made {built}; make this change in build()"
        for name, each in parameters.items():
            seen, version = self._seen.get(name, (None, 0))
            if seen is not each or version != each._version:
                return f"parameter {name!r} was changed outside of commit(): leave out optimizer.step()"
        return None


# Replicas --------------------------------------------------------------------------------------------------


def routes_to_equal(
    said: Sequence[tuple[Hashable, int]], receivers: Collection[int] | None
) -> tuple[Route, ...]:
    """Whose state replicas take that differ from it.

    Args:
        said: shard and checksum of all active ranks, by rank.
        receivers: ranks that have just received their state, and so prove nothing. The state of most others
            wins, or without a majority that of the lowest of them. None: the first rank's wins.
    """
    ranks: dict[Hashable, list[int]] = {}
    for rank, (shard, _) in enumerate(said):
        ranks.setdefault(shard, []).append(rank)
    routes = []
    for group in ranks.values():
        holders = [rank for rank in group if rank not in (receivers or ())] or group
        number, count = Counter(said[rank][1] for rank in holders).most_common(1)[0]
        if receivers is None or 2 * count <= len(holders):
            number = said[holders[0]][1]
        giver = next(rank for rank in holders if said[rank][1] == number)
        routes += [Route(rank, (giver,)) for rank in group if said[rank][1] != number]
    return tuple(routes)


def describe_difference(routes: Sequence[Route], said: Sequence[Mapping[str, int]], step: int) -> str:
    """Names the first difference between replicas, and says what follows.

    Args:
        routes: who takes whose state.
        said: checksums by name, by rank.
        step: the step of the ranks.
    """
    receiver, giver = routes[0].receiver, routes[0].holders[0]
    mine, its = said[receiver], said[giver]
    name = next((name for name in its if mine.get(name) != its[name]), "what it consists of")
    return (
        f"replicas differ at step {step}: active rank {receiver} has another {name} than active rank {giver},"
        " and takes over its state: is something random without a seed, or changed outside of update?"
    )
