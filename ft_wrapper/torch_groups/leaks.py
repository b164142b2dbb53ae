"""Leaks: objects of earlier iterations that are still alive, with what holds them.

What holds them is found by a forward search from the globals of modules, from frames and from threads. The
collector's backward search, ``gc.get_referrers``, finds neither ``{"dp": group}`` nor ``(group,)``: the
collector does not track containers that hold only objects of C++. Nor does it look at frozen objects.
"""

import collections
import contextlib
import dataclasses
import gc
import inspect
import os
import sys
import threading
import types
import warnings
from collections.abc import Collection, Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from ..monitor.frames import current_frames
from . import tracker
from .release import wait_for_released_groups
from .tracker import kind_of

_ATOMS = frozenset(
    {str, bytes, int, float, complex, bool, type(None), types.CodeType, torch.dtype, torch.device}
)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType)
_OURS = f"{__package__.partition('.')[0]}.live"

_Root = tuple[dict[str, Any], str, str]  # variables, and the start and end of a path's description from them
_Parents = dict[int, Any]  # the holder of each visited object, by its id; None where the search began

_LOSSES = {
    "DeviceMesh": "its sockets and memory stay, and it may be taken for the new one",
    "ProcessGroup": "its sockets and threads stay",
}


@dataclasses.dataclass(frozen=True)
class Leak:
    """An object of an earlier iteration that is still alive.

    Args:
        kind: ``DeviceMesh``, ``ProcessGroup``, or the class of a wrapped module.
        iteration: number of the iteration that made the object.
        referrer: the path to it from a module's global, a frame or a thread; None if none was found.
        cycle: the path from it to itself; None if there is none. An object in a cycle may only wait for the
            collector, which never looks at what ``gc.freeze`` froze.
        within: whether only other leaks hold it.
    """

    kind: str
    iteration: int
    referrer: str | None
    cycle: str | None = None
    within: bool = False

    def __str__(self) -> str:
        """One line."""
        article = "an" if self.kind.startswith(("FSDP", "A", "E", "I", "O")) else "a"
        if self.within:
            holder = "another leak"
        elif self.cycle is not None:
            holder = f"itself ({self.cycle}), until the collector comes, or by C++"
        else:
            holder = self.referrer or "no module, frame or thread, so by C++"
        loss = _LOSSES.get(self.kind, "its memory and its process groups stay")
        return f"{article} {self.kind} of iteration {self.iteration} is held by {holder}: {loss}"


def find_leaks() -> list[Leak]:
    """Finds objects of earlier iterations that are still alive, and what holds them.

    It looks for meshes (``DeviceMesh``), process groups, and modules in ``DistributedDataParallel``, FSDP1 or
    FSDP2. Process groups kept by ``Limits(keep_groups=True)`` and objects that a `LiveState` holds do not
    count. In a test, call it in the wrapped function, after a restart. It waits for process groups that end
    in the background, at most 10 s.

    If any such object is alive, it walks through all objects of the process, which may take seconds.

    Returns:
        The leaks: the oldest first, and those held by other leaks last. Empty if there are none, or there was
        no restart.
    """
    wait_for_released_groups()
    living = tracker.current.earlier()
    exempt, _ = _reached_by_data(tracker.current.exempt_holders.values(), [made for made, _ in living])
    living = [(made, n) for made, n in living if not any(made is other for other in exempt)]
    if not living:
        return []
    # The holders first: a module holds its mesh, and a mesh its groups.
    wanted = sorted([made for made, _ in reversed(living)], key=_depth)
    paths, within = _find_paths(wanted, sys._getframe(1))
    leaks = []
    for made, n in living:
        path, is_within = paths.get(id(made)), id(made) in within
        cycle = _cycle_of(made) if path is None and not is_within else None
        leaks.append(Leak(kind_of(made), n, path, cycle, is_within))
    return sorted(leaks, key=lambda leak: leak.within)


def _depth(made: object) -> int:
    return 0 if isinstance(made, torch.nn.Module) else 2 if kind_of(made) == "ProcessGroup" else 1


class Leftover(Leak):
    """A `Leak` with the old names of its fields, for one release."""

    @property
    def what(self) -> str:
        """The ``kind``."""
        return self.kind

    @property
    def held_by(self) -> str | None:
        """The ``referrer``."""
        return self.referrer


def leftovers() -> list[Leftover]:
    """The old name of `find_leaks`, for one release."""
    words = "leftovers() is find_leaks() now; what and held_by are Leak.kind and Leak.referrer"
    warnings.warn(words, DeprecationWarning, stacklevel=2)
    return [Leftover(**vars(leak)) for leak in find_leaks()]


# What refers to an object -----------------------------------------------------------------------------------


def _find_paths(wanted: Collection[object], caller: FrameType) -> tuple[dict[int, str], set[int]]:
    """Finds paths to objects, among all objects of the process.

    Args:
        wanted: the objects to find; those that may hold others come first.
        caller: frame of the searching thread; the search covers this frame and its callers.

    Returns:
        The paths found, by the id of the object; and the ids of objects that were only found through other
        wanted objects.
    """
    ids = set(map(id, wanted))
    roots: dict[int, _Root] = {}
    for root in (*_modules(), *_threads(), *_locals(caller)):
        roots.setdefault(id(root[0]), root)  # a module may have two names
    parents: _Parents = {id(sys.modules): None, **dict.fromkeys(roots)}
    found = _reach([variables for variables, *_ in roots.values()], ids, parents, within=False)
    paths = {}
    for thing in found:
        variables, *chain = _chain(thing, parents, roots)
        _, before, after = roots[id(variables)]
        name = next((name for name, value in list(variables.items()) if value is chain[0]), "…")
        paths[id(thing)] = before + name + _describe(chain) + after
    inner = _reach(found, ids, parents)
    for thing in wanted:  # an object without a path may still hold others
        if id(thing) not in parents:
            parents[id(thing)] = None
            inner += _reach([thing], ids, parents)
    return paths, set(map(id, inner))


def _reached_by_data(holders: Collection[object], wanted: Collection[object]) -> tuple[list[Any], _Parents]:
    """Finds objects that are held through data alone, not through classes, functions and modules.

    Args:
        holders: the objects that may hold them.
        wanted: the objects to find.

    Returns:
        The wanted objects that are held; and the holder of each visited object, by its id.
    """
    parents: _Parents = {id(sys.modules): None, **{id(variables): None for variables, *_ in _modules()}}
    return _reach(holders, set(map(id, wanted)), parents), parents


def _cycle_of(thing: object) -> str | None:
    """The path from an object through data to itself; None if there is none."""
    found, parents = _reached_by_data([thing], [thing])
    return type(thing).__name__ + _describe(_chain(thing, parents, {id(thing)})) if found else None


def _reach(
    holders: Iterable[Any], wanted: Collection[int], parents: _Parents, *, within: bool = True
) -> list[Any]:
    """Visits the objects that are not yet in ``parents``, short paths first, and adds them to it.

    Args:
        holders: the objects to begin at.
        wanted: ids of the objects to find.
        parents: see `_Parents`.
        within: whether to go through data alone, and past wanted objects; if not, it goes through code, too,
            which leads to its module's globals, and stops at wanted objects.

    Returns:
        The wanted objects that were reached.
    """
    found = []
    queue = collections.deque(holders)
    while queue:
        holder = queue.popleft()
        for child in gc.get_referents(holder):
            kind = type(child)  # not isinstance(), which would run a proxy's code
            if kind in _ATOMS or id(child) in parents or (within and issubclass(kind, _CODE)):
                continue
            parents[id(child)] = holder
            is_wanted = id(child) in wanted
            if is_wanted:
                found.append(child)
            if within or not is_wanted:
                queue.append(child)
    return found


# ---- where a search may begin


def _modules() -> Iterator[_Root]:
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType):
            yield vars(module), f"{name}.", ""


def _threads() -> list[_Root]:
    return [(vars(each), f"thread {each.name!r}.", "") for each in threading.enumerate()]


def _locals(caller: FrameType) -> Iterator[_Root]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    innermost: dict[int, FrameType | None] = {**current_frames(), threading.get_ident(): caller}
    for thread, frame in innermost.items():
        while frame is not None:
            code, module = frame.f_code, str(frame.f_globals.get("__name__"))
            # Not a module's frame, whose variables are its globals; nor a live state's helpers, which hold
            # exempt objects for a moment.
            if code.co_flags & inspect.CO_OPTIMIZED and not module.startswith(_OURS):
                place = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
                name = names.get(thread, thread)
                yield _read(frame), "", f" in {place}, thread {name!r}"
            frame = frame.f_back


def _read(frame: FrameType) -> dict[str, Any]:
    """A frame's local variables."""
    copy = frame.f_locals
    found = dict(copy)
    # Before Python 3.13 the copy stays in the frame, and would keep old values until the frame ends. It is
    # not cleared if somebody has it from ``locals()``, or if a debugger is about to write it back.
    if sys.version_info < (3, 13) and frame.f_trace is None and sys.getrefcount(copy) == 3:
        copy.clear()
    return found


# ---- describing a path


def _chain(thing: object, parents: _Parents, roots: Collection[int]) -> list[Any]:
    """The objects on the path to one, from the start of the path to the object itself."""
    chain = [thing, parents[id(thing)]]
    while id(chain[-1]) not in roots:
        chain.append(parents[id(chain[-1])])
    return chain[::-1]


def _describe(chain: list[Any]) -> str:
    """Describes how the first object of a chain leads to the last one, as a Python expression would."""
    words, holder = "", chain[0]
    for child in chain[1:]:
        name = _attribute(holder, child)
        is_of_class = name is None and issubclass(type(holder), type) and type(child) is dict
        if child is not _dict_of(holder) and not is_of_class:  # otherwise the next step names the attribute
            words += _step(holder, child) if name is None else f".{name}"
            holder = child
    return words


def _step(holder: Any, child: Any) -> str:
    kind, items = type(holder), list[tuple[Any, Any]]()
    if issubclass(kind, dict):
        items = list(dict.items(holder))
    elif issubclass(kind, (list, tuple, collections.deque)):
        items = list(enumerate(holder))
    found = next((f"[{_short(key)}]" for key, value in items if value is child), None)
    return "" if kind is types.CellType else found or f" (in a {kind.__name__})"


def _attribute(holder: Any, child: Any) -> str | None:
    for name, value in list(_dict_of(holder).items()):
        if value is child:
            return str(name)
    for owner in type(holder).__mro__:
        for name, member in list(vars(owner).items()):
            if type(member) is types.MemberDescriptorType:  # a slot, or a builtin's member
                with contextlib.suppress(AttributeError):  # the slot is empty
                    if member.__get__(holder) is child:
                        return name
    return None


def _dict_of(thing: Any) -> Any:
    try:
        return object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}


def _short(key: Any) -> str:
    text = repr(key) if isinstance(key, (str, int, float, bool)) else f"<{type(key).__name__}>"
    return text if len(text) <= 40 else f"{text[:39]}…"
