"""Global iterations by hand: names that a store has for programs that drive the iterations themselves.

All of it is a few lines over the protocol. The coordinator is the member whose turn it is to propose; it
follows from the decision, the logged deaths and the caller's own clock. Callers who see different members
silent may take different ones for the coordinator, and no harm is done.

A *rank* here is the rank at the start of the job, the slot: it stays when others leave.
"""

import dataclasses
from datetime import timedelta

from ..exception import RankDiscarded, RestartError, RestartTimeout
from ..settings import Limits, OnJoin
from . import Agreement, keys
from .membership import Membership
from .operations import CompareAndSet, Notify, Operations, read, set_if_absent
from .records import FAULT, Member, to_number
from .silence import HeartbeatObserver
from .waiting import looks

_TERMS: dict[str, object] = {"iterations": "by hand"}  # so that no one gets into a job of the wrapper
#: Seconds without a heartbeat after which a member is silent: the wrapper's default.
SILENT_AFTER = Limits.heartbeat_timeout


class ByHand(Operations):
    """Global iterations by hand, for programs and tests that drive the iterations themselves.

    A client acts for the member that it joined as, never for the one that holds its rank by now: a process
    that was left out acts for none.
    """

    launched_rank = ""
    """The environment's ``RANK``."""
    membership: Membership | None = None
    """Of the member that this client acts for."""
    _observer: HeartbeatObserver | None = None

    @property
    def _job(self) -> "ByHand":
        """The store with the job's own keys, where this one has those of one iteration."""
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
            timeout: how long to wait at the longest.
            iteration: its number.

        Returns:
            The number that is on then; higher where the job has gone on meanwhile.

        Raises:
            RestartTimeout: it was not decided in time; says who was missing.
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
        """The ranks of the iteration that is on that live, as far as this client knows.

        Without the logged dead, and those whose heartbeat this client has seen stand still on its own clock:
        none is silent at the first look.

        Args:
            world_size: only ranks below it.
            timeout: how long to wait for the first decision, before which no one is in.
            heartbeat_timeout: seconds without a heartbeat after which a rank is silent.

        Raises:
            RestartTimeout: there is no first decision.
        """
        job = self._job
        job.wait_for_global_iteration_ready(timeout)
        # All are looked at each time: silence is what lies between two looks.
        heard = [one.slot for one in job._living() if job._stillness(one) < heartbeat_timeout]
        return {slot for slot in heard if slot < world_size}

    def elect_coordinator(
        self, world_size: int, timeout: timedelta, *, heartbeat_timeout: float = SILENT_AFTER
    ) -> int:
        """The rank whose turn it is to propose: the lowest one that lives in this client's eyes.

        Nothing is written: the others may propose, too.

        Args:
            world_size: only ranks below it.
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
        """The lowest rank of the current iteration that was not logged dead; None if there is none.

        A silent one still is the coordinator: ask `is_coordinator_alive`, then `elect_coordinator`.
        """
        return None if (coordinator := self._job._coordinator()) is None else coordinator.slot

    def is_coordinator_alive(self, timeout_seconds: float = SILENT_AFTER) -> bool:
        """Whether the current coordinator sends heartbeats, as far as this client has seen.

        Silence lies between two looks of the same client: at the first look every coordinator lives. Look at
        least every 15 s: more does not count between two looks, since this client may have been stopped.

        Args:
            timeout_seconds: how long the heartbeat may stand still.
        """
        coordinator = self._job._coordinator()
        return coordinator is not None and self._job._stillness(coordinator) < timeout_seconds

    def update_coordinator_heartbeat(self) -> None:
        """Sends a heartbeat of this client's member: the coordinator's, if it is the coordinator.

        No one sends another's, so a lost coordinator never looks alive. Under the wrapper its monitor does.

        Raises:
            RestartError: this client has not joined the job.
        """
        self._agreement.heartbeats.beat_heart(str(self._joined().member))

    def get_coordinator_heartbeat(self) -> int:
        """A number that moves as long as the current coordinator sends heartbeats; 0 if there is none.

        Compare it with an earlier one: a time would be one of another host's clock. It is the count of
        heartbeats; on etcd, where they are leases, a count of looks, and -1 once the lease has run out.
        """
        coordinator = self._job._coordinator()
        return 0 if coordinator is None else self._agreement.heartbeats.get_heartbeat(coordinator)

    def increment_global_iteration(self) -> int:
        """Proposes the next iteration, if the one that is on has ended and nothing stands in the way.

        The number moves once, however many ranks increment it, and never while a live member has not left the
        function. Members that this client has seen silent are left out if its own has arrived. A client that
        has not joined may propose too, and leaves out the dead only.

        Returns:
            The number that is on afterwards: unchanged if its time has not come.
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
        """Wakes those who wait for an iteration: the one that decided it may have died before waking them.

        Args:
            iteration: the number that is on.

        Raises:
            ValueError: it has not been decided.
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
        """Takes this process's part in the job: its first iteration, or the next one of a job that is on.

        A client that has not joined, nor been cloned from one that has, is the rank's next process. It may
        call this before the others have noticed that the last one died, while they go on, or after.

        Args:
            world_size: number of ranks that the job begins with; those above come in later.
            timeout: how long to wait for the others.
            rank: this process's rank; the environment's ``RANK`` when None.

        Returns:
            The number of the iteration that it is in. If it joined before: of the one that is on.

        Raises:
            RestartError: the others went on without it, a newer process has its rank, or the call has
                completed.
            RestartTimeout: a rank did not come; names which.
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
        """Joins a job that is on as its rank's next process, and waits until it is in.

        Ends the current iteration, and logs the rank's last process dead if that is still listed. The others
        enter the iteration that is returned together with this process.

        Args:
            timeout: how long to wait for the others to leave their iteration.
            rank: this process's rank; the environment's ``RANK`` when None.

        Returns:
            The number of the iteration that it is in.

        Raises:
            RestartError: there is no job yet, its call has completed, or a newer process has the rank.
            RestartTimeout: the others did not leave their iteration.
            ValueError: the rank is not known.
        """
        slot = self._slot(rank)
        if self._agreement.iterations.read_head() is None:
            raise RestartError("there is no job to catch up with yet: call handle_rank_restart")
        return self._join(slot, 0, timeout)

    def record_iteration_for_rank(self, rank: int, iteration: int) -> None:
        """Notes, for people, that a rank has been in an iteration; keeps the highest one.

        Args:
            rank: the rank.
            iteration: a number that head has reached.

        Raises:
            ValueError: it has not.
        """
        job, on = self._job, self.get_global_iteration()
        if not 0 <= iteration <= on:
            raise ValueError(f"iteration={iteration} of rank {rank} must lie in 0..{on}, the one that is on")
        key = keys.last_iteration(rank)
        held = set_if_absent(job, key, str(iteration))
        while to_number(held, key) < iteration:
            held = job.execute([CompareAndSet(key, held, str(iteration))])[0] or ""

    def get_iteration_for_rank(self, rank: int) -> int:
        """The last iteration that was recorded for a rank; the one that is on if none was."""
        key = keys.last_iteration(rank)
        return self.get_global_iteration() if (held := read(self._job, key)) is None else to_number(held, key)

    # Steps ---------------------------------------------------------------------------------------------

    def _joined(self) -> Membership:
        if self.membership is None:
            raise RestartError(
                "this client of the store has not joined the job: call handle_rank_restart on it first; "
                "leave it to the wrapper inside a wrapped function, where the wrapper has joined"
            )
        # Clones of this client share it.
        own = dataclasses.replace(self.membership, agreement=self._agreement)
        own.member, own.view = self.membership.member, self.membership.view
        return own

    def _living(self) -> list[Member]:
        """The members of the iteration that is on, but for the logged dead; none before the first one."""
        view = self._agreement.iterations.read_current()
        return [] if view is None else sorted(set(view.members) - self._agreement.ends.deaths_of(view.n))

    def _coordinator(self) -> Member | None:
        return next(iter(self._living()), None)

    def _stillness(self, member: Member) -> float:
        """Seconds for which this client has seen a member's heartbeat stand still; 0 for its own member."""
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
            return f"iteration {view.n} is still on"
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
        limits = Limits(
            use_global_iteration=True, on_join=OnJoin.NOW, rejoin_wait=0.0, barrier_timeout=seconds
        )
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
