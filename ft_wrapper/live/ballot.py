"""Votes of all active ranks.

The vote is the one wait of a step that nothing hides. Gloo's all-reduce goes around the ring twice, with a
thread on the way at each rank. Here a vote takes log2 of the number of ranks messages one after the other,
all in the caller's thread, and ends at once when the rank is interrupted.
"""

import socket
import struct
from collections.abc import Sequence

from .wire import Address, Lines

Values = tuple[int, int, int, int]

_VALUES = struct.Struct("!qqqq")


class Ballot(Lines):
    """A rank's connections for the votes of one iteration.

    Votes go by dissemination: in round k each rank sends what it knows to the rank 2**k further, and hears
    from the one 2**k before. After the last round it has heard of all. See Hensgen, Finkel, Manber: Two
    algorithms for barrier synchronization, International Journal of Parallel Programming 17(1), 1988.
    """

    purpose = "vote"

    def open(self, addresses: Sequence[Address]) -> None:
        """Connects; all active ranks call it.

        Args:
            addresses: of all active ranks, by rank.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        steps = [1 << number for number in range((len(addresses) - 1).bit_length())]
        self._rounds = self.connect_around(addresses, steps)

    def vote(self, values: Values) -> Values:
        """Returns once all ranks have called it.

        Args:
            values: this rank's.

        Returns:
            The least of all ranks', for each.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        for to, since in self._rounds:
            rank = to
            try:
                self.to[to].sendall(_VALUES.pack(*values))
                rank = since
                heard = self._hear(self.since[since])
            except OSError as error:
                raise self._failure(rank, error) from error
            one, two, three, four = map(min, values, heard)
            values = one, two, three, four
        return values

    def _hear(self, line: socket.socket) -> Values:
        said = b""
        while len(said) < _VALUES.size:
            more = line.recv(_VALUES.size - len(said))
            if not more:
                raise ConnectionError("closed by the peer")
            said += more
        heard: Values = _VALUES.unpack(said)
        return heard
