"""What the function makes that belongs to one iteration: meshes, process groups, wrapped modules.

Weak references to them, taken when they are made, tell after a restart what is still alive. Asking the
collector for all objects would not: what ``gc.freeze`` froze is in none of its lists.

Each kind is noticed where that costs a training step nothing. Meshes are made by one method, which is wrapped
for the length of a call. Groups are noted when they are released. ``DistributedDataParallel`` and FSDP1,
whenever they are imported, register the module that they wrap, and torch tells of that. FSDP2 keeps weak
references of its own.
"""

import collections
import contextlib
import functools
import itertools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import nccl

log = logging.getLogger(__name__)

_numbers = itertools.count()
# As what `DistributedDataParallel` and `FullyShardedDataParallel` register the module that they wrap.
_REGISTERED_AS = frozenset({"module", "_fsdp_wrapped_module"})


class Made(NamedTuple):
    """A thing that was made in an iteration.

    Args:
        thing: a weak reference to it.
        iteration: its number, as the function knows it.
        entry: tells iterations of this process apart; a later one has a higher number.
        number: tells things apart; a later one has a higher number.
    """

    thing: weakref.ref[Any]
    iteration: int
    entry: int
    number: int


class Things:
    """What this process has made in the iterations of one wrapped call.

    Attributes:
        spared: what these hold, by whatever way, stays on purpose: live states.
    """

    def __init__(self) -> None:
        self.spared: list[object] = []
        self._living: dict[int, Made] = {}
        self._iteration = 0
        self._entry = 0
        self._warned_of = 0
        self._hooks = contextlib.ExitStack()

    def open(self) -> None:
        """Begins to notice what is made."""
        self._notice_meshes()
        self._notice_wrapped_modules()

    def close(self) -> None:
        """Ends it. What was noticed stays, as long as it lives."""
        self._hooks.close()
        self.spared = []

    def enter(self, iteration: int) -> None:
        """Says that an iteration begins: what is made from now on is of that one."""
        nccl.note_entry()
        self._note_sharded_modules()
        self._iteration = iteration
        self._entry += 1

    def note(self, thing: object) -> None:
        """Notes a thing that was just made."""
        number, living = next(_numbers), self._living
        reference = weakref.ref(thing, lambda _: living.pop(number, None))
        living[number] = Made(reference, self._iteration, self._entry, number)

    def spare(self, holder: Any) -> Any:
        """Says that what ``holder`` holds, by whatever way, is to outlive its iteration; returns it."""
        if not any(each is holder for each in self.spared):
            self.spared.append(holder)
        return holder

    def earlier(self) -> list[Made]:
        """What lives of earlier iterations than the present one, the oldest first."""
        self._note_sharded_modules()
        return [each for each in list(self._living.values()) if each.entry < self._entry]

    def warn(self) -> None:
        """At the end of an iteration, warns of what lives of earlier ones, each time that it is more.

        Process groups do not count: they end in the background, up to 40 ms after a restart, and a quick
        second restart would warn of what is about to go. Nor does anything while there is a live state: it
        makes sharded modules again, and the old ones may wait for the collector.
        """
        earlier = self.earlier() if not self.spared else []
        kinds = collections.Counter(kind_of(thing) for each in earlier if (thing := each.thing()) is not None)
        del kinds["ProcessGroup"]
        if kinds.total() > self._warned_of:
            self._warned_of = kinds.total()
            said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            words = "objects of earlier iterations are still alive, with their memory: %s; "
            log.warning(words + "ft_wrapper.leftovers(), called in the function, finds who holds them", said)

    # ---- noticing

    def _notice_meshes(self) -> None:
        mesh: Any = sys.modules["torch.distributed.device_mesh"].DeviceMesh
        self._wrap(mesh, "__init__", self._noting_self)
        if "__setstate__" in vars(mesh):  # a loaded checkpoint's, or a copy
            self._wrap(mesh, "__setstate__", self._noting_self)

    def _notice_wrapped_modules(self) -> None:
        def notice(module: Any, name: str, _: Any) -> None:
            if name in _REGISTERED_AS and _wraps(module):
                self.note(module)

        register: Any = torch.nn.modules.module.register_module_module_registration_hook
        self._hooks.callback(register(notice).remove)

    def _note_sharded_modules(self) -> None:
        """Those of FSDP2, of which torch keeps weak references. After a collection next to none are left."""
        composable = sys.modules.get("torch.distributed._composable_state")
        modules = list(getattr(composable, "_module_state_mapping", ()))
        known = {id(each.thing()) for each in list(self._living.values())} if modules else set()
        for module in modules:
            if id(module) not in known:
                self.note(module)

    def _wrap(self, owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        ours = functools.wraps(original)(wrapping(original))

        def put_back() -> None:
            if vars(owner).get(name) is ours:  # else another program has put its own around it
                setattr(owner, name, original)

        setattr(owner, name, ours)
        self._hooks.callback(put_back)

    def _noting_self(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(made: Any, *arguments: Any, **options: Any) -> Any:
            self.note(made)
            return original(made, *arguments, **options)

        return run


#: Those of the present call, or of the last one.
things = Things()


def begin() -> Things:
    """Begins a call's."""
    global things
    things = Things()
    things.open()
    return things


def kind_of(thing: object) -> str:
    """``DeviceMesh``, ``ProcessGroup``, or the class of a wrapped module."""
    if isinstance(thing, torch.distributed.ProcessGroup):
        return "ProcessGroup"
    is_mesh = isinstance(thing, torch.distributed.device_mesh.DeviceMesh)
    return "DeviceMesh" if is_mesh else type(thing).__name__


def _wraps(module: Any) -> bool:
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return True
    fsdp: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
