"""A job in pods to which something happens: exit codes, lost steps, the line that says why."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import action
from pods import FILE, TIMEOUT, Etcd, Network, Node, etcd, why_not
from train import ORPHANS, expected

from ft_wrapper.agent.rounds import INFRASTRUCTURE

pytestmark = pytest.mark.nightly("the manifests are checked always, and nodes on etcd by tests/process/agent")

DRAINED = 90  # --drained-exit-code of the manifest


@pytest.fixture(autouse=True)
def can_make_pods() -> None:
    """Skips where there can be none."""
    if why := why_not():
        pytest.skip(why)


@pytest.fixture
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Network]:
    """A network with the manifest's etcd in it; a test may say which families of addresses there are."""
    with Network(tmp_path, getattr(request, "param", (4, 6))) as network, etcd(network):
        yield network


def started(network: Network, size: int = 3, nnodes: str = "2:3") -> list[Node]:
    """The pods of a job, all of which train."""
    nodes = [Node(network, index, nnodes) for index in range(size)]
    for node in nodes:
        node.run()
    for node in nodes:
        node.await_world(size)
    return nodes


def replaced(network: Network, node: Node) -> Node:
    """The pod that Kubernetes makes in place of one: the same index, another address."""
    new = Node(network, node.index, node.nnodes)
    assert new.addresses != node.addresses
    new.run()
    return new


def finish(network: Network, *nodes: Node) -> None:
    """Lets the training finish: no step was left out, and none done twice by anybody who has the state."""
    (network.checkpoints / "finish").touch()
    assert [(node.end(), node.repeated()) for node in nodes] == [(0, 0)] * len(nodes), network.said()
    ended = [node.ended() for node in nodes]
    assert [(each["sum"]) for each in ended] == [expected(ended[0]["ended"])] * len(nodes)


def test_a_locked_down_pod_trains_to_the_end(network: Network) -> None:
    """As user 65534, and with nothing to write to but TMPDIR and the volume."""
    nodes = started(network)
    for node in nodes:
        status, body = network.get(f"http://{node.address}:9464/")
        assert status == 200 and json.loads(body)["alive"]
        assert "ft_wrapper_step" in network.get(f"http://{node.address}:9464/metrics")[1]
    finish(network, *nodes)
    for node in nodes:
        assert "Read-only file system" not in node.said and "Permission denied" not in node.said
    assert len([*network.checkpoints.glob("events/events-train-*.jsonl")]) == 3


def test_probes_are_answered_while_other_pods_are_awaited(network: Network) -> None:
    node = Node(network, 0)
    node.run()
    node.await_line("looking for the rendezvous store")
    assert network.get(f"http://{node.address}:9464/")[0] == 200
    assert not node.records()


@pytest.mark.parametrize("before", [[], ["sh", "-c", 'true & exec "$@"', "sh"]], ids=["ftrun", "shell"])
def test_pid_1_reaps_what_has_no_parent(network: Network, before: list[str]) -> None:
    """Also what it had started as a shell, as in trainjob.yaml."""
    node = Node(network, 0, "1:1")
    node.run(before=before)
    node.await_world(1)
    (network.checkpoints / "orphans").touch()
    node.await_line(f'"orphans": {ORPHANS}')
    deadline = time.monotonic() + TIMEOUT
    while node.zombies():
        assert time.monotonic() < deadline, f"zombies {node.zombies()} of PID 1 are left{network.said()}"
        time.sleep(0.02)
    finish(network, node)


def test_names_are_known_late(tmp_path: Path) -> None:
    """Those of all pods, etcd's included, once all of them wait for it."""
    with Network(tmp_path) as network, etcd(network):
        nodes = [Node(network, index, is_published=False) for index in range(3)]
        for node in nodes:
            node.run()
        for node in nodes:
            node.await_line(rf"--local-addr {node.full_name}: .* here it is ")
        for node in nodes:
            node.publish()
        for node in nodes:
            node.await_world(3)
        finish(network, *nodes)


def test_etcds_names_are_known_late(tmp_path: Path) -> None:
    with Network(tmp_path) as network:
        members = [Etcd(network, number, is_published=False) for number in range(3)]
        nodes = [Node(network, index) for index in range(3)]
        for node in nodes:
            node.run()
        for node in nodes:
            node.await_line("looking for the rendezvous store at")
        for member in members:
            member.publish()
            member.run()
        for node in nodes:
            node.await_world(3)
        finish(network, *nodes)


@pytest.mark.parametrize("network", [(6,)], indirect=True, ids=["IPv6"])
def test_there_is_ipv6_only(network: Network) -> None:
    nodes = started(network)
    assert network.get(f"http://{nodes[0].address}:9464/")[0] == 200
    finish(network, *nodes)


def test_each_pod_in_turn_loses_its_power(network: Network) -> None:
    """The one that comes instead has another address."""
    nodes = started(network)
    for index in range(3):
        others = [node for node in nodes if node.index != index]
        nodes[index].lose_power()
        for node in others:
            node.await_world(2)
        network.await_line(rf"no heartbeat from node {index} \(train-{index}.train\) for 4 s: removed")
        network.await_line(rf"restart .*: slot {index} .* went down with node {index} ")
        nodes[index] = replaced(network, nodes[index])
        for node in nodes:
            node.await_world(3)
    finish(network, *nodes)


def test_an_agent_is_killed_and_its_pod_stays(network: Network) -> None:
    """PID 1 starts it again, and it takes its old place."""
    nodes = started(network)
    nodes[1].kill_agent()
    nodes[1].await_line(r"was killed by SIGKILL after \d+ s; starting it again \(1 of 2 within 10 min\)")
    nodes[1].await_line("begins", 2)
    for node in nodes:
        node.await_world(3)
    finish(network, *nodes)


def test_a_pod_gets_sigterm_and_another_one_overlaps_it(network: Network) -> None:
    """As after an eviction, without podReplacementPolicy: Failed."""
    nodes = started(network)
    (network.checkpoints / "hold").touch()
    nodes[1].signal(signal.SIGTERM)
    nodes[1].await_line("SIGTERM: rank 1 to leave the job within 105 s")
    new = replaced(network, nodes[1])
    new.await_line("node id 1 is in use: waiting until 1 ")
    (network.checkpoints / "hold").unlink()
    assert nodes[1].end() == DRAINED, network.said()
    assert action(FILE, DRAINED) == "Ignore"
    old, nodes[1] = nodes[1], new
    for node in nodes:
        node.await_world(3)
    finish(network, *nodes)
    assert old.repeated() == 0


@pytest.mark.parametrize(("kind", "lost"), [("live", 0), ("live", 1), ("plain", 0)])
def test_all_pods_get_sigterm_and_come_back(network: Network, kind: str, lost: int) -> None:
    """All ranks save at the same step, and the pods that come instead begin there; one may be lost before."""
    (network.checkpoints / kind).touch()
    nodes = started(network)
    for node in nodes[3 - lost :]:
        node.lose_power()
        for other in nodes[:2]:
            other.await_world(2)
    left = nodes[: 3 - lost]
    left[0].go_on()
    come_back(network, nodes, left)


@pytest.mark.parametrize("kind", ["live", "plain"])
def test_all_other_pods_get_sigterm_when_one_loses_its_power(network: Network, kind: str) -> None:
    """They seem to be able to leave the rest to it, until its silence is noticed: then the job ends."""
    (network.checkpoints / kind).touch()
    nodes = started(network)
    nodes[2].lose_power()
    come_back(network, nodes, nodes[:2])


def come_back(network: Network, nodes: list[Node], left: list[Node]) -> None:
    """The nodes that are left get SIGTERM; the job goes on where it was, in other pods."""
    for node in left:
        node.signal(signal.SIGTERM)
    assert [node.end() for node in left] == [INFRASTRUCTURE] * len(left), network.said()
    assert action(FILE, INFRASTRUCTURE) == "Count"
    for node in left:
        assert "exit code 75 (preempted): node" in node.said, network.said()
        assert node.noticed() == [node.step()], network.said()
    done = {node.step() for node in left}
    nodes = [replaced(network, node) for node in nodes]
    for node in nodes:
        node.await_world(3)
    assert {node.first() for node in nodes} == done
    finish(network, *nodes)


def test_a_checkpoint_is_asked_for_at_one_pod(network: Network) -> None:
    """All save at one step, and nothing ends."""
    nodes = started(network)
    nodes[1].signal(signal.SIGUSR1)
    for node in nodes:
        node.await_noticed()
        node.go_on()
    finish(network, *nodes)
    steps = {tuple(node.noticed()) for node in nodes}
    assert len(steps) == 1 and len(steps.pop()) == 1, network.said()
    for node in nodes:
        assert "; iteration" not in node.said, network.said()


def test_a_rank_takes_more_memory_than_the_pod_has(network: Network) -> None:
    """The cgroup's limit, of version 1: the kernel kills the rank, and PID 1 goes on."""
    nodes = [Node(network, index) for index in range(3)]
    for node in nodes:
        node.run(memory=2 << 30)
    for node in nodes:
        node.await_world(3)
    (network.checkpoints / "greedy").touch()
    nodes[2].await_line(r"killed by SIGKILL \(out of memory\? the kernel has killed 1 meanwhile\)")
    nodes[2].await_line("begins", 2)
    for node in nodes:
        node.await_world(3)
    finish(network, *nodes)
