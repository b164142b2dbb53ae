"""What a simulated job is to do, and what happens to it: plain data, made by hand or from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

KINDS: dict[str, str] = {
    "crash": "the process dies; its monitor reports it",
    "host": "the process and its monitor are lost: only silence tells",
    "leave": "the process leaves in order, as on Ctrl-C",
    "doom": "the monitor gives the process up and reports it dead; it lives on a little",
    "pause": "the process stands still for so many seconds; its monitor does not",
    "freeze": "process and monitor stand still for so many seconds",
    "deaf": "the monitor stands still for so many seconds, from its own step of this number on",
    "mute": "the heartbeats are lost for so many seconds, from this second on",
    "outage": "nobody reaches the store for so many seconds",
    "loop": "process and monitor are lost, and the slot is taken again every so many seconds, for nothing",
    "error": "an operation of the process on the store fails for good",
    "repeat": "the reply to an operation is lost, and it is carried out again",
    "exception": "the function raises when it is entered for the time of this number",
    "reporter": "who reports the process's death dies just before its step of this number",
    "respawn": "another process is started for the slot, so many seconds later, though the old one may live",
}
"""What can happen to a process."""

_LASTING = ("pause", "freeze", "deaf", "mute", "outage", "respawn", "loop")


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """Something that happens to a process.

    Args:
        kind: what: one of `KINDS`.
        slot: to whose process.
        step: just before which of the process's steps, from 1; ``respawn``: at the latest when it has ended.
        seconds: for how long, or how much later.
        life: to which process of the slot, from 0: each respawn starts the next one.
    """

    kind: str
    slot: int
    step: int
    seconds: float = 0.0
    life: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")

    def __str__(self) -> str:
        whose = process_name(self.slot, self.life)
        lasting = f" ({self.seconds:g} s)" if self.seconds and self.kind in _LASTING else ""
        return f"{self.kind} of {whose} at {self.step}{lasting}"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What a simulated job is to do, and what happens to it.

    Args:
        members: number of slots that the job begins with.
        active: number of ranks that are to be active at the most.
        steps: in so many parts an active rank spends its time in the function.
        step_seconds: virtual seconds of each part.
        calls: number of wrapped calls, one after the other.
        between: virtual seconds between two calls.
        min_world_size: fewer members than this do not go on.
        on_join: as for the wrapper: ``next``, ``degraded`` or ``now``.
        exchange: whether ranks talk to each other while they are assigned.
        endpoint: whether rank 0 publishes an address that the others wait for.
        use_libuv: which of TCPStore's two servers to imitate.
        disturbances: what happens.
        heartbeat_interval: seconds between heartbeats.
        heartbeat_timeout: seconds of silence after which a member counts as silent.
        barrier_timeout: seconds to wait for members that live but do not come.
        join_window: seconds for which joins are gathered.
        rejoin_wait: seconds to wait for announced replacements.
    """

    members: int = 3
    active: int = 2
    steps: int = 3
    step_seconds: float = 0.1
    calls: int = 1
    between: float = 0.0
    min_world_size: int = 1
    on_join: str = "degraded"
    exchange: bool = False
    endpoint: bool = False
    use_libuv: bool = True
    disturbances: tuple[Disturbance, ...] = ()
    heartbeat_interval: float = 2.0
    heartbeat_timeout: float = 10.0
    barrier_timeout: float = 40.0
    join_window: float = 1.0
    rejoin_wait: float = 2.0

    def __str__(self) -> str:
        """What differs from an undisturbed job of three."""
        usual = Scenario()
        parts = [f"{self.members} members", f"{self.active} active"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("members", "active", "disturbances") and value != getattr(
                usual, field.name
            ):
                parts.append(f"{field.name}={value}")
        return ", ".join([*parts, *map(str, self.disturbances)])

    def of(self, *kinds: str) -> Iterator[Disturbance]:
        """The disturbances of some kinds."""
        return (disturbance for disturbance in self.disturbances if disturbance.kind in kinds)

    @classmethod
    def random(cls, seed: int, max_members: int = 8, max_faults: int = 3) -> Scenario:
        """A job with some faults, chosen from a seed.

        Args:
            seed: what it is chosen from.
            max_members: the most slots.
            max_faults: the most faults. That a process is started again, after a fault or without one, counts
                as a fault of its own.
        """
        choose = random.Random(seed)
        members = choose.randint(2, max_members)
        return cls(
            members=members,
            active=choose.randint(1, members),
            steps=choose.randint(0, 4),
            step_seconds=choose.choice((0.1, 0.5, 3.0, 10.0)),
            calls=choose.choice((1, 1, 2)),
            between=choose.choice((0.0, 0.0, 5.0, 20.0)),
            on_join=choose.choice(("degraded", "degraded", "now", "next")),
            exchange=choose.random() < 0.2,
            endpoint=choose.random() < 0.2,
            use_libuv=choose.random() < 0.5,
            disturbances=tuple(_random_disturbances(choose, members, choose.randint(0, max_faults))),
        )


_LETTERS = "bcdefghijklmnopqrstuvwxyz"
_RANDOM_KINDS = (
    *["crash", "respawn"] * 4,
    *["host", "pause", "freeze", "repeat"] * 2,
    *["deaf", "reporter", "exception", "leave", "doom", "error", "outage"],
)
_SECONDS = (0.0, 0.3, 3.0, 15.0, 60.0)
_OUTAGES = (0.3, 3.0, 15.0)
# While the job forms, around the function, and anywhere from there.
_STEPS = ((1, 24), (20, 40), (20, 80))


def process_name(slot: int, life: int) -> str:
    """What a process is called: ``rank 1``, then ``rank 1b`` for the next one of the slot, and so on."""
    if not life:
        return f"rank {slot}"
    return f"rank {slot}{_LETTERS[life - 1] if life <= len(_LETTERS) else f'~{life}'}"


def _random_disturbances(choose: random.Random, members: int, count: int) -> Iterator[Disturbance]:
    lives = [0] * members
    favourite = choose.randrange(members)  # faults that meet each other are the interesting ones
    for kind in choose.choices(_RANDOM_KINDS, k=count):
        slot = favourite if choose.random() < 0.5 else choose.randrange(members)
        step = choose.randint(*choose.choice(_STEPS))
        life = choose.randint(0, lives[slot])
        if kind == "respawn":
            yield Disturbance(kind, slot, step, choose.choice(_SECONDS), lives[slot])
            lives[slot] += 1
        elif kind == "exception":
            yield Disturbance(kind, slot, choose.randint(1, 3), 0.0, life)
        elif kind == "reporter":  # the process dies too, or there would be no reporter
            yield Disturbance("crash", slot, step, 0.0, life)
            yield Disturbance(kind, slot, choose.randint(1, 12), 0.0, life)
        elif kind == "deaf":
            yield Disturbance(kind, slot, choose.randint(1, 20), choose.choice(_SECONDS[1:]), life)
        elif kind in ("pause", "freeze"):
            yield Disturbance(kind, slot, step, choose.choice(_SECONDS[1:]), life)
        elif kind == "outage":
            yield Disturbance(kind, slot, step, choose.choice(_OUTAGES), life)
        else:
            yield Disturbance(kind, slot, step, 0.0, life)
