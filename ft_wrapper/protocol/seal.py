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
        self._secret = secret and hmac.digest(secret, store.encode(), "sha256")
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
        if self._secret is None:
            raise StoreError(
                "this job has a secret: run this as the job's user on one of its hosts, or set "
                "FT_WRAPPER_SECRET to it"
            )
        return hmac.digest(self._secret, b"%b\0%b" % (what.encode(), said), "sha256")[:_SIZE]

    def close(self, key: str, text: str) -> str:
        """A text as it goes into a key."""
        return "\n".join(f"{line} {self.sign(key, line.encode()).hex()}" for line in text.split("\n"))

    def name(self, key: str) -> str:
        """A name for a key that others do not know, as long as no one has written it."""
        return key if self._secret is None else f"{key}/{self.sign('name', key.encode()).hex()}"

    def check(self, key: str, held: str) -> str | None:
        """The job's own lines in what a key holds; None if there are none."""
        lines = [line.rpartition(" ") for line in held.rstrip("\n").split("\n")]
        own = [line for line, _, signed in lines if self._is_own(key, line, signed)]
        if len(own) < len(lines) and key not in self._forged:
            self._forged.add(key)
            self._on_forged(key)
        return "\n".join(own) if own else None

    def open(self, key: str, held: str) -> str | None:
        """As `check`; of a key that is no iteration's, and is the job's no more, what it held before."""
        text = self.check(key, held)
        if keys.iteration_of(key) is not None:
            return text
        if text is not None:
            self._last[key] = text
        return self._last.get(key)

    def _is_own(self, key: str, line: str, signed: str) -> bool:
        if self._secret is None:
            return True
        signature = self.sign(key, line.encode(errors="surrogateescape")).hex().encode()
        return hmac.compare_digest(signature, signed.encode(errors="surrogateescape"))
