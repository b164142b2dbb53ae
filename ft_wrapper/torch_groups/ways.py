"""Ways from a module's global, a frame or a thread to objects: who holds what should be gone.

Walked forward, from what is always alive, by ``gc.get_referents``. The collector's own way back,
``gc.get_referrers``, does not see what ``gc.freeze`` froze. Short ways are tried before long ones, and the
user's modules before those of libraries and code: most of the time the rest need not be walked.

Of what was walked only numbers are kept, so that nothing lives longer for it than it takes to look at it.
"""

import collections
import functools
import gc
import inspect
import itertools
import operator
import os
import sys
import threading
import types
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

import torch

from ..monitor.frames import current_frames, is_library
from .made import Made

_ATOMS = frozenset(
    {str, bytes, int, float, complex, bool, type(None), types.CodeType, torch.dtype, torch.device}
)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType)
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset, collections.deque})
_MOST_ENTRIES = 5_000  # of a container: a larger one would take more than a millisecond
_OPTIMIZED = inspect.CO_OPTIMIZED
_OURS = f"{__package__.partition('.')[0]}.live"

# By how many steps a way may be longer to be tried as early as one from a frame or a module of the user's.
_OF_USER, _OF_LIBRARIES, _OF_TORCH, _OF_PYTHON = 0, 1, 3, 5
_THROUGH_CODE = 3
_LONGEST = 40  # ways that are longer are tried in any order


class Walk:
    """A search for the ways to things.

    Args:
        things: what is searched for.
        spared: what these hold, by whatever way, is not reported.
        unseen: objects that are not walked through: those of the search itself.
        caller: the frame, with its callers, of the thread that searches; None: of that thread none.
        whole: look into containers of any size, too.

    Attributes:
        found: the way to each thing that was found.
        within: things to which the only ways found lead through others.
        kept: things that are spared.
    """

    def __init__(
        self,
        things: Collection[Made],
        spared: Collection[object],
        *,
        unseen: Collection[object] = (),
        caller: FrameType | None = None,
        whole: bool = True,
    ) -> None:
        self.found: dict[Made, str] = {}
        self.within: set[Made] = set()
        self.kept: set[Made] = set()
        self._wanted = {id(thing): made for made in things if (thing := made()) is not None}
        self._most = sys.maxsize if whole else _MOST_ENTRIES
        self._parents: dict[int, int] = {}
        self._roots: dict[int, tuple[str, str]] = {}
        self._caller = caller
        self._spared: collections.deque[Any] = collections.deque(spared)
        self._inner: collections.deque[Any] = collections.deque()
        self._queues = [collections.deque[Any]() for _ in range(_LONGEST + 1)]
        for thing in (
            unseen,
            *unseen,
            *spared,
            sys.modules,
            self,
            vars(self),
            self._queues,
            *self._queues,
        ):
            self._parents[id(thing)] = 0

    def steps(self) -> Iterator[None]:
        """Walks, an object a step."""
        modules = [(name, each) for name, each in list(sys.modules.items()) if _is(each, types.ModuleType)]
        for _, module in modules:
            self._parents[id(module)] = self._parents[id(vars(module))] = 0
        yield
        while self._spared:
            self._spare(self._spared.popleft())
            yield
        if not self._wanted:
            return
        for name, where, value in _locals(self._caller):
            self._begin(name, where, value)
        for thread in threading.enumerate():
            if thread.ident != threading.get_ident():
                self._begin(f"thread {thread.name!r}", "", thread)
        yield
        for name, module in modules:
            self._roots.setdefault(id(vars(module)), (name, ""))
            self._queues[_lateness(name, module)].append(vars(module))
            yield
        del modules
        for number, queue in enumerate(self._queues):
            while queue:
                self._look(queue.popleft(), number)
                yield
                if not self._wanted:
                    return
        yield from self._inside()
        # What no way leads to may still hold others: models their meshes, and these their groups.
        lost = list(self._wanted.values())
        for made in sorted(lost, key=_depth):
            if made not in self.within and (thing := made()) is not None:
                self._wanted.pop(id(thing), None)
                self._inner.append(thing)
                del thing
                yield from self._inside()

    def _inside(self) -> Iterator[None]:
        while self._inner and self._wanted:
            self._look_within(self._inner.popleft())
            yield
        self._inner.clear()

    def _begin(self, name: str, where: str, value: Any) -> None:
        if type(value) not in _ATOMS and id(value) not in self._parents:
            self._roots[id(value)] = name, where
            self._meet(value, 0, _OF_USER)

    def _look(self, thing: Any, number: int) -> None:
        if type(thing) in _CONTAINERS and len(thing) > self._most:
            return
        parent, parents, meet = id(thing), self._parents, self._meet
        for child in gc.get_referents(thing):
            if type(child) not in _ATOMS and id(child) not in parents:
                meet(child, parent, number)

    def _meet(self, child: Any, parent: int, number: int) -> None:
        self._parents[id(child)] = parent
        made = self._wanted.get(id(child))
        if made is not None and made() is child:
            del self._wanted[id(child)]
            self.found[made] = self._way_to(child)
            self._inner.append(child)
        elif _is(child, torch.Tensor):
            # At once, and not kept until its turn comes: it may be large.
            self._look(child, number)
        elif _is(child, _CODE):
            self._queues[min(number + 1 + _THROUGH_CODE, _LONGEST)].append(child)
        elif _may_hold(child):
            self._queues[min(number + 1, _LONGEST)].append(child)

    def _look_within(self, thing: Any) -> None:
        for child in gc.get_referents(thing):
            if type(child) not in _ATOMS and id(child) not in self._parents and not _is(child, _CODE):
                self._parents[id(child)] = id(thing)
                made = self._wanted.get(id(child))
                if made is not None and made() is child:
                    self.within.add(made)
                    del self._wanted[id(child)]
                self._inner.append(child)

    def _spare(self, thing: Any) -> None:
        for child in gc.get_referents(thing):
            if type(child) not in _ATOMS and id(child) not in self._parents and not _is(child, _CODE):
                self._parents[id(child)] = 0
                made = self._wanted.pop(id(child), None)
                if made is not None:
                    self.kept.add(made)
                self._spared.append(child)

    # ---- in words

    def _way_to(self, thing: Any) -> str:
        chain = [id(thing)]
        while chain[-1] not in self._roots and self._parents.get(chain[-1]):
            chain.append(self._parents[chain[-1]])
        way, where = self._roots.get(chain[-1], ("?", ""))
        holder = self._root(chain.pop(), way)
        return _follow(way, None, holder, chain) + where

    def _root(self, number: int, name: str) -> Any:
        module = sys.modules.get(name)
        if module is not None and id(vars(module)) == number:
            return vars(module)
        for thread in threading.enumerate():
            if id(thread) == number:
                return thread
        return next((value for _, _, value in _locals(self._caller) if id(value) == number), None)


def _depth(made: Made) -> tuple[int, int]:
    """Sorts before others what may hold them."""
    thing = made()
    return 0 if _is(thing, torch.nn.Module) else 2 if _is(
        thing, torch.distributed.ProcessGroup
    ) else 1, -made.number


def _may_hold(thing: Any) -> bool:
    """Containers always: the collector does not look into those of groups alone, which C++ has made."""
    return gc.is_tracked(thing) or type(thing) in _CONTAINERS


def cycle_of(thing: Any) -> str | None:
    """The way from a thing through data to itself; None if there is none."""
    parents, todo = {id(sys.modules): 0}, collections.deque([thing])
    while todo:
        holder = todo.popleft()
        for child in gc.get_referents(holder):
            if child is thing:
                chain = [id(thing), id(holder)]
                while chain[-1] != id(thing):
                    chain.append(parents[chain[-1]])
                return _follow(type(thing).__name__, None, thing, chain[:-1])
            is_data = type(child) not in _ATOMS and not _is(child, (*_CODE, types.ModuleType))
            if is_data and id(child) not in parents and _may_hold(child):
                parents[id(child)] = id(holder)
                todo.append(child)
    return None


def _follow(way: str, before: Any, holder: Any, chain: list[int]) -> str:
    """A way in words, from where it begins along a chain of objects' numbers, the first one last."""
    while chain and holder is not None:
        number = chain.pop()
        child = next((each for each in gc.get_referents(holder) if id(each) == number), None)
        if child is None:
            return f"{way} …"
        way += _step(before, holder, child)
        before, holder = holder, child
    return f"{way} …" if chain else way


def _is(thing: Any, kinds: Any) -> bool:
    """As ``isinstance``, which asks a proxy for its ``__class__``, and may run its code."""
    return issubclass(type(thing), kinds)


def _step(before: Any, holder: Any, child: Any) -> str:
    """How a holder refers to its child, as a reader of the program would write it."""
    if _is(holder, dict):
        name = next((key for key, value in list(holder.items()) if value is child), None)
        if name is None:
            return " (a key)"
        if isinstance(name, str) and name.isidentifier() and _is_attributes(before, holder):
            return f".{name}"
        return f"[{_short(name)}]"
    if _is(holder, (list, tuple, collections.deque)):
        position = next((n for n, each in enumerate(list(holder)) if each is child), None)
        return "[…]" if position is None else f"[{position}]"
    if _is(holder, (set, frozenset)):
        return " (in a set)"
    if _is(holder, types.CellType):
        return ""
    if _is(holder, functools._lru_cache_wrapper):
        return "" if vars(holder) is child else " (its cache)"
    if _is_attributes(holder, child):
        return ""
    name = _attribute(holder, child)
    return f".{name}" if name is not None else f" ({type(holder).__name__}'s)"


def _is_attributes(owner: Any, content: Any) -> bool:
    """Whether this is the dict of an object's attributes."""
    if owner is None:
        return "__name__" in content  # a module's, where the way begins
    if _is(owner, type):
        return _is(content, dict)
    return _is(content, dict) and _dict_of(owner) is content


def _attribute(holder: Any, child: Any) -> str | None:
    names = [*_dict_of(holder)]
    for owner in type(holder).__mro__:
        slots = vars(owner).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    if _is(holder, types.FunctionType):
        names = ["__closure__", "__defaults__", "__kwdefaults__", *names]
    names += ["__self__", "__func__", "__wrapped__", "func", "args", "keywords"]
    for name in names:
        try:
            if (
                inspect.getattr_static(holder, name, None) is child
                or object.__getattribute__(holder, name) is child
            ):
                return str(name)
        except (AttributeError, TypeError):
            continue
    return None


def _dict_of(thing: Any) -> Any:
    try:
        return object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}


def _short(key: Any) -> str:
    text = repr(key) if isinstance(key, (str, int, float, bool)) else f"<{type(key).__name__}>"
    return text if len(text) <= 40 else f"{text[:39]}…"


def _lateness(name: str, module: types.ModuleType) -> int:
    first = name.partition(".")[0]
    if first in ("torch", "torchgen", "functorch"):
        return _OF_TORCH
    if first in sys.stdlib_module_names and first != "__main__":
        return _OF_PYTHON
    file = getattr(module, "__file__", None)
    return _OF_LIBRARIES if isinstance(file, str) and is_library(file) else _OF_USER


# ---- local variables


def _locals(caller: FrameType | None) -> Iterator[tuple[str, str, Any]]:
    """The local variables of all frames, with where that is; of this thread of ``caller`` and its callers."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    innermost: dict[int, FrameType | None] = {**current_frames(), threading.get_ident(): caller}
    for thread, frame in innermost.items():
        while frame is not None:
            code, following = frame.f_code, frame.f_back
            # A module's are its globals; a live state's helpers hold for a moment what is spared.
            if code.co_flags & _OPTIMIZED and not str(frame.f_globals.get("__name__")).startswith(_OURS):
                file = os.path.basename(code.co_filename)
                where = f" in {code.co_name} ({file}:{frame.f_lineno}), thread {names.get(thread, thread)!r}"
                for name, value in _read(frame).items():
                    yield name, where, value
            frame = following


def _read(frame: FrameType) -> dict[str, Any]:
    """A frame's local variables.

    Before Python 3.13 looking at them leaves a copy in the frame, which would keep all that they were until
    the frame ends, or is looked at again: it is emptied. Not if someone else has it from ``locals()``, nor
    where a debugger is about to write it back.
    """
    found = dict(frame.f_locals)
    if sys.version_info < (3, 13) and frame.f_trace is None:
        _empty([frame.f_locals], _ALONE)
    return found


def _empty(one: list[dict[str, Any]], references: int) -> None:
    """Empties a dict that has so many references; all in C, so that no thread gets another one in between."""
    counts = map(sys.getrefcount, one)
    emptied = map(dict.clear, itertools.compress(one, map(operator.eq, counts, itertools.repeat(references))))
    collections.deque(emptied, maxlen=0)


def _count_alone() -> int:
    """How many references `_empty` sees to a dict that but one other object refers to."""
    for references in range(1, 10):
        held = [{"": None}]
        _empty([held[0]], references)
        if not held[0]:
            return references
    return 0


_ALONE = _count_alone()
