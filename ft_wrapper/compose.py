"""Plug-ins: their base class and checks, and `Compose`, which combines several into one."""

import abc
import contextlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from .state import FrozenState

P = TypeVar("P", bound=Callable[..., Any])
StatePlugIn: TypeAlias = Callable[[FrozenState], object]

# Py_TPFLAGS_BASETYPE: plain functions, for example, are instances of a class that has no subclasses.
_CAN_BE_A_BASE = 1 << 10


class PlugIn(abc.ABC):
    """Base of the plug-ins of `Wrapper` that are called with a rank's state; its subclasses say when."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Does its part, or raises.

        Args:
            state: the rank's state, read-only.

        Returns:
            The state.
        """


class Compose:
    """Calls several plug-ins, the right-most first: ``Compose(a, b, c)(*x) == a(b(c(*x)))``.

    The right-most part gets all arguments. Each other part gets the return value of the part to its right, a
    tuple as several arguments. A part that takes no arguments gets none, and neither does a part that follows
    a call without arguments that returned None.

    It is an instance of the nearest common base class of its parts, so it can replace any of them::

        Wrapper(rank_assignment=Compose(MaxActiveWorldSize(4), ShiftRanks()))

    Args:
        parts: plug-ins, or other callables.

    Raises:
        TypeError: there are no parts, or one is not callable.
    """

    parts: tuple[Any, ...]
    _without_arguments: list[bool]

    def __new__(cls, *parts: P) -> P:  # type: ignore[misc]
        """Makes an instance of a class that is a `Compose` and what all parts are."""
        if cls is not Compose:  # it is being copied
            return object.__new__(cls)  # type: ignore[return-value]
        if not parts:
            raise TypeError("Compose() needs at least one part; pass the plug-ins to call: Compose(a, b)")
        for position, part in enumerate(parts):
            is_class = isinstance(part, type)
            if is_class or not callable(part):
                hint = f"an instance: {part.__name__}(...)" if is_class else "a plug-in"
                raise TypeError(f"part {position} of Compose, {part!r}, cannot be called; pass {hint}")
        # Without the ancestor's __init__, whose arguments are its own.
        body = {"__module__": __name__, "__init__": lambda *_: None}
        composed: Any = object.__new__(type("Compose", (Compose, _nearest_common_ancestor(parts)), body))
        composed.parts = parts
        # Inspected here because it takes longer than many parts do, and restarts wait for the parts.
        signatures = map(known_signature, parts[:-1])
        composed._without_arguments = [one is not None and not one.parameters for one in signatures] + [False]
        return composed  # type: ignore[no-any-return]

    def __call__(self, *arguments: Any) -> Any:
        """Calls the parts.

        Args:
            arguments: for the right-most part.

        Returns:
            What the left-most part returns.
        """
        result = None
        for part, is_without in zip(reversed(self.parts), reversed(self._without_arguments), strict=True):
            if is_without:
                arguments = ()
            result = part(*arguments)
            if result is None and any(argument is not None for argument in arguments):
                warnings.warn(
                    f"{part!r} did not hand its argument on: it returned None; "
                    "end its __call__ by returning its argument",
                    stacklevel=2,
                )
            if isinstance(result, tuple):
                arguments = result
            elif result is not None or arguments:
                arguments = (result,)
        return result

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.parts))})"


def _nearest_common_ancestor(parts: tuple[Any, ...]) -> type:
    for ancestor in type(parts[0]).__mro__:
        # A nested Compose counts as the class that it stands for. `functools.partial` and the like are
        # excluded: their __new__ is written in C and must be called.
        make: object = ancestor.__new__
        is_made_by_c = make is not object.__new__ and not isinstance(make, types.FunctionType)
        if issubclass(ancestor, Compose) or is_made_by_c or not ancestor.__flags__ & _CAN_BE_A_BASE:
            continue
        if all(isinstance(part, ancestor) for part in parts):
            return ancestor
    return object


def known_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function; None if it has none because it is built in."""
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(function)
    return None


def check_arguments(wrong: str, function: Any, arguments: Iterable[Any], named: Mapping[str, Any]) -> None:
    """Checks that a function accepts the given arguments, as far as its signature is known.

    Raises:
        TypeError: it cannot. The message begins with ``wrong``.
    """
    try:
        if (signature := known_signature(function)) is not None:
            signature.bind(*arguments, **named)
    except TypeError as error:
        raise TypeError(f"{wrong}: {error}") from None


def check_plug_in(name: str, value: Any, kind: Any) -> Any:
    """Returns a plug-in: None, one of its kind, or any other callable that takes one argument.

    Args:
        name: of the argument of `Wrapper`.
        value: the plug-in. Each part of a `Compose` must be one. Only the right-most part has to take one
            argument; every other part takes what its neighbour returns.
        kind: the plug-ins' base class.

    Raises:
        TypeError: it is none of these.
    """
    parameter = list(inspect.signature(kind.__call__).parameters)[1]
    words = f"must be None, a {kind.__module__}.{kind.__name__}, or a function of one argument, {parameter}"
    wrong = f"{name}={value!r} {words}"
    parts = [] if value is None else _parts_of(value)
    for part in parts:
        is_other_kind = isinstance(part, PlugIn) and not isinstance(part, kind)
        if is_other_kind or isinstance(part, type) or not callable(part):
            raise TypeError(wrong if part is value else f"{wrong}; {part!r} is none of them")
    for part in parts[-1:]:
        check_arguments(wrong, part, (None,), {})
    return value


def _parts_of(plug_in: Any) -> list[Any]:
    if not isinstance(plug_in, Compose):
        return [plug_in]
    return [part for each in plug_in.parts for part in _parts_of(each)]
