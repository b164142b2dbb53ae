"""Checks that a simulated job goes on as it should, and when.

- I4: in time.
- I13: no process is interrupted or left out without a reason.
- I14: the job forms with all the slots that it begins with.
- I15: it waits for ranks that are about to come back.
"""

import math
from typing import TYPE_CHECKING

from ft_wrapper.exception import TimeoutError
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.records import DONE, FAULT, Decision, Head, Member

from .history import HARMLESS, LONGEST_LOOK, SLACK, History, Violation, names

if TYPE_CHECKING:
    from .process import SimulatedProcess
    from .simulation import Simulation

_MOST_DOUBLINGS = 6


class Progress:
    """What is checked whenever a simulated job takes a step forward.

    Args:
        simulation: the job.
        agreement: a client of its store, whose operations are no steps.
        history: what has happened.
    """

    def __init__(self, simulation: "Simulation", agreement: Agreement, history: History) -> None:
        self.simulation = simulation
        self.history = history
        self._agreement = agreement

    # I13: an iteration is ended for a reason ----------------------------------------------------------------

    def check_cause(self, n: int) -> None:
        """A fault has a cause: one that was published, a death, a silence, a join that wanted it."""
        history = self.history
        # By one that is late: no one who is in reads it any more.
        if n != history.heads[-1].n or n in history.published:
            return
        who, _, name = self._actor.partition(" ")
        for member in history.rosters[n]:
            process = history.owners[member]
            is_leaver = process.facts.leaving and process.name == self._actor
            if is_leaver and (process.active or process.facts.last != n):
                return
            if self._is_spare(n, member, process, to_all=who != "report"):
                continue
            if process.is_going:
                for_ = f"I4: {n} ended by the death of {process.name}"
                since = max(process.facts.died_at, history.decided_at[n])
                if process.fate in ("dead", "left") and not process.facts.doomed and who == "heart":
                    self.check_pace(for_, since)
                    self._check_silence(for_, since)
                return
            if history.newest(member.slot) > member and who == "rank":
                return  # taken over
            if who in ("heart", "rank") and history.is_silent(member, history.now):
                return
        if who != "rank":
            lost = f"of {names(history.rosters[n])} no one is lost"
            raise Violation(f"I13: {n} is ended by {who} {name}, and {lost}")
        self._check_join(n, name, history.now)

    @property
    def _actor(self) -> str:
        """The name of the task that has taken the last step."""
        current = self.simulation.scheduler.current
        return "" if current is None else current.name

    def _is_spare(self, n: int, member: Member, process: "SimulatedProcess", *, to_all: bool) -> bool:
        """Whether a member is known to be a spare in n: to its monitor, or to all who look."""
        history = self.history
        if not to_all:
            return process.facts.reported_as_spare_in == n
        if n not in history.sizes:
            return False
        if history.lately(history.full_at.get(n, history.now)):
            return False  # somebody may have looked before
        holders = {history.holders.get((n, "active rank", rank)) for rank in range(history.sizes[n][3])}
        return None not in holders and member not in holders

    def _check_join(self, n: int, name: str, now: float) -> None:
        """One that wants in ends the iteration only where that is asked for, and after the window."""
        history, scenario = self.history, self.history.scenario
        process = next((p for p in self.simulation.processes if p.name == f"rank {name}"), None)
        if process is None or process.member is None or process.member in history.rosters[n]:
            raise Violation(f"I13: {n} is ended by rank {name}, and no one is lost")
        asked = history.joined_at.get((n, process.member))
        if asked is None and not self.simulation.knows_store:
            return  # in a store whose logs are not seen to be written
        if asked is None or now - asked < scenario.join_window - 1e-6:
            raise Violation(f"I13: {n} is ended by rank {name}, which has not gathered joins")
        # Claimed is enough: the one that claims may not have entered yet.
        degraded = n in history.announced and history.announced[n] < max(history.announced.values())
        if scenario.on_join == "next" or (scenario.on_join == "degraded" and not degraded):
            raise Violation(f"I13: {n} is ended by rank {name}, though it is not wanted")

    # I13 to I15: and is followed by the right ones ----------------------------------------------------------

    def check_first(self, roster: tuple[Member, ...]) -> None:
        """The first decision has all slots, comes at once, and leaves out those that are known to be dead."""
        history = self.history
        missing = set(range(history.scenario.members)) - {member.slot for member in roster}
        if missing:
            raise Violation(f"I14: the job forms without the slots {sorted(missing)} that it begins with")
        if not self.simulation.knows_store:
            return
        # A lost node's deaths are logged late, perhaps after the decision has read the log.
        told_at = history.dead_at.get(keys.BEFORE_FIRST, -math.inf)
        for member in self._agreement.ends.deaths_of(keys.BEFORE_FIRST).intersection(roster):
            process = history.owners[member]
            if not process.alive and not history.lately(max(process.facts.died_at, told_at)):
                raise Violation(f"I14: the job forms with {process.name}, which is {process.fate}")
        took = history.now - max(history.joined_at.get((-1, member), 0.0) for member in roster)
        if not history.troubled and took > history.slowness + SLACK:
            raise Violation(f"I4: the job forms {took:.1f} s after the last one has joined")

    def check_following(self, head: Head, decision: Decision, roster: tuple[Member, ...]) -> None:
        """Any other decision comes in time, and those stay who live."""
        history, n, now = self.history, head.n - 1, self.history.now
        for member in set(decision.removed).difference(roster):
            self._check_removal(n, member, now)
        if history.outcomes[n] == FAULT:
            self.check_pace(f"I4: {n} was followed", history.ended_at[n])
            self._check_hold(n, roster, now)
        if not set(history.rosters[n]) & set(roster):
            self._check_gathering(n, roster, now)

    def _check_removal(self, n: int, member: Member, now: float) -> None:
        """Who lives and is heard stays, unless it keeps the others waiting in an iteration that failed."""
        history, process = self.history, self.history.owners[member]
        if process.is_going or not self.simulation.knows_store:
            return
        if history.newest(member.slot) > member or history.is_silent(member, now):
            return
        late = now - history.ended_at[n] >= history.scenario.barrier_timeout - SLACK
        arrived_at = history.arrived_at.get((n, member), now)
        if history.outcomes[n] == FAULT and late and history.lately(arrived_at):
            return
        told = any(kind in ("node", "loop") for _, _, kind in self.simulation.troubles)
        if not told or member not in self._agreement.ends.deaths_of(n):
            raise Violation(f"I13: {process.name} lives and is heard, and is left out after {n}")

    def _check_hold(self, n: int, roster: tuple[Member, ...], now: float) -> None:
        """With a replacement announced, and too few ranks without it, no one goes on before rejoin_wait."""
        history, here = self.history, {member.slot for member in roster}
        waited = now - history.ended_at[n]
        if len(roster) >= history.wanted or waited >= history.scenario.rejoin_wait - SLACK:
            return
        for (iteration, member), since in history.returns_at.items():
            known = max(since, history.ended_at[n])
            if iteration == n and member.slot not in here and not history.lately(known):
                raise Violation(f"I15: {n} is followed without {member.slot}, whose return was announced")

    def _check_gathering(self, n: int, roster: tuple[Member, ...], now: float) -> None:
        """Where no member of the last iteration is left, the first to come back waits for the others."""
        history = self.history
        if (
            not self.simulation.knows_store
            or now - history.ended_at[n] >= history.scenario.join_window - 1e-6
        ):
            return
        here = {member.slot for member in self._agreement.iterations.joins_of(n)}
        if not here.issuperset(member.slot for member in history.rosters[n]):
            raise Violation(f"I15: {n} is followed by {names(roster)}, who did not wait for the others")

    # I4: in time --------------------------------------------------------------------------------------------

    def check_pace(self, what: str, since: float) -> None:
        """That something came in time, which is counted from the last thing that happened."""
        history = self.history
        alive = [process.facts for process in self.simulation.processes if process.alive]
        there = [max(of.started_at, of.called_at) for of in alive if not of.disturbed and not of.away]
        if not there or history.scenario.min_world_size > 1:
            return  # no one was there to go on, or they had to wait for others
        # A stop ends a wait, too: nothing tells how long it will be.
        took = history.now - history.last_trouble(max(since, min(there)), ends_of=("outage", "deaf"))
        most = history.patience(since) if not history.is_plain_death() else history.slowness + SLACK
        if took > most:
            raise Violation(f"{what} after {took:.1f} s, more than {most:g} s")

    def _check_silence(self, what: str, since: float) -> None:
        """Any number that are lost are known to be silent soon after the first."""
        history = self.history
        started = max(process.facts.started_at for process in self.simulation.processes)
        took = history.now - history.last_trouble(max(since, started))
        most = history.silence_known_after + history.slowness
        if took > most + history.untold:
            raise Violation(f"{what}, {took:.1f} s after the last one was lost, more than {most:g} s")

    def check_promptness(self, process: "SimulatedProcess", n: int) -> None:
        """Who was waiting for the decision hears of it at once."""
        history, scenario = self.history, self.history.scenario
        if history.troubled or scenario.exchange or scenario.endpoint or process.facts.last < 0:
            return
        took = history.now - history.decided_at[n]
        if took > history.slowness + SLACK:
            raise Violation(f"I4: {process.name} enters {n} {took:.1f} s after it was decided")

    def check_entry(self, process: "SimulatedProcess", n: int) -> None:
        """I4 for joiners: one that ends the iteration itself is in soon."""
        history, scenario = self.history, self.history.scenario
        if process.facts.disturbed or n == 0 or scenario.on_join == "next" or scenario.min_world_size > 1:
            return
        if scenario.on_join == "degraded":
            sizes = {of: size[3] for of, size in history.sizes.items() if of < n}
            if sizes.get(n - 1, 0) >= max(sizes.values(), default=0):
                return
        if history.heads[n].call != history.heads[n - 1].call or history.sizes.get(n - 1) is None:
            return
        window = scenario.join_window * 2.0 ** min(_MOST_DOUBLINGS, len(history.heads))
        since = history.last_trouble(max(process.facts.wants_since, history.decided_at[n - 1]))
        took = history.now - since
        if took > window + LONGEST_LOOK + history.patience(since):
            raise Violation(f"I4: {process.name} got in after {took:.1f} s")

    def check_hearing(self, process: "SimulatedProcess", n: int) -> None:
        """A process that leaves n heard of its end at once, or with the next heartbeat of any member."""
        history = self.history
        if process.facts.disturbed or n not in history.ended_at or n < history.heads[-1].n - 1:
            return
        latest = max(history.ended_at[n], history.decided_at[n], process.facts.entered_at)
        for begin, end, kind in self.simulation.troubles:
            if kind != "pause" or end - begin <= HARMLESS:
                latest = max(latest, min(end, history.now))
        took = history.now - latest
        if took > history.reported + history.slowness:
            raise Violation(f"I4: {process.name} hears of the end of {n} {took:.1f} s after it")

    # Who may give up ----------------------------------------------------------------------------------------

    def is_excused(self, process: "SimulatedProcess") -> bool:
        """Whether a process may have failed though nothing was done to it."""
        gives_up_at = process.facts.wants_since + self.history.scenario.barrier_timeout
        formed_at = self.history.decided_at.get(0, gives_up_at)
        anything = any(other.facts.disturbed for other in self.simulation.processes)
        formation_failed = anything and process.fate == "failed" and formed_at >= gives_up_at
        return formation_failed or self._may_give_up(process) or self._are_too_few(process)

    def _are_too_few(self, process: "SimulatedProcess") -> bool:
        """Whether a process gives up since too many others were lost to go on."""
        history, least = self.history, self.history.scenario.min_world_size
        if least == 1 or process.fate != "failed" or not isinstance(process.error, TimeoutError):
            return False
        roster = history.rosters[history.heads[-1].n] if history.heads else ()
        left = [member for member in roster if not history.owners[member].facts.disturbed]
        return history.scenario.replaced or len(left) < least

    def _may_give_up(self, process: "SimulatedProcess") -> bool:
        """Whether a joiner waited in vain: somebody stood still for longer, or was lost between two calls.

        It has to give up: between two calls no one's silence is judged, so a joiner that went on without the
        members would throw out ranks that only take their time.
        """
        history, scenario = self.history, self.history.scenario
        if process.facts.entered > 0 or not isinstance(process.error, TimeoutError):
            return False
        waits = scenario.barrier_timeout + scenario.heartbeat_timeout
        for begin, end, kind in self.simulation.troubles:
            stops = kind in ("pause", "freeze", "hang") and end - begin > waits
            if stops and begin < process.facts.died_at and end > process.facts.wants_since:
                return True
        newest = {other.slot: other for other in self.simulation.processes}.values()
        is_lost = any(other.fate in ("dead", "left", "failed") for other in newest if other is not process)
        return is_lost and bool(history.heads) and history.outcomes.get(history.heads[-1].n) == DONE
