"""A few nodes with one or two happenings, in orders that are drawn; `explore.py` draws more.

`explored_nodes.ExploredJob` checks after every step.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from explored_nodes import CLOSE, EXIT, LATE, SUSPECT, Job, drawn_job, run_jobs
from support.nightly import at_night

from ft_wrapper.rendezvous import moves
from ft_wrapper.rendezvous.executor import Executor
from ft_wrapper.rendezvous.operations import Announced, Context
from ft_wrapper.rendezvous.record import Admission, RendezvousRecord, Seat, digest
from ft_wrapper.rendezvous.register import RECORD_KEY, RecordRegister, version_key
from ft_wrapper.testing import SchedulerError

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("draws", [200, *at_night("200 are drawn always", [2000])])
def test_small_jobs(draws: int) -> None:
    """Half of them are new in each run; a failure tells which one it was."""
    fresh = random.SystemRandom().randrange(10**9)
    for seed in [*range(draws // 2), *range(fresh, fresh + draws // 2)]:
        job = drawn_job(seed)
        try:
            job.scheduler.run()
        except SchedulerError as error:
            raise AssertionError(f"drawn_job({seed}), {job.what}: {error}") from error


FINDS_WITHIN = 3000


# The checks are checked, too: each mistake must be found. ------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def notes_its_entry_when_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """As it was: an agent that was interrupted in between did not take its entry back."""

    def announce(self: Executor, context: Context) -> None:
        epoch, entry = context.record.epoch, Admission(self.node, context.leaving, digest(self._options))
        number = self.register.announce(epoch, entry)
        self._announced = Announced(epoch, number, self.store.now())

    patch.setattr(Executor, "_announce", announce)


def takes_entries_though_all_is_over(patch: pytest.MonkeyPatch) -> None:
    def fold(record: RendezvousRecord, entries: list[Admission]) -> RendezvousRecord:
        after = right(dataclasses.replace(record, closed=False), entries)
        return dataclasses.replace(after, closed=record.closed)

    right = moves.fold
    patch.setattr(moves, "fold", fold)


def sets_instead_of_comparing(patch: pytest.MonkeyPatch) -> None:
    def replace(
        self: RecordRegister, before: RendezvousRecord, after: RendezvousRecord
    ) -> tuple[RendezvousRecord, bool]:
        version = before.version + 1
        written = dataclasses.replace(after, version=version, writer=next(self.store.nonces))
        text = written.to_json()
        self.store.set(RECORD_KEY, text)
        self.store.multi_set([version_key(version - 1), version_key(version)], ["", text])
        return written, True

    patch.setattr(RecordRegister, "replace", replace)


def takes_out_though_it_is_a_spare(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moves, "may_evict", lambda record, node, silent: record.place_of(node) is not None)


def takes_a_seat_that_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seat, "fits", lambda self, node: self.nproc == node.nproc)


def gives_ranks_by_order_only(patch: pytest.MonkeyPatch) -> None:
    """All seats of a round have rank 0."""

    def complete(record: RendezvousRecord) -> RendezvousRecord:
        done = right(record)
        if done is record:
            return record
        return dataclasses.replace(
            done, seats=tuple(dataclasses.replace(seat, group_rank=0) for seat in done.seats)
        )

    right = moves.complete_round
    patch.setattr(moves, "complete_round", complete)


MISTAKES: list[tuple[Patch, Job, str]] = [
    (notes_its_entry_when_it_is_written, Job(2, 1, 2, happenings=(EXIT,)), "in the record are"),
    (takes_entries_though_all_is_over, Job(2, 1, 2, happenings=(CLOSE, EXIT), most=2), "closed"),
    (sets_instead_of_comparing, Job(2, 1, 2, happenings=()), "version"),
    (takes_out_though_it_is_a_spare, Job(3, 1, 2, True, (SUSPECT,)), "has no seat"),
    (takes_a_seat_that_is_taken, Job(1, 1, 2, True, (LATE,)), "lost its seat"),
    (gives_ranks_by_order_only, Job(2, 2, 2, happenings=()), "group ranks"),
]


@pytest.mark.parametrize(
    ("mistake", "job", "found"), [pytest.param(*case, id=case[0].__name__) for case in MISTAKES]
)
def test_finds(mistake: Patch, job: Job, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(SchedulerError, match=found):
        run_jobs(job, range(FINDS_WITHIN))
