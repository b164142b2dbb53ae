"""Seals: signatures by which the job's processes recognize their own texts in a store that others can reach.

Each line is followed by an HMAC-SHA256 (RFC 2104), cut to 128 bits, of the key's name and the line, under the
job's secret. So a text copied to another key is not valid there. An old text written back to its own key is
valid: a seal cannot distinguish old from new.
"""

import hmac
from collections.abc import Callable

from ..exception import StoreError
from . import keys

_SIZE = 16  # bytes


def forged(key: str) -> StoreError:
    """The error for a key of the job that a stranger has written."""
    return StoreError(f"store key {key!r} was not written with the secret that this process has")


class Seal:
    """Seals texts, and checks seals.

    Args:
        secret: the job's secret; None to read texts unchecked, for tools that only show them.
        store: name of the store; texts sealed for another store are not valid.
        on_forged: called with the key of a text that is not sealed with this secret, once for each key.
    """

    def __init__(
        self, secret: bytes | None, store: str = "", on_forged: Callable[[str], None] = lambda key: None
    ) -> None:
        self._mac = None
        if secret is not None:  # `sign` copies this HMAC, at half the cost of a new one
            self._mac = hmac.new(hmac.digest(secret, store.encode(), "sha256"), digestmod="sha256")
        self._on_forged = on_forged
        self._last: dict[str, str] = {}
        self._forged = set[str]()

    def sign(self, what: str, said: bytes) -> bytes:
        """Signs bytes.

        Args:
            what: name of their kind, so that the signature is not valid for other kinds.
            said: the bytes.

        Returns:
            16 bytes.

        Raises:
            StoreError: there is no secret.
        """
        if self._mac is None:
            raise StoreError(
                "this job has a secret: run this as the job's user on one of its hosts, or set "
                "FT_WRAPPER_SECRET to it"
            )
        mac = self._mac.copy()
        mac.update(b"%b\0%b" % (what.encode(), said))
        return mac.digest()[:_SIZE]

    def close(self, key: str, text: str) -> str:
        """Adds a seal to each line of a text that is written to a key."""
        return "\n".join([f"{line} {self.sign(key, line.encode()).hex()}" for line in text.split("\n")])

    def name(self, key: str) -> str:
        """A name for a key that outsiders do not know until the key is written."""
        return key if self._mac is None else f"{key}/{self.sign('name', key.encode()).hex()}"

    def check(self, key: str, held: str) -> str | None:
        """The job's own lines in the value of a key; None if there are none."""
        own, lines = [], held.encode(errors="surrogateescape").rstrip(b"\n").split(b"\n")
        for each in lines:
            line, _, signed = each.rpartition(b" ")
            if self._mac is None or hmac.compare_digest(self.sign(key, line).hex().encode(), signed):
                own.append(line)
        if len(own) < len(lines) and key not in self._forged:
            self._forged.add(key)
            self._on_forged(key)
        return b"\n".join(own).decode(errors="surrogateescape") if own else None

    def latest(self, key: str, text: str | None) -> str | None:
        """The text that `check` returned; if None, the last valid text of a key that outlives iterations."""
        if text is not None and keys.iteration_of(key) is None:
            self._last[key] = text
        return self._last.get(key) if text is None else text
