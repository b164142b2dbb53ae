"""What a simulated job is to do, on what, and what happens to it: plain data, made by hand or from a seed."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from datetime import timedelta

from ft_wrapper import rank_assignment as ranks
from ft_wrapper.compose import Compose
from ft_wrapper.settings import AllLimits, OnJoin
from ft_wrapper.state import State
from ft_wrapper.store import StoreMixin
from ft_wrapper.testing.scheduler import Scheduler

from .history import Violation
from .stores import SimulatedStore, TransactionStore

#: What can happen to a process, as a story tells of it: to whom, before which step, of which other process.
#:
#: What a sentence leaves open:
#:
#: - ``crash``: its monitor reports it. ``host``, ``loop``: only silence tells.
#: - ``hang``: its monitor publishes a fault before it ends it. ``doom``: it lives on a little.
#: - ``pause``: its monitor goes on.
#: - ``quit``: after the call of the number ``step``, from 1. ``exception``: when the function is entered for
#:   the time of that number. ``deaf``, ``reporter``: before the monitor's own step of that number.
#: - ``respawn``: though the old process may live.
SENTENCES: dict[str, str] = {
    "crash": "{who} is killed before `{what}`",
    "host": "{who} is lost with its monitor, before `{what}`",
    "node": "the node of {who} is lost before `{what}`; another one's agent tells {seconds:g} s later",
    "hang": "{who} hangs before `{what}`, and its monitor ends it",
    "quit": "{who} ends in order, and makes no other call",
    "flap": "{who} dies before `{what}`, and so do the next {seconds:g} s after it, as soon as they are in",
    "leave": "{who} is told to leave, before `{what}`",
    "doom": "{who} is given up by its monitor, before `{what}`",
    "pause": "{who} is stopped for {seconds:g} s before `{what}`",
    "freeze": "{who} and its monitor are stopped for {seconds:g} s before `{what}`",
    "deaf": "the monitor of {who} is stopped for {seconds:g} s before `{what}`",
    "mute": "from second {step} on the heartbeats of {who} are lost for {seconds:g} s",
    "outage": "no one reaches the store for {seconds:g} s; {who} is before `{what}`",
    "loop": "{who} is lost with its monitor before `{what}`, and every {seconds:g} s another process of its "
    "slot begins and is lost, too",
    "error": "{who} cannot reach the store for `{what}`",
    "repeat": "the reply to `{what}` of {who} is lost: it is carried out twice",
    "exception": "the function raises on {who}",
    "reporter": "the monitor of {who} dies before `{what}`",
    "respawn": "another process is started for the slot of {who}: {other}",
}

#: How often a slot is taken again in a ``loop``.
LOOPS = 40
#: Virtual seconds after which a ``hang`` is ended.
HARD_TIMEOUT = 25.0
_LASTING = ("pause", "freeze", "deaf", "mute", "outage", "respawn", "loop", "node", "flap")


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """Something that happens to a process.

    Args:
        kind: what: one of `SENTENCES`.
        slot: to whose process.
        step: just before which of the process's steps, from 1; ``respawn``: at the latest when it has ended.
        seconds: for how long, or how much later.
        life: to which process of the slot, from 0: each respawn starts the next one.
        since_end: steps are counted from when the process left an iteration for the time of this number, in
            the middle of a restart; from when its function raises when -1; from its start when 0.
    """

    kind: str
    slot: int
    step: int
    seconds: float = 0.0
    life: int = 0
    since_end: int = 0

    def __post_init__(self) -> None:
        if self.kind not in SENTENCES:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(SENTENCES)}")

    def lasts(self) -> float:
        """Virtual seconds until it is over."""
        if self.kind in ("flap", "node"):
            return 0.0
        return {"hang": 2 * HARD_TIMEOUT, "loop": self.seconds * LOOPS}.get(self.kind, self.seconds)

    def __str__(self) -> str:
        whose = process_name(self.slot, self.life)
        lasting = f" ({self.seconds:g} s)" if self.seconds and self.kind in _LASTING else ""
        since = f" since end {self.since_end}" if self.since_end else ""
        since = " since it raised" if self.since_end < 0 else since
        return f"{self.kind} of {whose} at {self.step}{since}{lasting}"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What a simulated job is to do, and what happens to it.

    Args:
        members: number of slots that the job begins with.
        active: number of ranks that are to be active at the most.
        steps: in so many parts an active rank spends its time in the function.
        step_seconds: virtual seconds of each part.
        calls: number of wrapped calls, one after the other.
        between: virtual seconds between two calls, for the process that takes the longest.
        extra: number of slots beyond those that the job begins with, whose processes come at the start, too.
        extra_is_early: whether these ask to join before the first decision.
        slow: virtual seconds that each step of the slowest processes takes.
        stagger: virtual seconds between the starts of two processes.
        node_size: slots in a row that are on one node.
        replaced: whether agents start other processes in place of those that end by a fault.
        replaced_after: virtual seconds after which they do so.
        transactions: whether the store carries out several operations as one, as etcd does.
        min_world_size: fewer members than this do not go on.
        on_join: as for the wrapper: ``next``, ``degraded`` or ``now``.
        exchange: how ranks talk to each other while they are assigned: ``""`` (not at all), ``plain``,
            ``filter`` or ``tree``.
        endpoint: whether rank 0 publishes an address that the others wait for.
        use_libuv: which of TCPStore's two servers to imitate.
        disturbances: what happens.
        heartbeat_interval: seconds between heartbeats.
        heartbeat_timeout: seconds of silence after which a member counts as silent.
        barrier_timeout: seconds to wait for members that live but do not come.
        join_window: seconds for which joins are gathered.
        rejoin_wait: seconds to wait for announced replacements.
        completion_timeout: seconds to wait for others to finish.
    """

    members: int = 3
    active: int = 2
    steps: int = 3
    step_seconds: float = 0.1
    calls: int = 1
    between: float = 0.0
    extra: int = 0
    extra_is_early: bool = False
    slow: float = 0.0
    stagger: float = 0.0
    node_size: int = 1
    replaced: bool = False
    replaced_after: float = 0.5
    transactions: bool = False
    min_world_size: int = 1
    on_join: str = "degraded"
    exchange: str = ""
    endpoint: bool = False
    use_libuv: bool = True
    disturbances: tuple[Disturbance, ...] = ()
    heartbeat_interval: float = 2.0
    heartbeat_timeout: float = 10.0
    barrier_timeout: float = 40.0
    join_window: float = 1.0
    rejoin_wait: float = 2.0
    completion_timeout: float = 10_000.0

    def __str__(self) -> str:
        """What differs from an undisturbed job of three."""
        usual, mine = vars(Scenario(self.members, self.active, disturbances=self.disturbances)), vars(self)
        parts = [f"{name}={value}" for name, value in mine.items() if value != usual[name]]
        told = [f"{self.members} members", f"{self.active} active", *parts, *map(str, self.disturbances)]
        return ", ".join(told)

    @property
    def limits(self) -> AllLimits:
        """The settings of each rank."""
        mine = vars(self)
        same = {field.name: mine[field.name] for field in dataclasses.fields(AllLimits) if field.name in mine}
        return AllLimits(
            **{**same, "on_join": OnJoin(self.on_join)},
            hard_timeout=self.heartbeat_timeout,  # for a log line alone: a fault ends a simulated hang
            rejoin=True,
            max_same_faults=None,
        )

    def of(self, *kinds: str) -> Iterator[Disturbance]:
        """The disturbances of some kinds."""
        return (disturbance for disturbance in self.disturbances if disturbance.kind in kinds)

    def gap(self, slot: int, call: int) -> float:
        """Virtual seconds between a call and the next one, in the process of a slot."""
        return self.between * (1.0, 0.0, 0.5, 0.02)[(slot + call) % 4]

    def delay(self, slot: int) -> float:
        """Virtual seconds that each step of a slot's process takes."""
        return self.slow * (0.0, 1.0, 0.2)[slot % 3]

    def node_of(self, slot: int) -> range:
        """The slots that are on the same node."""
        first = slot - slot % self.node_size
        return range(first, first + self.node_size)

    @classmethod
    def random(cls, seed: int, max_members: int = 8, max_faults: int = 3) -> "Scenario":
        """A job with some faults, chosen from a seed.

        Args:
            seed: what it is chosen from.
            max_members: the most slots.
            max_faults: the most faults. That a process is started again, after a fault or without one, counts
                as a fault of its own.
        """
        choose = random.Random(seed)
        members = 2 + int((max_members - 1) * choose.random() ** 2)  # small jobs are quick
        count = choose.randint(min(1, max_faults), max_faults)
        replaced = choose.random() < 0.25
        steps, seconds = choose.choice(_FUNCTIONS)
        return cls(
            members=members,
            active=choose.randint(1, members),
            steps=steps,
            step_seconds=seconds,
            calls=choose.choice((1, 1, 2)),
            between=choose.choice((0.0, 0.0, 5.0, 5.0, 20.0, 20.0, 20.0, 60.0, 60.0, 600.0)),
            extra=choose.choice((0,) * 9 + (1,)),
            extra_is_early=choose.random() < 0.5,
            slow=choose.choice((0.0,) * 9 + (0.2,)),
            stagger=choose.choice((0.0,) * 8 + (0.3, 3.0)),
            node_size=choose.choice((1, 1, 2, 4)),
            replaced=replaced,
            replaced_after=choose.choice((0.2, 1.0, 6.0)),
            transactions=choose.random() < 0.3,
            min_world_size=choose.randint(1, members) if choose.random() < 0.1 else 1,
            on_join=choose.choice(("degraded", "degraded", "now", "next")),
            exchange=choose.choice(("",) * 6 + ("plain", "filter", "tree")),
            endpoint=choose.random() < 0.2,
            use_libuv=choose.random() < 0.5,
            disturbances=tuple(_random_disturbances(choose, members, count)),
            completion_timeout=choose.choice((10_000.0,) * 5 + (20.0,)),
            heartbeat_interval=choose.choice((2.0, 2.0, 1.25)),
        )


_LETTERS = "bcdefghijklmnopqrstuvwxyz"
_RANDOM_KINDS = (
    *["crash", "respawn"] * 4,
    *["host", "freeze", "exception"] * 3,
    *["pause", "repeat"] * 2,
    *["deaf", "reporter", "leave", "doom", "error", "outage", "node", "hang", "quit", "flap"],
)
_FUNCTIONS = ((0, 0.1), (1, 0.1), (2, 0.5), (4, 0.5), (3, 3.0), (4, 3.0), (2, 10.0), (4, 10.0))
_SECONDS = (0.0, 0.3, 3.0, 7.0, 15.0, 60.0)
_OUTAGES = (0.3, 3.0, 15.0)
_TELLS_AFTER = (0.2, 3.0, 15.0)
_LASTS = {
    **dict.fromkeys(["pause", "freeze"], _SECONDS[1:]),
    **dict.fromkeys(["node", "flap"], _TELLS_AFTER),
    "outage": _OUTAGES,
}
# While the job forms, around the function, and anywhere from there.
_STEPS = ((1, 24), (16, 40), (16, 40), (20, 80))
_CLOSE = 12  # steps between faults that meet
_IN_A_RESTART = 16  # steps after an iteration's end
_AT_STEPS = ("crash", "host", "pause", "freeze", "leave", "doom", "error", "outage", "node", "hang", "repeat")


def process_name(slot: int, life: int) -> str:
    """What a process is called: ``rank 1``, then ``rank 1b`` for the next one of the slot, and so on."""
    if not life:
        return f"rank {slot}"
    return f"rank {slot}{_LETTERS[life - 1] if life <= len(_LETTERS) else f'~{life}'}"


def _random_disturbances(choose: random.Random, members: int, count: int) -> Iterator[Disturbance]:
    lives = [0] * members
    favourite = choose.randrange(members)  # faults that meet each other are the interesting ones
    step = choose.randint(*choose.choice(_STEPS))
    for kind in choose.choices(_RANDOM_KINDS, k=count):
        slot = favourite if choose.random() < 0.4 else choose.randrange(members)
        if choose.random() < 0.5:
            step = choose.randint(*choose.choice(_STEPS))
        else:
            step = max(1, step + choose.randint(-_CLOSE, _CLOSE))
        life = choose.randint(0, lives[slot])
        if kind in _AT_STEPS and choose.random() < 0.4:
            seconds = choose.choice(_OUTAGES if kind in ("outage", "node") else _SECONDS[1:])
            after = choose.randint(1, _IN_A_RESTART)
            yield Disturbance(kind, slot, after, seconds, life, choose.randint(1, 2))
        elif kind == "respawn":
            yield Disturbance(kind, slot, step, choose.choice(_SECONDS), lives[slot])
            lives[slot] += 1
        elif kind == "quit":
            yield Disturbance(kind, slot, choose.randint(1, 3), 0.0, life)
        elif kind == "exception":
            for entry in range(1, choose.randint(1, 4) + 1):
                yield Disturbance(kind, slot, entry, 0.0, life)
            if choose.random() < 0.4:
                met = choose.choice(("pause", "host", "crash", "freeze"))
                seconds = choose.choice((15.0, 60.0))
                yield Disturbance(met, slot, choose.randint(1, 4), seconds, life, -1)
        elif kind == "reporter":  # the process dies too, or there would be no reporter
            yield Disturbance("crash", slot, step, 0.0, life)
            yield Disturbance(kind, slot, choose.randint(1, 12), 0.0, life)
        elif kind == "deaf":
            yield Disturbance(kind, slot, choose.randint(1, 20), choose.choice(_SECONDS[1:]), life)
        else:
            seconds = choose.choice(_LASTS[kind]) if kind in _LASTS else 0.0
            yield Disturbance(kind, slot, step, seconds, life)


# What it runs on, unless something else is tested -----------------------------------------------------------

Connect = Callable[[str], StoreMixin]
#: Makes the shared contents for one run, and returns what connects a client, by its name, to them.
StoreFactory = Callable[[Scheduler, Scenario], Connect]

_EXCHANGE_TIMEOUT = timedelta(seconds=20)


def simulated_stores(scheduler: Scheduler, scenario: Scenario) -> Connect:
    """The usual stores of a simulation: one that reads as a TCPStore does, or one with transactions."""
    kind = TransactionStore if scenario.transactions else SimulatedStore
    return kind(scheduler, use_libuv=scenario.use_libuv).clone


def simulated_assignment(scenario: Scenario) -> ranks.RankAssignment:
    """The first ranks are active, and all move up, with or without an exchange between them."""

    def node_of(state: State) -> str:
        return str((state.initial_rank or 0) // scenario.node_size)

    reserve = ranks.LayerFlag.RESERVE
    if scenario.exchange == "tree":
        all_ranks = ranks.Layer(1, scenario.active, flag=reserve)
        return ranks.Tree([all_ranks, ranks.Layer(1, key_or_fn=node_of, flag=reserve)])
    parts: list[ranks.RankAssignment] = [ranks.MaxActiveWorldSize(scenario.active), ranks.ShiftRanks()]
    if scenario.exchange == "plain":
        parts.append(Exchange())
    if scenario.exchange == "filter":
        parts.append(ranks.FilterCountGroupedByKey(node_of, lambda count: count >= 1, _EXCHANGE_TIMEOUT))
    made: ranks.RankAssignment = Compose(*parts)
    return made


class Exchange(ranks.RankAssignment):
    """Changes nothing, but lets all ranks wait for each other."""

    def __call__(self, ctx: ranks.RankAssignmentCtx) -> ranks.RankAssignmentCtx:
        """Exchanges ranks; see `RankAssignment`."""
        mine = str(ctx.state.rank)
        count = ctx.state.world_size - len(ctx.terminated_ranks)
        assert ctx.state.rank is not None
        got = ctx.store.compute_once("exchange", ctx.state.rank, mine, count, dict, _EXCHANGE_TIMEOUT)
        if got != mine:
            raise Violation(f"compute_once gave rank {mine} the result of another: {got}")
        return ctx
