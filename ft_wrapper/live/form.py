"""How a state is built, taken apart and put together: whole on each rank here, in shards in `sharded`."""

import abc
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

Objects = dict[str, Any]
"""What a user's ``build`` returns: objects with ``state_dict`` and ``load_state_dict``, by name."""


class Form(abc.ABC):
    """One rank's view on the state of the job in one iteration.

    Args:
        build: the user's: makes the objects.

    Attributes:
        shard: name of the part of the state that belongs to this rank; replicas have the same.
    """

    shard: Hashable

    def __init__(self, build: Callable[[], Objects]) -> None:
        self._build = build

    @abc.abstractmethod
    def build(self) -> Objects:
        """Makes the objects as they are before the first step."""

    @abc.abstractmethod
    def rebind(self, objects: Objects) -> Objects:
        """Makes objects that were built in an earlier iteration fit for this one, with the same state."""

    @abc.abstractmethod
    def export(self, objects: Objects) -> Any:
        """Takes the state apart.

        Returns:
            Dictionaries and lists of tensors and plain values. The tensors are the objects' own, not copies.
        """

    @abc.abstractmethod
    def adopt(self, objects: Objects | None, state: Any) -> Objects:
        """Puts an exported state into the objects.

        Args:
            objects: to take it; None makes new ones.
            state: from `export`, on this rank or another. Its tensors belong to the objects from now on.
        """

    def parameters(self, objects: Objects) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of all modules, each with its module's name before its own."""
        for name, module in modules(objects):
            for inner, parameter in module.named_parameters():
                yield f"{name}.{inner}", parameter


class Replicated(Form):
    """The whole state on each rank, as under ``DistributedDataParallel``."""

    shard: Hashable = "whole"

    def build(self) -> Objects:
        """See `Form`."""
        return self._build()

    def rebind(self, objects: Objects) -> Objects:
        """See `Form`."""
        return objects

    def export(self, objects: Objects) -> Any:
        """See `Form`."""
        return {name: value.state_dict() for name, value in objects.items()}

    def adopt(self, objects: Objects | None, state: Any) -> Objects:
        """See `Form`."""
        objects = self.build() if objects is None else objects
        for name, value in objects.items():
            value.load_state_dict(state[name])
        return objects


def modules(objects: Objects) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules among the objects."""
    return ((name, value) for name, value in objects.items() if isinstance(value, torch.nn.Module))


def optimizers(objects: Objects) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers among the objects."""
    return ((name, value) for name, value in objects.items() if isinstance(value, torch.optim.Optimizer))
