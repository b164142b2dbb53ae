"""Nodes with a network between them that breaks: each in a network namespace of its own, on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest
from agent_job import TIMEOUT, FtRun, await_that
from support.warm_ftrun import NAMESPACE
from test_nodes import WRAPPED, Cluster, pids_of

PORT = 29400  # in a namespace of its own, so no one else has it
_FILES = Path("/etc/netns")  # `ip netns exec` puts what is in a namespace's folder there over /etc


T = TypeVar("T", bound="Network")


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
                _ip("-n", namespace, "link", "set", "lo", "up")
                _ip("-n", namespace, "link", "set", "eth0", "up")
                self._give_address(host)
                self._write_names(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in (*range(self._size), "switch"):
            subprocess.run(
                ["ip", "netns", "delete", self._namespace(host)], capture_output=True, timeout=TIMEOUT
            )
            shutil.rmtree(_FILES / self._namespace(host), ignore_errors=True)

    def address(self, host: int) -> str:
        """How the others reach a host."""
        return f"10.77.0.{host + 1}"

    def name(self, host: int) -> str:
        """What all hosts call a host, itself included."""
        return f"host{host}"

    def command(self, host: int) -> list[str]:
        """What to put in front of a command that is to run on a host."""
        return [*NAMESPACE, self._namespace(host)]

    def cut(self, host: int) -> None:
        """Pulls the cable of a host: no one is told, packets are lost."""
        _ip("-n", self._namespace("switch"), "link", "set", f"cable{host}", "down")

    def join(self, host: int) -> None:
        """Puts it in again."""
        _ip("-n", self._namespace("switch"), "link", "set", f"cable{host}", "up")

    def shape(self, host: int, *discipline: str) -> None:
        """Limits what a host sends, as ``tc`` has it."""
        _ip("netns", "exec", self._namespace(host), "tc", "qdisc", "add", "dev", "eth0", "root", *discipline)

    def _give_address(self, host: int) -> None:
        _ip("-n", self._namespace(host), "address", "add", f"{self.address(host)}/24", "dev", "eth0")

    def _write_names(self, host: int) -> None:
        """As Debian does: a host finds its own name on the loopback."""
        names = {self.name(other): self.address(other) for other in range(self._size)}
        names |= {"localhost": "127.0.0.1", self.name(host): "127.0.1.1"}
        folder = _FILES / self._namespace(host)
        folder.mkdir(parents=True, exist_ok=True)  # one that was killed may have left it
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))

    def _namespace(self, host: int | str) -> str:
        return f"{self._name}-{host}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=TIMEOUT)


@contextlib.contextmanager
def made(network: T) -> Iterator[T]:
    """Makes a network, where this machine can."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    with contextlib.ExitStack() as exits:
        try:
            exits.enter_context(network)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network of namespaces: {error.stderr.decode().strip()}")
        yield network


@pytest.fixture
def network() -> Iterator[Network]:
    """Three hosts."""
    with made(Network(3)) as network:
        yield network


class Hosts(Cluster):
    """A cluster each node of which is a host of the network; host 0 hosts the store."""

    network: Network

    def start_on(self, host: int, environment: Mapping[str, str] | None = None) -> FtRun:
        """Starts the node of a host, with more in its environment."""
        self._endpoint = f"{self.network.name(0)}:{PORT}"
        node = FtRun(
            self.folder / f"node{host}",
            *self._options,
            *("--rdzv-endpoint", self._endpoint),
            *("--rdzv-conf", f"{self._conf},is_host={str(host == 0).lower()}"),
            *("--local-addr", self.network.name(host), "--node-id", str(host)),
            str(self.script),
            str(self.shared),
            before=self.network.command(host),
            environment=environment,
        )
        return self._exits.enter_context(node)


@pytest.mark.nightly("simulated nodes are cut off always")
def test_a_node_that_was_cut_off_harms_nobody_and_comes_back(tmp_path: Path, network: Network) -> None:
    with Hosts(tmp_path, WRAPPED, nnodes="1:3") as cluster:
        cluster.network = network
        cluster._conf = cluster._conf.replace("last_call_timeout=0.2", "last_call_timeout=60")
        # To the node that is cut off the host of the store is silent, for as long as this takes.
        cluster._conf = cluster._conf.replace("read_timeout=20", "read_timeout=300")
        nodes = [cluster.start_on(host) for host in range(3)]
        before = cluster.await_inside(3, *nodes)
        await_that(lambda: all("a job has formed" in node.said for node in nodes), *nodes)
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
    said = "\n".join(node.said for node in nodes)
    assert [len(*pids_of(node).values()) for node in nodes] == [1, 1, 2], said
    assert "this node (2 (host2)) was taken out of the rendezvous" in nodes[2].said
