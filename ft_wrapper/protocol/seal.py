"""Seals: what tells the texts of the job's own processes from those of others who reach the store.

A text is followed by an HMAC-SHA256 (RFC 2104), cut to 128 bits, of the key's name and the text, under the
job's secret. So a text that is copied to another key is not taken there. One that is written back to its own
key is: a seal does not tell old from new.
"""

import hmac
from collections.abc import Callable

from ..exception import StoreError

_SIZE = 16  # bytes


def forged(key: str) -> StoreError:
    """The error for a key that the job has to write, and somebody else has written."""
    return StoreError(f"store key {key!r} was not written with the secret that this process has")


def _ignore(key: str) -> None:
    return None


class Seal:
    """Seals texts, and opens them.

    Args:
        secret: of the job; None to open texts unseen, where nothing follows from them but what is shown.
        store: which store it is for: a text of another one's is not taken.
        on_forged: told the key of a text that is not sealed with this secret, once for each key.

    Attributes:
        forged: keys that held such a text when they were read last.
    """

    def __init__(
        self, secret: bytes | None, store: str = "", on_forged: Callable[[str], None] = _ignore
    ) -> None:
        self._secret = secret and hmac.digest(secret, store.encode(), "sha256")
        self._on_forged = on_forged
        self._told = set[str]()
        self.forged = set[str]()

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
        if self._secret is None:
            raise StoreError(
                "this job has a secret: run this as the job's user on one of its hosts, or set "
                "FT_WRAPPER_SECRET to it"
            )
        return hmac.digest(self._secret, b"%b\0%b" % (what.encode(), said), "sha256")[:_SIZE]

    def close(self, key: str, text: str) -> str:
        """A text as it goes into a key."""
        return f"{text} {self.sign(key, text.encode()).hex()}"

    def open(self, key: str, sealed: str) -> str | None:
        """The text that a key holds; None if it is not the job's."""
        text, _, signed = sealed.rpartition(" ")
        if self._secret is None:
            return text
        if hmac.compare_digest(signed.encode(), self.sign(key, text.encode()).hex().encode()):
            self.forged.discard(key)
            return text
        self.forged.add(key)
        if key not in self._told:
            self._told.add(key)
            self._on_forged(key)
        return None
