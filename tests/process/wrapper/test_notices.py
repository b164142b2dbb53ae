"""Notices as ranks see them: all at the same step, with a live state and without; they leave behind it.

No agent takes part. A rank gets its notice by SIGUSR1, or a thread in it writes what the test says into the
rank's memory, as an agent would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # as the first optimizer does, which takes its time
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank, Template, running
from torch import nn

from ft_wrapper import CallWrapper, LiveState, Wrapper
from ft_wrapper.protocol.notice import Notice
from ft_wrapper.restart import notices

DRAWS = int(os.environ.get("FT_WRAPPER_NOTICE_DRAWS", "8"))
LAST = 10**9
"""The last step of a training that goes on until it is told to end."""


def build() -> dict[str, Any]:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.zero_()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}


def weight_after(steps: int) -> float:
    """Each step adds its number plus one: a step that is lost or done twice shows."""
    return -steps * (steps + 1) / 2


class Checkpoint:
    """A checkpoint of all ranks in a folder; it counts once rank 0 has written last."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, "checkpoint")

    def save(self, objects: dict[str, Any], step: int) -> None:
        dist.barrier()  # as a collective checkpoint needs all ranks
        if dist.get_rank() == 0:
            self.path.with_suffix(".new").write_text(json.dumps([step, objects["model"].weight.item()]))
            self.path.with_suffix(".new").rename(self.path)

    def load(self, objects: dict[str, Any]) -> int:
        step, weight = json.loads(self.path.read_text()) if self.path.exists() else (0, 0.0)
        objects["model"].weight.data.fill_(weight)
        return int(step)


class Training:
    """One rank's training: says what it sees and saves.

    Args:
        rank: the test's line.
        folder: of the checkpoint.
        length: of a step, in seconds.
        last: how many steps there are.
        orders: what happens to this slot, once: ``die`` or ``raise`` in a save, before all have saved;
            ``wait`` behind it, for ever; ``late``: raise behind it, when the test says so.
    """

    def __init__(self, rank: Rank, folder: str, length: float, last: int, orders: list[str]) -> None:
        self.rank, self.length, self.last, self.orders = rank, length, last, orders
        self.checkpoint = Checkpoint(folder)
        self.fails_in, self.may_fail = 0, threading.Event()  # the first one in steps
        self.seen: Any = None

    def sees(self, call_wrapper: CallWrapper, step: int) -> None:
        """Where a step begins, or behind its commit."""
        notice = call_wrapper.notice
        now = notice and [notice.id, notice.ends]
        if now and now != self.seen:
            self.rank.say("seen", notice=now, step=step, iteration=call_wrapper.iteration)
        self.seen = now

    def save(self, call_wrapper: CallWrapper, objects: dict[str, Any], step: int) -> None:
        order = self.orders.pop(0) if self.orders else ""
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if order == "raise":
            raise OSError("a save that fails")
        self.checkpoint.save(objects, step)
        if order == "wait":
            self.rank.hang()
        if order == "late":
            assert self.may_fail.wait(60), "the test did not say `late`"
            raise OSError("a part that cannot be written")
        notice = call_wrapper.notice
        assert notice is not None
        self.rank.say("saved", notice=notice.id, step=step, iteration=call_wrapper.iteration)

    def computes(self, objects: dict[str, Any], step: int) -> None:
        """The same gradient on each rank, so the mean is the same for any number of ranks."""
        self.fails_in -= 1
        if self.fails_in == 0:
            raise ValueError("a fault")
        objects["optimizer"].zero_grad()
        weight = objects["model"].weight
        (weight * (step + 1)).sum().backward()
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
        time.sleep(self.length)

    def with_live_state(self, call_wrapper: CallWrapper) -> float:
        def save(objects: dict[str, Any], step: int) -> None:
            self.sees(call_wrapper, step)
            self.save(call_wrapper, objects, step)

        live = LiveState(call_wrapper, build, restore=self.checkpoint.load, on_notice=save)
        objects = {name: live[name] for name in ("model", "optimizer")}
        for step in live.steps(self.last):
            self.computes(objects, step)
            live.commit()
            self.sees(call_wrapper, live.step)
        return float(objects["model"].weight.item())

    def without(self, call_wrapper: CallWrapper) -> float:
        objects, saved = build(), ""
        for step in range(self.checkpoint.load(objects), self.last):
            call_wrapper.ping(step)
            self.sees(call_wrapper, step)
            self.computes(objects, step)
            objects["optimizer"].step()
            if (notice := call_wrapper.notice) is not None and notice.id != saved:
                self.save(call_wrapper, objects, step + 1)
                saved = notice.id
        return float(objects["model"].weight.item())


def trains(
    rank: Rank,
    folder: str,
    is_live: bool,
    active: int,
    length: float = 0.0,
    last: int = LAST,
    orders: dict[str, list[str]] | None = None,
) -> float:
    training = Training(rank, folder, length, last, (orders or {}).get(str(rank.slot), []))

    @Wrapper(**SETTINGS, active_world_size=active)
    def train(call_wrapper: CallWrapper) -> float:
        dist.init_process_group("gloo")
        training.seen = None
        rank.say("in", iteration=call_wrapper.iteration)
        return training.with_live_state(call_wrapper) if is_live else training.without(call_wrapper)

    memories: list[Any] = []
    enter = notices.Notices.enter

    def note(self: Any) -> None:
        memories[:] = [self.memory]
        enter(self)

    notices.Notices.enter = note  # type: ignore[method-assign]

    def listen() -> None:
        """Does what an agent does."""
        with contextlib.suppress(EOFError, OSError):
            while (said := rank.hear()) != "end":
                if said == "fail":
                    training.fails_in = 3
                elif said == "late":
                    training.may_fail.set()
                else:
                    memories[0].give(Notice(**json.loads(said)))

    threading.Thread(target=listen, daemon=True).start()
    return train()


def give(job: Job, notice: Notice, *slots: int) -> None:
    job.tell(json.dumps(vars(notice)), *slots)


ANNOUNCED = Notice("node 3", "SIGTERM", 60.0, "a")
ENDS = dataclasses.replace(ANNOUNCED, ends=True)


def of(job: Job, event: str, *slots: int) -> list[list[Any]]:
    """What each rank (all, if none are named) said of that kind: iteration, step, notice."""
    return [
        [(one["iteration"], one["step"], one["notice"]) for one in job.ranks[slot].said(event)]
        for slot in slots or job.ranks
    ]


def await_leaving(job: Job, *killed: int) -> None:
    """All ranks leave the job, with exit code 0."""
    job.wait_for_end(leftovers=False)
    for slot, process in job.ranks.items():
        if slot in killed:
            assert process.code == -signal.SIGKILL
        else:
            assert process.error == "RankDrained" and process.code == 0, (slot, process.messages[-1])


with_and_without = pytest.mark.parametrize("is_live", [False, True], ids=["steps", "live"])


@with_and_without
def test_all_see_it_at_the_same_step_and_leave_behind_it(job: Job, tmp_path: Path, is_live: bool) -> None:
    job.start(3, trains, str(tmp_path), is_live, 3)
    job.expect("in")
    give(job, ANNOUNCED)
    job.expect("saved")
    give(job, ENDS)
    await_leaving(job)
    seen = of(job, "seen")
    assert seen == [seen[0]] * 3 and [notice for _, _, notice in seen[0]] == [["a", False], ["a", True]]
    saved = of(job, "saved")
    assert saved == [saved[0]] * 3 and len(saved[0]) == 1, "once, though the notice has changed since"
    assert job[0].text == "all ranks leave: node 3: SIGTERM; the job ends"
    assert "notice: node 3: SIGTERM, 60 s left" in job[0].log


@with_and_without
def test_after_a_fault_it_is_seen_again(job: Job, tmp_path: Path, is_live: bool) -> None:
    """With a live state it is not saved again; a function without one does not know that it had."""
    job.start(3, trains, str(tmp_path), is_live, 2)
    job.expect("in", 0, 1)
    give(job, ANNOUNCED)
    job.expect("saved", 0, 1)
    job.tell("fail", 1)
    job.expect("in", 0, 1, iteration=1)
    job.expect("seen", 0, 1, iteration=1)
    give(job, ENDS)
    await_leaving(job)
    seen = of(job, "seen", 0, 1)
    assert seen[0] == seen[1] and [iteration for iteration, _, _ in seen[0]][:2] == [0, 1]
    saved = of(job, "saved", 0, 1)
    assert saved[0] == saved[1] and [iteration for iteration, _, _ in saved[0]] == (
        [0] if is_live else [0, 1]
    )
    assert not job[2].said("in"), "the spare has left, too"


@with_and_without
@pytest.mark.parametrize("order", ["raise", "late", "die"])
def test_a_save_that_a_fault_interrupts_is_repeated(
    job: Job, tmp_path: Path, is_live: bool, order: str
) -> None:
    job.start(3, trains, str(tmp_path), is_live, 2, orders={"1": [order]})
    job.expect("in", 0, 1)
    give(job, ENDS)
    if order == "late":  # another rank is through
        job.expect("saved", 0)
        job.tell("late", 1)
    await_leaving(job, *[1] * (order == "die"))
    left = (0, 2) if order == "die" else (0, 1)
    saved = of(job, "saved", *left)
    assert saved[0][-1] == saved[1][0] and saved[1][0][0] == 1
    assert [len(saves) for saves in saved] == [1 + (order == "late"), 1]


def test_a_rank_that_does_not_come_is_left_behind(job: Job, tmp_path: Path) -> None:
    """Its notice gives no more time; then the rank, which is interrupted, leaves, too."""
    job.start(2, trains, str(tmp_path), True, 2, orders={"1": ["wait"]})
    job.expect("in")
    give(job, dataclasses.replace(ENDS, seconds=0.5))
    await_leaving(job)
    assert "does not wait longer for other ranks to save" in job[0].log
    assert "missing ranks [1] of 2" in job[0].log
    assert {iteration for said in of(job, "seen") for iteration, _, _ in said} == {0}


def test_sigusr1_without_an_agent(job: Job, tmp_path: Path) -> None:
    """As a scheduler sends it to all: one notice, though each rank has made its own."""
    job.start(3, trains, str(tmp_path), False, 3)
    job.expect("in")
    for slot in range(3):
        job.send_signal(slot, signal.SIGUSR1)
    job.expect("saved")
    give(job, ENDS)
    await_leaving(job)
    seen = of(job, "seen")
    assert seen == [seen[0]] * 3 and [notice for _, _, notice in seen[0]] == [["1", False], ["a", True]]


def test_with_a_live_state_one_signal_is_enough(job: Job, tmp_path: Path) -> None:
    job.start(3, trains, str(tmp_path), True, 3)
    job.expect("in")
    job.send_signal(1, signal.SIGUSR1)
    job.expect("saved")
    job.tell("fail", 1)  # those that did not get the signal remember the notice
    job.expect("seen", iteration=1)
    give(job, ENDS, 2)
    await_leaving(job)
    seen = of(job, "seen")
    assert seen == [seen[0]] * 3
    assert [notice for _, _, notice in seen[0]] == [["1", False], ["1", False], ["a", True]]


# ---- draws


@pytest.mark.parametrize("seed", range(DRAWS))
def test_drawn_notices(template: Template, tmp_path: Path, seed: int) -> None:
    """A job that ends by a notice, and a job that goes on from its checkpoint."""
    draw = random.Random(seed)
    active, is_live, length = draw.randint(2, 4), draw.random() < 0.6, draw.choice([0.0, 0.005, 0.02])
    spares, victim, order = (
        draw.randint(0, 1),
        draw.randrange(active),
        draw.choice(["", "die", "raise", "kill"]),
    )
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    with running(template, first) as job:
        orders = {str(victim): [order.replace("kill", "")]}
        job.start(active + spares, trains, str(tmp_path), is_live, active, length, orders=orders)
        job.expect("in", *range(active))
        time.sleep(draw.random() * 0.3)  # any moment: nothing waits for it
        for notice in draw.choice([(ENDS,), (ANNOUNCED, ENDS)]):
            for slot in draw.sample(range(active + spares), active + spares):
                give(job, notice, slot)
                time.sleep(draw.random() * 0.05)
        if order == "kill":
            time.sleep(draw.random() * 0.1)
            with contextlib.suppress(ProcessLookupError):
                job.send_signal(victim, signal.SIGKILL)
        job.wait_for_end(leftovers=False)
        killed = [slot for slot in job.ranks if job[slot].code == -signal.SIGKILL]
        assert (
            killed == [victim]
            if order == "die"
            else set(killed) <= {victim}
            if order == "kill"
            else not killed
        )
        await_leaving(job, *killed)
        left = [slot for slot in job.ranks if slot not in killed]
        seen, saved = of(job, "seen", *left), of(job, "saved", *left)
    last = max(saves[-1][0] for saves in saved if saves)
    for said in (seen, saved):
        in_last = [[one for one in each if one[0] == last] for each in said]
        taking_part = [each for each in in_last if each]
        assert taking_part == [taking_part[0]] * len(taking_part), "at the same step"
        is_late = order == "kill" and bool(killed) and last == 0  # killed when all had met
        expected = active - is_late if is_late else active + min(spares, len(killed)) - len(killed)
        assert len(taking_part) == expected
    assert last <= bool(order), "a restart without a fault: a rank did not come to a collective save"
    assert order == "kill" or all(len(saves) <= 1 for saves in saved), "once"
    assert all(len({iteration for iteration, _, _ in saves}) == len(saves) for saves in saved)
    step = next(saves[-1][1] for saves in saved if saves)
    with running(template, second) as job:
        job.start(active, trains, str(tmp_path), is_live, active, last=step + 5)
        job.wait_for_end(leftovers=False)
        assert [process.value for process in job.ranks.values()] == [weight_after(step + 5)] * active
