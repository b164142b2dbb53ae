"""What one member does for all once an iteration is on, off the path of a restart: notes, and past keys.

Nothing here is needed for safety, and whatever is left undone the next one to do it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from . import keys
from .operations import Delete, Operations, Read, read
from .operations import beats as number_of_beats
from .records import Head, View, active_in, to_number

# An iteration that was on for so many join windows is not one of a crash loop.
SETTLES_AFTER = 4
# Keys that are deleted at a time: a heart does this, and must not be late.
SLICE = 256


class Housekeeper:
    """Keeps the store in order while its member is rank 0 of the iteration.

    Args:
        store: where.
        join_window: seconds for which joins are gathered.
    """

    def __init__(self, store: Operations, join_window: float) -> None:
        self._store = store
        self._settles_after = SETTLES_AFTER * join_window
        self._n: int | None = None
        self._since = 0.0
        self._size_known = False
        self._settled = False
        self._past: list[str] = []  # keys that are to be deleted
        self._hearts: dict[str, int] = {}  # shared ones, as they were seen: some of them may beat no more

    def keep(self, view: View, rank: int | None) -> None:
        """Does what is due, or a part of it; called again and again.

        Args:
            view: the iteration that is on.
            rank: the member's rank in it; None while it is not known.
        """
        if rank is None:
            return  # the rank assignment is still at work
        if view.n != self._n:
            self._n, self._since = view.n, self._store.now()
            self._size_known = self._settled = False
            self._past, self._hearts = [], {}
            if rank == 0:
                names = self._store.list_keys()
                self._past = past_keys(self._store, view, names)
                self._hearts = shared_hearts(self._store, names, len(view.members))
        if rank != 0:
            return
        now, self._past = self._past[:SLICE], self._past[SLICE:]
        self._store.execute([Delete(tuple(now))])
        if not self._size_known:
            self._size_known = note_wanted(self._store, view.n)
        if not self._settled and self._store.now() - self._since >= self._settles_after:
            note_settled(self._store, view.n)
            self._past += still_hearts(self._store, self._hearts)
            self._settled = True


def note_wanted(store: Operations, n: int) -> bool:
    """Raises `wanted` to the active ranks of n; tells whether they are known yet."""
    sizes, wanted = store.execute([Read(keys.world(n)), Read(keys.WANTED)])
    active = active_in(n, sizes)
    if active > to_number(wanted or "0", keys.WANTED):
        store.set(keys.WANTED, str(active))
    return active > 0


def note_settled(store: Operations, n: int) -> None:
    """Says that n has been on for a while: a restart from it is not one of a crash loop."""
    store.set(keys.SETTLED, str(n))


def past_keys(store: Operations, view: View, names: Sequence[str]) -> list[str]:
    """Which keys are those of iterations two back and more, of past calls, and of superseded members.

    Who is in ``view`` has left the iteration before it, so no one who is still in reads anything older.
    Who is out may write late: a few keys, which the next one to clean up finds. A member counts as
    superseded when a newer one of its slot is in; where none is, when a newer one has been started.

    Args:
        store: where.
        view: the iteration that is on.
        names: all keys, as they were a moment ago.

    Returns:
        Their names, to be deleted; none if another iteration is on meanwhile, in which others may be.
    """
    head = read(store, keys.HEAD)
    if head is None or Head.parse(head, keys.HEAD).n != view.n:
        return []
    newest: dict[int, int] = {}
    for name in names:
        if member := keys.member_of(name):
            newest[member[0]] = max(member[1], newest.get(member[0], 0))
    newest.update((member.slot, member.incarnation) for member in view.members)
    return [name for name in names if _is_past(name, view, newest)]


def shared_hearts(store: Operations, names: Iterable[str], most: int) -> dict[str, int]:
    """How far the shared hearts are, where there are more than there can be members that have one.

    Args:
        store: where.
        names: all keys.
        most: the number of members.

    Returns:
        By key; empty where they are no more.
    """
    hearts = [name for name in names if keys.is_shared_heart(name)]
    return {heart: number_of_beats(store, heart) for heart in hearts} if len(hearts) > most else {}


def still_hearts(store: Operations, seen: Mapping[str, int]) -> list[str]:
    """Those of them that have not beaten since. One that beats after all, is there again by that."""
    return [heart for heart, beats in seen.items() if number_of_beats(store, heart) == beats]


def delete_past(store: Operations, view: View) -> int:
    """Deletes `past_keys` at once; gives their number."""
    past = past_keys(store, view, store.list_keys())
    store.execute([Delete(tuple(past))])
    return len(past)


def _is_past(name: str, view: View, newest: dict[int, int]) -> bool:
    n = keys.iteration_of(name)
    if n is not None:
        return keys.BEFORE_FIRST < n < view.n - 1
    member = keys.member_of(name)
    if member is not None:
        return member[1] < newest[member[0]]
    call = keys.call_of(name)
    return call is not None and call < view.call
