"""What is done for all members once an iteration is on, by one of them, off the path of a restart.

Nothing here is needed for safety, and whatever is left undone the next one to do it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from . import keys
from .operations import StoreOperations
from .records import Entered, Head, Member, View, split_entry, to_number
from .steps import Read, ReadLog


class HousekeepingMixin(StoreOperations):
    """Notes for those who join later, and the deletion of past keys (DESIGN.md, I8)."""

    def wanted(self) -> int:
        """The most active ranks that any iteration had; with fewer the job is degraded. 0: not known yet."""
        return to_number(self.try_get(keys.WANTED) or "0", keys.WANTED)

    def active_in(self, n: int) -> int:
        """The number of active ranks of n; 0 if no one has entered it yet."""
        return _active_in(n, self.try_get(keys.world(n)))

    def may_be_active(self, n: int, member: Member) -> bool:
        """Whether a member may be an active rank of n, for those who do not know the rank assignment.

        False only once others have all of the active ranks: then it is a spare in n.

        Args:
            n: the iteration.
            member: who.
        """
        sizes, log = self.carry_out([Read(keys.world(n)), ReadLog(keys.entered(n))])
        entered = _entered_in(n, (log or "").splitlines())
        if member in entered:
            return entered[member].active_rank is not None
        taken = {one.active_rank for one in entered.values()} - {None}
        return sizes is None or len(taken) < _active_in(n, sizes)

    def entered_in(self, n: int) -> dict[Member, Entered]:
        """The members that are about to enter n, or have entered it: O(world size)."""
        return _entered_in(n, self.log_read(keys.entered(n)))

    def note_wanted(self, n: int) -> bool:
        """Raises `wanted` to the active ranks of n; tells whether they are known yet."""
        sizes, wanted = self.carry_out([Read(keys.world(n)), Read(keys.WANTED)])
        active = _active_in(n, sizes)
        if active > to_number(wanted or "0", keys.WANTED):
            self.set(keys.WANTED, str(active))
        return active > 0

    def note_settled(self, n: int) -> None:
        """Says that n has been on for a while: a restart from it is not one of a crash loop."""
        self.set(keys.SETTLED, str(n))

    def restless(self, n: int) -> int:
        """How many iterations in a row before n ended before they had been on for a while."""
        settled = self.try_get(keys.SETTLED)
        last = keys.BEFORE_FIRST if settled is None else to_number(settled, keys.SETTLED)
        return max(0, n - last - 1)

    def past_keys(self, view: View, names: Sequence[str]) -> list[str]:
        """Which keys are those of iterations two back and more, of past calls, and of superseded members.

        Who is in ``view`` has left the iteration before it, so no one who is still in reads anything older.
        Who is out may write late: a few keys, which the next one to clean up finds. A member counts as
        superseded when a newer one of its slot is in; where none is, when a newer one has been started.

        Args:
            view: the iteration that is on.
            names: all keys, as they were a moment ago.

        Returns:
            Their names, to be deleted; none if another iteration is on meanwhile, in which others may be.
        """
        head = self.try_get(keys.HEAD)
        if head is None or Head.parse(head, keys.HEAD).n != view.n:
            return []
        newest: dict[int, int] = {}
        for name in names:
            if member := keys.member_of(name):
                newest[member[0]] = max(member[1], newest.get(member[0], 0))
        newest.update((member.slot, member.incarnation) for member in view.members)
        return [name for name in names if _is_past(name, view, newest)]

    def shared_hearts(self, names: Iterable[str], most: int) -> dict[str, int]:
        """How far the shared hearts are, where there are more than there can be members that have one.

        Args:
            names: all keys.
            most: the number of members.

        Returns:
            By key; empty where they are no more.
        """
        hearts = [name for name in names if keys.is_shared_heart(name)]
        return {heart: self.beats(heart) for heart in hearts} if len(hearts) > most else {}

    def still_hearts(self, seen: Mapping[str, int]) -> list[str]:
        """Those of them that have not beaten since. One that beats after all, is there again by that."""
        return [heart for heart, beats in seen.items() if self.beats(heart) == beats]

    def delete_past(self, view: View) -> int:
        """Deletes `past_keys` at once; gives their number."""
        past = self.past_keys(view, self.list_keys())
        self.delete_keys(past)
        return len(past)


def _active_in(n: int, sizes: str | None) -> int:
    key = keys.world(n)
    return 0 if sizes is None else to_number(split_entry(sizes, 2, key)[1], key)


def _entered_in(n: int, log: Iterable[str]) -> dict[Member, Entered]:
    key = keys.entered(n)
    entries = (Entered.parse(line, key) for line in log)
    return {entry.member: entry for entry in entries}


def _is_past(name: str, view: View, newest: dict[int, int]) -> bool:
    n = keys.iteration_of(name)
    if n is not None:
        return keys.BEFORE_FIRST < n < view.n - 1
    member = keys.member_of(name)
    if member is not None:
        return member[1] < newest[member[0]]
    call = keys.call_of(name)
    return call is not None and call < view.call
