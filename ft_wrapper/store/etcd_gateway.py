"""A client of etcd's v3 JSON gateway: its requests, by name. Reads are linearizable, always."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .etcd_answers import EtcdRefused
from .etcd_http import EtcdHttp
from .etcd_messages import (
    Branch,
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    Range,
    Transaction,
    Watched,
    operation_json,
    parse_answer,
    parse_answers,
    parse_revision,
    transaction_json,
)
from .etcd_watch import Watch

MOST_OPERATIONS = 128
"""The most operations that etcd takes in a transaction, by default."""


class EtcdGateway(EtcdHttp):
    """A client of an etcd cluster, for all threads of a process, and of its children after a fork."""

    # Keys ----------------------------------------------------------------------------------------------

    def range(self, what: Range, timeout: float | None = None) -> tuple[KeyValue, ...]:
        """Reads keys.

        Args:
            what: which ones.
            timeout: seconds for which it is tried again; the client's when None.

        Raises:
            EtcdCompacted: it asks for a revision that is not kept.
            StoreError: it failed; names endpoints and operation.
        """
        reply, _ = self.request("range", "kv/range", operation_json(what)["request_range"], timeout)
        return parse_answer(reply).keys

    def put(self, what: Put, timeout: float | None = None) -> int:
        """Writes a key; returns the store's revision by it. Arguments and errors as for `range`.

        A repetition after a lost answer may come after somebody else's write of the same key.
        """
        reply, _ = self.request("put", "kv/put", operation_json(what)["request_put"], timeout)
        return parse_revision(reply)

    def delete(self, what: Delete, timeout: float | None = None) -> int:
        """Deletes keys; returns how many. Arguments and errors as for `range`; repetitions as for `put`."""
        reply, _ = self.request(
            "delete", "kv/deleterange", operation_json(what)["request_delete_range"], timeout
        )
        return int(reply.get("deleted", 0))

    def transaction(
        self,
        compare: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        what: str = "transaction",
        timeout: float | None = None,
    ) -> Transaction:
        """Does some operations if all comparisons hold, and others if not; all at once.

        Args:
            compare: what must hold.
            success: what to do then.
            failure: what to do otherwise.
            what: what to call it in messages.
            timeout: seconds for which it is tried again; the client's when None.

        Raises:
            StoreUnavailable: no one answered in time. It may have been carried out.
            StoreError: it failed; names endpoints and operation.
        """
        body = transaction_json(Branch(tuple(compare), tuple(success), tuple(failure)))
        reply, tries = self.request(what, "kv/txn", body, timeout)
        return Transaction(
            bool(reply.get("succeeded")), parse_revision(reply), parse_answers(reply), tries > 1
        )

    # Leases --------------------------------------------------------------------------------------------

    def grant(self, ttl: int, timeout: float | None = None) -> int:
        """Makes a lease; returns its id. After a lost answer one more stays behind until it runs out.

        Args:
            ttl: seconds for which it lasts unless it is kept alive; etcd takes no less than it can keep.
            timeout: seconds for which it is tried again; the client's when None.
        """
        reply, _ = self.request("lease grant", "lease/grant", {"TTL": str(ttl)}, timeout)
        return int(reply["ID"])

    def keep_alive(self, lease: int, timeout: float | None = None) -> int:
        """Lets a lease last its whole time again; returns the seconds, 0 if there is no such lease."""
        reply, _ = self.request("lease keep alive", "lease/keepalive", {"ID": str(lease)}, timeout)
        return int(reply.get("result", {}).get("TTL", 0))

    def time_to_live(self, lease: int, timeout: float | None = None) -> int:
        """How many seconds a lease still lasts; -1 if there is no such lease."""
        reply, _ = self.request("lease time to live", "lease/timetolive", {"ID": str(lease)}, timeout)
        return int(reply.get("TTL", 0))

    def revoke(self, lease: int, timeout: float | None = None) -> bool:
        """Ends a lease, and deletes the keys that go with it; tells whether there was one."""
        try:
            self.request("lease revoke", "lease/revoke", {"ID": str(lease)}, timeout)
        except EtcdRefused as error:
            if not error.is_not_found:
                raise
            return False
        return True

    # Watches -------------------------------------------------------------------------------------------

    def watch(self, watched: Watched) -> Watch:
        """Follows the writes of a span; see `Watch`."""
        return Watch(self, watched)

    # Anything else -------------------------------------------------------------------------------------

    def call(self, path: str, body: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Sends a request that this client has no name for: of maintenance, of users and roles.

        Args:
            path: behind ``/v3/``.
            body: the request as JSON.
            timeout: seconds for which it is tried again; the client's when None.

        Returns:
            The answer as JSON.

        Raises:
            StoreError: it failed; names endpoints and operation.
        """
        return self.request(path, path, body, timeout)[0]
