"""Global iterations by hand: the store's methods for programs that drive the iterations themselves.

Each method is a few lines over the protocol. The coordinator is the member whose turn it is to propose. It
follows from the decision, the logged deaths and the caller's own clock. Two callers that see different
members silent may name different coordinators; this does no harm.

A *rank* here is the slot: the rank at the start of the job, which does not change when others leave.
"""

import dataclasses
from datetime import timedelta

from ..exception import RankDiscarded, RestartError, RestartTimeout
from ..settings import AllLimits, OnJoin
from . import Agreement, keys
from .membership import Membership
from .operations import CompareAndSet, Notify, Operations, read, set_if_absent
from .records import FAULT, Member, to_number
from .silence import HeartbeatObserver
from .waiting import looks

_TERMS: dict[str, object] = {"iterations": "by hand"}  # so that no client joins a job of the wrapper
#: Seconds without a heartbeat after which a member is silent: the wrapper's default.
SILENT_AFTER = AllLimits.heartbeat_timeout


class ByHand(Operations):
    """Global iterations by hand, for programs and tests that drive the iterations themselves.

    A client acts for the member that it joined as, even if a newer process now holds the rank. So a process
    that was left out acts for no member.
    """

    launched_rank = ""
    """Value of the environment variable ``RANK``."""
    membership: Membership | None = None
    """The part of the member that this client acts for; None before it joins."""
    _observer: HeartbeatObserver | None = None

    @property
    def _job(self) -> "ByHand":
        """The store with the job's keys. A store of one iteration overrides this."""
        return self

    @property
    def _agreement(self) -> Agreement:
        return Agreement(self._job)

    def get_global_iteration(self) -> int:
        """The number of the current iteration; 0 also before the first decision.

        `wait_for_global_iteration_ready` tells the two apart.
        """
        head = self._agreement.iterations.read_head()
        return 0 if head is None else head.n

    def wait_for_global_iteration_ready(self, timeout: timedelta, iteration: int = 0) -> int:
        """Waits until an iteration has been decided.

        Args:
            timeout: longest time to wait.
            iteration: number of the iteration.

        Returns:
            Number of the current iteration; higher than ``iteration`` if the job has gone on meanwhile.

        Raises:
            RestartTimeout: the iteration was not decided in time; names the missing members.
        """
        waits = looks(self._job, keys.wake_head(iteration), timeout.total_seconds())
        while (head := self._agreement.iterations.read_head()) is None or head.n < iteration:
            if next(waits, None) is None:
                missing = self._job._what_is_missing()
                raise RestartTimeout(f"iteration {iteration} was not decided within {timeout}: {missing}")
        return head.n

    def get_active_ranks_for_coordination(
        self, world_size: int, timeout: timedelta, *, heartbeat_timeout: float = SILENT_AFTER
    ) -> set[int]:
        """The living ranks of the current iteration, as far as this client knows.

        The logged dead are left out, and so are the silent: ranks whose heartbeat has not changed, on this
        client's own clock. At the first look no rank is silent.

        Args:
            world_size: only ranks below this number are returned.
            timeout: how long to wait for the first decision; before it the job has no members.
            heartbeat_timeout: seconds without a heartbeat after which a rank is silent.

        Raises:
            RestartTimeout: there is no first decision.
        """
        job = self._job
        job.wait_for_global_iteration_ready(timeout)
        # Each call looks at every member: silence is measured between two looks.
        heard = [one.slot for one in job._living() if job._stillness(one) < heartbeat_timeout]
        return {slot for slot in heard if slot < world_size}

    def elect_coordinator(
        self, world_size: int, timeout: timedelta, *, heartbeat_timeout: float = SILENT_AFTER
    ) -> int:
        """The rank whose turn it is to propose: the lowest living rank, as far as this client knows.

        This writes nothing, and the other ranks may propose, too.

        Args:
            world_size: only ranks below this number count.
            timeout: how long to wait for the first decision.
            heartbeat_timeout: seconds without a heartbeat after which a rank is silent.

        Raises:
            RestartError: none of the ranks lives.
            RestartTimeout: there is no first decision.
        """
        silent_after = heartbeat_timeout
        active = self.get_active_ranks_for_coordination(world_size, timeout, heartbeat_timeout=silent_after)
        if not active:
            raise RestartError(f"there is no coordinator: no rank below world_size={world_size} lives")
        return min(active)

    def get_current_coordinator(self) -> int | None:
        """The lowest rank of the current iteration that is not logged dead; None if there is none.

        A silent rank may still be the coordinator: call `is_coordinator_alive`, then `elect_coordinator`.
        """
        return None if (coordinator := self._job._coordinator()) is None else coordinator.slot

    def is_coordinator_alive(self, timeout_seconds: float = SILENT_AFTER) -> bool:
        """Whether the current coordinator sends heartbeats, as far as this client has seen.

        Silence is measured between two looks of the same client, so at the first look every coordinator
        is alive. Look at least every 15 s: a longer pause counts as 15 s, since the client itself may have
        been stopped.

        Args:
            timeout_seconds: seconds for which the heartbeat may be unchanged.
        """
        coordinator = self._job._coordinator()
        return coordinator is not None and self._job._stillness(coordinator) < timeout_seconds

    def update_coordinator_heartbeat(self) -> None:
        """Sends a heartbeat of this client's member, which may be the coordinator.

        No client sends another member's heartbeat, so a lost coordinator never looks alive. Under the wrapper
        the rank's monitor sends it.

        Raises:
            RestartError: this client has not joined the job.
        """
        self._agreement.heartbeats.beat_heart(str(self._joined().member))

    def get_coordinator_heartbeat(self) -> int:
        """A number that changes while the current coordinator sends heartbeats; 0 without a coordinator.

        Compare it with an earlier value. It is not a time, which would be on another host's clock. It counts
        heartbeats. On etcd, where heartbeats are leases, it counts looks, and is -1 once the lease has
        expired.
        """
        coordinator = self._job._coordinator()
        return 0 if coordinator is None else self._agreement.heartbeats.get_heartbeat(coordinator)

    def increment_global_iteration(self) -> int:
        """Proposes the next iteration, if the current one has ended and every living member has arrived.

        The number moves by one, however many ranks increment it. If this client's member has arrived, members
        that the client has seen silent are left out. A client that has not joined may propose, too, and
        leaves out only the dead.

        Returns:
            Number of the current iteration afterwards; unchanged if the job had to wait.
        """
        iterations, own = self._agreement.iterations, self.membership
        view = iterations.read_current()
        if view is None:
            return 0
        if own is not None and own.member in view.members:
            _, missing = iterations.arrived_and_missing(view)
            silent = frozenset(one for one in missing if self._job._stillness(one) >= SILENT_AFTER)
            iterations.advance(view, own.member, silent=silent)
        else:
            iterations.advance(view, None)
        return self.get_global_iteration()

    def signal_global_iteration_ready(self, iteration: int) -> None:
        """Wakes the waiters for an iteration, since its proposer may have died before waking them.

        Args:
            iteration: number of the current iteration.

        Raises:
            ValueError: the iteration has not been decided.
        """
        head = self._agreement.iterations.read_head()
        if head is None or head.n < iteration:
            last = "none has" if head is None else f"the last one is {head.n}"
            raise ValueError(f"iteration={iteration} is not ready, it has not been decided: {last}")
        if head.n == iteration:
            self._job.execute([Notify(keys.wake_head(iteration), str(head))])

    def coordinate_global_iteration_advance(
        self, world_size: int, timeout: timedelta, is_coordinator: bool = False
    ) -> int:
        """Leaves the iteration of this client's member, and waits until the next one is decided.

        Ends the iteration for all members, if it has not ended, and arrives. The last member to arrive
        proposes; if it is lost, the waiting members propose in rank order. Dead and silent members are left
        out; at the timeout, so are living members that have not arrived.

        Args:
            world_size: ignored; the decision lists the members that have to arrive.
            timeout: how long to wait for living members that do not arrive.
            is_coordinator: ignored; every arrived member may propose, since the caller may be wrong, or the
                coordinator lost.

        Returns:
            Number of the next iteration, higher than that of any iteration this member has been in.

        Raises:
            RestartError: this client has not joined, or the other members went on without its member.
            RestartTimeout: too few members are left; names the missing ones.
        """
        own = self._joined()
        view, member = own.view, own.member
        own.agreement.ends.end_iteration(view.n, FAULT)
        own.agreement.heartbeats.beat_heart(str(member))
        own.limits = dataclasses.replace(own.limits, barrier_timeout=timeout.total_seconds())
        own.go_on(view.members.index(member), len(view.members))
        return self._note_entry(own)

    def handle_rank_restart(self, world_size: int, timeout: timedelta, *, rank: int | None = None) -> int:
        """Joins the job: its first iteration, or the next one if the job is already running.

        A client that has not joined, and is not a clone of one that has, acts for a new process of the rank.
        It may call this before or after the other members notice the death of the rank's last process.

        Args:
            world_size: number of ranks that the job begins with; higher ranks join later.
            timeout: how long to wait for the other members.
            rank: this process's rank; that of the environment variable ``RANK`` when None.

        Returns:
            Number of the iteration that this process is in; the current one if it had already joined.

        Raises:
            RestartError: the job went on without this process, a newer process has its rank, or the call
                has completed.
            RestartTimeout: ranks are missing; names them.
            ValueError: the rank is not known.
        """
        if self.membership is None:
            return self._join(self._slot(rank), world_size, timeout)
        own, view = self._joined(), self._agreement.iterations.read_current()
        if view is None or own.member not in view.members:
            raise RankDiscarded(own.explain_removal())
        own.view = view
        return self._note_entry(own)

    def catch_up_restarting_rank(self, timeout: timedelta, *, rank: int | None = None) -> int:
        """Joins a running job as a new process of the rank, and waits until a decision includes it.

        Ends the current iteration, and logs the rank's last process dead if it is still a member. The other
        ranks enter the returned iteration together with this process.

        Args:
            timeout: how long to wait for the other members to leave their iteration.
            rank: this process's rank; that of the environment variable ``RANK`` when None.

        Returns:
            Number of the iteration that this process is in.

        Raises:
            RestartError: there is no job yet, its call has completed, or a newer process has the rank.
            RestartTimeout: the other members did not leave their iteration.
            ValueError: the rank is not known.
        """
        slot = self._slot(rank)
        if self._agreement.iterations.read_head() is None:
            raise RestartError("there is no job to catch up with yet: call handle_rank_restart")
        return self._join(slot, 0, timeout)

    def record_iteration_for_rank(self, rank: int, iteration: int) -> None:
        """Records, for people, that a rank has been in an iteration; the highest number is kept.

        Args:
            rank: the rank.
            iteration: number of the iteration.

        Raises:
            ValueError: the job has not reached the iteration.
        """
        job, on = self._job, self.get_global_iteration()
        if not 0 <= iteration <= on:
            raise ValueError(f"iteration={iteration} of rank {rank} must lie in 0..{on}, the current one")
        key = keys.last_iteration(rank)
        held = set_if_absent(job, key, str(iteration))
        while to_number(held, key) < iteration:
            held = job.execute([CompareAndSet(key, held, str(iteration))])[0] or ""

    def get_iteration_for_rank(self, rank: int) -> int:
        """The last iteration that was recorded for a rank; the current one if none was."""
        key = keys.last_iteration(rank)
        return self.get_global_iteration() if (held := read(self._job, key)) is None else to_number(held, key)

    # Steps ---------------------------------------------------------------------------------------------

    def _joined(self) -> Membership:
        if self.membership is None:
            raise RestartError(
                "this client of the store has not joined the job: call handle_rank_restart on it first; "
                "leave it to the wrapper inside a wrapped function, where the wrapper has joined"
            )
        # Clones of this client share the membership; each uses its own connection.
        own = dataclasses.replace(self.membership, agreement=self._agreement)
        own.member, own.view = self.membership.member, self.membership.view
        return own

    def _living(self) -> list[Member]:
        """The members of the current iteration without the logged dead; none before the first iteration."""
        view = self._agreement.iterations.read_current()
        return [] if view is None else sorted(set(view.members) - self._agreement.ends.deaths_of(view.n))

    def _coordinator(self) -> Member | None:
        return next(iter(self._living()), None)

    def _stillness(self, member: Member) -> float:
        """Seconds for which this client has seen a member's heartbeat unchanged; 0 for its own member."""
        if self.membership is not None and member == self.membership.member:
            return 0.0
        if self._observer is None:
            self._observer = HeartbeatObserver(self._agreement.heartbeats, SILENT_AFTER)
        return self._observer.stillness(member)

    def _what_is_missing(self) -> str:
        view = self._agreement.iterations.read_current()
        if view is None:
            joined = self._agreement.iterations.joins_of(keys.BEFORE_FIRST)
            return f"only the ranks {sorted(member.slot for member in joined)} have joined"
        if self._agreement.ends.outcome_of(view.n) is None:
            return f"iteration {view.n} is still running"
        _, missing = self._agreement.iterations.arrived_and_missing(view)
        return f"ranks {sorted(member.slot for member in missing)} have not left iteration {view.n}"

    def _slot(self, rank: int | None) -> int:
        if self._job is not self:
            raise RestartError("the wrapper has joined the job; a wrapped function cannot do so again")
        if rank is not None:
            return rank
        text = self.launched_rank
        if not text.isdecimal():
            raise ValueError(f"pass rank=, or set the environment variable RANK, which is {text!r}")
        return int(text)

    def _join(self, slot: int, world_size: int, timeout: timedelta) -> int:
        head, seconds = self._agreement.iterations.read_head(), timeout.total_seconds()
        limits = AllLimits(rejoin=True, on_join=OnJoin.NOW, rejoin_wait=0.0, barrier_timeout=seconds)
        call = 0 if head is None else head.call
        own = Membership(self._agreement, slot, [*range(world_size)], limits, call, _TERMS)
        try:
            own.register()
        except ValueError:
            raise RestartError("the job is the wrapper's: call the wrapped function to join it") from None
        if not own.join(seconds):
            raise RestartError(f"{own.member.name} cannot join: the call has completed")
        return self._note_entry(own)

    def _note_entry(self, own: Membership) -> int:
        self.membership = own
        self.record_iteration_for_rank(own.slot, own.view.n)
        return own.view.n
