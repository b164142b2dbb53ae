"""The protocol over one store: its parts, one of each."""

from collections.abc import Mapping
from typing import Any

from .ends import Ends
from .entering import Entering
from .global_iteration import GlobalIteration
from .joining import Joining
from .operations import Operations
from .silence import Heartbeats


class Agreement:
    """What the ranks of a job agree on: plain objects over one store, without threads or processes.

    Args:
        store: a client of the job's store.
        parts: classes that replace others, for tests: ``{GlobalIteration: Mistaken}``.
    """

    def __init__(self, store: Operations, parts: Mapping[type, Any] | None = None) -> None:

        def made(kind: type, *of: Any) -> Any:
            return (parts or {}).get(kind, kind)(*of)

        self.store = store
        self.ends: Ends = made(Ends, store)
        self.heartbeats: Heartbeats = made(Heartbeats, store)
        self.iterations: GlobalIteration = made(GlobalIteration, store, self.ends, self.heartbeats)
        self.entering: Entering = made(Entering, store, self.ends)
        self.joining: Joining = made(Joining, store, self.iterations, self.entering)
