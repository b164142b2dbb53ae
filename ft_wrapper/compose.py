"""What plug-ins are, and `Compose`: several in the place of one."""

import abc
import types
import warnings
from typing import Any, TypeVar

from .state import FrozenState

P = TypeVar("P")

# Py_TPFLAGS_BASETYPE: plain functions, for example, are instances of a class that has no subclasses.
_CAN_BE_A_BASE = 1 << 10


class PlugIn(abc.ABC):
    """Base of the plug-ins of `Wrapper` that are called with a rank's state; their own bases say when."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Does its part, or raises.

        Args:
            state: the rank's state, read-only.

        Returns:
            The state.
        """


class Compose:
    """Calls several plug-ins, the right-most first: ``Compose(a, b, c)(x) == a(b(c(x)))``.

    It is an instance of the nearest common base class of its parts, so it can replace any of them::

        Wrapper(rank_assignment=Compose(MaxActiveWorldSize(4), ShiftRanks()))

    Args:
        parts: plug-ins, or other callables that take one argument and return it; or functions that all take
            no argument.

    Raises:
        TypeError: there are no parts, or one is not callable.
    """

    parts: tuple[Any, ...]

    def __new__(cls, *parts: P) -> P:  # type: ignore[misc]
        """Makes an instance of a class that is a `Compose` and what all parts are."""
        if not parts:
            raise TypeError("Compose() needs at least one part; pass the plug-ins to call: Compose(a, b)")
        for position, part in enumerate(parts):
            if not callable(part) or isinstance(part, type):
                hint = (
                    f"pass an instance: {part.__name__}(...)" if isinstance(part, type) else "pass a plug-in"
                )
                raise TypeError(f"part {position} of Compose, {part!r}, is no instance to call; {hint}")
        body = {
            "__module__": __name__,
            "__new__": object.__new__,  # copying calls it without parts
            "__init__": _keep_parts,  # not the ancestor's, whose arguments are its own
        }
        bases = (Compose, _nearest_common_ancestor(parts))
        made = types.new_class("Compose", bases, exec_body=lambda namespace: namespace.update(body))
        instance: P = object.__new__(made)
        return instance

    def __call__(self, *arguments: Any) -> Any:
        """Calls the parts.

        Args:
            arguments: one argument for the right-most part; or none: then no part gets one.

        Returns:
            What the left-most part returns.

        Raises:
            TypeError: there are several arguments.
        """
        if len(arguments) > 1:
            raise TypeError(f"Compose hands one argument on, or none, not {len(arguments)}")
        if not arguments:
            return [part() for part in reversed(self.parts)][-1]
        (argument,) = arguments
        for part in reversed(self.parts):
            result = part(argument)
            if result is None and argument is not None:
                warnings.warn(
                    f"{part!r} did not hand its argument on: it returned None; "
                    "end its __call__ with a return of what it was given",
                    stacklevel=2,
                )
            argument = result
        return argument

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.parts))})"


def _keep_parts(self: Compose, *parts: Any) -> None:
    self.parts = parts


def _nearest_common_ancestor(parts: tuple[Any, ...]) -> type:
    for ancestor in type(parts[0]).__mro__:
        # What is nested is a Compose of its own: what it stands for counts.
        if issubclass(ancestor, Compose):
            continue
        if all(isinstance(part, ancestor) for part in parts) and ancestor.__flags__ & _CAN_BE_A_BASE:
            return ancestor
    return object
