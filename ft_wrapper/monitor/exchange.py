"""What the nodes of a job tell each other about ranks that hang or are slow, in the store.

A node whose active ranks all wait or hang claims so, in one key; nodes with a rank that hangs read the
claims. How late ranks are, each node says in a key of its own; the node of active rank 0 says what is usual,
and what it knows of the steps.
"""

from collections.abc import Callable, Sequence

from ..protocol import keys
from ..protocol.operations import Append, Operations, Read, Step, Write, read_log
from .evidence import Claim
from .lateness import Pace, usual_pace

_PATIENCE = 5.0  # seconds without the store
_READ_EVERY = 0.2  # seconds between two looks at the claims
_PACES_EVERY = 10.0  # seconds between two messages in calm times


class Exchange:
    """One node's part of it.

    Args:
        connect: makes a client of the store.
        name: of the node's heart.

    Attributes:
        is_alone: whether all active ranks are on this node.
    """

    def __init__(self, connect: Callable[[], Operations], name: str) -> None:
        self._connect, self._name = connect, name
        self._store: Operations | None = None
        self._read_at = self._paces_at = self._learned_at = 0.0
        self.is_alone = False
        self.begin(-1)

    def begin(self, n: int) -> None:
        """Begins an iteration, about which this node has said nothing yet."""
        self._n, self._compiles = n, False
        self._claimed: Claim | None = None
        self._listed: set[str] = set()
        self._learned = ""

    def close(self) -> None:
        """Closes the client."""
        if self._store is not None:
            self._store.close()

    def claim(self, claim: Claim | None) -> None:
        """Says what this node's active ranks wait in; None: they do not all wait or hang."""
        if claim != self._claimed and not self.is_alone:
            self._say(keys.claims(self._n), keys.claim(self._n, self._name), claim.to_json() if claim else "")
        self._claimed = claim

    def claims(self, now: float) -> Sequence[Claim]:
        """What all nodes claim now; nothing if they were asked a moment ago."""
        if self.is_alone:
            return [self._claimed] if self._claimed else []
        if now - self._read_at < _READ_EVERY:
            return []
        self._read_at = now
        return [*map(Claim.from_json, self._said(keys.claims(self._n), keys.claim))]

    def excuse(self, compiles: bool) -> None:
        """Says whether a rank of this node compiles."""
        if compiles is not self._compiles:
            self._open().execute([Write({keys.excuse(self._n): "compiling" if compiles else ""})])
            self._compiles = compiles

    def note_learned(self, learned: str, now: float) -> None:
        """Notes what is known of the steps, for `ftrun status`."""
        if learned != self._learned and now >= self._learned_at:
            self._learned_at = now + _PACES_EVERY
            self._open().execute([Write({keys.learned(self._n): learned})])
            self._learned = learned

    def paces(self, mine: Pace | None, now: float, *, is_first: bool) -> Pace | None:
        """Says how late this node's ranks are; returns how late the job's usually are, if that is news.

        Args:
            mine: what the ranks of this node usually do; None: that is not known yet.
            now: monotonic seconds.
            is_first: whether active rank 0 is on this node.
        """
        if mine is None or self.is_alone or now < self._paces_at:
            return None
        self._paces_at, usual = now + _PACES_EVERY, keys.pace(self._n)
        self._say(keys.paces(self._n), keys.pace(self._n, self._name), mine.to_json())
        (said,) = self._open().execute([Read(usual)])
        if is_first:
            job = usual_pace(map(Pace.from_json, self._said(keys.paces(self._n), keys.pace)))
            self._open().execute([Write({usual: job.to_json()})])
        return Pace.from_json(said) if said else None

    def _say(self, names: str, key: str, value: str) -> None:
        """Writes a key of this node, whose name is in a log."""
        steps: list[Step] = [Write({key: value})]
        if names not in self._listed:
            steps.append(Append(names, self._name))
        self._open().execute(steps)
        self._listed.add(names)

    def _said(self, names: str, key: Callable[[int, str], str]) -> Sequence[str]:
        """What the nodes whose names are in a log have written, if it is not empty."""
        known = sorted(set(read_log(self._open(), names)))
        said = self._open().execute([Read(key(self._n, name)) for name in known])
        return [*filter(None, said)]

    def _open(self) -> Operations:
        if self._store is None:
            self._store = self._connect()
            self._store.patience = _PATIENCE
        return self._store
