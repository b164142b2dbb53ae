"""Checks a node before it takes a seat. Until it passes it stays out, and the job goes on without it."""

import dataclasses
import logging
import time
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousError

log = logging.getLogger(__name__)

#: Seconds that a node waits before it is checked again: at first, and at most. Each wait is twice the last.
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a node has to pass.

    Args:
        checks: in this order; each returns why the node must not take part, empty if it may. A signal handler
            may raise in them.
        retries: how often they are tried again before the node ends; None: without end.
    """

    checks: tuple[Callable[[], str], ...] = ()
    retries: int | None = None

    def failure(self) -> str:
        """Runs the checks until one fails; returns why, empty if all have passed."""
        return next(filter(None, (check() for check in self.checks)), "")


#: Nothing to pass.
NO_PROOF = Proof()


def await_proof(
    proof: Proof, who: str, keep_out: Callable[[str], object], wait: Callable[[float], object]
) -> bool:
    """Runs the checks, again and again, until the node passes.

    Args:
        proof: the checks.
        who: the node, for the log.
        keep_out: told why the node stays out, after each try that failed.
        wait: waits for so many seconds; an error of it, as the job is over, ends the wait.

    Returns:
        Whether it passed at once.

    Raises:
        RendezvousError: it did not pass as often as it may try.
    """
    failures, began, logged = 0, time.monotonic(), ""
    while why := proof.failure():
        keep_out(why)
        failures += 1
        if proof.retries is not None and failures > proof.retries:
            times = "" if failures == 1 else f" {failures} times, the last time"
            raise RendezvousError(f"{who} has failed its check{times}: {why}")
        if why != logged:
            log.warning("%s is kept out of the job until it passes its check: %s", who, why)
            logged = why
        wait(min(FIRST_WAIT * 2 ** min(failures - 1, 30), LONGEST_WAIT))
    if failures:
        log.info("%s has passed its check after %.1f s, and comes in", who, time.monotonic() - began)
    return failures == 0
