"""Which steps a node's ranks have told, iteration after iteration: how many were lost, which come again."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

_KEPT = 16  # iterations; what ranks tell of older ones does not come any more


@dataclasses.dataclass
class Iteration:
    """The steps of an iteration, as far as ranks have told.

    Args:
        nonce: names it.
        first: the first step.
        last: the last one that has begun: those below it are done.
        hung: seconds for which the longest hang went unnoticed.
        is_complete: whether its call has completed, so that the next step is none of its.
    """

    nonce: str
    first: int | None = None
    last: int = 0
    hung: float = 0.0
    is_complete: bool = False

    def told(self, first: int, last: int) -> None:
        """A rank has told steps."""
        self.first = first if self.first is None else min(first, self.first)
        self.last = max(last, self.last)


class StepHistory:
    """The newest iterations, and what has to be known of those before."""

    def __init__(self) -> None:
        self._iterations: list[Iteration] = []
        self._before = 0, 0, 0  # as `_after`, of those that are kept no more

    @property
    def newest(self) -> Iteration | None:
        """The last one; None before there is any."""
        return self._iterations[-1] if self._iterations else None

    def of(self, nonce: str) -> Iteration:
        """An iteration, which may be new."""
        for known in reversed(self._iterations):
            if known.nonce == nonce:
                return known
        self._iterations.append(Iteration(nonce))
        if len(self._iterations) > _KEPT:
            *_, self._before = self._after(self._iterations[:1])
            del self._iterations[0]
        return self._iterations[-1]

    def begun(self, nonce: str) -> int:
        """The steps below this one were done before an iteration, in the same call."""
        place = self._iterations.index(self.of(nonce))
        *_, (begun, _, _) = self._after(self._iterations[:place])
        return begun

    def lost(self) -> int:
        """How many steps were lost: from the last one of an iteration back to the first one of the next."""
        *_, (_, _, lost) = self._after(self._iterations)
        return lost

    def tells_steps(self) -> bool:
        """Whether any rank has told steps in this call."""
        call = itertools.takewhile(lambda known: not known.is_complete, reversed(self._iterations))
        return any(known.first is not None for known in call)

    def _after(self, iterations: Sequence[Iteration]) -> Iterator[tuple[int, int, int]]:
        """Before, and after each: up to where steps are done, where it was itself, and how many are lost."""
        begun, last, lost = self._before
        yield begun, last, lost
        for one in iterations:
            if one.first is not None:
                lost += max(0, last - one.first)
                begun, last = max(begun, one.last), one.last
            if one.is_complete:
                begun = last = 0
            yield begun, last, lost
