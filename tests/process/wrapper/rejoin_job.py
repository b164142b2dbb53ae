"""A small job whose killed processes are started again, and what each of them saw of it."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import SETTINGS, TIMEOUT, Job, Process, Rank, with_limits

from ft_wrapper import CallWrapper, FrozenState, Wrapper
from ft_wrapper.initialize import Initialize
from ft_wrapper.protocol import Agreement, keys
from ft_wrapper.protocol.global_iteration import GlobalIteration
from ft_wrapper.protocol.records import Member, View
from ft_wrapper.store import EtcdStore, StoreMixin

MAY_BE_LATE = 4
"""So many keys of a past iteration may be written when that has been cleaned up; it has more than ten."""


class SaysItsState(Initialize):
    """Says what the rank is at the begin of each iteration."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __call__(self, state: FrozenState) -> FrozenState:
        self.rank.say(
            "state",
            mode=state.mode.name,
            n=state.iteration,
            rank=state.rank,
            world=state.world_size,
            active_rank=state.active_rank,
            active_world=state.active_world_size,
            initial=[state.initial_rank, state.initial_world_size],
        )
        return state


class Trainer:
    """One rank's part of the job.

    Args:
        rank: its line to the test.
        folder: shared by all ranks; a file in it ends the training.
        settings: of the wrapper, beside the usual ones, and ``waits``; see `trains`.
    """

    def __init__(self, rank: Rank, folder: str, settings: dict[str, Any]) -> None:
        self.rank = rank
        self.finish = Path(folder, "finish")
        self.waits = settings.pop("waits", None) == rank.slot
        self.settings: dict[str, Any] = {
            **SETTINGS,
            "rejoin": True,
            "join_window": 0.05,
            "initialize": SaysItsState(rank),
            **settings,
        }

    def train(self, call: CallWrapper) -> list[int]:
        """What is wrapped: steps that all active ranks do together."""
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        place = [call.iteration, dist.get_rank(), int(total)]
        self.rank.say("in", n=place[0], rank=place[1], world=place[2])
        if self.waits and call.iteration == 0:
            self.rank.hear()
        while True:
            finish = torch.tensor(float(self.finish.exists()))
            with self.rank.collective:
                dist.all_reduce(finish)
            if finish:
                return place
            time.sleep(0.005)


def hold(rank: Rank) -> None:
    """Lets a rank leave the first iteration only once the test has told it something.

    So no one goes on before. To stop its process would do so, too; but gloo may lose a write to a peer that
    was killed meanwhile, and hang.
    """
    arrive = GlobalIteration.arrive

    def arrives_when_told(iterations: GlobalIteration, view: View, *args: Any) -> None:
        if view.n == 0:
            rank.hear()
        arrive(iterations, view, *args)

    GlobalIteration.arrive = arrives_when_told  # type: ignore[method-assign]


def trains(rank: Rank, folder: str, settings: dict[str, Any]) -> list[int] | None:
    """The body: trains until the test says that it is enough; returns iteration, rank and world size.

    The slot ``held`` in the settings leaves the first iteration only once the test has told it something; the
    slot ``waits`` takes no step of it before.
    """
    if settings.get("held") == rank.slot:
        hold(rank)
    trainer = Trainer(rank, folder, {name: value for name, value in settings.items() if name != "held"})

    @Wrapper(**with_limits(**trainer.settings))
    def train(call_wrapper: CallWrapper) -> list[int]:
        return trainer.train(call_wrapper)

    return train()


class Training:
    """The test's handle on a job.

    Args:
        job: which runs its processes.
        folder: shared by all ranks.
    """

    store: StoreMixin
    """A client of the job's store, where that is announced to the ranks."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self.env: dict[str, str | None] = {"RES_OPTIONS": "use-vc timeout:1 attempts:1"}

    def start(self, world_size: int, body: Any = trains, *args: Any, **settings: Any) -> None:
        """Starts all ranks."""
        self.job.start(world_size, body, str(self.folder), settings, *args, env=self.env)

    def abort(self, *slots: int) -> None:
        """Ends ranks as ``abort()`` in C does, without cleaning up, and waits for their end."""
        self.job.kill(*slots, signum=signal.SIGABRT)

    def await_join(self, n: int, *slots: int) -> None:
        """Waits until new processes of the slots have asked to be let into the iteration after n."""
        self._await(
            lambda: {*slots} <= {member.slot for member in Agreement(self.store).iterations.joins_of(n)},
            f"joins of {slots}",
        )

    def await_gone(self, n: int, count: int) -> None:
        """Waits until so many members have left iteration n or are known to be dead: one more may decide."""
        key = keys.count_gone(n)

        def gone() -> int:
            return len(self.store._held(key)) if isinstance(self.store, EtcdStore) else self.store.add(key, 0)

        self._await(lambda: gone() >= count, f"the first {count} to leave {n}")

    def await_end_of(self, process: Process) -> None:
        """Waits until a process has ended whose slot may have been started again."""
        self.job._turn_until(lambda: process.code is not None, f"the end of process {process.pid}")

    def settled_keys(self, n: int) -> list[str]:
        """The keys that are left once iteration n is on and everything past was deleted; without numbers.

        But for those that processes write late, which were halted, or watched over one that was killed: the
        next one to clean up finds them, in an iteration to come.
        """
        present = {None, keys.BEFORE_FIRST, n - 1, n, n + 1}

        def is_past(key: str) -> bool:
            member = keys.member_of(key)
            if member is None:
                return keys.iteration_of(key) not in present
            return Member(*member) != Agreement(self.store).joining.newest_of(member[0])

        left: list[str] = []

        def are_few_past() -> bool:
            listed = self.store.list_keys()
            left[:] = [key for key in listed if not is_past(key)]
            return len(listed) - len(left) <= MAY_BE_LATE

        self._await(are_few_past, "the deletion of past keys")
        return sorted(re.sub(r"/[0-9a-f]{12}$|shared-[0-9a-f]{16}|\d+", "#", key) for key in left)

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        """Looks at the store again and again: nothing tells of what is awaited here."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(0.01)

    def finish(self) -> None:
        """Lets the function return everywhere, and waits until all processes have ended."""
        (self.folder / "finish").touch()
        self.job.wait_for_end()

    def saw(self, process: Process) -> list[int]:
        """The iterations that a process was in."""
        return [message["n"] for message in process.said("state")]

    def check(self, last: int, first: dict[int, int] | None = None, *, gaps: bool = False) -> None:
        """The living saw every iteration from their first to the last one, and each iteration was one.

        Args:
            last: number of the last iteration.
            first: numbers of the first iterations that the present processes were in; 0 by default.
            gaps: whether iterations may have ended before a process got into them.
        """
        first = first or {}
        for slot, process in self.job.ranks.items():
            seen = self.saw(process)
            assert (seen[0], seen[-1]) == (first.get(slot, 0), last), f"slot {slot}"
        for process in self.job._all():
            seen = self.saw(process)
            assert seen == sorted(set(seen)), f"slot {process.slot}"
            if seen and not gaps:
                assert seen == [*range(seen[0], seen[-1] + 1)], f"slot {process.slot}"
        check_iterations(self.job, gaps=gaps)


def check_iterations(job: Job, *, gaps: bool = False) -> None:
    """What all processes saw of an iteration fits together: world sizes, and each rank once."""
    iterations: dict[int, list[dict[str, Any]]] = {}
    for process in [*job.past, *job.ranks.values()]:
        for message in process.said("state"):
            iterations.setdefault(message["n"], []).append(message)
    assert gaps or sorted(iterations) == [*range(max(iterations) + 1)]
    for n, states in iterations.items():
        assert len({(state["world"], state["active_world"]) for state in states}) == 1, (n, states)
        for name in ("rank", "active_rank"):
            taken = [state[name] for state in states if state[name] is not None]
            assert len(taken) == len(set(taken)), (n, states)
            size = states[0]["world" if name == "rank" else "active_world"]
            assert all(0 <= rank < size for rank in taken), (n, states)


@contextlib.contextmanager
def training(job: Job, folder: Path, *, announced: bool = True) -> Iterator[Training]:
    """A training. Unless it hosts its own store, that is announced to it, and outlives all its ranks."""
    made = Training(job, folder)
    if not announced:
        yield made
        return
    with job.announced_store() as (made.store, made.env["FT_WRAPPER_STORE"]):
        yield made
