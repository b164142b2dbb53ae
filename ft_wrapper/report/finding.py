"""Where a job's stores are, by what a user calls the job."""

import contextlib
from datetime import timedelta

from ..exception import StoreError
from ..protocol.operations import Operations, read
from ..rendezvous.backends import RENDEZVOUS, workers_namespace
from ..rendezvous.record import Record
from ..rendezvous.register import RECORD_KEY, endpoint_key
from ..store import StoreMixin, connect
from ..store.address import EtcdAddress, is_etcd
from ..store.plan import connector

TIMEOUT = timedelta(seconds=10)
#: What a user calls a job.
ENDPOINT = "HOST:PORT, or etcd://HOST:PORT/PREFIX"


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError unless this may be what a user calls a job."""
    try:
        connector(endpoint, TIMEOUT)
    except ValueError:
        raise ValueError(f"{endpoint or 'no endpoint'}: give {ENDPOINT}") from None


def read_record(store: Operations) -> Record | None:
    """The record of the nodes; None if there is none in this store."""
    text = read(store, RECORD_KEY)
    try:
        return None if text is None else Record.from_text(text)
    except ValueError as error:
        raise StoreError(f"store key {RECORD_KEY!r}: {error}") from error


def meeting_place(endpoint: str) -> str:
    """Where the record is, by what a user calls the job: on etcd the job's prefix is enough."""
    if not is_etcd(endpoint) or EtcdAddress.parse(endpoint).namespace:
        return endpoint
    return str(EtcdAddress.parse(endpoint).within(RENDEZVOUS))


def ranks_store(endpoint: str, store: Operations, record: Record) -> str:
    """Address of the store in which wrapped ranks agree; empty if there is none yet."""
    if not is_etcd(endpoint):
        return read(store, endpoint_key(record.round)) or ""
    if not record.complete:
        return ""
    return str(EtcdAddress.parse(endpoint).within(workers_namespace(record.round)))


def open_store(address: str, opened: contextlib.ExitStack) -> StoreMixin:
    """Connects to a store, for as long as the stack is open."""
    return opened.enter_context(contextlib.closing(connect(address, TIMEOUT)))
