"""Nodes with a network between them that breaks: each in a network namespace of its own, on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_job import TIMEOUT, FtRun, await_that
from test_nodes import WRAPPED, Cluster, pids_of

PORT = 29400  # in a namespace of its own, so nobody else has it


class Network:
    """Some hosts, each behind a cable of its own to one switch.

    Args:
        size: number of hosts.
    """

    def __init__(self, size: int) -> None:
        self._name = f"ft{os.getpid()}"
        self._size = size

    def __enter__(self) -> Network:
        switch = self._namespace("switch")
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for host in range(self._size):
                namespace = self._namespace(host)
                _ip("netns", "add", namespace)
                ends = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
                _ip("-n", switch, "link", "add", f"cable{host}", *ends)
                _ip("-n", switch, "link", "set", f"cable{host}", "master", "bridge", "up")
                _ip("-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", namespace, "link", "set", "lo", "up")
                _ip("-n", namespace, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in (*range(self._size), "switch"):
            subprocess.run(
                ["ip", "netns", "delete", self._namespace(host)], capture_output=True, timeout=TIMEOUT
            )

    def address(self, host: int) -> str:
        """How the others reach a host."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int) -> list[str]:
        """What to put in front of a command that is to run on a host."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def cut(self, host: int) -> None:
        """Pulls the cable of a host: nobody is told, packets are lost."""
        _ip("-n", self._namespace("switch"), "link", "set", f"cable{host}", "down")

    def join(self, host: int) -> None:
        """Puts it in again."""
        _ip("-n", self._namespace("switch"), "link", "set", f"cable{host}", "up")

    def _namespace(self, host: int | str) -> str:
        return f"{self._name}-{host}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=TIMEOUT)


@pytest.fixture
def network() -> Iterator[Network]:
    """Three hosts."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    with contextlib.ExitStack() as exits:
        try:
            network = exits.enter_context(Network(3))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network of namespaces: {error.stderr.decode().strip()}")
        yield network


class Hosts(Cluster):
    """A cluster each node of which is a host of the network; host 0 hosts the store."""

    network: Network

    def start_on(self, host: int) -> FtRun:
        """Starts the node of a host."""
        self._endpoint = f"{self.network.address(0)}:{PORT}"
        node = FtRun(
            self.folder / f"node{host}",
            *self._options,
            *("--rdzv-endpoint", self._endpoint, "--local-addr", self.network.address(host)),
            *("--rdzv-conf", f"{self._conf},is_host={str(host == 0).lower()}", "--node-id", str(host)),
            str(self.script),
            str(self.shared),
            before=self.network.command(host),
        )
        return self._exits.enter_context(node)


def test_a_node_that_was_cut_off_harms_nobody_and_comes_back(tmp_path: Path, network: Network) -> None:
    with Hosts(tmp_path, WRAPPED, nnodes="1:3") as cluster:
        cluster.network = network
        cluster._conf = cluster._conf.replace("last_call_timeout=0.2", "last_call_timeout=60")
        nodes = [cluster.start_on(host) for host in range(3)]
        before = cluster.await_inside(3, *nodes)
        await_that(lambda: "a job has formed" in nodes[0].said, *nodes)
        network.cut(2)
        left = cluster.await_inside(2, *nodes)
        assert [rank["pid"] for rank in left] == [rank["pid"] for rank in before[:2]]
        network.join(2)
        after = cluster.await_inside(3, *nodes)
        cluster.finish(*nodes)
    assert [rank["pid"] for rank in after[:2]] == [rank["pid"] for rank in before[:2]]
    # The rank that the others had given up never came back as what it was. Its agent has started another one,
    # but only once it had its place again: before, that might have been another node's.
    assert after[2]["pid"] != before[2]["pid"]
    assert [len(*pids_of(node).values()) for node in nodes] == [1, 1, 2]
    assert "this node (2 (10.77.0.3)) was taken out of the rendezvous" in nodes[2].said
