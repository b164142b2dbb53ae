"""What of earlier iterations is still alive, and who holds it: `leftovers`."""

import dataclasses
import sys

import torch

from . import tracker
from .referrers import cycle_of, reached_by_data, search
from .release import wait_for_released_groups
from .tracker import kind_of

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
    wait_for_released_groups(_RELEASED_WITHIN)
    living = [(each, thing) for each in tracker.things.earlier() if (thing := each.thing()) is not None]
    spared, _ = reached_by_data(tracker.things.spared, [thing for _, thing in living]) if living else ([], {})
    living = [(each, thing) for each, thing in living if not any(thing is other for other in spared)]
    if not living:
        return []
    # What no way leads to holds the rest: a module its mesh, and a mesh its groups.
    wanted = sorted(living, key=lambda pair: (_depth(pair[1]), -pair[0].number))
    ways, within = search([thing for _, thing in wanted], sys._getframe(1))
    left = []
    for each, thing in living:
        way, is_within = ways.get(id(thing)), id(thing) in within
        cycle = cycle_of(thing) if way is None and not is_within else None
        left.append(Leftover(kind_of(thing), each.iteration, way, cycle, is_within))
    return sorted(left, key=lambda each: each.within)


def _depth(thing: object) -> int:
    return 0 if isinstance(thing, torch.nn.Module) else 2 if kind_of(thing) == "ProcessGroup" else 1
