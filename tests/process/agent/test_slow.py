"""Slow ranks under real nodes: which rank is named, why, and what is done about it."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from agent_job import FtRun, await_that, write_script
from test_drain import endpoint_of, ftrun
from test_nodes import Cluster

#: A rank of this slot sleeps 30 ms more in each step, until there is the file ``quick``.
SLOW = 2
JOB = """
    import os, sys, time, torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from ft_wrapper import CallWrapper, Limits, LiveState, Wrapper

    folder, slot, active = sys.argv[1], int(os.environ["RANK"]), int(os.environ.get("ACTIVE", "3"))

    sharded, kept = "SHARDED" in os.environ, {}

    def exists(name):
        return os.path.exists(f"{folder}/{name}")

    def say(what):
        os.write(1, f"slot {slot} {what}\\n".encode())

    def on_slow(slow):
        say(f"on_slow {slow.cause} rank {slow.rank} slot {slow.slot} {slow.share > 0.1}")
        raise ValueError("not heard")

    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        if sharded:
            fully_shard(model, mesh=kept["mesh"])
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    on = {"call": on_slow, "replace": "replace"}.get(os.environ.get("ON_SLOW"))
    limits = Limits(on_slow=on, warm_up=False)

    @Wrapper(rejoin=True, active_world_size=active, heartbeat_timeout=60, limits=limits)
    def train(call_wrapper: CallWrapper = None):
        dist.init_process_group("gloo")
        if sharded:
            kept["mesh"] = init_device_mesh("cpu", (3,))
        live = LiveState(call_wrapper, build, **kept)
        say(f"begins at {live.step} lost {live.plan.lost}")
        for step in live.steps(10**9):
            time.sleep(0.02)
            if slot == SLOT and not exists("quick"):
                time.sleep(0.03)
            is_over = torch.tensor([float(exists("finish"))])
            live["model"](torch.ones(1, 4)).sum().backward()
            dist.all_reduce(is_over)
            live.commit()
            if is_over.item():
                return

    train()
""".replace("SLOT", str(SLOW))


def start(folder: Path, *options: str, nproc: int = 3, **environment: str) -> FtRun:
    arguments = ["--nproc-per-node", str(nproc), *options, write_script(folder, JOB)]
    return FtRun(folder, *arguments, str(folder), environment=environment)


def test_a_rank_that_sleeps_is_named_with_its_line_until_it_is_quick(tmp_path: Path) -> None:
    with start(tmp_path) as job:
        await_that(lambda: bool(job.events("slow")), job)
        address = endpoint_of(job)
        await_that(lambda: "\nslow: " in ftrun("status", address).stdout, job)
        known = r"\nsteps take [\d.]+ ms; a rank that is busy for [\d.]+ s hangs\n"
        await_that(lambda: bool(re.search(known, ftrun("status", address).stdout)), job)
        (tmp_path / "quick").touch()
        await_that(lambda: len(job.events("slow")) == 2, job)
        (tmp_path / "finish").touch()
        assert job.end() == 0, job.said
    begins, ends = job.events("slow")
    assert begins["rank"] == begins["slot"] == SLOW and begins["cause"] == "asleep"
    assert begins["share"] > 0.1 and ends["cost"] > 0 and "cause" not in ends
    named = (
        rf"rank {SLOW}, .*\) is slow: it costs .* of each step of .*: asleep: I/O, or a device, most often"
    )
    assert len(re.findall(rf"{named} at script.py:\d+ in train", job.said)) == 1, job.said
    assert len(re.findall(rf"rank {SLOW}, .*\) is no longer slow, after .* s", job.said)) == 1, job.said
    assert job.said.count("is slow") == 1


def test_a_pause_of_all_ranks_ends_neither_the_job_nor_the_watch(tmp_path: Path) -> None:
    with start(tmp_path) as job:
        await_that(lambda: bool(job.events("slow")), job)
        family = job.family()  # the template, too
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in family:
                process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(2.0)  # longer than one of them may be stopped
        (tmp_path / "quick").touch()
        await_that(lambda: len(job.events("slow")) == 2, job)
        (tmp_path / "finish").touch()
        assert job.end() == 0, job.said
    assert not job.events("restarted")


def test_the_slow_rank_calls_the_users_function(tmp_path: Path) -> None:
    with start(tmp_path, ON_SLOW="call") as job:
        await_that(lambda: "on_slow failed on rank" in job.said, job)
        (tmp_path / "finish").touch()
        assert job.end() == 0, job.said
    called = re.findall(r"slot (\d) on_slow (\w+) rank (\d) slot (\d) (\w+)", job.said)
    assert called == [(str(SLOW), "asleep", str(SLOW), str(SLOW), "True")]


def test_a_spare_takes_over_from_a_slow_rank_and_no_step_is_lost(tmp_path: Path) -> None:
    with start(tmp_path, nproc=4, ON_SLOW="replace") as job:
        await_that(lambda: job.said.count(" lost 0") == 3 + 3, job)
        (tmp_path / "finish").touch()
        assert job.end() == 0, job.said
    assert re.search(rf"rank {SLOW}, .*\) is slow for long: it leaves, and a spare takes over", job.said)
    (restarted,) = job.events("restarted")
    assert restarted["kind"] == "drained" and restarted["promoted"] == [3]


def test_a_slow_rank_stays_if_there_is_no_spare(tmp_path: Path) -> None:
    with start(tmp_path, ON_SLOW="replace") as job:
        await_that(lambda: "stays: there is no spare" in job.said, job)
        (tmp_path / "finish").touch()
        assert job.end() == 0, job.said
    assert not job.events("restarted")


@pytest.mark.nightly("it takes half a minute, and how nodes agree on what is usual has a unit test")
def test_a_node_whose_only_rank_is_slow_is_named(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    with Cluster(tmp_path / "job", JOB, nnodes="3") as cluster:
        nodes = [cluster.start(str(number)) for number in range(3)]
        await_that(lambda: any(node.events("slow") for node in nodes), *nodes)
        (cluster.shared / "quick").touch()
        await_that(lambda: sum(len(node.events("slow")) for node in nodes) == 2, *nodes)
        (cluster.shared / "finish").touch()
        assert [node.end() for node in nodes] == [0, 0, 0], nodes[0].said
    begins, ends = next(filter(None, (node.events("slow") for node in nodes)))
    assert begins["slot"] == SLOW and begins["cause"] == "asleep" and "cause" not in ends


def test_a_slow_rank_stays_if_no_other_rank_has_its_shard(tmp_path: Path) -> None:
    with start(tmp_path, nproc=4, ON_SLOW="replace", SHARDED="1") as job:
        await_that(lambda: "or no other rank has its shard" in job.said, job)
        (tmp_path / "finish").touch()
        assert job.end() == 0, job.said
    assert not job.events("restarted")
