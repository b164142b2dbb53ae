"""Seals: what tells the texts of the job's own processes from those of others who reach the store.

Each line is followed by an HMAC-SHA256 (RFC 2104), cut to 128 bits, of the key's name and the line, under the
job's secret. So a text that is copied to another key is not taken there. One that is written back to its own
key is: a seal does not tell old from new.
"""

import hmac
from collections.abc import Callable

from ..exception import StoreError
from . import keys

_SIZE = 16  # bytes


def forged(key: str) -> StoreError:
    """The error for a key that the job has to write, or read, and somebody else has written."""
    return StoreError(f"store key {key!r} was not written with the secret that this process has")


class Seal:
    """Seals texts, and opens them.

    Args:
        secret: of the job; None to open texts unseen, where nothing follows from them but what is shown.
        store: which store it is for: a text of another one's is not taken.
        on_forged: told the key of a text that is not sealed with this secret, once for each key.
    """

    def __init__(
        self, secret: bytes | None, store: str = "", on_forged: Callable[[str], None] = lambda key: None
    ) -> None:
        self._mac = None
        if secret is not None:  # `sign` copies it: half the cost of a new one
            self._mac = hmac.new(hmac.digest(secret, store.encode(), "sha256"), digestmod="sha256")
        self._on_forged = on_forged
        self._last: dict[str, str] = {}
        self._forged = set[str]()

    def sign(self, what: str, said: bytes) -> bytes:
        """Signs bytes.

        Args:
            what: names what they are, so that they are taken for nothing else.
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
        """A text as it goes into a key."""
        return "\n".join([f"{line} {self.sign(key, line.encode()).hex()}" for line in text.split("\n")])

    def name(self, key: str) -> str:
        """A name for a key that others do not know, as long as no one has written it."""
        return key if self._mac is None else f"{key}/{self.sign('name', key.encode()).hex()}"

    def check(self, key: str, held: str) -> str | None:
        """The job's own lines in what a key holds; None if there are none."""
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
        """The text that `check` gave; if None, the last valid one of a key that outlives iterations."""
        if text is not None and keys.iteration_of(key) is None:
            self._last[key] = text
        return self._last.get(key) if text is None else text
