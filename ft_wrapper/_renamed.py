"""Old public names: each works for one release, and warns with the new one."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warns the caller's caller that a name is another one now."""
    warnings.warn(
        f"{old} is {new} now; the old name goes with the next release", DeprecationWarning, stacklevel
    )


def attribute(owner: str, old: str, new: str) -> Any:
    """A property that gives what a class calls by a new name."""

    def get(instance: Any) -> Any:
        warn(f"{owner}.{old}", new)
        return getattr(instance, new)

    return property(get, doc=f"The old name of ``{new}``.")


def of_module(module: str, namespace: Mapping[str, Any], names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``: gives what the module calls by new names.

    Args:
        module: its name.
        namespace: its variables.
        names: the new name of each old one.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", names[name])
        return namespace[names[name]]

    return get


def take_argument(owner: str, old: str, old_value: Any, new: str, value: Any) -> Any:
    """An argument that may have come by its old name; None where it has not come.

    Args:
        owner: what takes it.
        old: its old name.
        old_value: what has come by that.
        new: its new name.
        value: what has come by that.

    Raises:
        TypeError: it came by both.
    """
    if old_value is None:
        return value
    warn(f"{owner}({old}=)", f"{new}=", 4)
    if value is not None:
        raise TypeError(f"{owner}: leave out {old}={old_value!r}, the old name of {new}={value!r}")
    return old_value
