"""A job of simulated ranks and monitors on the real store code, and the invariants that must hold.

Each rank is a task that does what the wrapper does: register, form, enter, leave, arrive, go on, complete.
Beside it its monitor: a task that sends heartbeats and watches the next members, and, once the rank has
crashed, a task that reports the death. Every client has a clock of its own, far from the others'.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ft_wrapper.attribution import Interruption
from ft_wrapper.exception import RankShouldRestart, TimeoutError
from ft_wrapper.job import Job as WrapperJob
from ft_wrapper.job import Patience
from ft_wrapper.monitor.death import report_death
from ft_wrapper.monitor.neighbours import NeighbourWatch
from ft_wrapper.rank_assignment import RankDiscarded
from ft_wrapper.store import Fault, Head, Member, PrefixStore, View, keys
from ft_wrapper.store.records import DONE, FAULT, roster_from_json
from ft_wrapper.testing import FakeStore, Scheduler, Task

HEARTBEAT_INTERVAL = 1.0
HEARTBEAT_TIMEOUT = 10.0
BARRIER_TIMEOUT = 40.0
STEP = 0.1
LONG = 10_000.0
PATIENCE = Patience(BARRIER_TIMEOUT, HEARTBEAT_TIMEOUT, completion=LONG, min_world_size=1)


class Violation(AssertionError):
    """An invariant does not hold."""


class Leave(BaseException):
    """Ctrl-C, or SIGTERM: the rank leaves the job in order."""


class SkewedStore(FakeStore):
    """A client whose own clock shows another time than its peers'."""

    skew = 0.0

    def now(self) -> float:
        return super().now() + self.skew

    def try_get(self, key: str) -> str | None:
        # As TCPStore does it, in one step; with libuv it wakes those who wait for an absent key.
        if not self._contents.use_libuv:
            return super().try_get(key)
        value = self.compare_set(key, "never", "never").decode()
        return None if value == "never" else value


@dataclasses.dataclass
class Rank:
    """What a monitor, and the test, know of a rank without asking the store."""

    slot: int
    task: Task | None = None
    heart: Task | None = None
    member: Member | None = None
    view: View | None = None
    rank: int = 0
    active: bool = False
    inside: int | None = None  # the iteration whose function it is in
    last: int = -1  # the last iteration that it entered
    fate: str = "running"  # running, done, out, failed, dead, left
    died_at: float = 0.0
    error: Exception | None = None
    done_in: list[int] = dataclasses.field(default_factory=list)
    disturbed: bool = False  # a fault was put on it, so it may be left out


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """A fault put on a task: what, whose, just before which of its steps."""

    kind: (
        str  # one of Job._plan's, or deaf (pause of the heartbeat), reporter (crash of who reports a death),
    )
    slot: int  # mute (heartbeats are lost from this time on)
    step: int
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What a simulated job is to do, and what happens to it."""

    members: int = 3
    active: int = 2
    steps: int = 3
    calls: int = 1
    min_world_size: int = 1
    exchange: bool = False  # ranks are assigned through compute_once
    use_libuv: bool = True
    exceptions: tuple[tuple[int, int], ...] = ()  # (slot, which of its entries)
    disturbances: tuple[Disturbance, ...] = ()

    @classmethod
    def random(cls, seed: int, max_members: int = 6) -> Scenario:
        """A job with up to three faults."""
        choose = random.Random(seed)
        members = choose.randint(2, max_members)
        count = choose.randint(0, 3)
        kinds = (
            "crash",
            "crash",
            "crash",
            "host",
            "pause",
            "pause",
            "repeat",
            "deaf",
            "reporter",
            "exception",
        )
        exceptions, disturbances = [], []
        for kind in choose.choices(kinds, k=count):
            slot = choose.randrange(members)
            if kind == "exception":
                exceptions.append((slot, choose.randint(1, 3)))
                continue
            if kind == "reporter":  # the rank dies too, or there would be no reporter
                disturbances.append(Disturbance("crash", slot, choose.randint(1, 60)))
            step = choose.randint(1, 12) if kind == "reporter" else choose.randint(1, 60)
            disturbances.append(Disturbance(kind, slot, step, choose.choice((0.3, 3.0, 15.0, 100.0))))
        return cls(
            members=members,
            active=choose.randint(1, members),
            steps=choose.randint(0, 3),
            calls=choose.choice((1, 1, 2)),
            exchange=choose.random() < 0.3,
            use_libuv=choose.random() < 0.5,
            exceptions=tuple(exceptions),
            disturbances=tuple(disturbances),
        )


class Job:
    """Runs a scenario and checks the invariants after every step."""

    store_class: type[SkewedStore] = SkewedStore

    def __init__(self, scenario: Scenario, seed: int = 0, choices: tuple[int, ...] = ()) -> None:
        self.scenario = scenario
        self.patience = dataclasses.replace(PATIENCE, min_world_size=scenario.min_world_size)
        self.scheduler = Scheduler(seed, choices, max_steps=60_000, max_time=2_000.0)
        self.store = self.store_class(self.scheduler, use_libuv=scenario.use_libuv)
        self.ranks = [Rank(slot) for slot in range(scenario.members)]
        self.slots = range(scenario.members)
        self.invariants = Invariants(self)
        self.operations: dict[str, int] = {}
        self.store.on_operation(self._on_operation)
        self.scheduler.after_each_step(self.invariants.check)
        for rank in self.ranks:
            rank.task = self.scheduler.spawn(f"rank {rank.slot}", self.rank, rank)
        for disturbance in scenario.disturbances:
            self._plan(disturbance)

    def run(self) -> Job:
        """Runs it to its end."""
        self.scheduler.run()
        self.invariants.check_end()
        return self

    def client(self, name: str, slot: int) -> SkewedStore:
        """A client of the store with its own clock: hours apart, before or after."""
        client = self.store.clone(name)
        client.skew = 5_000.0 * (slot * 7 % 5 - 2)
        return client

    # A rank ------------------------------------------------------------------------------------------------

    def rank(self, rank: Rank) -> None:
        """What the wrapper does, in the rank's main thread."""
        try:
            self._live(rank, self.client(f"rank {rank.slot}", rank.slot))
        except TimeoutError as error:
            rank.fate, rank.error = "failed", error
        except (RankDiscarded, Leave):
            rank.fate = "out"
            if rank.view is None:  # interrupted while the job forms: only its silence tells the others
                self.invariants.patience += 2 * HEARTBEAT_TIMEOUT

    def _live(self, rank: Rank, store: SkewedStore) -> None:
        job = WrapperJob(store, rank.slot, list(self.slots), self.patience)
        job.register()
        rank.member = job.member
        rank.heart = self.scheduler.spawn(f"heart {rank.slot}", self.heart, rank, daemon=True)
        for disturbance in self.scenario.disturbances:
            if disturbance.kind == "deaf" and disturbance.slot == rank.slot:
                self.scheduler.pause_at(rank.heart, disturbance.step, disturbance.seconds)
        if not job.join():
            rank.fate = "late"
            return
        try:
            self._loop(rank, job)
        except Leave as error:
            rank.inside, rank.died_at = None, self.scheduler.now()
            job.leave(rank.rank, Interruption.BASE_EXCEPTION, error, ends=True)
            rank.fate = "left"

    def _loop(self, rank: Rank, job: WrapperJob) -> None:
        position, size, entries = self.slots.index(rank.slot), len(self.slots), 0
        while True:
            # The monitor is told by the rank, through memory that both share.
            rank.view, rank.rank, rank.active = job.view, position, True
            entries += 1
            outcome = self._iterate(rank, job, position, size, entries)
            if outcome == DONE:
                self.invariants.completed(rank, job.view)
                if job.view.call + 1 == self.scenario.calls:
                    rank.fate = "done"
                    return
            job.go_on(position, size)
            position = job.decision.rank_after(position)
            position -= sum(gone < position for gone in job.decision.ranks)
            size = len(job.view.members)
            if job.view.members.index(job.member) != position:
                raise Violation(f"I2: {job.member} has rank {position} among {job.view.members}")

    def _iterate(self, rank: Rank, job: WrapperJob, position: int, size: int, entries: int) -> str:
        """One iteration; how it ended."""
        store, n = job.store, job.view.n
        active_size = min(self.scenario.active, size)
        active_rank = position if position < active_size else None
        if self.scenario.exchange:
            try:
                assigned = PrefixStore(n, store).compute_once(
                    "assign",
                    position,
                    str(position),
                    size,
                    lambda given: dict(given),
                    timedelta(seconds=LONG),
                )
            except RankShouldRestart:
                return FAULT
            if assigned != str(position):
                raise Violation(f"compute_once gave {job.member} the result of another: {assigned}")
        rank.active = active_rank is not None
        store.check_assignment(n, job.member, active_rank, size, active_size)
        self.invariants.entered(rank, job.view, active_rank, size, active_size)
        for step in range(self.scenario.steps if active_rank is not None else 0):
            if step == self.scenario.steps - 1 and (rank.slot, entries) in self.scenario.exceptions:
                job.publish(position, RuntimeError("simulated"))
            # The wrapper waits in another thread, which interrupts this one.
            if store.wait_for(keys.wake_end(n), STEP):
                outcome = job.await_completion(None, 0)
                break
        else:
            rank.inside = None
            outcome = job.await_completion(active_rank, active_size)
        rank.inside = None
        return outcome

    def fault(self, rank: Rank, interruption: Interruption) -> Fault:
        """A fault of a rank."""
        assert rank.member is not None
        return Fault(rank.member, rank.rank, interruption, "simulated", "h", rank.slot)

    # Its monitor -------------------------------------------------------------------------------------------

    def heart(self, rank: Rank) -> None:
        """The monitor's heartbeat thread: as long as the rank lives."""
        store = self.client(f"heart {rank.slot}", rank.slot)
        assert rank.member is not None
        watch = self.watch(store, rank.member)
        while rank.fate == "running":
            if not self._is_mute(rank):
                store.send_heartbeat(rank.member)
            if rank.view is not None:
                watch.look(rank.view)
            self.scheduler.sleep(HEARTBEAT_INTERVAL)

    def _is_mute(self, rank: Rank) -> bool:
        now = self.scheduler.now()
        return any(
            d.kind == "mute" and d.slot == rank.slot and d.step <= now < d.step + d.seconds
            for d in self.scenario.disturbances
        )

    def watch(self, store: SkewedStore, member: Member) -> Any:
        """Who watches the neighbours."""
        return NeighbourWatch(store, member, HEARTBEAT_TIMEOUT)

    def report(self, rank: Rank) -> None:
        """The monitor after its rank's death."""
        store = self.client(f"report {rank.slot}", rank.slot)
        assert rank.member is not None
        fault = self.fault(rank, Interruption.TERMINATED)
        report_death(store, rank.view, rank.member, fault, active=rank.active, timeout=BARRIER_TIMEOUT)

    # Faults ------------------------------------------------------------------------------------------------

    def _plan(self, disturbance: Disturbance) -> None:
        rank, kind = self.ranks[disturbance.slot], disturbance.kind
        assert rank.task is not None
        actions: dict[str, Callable[[], None]] = {
            "crash": lambda: self.crash(rank),
            "host": lambda: self.crash(rank, host=True),
            "pause": lambda: self.scheduler.pause(rank.task, disturbance.seconds),
            "leave": lambda: self.leave(rank),
            "doom": lambda: self.doom(rank),
            "loop": lambda: self.crash_loop(rank),
            "repeat": lambda: self.store.repeat(client=rank.task.name),
        }
        rank.disturbed = rank.disturbed or kind not in ("repeat", "reporter")
        if kind in actions:
            self.scheduler.at_step(rank.task, disturbance.step, actions[kind])

    def crash(self, rank: Rank, *, host: bool = False, reported: bool = False) -> None:
        """Kills a rank; its monitor with it, or the monitor reports the death."""
        assert rank.task is not None
        if rank.task.done:
            return
        rank.fate, rank.inside, rank.died_at = "dead", None, self.scheduler.now()
        if host and rank.heart is not None:
            self.scheduler.crash(rank.heart)
        if not host and not reported and rank.member is not None:
            reporter = self.scheduler.spawn(f"report {rank.slot}", self.report, rank)
            for disturbance in self.scenario.disturbances:
                if disturbance.kind == "reporter" and disturbance.slot == rank.slot:
                    self.scheduler.crash_at(reporter, disturbance.step)
        self.scheduler.crash(rank.task)

    def doom(self, rank: Rank) -> None:
        """The monitor gives the rank up and reports its death; it lives on until it is killed."""
        if rank.fate != "running" or rank.member is None:
            return
        self.scheduler.spawn(f"report {rank.slot}", self.report, rank)

        def kill() -> None:
            self.scheduler.sleep(0.05)
            self.crash(rank, reported=True)

        self.scheduler.spawn(f"kill {rank.slot}", kill)

    def crash_loop(self, rank: Rank) -> None:
        """The rank's host is lost, and its slot started again elsewhere, over and over, without success."""

        def again() -> None:
            store = self.client(f"again {rank.slot}", rank.slot)
            for _ in range(100):
                self.scheduler.sleep(3.0)
                store.register(rank.slot, "{}")

        self.scheduler.spawn(f"again {rank.slot}", again)
        self.crash(rank, host=True)

    def leave(self, rank: Rank) -> None:
        """Makes a rank leave the job in order, from wherever it is."""
        if rank.fate == "running":
            raise Leave

    def _on_operation(self, client: str, operation: str, args: Any) -> None:
        self.operations[client] = self.operations.get(client, 0) + 1
        if args:
            self.invariants.touched = args[0]


class Invariants:
    """DESIGN.md 5.5, checked after every step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.touched: Any = None
        self.heads: list[Head] = []
        self.rosters: dict[int, tuple[Member, ...]] = {}
        self.outcomes: dict[int, str] = {}
        self.ended_at: dict[int, float] = {}
        self.decided_at: dict[int, float] = {}
        self.immutable: dict[str, bytes] = {}
        self.sizes: dict[int, tuple[int, ...]] = {}
        self.holders: dict[tuple[int, int], Member] = {}
        kinds = {d.kind for d in job.scenario.disturbances}
        # Where nobody is cut off or stopped, restarts take no time but that of a lost proposer's successor.
        faults = job.scenario.disturbances
        lost = len([d for d in faults if d.kind in ("crash", "leave", "host", "loop", "doom")])
        self.patience = 3.0 * (1 + lost)
        if kinds & {"host", "loop", "pause", "deaf", "mute", "reporter"}:
            self.patience = (1 + lost) * (HEARTBEAT_TIMEOUT + 8.0) + BARRIER_TIMEOUT + 10.0
            # Two that are stopped or lost at once may be each other's only observers.
            if len({d.slot for d in faults}) > 1:
                self.patience += sum(d.seconds for d in faults)

    # After every step --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Looks at what the last operation may have changed."""
        touched, self.touched = self.touched, None
        if touched is None:
            return
        values = self.job.store._contents.values
        for key in [touched] if isinstance(touched, str) else touched:
            if key == keys.HEAD and key in values:
                self._check_head(values[key].decode(), values)
            elif key.startswith(_END):
                self._check_end(int(key[len(_END) :]), values.get(key))
            elif key.startswith((_DECISION, _ROSTER)):
                before = self.immutable.setdefault(key, values.get(key, b""))
                if key in values and values[key] != before:
                    raise Violation(f"{key} changed from {before!r} to {values[key]!r}")

    def _check_head(self, text: str, values: dict[str, bytes]) -> None:
        head = Head.parse(text, keys.HEAD)
        if self.heads and head == self.heads[-1]:
            return
        if head.n != len(self.heads):
            raise Violation(f"I1: head moved from {self.heads[-1:]} to {head}")
        if keys.decision(head.n, head.nonce) not in values or keys.roster(head.n, head.nonce) not in values:
            raise Violation(f"head moved to {head}, whose decision is not written")
        if head.n > 0 and head.n - 1 not in self.outcomes:
            raise Violation(f"I1: head moved to {head} before {head.n - 1} had ended")
        if head.n > 0 and head.call != self.heads[-1].call + (self.outcomes[head.n - 1] == DONE):
            raise Violation(f"the call of {head} does not follow from {self.heads[-1]}")
        roster = roster_from_json(values[keys.roster(head.n, head.nonce)].decode(), "roster")
        if len(roster) < self.job.scenario.min_world_size:
            raise Violation(f"I11: {len(roster)} members are in {head}")
        if len({member.slot for member in roster}) < len(roster):
            raise Violation(f"I2: two incarnations of a slot in {roster}")
        for rank in self.job.ranks:
            if rank.inside is not None and rank.inside < head.n and rank.member in roster:
                raise Violation(f"I12: {rank.member} is in the function of {rank.inside} while in {head}")
        if head.n > 0:
            strangers = set(roster) - set(self.rosters[head.n - 1])
            if strangers:
                raise Violation(f"I5: {strangers} had been left out, and are in {head}")
            self._check_pace(f"I4: {head.n - 1} was followed", self.ended_at[head.n - 1])
        self.heads.append(head)
        self.decided_at[head.n] = self.job.scheduler.now()
        self.rosters[head.n] = roster

    def _check_end(self, n: int, value: bytes | None) -> None:
        if value is None:
            if n in self.outcomes:
                raise Violation(f"I9: the end of {n} was deleted")
            return
        outcome = value.decode()
        if self.outcomes.setdefault(n, outcome) != outcome:
            raise Violation(f"I9: {n} ended as {self.outcomes[n]} and as {outcome}")
        if outcome not in (DONE, FAULT):
            raise Violation(f"I9: {n} ended as {outcome!r}")
        if n in self.ended_at:
            return
        self.ended_at[n] = self.job.scheduler.now()
        for position, member in enumerate(self.rosters.get(n, ()) if outcome == FAULT else ()):
            rank = self.job.ranks[member.slot]
            if rank.fate in ("dead", "left") and position < self.job.scenario.active:
                since = max(rank.died_at, self.decided_at[n])
                self._check_pace(f"I4: {n} ended by the death of {member}", since)

    def _check_pace(self, what: str, since: float) -> None:
        if all(rank.disturbed or rank.fate == "failed" for rank in self.job.ranks):
            return  # nobody was there to go on
        took = self.job.scheduler.now() - since
        if took > self.patience:
            raise Violation(f"{what} after {took:.1f} s, more than {self.patience:g} s")

    # What ranks say of themselves --------------------------------------------------------------------------

    def entered(self, rank: Rank, view: View, active_rank: int | None, size: int, active_size: int) -> None:
        """A rank enters the function, or its place as spare."""
        n, member = view.n, rank.member
        if n <= rank.last:
            raise Violation(f"I3: {member} enters {n} after {rank.last}")
        if member not in self.rosters.get(n, ()):
            raise Violation(f"I5: {member} enters {n}, which it is not in: {self.rosters.get(n)}")
        if set(view.members) != set(self.rosters[n]) or view.head != self.heads[n]:
            raise Violation(f"I2: {member} believes in {view}, decided is {self.heads[n]}: {self.rosters[n]}")
        mine = (view.call, view.first, size, active_size)
        if self.sizes.setdefault(n, mine) != mine:
            raise Violation(f"I2: {member} enters {n} with {mine}, others with {self.sizes[n]}")
        rank.last = n
        if active_rank is None:
            return
        rank.inside = n
        if self.holders.setdefault((n, active_rank), member) != member or active_rank >= active_size:
            raise Violation(f"I2: {member} and {self.holders[n, active_rank]} have rank {active_rank} in {n}")

    def completed(self, rank: Rank, view: View) -> None:
        """A rank was told that all is done."""
        if self.outcomes.get(view.n) != DONE:
            raise Violation(f"I9: {rank.member} returns from {view.n}, which is {self.outcomes.get(view.n)}")
        rank.done_in.append(view.n)

    # At the end --------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Everybody has come to an end: a good one, unless something was done to it."""
        done = {tuple(rank.done_in) for rank in self.job.ranks if rank.fate == "done"}
        if len(done) > 1:
            raise Violation(f"ranks completed different iterations: {done}")
        fates = {rank.fate for rank in self.job.ranks}
        if self.heads and "done" not in fates and not fates & {"dead", "left"}:
            raise Violation(f"I4: everybody lives and nobody went on: {fates}")
        disturbed = any(rank.disturbed for rank in self.job.ranks)
        for rank in self.job.ranks:
            if rank.fate == "running":
                raise Violation(f"I10: rank {rank.slot} came to no end")
            excused = rank.disturbed or (disturbed and rank.view is None and rank.fate == "failed")
            if rank.fate != "done" and not excused:
                raise Violation(f"rank {rank.slot} is {rank.fate}, though nothing was done to it")


_END = keys.end(0)[:-1]
_DECISION = keys.decision(0, "")[:-2]
_ROSTER = keys.roster(0, "")[:-2]
