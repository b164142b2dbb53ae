"""How a rank sees notices in its call: all active ranks at the same step.

An agent, or the handler of SIGUSR1 here, writes a notice into the rank's memory, at a moment of its own. So
the ranks agree on the step at which all see it: over the vote of a `LiveState` if there is one, else over
keys in the job's store. There the last rank that gets a notice names the step. Had the first one done so, a
rank might be past the step when it gets its notice, and would not come to a save that is collective. A
function that reports no steps sees what its memory holds.

If ranks leave after a notice, all active ranks meet at the next step before any of them does: a rank that
leaves ends the iteration, and would interrupt another rank that still writes its checkpoint.
"""

import contextlib
import dataclasses
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn

from ..exception import RankDrained
from ..monitor.shared_memory import RankMemory
from ..monitor.signals import handled_signals
from ..protocol import keys
from ..protocol.entering import BarrierTimeout
from ..protocol.notice import GRACE_ENV, SAME_WITHIN, Notice, step_to_see
from ..protocol.operations import Operations, append_counted, read, read_log, set_if_absent, write_text
from ..store import PrefixStore
from ..store.secret import AGENT_ENV

log = logging.getLogger(__name__)

_MEETS_WITHIN = 1.0  # seconds that ranks wait for each other even if the notice's time is over
_MET = "met"


@dataclasses.dataclass(eq=False)
class Notices:
    """The notices of one call.

    Args:
        memory: the rank's.
        store: the job's.
        waiting: entered around waits.
        atomic: makes a block that no restart interrupts.
        user_store: returns the iteration's store, in which an interruption ends a wait.

    Attributes:
        found: the newest notice in the memory, as it was when a step began.
        rides: whether a live state decides in this iteration when a notice is seen.
        place: this rank's number among the active ranks of this iteration, and how many they are.
    """

    memory: RankMemory
    store: Operations
    waiting: contextlib.AbstractContextManager[None]
    atomic: Callable[[], contextlib.AbstractContextManager[Any]]
    user_store: Callable[[], PrefixStore]

    def enter(self) -> None:
        """Begins an iteration: in it, all notices are new."""
        self.found: Notice | None = None
        self.rides, self.memory.looks = False, True
        self.place, self._is_noted = (0, 0), False
        self._seen: list[Notice] = []  # the last one is shown
        self._unmet: Notice | None = None  # ranks leave after it
        self._held: str | None = None  # what the ranks have agreed on, but not yet seen

    @property
    def current(self) -> Notice | None:
        """The notice that was seen last in this iteration, with the seconds that are left now."""
        mine = self.memory.notice
        if not self._seen:
            return None if self.rides or self.memory.step is not None else mine
        shown = self._seen[-1]
        return dataclasses.replace(shown, seconds=mine.seconds) if mine and mine.id == shown.id else shown

    def new(self, seen: Iterable[Notice]) -> Notice | None:
        """The notice that was found, unless it was seen.

        Args:
            seen: the notices that were seen; one is new again if the job ends now.
        """
        found = self.found
        is_known = found is None or any(one.id == found.id and one.ends >= found.ends for one in seen)
        return None if is_known else found

    def see(self, notice: Notice) -> None:
        """Shows a notice that all active ranks see at this step."""
        if self.memory.notice is None or notice.ends:
            self.memory.give(notice)  # so that it is there in the next iteration
        self._seen.append(notice)
        if notice.ends or notice.leaving:
            self._unmet, self.memory.looks = notice, True
        if self.memory.rank == 0:
            log.warning("notice: %s", notice)

    def look(self, step: int) -> None:
        """Looks, when a step begins, for what was asked of the rank.

        Args:
            step: the one that begins.

        Raises:
            RankDrained: this rank leaves.
        """
        memory = self.memory
        memory.looks = False  # before the rest is read: an agent that writes it sets this afterwards
        self.found = memory.notice
        if self._unmet is not None:
            self._meet(self._unmet)
        if memory.leave_requested:
            memory.looks = True
            if self._is_seen(self.found):  # otherwise all ranks save first
                raise RankDrained
        while not self.rides and (self._is_noted or self.new(self._seen)):
            notice = self._agree(step)
            if notice is None:
                memory.looks = True
                return
            self.see(notice)

    def leave_if_over(self) -> None:
        """Lets the rank go where its iteration has ended because the job does.

        Raises:
            RankDrained: the rank was asked to leave, or all active ranks have met to leave.
        """
        memory, notice = self.memory, self.memory.notice
        if notice is not None or not memory.active:  # a spare may not have its notice yet
            with self.waiting:
                why = read(self.store, keys.notice(memory.iteration, _MET))
            if why is not None:
                self._end(why)
        # A rank that has not saved for its notice does so in the next iteration: all that go on may be lost.
        if memory.leave_requested and (self._is_seen(notice) or not memory.active):
            raise RankDrained

    def _is_seen(self, notice: Notice | None) -> bool:
        return notice is None or notice.id in [one.id for one in self._seen]

    def _agree(self, step: int) -> Notice | None:
        """Agrees on the next notice of the iteration; None before the step at which all ranks see it."""
        store, memory, found = self.store, self.memory, self.found
        which = memory.iteration, len(self._seen)
        key, log_key = keys.notice(*which), keys.noticed(*which)
        with self.atomic():
            if not self._is_noted and found is not None:
                mine = f"{memory.rank} {step}"
                count, self._is_noted = append_counted(store, log_key, mine, keys.count_noticed(*which)), True
                # The count is a hint; the log decides.
                if count >= self.place[1] and len(noted := {*read_log(store, log_key)}) >= self.place[1]:
                    highest = max(int(entry.split()[1]) for entry in noted)
                    length = time.monotonic() - memory.step_stamp if memory.step is not None else math.inf
                    set_if_absent(store, key, f"{step_to_see(highest, length)} {found.to_json()}")
            self._held = self._held or read(store, key)
        number, _, text = (self._held or "inf").partition(" ")
        if step < float(number):
            return None
        self._is_noted, self._held = False, None
        return Notice.from_json(text, key)

    def _meet(self, notice: Notice) -> None:
        """Waits until all active ranks have saved, or time is up; if the job ends, this rank leaves."""
        self._unmet = None
        try:
            with self.waiting:
                seconds, (rank, size) = (self.current or notice).seconds or 0.0, self.place
                within = timedelta(seconds=max(seconds, _MEETS_WITHIN))
                self.user_store().barrier([rank], f"saving for notice {len(self._seen)}", size, within)
        except BarrierTimeout as error:
            log.warning("does not wait longer for other ranks to save: %s", error)
        if notice.ends:
            why = str(dataclasses.replace(notice, seconds=None))
            with self.atomic():
                # Before any rank leaves: a rank that is interrupted by that, and spares, leave, too.
                write_text(self.store, keys.notice(self.memory.iteration, _MET), why)
            self._end(why)

    def _end(self, why: str) -> NoReturn:
        self.memory.leave_requested = True  # so that the agent does not count it as lost
        raise RankDrained(f"all ranks leave: {why}")


# Signals ----------------------------------------------------------------------------------------------------


def hear_signals(memory: RankMemory, owned: contextlib.ExitStack) -> None:
    """Handles signals that announce the end, where the function's process has no handler of its own.

    SIGUSR1 goes to the agent, which passes it on to all ranks; without an agent it is a notice of this rank.
    SIGTERM, which a scheduler sends to ranks, too, is left to an agent that has a grace time.

    Args:
        memory: the rank's.
        owned: puts the handlers back.
    """
    pid, agent = os.getpid(), os.getppid()
    grace = float(os.environ.get(GRACE_ENV) or 0)
    has_agent = os.environ.get(AGENT_ENV, "").startswith(f"ftrun-{agent}-")

    def hear(signum: int, frame: object) -> None:
        if os.getpid() != pid or time.monotonic() - memory.notice_stamp < SAME_WITHIN:
            return  # a forked child; or it is known already
        if has_agent and os.getppid() == agent and signum in handled_signals(agent):
            os.kill(agent, signum)
            return
        last = memory.notice
        number = int(last.id) + 1 if last and last.id.isdecimal() else 1  # the same on all ranks that hear it
        memory.give(Notice(f"rank {memory.rank}", "SIGUSR1", grace or None, str(number)))

    def ignore(signum: int, frame: object) -> None:
        if memory.end_requested or os.getpid() != pid:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
        owned.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, hear))
    if has_agent and grace and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        owned.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, ignore))
