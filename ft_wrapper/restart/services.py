"""What live states and checkpoints use of their call, beside the `CallWrapper`: nothing else of it."""

import contextlib
from typing import Any, Protocol

from ..torch_groups.kept import KeptGroup
from ..torch_groups.tracker import begin_tracking
from .resources import Resources


class HelperConnection(Protocol):
    """Connections of the function's helpers to other ranks, in one iteration."""

    def abort(self) -> None:
        """Ends what waits there, from any thread, and unnoticed by other ranks."""

    def close(self) -> None:
        """Closes them."""


class Services:
    """The services of one call.

    Args:
        own: what the call owns.

    Attributes:
        settings: durations, switches and plug-ins.
        store: the job's, which outlives iterations.
        atomic: see `CallWrapper.atomic`.
        has_failed: whether the current iteration has ended by a fault.
        group: the default process group, if it outlives iterations.
        tracker: tracks objects that should not outlive the iteration in which the function made them.
        kept: objects that outlive iterations, by name.
        at_end: callbacks for the end of the iteration on this rank.
        end_fields: fields for the event of that end.
        connections: kept open until all ranks have left the iteration, or others would take it for a fault.
    """

    def __init__(self, own: Resources) -> None:
        self.settings, self.store = own.settings, own.member.agreement.store
        self.atomic = own.interrupter.atomic
        self.has_failed = own.member.has_failed
        self.group = KeptGroup(own.settings.limits.keep_groups)
        self.tracker = begin_tracking()
        self.kept: dict[str, Any] = {}
        self.at_end = contextlib.ExitStack()
        self.end_fields: dict[str, Any] = {}
        self.connections: list[HelperConnection] = []
        self._own = own

    @property
    def iteration(self) -> int:
        """The current iteration; no number comes twice in the store's life."""
        return self._own.member.view.n

    @property
    def first(self) -> int:
        """The first iteration of this call."""
        return self._own.member.view.decision.first

    def check_iteration(self, n: int, what: str) -> None:
        """Raises RuntimeError unless the function runs, in this iteration; ``what`` belongs to it."""
        if not self._own.interrupter.is_running or n != self.iteration:
            how = "make one in the function, in each iteration"
            raise RuntimeError(f"{what} of another iteration, or outside of the wrapped function: {how}")

    def close_connections(self) -> None:
        """Closes the iteration's connections."""
        while self.connections:
            self.connections.pop().close()
