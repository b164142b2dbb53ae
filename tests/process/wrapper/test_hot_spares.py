"""Hot spares: they wait at no cost, take over, and return None."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from rank_harness import SETTINGS, Job, Rank, cpu_seconds, with_limits
from rejoin_job import SaysItsState

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.torch_groups import warm_up as _warm_up

# ---- waiting


def is_spared(rank: Rank) -> Any:
    _warm_up._train = lambda: rank.say("warm")  # the last that it does before it only waits
    settings = {**SETTINGS, "active_world_size": 1, "initialize": SaysItsState(rank)}
    settings["collect_garbage"] = False  # it would, after that

    @Wrapper(**with_limits(**settings))
    def train() -> str:
        rank.say("in")
        assert rank.hear() == "work"
        until = time.process_time() + 1.0
        while time.process_time() < until:
            torch.ones(100).sum()
        rank.say("worked")
        assert rank.hear() == "finish"
        return "trained"

    return train()


def test_a_spare_waits_at_no_cost_and_returns_none(job: Job) -> None:
    job.start(2, is_spared)
    job.expect("in", 0)
    [state] = job.expect("state", 1, mode="INACTIVE")
    assert (state["rank"], state["world"], state["active_rank"], state["active_world"]) == (1, 2, None, 1)
    job.expect("warm", 1)
    spare = (job[1].pid, job.monitors()[1])
    before = [cpu_seconds(pid) for pid in spare]
    job.tell("work", 0)
    job.expect("worked", 0)
    used = [cpu_seconds(pid) - was for pid, was in zip(spare, before, strict=True)]
    # While the rank used a whole second, and several passed on a busy machine.
    assert max(used) <= 0.4, used
    job.tell("finish", 0)
    assert job.wait() == ["trained", None]
    assert not job[1].said("in")


# ---- taking over


def trains_until_the_second_restart(rank: Rank) -> Any:
    settings = {**SETTINGS, "active_world_size": 2, "initialize": SaysItsState(rank)}

    @Wrapper(**with_limits(**settings))
    def train(call_wrapper: CallWrapper) -> list[Any]:
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        rank.say("in", n=call_wrapper.iteration)
        while call_wrapper.iteration < 2:
            with rank.collective:
                dist.all_reduce(torch.ones(1))
            time.sleep(0.001)  # a test finds all ranks outside
        return [call_wrapper.iteration, int(os.environ["RANK"]), int(total.item())]

    return train()


def test_a_spare_takes_the_place_of_rank_0_and_another_one_that_of_the_next(job: Job) -> None:
    job.start(4, trains_until_the_second_restart)
    job.expect("in", 0, 1, n=0)
    job.kill(0)
    job.expect("in", 1, 2, n=1)
    job.kill(1)
    job.expect("in", 2, 3, n=2)
    assert job.wait(killed=(0, 1)) == [[2, 0, 2], [2, 1, 2]]
    modes = [
        [
            (m["mode"], m["rank"], m["world"], m["active_rank"], m["active_world"])
            for m in job[s].said("state")
        ]
        for s in (2, 3)
    ]
    assert modes == [
        [("INACTIVE", 2, 4, None, 2), ("ACTIVE", 1, 3, 1, 2), ("ACTIVE", 0, 2, 0, 2)],
        [("INACTIVE", 3, 4, None, 2), ("INACTIVE", 2, 3, None, 2), ("ACTIVE", 1, 2, 1, 2)],
    ]
    assert all(m["initial"] == [3, 4] for m in job[3].said("state"))
    [line] = [line for slot in range(4) for line in job[slot].log.splitlines() if "restart 2: " in line]
    assert f" restart 2: rank 0 (slot 1 on {os.uname().nodename} pid {job[1].pid}) died" in line
    assert "; spare slot 3 took over as rank 1; 2 active + 0 spare ranks, back in " in line
