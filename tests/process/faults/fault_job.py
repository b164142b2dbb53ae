"""A small training job that faults happen to, and what must be true of it afterwards.

Each step mixes the sum of some numbers, divided among the active ranks, into a state: so the state after the
last step is the same however many ranks took part, and another one if a step was lost or done twice. Active
rank 0 keeps the state in a file; every entry of the function goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import Job, Process, Rank

from ft_wrapper import CallWrapper, Limits, Wrapper
from ft_wrapper.testing.inject_fault import InjectFinalize, InjectInitialize, Injector, parse_faults

WORLD = 4
ACTIVE = 3
SPARE = 3
STEPS = 6
ITEMS = 12
PRIME = 2**31 - 1

SETTINGS: dict[str, Any] = {
    "active_world_size": ACTIVE,
    # Long enough that a busy machine, which halts a healthy rank for a second, costs none.
    "soft_timeout": 2.0,
    "hard_timeout": 5.0,
    "heartbeat_timeout": 8.0,
    "barrier_timeout": 20.0,
    "completion_timeout": 20.0,
    "heartbeat_interval": 0.2,
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "termination_grace_time": 0.3,
    "limits": Limits(max_same_faults=None),
}


def number(step: int, item: int) -> int:
    """What one item of a step is worth."""
    return pow(3 + item, 1000 + step, PRIME)


def mixed(state: int, total: int) -> int:
    """The state after a step."""
    return (state * 1_000_003 + total) % PRIME


def final_state() -> int:
    """The state after the last step, without processes, ranks or faults."""
    state = 0
    for step in range(STEPS):
        state = mixed(state, sum(number(step, item) for item in range(ITEMS)))
    return state


# ---- in the ranks


class Trainer:
    """One rank's part of the job.

    Args:
        rank: its line to the test.
        faults: what is to happen, as in ``FT_WRAPPER_FAULTS``.
        folder: shared by all ranks.
    """

    def __init__(self, rank: Rank, faults: str, folder: str) -> None:
        self.rank = rank
        self.file = Path(folder, "state.json")
        self.injector = Injector(parse_faults(faults), fired_dir=Path(folder, "fired"))
        self.monitor = 0  # process id, once the function has been entered

    def settings(self, **changed: Any) -> dict[str, Any]:
        """The wrapper's."""
        return {
            **SETTINGS,
            **self.rank.store_settings,
            "initialize": InjectInitialize(self.injector),
            "finalize": InjectFinalize(self.injector),
            **changed,
        }

    def train(self, call: CallWrapper) -> int:
        """What is wrapped."""
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        place = {"rank": rank, "slot": self.rank.slot, "iteration": call.iteration}
        self.rank.say("in", n=call.iteration, rank=rank, world=world)
        first, state = self.load(rank)
        for step in range(first, STEPS):
            call.ping()
            self.before(call, step)
            self.injector.check("step", step=step, **place)
            total = torch.tensor(sum(number(step, item) for item in range(rank, ITEMS, world)))
            dist.all_reduce(total)
            state = mixed(state, int(total))
            with call.atomic():
                self.injector.check("atomic", step=step, **place)
                if rank == 0:
                    self.save(step + 1, state, call.iteration)
        return state

    def before(self, call: CallWrapper, step: int) -> None:
        """A place for more, before each step."""

    def load(self, rank: int) -> tuple[int, int]:
        """The next step and the state, as rank 0 finds them."""
        found = [0, 0]
        if rank == 0:
            with contextlib.suppress(FileNotFoundError):
                found = json.loads(self.file.read_text())
        tensor = torch.tensor(found)
        dist.broadcast(tensor, 0)
        step, state = tensor.tolist()
        return step, state

    def save(self, step: int, state: int, iteration: int) -> None:
        """Writes both as a whole or not at all."""
        unfinished = self.file.with_suffix(f".{iteration}")
        unfinished.write_text(json.dumps([step, state]))
        os.replace(unfinished, self.file)


def trains(rank: Rank, faults: str, folder: str) -> int | None:
    """The body: trains to the end, through the faults."""
    trainer = Trainer(rank, faults, folder)

    @Wrapper(**trainer.settings())
    def train(call: CallWrapper) -> int:
        return trainer.train(call)

    return train()


# ---- in the test


def start(
    job: Job, folder: Path, body: Any, *args: Any, world: int = WORLD, env: dict[str, str] | None = None
) -> None:
    """Starts all ranks of a job; what happens in it is written down for `check`."""
    variables = {
        "FT_WRAPPER_EVENTS": str(folder / "events"),
        # torch looks up the name of ::ffff:127.0.0.1 for every store client, which no hosts file has. A lost
        # packet on the way to a name server would cost 5 s, more than these tests' hard_timeout.
        "RES_OPTIONS": "use-vc timeout:1 attempts:1",
        **(env or {}),
    }
    job.start(world, body, *args, env=variables)


def events(folder: Path) -> list[dict[str, Any]]:
    """What happened, in order."""
    return [json.loads(line) for line in (folder / "events").read_text().splitlines()]


def decided(folder: Path) -> dict[int, list[int]]:
    """The iterations after the first that each slot was told to go on to."""
    told: dict[int, list[int]] = defaultdict(list)
    for event in events(folder):
        if event["event"] == "decided":
            told[event["slot"]].append(event["iteration"])
    return told


def check(job: Job, folder: Path, *, gone: Set[int] | int, faults: int = 0) -> int:
    """The job has ended: those finished that should, with the right state, together all the way.

    Args:
        job: whose processes have ended.
        folder: the job's.
        gone: slots that must have ended by a fault, or how many; all others must have finished.
        faults: as many injected faults must have happened.

    Returns:
        The number of restarts.
    """
    fired = sorted(path.name for path in (folder / "fired").iterdir()) if faults else []
    assert len(fired) == faults, f"only {fired} happened"
    finished = {slot: process for slot, process in job.ranks.items() if process.said("returned")}
    ended = set(job.ranks) - set(finished)
    assert gone in (ended, len(ended)), {slot: how(job[slot]) for slot in job.ranks}
    told = decided(folder)
    restarts = max(told[slot][-1] if told[slot] else 0 for slot in finished)
    for slot in finished:
        assert told[slot] == list(range(1, restarts + 1)), told
    active = sorted(finished)[:ACTIVE]
    results = {slot: process.value for slot, process in finished.items()}
    assert results == {slot: final_state() if slot in active else None for slot in finished}
    last = [finished[slot].said("in")[-1] for slot in active]
    assert [(m["n"], m["rank"], m["world"]) for m in last] == [
        (restarts, rank, len(active)) for rank in range(len(active))
    ]
    return restarts


def how(process: Process) -> str:
    """How a process ended, for messages."""
    last = [message for message in process.messages if message["event"] in ("returned", "raised")]
    return f"{last[0] if last else 'said nothing'}, exit code {process.code}"
