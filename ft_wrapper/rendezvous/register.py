"""The record in a store: read it, replace it, wait for the next one.

It is replaced by compare_set from exactly what was read. Every version has its own `writer`, so a node that
reads its own one back knows that its change was made, also where an answer was lost and the store was asked
again.
"""

from __future__ import annotations

import dataclasses

from torch.distributed.elastic.rendezvous import RendezvousStateError

from ..store import StoreOperations
from . import keys
from .state import Entry, State

KEPT_VERSIONS = 32
"""So many keys that wake somebody stay. A wait for an older one lasts until its timeout: the key is gone."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The record at one time.

    Args:
        text: what the store holds; empty if there is no record yet.
        state: what that means.
    """

    text: str
    state: State


class Register:
    """The record in a store.

    Args:
        store: a client of one's own.
        initial: what the record is before anybody has written one.
    """

    def __init__(self, store: StoreOperations, initial: State) -> None:
        self._store = store
        self._initial = Snapshot("", initial)

    @property
    def store(self) -> StoreOperations:
        """The client."""
        return self._store

    def read(self) -> Snapshot:
        """Reads the record."""
        return self._snapshot(self._store.try_get(keys.STATE) or "")

    def replace(self, before: Snapshot, after: State) -> tuple[Snapshot, bool]:
        """Replaces the record, unless somebody else has, and wakes those who wait for that.

        Args:
            before: what is replaced.
            after: by what.

        Returns:
            The record as it is now, and whether it was replaced.

        Raises:
            RendezvousStateError: there is no record any more, or what there is cannot be read.
        """
        version = before.state.version + 1
        state = dataclasses.replace(after, version=version, writer=self._store.new_nonce())
        desired = state.to_text()
        held = self._store.compare_set(keys.STATE, before.text, desired).decode(errors="replace")
        if held == desired:
            # The one that replaced the last one may have died before it could wake anybody.
            self._store.multi_set([keys.version(version - 1), keys.version(version)], ["", ""])
            if version > KEPT_VERSIONS:
                self._store.delete_key(keys.version(version - KEPT_VERSIONS))
            if state.epoch > max(1, before.state.epoch):
                self._forget_log(state.epoch - 2)
            return Snapshot(desired, state), True
        if held == before.text:
            raise RendezvousStateError(
                f"store key {keys.STATE!r} is gone: the store has lost what the nodes agreed on"
            )
        return self._snapshot(held), False

    def wait(self, version: int, seconds: float) -> Snapshot | None:
        """Waits to be woken by a version newer than this one, then reads the record.

        What is read is what the record is now, however long the reader was stopped before it could look. But
        a wait that begins when the record is `KEPT_VERSIONS` further on already is woken by no one.

        Args:
            version: of the record that is known.
            seconds: how long to wait.

        Returns:
            The record; None if nothing came in time: then it has to be read.
        """
        return self.read() if self._store.wait_for(keys.version(version + 1), seconds) else None

    def pass_on(self, snapshot: Snapshot) -> None:
        """Wakes those who wait for a version, unless that was done: who wrote it may have died before."""
        key = keys.version(snapshot.state.version)
        if not self._store.check([key]):
            self._store.set(key, "")

    def announce(self, epoch: int, entry: Entry) -> int:
        """Appends an entry to a log; returns how many there are, by the count."""
        self._store.log_append(keys.log(epoch), entry.to_text())
        return self._store.add(keys.count(epoch), 1)

    def entries(self, epoch: int) -> list[Entry]:
        """Reads a log.

        Raises:
            RendezvousStateError: something in it cannot be read.
        """
        key = keys.log(epoch)
        try:
            return [Entry.from_text(line) for line in self._store.log_read(key)]
        except ValueError as error:
            raise RendezvousStateError(f"store key {key!r}: {error}") from error

    def _forget_log(self, epoch: int) -> None:
        self._store.delete_key(keys.log(epoch))
        self._store.delete_key(keys.count(epoch))

    def _snapshot(self, text: str) -> Snapshot:
        if not text:
            return self._initial
        try:
            return Snapshot(text, State.from_text(text))
        except ValueError as error:
            raise RendezvousStateError(f"store key {keys.STATE!r}: {error}") from error
