"""Mistakes in the rendezvous, each of which ``tests/simulation/rendezvous/explore.py --random`` finds."""

from __future__ import annotations

from .mutant import Mutant


def _of(file: str, name: str, old: str, new: str, why: str) -> Mutant:
    return Mutant(name, f"rendezvous/{file}.py", old, new, "rendezvous", why)


RENDEZVOUS: list[Mutant] = [
    _of(
        "presence",
        "wrong-neighbour",
        "[*everybody[here + 1 :], *everybody[:here]]\n\n\ndef nearest",
        "[*everybody[here + 2 :], *everybody[:here]]\n\n\ndef nearest",
        "each node is watched by the two in front of it",
    ),
    _of(
        "presence",
        "never-looks-past-a-silent-node",
        "still[first] > self._timeout / 2",
        "still[first] > 2 * self._timeout",
        "nodes that were lost together are observed at the same time",
    ),
    _of(
        "presence",
        "looks-past-healthy-nodes",
        "still[first] > self._timeout / 2",
        "still[first] >= 0.0",
        "while nothing is wrong each node costs the same, however many there are",
    ),
    _of(
        "presence",
        "takes-the-first-look-for-a-sign-of-life",
        "still[node] == 0.0 and node in before",
        "still[node] == 0.0",
        "one look says nothing: all behind a silent node are looked at at once, not one a look",
    ),
    _of(
        "presence",
        "forgets-what-it-saw-when-places-change",
        "if not before.get(node, True)]",
        "if False]",
        "spares in the places of lost nodes do not begin the observation again",
    ),
    _of(
        "presence",
        "silent-after-half-of-the-timeout",
        "if seconds >= self._timeout]",
        "if seconds >= self._timeout / 2]",
        "a node that gave a sign of life within the timeout is not taken out",
    ),
    _of(
        "presence",
        "no-time-to-reconnect",
        "until = now + min(2 * away + self._interval, RECONNECTS) + self._interval",
        "until = now",
        "after an outage of the store not all clients are back at the same time",
    ),
    _of(
        "presence",
        "no-time-to-reconnect-after-a-long-outage",
        "min(2 * away + self._interval, RECONNECTS) + self._interval",
        "self._interval",
        "an attempt to connect lasts as long as all before it",
    ),
    _of(
        "presence",
        "judges-only-while-it-is-cut-off",
        "away > self._interval / 2",
        "away < self._interval / 2",
        "only a node that could not look gives the others time",
    ),
    _of(
        "presence",
        "spares-are-in-the-ring-of-seats",
        "record.policy is RoundPolicy.RANK and record.place_of(node) is not NodePlace.SEAT",
        "record.policy is RoundPolicy.RANK and record.place_of(node) is NodePlace.SEAT",
        "a spare finds out that all with seats are lost",
    ),
    _of(
        "presence",
        "does-not-read-the-record-after-a-wait-in-vain",
        "is None:\n                    self._register.read()",
        "is None:\n                    pass",
        "the key that it waits for may be gone",
    ),
    _of(
        "presence",
        "waits-without-a-limit",
        "self._register.wait(known.version, LOOK_AGAIN)",
        "self._register.wait(known.version, 14 * 24 * 3600.0)",
        "the key that it waits for may be gone",
    ),
    _of(
        "presence",
        "passes-over-a-change",
        "known.version > self._notified",
        "known.version > self._notified + 1",
        "the agent is told each record",
    ),
    _of(
        "presence",
        "sweeps-at-each-beat",
        "== 0:\n            self._executor.sweep()",
        "!= 0:\n            self._executor.sweep()",
        "what each node asks of the store is bounded",
    ),
    _of(
        "presence",
        "does-not-sweep",
        "            self._executor.sweep()",
        "            pass",
        "what a node that died left undone is done by another",
    ),
    _of(
        "register",
        "wakes-only-those-who-are-behind",
        "for number in (version - 1, version))",
        "for number in (version - 1,))",
        "who waits for the version that was written is woken",
    ),
    _of(
        "register",
        "waits-for-the-version-that-it-knows",
        "self.store.wait_for(version_key(version + 1), seconds) is not None",
        "self.store.wait_for(version_key(version), seconds) is not None",
        "a wait ends with a change, not at once",
    ),
    _of(
        "register",
        "deletes-the-wrong-key",
        "version_key(version - KEPT_VERSIONS)",
        "version_key(KEPT_VERSIONS)",
        "keys of old versions do not pile up",
    ),
    _of(
        "register",
        "passes-on-what-was-passed-on",
        "if not self.store.check([self.store.wake_name(key)])",
        "if self.store.check([self.store.wake_name(key)])",
        "a wake-up that was lost is passed on",
    ),
    _of(
        "register",
        "keeps-old-logs",
        "record.epoch > max(1, before.epoch)",
        "record.epoch > before.epoch + 1",
        "logs of old rounds do not pile up",
    ),
    _of(
        "register",
        "believes-that-it-has-won",
        "if held == desired:",
        "if held != before.text:",
        "a change that lost against another one is made again",
    ),
    _of(
        "register",
        "reads-then-waits",
        "return self.read() if self.store.wait_for(version_key(version + 1), seconds) is not None else None",
        "return (self.read(), self.store.wait_for(version_key(version + 1), seconds) is not None)[0]",
        "the record is read once the wake-up has come",
    ),
    _of(
        "executor",
        "takes-nobody-out",
        "may = moves.may_evict(record, self.node, silent)",
        "may = not moves.may_evict(record, self.node, silent)",
        "silent nodes are taken out",
    ),
    _of(
        "moves",
        "passes-over-an-entry",
        "admissions[record.folded :]",
        "admissions[record.folded + 1 :]",
        "each entry of the log is taken once",
    ),
    _of(
        "moves",
        "refuses-an-agent-that-it-knows",
        "before.incarnation > node.incarnation",
        "before.incarnation >= node.incarnation",
        "a node comes again to the next round",
    ),
    _of(
        "record",
        "one-too-many",
        ">= self.max_nodes\n\n    def to_text",
        "> self.max_nodes\n\n    def to_text",
        "more nodes than may be are spares",
    ),
    _of(
        "record",
        "does-not-tell-incarnations-apart",
        "self.id == other.id and self.incarnation == other.incarnation",
        "self.id == other.id",
        "an agent that was started again is another one",
    ),
    _of(
        "operations",
        "does-not-notice-that-it-is-out",
        "return max(1, waiting)",
        "return waiting",
        "a node that was taken out comes again",
    ),
    _of(
        "operations",
        "patience-has-no-end",
        "if context.now >= context.patience_ends:",
        "if context.now >= context.deadline:",
        "a node that no one takes into the record does that itself",
    ),
    _of(
        "operations",
        "holds-on-to-its-old-seat",
        "if place is NodePlace.SEAT and self.is_leaving:",
        "if place is NodePlace.SEAT and not self.is_leaving:",
        "a node that leaves a round has no place in it",
    ),
]
MUTANTS = RENDEZVOUS
