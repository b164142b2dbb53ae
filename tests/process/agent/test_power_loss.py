"""The machine that hosts the store loses its power: a namespace whose link and processes go at once."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from agent_job import TIMEOUT, all_gone, await_that, send
from test_network import Hosts, Network, made
from test_nodes import WRAPPED

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


def test_the_others_end(tmp_path: Path) -> None:
    lose_the_store(tmp_path, 2, SHORT)


def test_a_signal_ends_the_others_at_once(tmp_path: Path) -> None:
    """Though a question to the store is out, which is tried for longer than this test runs."""
    lose_the_store(tmp_path, 2, ",read_timeout=1000", signalled=True)


@pytest.mark.nightly("test_the_others_end has short limits")
def test_the_others_end_within_a_minute_by_default(tmp_path: Path) -> None:
    assert lose_the_store(tmp_path, 3) < 60.0
