"""The machine that hosts the store loses its power: a namespace whose link and processes go at once."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from agent_job import TIMEOUT, all_gone, await_that, send
from test_network import Hosts, Network, made
from test_nodes import WRAPPED

from ft_wrapper.agent.rounds import INFRASTRUCTURE


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


def lose_the_store(folder: Path, conf: str, *, signalled: bool = False) -> None:
    """Runs a job of two nodes; the one with the store loses its power, and the other one ends.

    Args:
        folder: for files.
        conf: of the rendezvous, behind what all have.
        signalled: whether a survivor's rank dies then, about which its agent asks the store, and SIGTERM
            follows.
    """
    with made(PoweredHosts(2)) as network, Hosts(folder, WRAPPED, nnodes="2") as cluster:
        cluster.network, cluster._conf = network, f"last_call_timeout=60{conf}"
        nodes = [cluster.start_on(host) for host in range(2)]
        ranks = cluster.await_inside(2, *nodes)
        await_that(lambda: all("a job has formed" in node.said for node in nodes), *nodes)
        left = [process for node in nodes[1:] for process in node.family()]
        network.lose_power(0)
        if signalled:
            send(ranks[1]["pid"], signal.SIGKILL)
            for node in nodes[1:]:
                node.process.send_signal(signal.SIGTERM)
        for node in nodes[1:]:
            assert node.end() == (128 + signal.SIGTERM if signalled else INFRASTRUCTURE), node.said
            assert signalled or "its host host0 was silent for" in node.said
        assert all_gone(left, TIMEOUT) == []


def test_the_others_end(tmp_path: Path) -> None:
    lose_the_store(tmp_path, ",read_timeout=6")


def test_a_signal_ends_the_others_at_once(tmp_path: Path) -> None:
    """Though a question to the store is out, which is tried for longer than this test runs."""
    lose_the_store(tmp_path, ",read_timeout=1000", signalled=True)
