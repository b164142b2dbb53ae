"""How often a rank's process is replaced, and after how long."""

from __future__ import annotations

# Seconds. A process that lived for SETTLED was no part of a crash loop.
FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
SETTLED = 5.0


class RankBudget:
    """The replacements that a rank still has.

    The first one comes at once. While replacements die soon after they started, each further one waits twice
    as long as the one before.

    Args:
        replacements: how many there are.
    """

    def __init__(self, replacements: int) -> None:
        self.left = replacements
        self._quick = 0  # deaths in a row, each soon after the start

    def spend(self, lived: float, *, is_first: bool) -> float | None:
        """Takes one out.

        Args:
            lived: seconds for which the process that has died had run.
            is_first: whether it was the rank's first process, which no crash loop can be told from.

        Returns:
            Seconds to wait before the replacement is started; None if there is none left.
        """
        if self.left == 0:
            return None
        self.left -= 1
        self._quick = 0 if is_first or lived >= SETTLED else self._quick + 1
        return 0.0 if self._quick == 0 else min(FIRST_DELAY * 2.0 ** (self._quick - 1), LONGEST_DELAY)
