"""A running job by its stores, from any host: its status, a drain, a restart, a stop.

A drain and a stop go into the record that the nodes agree on, and their agents carry them out. A restart ends
the iteration, as a fault does.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Generator
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousError

from .._text import plural
from ..agent.rounds import DONE, JobResult
from ..attribution import Interruption
from ..exception import StoreError
from ..protocol import Agreement, keys
from ..protocol.deaths import holders
from ..protocol.notice import Notice
from ..protocol.operations import Operations, read
from ..protocol.records import FAULT, Fault
from ..rendezvous import drains, moves
from ..rendezvous.backends import RENDEZVOUS, workers_namespace
from ..rendezvous.drains import Refused
from ..rendezvous.record import RendezvousRecord
from ..rendezvous.register import RECORD_KEY, RecordRegister, endpoint_key, version_key
from ..store import StoreMixin
from ..store.address import EtcdAddress, is_etcd
from ..store.plan import opened_by_tool
from .status import COMPLETED, NOT_FORMED, NodesSeen, Status, nodes_in, watch

TIMEOUT = timedelta(seconds=10)
_SLACK = 30.0  # seconds beyond a drain's own, for processes to end
_LOOK_AGAIN = 5.0  # seconds, should a wake be lost


def read_record(store: Operations) -> RendezvousRecord | None:
    """The record of the nodes; None if there is none in this store."""
    text = read(store, RECORD_KEY)
    return None if text is None else RendezvousRecord.from_json(text, RECORD_KEY)


def meeting_place(endpoint: str) -> str:
    """Where the record is, from the endpoint that a user gives: on etcd the job's prefix is enough."""
    if not is_etcd(endpoint) or EtcdAddress.parse(endpoint).namespace:
        return endpoint
    return str(EtcdAddress.parse(endpoint).within(RENDEZVOUS))


def ranks_store(endpoint: str, store: Operations, record: RendezvousRecord) -> str:
    """Address of the store in which wrapped ranks agree; empty if there is none yet."""
    if not is_etcd(endpoint):
        return read(store, endpoint_key(record.round)) or ""
    if not record.complete:
        return ""
    return str(EtcdAddress.parse(endpoint).within(workers_namespace(record.round)))


def follow(endpoint: str, longest: float, opened: contextlib.ExitStack) -> Generator[Status, None, None]:
    """Reads a job's status whenever it changes, round after round.

    Args:
        endpoint: what a user calls the job: where its nodes meet, or the store of its ranks.
        longest: seconds after which to read it in any case.
        opened: closes the stores.

    Yields:
        What was read. Ends when the job has ended.

    Raises:
        StoreError: a store cannot be read.
    """
    meeting = meeting_place(endpoint)
    store = opened.enter_context(opened_by_tool(meeting, TIMEOUT))
    status: Status | None = None
    watched: int | None = None  # the last round whose ranks' store was read to its end
    while True:
        record = read_record(store)
        if record is None:
            # No nodes met there: the ranks agree at the endpoint itself, as they do under any other launcher.
            if meeting != endpoint:
                store = opened.enter_context(opened_by_tool(endpoint, TIMEOUT))
            yield from watch(store, longest)
            return
        if record.closed and record.round == watched:
            return
        if address := ranks_store(endpoint, store, record):
            try:
                with opened_by_tool(address, TIMEOUT) as ranks:
                    nodes = functools.partial(_nodes_in_round, store, record.round)
                    for status in watch(ranks, longest, nodes):
                        yield status
            except (StoreError, DistError):
                if status is None:
                    raise
                # The ranks' store has ended with its round, and the next one may take a while.
            watched = record.round
            if status is not None and status.state == COMPLETED:
                return
        else:
            yield (status := Status(NOT_FORMED, nodes=nodes_in(record)))
        if record.closed:
            return
        store.wait_for(version_key(record.version + 1), longest)


def read_now(endpoint: str) -> str:
    """A job's current status, as one line of JSON; empty if its store cannot be read.

    Args:
        endpoint: what a user calls the job; empty before its nodes have met.
    """
    if not endpoint:
        return Status(NOT_FORMED).to_json()
    try:
        with contextlib.ExitStack() as opened:
            statuses = opened.enter_context(contextlib.closing(follow(endpoint, 0.0, opened)))
            return next(statuses).to_json()
    except (StoreError, DistError, ImportError, ValueError):
        return ""


def _nodes_in_round(store: StoreMixin, number: int) -> NodesSeen | None:
    """What is seen of the nodes, as long as they are in this round; None after that."""
    record = read_record(store) or RendezvousRecord(1, 1)
    notice = str(dataclasses.replace(record.notice, seconds=None)) if record.notice else ""
    return (nodes_in(record), notice, record.closed) if record.round == number else None


# What changes it -------------------------------------------------------------------------------------------


class JobStores:
    """A job's stores.

    Args:
        endpoint: what a user calls the job.
        opened: closes the stores.

    Attributes:
        meeting: where its nodes meet, or its ranks agree.

    Raises:
        StoreError: that store cannot be reached.
    """

    def __init__(self, endpoint: str, opened: contextlib.ExitStack) -> None:
        self._endpoint = endpoint
        self._opened = opened
        self.meeting = opened.enter_context(opened_by_tool(meeting_place(endpoint), TIMEOUT))
        self._record = read_record(self.meeting)

    def ranks(self) -> StoreMixin | None:
        """Where the ranks agree; None while they have no store.

        Raises:
            Refused: the job is over, and the store may have gone with it.
            StoreError: it cannot be reached.
        """
        if self._record is None:
            return self.meeting
        if self._record.closed:
            raise Refused("the job is over")
        address = ranks_store(self._endpoint, self.meeting, self._record)
        return self._opened.enter_context(opened_by_tool(address, TIMEOUT)) if address else None

    def change(self, change: Callable[[RendezvousRecord], RendezvousRecord]) -> RendezvousRecord:
        """Changes the record of the nodes.

        Args:
            change: makes the new record from the old one; called again if another node was faster.

        Raises:
            Refused: the job has no record.
            StoreError: the record cannot be written.
            ValueError: by ``change``.
        """
        if self._record is None:
            where = f"no node of ftrun meets others at {self._endpoint}"
            raise Refused(f"{where}; give the job's --rdzv-endpoint, or on one node what ftrun prints")
        try:
            return RecordRegister(self.meeting, self._record).change(change)
        except RendezvousError as error:
            raise StoreError(str(error)) from error


def drain(endpoint: str, target: str, within: float, why: str) -> str:
    """Has ranks leave a job at their next step, and waits until they have; the other nodes go on.

    Args:
        endpoint: what a user calls the job.
        target: a node or a slot; see `drains.find`.
        within: seconds after which ranks that have not left are ended.
        why: for people.

    Returns:
        What was done, for people.

    Raises:
        Refused: too few ranks would be left, they have not left in time, or the job is over.
        StoreError: a store cannot be used.
        ValueError: there is no such node or slot.
    """
    with contextlib.ExitStack() as opened:
        job = JobStores(endpoint, opened)
        ranks = job.ranks()
        slots, least = (set[int](), 0) if ranks is None else drains.living_slots(ranks)

        find = functools.partial(drains.find, target=target, within=within, why=why)
        record = job.change(lambda record: drains.request(record, find(record), slots, least))
        asked = find(record)
        leaving = slots.intersection(drains.drained_slots(record, asked))
        if ranks is None or not leaving:
            return f"{target} is drained: no rank of a wrapped job was there"
        try:
            _await_gone(ranks, leaving, within + _SLACK)
        except (StoreError, DistError):
            # Under --restart-policy group the next round may close the ranks' store first.
            if (now := read_record(job.meeting)) is None or drains.drained_slots(now, asked):
                raise
        left = len(slots - leaving)
    names = ", ".join(map(str, sorted(leaving)))
    return f"{plural(len(leaving), 'slot')} {names} left the job; ranks that go on: {left}"


def _await_gone(store: StoreMixin, slots: set[int], seconds: float) -> None:
    """Waits until all processes that hold these slots now have left the job."""
    agreement = Agreement(store)
    leaving = set(holders(agreement, slots))
    deadline = store.now() + seconds
    while True:
        view = agreement.iterations.read_current()
        assert view is not None, "it had formed"
        outcome = agreement.ends.outcome_of(view.n)
        left = leaving.intersection(view.members) - agreement.ends.deaths_of(view.n)
        if not left or outcome not in (None, FAULT):
            return
        remaining = deadline - store.now()
        if remaining <= 0:
            names = ", ".join(member.name for member in sorted(left))
            raise Refused(f"{names} did not leave within {seconds:g} s; see the log of their ftrun")
        wake = keys.wake_end(view.n) if outcome is None else keys.wake_head(view.n + 1)
        store.wait_for(wake, min(remaining, _LOOK_AGAIN))


def restart(endpoint: str, why: str) -> str:
    """Ends the iteration of a job: all ranks enter the function again.

    Args:
        endpoint: what a user calls the job.
        why: for people.

    Returns:
        What was done, for people.

    Raises:
        Refused: no iteration is running.
        StoreError: a store cannot be used.
    """
    with contextlib.ExitStack() as opened:
        job = JobStores(endpoint, opened)
        ranks = job.ranks()
        view = None if ranks is None else Agreement(ranks).iterations.read_current()
        if ranks is None or view is None:
            raise Refused("no wrapped function has been entered by all ranks yet")
        ends = Agreement(ranks).ends
        if ends.outcome_of(view.n) is not None:
            raise Refused(f"iteration {view.n} has ended already")
        words = f"all ranks were asked to restart: {why}"
        fault = Fault(view.members[0], None, Interruption.REQUESTED, words)
        if ends.report_fault(view.n, fault) != FAULT:
            raise Refused("the job has completed")
    return f"iteration {view.n} was ended: all ranks enter the function again"


def notice(endpoint: str, within: float | None, why: str) -> str:
    """Asks the ranks of a job for a checkpoint, at the same step; it ends nothing.

    Args:
        endpoint: what a user calls the job.
        within: seconds that there are; None if that is not known.
        why: for people.

    Returns:
        What was done, for people.

    Raises:
        Refused: the job is over, or has no nodes of ``ftrun``.
        StoreError: a store cannot be used.
    """
    who, _, said = why.partition(": ")
    given = Notice(who, said or "a checkpoint is asked for", within, os.urandom(8).hex())
    with contextlib.ExitStack() as opened:
        if JobStores(endpoint, opened).change(lambda record: moves.give_notice(record, given)).closed:
            raise Refused("the job is over")
    return "all ranks get the notice; the log of ftrun says when they have it"


def stop(endpoint: str, why: str) -> str:
    """Ends a job: on all nodes ranks get SIGTERM, and time to end; ``ftrun`` exits with 0.

    Args:
        endpoint: what a user calls the job.
        why: for people.

    Returns:
        What was done, for people.

    Raises:
        Refused: the job is over, or has no nodes of ``ftrun``.
        StoreError: a store cannot be used.
    """

    def closed(record: RendezvousRecord) -> RendezvousRecord:
        if record.closed:
            raise Refused("the job is over")
        return moves.close(record, why, JobResult(DONE, why, verdict="stopped").to_text())

    with contextlib.ExitStack() as opened:
        JobStores(endpoint, opened).change(closed)
    return "all nodes end their ranks"
