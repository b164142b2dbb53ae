"""What an agent knows of its ranks for metrics: how they stand, and what their time and their steps went to.

Nothing is asked for that. The messages by which a rank tells its monitor of an iteration say what became of
the one before; what goes on now stands in the memory that they share, and is read when somebody asks.

Times are those of ``ftrun report``, in the same buckets, with three differences: only this node's ranks are
known; how long a fault took to be told counts as the step that it cut short; and a hang of another node's
rank does, too.
"""

import bisect
import collections
import copy
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..protocol.records import Member, View
from .shared_memory import RankMemory
from .step_history import StepHistory

#: How a rank may stand, and what that means.
RANK_STATES = {
    "active": "in the function",
    "spare": "a hot spare",
    "restarting": "between two iterations",
    "waiting": "in a wrapped call that has not begun for it",
    "outside": "in no wrapped call, or without a monitor in the agent",
    "gone": "its process died in a call, and no other one is there yet",
}
#: What time may be lost to: names of ``ftrun report``.
KINDS = (
    "initialization",
    "training_prep",
    "wasted_progress",
    "detection",
    "recovery_abort",
    "recovery_leave",
    "recovery_arrive",
    "recovery_decide",
    "recovery_enter",
    "waiting",
    "idle_spare",
    "gone",
)
#: Parts of a restart, and all of it.
PHASES = ("abort", "leave", "arrive", "decide", "enter", "total")
#: Seconds: the upper bounds of a histogram's buckets.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclasses.dataclass
class Histogram:
    """How long something took.

    Args:
        counts: how often, by bucket; the last one has no bound.
        sum: seconds, of all.
    """

    counts: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        """Adds one."""
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[int]:
        """How many took no longer than each bound; the last one is all of them."""
        return list(itertools.accumulate(self.counts))


@dataclasses.dataclass(frozen=True)
class Tallied:
    """What is known at a moment.

    Args:
        ranks: how many ranks stand how, see `RANK_STATES`.
        iteration: the newest one, by its global number; None before there is one.
        step: the last one that was told; None before that.
        progress: when a rank made progress last, in monotonic seconds; None before that.
        seconds: lost by all ranks together, by `KINDS`. They never go down.
        steps_lost: how many steps restarts have thrown away.
        restarts: by what caused them.
        phases: how long restarts took, by `PHASES`.
    """

    ranks: Mapping[str, int]
    iteration: int | None
    step: int | None
    progress: float | None
    seconds: Mapping[str, float]
    steps_lost: int
    restarts: Mapping[str, int]
    phases: Mapping[str, Histogram]


class Tally:
    """All that is known of an agent's ranks; for use in any thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        # The agent's processes: when each was started, and its local rank.
        self._processes: dict[int, tuple[float, int]] = {}
        # The newest one of each; None for a process that has none yet, and stands in for one that is gone.
        self._accounts: dict[int, RankAccount | None] = {}
        self._gone, self._gone_at = set[int](), 0.0  # by local rank
        self._drained: set[int] = set()  # local ranks that no process comes back for in this round
        self._seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._told: dict[str, float] = {}
        self.steps = StepHistory()
        self._iteration: int | None = None
        self._step: int | None = None
        self._progress: float | None = None
        self._restarts: collections.Counter[str] = collections.Counter()
        self._phases = {phase: Histogram() for phase in PHASES}

    # ---- what happens

    def begin_round(self) -> None:
        """All ranks are about to be started, also those that were drained."""
        with self._lock:
            self._drained.clear()

    def started(self, pid: int, rank: int) -> None:
        """A process was started for a local rank."""
        with self._lock:
            self._processes[pid] = self.clock(), rank
            if rank in self._gone:
                self._accounts[pid] = None
            self._spend_gone()
            self._gone.discard(rank)

    def ended(self, pid: int) -> None:
        """A rank's process has ended."""
        with self._lock:
            _, rank = self._processes.pop(pid, (0.0, None))
            was_in_call, account = pid in self._accounts, self._accounts.pop(pid, None)
            is_lost = was_in_call and not (account and account.is_over)
            if is_lost and rank is not None and rank not in self._drained:
                self._spend_gone()
                self._gone.add(rank)
                if account is not None and account.died_at is not None:  # a moment ago
                    self.spend("gone", self._gone_at - account.died_at)

    def drained(self, rank: int) -> None:
        """A local rank was asked to leave the job: it is not missed, whether its process lives or not."""
        with self._lock:
            self._spend_gone()
            self._drained.add(rank)
            self._gone.discard(rank)

    def open(self, pid: int, memory: RankMemory) -> "RankAccount":
        """A process has a monitor now.

        Args:
            pid: the agent's process that it is, or is below.
            memory: which it shares with its monitor; not used any more once the account is closed.
        """
        with self._lock:
            born, _ = (None, 0) if self._accounts.get(pid) else self._processes.get(pid, (None, 0))
            account = self._accounts[pid] = RankAccount(self, memory, born)
            return account

    def restarted(self, cause: str, phases: Mapping[str, float]) -> None:
        """All ranks are back.

        Args:
            cause: what kind of fault it was.
            phases: seconds by `PHASES`; those that are not known are not there.
        """
        with self._lock:
            self._restarts[cause] += 1
            for phase in self._phases.keys() & phases.keys():
                self._phases[phase].observe(phases[phase])

    def read(self) -> Tallied:
        """What is known now."""
        with self._lock:
            now = self.clock()
            self._spend_gone()
            states = collections.Counter(gone=len(self._gone))
            steps, passing = list[int](), list[dict[str, float]]()
            for pid in self._processes:
                account = self._accounts.get(pid)
                states["outside" if account is None else account.state] += 1
                if account is not None:
                    passing.append(account.look(now))
                    steps += account.step()
            seconds = dict(self._seconds)
            for kind, more in (each for one in passing for each in one.items()):
                seconds[kind] += more
            self._step = max(steps, default=self._step)
            # What is worked out between two moments may come out a little less when one of them is later.
            self._told = {kind: max(seconds[kind], self._told.get(kind, 0.0)) for kind in KINDS}
            return Tallied(
                {state: states[state] for state in RANK_STATES},
                self._iteration,
                self._step,
                self._progress,
                dict(self._told),
                self.steps.lost(),
                dict(self._restarts),
                copy.deepcopy(self._phases),
            )

    # ---- for the accounts, which have the lock, as for `steps`

    def spend(self, kind: str, seconds: float) -> None:
        """Time was lost."""
        self._seconds[kind] += max(0.0, seconds)

    def note_progress(self, moment: float) -> None:
        """A rank made progress."""
        self._progress = max(moment, self._progress or moment)

    def note_steps(self, nonce: str, first: int, last: int) -> None:
        """A rank has told steps."""
        iteration = self.steps.of(nonce)
        iteration.told(first, last)
        if iteration is self.steps.newest:
            self._step = last

    def enter(self, view: View) -> None:
        """A rank is in an iteration."""
        self.steps.of(view.nonce)
        self._iteration = view.n

    def _spend_gone(self) -> None:
        """The time of those that are gone, before there are more or fewer of them."""
        now = self.clock()
        self._seconds["gone"] += len(self._gone) * (now - self._gone_at)
        self._gone_at = now


class RankAccount:
    """What is known of one rank's process in one wrapped call.

    Args:
        tally: of all.
        memory: which the process shares with its monitor.
        born: when the process was started; None if that has been accounted for.
    """

    def __init__(self, tally: Tally, memory: RankMemory, born: float | None) -> None:
        self._tally = tally
        self._memory: RankMemory | None = memory
        self._born = born
        self._view: View | None = None
        # What its time goes to, and from when on; empty if that is not known yet.
        self._kind, self._since = "", 0.0
        self._has_entered = False
        # Of the restart that is under way: when it began, and the phases that have been counted.
        self._ended, self._phases = 0.0, dict[str, float]()
        self._has_completed = self._was_drained = False
        self.died_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing stands in for its process once that has ended."""
        return self.is_done or (self._was_drained if self._memory is None else self._memory.leaves)

    @property
    def is_done(self) -> bool:
        """Whether its call has completed."""
        return self._has_completed if self._memory is None else self._memory.has_returned

    # ---- what the rank says

    def join(self, member: Member) -> None:
        """It has its slot."""
        with self._tally._lock:
            now = self._tally.clock()
            waits_to_be_let_in = self._born is not None and member.incarnation > 0
            if self._born is not None:
                self._tally.spend("initialization", now - self._born)
                self._born = None
            self._turn("idle_spare" if waits_to_be_let_in else "waiting", now)

    def decided(self, view: View, before: Mapping[str, Any]) -> None:
        """It is in an iteration, and will enter the function.

        Args:
            view: the iteration.
            before: what became of the last one, see `Reporter.account`; empty if there was none.
        """
        with self._tally._lock:
            if self._view is None or not before:
                begins = self._tally.clock()
            else:
                begins = self._restart(self._view, before)
            self._view, self._has_entered = view, False
            self._tally.enter(view)
            self._turn("waiting" if view.n == view.first else "recovery_enter", begins)

    def hung(self, nonce: str, seconds: float) -> None:
        """A hang was noticed.

        Args:
            nonce: of the iteration.
            seconds: for which it went unnoticed.
        """
        with self._tally._lock:
            iteration = self._tally.steps.of(nonce)
            iteration.hung = max(seconds, iteration.hung)

    def restarted(self, message: Mapping[str, Any]) -> None:
        """It came back last: so it tells of the restart."""
        self._tally.restarted(message["cause"], message["phases"])

    def died(self) -> None:
        """Its process has died."""
        self.died_at = self._tally.clock()

    def leave(self) -> None:
        """It has left its call, or has died."""
        with self._tally._lock:
            if self._memory is None:
                return
            now, view = self._tally.clock(), self._view
            self._look_whether_entered()
            self._has_completed, self._was_drained = self._memory.has_returned, self._memory.leaves
            stay = self._stay()
            if view is not None and "entered" in stay and stay["active"]:
                self._spend(view, stay, now, is_whole=self.is_done)
            if view is not None and self.is_done:
                self._tally.steps.of(view.nonce).is_complete = True
            if self._kind == "recovery_enter":
                self._kind = ""
            self._turn("", now)
            self._memory = None

    # ---- what is read; with the lock

    @property
    def state(self) -> str:
        """How it stands, see `RANK_STATES`."""
        if self._memory is None:
            return "outside"
        if self._memory.is_inside and self._view is not None:
            return "active" if self._memory.active else "spare"
        is_first = self._view is None or self._view.n == self._view.first
        return "waiting" if is_first and not self._memory.has_left else "restarting"

    def step(self) -> list[int]:
        """The step that it is at; none if it has told none in this iteration."""
        memory = self._memory
        step = memory.step if memory is not None and memory.is_inside and memory.active else None
        return [] if step is None else [step]

    def look(self, now: float) -> dict[str, float]:
        """What it has lost since the last event, as far as that is certain."""
        memory, view = self._memory, self._view
        if memory is None:
            return {}
        self._look_whether_entered()
        if self._kind in ("waiting", "idle_spare"):
            return {self._kind: max(0.0, now - self._since)}
        stay = self._stay()
        if view is None or not self._has_entered or "entered" not in stay or not stay["active"]:
            return {}
        told = max(memory.step_stamp if "last" in stay else 0.0, memory.ping_stamp)
        self._tally.note_progress(told or memory.main_stamp)
        if "last" not in stay:
            return {}
        self._tally.note_steps(view.nonce, stay["first"][0], stay["last"][0])
        lost = {
            "training_prep": stay["first"][1] - stay["entered"],
            "wasted_progress": self._again(view, stay),
        }
        return {kind: max(0.0, seconds) for kind, seconds in lost.items()}

    # ---- with the lock

    def _turn(self, kind: str, at: float) -> None:
        """From a moment on its time goes to something else."""
        if self._kind:
            self._tally.spend(self._kind, at - self._since)
        self._kind, self._since = kind, at

    def _stay(self) -> dict[str, Any]:
        """What its memory says of the iteration; empty if the rank is in the next one, and will say so."""
        if self._memory is None or self._view is None:
            return {}
        stay = self._memory.stay()
        return stay if self._memory.iteration == self._view.n else {}

    def _look_whether_entered(self) -> None:
        stay = self._stay()
        if "entered" in stay and not self._has_entered:
            self._enter(stay["entered"], is_active=stay["active"])

    def _enter(self, at: float, *, is_active: bool) -> None:
        self._has_entered = True
        self._turn("" if is_active else "idle_spare", at)

    def _restart(self, view: View, before: Mapping[str, Any]) -> float:
        """An iteration has ended by a fault; returns when the next one was decided."""
        ended, phases = before["ended"], before["phases"]
        if "entered" in before:
            if not self._has_entered:
                self._enter(before["entered"], is_active=before["active"])
            self._turn("", ended)
            if before["active"]:
                self._spend(view, before, ended)
        self._kind = ""  # it has never entered this one: then all of the time is in the phases
        known = self._phases if ended == self._ended else {}
        for phase, seconds in phases.items():
            self._tally.spend(f"recovery_{phase}", seconds - known.get(phase, 0.0))
        self._ended, self._phases = ended, dict(phases)
        return float(ended + sum(phases.values()))

    def _spend(self, view: View, stay: Mapping[str, Any], end: float, *, is_whole: bool = False) -> None:
        """It was in the function, until it left that."""
        tally, entered = self._tally, stay["entered"]
        iteration = tally.steps.of(view.nonce)
        if "last" not in stay:
            hung = min(iteration.hung, end - entered)
            if tally.steps.tells_steps():  # it was not that far yet
                tally.spend("training_prep", end - entered - hung)
            tally.spend("detection", hung)
            return
        (first, began), (last, cut) = stay["first"], stay["last"]
        tally.note_steps(view.nonce, first, last)
        tally.note_progress(cut)
        tally.spend("training_prep", began - entered)
        tally.spend("wasted_progress", self._again(view, stay))
        if not is_whole:
            hung = min(iteration.hung, end - cut)
            tally.spend("detection", hung)
            tally.spend("wasted_progress", end - cut - hung)

    def _again(self, view: View, stay: Mapping[str, Any]) -> float:
        """Seconds of steps that were done before; between two moments as if all steps took equally long."""
        (first, began), (last, cut) = stay["first"], stay["last"]
        begun = self._tally.steps.begun(view.nonce)
        if begun <= first or last <= first:
            return 0.0
        return float((cut - began) * min(1.0, (begun - first) / (last - first)))
