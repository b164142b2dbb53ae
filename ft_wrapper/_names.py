"""Finds the public names of a package at their first use (PEP 562)."""

import ast
import importlib.util
import sys
from collections.abc import Callable
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
