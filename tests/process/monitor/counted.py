"""A store that counts what it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ft_wrapper.testing import FakeStore


class CountedStore(FakeStore):
    """A store in memory that needs one request for a register, as a TCPStore does."""

    reads_by_compare_set = True

    def requests(self) -> Counter[str]:
        """How often each key is read or written from now on: by its name behind the version."""
        seen: Counter[str] = Counter()

        def count(_: str, operation: str, arguments: Sequence[Any]) -> None:
            key = arguments[0] if isinstance(arguments[0], str) else arguments[0][0]
            seen[key.removeprefix("ft_wrapper/1/")] += 1

        self.on_operation(count)
        return seen
