"""Notices: real nodes get SIGTERM or are asked for a checkpoint, and a second job continues from it."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path

import pytest
from agent_job import FtRun, await_that
from support.nightly import at_night
from test_drain import ftrun
from test_nodes import Cluster

from ft_wrapper.agent.rounds import INFRASTRUCTURE

NOTICED = Path(__file__).with_name("noticed.py").read_text()
STEPS = 200  # more than it takes from a signal to the end
GRACE = ("--notice-grace", "60")


def numbers(what: str, *jobs: FtRun) -> list[int]:
    """The numbers that ranks have printed after these words."""
    return [int(one) for job in jobs for one in re.findall(rf"^rank \d+ {what} (\d+)$", job.said, re.M)]


def weights(*jobs: FtRun) -> set[str]:
    return {one for job in jobs for one in re.findall(r"ends with (\w+)", job.said)}


def job(folder: Path, kind: str, nodes: int, nproc: int) -> Cluster:
    folder.mkdir(exist_ok=True)
    cluster = Cluster(folder, NOTICED, nnodes=f"1:{nodes}", nproc=nproc)
    cluster.arguments = [kind, str(STEPS)]
    cluster.host_store()
    return cluster


def start(cluster: Cluster, nodes: int, *options: str) -> list[FtRun]:
    """Starts the nodes at once; each waits until all are there."""
    whole = ("--nnodes", str(nodes)) if nodes > 1 else ()
    return [cluster.start(str(number), *whole, *GRACE, *options) for number in range(nodes)]


@pytest.mark.parametrize(
    ("kind", "nodes", "nproc", "seed"),
    [
        ("live", 1, 2, 1),
        ("plain", 2, 1, 2),
        *at_night(
            "of both kinds one always",
            [(kind, nodes, 2, 3 + nodes) for kind in ("live", "plain") for nodes in (1, 2, 3)],
        ),
    ],
)
def test_a_job_that_gets_sigterm_leaves_with_a_checkpoint_and_continues_from_it(
    tmp_path: Path, kind: str, nodes: int, nproc: int, seed: int
) -> None:
    draw = random.Random(seed)
    with job(tmp_path / "whole", kind, nodes, nproc) as cluster:
        whole = start(cluster, nodes)
        assert [node.end() for node in whole] == [0] * nodes, whole[0].said
    with job(tmp_path / "cut", kind, nodes, nproc) as cluster:
        cut = start(cluster, nodes, "--result-file", str(tmp_path / "result"))
        await_that(lambda: len(numbers("has done", *cut)) >= draw.randrange(1, 20) * nodes * nproc, *cut)
        for node in draw.sample(cut, nodes):
            node.process.send_signal(signal.SIGTERM)
        assert [node.end() for node in cut] == [INFRASTRUCTURE] * nodes, cut[0].said
        (saved,) = {*numbers("saves", *cut)}
        assert len(numbers("saves", *cut)) == nodes * nproc, "once on each rank"
        last = max(numbers("has done", *cut))
        assert last == saved - 1, "no step behind the checkpoint"
        result = json.loads((tmp_path / "result").read_text())
        assert result["verdict"] == "preempted" and "SIGTERM" in result["why"]
    with job(tmp_path / "rest", kind, nodes, nproc) as rest:
        for path in (tmp_path / "cut" / "shared").glob("*.pt"):
            path.rename(rest.shared / path.name)
        again = start(rest, nodes)
        assert [node.end() for node in again] == [0] * nodes, again[0].said
        assert {*numbers("begins at", *again)} == {saved}
        assert weights(*again) == weights(*whole) and len(weights(*whole)) == 1


@pytest.mark.parametrize("kind", ["live", "plain"])
def test_sigterm_at_one_of_three_nodes_costs_no_step(tmp_path: Path, kind: str) -> None:
    with job(tmp_path / "job", kind, 3, 1) as cluster:
        nodes = start(cluster, 3, "--nnodes", "1:3")
        await_that(
            lambda: {*numbers("begins at", *nodes)} == {0} and len(numbers("has done", *nodes)) > 9, *nodes
        )
        # The node of rank 0 hosts the ranks' store: it ends the job.
        host, other, leaves = sorted(nodes, key=lambda node: "rank 0 begins at" not in node.said)
        leaves.process.send_signal(signal.SIGTERM)
        assert [node.end() for node in nodes] == [0, 0, 0], leaves.said
    assert re.search(r"notice from node \d: SIGTERM", host.said)
    assert len(weights(host, other)) == 1
    done = numbers("has done", host)
    assert done == sorted({*done}), "none is done again"


@pytest.mark.parametrize(
    "way", ["ftrun notice", "SIGUSR1 at all", *at_night("two ways always", ["SIGUSR1", "SIGUSR1 at a rank"])]
)
@pytest.mark.parametrize("kind", ["live", *at_night("live state always", ["plain"])])
def test_a_checkpoint_that_is_asked_for_ends_nothing(tmp_path: Path, kind: str, way: str) -> None:
    with job(tmp_path / "job", kind, 2, 2) as cluster:
        nodes = start(cluster, 2)
        await_that(lambda: bool(numbers("has done", *nodes)), *nodes)
        if way == "ftrun notice":
            asked = ftrun("notice", cluster.address, "--within", "30", "--why", "row remapping pending")
            assert asked.returncode == 0, asked.stderr
        else:
            signalled = nodes if "all" in way else nodes[1:]
            for node in signalled:
                (node.family()[-1] if "rank" in way else node.process).send_signal(signal.SIGUSR1)
        assert [node.end() for node in nodes] == [0, 0], nodes[0].said
        saved = numbers("saves", *nodes)
        assert len(saved) == 4 and len({*saved}) == 1, "all at the same step, once"
    assert "; iteration" not in nodes[0].said
    assert sum(node.said.count("] notice: ") for node in nodes) == 1
