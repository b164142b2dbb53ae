"""What has happened in a simulated job, seen from outside, and how long it may take to be known to all."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ft_wrapper.protocol.records import Head, Member

if TYPE_CHECKING:
    from .process import SimulatedProcess
    from .scenario import Scenario
    from .simulation import Simulation

SLACK = 0.2
#: Those who come forward one after the other look at first often, at last every so many seconds.
LONGEST_LOOK = 8.0
_FIRST_LOOK = 0.5
_STAGGER = 0.05
_LOOKS_FOR_END = 1.0  # who waits for others while it enters looks every so often whether that is over
_TURNS = 8  # heartbeats in the timeout, from which on a heart does one thing at a time
_BEATS_OF_TURNS = 13  # until it has done all of them
HARMLESS = 4.0  # a shorter stop keeps no one from anything
_STEPS_OF_A_RESTART = 80  # of one process at the most, each of which takes time where it is slow

# After these only silence tells what happened, or somebody is waited for.
_SLOW = ("host", "node", "hang", "pause", "freeze", "deaf", "mute", "outage", "loop", "error")


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclasses.dataclass
class Facts:
    """What has happened to one process, and is known otherwise than from the store, with virtual times.

    Args:
        disturbed: whether something was done to it, so that it may be left out.
        doomed: whether its monitor has given it up.
        leaving: whether it is about to tell the others that it leaves.
        away: whether it is between two calls, also if it was in none.
        started_at: when it began.
        called_at: when it made its last call.
        wants_since: when it took its incarnation, in order to join.
        entered_at: when it entered its last iteration.
        died_at: when it ended.
        entered: number of iterations that it entered.
        last: the last iteration that it entered.
        heard: the last iteration of whose end it has heard.
        died_inside: the iteration that it was killed in, before it had heard of its end.
        reported_as_spare_in: the iteration in which its monitor knew that it was a spare when it ended.
        replaced: whether an agent has started the next process of the slot.
        respawned: whether that was started otherwise.
    """

    disturbed: bool = False
    doomed: bool = False
    leaving: bool = False
    away: bool = False
    started_at: float = 0.0
    called_at: float = 0.0
    wants_since: float = 0.0
    entered_at: float = 0.0
    died_at: float = 0.0
    entered: int = 0
    last: int = -1
    heard: int = -1
    died_inside: int | None = None
    reported_as_spare_in: int = -1
    replaced: bool = False
    respawned: bool = False


@dataclasses.dataclass(eq=False)
class History:
    """What has happened, by iteration or by member, with virtual times.

    Args:
        simulation: the job.
        heads: the head of each iteration.
        rosters: the members of each, in rank order.
        decided_at: when each was decided.
        outcomes: how each ended.
        ended_at: when.
        sizes: what those hold who enter: call, first iteration of it, world size, active ranks.
        announced: the active ranks of each, as rank 0 tells them.
        holders: who has a rank or an active rank.
        full_at: when an active rank was taken last.
        published: those of which a fault was published.
        returned: the active ranks whose function has returned.
        arrived_at: when a member has arrived.
        joined_at: when a member has asked to join.
        returns_at: when a death was logged that says that a replacement comes.
        dead_at: when a death was logged last.
        owners: the process of each member.
        beats: when each member was heard last.
        silences: the last long silence of each: until when, how long.
        untold: seconds that others wait in vain for processes that ended before they were in.
        wanted: the most active ranks that there were.
    """

    simulation: "Simulation"
    heads: list[Head] = dataclasses.field(default_factory=list)
    rosters: dict[int, tuple[Member, ...]] = dataclasses.field(default_factory=dict)
    decided_at: dict[int, float] = dataclasses.field(default_factory=dict)
    outcomes: dict[int, str] = dataclasses.field(default_factory=dict)
    ended_at: dict[int, float] = dataclasses.field(default_factory=dict)
    sizes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    announced: dict[int, int] = dataclasses.field(default_factory=dict)
    holders: dict[tuple[int, str, int], Member] = dataclasses.field(default_factory=dict)
    full_at: dict[int, float] = dataclasses.field(default_factory=dict)
    published: set[int] = dataclasses.field(default_factory=set)
    returned: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    arrived_at: dict[tuple[int, Member], float] = dataclasses.field(default_factory=dict)
    joined_at: dict[tuple[int, Member], float] = dataclasses.field(default_factory=dict)
    returns_at: dict[tuple[int, Member], float] = dataclasses.field(default_factory=dict)
    dead_at: dict[int, float] = dataclasses.field(default_factory=dict)
    owners: "dict[Member, SimulatedProcess]" = dataclasses.field(default_factory=dict)
    beats: dict[Member, float] = dataclasses.field(default_factory=dict)
    silences: dict[Member, tuple[float, float]] = dataclasses.field(default_factory=dict)
    untold: float = 0.0
    wanted: int = 0

    @property
    def scenario(self) -> "Scenario":
        """What the job is to do."""
        return self.simulation.scenario

    @property
    def now(self) -> float:
        """The time."""
        return self.simulation.scheduler.now()

    def newest(self, slot: int) -> Member:
        """The last incarnation that a process of a slot has taken."""
        return max(member for member in self.owners if member.slot == slot)

    # Silence ------------------------------------------------------------------------------------------------

    @property
    def silent_after(self) -> float:
        """Seconds between two heartbeats, as they were sent, in which somebody may take one for silent."""
        return self.scenario.heartbeat_timeout - self.scenario.heartbeat_interval / 2

    def is_silent(self, member: Member, now: float) -> bool:
        """Whether a member is silent, or was until a moment ago."""
        if member not in self.beats:
            return False
        if self._is_long(self.beats[member], now):
            return True
        until, lasted = self.silences.get(member, (-1e9, 0.0))
        return now - until <= self.moment and self._is_long(until - lasted, until)

    def _is_long(self, begin: float, end: float) -> bool:
        """Whether a silence is one, and not an outage of the store, of which no one may conclude anything."""
        silence = end - begin
        out = [
            min(end, until) - max(begin, since)
            for since, until, kind in self.simulation.troubles
            if kind == "outage" and since < end and until > begin
        ]
        if out:
            return silence - sum(out) >= self.scenario.heartbeat_timeout / 2 - SLACK
        return silence >= self.silent_after

    @property
    def moment(self) -> float:
        """For how long after a silence somebody may still act on it."""
        return 2 * self.scenario.heartbeat_interval + self._longest_stop + self.slowness

    # How long it may take until something is known ----------------------------------------------------------

    @property
    def _longest_stop(self) -> float:
        return max((end - begin for begin, end, _ in self.simulation.troubles), default=0.0)

    @property
    def _takes_turns(self) -> bool:
        """Whether a heart does one of its duties with each beat, not all of them."""
        return self.scenario.heartbeat_timeout >= _TURNS * self.scenario.heartbeat_interval

    @property
    def silence_known_after(self) -> float:
        """Seconds after which any number that were lost at once are known to be silent."""
        beats = 8 if self._takes_turns else 4
        return self.scenario.heartbeat_timeout + beats * self.scenario.heartbeat_interval

    @property
    def troubled(self) -> bool:
        """Whether anything happens to the job beside exceptions."""
        processes = self.simulation.processes
        disturbed = any(process.facts.disturbed or process.life for process in processes)
        others = any(self.scenario.of("repeat", "reporter", "loop"))
        return bool(self.simulation.troubles) or disturbed or others

    def troubled_at(self, now: float) -> bool:
        """Whether something stood still until a moment ago."""
        moment = now - 2 * self.scenario.heartbeat_interval
        return any(end > moment for begin, end, kind in self.simulation.troubles if end > begin)

    def last_trouble(self, since: float, *, ends_of: Sequence[str] | None = None) -> float:
        """When something happened last that may delay the others: it began or was over.

        Args:
            since: the answer if that was later.
            ends_of: the kinds of troubles whose end counts; all when None.
        """
        troubles = self.simulation.troubles
        ends = [min(end, self.now) for _, end, kind in troubles if ends_of is None or kind in ends_of]
        return max([since, *(begin for begin, _, _ in troubles), *ends])

    def lately(self, then: float) -> bool:
        """Whether something is no longer ago than it may take to be heard of."""
        return self.now - then <= self._longest_stop + self.slowness + self.reported

    def is_plain_death(self) -> bool:
        """Whether nothing has happened but that one process died in the function, and its monitor lives."""
        scenario = self.scenario
        if [kind for _, _, kind in self.simulation.troubles] != ["crash"] or scenario.replaced:
            return False
        others = ("repeat", "reporter", "respawn", "exception")
        if any(scenario.of(*others)) or scenario.extra or scenario.stagger or self.untold:
            return False
        dead = [process for process in self.simulation.processes if process.fate == "dead"]
        return len(dead) == 1 and dead[0].facts.died_inside is not None

    @property
    def slowness(self) -> float:
        """What the steps of the slowest process take in one restart."""
        exchanges = _LOOKS_FOR_END + SLACK if self.scenario.exchange or self.scenario.endpoint else 0.0
        return _STEPS_OF_A_RESTART * self.scenario.slow + exchanges

    @property
    def reported(self) -> float:
        """How long it may take until what was reported is known: somebody dies before it wakes the others."""
        if not self.troubled:
            return SLACK
        beats = (_BEATS_OF_TURNS if self._takes_turns else 1) * self.scenario.heartbeat_interval
        return beats + _FIRST_LOOK + _STAGGER * self.scenario.members + SLACK

    def patience(self, since: float) -> float:
        """The longest that an iteration which has ended may last, in virtual seconds, after the last fault.

        It does not depend on how many there were. What happened long before is known to all by then.

        Args:
            since: when it ended.
        """
        scenario = self.scenario
        known_within = 2 * scenario.heartbeat_timeout + 8 * scenario.heartbeat_interval
        long_ago = since - known_within
        alive = [process.facts.started_at for process in self.simulation.processes if process.alive]
        if since - min(alive, default=since) < known_within:
            long_ago = -math.inf  # those who came after all others were lost begin to look only now
        # But each call has another monitor.
        several = scenario.calls > 1
        troubles = [trouble for trouble in self.simulation.troubles if several or trouble[1] >= long_ago]
        kinds = {kind for _, _, kind in troubles}
        patience = self.reported + self.slowness + self.untold
        if kinds:
            patience += 2 * _FIRST_LOOK + scenario.join_window
        forms = bool(scenario.stagger) and since - self.decided_at.get(0, since) <= LONGEST_LOOK
        if kinds and (several or forms):
            # Who moves the head and dies before it wakes the others: those who wait for long look seldom.
            patience += LONGEST_LOOK
        if scenario.replaced:
            patience += scenario.rejoin_wait + scenario.replaced_after
        slow = kinds & set(_SLOW)
        if slow and slow <= {"host", "node"} and not any(scenario.of("reporter", "repeat")) and not several:
            # Their neighbours see all of them at once, and go on without them.
            patience += self.silence_known_after
        elif slow or any(scenario.of("reporter")):
            patience += 2 * scenario.heartbeat_timeout + 2 * scenario.heartbeat_interval + 2 * LONGEST_LOOK
        if any(end - begin > HARMLESS for begin, end, _ in troubles) or "error" in kinds:
            patience += scenario.barrier_timeout + LONGEST_LOOK
        return patience


def names(members: Iterable[Member]) -> str:
    """Members, for a message."""
    return ", ".join(str(member) for member in sorted(members)) or "no one"
