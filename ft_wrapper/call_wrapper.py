"""What a wrapped function is given of the call that it runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .attribution import InterruptionRecord, by_blame
from .state import FrozenState
from .store import PrefixStore

if TYPE_CHECKING:
    from .restart.call import Call


class CallWrapper:
    """Handed to the wrapped function through the argument annotated with this class."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.ping: Callable[[], None] = call.own.memory.make_ping()
        """Says that the function makes progress. About 0.1 µs: it writes a time stamp and nothing else.

        From the first call in an iteration on, the function must go on calling it: a rank that does not for
        ``soft_timeout`` restarts everybody, one that does not for ``hard_timeout`` is ended.
        """

    @property
    def iteration(self) -> int:
        """Number of the restart iteration; with ``use_global_iteration`` unique in the store's life."""
        return self._call.state.iteration

    @property
    def state(self) -> FrozenState:
        """This rank's state, read-only."""
        return self._call.state.freeze()

    @property
    def store(self) -> PrefixStore:
        """A store for this iteration alone; may be passed as ``store=`` to ``init_process_group``."""
        return self._call.user_store()

    @property
    def faults(self) -> tuple[InterruptionRecord, ...]:
        """What ended the previous iteration, the likeliest cause first; empty in the first one."""
        member = self._call.own.member
        view = member.view
        if view.n == view.first:
            return ()
        records = member.agreement.ends.faults_of(view.n - 1)
        return tuple(dict.fromkeys(by_blame(fault.record for fault in records)))

    def atomic(self) -> contextlib.AbstractContextManager[Any]:
        """A block that no restart interrupts half-way; may be nested.

        When the iteration ends elsewhere meanwhile, the function is left at the end of the block, and only
        then are its process groups aborted. Keep it short, and free of collectives: the others wait.

        Raises:
            RankShouldRestart: on entering, if the iteration has ended; at the end, if it ended meanwhile.
        """
        return self._call.own.interrupter.atomic()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """A block without ``soft_timeout`` and ``hard_timeout``, for work that may take long."""
        memory = self._call.own.memory
        memory.hang_protection_disabled += 1
        try:
            yield
        finally:
            self._call.pinged = self._call.pinged or memory.ping_stamp > 0
            memory.enter_phase(memory.phase)
            memory.hang_protection_disabled -= 1
