"""Where a rank stood when it hung: in which collective, and how far it was in each process group."""

import dataclasses

# They wait for one peer, not for all.
_POINT_TO_POINT = {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"}


@dataclasses.dataclass(frozen=True)
class Counted:
    """How far a rank was in a process group.

    Args:
        group: the group's name, the same on all of its ranks.
        size: how many ranks it has.
        number: how many operations the rank had begun.
        is_exact: whether these are collectives only, so that ranks that have come equally far have the same
            number. Gloo counts ``send`` and ``recv``, too.
    """

    group: str
    size: int
    number: int
    is_exact: bool


@dataclasses.dataclass(frozen=True)
class Stood:
    """What a rank was doing with ``torch.distributed``.

    Args:
        operation: the function that it stood in; empty if in none.
        group: the process group of that; empty if it is not known.
        counts: its groups, the first eight of them.
    """

    operation: str = ""
    group: str = ""
    counts: tuple[Counted, ...] = ()

    @property
    def in_collective(self) -> bool:
        """Whether it waited for all ranks of a group."""
        return bool(self.group) and self.operation not in _POINT_TO_POINT

    def number_in(self, group: str) -> int | None:
        """How many operations it had begun in a group; None if that is not known."""
        return next((count.number for count in self.counts if count.group == group), None)

    def __str__(self) -> str:
        number = self.number_in(self.group)
        which = "" if number is None else f" #{number}"
        return f"{self.operation}{which} of group {self.group}" if self.group else self.operation


#: Nothing is known of where it stood.
UNKNOWN = Stood()
