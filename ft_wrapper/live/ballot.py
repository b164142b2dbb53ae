"""Votes of all active ranks.

The vote is the one wait of a step that nothing hides. Gloo's all-reduce goes around the ring twice, with a
thread on the way at each rank. Here a vote takes log2 of the number of ranks messages one after the other,
all in the caller's thread, and ends at once when the rank is interrupted.
"""

import struct

from .wire import Addresses, Lines

Values = tuple[int, int, int]

_VALUES = struct.Struct("!qqq")
_SIZE = struct.Struct("!Q")


class Ballot(Lines):
    """A rank's connections for the votes of one iteration.

    Votes go by dissemination: in round k each rank sends what it knows to the rank 2**k further, and hears
    from the one 2**k before. After the last round it has heard of all. See Hensgen, Finkel, Manber: Two
    algorithms for barrier synchronization, International Journal of Parallel Programming 17(1), 1988.
    """

    purpose = "vote"

    def open(self, addresses: Addresses) -> None:
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
            self._say(to, _VALUES.pack(*values))
            one, two, three = map(min, values, _VALUES.unpack(self._hear(since, _VALUES.size)))
            values = one, two, three
        return values

    def tell(self, said: bytes) -> bytes:
        """Broadcasts bytes from rank 0, along a binomial tree of the votes' connections; collective.

        Args:
            said: rank 0's; ignored on the others.

        Returns:
            What rank 0 said.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank did not come.
        """
        depth = self._rank.bit_length()
        if self._rank:
            _, since = self._rounds[depth - 1]
            (size,) = _SIZE.unpack(self._hear(since, _SIZE.size))
            said = self._hear(since, size)
        for to, _ in self._rounds[depth:]:
            if to > self._rank:  # otherwise it has wrapped around
                self._say(to, _SIZE.pack(len(said)) + said)
        return said

    def _say(self, to: int, said: bytes) -> None:
        try:
            self.to[to].sendall(said)
        except OSError as error:
            raise self._failure(to, error) from error

    def _hear(self, since: int, size: int) -> bytes:
        said = bytearray()
        try:
            while len(said) < size:
                more = self.since[since].recv(size - len(said))
                if not more:
                    raise ConnectionError("closed by the peer")
                said += more
        except OSError as error:
            raise self._failure(since, error) from error
        return bytes(said)
