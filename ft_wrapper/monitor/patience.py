"""Whether a soft timeout is put off: some rank waits in its data loader for a worker that lives.

The ranks that wait for that rank, in a collective, make no progress either. So its monitor gives signs of
life under a key of the iteration for as long as its rank waits, and a monitor whose rank reaches its soft
timeout looks whether they come. They are for all ranks that wait together, so nothing grows with their
number, or with the number of waits; and they end by themselves if their giver is lost.

A wait that began just now is not seen yet: it counts from a second on (`loaders`). When one is over, that is
seen once three signs of life have not come.
"""

import contextlib
import threading
import time

from ..exception import StoreError
from ..protocol import keys
from ..protocol.operations import Beat, Operations, beats
from ..store.bounded import in_background

_MISSED = 3  # signs of life that did not come, until the wait counts as over


class LoaderPatience:
    """One rank's part in it: says that it waits, and hears whether any does.

    Args:
        store: a client that may be used in several threads; the caller's.
        interval: seconds between two signs of life.
    """

    def __init__(self, store: Operations, interval: float) -> None:
        self._store = store
        self._interval = interval
        self._changed = threading.Condition()
        self._waits_in: int | None = None  # iteration
        self._is_closed = False
        self._thread: threading.Thread | None = None
        # What was read last: in which iteration, what, and when it was read first.
        self._seen = (keys.BEFORE_FIRST, 0, 0.0)

    def note(self, n: int, waits: bool) -> None:
        """Hears that the rank waits for a worker in iteration n, or does so no more."""
        with self._changed:
            self._waits_in = n if waits else None
            self._changed.notify_all()
        if waits and self._thread is None:
            self._thread = in_background("telling that a loader's worker is waited for", self._run)

    def is_anyone_waiting(self, n: int) -> bool:
        """Whether a rank waits for a worker in iteration n, as far as is known.

        Not known, and so False, where the store cannot be reached and the rank itself does not wait.
        """
        if self._waits_in == n:
            return True
        try:
            count = beats(self._store, keys.waiting(n))
        except StoreError:
            return False
        now = time.monotonic()
        if self._seen[:2] != (n, count):
            self._seen = (n, count, now)
        return count > 0 and now - self._seen[2] < _MISSED * self._interval

    def close(self) -> None:
        """Ends the signs of life."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._waits_in is not None)
                n = self._waits_in
                if self._is_closed or n is None:
                    return
            with contextlib.suppress(StoreError):  # the heart says so, and this is tried again
                self._store.execute([Beat(keys.waiting(n), _MISSED * self._interval)])
            with self._changed:
                self._changed.wait_for(lambda n=n: self._is_closed or self._waits_in != n, self._interval)  # type: ignore[misc]
