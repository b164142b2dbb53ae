"""Finds the public names of a module at their first use (PEP 562), or by an old name.

An old name works for one release, with a warning that gives the new one.
"""

import ast
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Made = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


def attach(package: str, folder: str) -> Made:
    """Makes ``__getattr__``, ``__dir__`` and ``__all__`` of a package from its ``__init__.pyi``.

    Args:
        package: its name.
        folder: where it is.
    """
    stub = ast.parse(Path(folder, "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    # None for a module of the package; a dot for each package above.
    homes = {
        one.name: node.module and "." * node.level + node.module for node in imports for one in node.names
    }

    def get(name: str) -> Any:
        home = homes.get(name) or f".{name}"
        if name.startswith("_") or importlib.util.find_spec(home, package) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home, package)
        found = getattr(module, name) if homes.get(name) else module
        setattr(sys.modules[package], name, found)
        return found

    return get, lambda: sorted({*vars(sys.modules[package]), *homes}), [*homes]


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Warns the caller's caller that a name has changed."""
    warnings.warn(
        f"{old} is {new} now; the old name goes with the next release", DeprecationWarning, stacklevel
    )


def attribute(owner: str, old: str, new: str) -> Any:
    """A property under an old name, for an attribute that has a new one."""

    def get(instance: Any) -> Any:
        warn(f"{owner}.{old}", new)
        return getattr(instance, new)

    return property(get, doc=f"The old name of ``{new}``.")


def of_module(module: str, namespace: Mapping[str, Any], names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that resolves old names to new ones.

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
    """An argument that may be passed by its old name; None if it is not passed.

    Args:
        owner: the class or function that takes it.
        old: its old name.
        old_value: the value passed by the old name.
        new: its new name.
        value: the value passed by the new name.

    Raises:
        TypeError: it was passed by both.
    """
    if old_value is None:
        return value
    warn(f"{owner}({old}=)", f"{new}=", 4)
    if value is not None:
        raise TypeError(f"{owner}: leave out {old}={old_value!r}, the old name of {new}={value!r}")
    return old_value
