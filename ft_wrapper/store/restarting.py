"""Global iterations by hand: a process's part in the job, when it comes and when it comes back.

Whether a process was started again is no question of clocks or heartbeats: it is another member.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

from ..exception import RestartError, StoreError, TimeoutError
from . import keys
from .coordinator import SILENT_AFTER, CoordinatorMixin, Place
from .joining import Entry, JoinTerms
from .records import Member

log = logging.getLogger(__name__)

_JOIN_WINDOW = 1.0  # seconds; the wrapper's default for join_window
_TERMS: dict[str, object] = {"iterations": "by hand"}  # so that no one gets into a job of the wrapper


class RestartingMixin(CoordinatorMixin):
    """Getting into the job, and back into it."""

    def handle_rank_restart(self, world_size: int, timeout: timedelta, *, rank: int | None = None) -> int:
        """Takes this process's part in the job: its first iteration, or the next one of a job that is on.

        Whether it was started again needs no clock: it was if its client, or the one that this was cloned
        from, has not joined. Then it is the rank's next process, whether it comes before the others have
        noticed, while they go on, or after.

        Args:
            world_size: number of ranks that the job begins with; those above come in later.
            timeout: how long to wait for the others.
            rank: this process's rank; the environment's ``RANK`` when None.

        Returns:
            The number of the iteration that it is in. If it joined before: of the one that is on.

        Raises:
            RestartError: the others went on without it, a newer process has its rank, or the call has
                completed.
            TimeoutError: somebody did not come; names who.
            ValueError: the rank is not known.
        """
        if self._place is not None:
            return self._still_in(self._place)
        slot, slots = self._slot(rank), range(world_size)
        member = self._register(slot)
        asked = None
        if self.read_head() is None and slot not in slots:
            self.await_head(timeout.total_seconds())
        elif self.read_head() is None:
            with self._withdrawn_unless_in(member):
                self.join_first(member, slots)
                first = self.await_first(member, slots, timeout.total_seconds())
            if first is not None:
                return self._enter(Place(member, first[0]))
            asked = keys.BEFORE_FIRST
        return self._get_in(member, timeout, asked)

    def catch_up_restarting_rank(self, timeout: timedelta, *, rank: int | None = None) -> int:
        """Joins a job that is on as its rank's next process, and waits until it is in.

        Ends the iteration that is on, and logs the rank's last process dead if that is still listed. The
        number returned is one that the others enter together with this process, never one that they are in.

        Args:
            timeout: how long to wait for the others to leave their iteration.
            rank: this process's rank; the environment's ``RANK`` when None.

        Returns:
            The number of the iteration that it is in.

        Raises:
            RestartError: there is no job yet, its call has completed, or a newer process has the rank.
            TimeoutError: the others did not leave their iteration.
            ValueError: the rank is not known.
        """
        slot = self._slot(rank)
        if self.read_head() is None:
            raise RestartError("there is no job to catch up with yet: call handle_rank_restart")
        return self._get_in(self._register(slot), timeout)

    def record_iteration_for_rank(self, rank: int, iteration: int) -> None:
        """Notes, for people and for the rank's next process, that a rank has been in an iteration.

        Keeps the highest one. Nothing is decided by it.

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
        held = job.claim(key, str(iteration))
        while _number(held, key) < iteration:
            held = job.compare_set(key, held, str(iteration)).decode()

    def get_iteration_for_rank(self, rank: int) -> int:
        """The last iteration that was recorded for a rank; the one that is on if none was."""
        key = keys.last_iteration(rank)
        held = self._job.try_get(key)
        return self.get_global_iteration() if held is None else _number(held, key)

    # Steps ---------------------------------------------------------------------------------------------

    def _slot(self, rank: int | None) -> int:
        if self._job is not self:
            raise RestartError("the wrapper has joined the job; a wrapped function cannot do so again")
        if rank is not None:
            return rank
        text = os.environ.get("RANK", "")
        if not text.isdecimal():
            raise ValueError(f"pass rank=, or set the environment variable RANK, which is {text!r}")
        return int(text)

    def _register(self, slot: int) -> Member:
        head = self.read_head()
        if self.agree_on_terms(0 if head is None else head.call, _TERMS):
            raise RestartError("the job runs under the wrapper: call the wrapped function to join it")
        return self.register(slot, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))

    def _get_in(self, member: Member, timeout: timedelta, asked: int | None = None) -> int:
        seconds = timeout.total_seconds()
        terms = JoinTerms("now", _JOIN_WINDOW, heartbeat_timeout=SILENT_AFTER, patience=seconds)
        deadline = self.now() + seconds
        while True:
            head = self.read_head()
            assert head is not None, "head is never deleted"
            with self._withdrawn_unless_in(member):
                entry, view, _ = self.await_entry(member, head.call, terms, asked)
            if entry is Entry.IN:
                return self._enter(Place(member, view))
            if entry is not Entry.PASSED:
                why = "the call has completed" if entry is Entry.DONE else "a newer process has its rank"
                raise RestartError(f"{member.name} cannot join: {why}")
            if self.now() >= deadline:
                raise TimeoutError(
                    f"{member.name} did not get in within {timeout}: the others went on too fast"
                )
            member, asked = self._register(member.slot), None

    @contextlib.contextmanager
    def _withdrawn_unless_in(self, member: Member) -> Iterator[None]:
        """Sees to it that no one waits for a process that gives up."""
        try:
            yield
        except BaseException:
            try:
                self._withdraw(member)
            except Exception:
                log.exception("the others could not be told that %s gave up", member.name)
            raise

    def _withdraw(self, member: Member) -> None:
        current = self.read_current()
        if current is None:
            self.give_up(keys.BEFORE_FIRST, member)
        elif member not in current[0].members:
            self.give_up(current[0].n, member)
        else:
            self.log_death(current[0].n, member, None, ends=True)
            self.count_death(current[0])

    def _still_in(self, place: Place) -> int:
        current = self.read_current()
        if current is None or place.member not in current[0].members:
            raise left_out(place.member, place.view.n)
        return self._enter(Place(place.member, current[0]))

    def _enter(self, place: Place) -> int:
        self._place = place
        self.record_iteration_for_rank(place.member.slot, place.view.n)
        return place.view.n


def left_out(member: Member, n: int) -> RestartError:
    return RestartError(
        f"the others went on from iteration {n} without {member.name}: it was declared dead, or came too "
        "late; start a new process in its place"
    )


def _number(text: str, key: str) -> int:
    if not text.isdecimal():
        raise StoreError(f"store key {key!r} holds {text!r}, which is no number of an iteration")
    return int(text)
