"""Tracking what belongs to one iteration: meshes, process groups, wrapped modules.

Weak references to them, taken when they are made, tell after a restart what is still alive. Asking the
collector for all objects would not: what ``gc.freeze`` froze is in none of its lists.

Each kind is noticed where that costs a training step nothing. Meshes are made by one method, which is wrapped
for the length of a call. Groups are tracked when they are released. ``DistributedDataParallel`` and FSDP1,
whenever they are imported, register the module that they wrap, and torch calls a hook then. FSDP2 keeps weak
references of its own.
"""

import collections
import contextlib
import functools
import logging
import sys
import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_module_registration_hook

from . import nccl

log = logging.getLogger(__name__)

# Classes that wrap a module, by the name that they register it under. FSDP1's may not be imported.
_WRAPPERS = {
    "module": "torch.nn.parallel.distributed.DistributedDataParallel",
    "_fsdp_wrapped_module": "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
}


class Tracker:
    """What this process has made in the iterations of one wrapped call.

    Attributes:
        exempt_holders: what these hold, in whatever way, survives iterations on purpose: live states.
    """

    def __init__(self) -> None:
        self.exempt_holders: dict[int, Any] = {}  # by their id
        # Weak references, by their id, with the iteration in which the object was made.
        self._tracked: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._iteration = 0
        self._last_count = 0
        self._hooks = contextlib.ExitStack()

    def open(self) -> None:
        """Starts tracking."""
        self._track_objects_of(DeviceMesh, "__init__")
        if "__setstate__" in vars(DeviceMesh):  # a loaded checkpoint's, or a copy
            self._track_objects_of(DeviceMesh, "__setstate__")
        register: Any = register_module_module_registration_hook
        self._hooks.callback(register(self._track_wrapper).remove)

    def close(self) -> None:
        """Stops tracking. What is tracked stays so, as long as it lives."""
        self._hooks.close()
        self.exempt_holders = {}

    def enter(self, iteration: int) -> None:
        """Begins an iteration: what is made from now on belongs to it."""
        nccl.mark_entry()
        self._track_sharded_modules()
        self._iteration = iteration

    def track(self, made: object) -> None:
        """Tracks an object that was just made."""
        tracked = self._tracked
        reference = weakref.ref(made, lambda gone: tracked.pop(id(gone), None))
        tracked[id(reference)] = reference, self._iteration

    def exempt(self, holder: Any) -> Any:
        """Exempts what an object holds, in whatever way; returns that object."""
        return self.exempt_holders.setdefault(id(holder), holder)

    def earlier(self) -> list[tuple[Any, int]]:
        """What lives of iterations before the present one, with their numbers, the oldest first."""
        self._track_sharded_modules()
        pairs = [(reference(), n) for reference, n in list(self._tracked.values())]
        return [(made, n) for made, n in pairs if made is not None and n < self._iteration]

    def warn(self) -> None:
        """At the end of an iteration, warns of what lives of earlier ones, each time that it is more.

        Process groups do not count: they end in the background, up to 40 ms after a restart, and a quick
        second restart would warn of what is about to go. Nor does anything while there is a live state: it
        makes sharded modules again, and the old ones may wait for the collector.
        """
        earlier = self.earlier() if not self.exempt_holders else []
        kinds = collections.Counter(kind_of(made) for made, _ in earlier)
        del kinds["ProcessGroup"]
        if kinds.total() > self._last_count:
            self._last_count = kinds.total()
            said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            words = "objects of earlier iterations are still alive, with their memory: %s; "
            words += "ft_wrapper.find_leaks(), called in the function, finds what holds them"
            log.warning(words, said)

    def _track_objects_of(self, owner: Any, name: str) -> None:
        """Wraps a method that makes objects of a class, until the end."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(made: Any, *arguments: Any, **options: Any) -> Any:
            self.track(made)
            return original(made, *arguments, **options)

        def put_back() -> None:
            if vars(owner).get(name) is wrapped:  # else another program has put its own around it
                setattr(owner, name, original)

        setattr(owner, name, wrapped)
        self._hooks.callback(put_back)

    def _track_wrapper(self, module: Any, name: str, _: Any) -> None:
        wrapper = _WRAPPERS.get(name)
        if wrapper and any(f"{kind.__module__}.{kind.__name__}" == wrapper for kind in type(module).__mro__):
            self.track(module)

    def _track_sharded_modules(self) -> None:
        """Those of FSDP2, of which torch keeps weak references. After a collection next to none are left."""
        composable = sys.modules.get("torch.distributed._composable_state")
        modules = list(getattr(composable, "_module_state_mapping", ()))
        known = {id(reference()) for reference, _ in list(self._tracked.values())} if modules else set()
        for module in modules:
            if id(module) not in known:
                self.track(module)


#: That of the present call, or of the last one.
current = Tracker()


def begin_tracking() -> Tracker:
    """Begins a call's."""
    global current
    current = Tracker()
    current.open()
    return current


def kind_of(made: object) -> str:
    """``DeviceMesh``, ``ProcessGroup``, or the class of a wrapped module."""
    for kind in (torch.distributed.ProcessGroup, DeviceMesh):
        if isinstance(made, kind):
            return kind.__name__
    return type(made).__name__
