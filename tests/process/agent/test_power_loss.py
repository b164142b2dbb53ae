"""The machine that hosts the store loses its power: a network namespace whose link and processes go at once.

``PYTHONPATH=.:tests python tests/process/agent/test_power_loss.py 20`` does that twenty times in each
case, and prints a table of seconds.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from agent_job import TIMEOUT, all_gone, await_that, send
from support.etcd_hosts import EtcdHost, EtcdOnHosts
from test_network import Hosts, Network, made
from test_nodes import WRAPPED, pids_of

from ft_wrapper.agent.rounds import INFRASTRUCTURE

SHORT = ",read_timeout=6"


class PoweredHosts(Network):
    """Hosts that can lose their power."""

    def lose_power(self, host: int) -> None:
        """Nobody there tells anybody anything."""
        namespace = self._namespace(host)
        subprocess.run(["ip", "-n", namespace, "link", "set", "eth0", "down"], check=True, timeout=TIMEOUT)
        pids = subprocess.run(
            ["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True, timeout=TIMEOUT
        )
        for pid in pids.stdout.split():
            send(int(pid), signal.SIGKILL)


def lose_the_store(folder: Path, size: int, conf: str = "", *, signalled: bool = False) -> float:
    """Runs a job of so many nodes; the one with the store loses its power, and the others end.

    Args:
        folder: for files.
        size: how many.
        conf: of the rendezvous, behind what all have.
        signalled: whether a survivor's rank dies then, about which its agent asks the store, and SIGTERM
            follows.

    Returns:
        After how many seconds the last one had ended, since the loss or the signal.
    """
    with made(PoweredHosts(size)) as network, Hosts(folder, WRAPPED, nnodes=str(size)) as cluster:
        cluster.network, cluster._conf = network, f"last_call_timeout=60{conf}"
        nodes = [cluster.start_on(host) for host in range(size)]
        ranks = cluster.await_inside(size, *nodes)
        await_that(lambda: all("a job has formed" in node.said for node in nodes), *nodes)
        left = [process for node in nodes[1:] for process in node.family()]
        network.lose_power(0)
        began = time.monotonic()
        if signalled:
            send(ranks[1]["pid"], signal.SIGKILL)
            began = time.monotonic()
            for node in nodes[1:]:
                node.process.send_signal(signal.SIGTERM)
        for node in nodes[1:]:
            assert node.end() == (128 + signal.SIGTERM if signalled else INFRASTRUCTURE), node.said
            assert signalled or "its host host0 was silent for" in node.said
        assert all_gone(left, TIMEOUT) == []
        return time.monotonic() - began


def lose_a_host_of_etcd(folder: Path) -> float:
    """As `lose_the_store`, with three nodes and a member of etcd on each: the others go on.

    Returns:
        After how many seconds the ranks of the others were in the next iteration.
    """
    with contextlib.ExitStack() as exits:
        network = exits.enter_context(made(PoweredHosts(3)))
        hosts = [EtcdHost(network.address(host), network.command(host)) for host in range(3)]
        server = exits.enter_context(EtcdOnHosts(hosts))
        cluster = exits.enter_context(Hosts(folder, WRAPPED, nnodes="2:3"))
        cluster.network = network
        etcd = ["--rdzv-backend", "etcd", "--rdzv-id", "job", "--rdzv-endpoint", server.endpoints]
        nodes = [cluster.start_with(host, *etcd, "--rdzv-conf", "last_call_timeout=60") for host in range(3)]
        before = cluster.await_inside(3, *nodes)
        await_that(lambda: all("a job has formed" in node.said for node in nodes), *nodes)
        network.lose_power(0)
        began = time.monotonic()
        after = cluster.await_inside(2, *nodes[1:])
        took = time.monotonic() - began
        assert [rank["pid"] for rank in after] == [rank["pid"] for rank in before[1:]]
        cluster.finish(*nodes[1:])
        assert [len(pids_of(node)) for node in nodes[1:]] == [1, 1]
        return took


def test_the_others_end(tmp_path: Path) -> None:
    lose_the_store(tmp_path, 2, SHORT)


def test_a_signal_ends_the_others_at_once(tmp_path: Path) -> None:
    """Though a question to the store is out, which is tried for longer than this test runs."""
    lose_the_store(tmp_path, 2, ",read_timeout=1000", signalled=True)


@pytest.mark.nightly("test_the_others_end has short limits")
@pytest.mark.parametrize("size", [2, 3])
def test_the_others_end_within_a_minute_by_default(tmp_path: Path, size: int) -> None:
    assert lose_the_store(tmp_path, size) < 60.0


@pytest.mark.nightly("tests/process/agent/test_network.py has less of it always")
def test_the_others_go_on_with_etcd(tmp_path: Path) -> None:
    lose_a_host_of_etcd(tmp_path)


def _table(count: int) -> None:
    cases = {
        "2 nodes, TCPStore: ended": lambda folder: lose_the_store(folder, 2),
        "3 nodes, TCPStore: ended": lambda folder: lose_the_store(folder, 3),
        "2 nodes, TCPStore, SIGTERM: ended": lambda folder: lose_the_store(folder, 2, signalled=True),
        "3 nodes, etcd: gone on": lose_a_host_of_etcd,
    }
    for name, case in cases.items():
        took = list[float]()
        for _ in range(count):
            with tempfile.TemporaryDirectory() as folder, contextlib.suppress(AssertionError):
                took.append(case(Path(folder)))
        seconds = " ".join(f"{one:.0f}" for one in sorted(took))
        print(f"{name:34} {len(took)} of {count}; seconds: {seconds}", flush=True)


if __name__ == "__main__":
    _table(int(sys.argv[1]))
