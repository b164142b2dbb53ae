"""Tracks objects that belong to one iteration: meshes, process groups, wrapped modules.

Weak references, taken when the objects are made, show after a restart which of them are still alive. The
collector could not show this: it does not list objects that ``gc.freeze`` froze.

Tracking costs a training step nothing. Meshes are made by one method, which is wrapped during a call. Groups
are tracked when they are released. ``DistributedDataParallel`` and FSDP1 register the module that they wrap,
and torch then calls a hook. FSDP2 keeps its own weak references.
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

# Names under which torch's wrappers register a module, with where they are. FSDP1's may not be imported.
_WRAPS = {"module": "torch.nn.parallel.distributed", "_fsdp_wrapped_module": "torch.distributed.fsdp"}


class Tracker:
    """The objects that this process has made in the iterations of one wrapped call.

    Attributes:
        exempt_holders: objects such as live states: everything they hold survives iterations on purpose.
    """

    def __init__(self) -> None:
        self.exempt_holders: dict[int, Any] = {}  # by id
        # Weak references, by id, with the iteration that made the object.
        self._tracked: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._iteration = 0
        self._last_count = 0
        self._hooks = contextlib.ExitStack()

    def open(self) -> None:
        """Starts tracking."""
        self._track_objects_of(DeviceMesh, "__init__")
        if "__setstate__" in vars(DeviceMesh):  # for copies, and meshes in a loaded checkpoint
            self._track_objects_of(DeviceMesh, "__setstate__")
        register: Any = register_module_module_registration_hook
        self._hooks.callback(register(self._track_wrapper).remove)

    def close(self) -> None:
        """Stops tracking new objects. Tracked objects stay tracked as long as they live."""
        self._hooks.close()
        self.exempt_holders = {}

    def enter(self, iteration: int) -> None:
        """Begins an iteration: objects made from now on belong to it."""
        nccl.mark_entry()
        self._track_sharded_modules()
        self._iteration = iteration

    def track(self, made: object) -> None:
        """Tracks an object that was just made."""
        tracked = self._tracked
        reference = weakref.ref(made, lambda gone: tracked.pop(id(gone), None))
        tracked[id(reference)] = reference, self._iteration

    def exempt(self, holder: Any) -> Any:
        """Exempts everything that an object holds; returns this object."""
        return self.exempt_holders.setdefault(id(holder), holder)

    def earlier(self) -> list[tuple[Any, int]]:
        """The living objects of earlier iterations, with the iterations' numbers, the oldest first."""
        self._track_sharded_modules()
        pairs = [(reference(), n) for reference, n in list(self._tracked.values())]
        return [(made, n) for made, n in pairs if made is not None and n < self._iteration]

    def warn(self) -> None:
        """At the end of an iteration, warns if more objects of earlier iterations are alive than before.

        Process groups do not count: they end in the background, up to 40 ms after a restart, and a quick
        second restart would warn of groups about to end. With a live state nothing counts: it makes sharded
        modules again, and the old ones may wait for the collector.
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
        """Wraps a method that makes objects of a class, until `close`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(made: Any, *arguments: Any, **options: Any) -> Any:
            self.track(made)
            return original(made, *arguments, **options)

        def put_back() -> None:
            if vars(owner).get(name) is wrapped:  # otherwise another program has wrapped it, too
                setattr(owner, name, original)

        setattr(owner, name, wrapped)
        self._hooks.callback(put_back)

    def _track_wrapper(self, module: Any, name: str, _: Any) -> None:
        if name in _WRAPS and any(kind.__module__.startswith(_WRAPS[name]) for kind in type(module).__mro__):
            self.track(module)

    def _track_sharded_modules(self) -> None:
        """Tracks FSDP2's modules, which torch lists by weak references. A collection leaves almost none."""
        composable = sys.modules.get("torch.distributed._composable_state")
        modules = list(getattr(composable, "_module_state_mapping", ()))
        known = {id(reference()) for reference, _ in list(self._tracked.values())} if modules else set()
        for module in modules:
            if id(module) not in known:
                self.track(module)


#: The tracker of the current call, or of the last one.
current = Tracker()


def begin_tracking() -> Tracker:
    """Makes the tracker of a call, and starts tracking."""
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
