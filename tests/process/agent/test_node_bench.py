"""The benchmark of nodes, by several ftruns on this machine: which node it keeps out, which it names."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agent_job import FtRun, await_that
from test_network import Hosts, Network, made
from test_nodes import WRAPPED, Cluster

from ft_wrapper.agent.node_bench import NodeBench
from ft_wrapper.agent.options import parse_args

PLAIN = """
    import os
    print("done", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"])
"""
BREAKS = """
    import os, signal, sys, time
    if "bench_process" in " ".join(sys.orig_argv):
        import torch

        def crash(*_, **__): os.kill(os.getpid(), signal.SIGSEGV)
        def hang(*_, **__): time.sleep(1000)
        def fail(*_, **__): raise RuntimeError("the adder has a crack\\nadvice")

        {what} = {how}
"""


def broken(folder: Path, what: str, how: str) -> dict[str, str]:
    """The environment of a node whose benchmark goes wrong.

    Args:
        folder: for files.
        what: the function of torch that goes wrong.
        how: ``crash``, ``hang`` or ``fail``.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(BREAKS).format(what=what, how=how))
    return {"PYTHONPATH": str(folder)}


def verdicts(node: FtRun) -> list[dict[str, str]]:
    """The verdict on each node, in each table that a node has logged."""
    tables = re.findall(r"benchmark of the nodes:\nnode .*\n((?:\d+  .*\n)+)", node.said)
    return [{line.split()[0]: re.split("  +", line)[-1] for line in table.splitlines()} for table in tables]


def done(*nodes: FtRun) -> list[str]:
    """What the ranks said at their end, after the end of all nodes."""
    for node in nodes:
        assert node.end() == 0, "\n---\n".join(each.said for each in nodes)
    return sorted(line for node in nodes for line in node.said.splitlines() if line.startswith("done "))


# On one host ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "how", "why"),
    [
        ("torch.mm", "fail", "fails: RuntimeError: the adder has a crack (exit status 1)"),
        (
            "torch.distributed.all_gather",
            "crash",
            "fails: all-gather with group rank 0 (killed by SIGSEGV)",
        ),
    ],
)
def test_a_node_that_fails_is_kept_out(tmp_path: Path, what: str, how: str, why: str) -> None:
    with Cluster(tmp_path, PLAIN, nnodes="3") as cluster:
        options = ("--node-bench", "--node-bench-slower-than", "100")
        bad = broken(tmp_path / "broken", what, how)
        nodes = [cluster.start("0", *options), cluster.start("1", *options, environment=bad)]
        nodes.append(cluster.start("2", *options))
        await_that(lambda: "has group rank 0 of 3 in round 0" in nodes[0].said, *nodes)
        nodes.append(cluster.start("3", *options))  # it takes the place, and is measured with the other nodes
        # That nodes meet again is no restart.
        assert done(*nodes) == ["done 0 3 0", "done 1 3 0", "done 2 3 0"]
    first, second = verdicts(nodes[0])
    assert first.pop("1") == why
    assert set(first) == {"0", "2"}
    assert second == {"0": "good", "2": "good", "3": "good"}
    assert f"is kept out of the job until it passes its check: --node-bench: {why}" in nodes[1].said
    assert "node 1 (localhost) was kept out to its end" in nodes[1].said
    assert "done " not in nodes[1].said


def test_a_late_node_is_measured_alone_before_it_takes_a_seat(tmp_path: Path) -> None:
    with Cluster(tmp_path, WRAPPED, nnodes="1:3") as cluster:
        options = ("--node-bench", "--node-check-retries", "0")
        first = cluster.start("0", *options)
        cluster.await_inside(1, first)
        bad = cluster.start("1", *options, environment=broken(tmp_path / "broken", "torch.mm", "fail"))
        assert bad.end() == 76, bad.said
        assert "node 1 (localhost) has failed its check: --node-bench: RuntimeError: the adder" in bad.said
        good = cluster.start("2", *options)
        cluster.await_inside(2, first, good)
        cluster.finish(first, good)
    assert verdicts(first) == [{"0": "not compared: fewer than 3 nodes"}]
    assert "node 1" not in first.said and "benchmark" not in good.said


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = ("--nnodes", "2", "--rdzv-endpoint", "head:29400")

    def asked(*options: str) -> NodeBench | None:
        return parse_args([*meet, *options, "--no-python", "true"]).node_bench

    assert asked() is asked("--node-bench-keep-out-slow") is None
    assert asked("--node-bench") == NodeBench()
    more = ("--node-bench-slower-than", "2", "--node-bench-keep-out-slow", "--node-check-retries", "3")
    assert asked("--node-bench", *more) == NodeBench(slower_than=2.0, keeps_out_slow=True, retries=3)
    monkeypatch.setenv("PET_NODE_BENCH", "1")
    assert asked() == NodeBench()
    alone = parse_args(["--no-python", "true"])
    assert alone.warnings == ("--node-bench: no effect on one node, which can be compared with no other",)


# Four hosts, of which one is slow or fails ------------------------------------------------------------------

# Four nodes share the cores of this host, often two: there the figures of equal nodes differ by more.
FACTOR = "3"
QUOTA = 5_000  # microseconds of each 100 ms
RATE = "100mbit"
SLOW = {"processor": "slow: product", "link": "slow: all-gathers"}
FAILING = [
    *("crash in torch.mm", "hang in torch.mm", "fail in torch.mm"),
    *("crash in torch.distributed.all_gather", "hang in torch.distributed.all_gather"),
]


@contextlib.contextmanager
def limited(processes: list[psutil.Process]) -> Iterator[None]:
    """Gives processes a twentieth of one core; skips the test where this machine cannot."""
    is_v1 = os.path.exists("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    group = Path("/sys/fs/cgroup", "cpu" if is_v1 else "", f"ft{os.getpid()}")
    try:
        group.mkdir()
        name, value = ("cpu.cfs_quota_us", QUOTA) if is_v1 else ("cpu.max", f"{QUOTA} 100000")
        (group / name).write_text(str(value))
    except OSError as error:
        pytest.skip(f"this machine makes no cgroup: {error}")
    for process in processes:
        (group / "cgroup.procs").write_text(str(process.pid))
    try:
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def measuring(node: FtRun) -> list[psutil.Process]:
    """The process of a node's benchmark."""
    found = []
    for process in node.family():
        with contextlib.suppress(psutil.Error):
            found += [process] if "bench_process" in " ".join(process.cmdline()) else []
    return found


def is_ready(node: FtRun) -> bool:
    """Whether the process of a node's benchmark waits for its order."""
    with contextlib.suppress(OSError):
        calls = [Path(f"/proc/{process.pid}/syscall").read_text().split() for process in measuring(node)]
        return any(call[:2] == ["0", "0x0"] for call in calls)  # it reads its standard input
    return False


def draw(folder: Path, seed: int, kind: str = "", *, options: tuple[str, ...] = ()) -> None:
    """Runs four nodes, of which one, drawn with its kind, is bad; sees that it is found, and no other."""
    random.seed(seed)
    kind = kind or random.choice([*SLOW, random.choice(FAILING)])
    bad, keeps_out = random.randrange(4), random.random() < 0.5
    print(f"seed {seed}: node {bad}, {kind}{', slow ones are kept out' if keeps_out else ''}")
    how, _, what = kind.partition(" in ")
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    options += ("--node-bench", "--node-bench-slower-than", FACTOR)
    options += ("--node-bench-keep-out-slow",) if keeps_out else ()
    with (
        made(Network(4)) as network,
        Hosts(folder, PLAIN, nnodes="4") as cluster,
        contextlib.ExitStack() as ends,
    ):
        cluster.network = network
        cluster._options += options
        last = random.choice([host for host in range(1, 4) if host != bad])
        nodes: dict[int, FtRun] = {}
        for host in [host for host in range(4) if host != last] + [last]:
            if host == last:  # all have imported torch, at the expense of no product
                well = [node for other, node in nodes.items() if other != bad or what != "torch.mm"]
                for node in well:
                    await_that(functools.partial(is_ready, node), *nodes.values())
                if kind == "processor":
                    ends.enter_context(limited(measuring(nodes[bad])))
                elif kind == "link":
                    shape = ("tbf", "rate", RATE, "burst", "64kb", "latency", "100ms")
                    network.shape(bad, *shape)
            broken_here = broken(folder / "broken", what, how) if what and host == bad else {}
            nodes[host] = cluster.start_on(host, {**environment, **broken_here})
        if kind in FAILING or keeps_out:
            await_that(lambda: "is kept out of the job until" in nodes[bad].said, *nodes.values())
        else:
            assert len(done(*nodes.values())) == 4
            assert f"node {bad} (host{bad}) is slow: " in nodes[0].said
        print(nodes[0].said)
        found = verdicts(nodes[0])[0]
        assert {host for host, verdict in found.items() if verdict != "good"} == {str(bad)}
        assert found[str(bad)].startswith(SLOW.get(kind, "fails: "))


@pytest.mark.nightly("a node that fails is kept out on one host always")
@pytest.mark.parametrize("seed", range(20))
def test_the_bad_node_of_four_is_found(tmp_path: Path, seed: int) -> None:
    draw(tmp_path, seed)
