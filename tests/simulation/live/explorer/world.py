"""The world of a simulated job: processes, iterations, collectives, faults and the restart loop's decisions.

Each active member of an iteration runs the real course in a greenlet of its own. Before each effect it comes
back to the world, and a `Policy` says what happens next: a member goes on, is interrupted, or a fault. So
between any two effects of a member anything may happen, and nothing else is possible.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import greenlet

from ft_wrapper.live.commit import Kept
from ft_wrapper.live.plan import Copy, Register

from .job import Job, Value

if TYPE_CHECKING:
    from .checker import Checker
    from .member import Member

GO, INTERRUPT, RAISE, KILL, CUT, KILL_SPARE, LATE = (
    "goes on",
    "interrupted",
    "raises",
    "killed",
    "cut",
    "spare",
    "late",
)
Action = tuple[str, Any]
"""What happens, and to whom: a member; with ``KILL_SPARE`` a process."""

_SEEN = frozenset({"objects", "held", "arguments", "newest"})


class Violation(AssertionError):
    """An invariant does not hold."""


class Interrupted(BaseException):
    """The restart loop makes the member leave."""


class Killed(BaseException):
    """The process is gone; what it still does while the stack is unwound reaches no one."""


class UpdateFailed(Exception):
    """The user's update raises, half-way."""


class SeenKept(Kept):
    """A `Kept` each assignment of which is a point where others go on, or a fault happens.

    Attributes:
        member: that uses it in this iteration.
        saved: copies of the buffers.
    """

    member: Member | None = None

    def __init__(self) -> None:
        super().__init__()
        self.saved: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        member = self.member
        if member is None or name not in _SEEN:
            object.__setattr__(self, name, value)
            return
        if not member.is_atomic:
            member.point(f"sets {name}")
        object.__setattr__(self, name, value)
        if name == "held":
            member.world.checker.held(member)


@dataclasses.dataclass
class Copied:
    """A copy in host memory."""

    shard: str
    value: Value
    origins: frozenset[int]

    def said(self) -> Copy:
        """As a rank says it."""
        return Copy(self.shard, len(self.value.gradients), self.origins)


class Process:
    """A process of the job.

    Attributes:
        number: its slot; a new process in the same slot has the same.
        recoveries: those that were finished with the state that it holds, by what really happened.
        since: the first iteration of those in a row up to now in which it was active.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.kept = SeenKept()
        self.copies: list[Copied] = []
        self.recoveries: frozenset[int] = frozenset()
        self.since = -1

    def is_blank(self) -> bool:
        """Whether it has nothing, like a new one."""
        return self.kept.objects is None and not self.copies


class Meeting:
    """A collective of an iteration. Who has entered it has entered it for good."""

    def __init__(self, what: str, size: int) -> None:
        self.what = what
        self.size = size
        self.values: dict[int, Any] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all have entered, so that it may end at any of them."""
        return len(self.values) == self.size


class Policy(Protocol):
    """Decides what happens."""

    def next(self, world: World) -> Action | None:
        """What happens next; None: nothing can."""

    def pick(self, what: str, count: int) -> int:
        """One of the possibilities of a restart; the first is the quietest."""


class World:
    """A job.

    Args:
        job: which one.
        policy: decides.
        traces: whether `trace` is written.

    Attributes:
        n: number of the iteration.
        places: the process of each active place.
        pool: the other processes.
        members: of this iteration, by active rank.
        ready: those of them that can go on.
        inside: how many of them have not left.
        is_ending: whether a fault has ended the iteration, so that all leave it.
        events: how many things have happened.
    """

    def __init__(self, job: Job, policy: Policy, *, traces: bool = False) -> None:
        from .checker import Checker

        self.job = job
        self.policy = policy
        self.trace: list[str] | None = [] if traces else None
        self.size = len(job.shards)
        self.register = Register()
        self.checkpoint: Value | None = None
        self.late: tuple[Register, Register] | None = None
        self.faults, self.demotions, self.calls = job.faults, job.demotions, job.calls
        self.places = [Process(number) for number in range(self.size)]
        self.pool = [Process(self.size + number) for number in range(job.spares)]
        self.n = -1
        self.events = 0
        self.members: list[Member] = []
        self.ready: list[Member] = []
        self.inside = 0
        self.is_ending = False
        self.meetings: dict[int, Meeting] = {}
        self.confirmed: set[tuple[int, int]] = set()
        self.violation: Violation | None = None
        self.hub: Any = None
        self.checker: Checker = Checker(self)

    # ---- running

    def run(self) -> None:
        """Runs the job to its end.

        Raises:
            Violation: an invariant does not hold.
        """
        self.hub = greenlet.getcurrent()
        try:
            while True:
                self._iterate()
                if self.is_ending:
                    self._regroup()
                    continue
                self.checker.done()
                self.calls -= 1
                if not self.calls:
                    return
                self._next_call()
        finally:
            for member in self.members:
                self._end(member, Killed)

    def _iterate(self) -> None:
        from .member import Member

        self.n += 1
        self.is_ending = False
        self.meetings, self.confirmed = {}, set()
        for process in self.places:
            process.since = self.n if process.since < 0 else process.since
        for process in self.pool:
            process.since = -1
        self.members = [Member(self, process, rank) for rank, process in enumerate(self.places)]
        self.ready = list(self.members)
        self.inside = self.size
        self.checker.begin()
        if self.trace is not None:
            places = ", ".join(f"{process.number} at {rank}" for rank, process in enumerate(self.places))
            self.trace.append(f"--- iteration {self.n}: process {places}; register {self.register}")
        for member in self.members:
            member.greenlet.switch()  # to its first point
        while self.inside:
            action = self.policy.next(self)
            if action is None:
                where = "; ".join(f"{m.rank} {'has left' if m.has_left else m.at}" for m in self.members)
                raise Violation(f"deadlock: no one can go on: {where}")
            self.do(action)
            if self.violation is not None:
                raise self.violation

    def do(self, action: Action) -> None:
        """Lets something happen."""
        what, who = action
        self.events += 1
        if self.trace is not None:
            where = (
                ""
                if what is LATE
                else f"process {who.number}"
                if what is KILL_SPARE
                else f"{who.rank}: {who.at}"
            )
            self.trace.append(f"{where:24}" + ("" if what is GO else f"  <-- {what}"))
        if what is GO:
            who.greenlet.switch()
        elif what is INTERRUPT:
            self._end(who, Interrupted)
        elif what is CUT:
            who.is_aborted = True
            who.waiting = None
            self.ready.append(who)
        elif what is LATE:
            assert self.late is not None
            (expected, register), self.late = self.late, None
            if not self.job.compares or expected == self.register:
                self.register = register
        else:
            self.faults -= 1
            self._fault(what, who)

    def _fault(self, what: str, who: Any) -> None:
        if what is KILL_SPARE:
            self.pool[self.pool.index(who)] = Process(who.number)
            return
        self.is_ending = True
        if what is RAISE:
            self._end(who, UpdateFailed if who.is_atomic else Interrupted)
            return
        if self.job.late_writes and who.at == "writes the register":
            self.late = who.writes
        who.is_dead = True
        self._end(who, Killed)

    def _end(self, member: Member, error: type[BaseException]) -> None:
        if not member.has_left:
            member.greenlet.throw(error)
        if member in self.ready:
            self.ready.remove(member)
        member.waiting = None

    def actions(self) -> list[Action]:
        """All that can happen, the quietest first."""
        found: list[Action] = [(GO, member) for member in self.ready]
        for member in self.members:
            if self.is_ending and not member.has_left and not member.is_atomic:
                found.append((INTERRUPT, member))
                if member.waiting is not None and member.at in CUTTABLE:
                    found.append((CUT, member))
        if self.faults:
            for member in self.members:
                if not member.has_left and (not self.is_ending or member.is_atomic):
                    found.append((RAISE, member))
                if not member.is_dead:
                    found.append((KILL, member))
            found += [(KILL_SPARE, process) for process in self.pool if not process.is_blank()]
        if self.late is not None:
            found.append((LATE, None))
        return found

    # ---- collectives

    def meeting(self, member: Member, what: str) -> Meeting:
        """The next one of a member: collectives match in the order of the calls."""
        meeting = self.meetings.setdefault(member.count, Meeting(what, self.size))
        member.count += 1
        if meeting.what != what:
            raise Violation(f"rank {member.rank} is in {what!r} while others are in {meeting.what!r}")
        return meeting

    def wake(self) -> None:
        """Puts those among the ready who wait no longer."""
        for member in self.members:
            if member.waiting is not None and member.waiting():
                member.waiting = None
                self.ready.append(member)

    # ---- the restart loop

    def _regroup(self) -> None:
        """Takes out the dead, demotes, fills the places."""
        pick = self.policy.pick
        dead = [Process(member.process.number) for member in self.members if member.is_dead]
        places: list[Process | None] = [None if m.is_dead else m.process for m in self.members]
        demoted: list[Process] = []
        while self.demotions and self.job.spares:
            active = [process for process in places if process is not None]
            which = pick("demote", 1 + len(active))
            if not which:
                break
            self.demotions -= 1
            places[places.index(active[which - 1])] = None
            demoted.append(active[which - 1])
        how = pick("arrange", 3) if self.job.permutes else 0
        if how:
            left = [process for process in places if process is not None]
            places = [*left, *[None] * (self.size - len(left))]
            places = places if how == 1 else places[::-1]
        pool = self.pool + dead
        for place in range(self.size):
            if places[place] is None:
                if not pool:
                    pool, demoted = demoted, []
                blank = next((one for one in pool if one.is_blank()), None)
                options = [one for one in pool if one is blank or not one.is_blank()]
                places[place] = options[pick("fill", len(options))]
                pool.remove(places[place])  # type: ignore[arg-type]
        self.places = [process for process in places if process is not None]
        self.pool = pool + demoted

    def _next_call(self) -> None:
        self.checkpoint = None
        for process in self.places + self.pool:
            process.kept = SeenKept()
            process.copies = []
            process.recoveries = frozenset()
        self.checker.next_call()


CUTTABLE = frozenset({"in reduce", "in share"})
"""The collectives that an abort may cut short without an error, as on a device; votes end on the host."""
