"""The coordinator of an iteration: whose turn it is to propose the next one, and who is there to follow.

For programs, and tests, that drive the iterations by hand. Nothing here decides anything: the coordinator
follows from the decision, the logged deaths and the caller's own clock. Callers who see different members
silent may take different ones for the coordinator, and no harm is done: head moves only once.

A *rank* here is the rank at the start of the job, the slot: it stays when others leave.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from ..exception import RestartError, TimeoutError
from . import keys
from .heartbeat import HeartbeatObserver
from .joining import JoiningMixin
from .records import Member, View

SILENT_AFTER = 30.0
"""Seconds without a heartbeat after which a member is silent: the wrapper's default."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Whom a client acts for.

    Args:
        member: the process that it belongs to.
        view: the iteration that this is in.
    """

    member: Member
    view: View


class CoordinatorMixin(JoiningMixin):
    """Who is there, and who is the coordinator."""

    _place: Place | None = None
    _observer: HeartbeatObserver | None = None

    @property
    def _job(self) -> CoordinatorMixin:
        """The store with the job's own keys, where this one has those of one iteration."""
        return self

    def get_global_iteration(self) -> int:
        """The number of the iteration that is on: head's.

        Before the first decision 0, the number that it will give; `wait_for_global_iteration_ready` tells the
        two apart.
        """
        head = self._job.read_head()
        return 0 if head is None else head.n

    def wait_for_global_iteration_ready(self, timeout: timedelta, iteration: int = 0) -> int:
        """Waits until an iteration has been decided.

        Args:
            timeout: how long to wait at the longest.
            iteration: its number.

        Returns:
            The number that is on then; higher where the job has gone on meanwhile.

        Raises:
            TimeoutError: it was not decided in time; says who was missing.
        """
        job = self._job
        head = job.read_head()
        if head is not None and head.n >= iteration:
            return head.n
        for remaining, _ in job._looks(keys.wake_head(iteration), 0, timeout.total_seconds()):
            head = job.read_head()
            if head is not None and head.n >= iteration:
                return head.n
            if remaining <= 0:
                break
        raise TimeoutError(
            f"iteration {iteration} was not decided within {timeout}: {job._what_is_missing()}"
        )

    def get_active_ranks_for_coordination(
        self, world_size: int, timeout: timedelta, *, heartbeat_timeout: float = SILENT_AFTER
    ) -> set[int]:
        """The ranks of the iteration that is on that live, as far as this client knows.

        Neither those that were logged dead, nor those whose heartbeat this client has seen stand still: on
        its own clock, so that no one is silent at the first look. No rank is in because of its number.

        Args:
            world_size: only ranks below it.
            timeout: how long to wait for the first decision, before which no one is in.
            heartbeat_timeout: seconds without a heartbeat after which a rank is silent.

        Raises:
            TimeoutError: there is no first decision.
        """
        job = self._job
        job.wait_for_global_iteration_ready(timeout)
        current = job.read_current()
        assert current is not None, "head is never deleted"
        view, _ = current
        # All are looked at each time: silence is what lies between two looks.
        alive = sorted(set(view.members) - job.deaths_of(view.n))
        heard = [member.slot for member in alive if job._stillness(member) < heartbeat_timeout]
        return {slot for slot in heard if slot < world_size}

    def elect_coordinator(
        self, world_size: int, timeout: timedelta, *, heartbeat_timeout: float = SILENT_AFTER
    ) -> int:
        """The rank whose turn it is to propose: the lowest one that lives in this client's eyes.

        Nothing is written, and nothing can be won: the one that is named may propose, and so may the others.

        Args:
            world_size: only ranks below it.
            timeout: how long to wait for the first decision.
            heartbeat_timeout: seconds without a heartbeat after which a rank is silent.

        Raises:
            RestartError: none of the ranks lives.
            TimeoutError: there is no first decision.
        """
        active = self.get_active_ranks_for_coordination(
            world_size, timeout, heartbeat_timeout=heartbeat_timeout
        )
        if not active:
            raise RestartError(f"there is no coordinator: no rank below world_size={world_size} lives")
        return min(active)

    def get_current_coordinator(self) -> int | None:
        """The lowest rank of the iteration that is on and was not logged dead; None if there is none.

        The same for all who read the store at that moment. One that is merely silent still is the
        coordinator: ask `is_coordinator_alive`, then `elect_coordinator`.
        """
        coordinator = self._job._coordinator()
        return None if coordinator is None else coordinator.slot

    def is_coordinator_alive(self, timeout_seconds: float = SILENT_AFTER) -> bool:
        """Whether the current coordinator sends heartbeats, as far as this client has seen.

        Silence lies between two looks of the same client, on its own clock: at the first look every
        coordinator lives. Look at least every 15 s: more than that does not count between two looks, since
        this client may have been stopped itself.

        Args:
            timeout_seconds: how long the heartbeat may stand still.
        """
        job = self._job
        coordinator = job._coordinator()
        return coordinator is not None and job._stillness(coordinator) < timeout_seconds

    def update_coordinator_heartbeat(self) -> None:
        """Sends a heartbeat of this client's member: the coordinator's, if it is the coordinator.

        No one sends another's, so a lost coordinator never looks alive. Under the wrapper its monitor does.

        Raises:
            RestartError: this client has not joined the job.
        """
        self.send_heartbeat(self._joined().member)

    def get_coordinator_heartbeat(self) -> int:
        """A number that moves as long as the current coordinator sends heartbeats; 0 if there is none.

        Compare it with an earlier one: a time would be one of another host's clock. It is the count of
        heartbeats; on etcd, where they are leases, a count of looks, and -1 once the lease has run out.
        """
        job = self._job
        coordinator = job._coordinator()
        return 0 if coordinator is None else job.get_heartbeat(coordinator)

    # Steps ---------------------------------------------------------------------------------------------

    def _joined(self) -> Place:
        if self._place is None:
            raise RestartError(
                "this client of the store has not joined the job: call handle_rank_restart on it first; "
                "leave it to the wrapper inside a wrapped function, where the wrapper has joined"
            )
        return self._place

    def _coordinator(self) -> Member | None:
        current = self.read_current()
        if current is None:
            return None
        view, _ = current
        return min(set(view.members) - self.deaths_of(view.n), default=None)

    def _stillness(self, member: Member) -> float:
        """Seconds for which this client has seen a member's heartbeat stand still; 0 for its own member."""
        if self._place is not None and member == self._place.member:
            return 0.0
        if self._observer is None:
            self._observer = HeartbeatObserver(self, SILENT_AFTER)
        return self._observer.stillness(member)

    def _what_is_missing(self) -> str:
        current = self.read_current()
        if current is None:
            return f"only the ranks {sorted(member.slot for member in self.joined_first())} have joined"
        view, _ = current
        if self.outcome_of(view.n) is None:
            return f"iteration {view.n} is still on"
        missing = set(view.members) - self.arrivals_of(view.n) - self.deaths_of(view.n)
        return f"ranks {sorted(member.slot for member in missing)} have not left iteration {view.n}"
