"""The stores that ``torch.distributed`` uses, as the monitor of a rank opens them."""

from __future__ import annotations

import concurrent.futures
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ..store import serve


class IterationStores:
    """One store for each iteration whose rank 0 is this rank.

    The last rank 0 is likely to be the next, so its next store is opened ahead, off the restart's path.
    """

    def __init__(self) -> None:
        self._opener = concurrent.futures.ThreadPoolExecutor(1, "ft_wrapper-store-opener")
        self._ahead: tuple[str, concurrent.futures.Future[TCPStore]] | None = None
        self._serving: TCPStore | None = None

    @property
    def serving(self) -> bool:
        """Whether any store was asked for."""
        return self._serving is not None

    def next_port(self, host: str) -> int:
        """Opens a store, or takes the one that was opened ahead; the last one ends.

        Raises:
            OSError: it could not be opened.
        """
        if self._ahead is None or self._ahead[0] != host:
            self._open_ahead(host)
        assert self._ahead is not None
        (_, opened), self._ahead = self._ahead, None
        store = opened.result()
        self._opener.submit(_drop, self._serving)
        self._serving = store
        return store.port

    def open_ahead_again(self, host: str) -> None:
        """Opens the store of a later iteration; returns at once."""
        if self._ahead is None:
            self._open_ahead(host)

    def close(self) -> None:
        """Ends the stores."""
        self._opener.shutdown()
        self._ahead = self._serving = None

    def _open_ahead(self, host: str) -> None:
        self._ahead = (host, self._opener.submit(serve, host, 0, timedelta(seconds=300)))


def _drop(store: TCPStore | None) -> None:
    """Ends a store's server, in the opener's thread, with the last reference."""
    del store
