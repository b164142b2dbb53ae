"""Global iterations by hand: going on to the next one.

For programs, and tests, that drive the iterations themselves. All of it is a few lines over the protocol:
the number is head's, and it moves by the same compare_set. What a caller does, it does as the member that its
client joined as, never as the one that holds its rank by now: a process that was left out acts for no one.
"""

from __future__ import annotations

from datetime import timedelta

from . import keys
from .coordinator import SILENT_AFTER, Place
from .records import FAULT
from .restarting import RestartingMixin, left_out


class CoordinationMixin(RestartingMixin):
    """Global iterations by hand."""

    def increment_global_iteration(self) -> int:
        """Proposes the next iteration, if the one that is on has ended and nothing stands in the way.

        So the number moves once, however many ranks increment it, and never while a member that lives has not
        left the function. Members that this client has seen silent are left out if its own has arrived. A
        client that has not joined may propose too, as a monitor does, and leaves out the dead only.

        Returns:
            The number that is on afterwards: unchanged if its time has not come.
        """
        job, place = self._job, self._place
        current = job.read_current()
        if current is None:
            return 0
        view, _ = current
        if place is not None and place.member in view.members:
            missing = set(view.members) - job.arrivals_of(view.n) - job.deaths_of(view.n)
            silent = frozenset(member for member in missing if job._stillness(member) >= SILENT_AFTER)
            job.advance(view, place.member, silent=silent)
        else:
            job.advance(view, None)
        return self.get_global_iteration()

    def signal_global_iteration_ready(self, iteration: int) -> None:
        """Wakes those who wait for an iteration: the one that decided it may have died before waking them.

        They read head then. For an iteration that has passed no one waits.

        Args:
            iteration: the number that is on.

        Raises:
            ValueError: it has not been decided.
        """
        job = self._job
        head = job.read_head()
        if head is None or head.n < iteration:
            last = "none has" if head is None else f"the last one is {head.n}"
            raise ValueError(f"iteration={iteration} is not ready, it has not been decided: {last}")
        if head.n == iteration:
            job.set(keys.wake_head(iteration), str(head))

    def coordinate_global_iteration_advance(
        self, world_size: int, timeout: timedelta, is_coordinator: bool = False
    ) -> int:
        """Leaves the iteration that this client's member is in, and waits until the next one is decided.

        Ends the iteration for all, if it has not ended, and arrives. The last one to arrive proposes; if it
        is lost, those who wait come forward in rank order. The dead and the silent are left out, and at the
        timeout those that live but did not come.

        Args:
            world_size: for callers that pass it; who has to come is in the decision.
            timeout: how long to wait for those that live but do not come.
            is_coordinator: what the caller takes itself for. Nothing depends on it: it may be wrong, or the
                coordinator lost, and any member that has arrived may propose.

        Returns:
            The number of the next iteration, higher than all that this member has been in.

        Raises:
            RestartError: this client has not joined, or the others went on without its member.
            TimeoutError: too few members are left; names the missing ones.
        """
        place = self._joined()
        member, view = place.member, place.view
        self.end_iteration(view.n, FAULT)
        self.send_heartbeat(member)
        self.arrive(view, member, view.members.index(member), len(view.members))
        step = self.await_next(view, member, timeout=timeout.total_seconds(), heartbeat_timeout=SILENT_AFTER)
        if step is None:
            raise left_out(member, view.n)
        return self._enter(Place(member, step[0]))
