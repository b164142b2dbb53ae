"""The stores of a running job, in which a client follows how the job stands."""

import contextlib
import functools
from collections.abc import Generator
from datetime import timedelta

from torch.distributed import DistError

from ..exception import StoreError
from ..protocol.operations import Operations, read
from ..rendezvous.backends import RENDEZVOUS, workers_namespace
from ..rendezvous.keys import RECORD_KEY, endpoint_key, version_key
from ..rendezvous.record import RendezvousRecord
from ..store import StoreMixin
from ..store.address import EtcdAddress, is_etcd
from ..store.plan import opened_by_tool
from .status import COMPLETED, NOT_FORMED, NodesSeen, Status, nodes_in, watch

TIMEOUT = timedelta(seconds=10)


def read_record(store: Operations) -> RendezvousRecord | None:
    """The record of the nodes; None if there is none in this store."""
    text = read(store, RECORD_KEY)
    try:
        return None if text is None else RendezvousRecord.from_text(text)
    except ValueError as error:
        raise StoreError(f"store key {RECORD_KEY!r}: {error}") from error


def meeting_place(endpoint: str) -> str:
    """Where the record is, by what a user calls the job: on etcd the job's prefix is enough."""
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
    """Reads how a job stands, whenever that changes, round after round.

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
    """How a job stands now, as JSON in a line; empty if its store cannot be read.

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
    """The nodes, as long as they are in this round, and whether the job has ended; None after that."""
    record = read_record(store) or RendezvousRecord(1, 1)
    return (nodes_in(record), record.closed) if record.round == number else None
