"""What the monitor of an iteration's rank 0 does for all, off the path of a restart."""

from __future__ import annotations

from ..store import StoreMixin, View

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

    def __init__(self, store: StoreMixin, join_window: float) -> None:
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
                self._past = self._store.past_keys(view, names)
                self._hearts = self._store.shared_hearts(names, len(view.members))
        if rank != 0:
            return
        now, self._past = self._past[:SLICE], self._past[SLICE:]
        self._store.delete_keys(now)
        if not self._size_known:
            self._size_known = self._store.note_wanted(view.n)
        if not self._settled and self._store.now() - self._since >= self._settles_after:
            self._store.note_settled(view.n)
            self._past += self._store.still_hearts(self._hearts)
            self._settled = True
