"""Leaks: objects of earlier iterations that are still alive, with their holders.

A forward search from the globals of modules and from the frames of threads finds the holders. The collector's
backward search, ``gc.get_referrers``, finds neither ``{"dp": group}`` nor ``(group,)``: the collector does
not track containers that hold only C++ objects. Nor does it look at frozen objects.
"""

import collections
import contextlib
import dataclasses
import gc
import inspect
import os
import reprlib
import sys
import threading
import traceback
import types
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
            holder = f"itself ({self.cycle}), until the collector runs, or by C++"
        else:
            holder = self.referrer or "no module, frame or thread, so by C++"
        loss = _LOSSES.get(self.kind, "its memory and its process groups stay")
        return f"{article} {self.kind} of iteration {self.iteration} is held by {holder}: {loss}"


def find_leaks() -> list[Leak]:
    """Finds objects of earlier iterations that are still alive, and their holders.

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
    exempt = _reach(tracker.current.exempt_holders.values(), _seen_globals())
    living = [(made, n) for made, n in reversed(tracker.current.earlier()) if id(made) not in exempt]
    if not living:
        return []
    paths = _find_paths({id(made): made for made, _ in living}, sys._getframe(1))
    # Holders first: a module holds its mesh, a mesh its groups; of two modules the newer is the outer one.
    living.sort(key=lambda one: (id(one[0]) not in paths, _depth(one[0])))
    held, leaks = _seen_globals(), list[Leak]()
    for made, n in living:
        path = paths.get(id(made))
        is_within = path is None and id(made) in held
        cycle = None if path or is_within else _cycle_of(made)
        leaks.append(Leak(kind_of(made), n, path, cycle, is_within))
        _reach([made], held)
    return sorted(leaks, key=lambda leak: (leak.within, leak.iteration))


def _depth(made: object) -> int:
    return 0 if isinstance(made, torch.nn.Module) else 2 if kind_of(made) == "ProcessGroup" else 1


# What refers to an object -----------------------------------------------------------------------------------


def _find_paths(wanted: dict[int, Any], caller: FrameType) -> dict[int, str]:
    """Finds paths to objects, among all objects of the process.

    Args:
        wanted: the objects to find, by their ids.
        caller: frame of the searching thread; the search covers this frame and its callers.

    Returns:
        The paths, by the id of the object. None leads through another wanted object.
    """
    roots: dict[int, _Root] = {}
    for root in (*_modules(), *_locals(caller)):
        roots.setdefault(id(root[0]), root)  # a module may have two names
    parents: _Parents = {id(sys.modules): None, **dict.fromkeys(roots)}
    _reach([variables for variables, *_ in roots.values()], parents, wanted)
    paths = {}
    for each in wanted.keys() & parents.keys():
        variables, *chain = _chain(wanted[each], parents, roots)
        _, before, after = roots[id(variables)]
        name = next((name for name, value in list(variables.items()) if value is chain[0]), "…")
        paths[each] = before + name + _describe(chain) + after
    return paths


def _cycle_of(thing: object) -> str | None:
    """The path from an object through data to itself; None if there is none."""
    parents = _reach([thing], _seen_globals())
    if id(thing) not in parents:
        return None
    return type(thing).__name__ + _describe(_chain(thing, parents, {id(thing)}))


def _reach(holders: Iterable[Any], parents: _Parents, wanted: Collection[int] | None = None) -> _Parents:
    """Visits the objects that are not yet in ``parents``, short paths first, and adds them to it.

    Args:
        holders: the objects to begin at.
        parents: see `_Parents`.
        wanted: ids of objects at which to stop. Then it also goes through code, which leads to its module's
            globals. None: it goes only through data, not through classes, functions and modules.

    Returns:
        ``parents``.
    """
    queue = collections.deque(holders)
    while queue:
        holder = queue.popleft()
        for child in gc.get_referents(holder):
            kind = type(child)  # not isinstance(), which would run a proxy's code
            if kind in _ATOMS or id(child) in parents or (wanted is None and issubclass(kind, _CODE)):
                continue
            parents[id(child)] = holder
            if wanted is None or id(child) not in wanted:
                queue.append(child)
    return parents


# ---- where a search may begin, or must not go


def _modules() -> Iterator[_Root]:
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType):
            yield vars(module), f"{name}.", ""


def _seen_globals() -> _Parents:
    return {id(sys.modules): None, **{id(variables): None for variables, *_ in _modules()}}


def _locals(caller: FrameType) -> Iterator[_Root]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread, innermost in {**current_frames(), threading.get_ident(): caller}.items():
        for frame, line in traceback.walk_stack(innermost):
            code, module = frame.f_code, str(frame.f_globals.get("__name__"))
            # Not a module's frame, whose variables are its globals; nor a live state's helpers, which briefly
            # hold exempt objects.
            if code.co_flags & inspect.CO_OPTIMIZED and not module.startswith(_OURS):
                place = f"{code.co_name} ({os.path.basename(code.co_filename)}:{line})"
                yield _read(frame), "", f" in {place}, thread {names.get(thread, thread)!r}"


def _read(frame: FrameType) -> dict[str, Any]:
    """A frame's local variables."""
    copy = frame.f_locals
    found = dict(copy)
    # Before Python 3.13 the copy stays in the frame, and would keep old values until the frame ends. It is
    # not cleared if other code has it from ``locals()``, or if a debugger is about to write it back.
    if sys.version_info < (3, 13) and frame.f_trace is None and sys.getrefcount(copy) == 3:
        copy.clear()
    return found


# ---- describing a path


def _chain(thing: object, parents: _Parents, roots: Collection[int]) -> list[Any]:
    """The objects on the path to an object, from the start of the path to the object itself."""
    chain = [thing, parents[id(thing)]]
    while id(chain[-1]) not in roots:
        chain.append(parents[id(chain[-1])])
    return chain[::-1]


def _describe(chain: list[Any]) -> str:
    """Describes how the first object of a chain leads to the last one, as a Python expression would."""
    words, holder = "", chain[0]
    for child in chain[1:]:
        step = next((step for step, value in _steps(holder) if value is child), None)
        is_of_class = step is None and issubclass(type(holder), type) and type(child) is dict
        if child is not _dict_of(holder) and not is_of_class:  # otherwise the next step names the attribute
            words += step or f" (in a {type(holder).__name__})"
            holder = child
    return words


def _steps(holder: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a holder leads to, as far as Python has an expression for the step."""
    kind = type(holder)
    for name, value in list(_dict_of(holder).items()):
        yield f".{name}", value
    if issubclass(kind, dict):
        for key, value in list(dict.items(holder)):
            yield f"[{reprlib.repr(key) if type(key) in _ATOMS else f'<{type(key).__name__}>'}]", value
    elif issubclass(kind, (list, tuple, collections.deque)):
        for index, value in enumerate(list(holder)):
            yield f"[{index}]", value
    for owner in kind.__mro__:
        for name, member in list(vars(owner).items()):
            if type(member) is types.MemberDescriptorType:  # a slot, or a builtin's member
                with contextlib.suppress(AttributeError):  # the slot is empty
                    yield f".{name}", member.__get__(holder)


def _dict_of(thing: Any) -> Any:
    try:
        return object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}
