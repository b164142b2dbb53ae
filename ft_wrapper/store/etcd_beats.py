"""Signs of life in etcd: leases, since what is only kept alive is not written."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

from .etcd_job import EtcdJob
from .etcd_messages import Put, Range, Span
from .operations import LAPSED

_SHORTEST = 2  # seconds; etcd grants no lease for less than it can keep, with its own settings


@dataclasses.dataclass(frozen=True)
class _Lease:
    id: int
    ttl: int
    kept: float  # when it was kept alive last


class EtcdBeats:
    """Gives signs of life, and sees those of others.

    A process that gives one has a lease, and an entry that goes with it. Both are made at the first sign of
    life, and again when the lease has run out; each further one keeps the lease alive and writes nothing.
    Leases that no one keeps alive any more, and their entries, etcd takes away by itself.

    Several may give signs of life for the same, also a process and its child after a fork: each by an entry
    of its own, or all by the same. The last of them counts.

    Args:
        job: the job.
    """

    def __init__(self, job: EtcdJob) -> None:
        self._job = job
        self._leases: dict[bytes, _Lease] = {}
        self._looks = itertools.count(1)

    def beat(self, what: str, entries: bytes, lasts: float, timeout: float) -> None:
        """Gives a sign of life.

        A lease that is there is kept alive even if the job's keys are gone: a reader is told.

        Args:
            what: what to call it in messages.
            entries: where its entries are.
            lasts: seconds for which it holds; two at least.
            timeout: seconds for which a request is tried again.

        Raises:
            StoreError: it failed; or the lease had run out, and the job's keys are gone.
        """
        gateway, ttl = self._job.gateway, max(_SHORTEST, math.ceil(lasts))
        now = time.monotonic()
        lease = self._leases.get(entries)
        if lease is None or lease.ttl != ttl or not gateway.keep_alive(lease.id, timeout):
            lease = _Lease(gateway.grant(ttl, timeout), ttl, now)
            # The name is the lease's: after a lost answer, or late, it is written once more and no other.
            put = Put(self._ours(entries).key + b"%x" % lease.id, b"", lease.id)
            self._job.write(what, [put], timeout)
            self._leases = {of: one for of, one in self._leases.items() if now - one.kept < one.ttl}
        self._leases[entries] = dataclasses.replace(lease, kept=now)

    def counts(self, entries: bytes) -> Range:
        """What to read for the signs of life whose entries are there."""
        return Range(self._ours(entries), count_only=True)

    def seen(self, found: int) -> int:
        """A number that is larger each time there is a sign of life, else `LAPSED`.

        Args:
            found: how many entries were counted.
        """
        return next(self._looks) if found else LAPSED

    def _ours(self, entries: bytes) -> Span:
        """Those of this job, and of none that had the same prefix before."""
        return Span.prefix(entries + self._job.nonce)
