"""What rank 0's heart does for all once an iteration is on, off the path of a restart. Pure.

Nothing here is needed for safety, and whatever is left undone the next one to do it finds.
"""

from collections.abc import Sequence

from . import keys
from .entering import active_ranks_in
from .operations import Delete, Operations, Read, read, read_heartbeat, write_text
from .records import Head, View, to_number

# An iteration that was on for so many join windows is not one of a crash loop.
SETTLES_AFTER = 4
# Keys that are deleted at a time: a heart does this, and must not be late.
SLICE = 256


class Housekeeper:
    """Notes how large and how lasting an iteration is, and deletes past keys.

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

    def keep(self, view: View) -> None:
        """Does what is due in the iteration that is on, or a part of it; called again and again."""
        if view.n != self._n:
            self._n, self._since = view.n, self._store.now()
            self._size_known = self._settled = False
            names = self._store.list_keys()
            self._past = past_keys(self._store, view, names)
            shared = [name for name in names if keys.is_shared_heart(name)]
            # More than there can be that have one.
            are_too_many = len(shared) > len(view.members)
            self._hearts = {heart: read_heartbeat(self._store, heart) for heart in shared if are_too_many}
        if self._past:  # else etcd would be asked each second to do nothing
            self._store.execute([Delete(tuple(self._past[:SLICE]))])
            del self._past[:SLICE]
        if not self._size_known:
            self._size_known = note_active_target(self._store, view.n)
        if not self._settled and self._store.now() - self._since >= self._settles_after:
            # A restart from it is not one of a crash loop.
            write_text(self._store, keys.SETTLED, str(view.n))
            # A heart that beats after all brings its key back.
            hearts = self._hearts.items()
            self._past += [heart for heart, seen in hearts if read_heartbeat(self._store, heart) == seen]
            self._settled = True


def note_active_target(store: Operations, n: int) -> bool:
    """Raises the target to the active ranks of n; returns whether they are known yet."""
    meeting, target = store.execute([Read(keys.meeting(n)), Read(keys.ACTIVE_TARGET)])
    active = active_ranks_in(n, meeting)
    if active > to_number(target or "0", keys.ACTIVE_TARGET):
        write_text(store, keys.ACTIVE_TARGET, str(active))
    return active > 0


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


def _is_past(name: str, view: View, newest: dict[int, int]) -> bool:
    n = keys.iteration_of(name)
    if n is not None:
        return keys.BEFORE_FIRST < n < view.n - 1
    member = keys.member_of(name)
    if member is not None:
        return member[1] < newest[member[0]]
    call = keys.call_of(name)
    return call is not None and call < view.call
