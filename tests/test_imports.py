"""Imports inside the package go one way (see the layers below), read from the sources themselves.

What is imported for annotations only, under ``if TYPE_CHECKING``, does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ft_wrapper"

BASE = {"attribution", "events", "exception", "log_lines", "state", "tracebacks"}
PLUG_INS = {
    "abort",
    "completion",
    "compose",
    "finalize",
    "health_check",
    "initialize",
    "nested_restarter",
    "rank_assignment",
    "terminate",
}

# What a call of the function is made of, beside the plug-ins.
PARTS = {
    "exit_watch",
    "iteration_store",
    "job",
    "restart_report",
    "same_faults",
    "torch_state",
}
# Private modules directly under ft_wrapper (``_name``) are helpers of the others.
HELPERS = "_helpers"

# What the modules and subpackages directly under ft_wrapper may import, beside themselves.
ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    HELPERS: BASE,
    "store": BASE | {HELPERS},
    "monitor": BASE | {HELPERS, "store"},
    **dict.fromkeys(PLUG_INS, BASE | PLUG_INS | {HELPERS, "store", "monitor"}),
    **dict.fromkeys(PARTS, BASE | PARTS | PLUG_INS | {HELPERS, "store", "monitor"}),
    "call_wrapper": BASE | {"store"},
    "call": BASE | PLUG_INS | PARTS | {HELPERS, "store", "monitor", "call_wrapper"},
    "wrapper": BASE | PLUG_INS | PARTS | {HELPERS, "store", "monitor", "call", "call_wrapper"},
    "report": BASE | {"restart_report"},
    "status": BASE | {"restart_report", "store", "rendezvous"},
    "rendezvous": BASE | {HELPERS, "store"},
    "agent": BASE | {HELPERS, "store", "monitor", "rendezvous"},
    "run": BASE | {HELPERS, "report", "status", "store", "rendezvous", "agent"},
}
# The package itself shows the public names; what tests use may use all that is tested.
ALLOWED["__init__"] = set(ALLOWED)
ALLOWED["testing"] = set(ALLOWED)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer(name: str) -> str:
    """Where in `ALLOWED` a module belongs, by its name without ``ft_wrapper.``."""
    first = name.split(".")[0]
    if first.startswith("_") and first != "__init__":
        return HELPERS
    # `from ft_wrapper import Wrapper`: no module, so it comes from the package itself.
    is_module = first in ALLOWED or (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file()
    return first if is_module else "__init__"


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, without what only type checkers read."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from executed(child)


def imports(path: Path, package: Path = PACKAGE) -> Iterator[tuple[int, str]]:
    """What a file imports from the package, also inside functions: line, name without ``ft_wrapper.``."""
    here = ["ft_wrapper", *path.relative_to(package).parts[:-1]]
    for node in executed(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            # `from . import events`: the module is among the names.
            names = [[*base, alias.name] for alias in node.names] if base == ["ft_wrapper"] else [base]
        else:
            continue
        for name in names:
            if name[0] == "ft_wrapper":
                yield node.lineno, ".".join(name[1:]) or "__init__"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    importer = layer(str(path.relative_to(PACKAGE)).replace("/", ".").removesuffix(".py"))
    assert importer in ALLOWED, f"{importer} is new: say in {__file__} what it may import"
    wrong = [
        f"{path}:{line} imports {name}"
        for line, name in imports(path)
        if layer(name) != importer and layer(name) not in ALLOWED[importer]
    ]
    assert not wrong, f"{importer} may import {sorted(ALLOWED[importer])} only:\n" + "\n".join(wrong)


def test_there_is_no_way_round() -> None:
    """The layers themselves have no cycle but the intended ones, within a group."""
    for name, allowed in ALLOWED.items():
        for other in allowed - {name}:
            if other in ("testing", "__init__"):
                assert name in ("testing", "__init__"), f"{name} may not import {other}"
            elif name not in ("testing", "__init__") and name in ALLOWED[other]:
                group = next((group for group in (BASE, PLUG_INS, PARTS) if name in group), set())
                assert other in group, f"{name} and {other} may import each other"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from ..store import TCPStore", ["store"]),
        ("from .. import events, exception", ["events", "exception"]),
        ("from . import keys", ["monitor"]),
        ("from .interrupt import Interrupter", ["monitor.interrupt"]),
        ("import ft_wrapper.testing.fake_store", ["testing.fake_store"]),
        ("from ft_wrapper.wrapper import Wrapper", ["wrapper"]),
        ("def f():\n    from ..wrapper import Wrapper", ["wrapper"]),
        ("from ft_wrapper import Wrapper", ["Wrapper"]),
        ("import os, torch", []),
        (
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from ..wrapper import Wrapper\nelse:\n    from ..store import TCPStore",
            ["store"],
        ),
    ],
)
def test_all_ways_to_import_are_seen(tmp_path: Path, source: str, found: list[str]) -> None:
    file = tmp_path / "monitor" / "module.py"
    file.parent.mkdir()
    file.write_text(source)
    assert [name for _, name in imports(file, tmp_path)] == found
