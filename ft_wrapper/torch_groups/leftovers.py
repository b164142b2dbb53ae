"""What of earlier iterations is still alive, and who holds it: `leftovers`."""

import dataclasses
import sys
from collections.abc import Collection

from . import await_released_groups, made
from .made import Made, kind_of
from .ways import Walk, cycle_of

_RELEASED_WITHIN = 10.0  # seconds


@dataclasses.dataclass(frozen=True)
class Leftover:
    """A thing of an earlier iteration that is still alive.

    Args:
        what: its kind: ``DeviceMesh``, ``ProcessGroup``, the class of a wrapped module.
        iteration: the one that it was made in.
        held_by: the way to it from a module's global, a frame or a thread; None if none was found.
        cycle: the way from it to itself, if there is one: then it may only wait for the collector, which
            never looks at what ``gc.freeze`` froze.
        within: whether it is only held by way of others that are left over.
    """

    what: str
    iteration: int
    held_by: str | None
    cycle: str | None = None
    within: bool = False

    def __str__(self) -> str:
        """One line."""
        article = "an" if self.what.startswith(("FSDP", "A", "E", "I", "O")) else "a"
        if self.within:
            holder = "is held by another leftover"
        elif self.held_by is not None:
            holder = f"is held by {self.held_by}"
        elif self.cycle is not None:
            holder = f"is held by itself ({self.cycle}), until the collector comes, or by C++"
        else:
            holder = "is held by no module, frame or thread, so by C++"
        stays = {
            "DeviceMesh": "its sockets and memory stay, and it may be taken for the new one",
            "ProcessGroup": "its sockets and threads stay",
        }.get(self.what, "its memory and its process groups stay")
        return f"{article} {self.what} of iteration {self.iteration} {holder}: {stays}"


def leftovers() -> list[Leftover]:
    """Looks for what the function has made in earlier iterations and what is still alive, and who holds it.

    Looked for are meshes (``DeviceMesh``), process groups, and modules in ``DistributedDataParallel``, FSDP1
    or FSDP2. Process groups kept by ``Wrapper(keep_groups=True)`` and what a `LiveState` holds do not
    count. In a test, call it in the wrapped function, after a restart. Process groups end in the background,
    which it waits for, at most 10 s.

    Where something is alive, all objects of the process are walked through. That may take seconds.

    Returns:
        What is alive, the oldest first, and last what others hold; empty if all is clean, or there was no
        restart.
    """
    await_released_groups(_RELEASED_WITHIN)
    things = made.things.earlier()
    if not things:
        return []
    walk = Walk(things, made.things.spared, caller=sys._getframe(1))
    for _ in walk.steps():
        pass
    return told(things, walk, cycles=True)


def told(things: Collection[Made], walk: Walk, *, cycles: bool = False) -> list[Leftover]:
    """What a walk has found, of what is still alive; with ``cycles``, also whether it holds itself."""
    left = []
    for each in things:
        thing = each()
        if thing is not None and each not in walk.kept:
            way, within = walk.found.get(each), each in walk.within
            cycle = cycle_of(thing) if way is None and not within and cycles else None
            left.append(Leftover(kind_of(thing), each.iteration, way, cycle, within))
        del thing
    return sorted(left, key=lambda each: each.within)  # by its number, else
