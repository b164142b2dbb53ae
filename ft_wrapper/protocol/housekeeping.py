"""Housekeeping that rank 0's heart thread does for all ranks during an iteration, not in a restart. Pure.

Safety needs none of it. The next housekeeper does what the last one left undone.
"""

from collections.abc import Sequence

from . import keys
from .entering import active_ranks_in
from .operations import Delete, Operations, Read, read, read_heartbeat, write_text
from .records import Head, View, to_number

# Join windows after which an iteration does not count as part of a crash loop.
SETTLES_AFTER = 4
# Keys deleted at a time; few, since the heart thread's next heartbeat must not be late.
SLICE = 256


class Housekeeper:
    """Records the active ranks of an iteration, and that it has settled; deletes past keys.

    Args:
        store: a client of the job's store.
        join_window: seconds for which joiners are gathered.
    """

    def __init__(self, store: Operations, join_window: float) -> None:
        self._store = store
        self._settles_after = SETTLES_AFTER * join_window
        self._n: int | None = None
        self._since = 0.0
        self._size_known = False
        self._settled = False
        self._past: list[str] = []  # keys to be deleted
        self._hearts: dict[str, int] = {}  # shared heartbeats and their last values; some may have stopped

    def keep(self, view: View) -> None:
        """Does what is due in the current iteration, or a part of it; called repeatedly."""
        if view.n != self._n:
            self._n, self._since = view.n, self._store.now()
            self._size_known = self._settled = False
            names = self._store.list_keys()
            self._past = past_keys(self._store, view, names)
            shared = [name for name in names if keys.is_shared_heart(name)]
            # Each member uses at most one heartbeat, so some of these are left over.
            are_too_many = len(shared) > len(view.members)
            self._hearts = {heart: read_heartbeat(self._store, heart) for heart in shared if are_too_many}
        if self._past:  # an empty Delete would be a request to etcd each second
            self._store.execute([Delete(tuple(self._past[:SLICE]))])
            del self._past[:SLICE]
        if not self._size_known:
            self._size_known = note_active_target(self._store, view.n)
        if not self._settled and self._store.now() - self._since >= self._settles_after:
            # A restart from this iteration is not part of a crash loop.
            write_text(self._store, keys.SETTLED, str(view.n))
            # If a heartbeat is still in use after all, the next beat writes its key again.
            hearts = self._hearts.items()
            self._past += [heart for heart, seen in hearts if read_heartbeat(self._store, heart) == seen]
            self._settled = True


def note_active_target(store: Operations, n: int) -> bool:
    """Raises the target to the active ranks of n; returns whether their number is known yet."""
    meeting, target = store.execute([Read(keys.meeting(n)), Read(keys.ACTIVE_TARGET)])
    active = active_ranks_in(n, meeting)
    if active > to_number(target or "0", keys.ACTIVE_TARGET):
        write_text(store, keys.ACTIVE_TARGET, str(active))
    return active > 0


def past_keys(store: Operations, view: View, names: Sequence[str]) -> list[str]:
    """The keys of iterations two back and more, of past calls, and of superseded members.

    All members of ``view`` have left the iteration before it, so no member reads older keys. A process that
    is not a member may write a few keys late, which the next housekeeper finds. A member is superseded if
    ``view`` has a newer member of its slot; if ``view`` has none, once a newer process has started.

    Args:
        store: a client of the job's store.
        view: the current iteration.
        names: all keys, as read just now.

    Returns:
        Names of the keys to delete; none if the job has gone on from ``view`` meanwhile.
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
