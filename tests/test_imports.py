"""Imports inside the package go one way (see the layers below), read from the sources themselves.

What is imported for annotations only, under ``if TYPE_CHECKING``, does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ft_wrapper"

# The house, from the ground up: a file uses what stands in its own line's folder or further up, never further
# down. A name is a module or folder directly under ft_wrapper.
LINES: list[set[str]] = [
    {
        *("exception", "attribution", "settings", "state", "events", "compose", "log_lines", "_files"),
        *("device_memory", "_secrets"),
    },
    {"protocol"},
    {"store", "report"},
    {"monitor", "rendezvous", "check"},
    {"torch_groups", "agent", "control"},
    {
        *("abort", "completion", "finalize", "health_check", "initialize", "nested_restarter", "terminate"),
        "rank_assignment",
    },
    {"restart"},
    {"wrapper"},
    {"live", "checkpoints"},
    {"integrations"},
    {"run"},
    {"__init__"},
    {"testing"},
]

# Arrows that still go up, each to be turned round: from, to.
UPWARDS = {
    ("report", "rendezvous"),  # `ftrun status` shows the nodes as well
}
# Circles that are still to be opened.
CIRCLES: list[set[str]] = []


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(name: str) -> str:
    """The module or folder directly under ft_wrapper that a module belongs to, by its name without that."""
    first = name.split(".")[0]
    # `from ft_wrapper import Wrapper`: no module, so it comes from the package itself.
    is_module = (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file()
    return first if is_module else "__init__"


def line(name: str) -> int:
    """In which of `LINES` a module or folder is."""
    for number, names in enumerate(LINES):
        if name in names:
            return number
    pytest.fail(f"{name} is new: say in {__file__} in which line it stands")


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
            names = [
                [*base, alias.name]
                if base == ["ft_wrapper"] or package.joinpath(*base[1:], f"{alias.name}.py").is_file()
                else base
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            # The version is no module, and stands above all of the package's own imports.
            if name[0] == "ft_wrapper" and name[1:] != ["__version__"]:
                yield node.lineno, ".".join(name[1:]) or "__init__"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = room(module(path))
    wrong = [
        f"{path}:{number} imports {name}"
        for number, name in imports(path)
        if line(room(name)) > line(here) and (here, room(name)) not in UPWARDS
    ]
    assert not wrong, f"{here} may not import what is built on it:\n" + "\n".join(wrong)


def test_arrows_that_go_up_are_there() -> None:
    found = {(room(module(path)), room(name)) for path in sources() for _, name in imports(path)}
    assert found >= UPWARDS, f"turned round: {UPWARDS - found}"


def test_there_is_no_circle() -> None:
    modules = {module(path): path for path in sources()}
    uses = {
        name: {_nearest(other, modules) for _, other in imports(path)} - {name}
        for name, path in modules.items()
    }
    circles = [sorted(group) for group in _circles(uses) if group not in CIRCLES]
    assert not circles, f"these import each other: {circles}"


def module(path: Path) -> str:
    """A file's name as a module, without ``ft_wrapper.``."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def _nearest(name: str, modules: dict[str, Path]) -> str:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or "__init__"


def _circles(uses: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules of which each reaches each other one."""
    reached: dict[str, set[str]] = {}
    for start in uses:
        todo, found = list(uses[start]), set[str]()
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += uses[name]
        reached[start] = found
    groups: list[set[str]] = []
    for name in uses:
        group = {other for other in reached[name] if name in reached[other]}
        if group and group not in groups:
            groups.append(group)
    return groups


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
