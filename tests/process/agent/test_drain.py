"""``ftrun drain``, ``restart`` and ``stop``, and notices: ranks leave in order, and the others go on."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from agent_job import FTRUN, TIMEOUT, FtRun, await_that
from support.warm_ftrun import run_python, start_python
from test_nodes import Cluster

from ft_wrapper.cli import control
from ft_wrapper.cli import main as cli
from ft_wrapper.cli.main import main
from ft_wrapper.exception import StoreError
from ft_wrapper.store import TCPStoreServer

LIVE = """
    import os, sys, time, torch
    import torch.distributed as dist
    from ft_wrapper import CallWrapper, Limits, LiveState, Wrapper, events

    folder, slot = sys.argv[1], os.environ["RANK"]  # which the wrapper changes

    @Wrapper(rejoin=True, active_world_size=2, heartbeat_timeout=60, limits=Limits(warm_up=False))
    def train(call_wrapper: CallWrapper = None):
        dist.init_process_group("gloo")

        def build():
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1)
            return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

        live = LiveState(call_wrapper, build)
        if dist.get_rank() in live.plan.rolls:
            events.emit("committed", slot=int(slot), step=live.step)
        for step in live.steps(10**9):
            time.sleep(0.05)  # a step's work, which leaves the CPUs to others
            live["optimizer"].zero_grad()
            loss = live["model"](torch.full((1, 4), 1.0 + dist.get_rank())).sum()
            loss.backward()
            is_over = torch.tensor([float(os.path.exists(f"{folder}/finish"))])
            dist.all_reduce(is_over)
            for parameter in live["model"].parameters():
                dist.all_reduce(parameter.grad)
            live.commit()
            events.emit("committed", slot=int(slot), step=live.step)
            open(f"{folder}/step.{call_wrapper.iteration}.{slot}", "w").close()
            if is_over.item():
                return

    train()
"""

# One long step, which a file ends by an error on slot 0.
ONE_STEP = """
    import os, sys, time
    from ft_wrapper import CallWrapper, Wrapper

    folder, slot = sys.argv[1], os.environ["RANK"]

    @Wrapper(rejoin=True, heartbeat_timeout=60)
    def train(call_wrapper: CallWrapper = None):
        n = call_wrapper.iteration
        call_wrapper.step(0)
        open(f"{folder}/step.{n}.{slot}", "w").close()
        while not os.path.exists(f"{folder}/finish"):
            if slot == "0" and n == 0 and os.path.exists(f"{folder}/raise"):
                raise ValueError("told to")
            time.sleep(0.02)

    train()
"""


# There is no place at which to leave.
WITHOUT_STEPS = ONE_STEP.replace("        call_wrapper.step(0)\n", "")


def ftrun(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-m", FTRUN, *words], TIMEOUT)


def came_to(folder: Path, iteration: int, *slots: int) -> bool:
    return all((folder / f"step.{iteration}.{slot}").exists() for slot in slots)


def committed(*jobs: FtRun) -> dict[int, list[int]]:
    """By slot, the steps that its processes have committed, in this order; those rolled forward too."""
    found: dict[int, list[int]] = {}
    records = [record for job in jobs for record in job.events("committed")]
    for record in sorted(records, key=lambda one: one["monotonic"]):
        found.setdefault(record["slot"], []).append(record["step"])
    return found


def lost_or_repeated(*jobs: FtRun) -> tuple[list[int], list[int]]:
    """Steps that no rank has committed, and those that a rank has committed twice."""
    by_slot = committed(*jobs)
    done = {step for steps in by_slot.values() for step in steps}
    repeated = [step for steps in by_slot.values() for step in steps if steps.count(step) > 1]
    return sorted(set(range(1, max(done) + 1)) - done), repeated


def endpoint_of(job: FtRun) -> str:
    """What ftrun says at the start."""
    await_that(lambda: "ftrun status" in job.said, job)
    return re.findall(r"ftrun status (\S+)", job.said)[0]


def test_a_slot_leaves_between_two_steps_and_a_spare_steps_in(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, LIVE, nnodes="1", nproc=3)
    with FtRun(tmp_path / "job", "--nproc-per-node", "3", str(cluster.script), str(cluster.shared)) as job:
        await_that(lambda: came_to(cluster.shared, 0, 0, 1), job)
        done = ftrun("drain", "0", endpoint_of(job), "--why", "its fan is loud")
        assert (done.returncode, done.stdout) == (0, "slot 0 left the job; ranks that go on: 2\n"), (
            done.stderr
        )
        await_that(lambda: came_to(cluster.shared, 1, 1, 2), job)
        (cluster.shared / "finish").touch()
        assert job.end() == 0, job.said
        assert [len(job.pids(slot)) for slot in range(3)] == [1, 1, 1], "it is not started again"
        (ended,) = (record for record in job.events("rank_ended") if record["rank"] == 0)
        assert ended["exitcode"] == 0
        assert lost_or_repeated(job) == ([], [])
        assert "its fan is loud: rank 0 to leave the job within 30 s" in job.said
        assert (
            "restart 1: rank 0 (slot 0 on " in job.said
            and ") was drained; spare slot 2 took over" in job.said
        )


def test_a_node_leaves_at_sigterm_a_spare_node_takes_its_seat_and_all_stop(tmp_path: Path) -> None:
    with Cluster(tmp_path, LIVE, nnodes="2") as cluster:
        cluster.host_store()
        results = {name: tmp_path / f"result{name}" for name in "012"}
        nodes = (
            # Numbers: so they have these group ranks.
            cluster.start(name, "--drain-timeout", "60", "--result-file", str(path))
            for name, path in results.items()
        )
        a, b = next(nodes), next(nodes)
        await_that(lambda: came_to(cluster.shared, 0, 0, 1), a, b)
        c = next(nodes)
        await_that(lambda: "is a spare" in c.said, a, b, c)
        b.process.send_signal(signal.SIGTERM)
        assert b.end() == 0, b.said
        assert "SIGTERM: rank 1 to leave the job within 60 s" in b.said
        await_that(lambda: came_to(cluster.shared, 1, 0) and "has group rank 1" in c.said, a, c)
        await_that(lambda: any(record["slot"] == 1 for record in c.events("committed")), a, c)
        assert ftrun("stop", cluster.address, "--why", "lunch").returncode == 0
        assert [a.end(), c.end()] == [0, 0]
        again = ftrun("stop", cluster.address)
        assert again.returncode == 1 and again.stderr.endswith("ftrun stop: refused: the job is over\n")
        assert lost_or_repeated(a, b, c) == ([], [])
        assert len(b.pids(1)) == 1 and "it was drained" not in a.said
    for name in "02":
        found = json.loads(results[name].read_text())
        assert (found["verdict"], found["exit_code"], "lunch" in found["why"]) == ("stopped", 0, True)


def test_a_node_leaves_and_the_others_begin_another_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, LIVE, nnodes="1:2") as cluster:
        cluster.host_store()
        cluster.script.write_text(cluster.script.read_text().replace("active_world_size=2, ", ""))
        # The first node that comes hosts the ranks' store: drained, it would stay for the other.
        a = cluster.start("0", "--restart-policy", "group")
        await_that(lambda: came_to(cluster.shared, 0, 0), a)
        b = cluster.start("1", "--restart-policy", "group")
        await_that(lambda: came_to(cluster.shared, 0, 0, 1), a, b)

        def await_gone(*_: object) -> None:
            assert b.end() == 0, b.said
            raise StoreError("the ranks' store has ended with its round")

        monkeypatch.setattr(control, "_await_gone", await_gone)
        done = control.drain(cluster.address, "node:1", 30.0, "")
        assert done == "slot 1 left the job; ranks that go on: 1"
        await_that(lambda: a.said.count("has group rank 0 of 1 in round") == 2, a)
        cluster.finish(a)


def test_sigterm_ends_a_job_of_which_too_few_would_be_left(tmp_path: Path) -> None:
    with Cluster(tmp_path, WITHOUT_STEPS, nnodes="2") as cluster:
        cluster.host_store()
        cluster.script.write_text(cluster.script.read_text().replace("(rejoin", "(min_world_size=2, rejoin"))
        nodes = [cluster.start(name, "--drain-timeout", "60") for name in "01"]
        await_that(lambda: came_to(cluster.shared, 0, 0, 1), *nodes)
        refused = ftrun("drain", "node:1", cluster.address)
        assert refused.returncode == 1 and "refused: 1 rank would be left" in refused.stderr
        nodes[1].process.send_signal(signal.SIGTERM)
        assert nodes[1].end() == 128 + signal.SIGTERM, nodes[1].said
        why = "SIGTERM: this node is not drained: 1 rank would be left, fewer than min_world_size=2"
        assert why in nodes[1].said


@pytest.mark.nightly("another node leaves in every run")
@pytest.mark.parametrize("by", ["ftrun drain", "SIGTERM"])
def test_a_node_that_hosts_the_store_stays_for_the_others(tmp_path: Path, by: str) -> None:
    with Cluster(tmp_path, LIVE, nnodes="3") as cluster:
        # The first one hosts the rendezvous store, too.
        nodes = [cluster.start(name, "--drain-timeout", "60") for name in "012"]
        await_that(lambda: came_to(cluster.shared, 0, 0, 1), *nodes)
        if by == "SIGTERM":
            nodes[0].process.send_signal(signal.SIGTERM)
        else:
            assert ftrun("drain", "node:0", cluster.address).returncode == 0
        await_that(lambda: came_to(cluster.shared, 1, 1, 2), *nodes)
        await_that(lambda: "the ranks of this node have ended; it hosts their store" in nodes[0].said, *nodes)
        cluster.finish(*nodes)
        assert lost_or_repeated(*nodes) == ([], [])


def test_a_fault_in_its_last_step_lets_a_rank_leave_at_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ONE_STEP, nnodes="1", nproc=2)
    with FtRun(tmp_path / "job", "--nproc-per-node", "2", str(cluster.script), str(cluster.shared)) as job:
        await_that(lambda: came_to(cluster.shared, 0, 0, 1), job)
        with start_python(["-m", FTRUN, "drain", "1", endpoint_of(job), "--within", "600"]) as draining:
            await_that(lambda: "to leave the job within 600 s" in job.said, job)
            (cluster.shared / "raise").touch()
            assert draining.communicate(timeout=TIMEOUT)[0] == "slot 1 left the job; ranks that go on: 1\n"
        await_that(lambda: came_to(cluster.shared, 1, 0), job)
        (cluster.shared / "finish").touch()
        assert job.end() == 0, job.said
        (ended,) = (record for record in job.events("rank_ended") if record["rank"] == 1)
        assert ended["exitcode"] == 0 and not came_to(cluster.shared, 1, 1)


def test_restart_and_stop(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, WITHOUT_STEPS, nnodes="1", nproc=2)
    with FtRun(tmp_path / "job", "--nproc-per-node", "2", str(cluster.script), str(cluster.shared)) as job:
        await_that(lambda: came_to(cluster.shared, 0, 0, 1), job)
        wrong = ftrun("drain", "7", endpoint_of(job))
        assert wrong.returncode == 2 and "error: there is no node or slot '7'" in wrong.stderr
        done = ftrun("restart", endpoint_of(job), "--why", "new switch")
        assert done.stdout == "iteration 0 was ended: all ranks enter the function again\n", done.stderr
        await_that(lambda: came_to(cluster.shared, 1, 0, 1), job)
        assert [len(job.pids(slot)) for slot in range(2)] == [1, 1]
        await_that(lambda: "restart 1: " in job.said, job)
        (event,) = job.events("restarted")
        assert (event["kind"], event["culprits"]) == ("requested", [])
        asked = f"all ranks were asked to restart: ftrun restart on {socket.gethostname()}: new switch"
        assert f"restart 1: {asked}; no spare" in job.said
        assert ftrun("stop", endpoint_of(job), "--why", "wrong data").returncode == 0
        assert job.end() == 0, job.said
        assert "the job was ended: ftrun stop on" in job.said and "wrong data" in job.said


@pytest.mark.parametrize("name", ["drain", "restart", "stop"])
def test_commands_that_cannot_be_carried_out(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["0"] if name == "drain" else []
    assert main([name, *target, "nowhere"]) == 2
    assert f"ftrun {name}: error: nowhere: give HOST:PORT, or etcd://" in capsys.readouterr().err
    with contextlib.closing(TCPStoreServer(0)) as server:  # ranks may agree here, but no agent listens
        assert main([name, *target, f"localhost:{server.port}"]) == 1
        said = capsys.readouterr().err
    no_node, no_rank = "no node of ftrun meets others at localhost:", "no wrapped function has been entered"
    assert (no_rank if name == "restart" else no_node) in said


def test_what_a_drain_is_asked_of_is_read_before_it_connects(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cli, "_check_listens", lambda _: None)
    monkeypatch.setattr(control, "drain", lambda target, **_: asked.append(target) or "done")
    good = ["0", "node-7", "node:0", "slot:3", "slot", "node", "a:b", "Knoten 7\n"]
    words = [[target, "--why", "options between the two", "localhost:1"] for target in good]
    assert [cli.main_change("drain", each) for each in words] == [0] * len(good)
    assert asked == good
    for target in ("", "slot:", "slot:x", "slot:-1", "slot:1.5", "node:"):
        with pytest.raises(SystemExit, match="2"):
            cli.main_change("drain", [target, "localhost:1"])
        assert f"{target!r}: name a node or a slot" in capsys.readouterr().err
    for within in ("-1", "inf", "nan", "soon", "1e300"):
        with pytest.raises(SystemExit, match="2"):
            cli.main_change("drain", ["0", "localhost:1", "--within", within])
        assert "--within" in capsys.readouterr().err
    assert asked == good
