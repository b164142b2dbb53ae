"""Leaks: objects of earlier iterations that are still alive, and what holds them."""

import dataclasses
import sys
import warnings

import torch

from . import tracker
from .referrers import cycle_of, find_paths, reached_by_data
from .release import wait_for_released_groups
from .tracker import kind_of

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
    exempt, _ = reached_by_data(tracker.current.exempt_holders.values(), [made for made, _ in living])
    living = [(made, n) for made, n in living if not any(made is other for other in exempt)]
    if not living:
        return []
    # The holders first: a module holds its mesh, and a mesh its groups.
    wanted = sorted([made for made, _ in reversed(living)], key=_depth)
    paths, within = find_paths(wanted, sys._getframe(1))
    leaks = []
    for made, n in living:
        path, is_within = paths.get(id(made)), id(made) in within
        cycle = cycle_of(made) if path is None and not is_within else None
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
