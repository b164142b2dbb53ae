"""What users forget, told before it costs a step: in what ``build`` returns, and at each commit."""

import hashlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .form import Form, Objects, modules, optimizers

Outline = tuple[tuple[str, str], ...]
"""What must be the same on all ranks: what it is about, and what it is."""


def check_built(objects: object, form: Form, *, has_update: bool) -> None:
    """Checks what ``build`` has returned.

    Args:
        objects: that is it.
        form: how its parameters are found.
        has_update: whether the user passes ``update``.

    Raises:
        TypeError: it is no dictionary of objects that have a state, or one of them cannot be kept.
        ValueError: an optimizer, a scheduler and what they work on are not all there.
    """
    if not isinstance(objects, Mapping) or not objects:
        raise TypeError(
            f"build() returned {objects!r}; it must return a dict such as "
            '{"model": model, "optimizer": optimizer}'
        )
    for name, value in objects.items():
        _check_object(name, value)
    known = {id(parameter) for _, parameter in form.parameters(dict(objects))}
    schedulers = [each for each in objects.values() if isinstance(each, torch.optim.lr_scheduler.LRScheduler)]
    for name, optimizer in optimizers(dict(objects)):
        lost = sum(id(each) not in known for group in optimizer.param_groups for each in group["params"])
        if lost:
            raise ValueError(
                f"build(): {name!r} updates {lost} parameters of no module that build() returned; return "
                "their module, too, or they are lost with this process"
            )
        is_scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if is_scheduled and not any(each.optimizer is optimizer for each in schedulers):
            raise ValueError(f"build(): {name!r} has a scheduler that build() did not return; return it, too")
    for each in schedulers:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) and not has_update:
            raise ValueError(
                "build() returned a ReduceLROnPlateau, whose step() takes a metric; pass update= to "
                "LiveState, and the metric to commit()"
            )


def _check_object(name: object, value: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"build() returned the key {name!r}; keys must be strings")
    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"build(): {name!r} is a DistributedDataParallel, which belongs to one iteration's process "
            f"group; return its module, and wrap that: DistributedDataParallel(live[{name!r}])"
        )
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise TypeError(
            f"build(): {name!r} is {type(value).__name__}, which has no state_dict and load_state_dict; "
            "give it both, or leave it out if it has no state"
        )


def untrained(objects: Objects, parameters: list[tuple[str, torch.nn.Parameter]]) -> list[str]:
    """Names the parameters that require a gradient, and that no optimizer updates."""
    updated = {
        id(each) for _, one in optimizers(objects) for group in one.param_groups for each in group["params"]
    }
    return [name for name, each in parameters if each.requires_grad and id(each) not in updated]


def outline(
    objects: Objects, form: Form, update: Callable[..., object], settings: Mapping[str, Any]
) -> Outline:
    """Says what must be the same on all ranks: names, shapes, types and order, and the update's code.

    Args:
        objects: what ``build`` returned.
        form: how its parameters are found.
        update: as the user passed it, or the default.
        settings: further values, by the name of the argument.
    """
    return tuple(_outline(objects, form, update, settings))


def _outline(
    objects: Objects, form: Form, update: Callable[..., object], settings: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    yield from ((f"argument {name}", repr(value)) for name, value in settings.items())
    yield "update", _code_of(update)
    yield (
        "what build() returned",
        ", ".join(f"{name}: {type(each).__name__}" for name, each in objects.items()),
    )
    names = {}
    for name, parameter in form.parameters(objects):
        names[id(parameter)] = name
        yield f"parameter {name}", f"{tuple(parameter.shape)} {parameter.dtype}"
    for name, module in modules(objects):
        for inner, buffer in module.named_buffers():
            yield f"buffer {name}.{inner}", f"{tuple(buffer.shape)} {buffer.dtype}"
    for name, optimizer in optimizers(objects):
        # Optimizer state goes by number: parameters from a set() come in another order in each process.
        for number, group in enumerate(optimizer.param_groups):
            yield (
                f"parameters of group {number} of {name}",
                ", ".join(names.get(id(each), "?") for each in group["params"]),
            )


def _code_of(function: Any) -> str:
    """The compiled code of a function, with that of the functions in it; its name if there is no code."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(type(function))
    digest, todo = hashlib.sha256(), [code]
    while todo:
        one = todo.pop()
        digest.update(one.co_code + repr(one.co_names).encode())
        for constant in one.co_consts:
            if isinstance(constant, types.CodeType):
                todo.append(constant)
            else:
                # A set's order differs between processes.
                is_set = isinstance(constant, frozenset)
                digest.update(repr(sorted(map(repr, constant)) if is_set else constant).encode())
    return f"{code.co_name} {digest.hexdigest()[:16]}"


def digest_of(one: Outline) -> str:
    """A short text that differs where outlines do."""
    return hashlib.sha256(repr(one).encode()).hexdigest()[:32]


def first_difference(outlines: list[Outline]) -> str:
    """Says where the ranks' outlines first differ, and how.

    Args:
        outlines: by active rank; they do differ.
    """
    ranks = range(len(outlines))
    for position in range(max(map(len, outlines))):
        there = [one[position] if position < len(one) else ("the end", "nothing more") for one in outlines]
        if len(set(there)) > 1:
            usual = max(there, key=there.count)
            odd = next(rank for rank in ranks if there[rank] != usual)
            other = next(rank for rank in ranks if there[rank] == usual)
            return (
                f"active rank {odd} has {there[odd][0]} = {there[odd][1]}, and active rank {other} has "
                f"{usual[0]} = {usual[1]}"
            )
    return "nowhere"


class Marks:
    """Notices parameters that change between the begin of a step and its commit."""

    def __init__(self, parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
        self._parameters = parameters
        self._versions: list[int] = []

    def set(self) -> None:
        """Notes how the parameters are at the begin of a step."""
        self._versions = [each._version for _, each in self._parameters]

    def changed(self) -> str | None:
        """The name of a parameter that was written to since; None if none was."""
        for (name, each), version in zip(self._parameters, self._versions, strict=False):
            if each._version != version:
                return name
        return None
