"""What a job has in etcd, and how its clients read and change it."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence

from ..exception import StoreError
from .etcd_gateway import MOST_OPERATIONS, EtcdGateway
from .etcd_messages import Answer, Compare, Delete, Operation, Put, Range, Span, Watched
from .etcd_waiting import CLOSED_WITHIN, SharedWatch, StandingWatch

log = logging.getLogger(__name__)

_REGISTERS = b"op/"  # what the keys of writers begin with, behind the prefix

_BEAT_ANSWERED_WITHIN = 5.0  # seconds
_BEAT_AGAIN_AFTER = 5.0  # seconds, when no one answered


class EtcdJob:
    """All keys of a job: they lie under one prefix, and go with one lease, signs of life apart.

    ``life`` holds a nonce, written with the lease. Everything that is read or changed is so only if it holds
    that nonce still: a client that comes back after the lease ran out gets an error, never an empty store.

    Args:
        gateway: the client.
        prefix: in front of all keys.
        ttl: seconds for which the keys of a new job stay when no one keeps the lease alive any more; None if
            there is to be a job already.
        timeout: seconds for which to try to reach etcd.

    Raises:
        StoreError: etcd cannot be reached, or refuses; the message says why.
    """

    def __init__(self, gateway: EtcdGateway, prefix: str, ttl: int | None, timeout: float) -> None:
        self.gateway = gateway
        self.prefix = prefix.encode()
        self._life = Span(self.prefix + b"life")
        self.lease = 0
        self.nonce = b""
        self._find_or_begin(ttl, timeout)
        gateway.prefer_leader()
        self._begin_waiting()

    def __repr__(self) -> str:
        return f"{self.gateway!r}, {self.prefix.decode()!r}"

    def keep_alive(self, owner: object) -> Callable[[], None]:
        """Keeps the lease alive, from a thread of this process, until an object is collected.

        Args:
            owner: that object.

        Returns:
            To be called to end it before that, with all threads and connections.
        """
        stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._keep, args=(stop,), name="ft_wrapper-etcd-lease", daemon=True)
        thread.start()
        ending = weakref.finalize(owner, stop.put, None)
        ending.atexit = False

        def end() -> None:
            ending()
            thread.join(CLOSED_WITHIN)

        return end

    def read(self, what: str, ranges: Sequence[Range], timeout: float) -> tuple[int, list[Answer]]:
        """Reads several ranges.

        Args:
            what: what to call it in messages.
            ranges: what to read; none, for the revision alone.
            timeout: seconds for which it is tried again.

        Returns:
            The revision as of which the first of them was read, or all if they are few; and what was read.

        Raises:
            StoreError: it failed, or the job's keys are gone.
        """
        revision, answers = 0, list[Answer]()
        for start in range(0, max(1, len(ranges)), MOST_OPERATIONS):
            part = ranges[start : start + MOST_OPERATIONS]
            done = self.gateway.transaction(
                [self.lives()], part, [Range(self._life)], what=what, timeout=timeout
            )
            if not done.succeeded:
                self.check_life(done.answers[0])
            revision = revision or done.revision
            answers += done.answers
        return revision, answers

    def write(self, what: str, operations: Sequence[Operation], timeout: float) -> tuple[Answer, ...]:
        """Carries out what does no harm if it is carried out twice, or late; returns what it gave.

        Args:
            what: what to call it in messages.
            operations: at most `MOST_OPERATIONS`.
            timeout: seconds for which it is tried again.

        Raises:
            StoreError: it failed, or the job's keys are gone.
        """
        done = self.gateway.transaction(
            [self.lives()], operations, [self.life_range()], what=what, timeout=timeout
        )
        if not done.succeeded:
            self.check_life(done.answers[0])
        return done.answers

    def _begin_waiting(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # another thread may have held it when this process was forked
        self._waiting = SharedWatch(self.gateway)
        self._standing: dict[Span, StandingWatch] = {}
        self._keeps_standing = True

    def _wait_here(self) -> None:
        if self._pid != os.getpid():  # the threads of the watches have stayed in the process we come from
            self._begin_waiting()

    def standing_watch(self, span: Span, timeout: float) -> StandingWatch | None:
        """A watch of a span that stays open as long as this process keeps the job alive; None after that.

        Args:
            span: what is watched.
            timeout: seconds for which to try to reach etcd.
        """
        self._wait_here()
        with self._lock:
            found = self._standing.get(span)
            if not self._keeps_standing or (found is not None and not found.ended):
                return found
            revision, (present,) = self.read("watch", [Range(span)], timeout)
            life = Watched(self._life, revision + 1, puts=False)
            made = StandingWatch(self.gateway, Watched(span, revision + 1), present.keys, life)
            self._standing[span] = made
            return made

    def wait(self, spans: Sequence[Span], after: int, seconds: float) -> Span | None:
        """Waits until a span is written after a revision, or the job ends; see `SharedWatch.wait`."""
        self._wait_here()
        wanted = [Watched(span, after + 1, deletes=False) for span in spans]
        return self._waiting.wait([*wanted, Watched(self._life, after + 1, puts=False)], seconds)

    def lives(self) -> Compare:
        """What must hold for anything to be read or changed."""
        return Compare(self._life, "value", self.nonce)

    def life_range(self) -> Range:
        """Reads what `check_life` wants."""
        return Range(self._life)

    def check_life(self, life: Answer) -> None:
        """Raises an error if the job's keys are gone."""
        if not life.keys or life.keys[0].value != self.nonce:
            raise StoreError(
                f"{self!r}: the job's keys are gone: no one kept their lease alive for its time, or somebody "
                "removed them; this job cannot go on"
            )

    def remove(self, kinds: Sequence[bytes], timeout: float) -> bool:
        """Deletes all keys of the job, with its lease; tells whether it was there still.

        Not by the lease alone: signs of life have leases of their own. At once, since another job may begin
        as soon as ``life`` is gone. And not all below the prefix: other jobs may have theirs there.

        Args:
            kinds: what the keys begin with, behind the prefix.
            timeout: seconds for which it is tried again.
        """
        spans = [self._life, *(Span.prefix(self.prefix + kind) for kind in (*kinds, _REGISTERS))]
        done = self.gateway.transaction(
            [self.lives()], [Delete(span) for span in spans], what="removal of the job", timeout=timeout
        )
        return self.gateway.revoke(self.lease, timeout) or done.succeeded

    def _find_or_begin(self, ttl: int | None, timeout: float) -> None:
        found = self.gateway.range(Range(self._life), timeout)
        lease = 0
        if not found and ttl is None:
            raise StoreError(f"{self!r}: there is no job of this name: it has ended, or never began")
        if not found and ttl is not None:
            lease = self.gateway.grant(ttl, timeout)
            nonce = secrets.token_hex(8).encode()
            begun = self.gateway.transaction(
                [Compare(self._life, "version", 0)],
                [Put(self._life.key, nonce, lease)],
                [Range(self._life)],
                what="beginning of the job",
                timeout=timeout,
            )
            found = begun.answers[0].keys
            if begun.succeeded:
                self.lease, self.nonce = lease, nonce
                return
        if not found:
            raise StoreError(f"{self!r}: another job ended there just now; start again")
        self.lease, self.nonce = found[0].lease, found[0].value
        if lease and lease != self.lease:
            self.gateway.revoke(lease, timeout)  # somebody else came first
        if not self.lease:
            raise StoreError(
                f"{self!r}: {self._life.key.decode()!r} has no lease: another program uses this prefix"
            )

    def _keep(self, stop: queue.SimpleQueue[None]) -> None:
        until_next = self._beat()
        while until_next is not None:
            try:
                stop.get(timeout=until_next)
                break
            except queue.Empty:
                until_next = self._beat()
        with self._lock:
            self._keeps_standing = False
            standing, self._standing = list(self._standing.values()), {}
        for watch in standing:
            watch.close()
        self.gateway.close()

    def _beat(self) -> float | None:
        """Keeps the lease alive; seconds until the next time, None if there is no such lease any more."""
        try:
            ttl = self.gateway.keep_alive(self.lease, _BEAT_ANSWERED_WITHIN)
        except StoreError as error:
            log.warning("the lease of the job could not be kept alive, trying again: %s", error)
            return _BEAT_AGAIN_AFTER
        if not ttl:
            log.warning("%r: the job's lease has expired and its keys are gone: it cannot go on", self)
            return None
        return ttl / 3


@dataclasses.dataclass(frozen=True)
class Changed:
    """What became of a change.

    Args:
        carried_out: whether the conditions held.
        answers: of its operations if so, else of what was to be read then. Empty if they were lost.
    """

    carried_out: bool
    answers: tuple[Answer, ...] = ()


class EtcdWriter:
    """Changes of one client, each carried out once, whatever happens to an answer.

    A register of the client's own holds the number of its last change, and is written in the same
    transaction, on the condition that it was not written since the change before. So of several tries one at
    most is carried out, and the register tells afterwards whether one was.

    Args:
        job: the job.
    """

    def __init__(self, job: EtcdJob) -> None:
        self._job = job
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._register = Span(self._job.prefix + _REGISTERS + secrets.token_hex(8).encode())
        self._number = 0
        self._revision = 0  # at which the register was written last

    def new_name(self) -> bytes:
        """A name that no one else has, and that this client has not had before."""
        return secrets.token_hex(12).encode()

    def change(
        self,
        what: str,
        conditions: Sequence[Compare],
        operations: Sequence[Operation],
        otherwise: Sequence[Range],
        timeout: float,
    ) -> Changed:
        """Carries out operations if some conditions hold.

        Args:
            what: what to call it in messages.
            conditions: what must hold.
            operations: at most `MOST_OPERATIONS` less one.
            otherwise: what to read if a condition does not hold.
            timeout: seconds for which it is tried again.

        Raises:
            StoreError: it failed, or the job's keys are gone. Then it may have been carried out, or be
                carried out until this client's next change.
        """
        if self._pid != os.getpid():  # a register of one's own, also after a fork
            self._begin()
        with self._lock:
            self._number += 1
            mine = str(self._number).encode()
            while True:
                done = self._job.gateway.transaction(
                    [self._job.lives(), self._unwritten(), *conditions],
                    [Put(self._register.key, mine, self._job.lease), *operations],
                    [Range(self._register), self._job.life_range(), *otherwise],
                    what=what,
                    timeout=timeout,
                )
                if done.succeeded:
                    self._revision = done.revision
                    return Changed(True, done.answers[1:])
                register, life, *rest = done.answers
                self._job.check_life(life)
                held, moved = self._note(register)
                if held == mine:
                    return Changed(True)  # an earlier try was carried out, and its answer lost
                if moved:
                    continue  # by an earlier change, which had been given up
                if done.repeated and self._rule_out(what, mine, timeout):
                    return Changed(True)
                return Changed(False, tuple(rest))

    def _unwritten(self) -> Compare:
        return Compare(self._register, "mod", self._revision)

    def _note(self, register: Answer) -> tuple[bytes | None, bool]:
        """Notes where the register was written last; returns what it holds, and whether that is new."""
        before = self._revision
        self._revision = register.keys[0].mod_revision if register.keys else 0
        return register.keys[0].value if register.keys else None, self._revision != before

    def _rule_out(self, what: str, earlier: bytes, timeout: float) -> bool:
        """Sees to it that no earlier try is carried out from now on; tells whether one has been.

        The conditions did not hold for the last try. They may for one that is still on its way.
        """
        self._number += 1
        mine = str(self._number).encode()
        done = self._job.gateway.transaction(
            [self._job.lives(), self._unwritten()],
            [Put(self._register.key, mine, self._job.lease)],
            [Range(self._register), self._job.life_range()],
            what=what,
            timeout=timeout,
        )
        if done.succeeded:
            self._revision = done.revision
            return False
        register, life = done.answers
        self._job.check_life(life)
        return self._note(register)[0] == earlier
