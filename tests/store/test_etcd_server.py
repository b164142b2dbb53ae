"""EtcdServer: starts, fails and ends members, and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_helpers import write
from etcd_hosts import EtcdHost, EtcdOnHosts

from ft_wrapper.store.etcd_client import EtcdClient
from ft_wrapper.store.etcd_messages import Span
from ft_wrapper.testing import EtcdServer
from ft_wrapper.testing.etcd_server import BINARY_VARIABLES, EtcdNotFound, find_etcd


@pytest.fixture
def cluster(etcd: EtcdServer) -> Iterator[EtcdServer]:
    """Three members of the test's own."""
    with EtcdServer(3) as server:
        yield server


def read(client: EtcdClient, key: bytes) -> bytes:
    return client.read(Span(key))[0].value


def test_one_member(etcd: EtcdServer) -> None:
    with EtcdServer() as server:
        assert "," not in server.endpoints
        client = server.get_client()
        write(client, b"k", b"v")
        assert read(client, b"k") == b"v"
        client.close()
        with pytest.raises(RuntimeError, match="started already"):
            server.start()
    server.stop()  # once more does no harm


def test_a_member_that_was_killed_comes_back_with_its_data(cluster: EtcdServer) -> None:
    client = cluster.get_client()
    write(client, b"k", b"v")
    leader = cluster.leader()
    cluster.kill(leader)
    assert cluster.leader() != leader
    cluster.restart(leader)
    for index in {0, 1, 2} - {leader}:
        cluster.kill(index)
        cluster.restart(index)
    assert read(client, b"k") == b"v"
    client.close()


def test_a_member_that_runs_cannot_be_restarted(cluster: EtcdServer) -> None:
    with pytest.raises(RuntimeError, match="still runs"):
        cluster.restart(0)


def test_a_paused_leader_is_replaced(cluster: EtcdServer) -> None:
    leader = cluster.leader()
    cluster.pause(leader)
    client = cluster.get_client()
    write(client, b"k", b"v")  # the new leader has taken it
    assert cluster.leader() != leader
    cluster.resume(leader)
    client.close()


def test_data_stays_where_it_was_asked_to(etcd: EtcdServer, tmp_path: Path) -> None:
    for expected in (0, 1):
        with EtcdServer(data_dir=str(tmp_path)) as server:
            client = server.get_client()
            assert len(client.read(Span(b"k"))) == expected
            write(client, b"k", b"v")
            client.close()


def test_a_member_that_cannot_start(etcd: EtcdServer) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)member0 of etcd ended with code .*/dev/null/data"):
        EtcdServer(options=["--data-dir", "/dev/null/data"]).start()


def test_other_members_options_in_the_environment(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://nowhere.invalid:1")
    with EtcdServer():
        pass


def test_members_behind_a_command(etcd: EtcdServer) -> None:
    """They are asked there, too. What is in front becomes the member, so that it can be killed."""
    with EtcdOnHosts([EtcdHost("127.0.0.1", ["env"])] * 3) as server:
        leader = server.leader()
        server.kill(leader)
        assert server.leader() != leader
        server.restart(leader)
        client = server.get_client()
        write(client, b"k", b"v")
        client.close()


def test_no_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in BINARY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EtcdNotFound, match="apt-get install etcd-server"):
        EtcdServer()


@pytest.mark.parametrize("variable", BINARY_VARIABLES)
def test_binary_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    binary = tmp_path / "my-etcd"
    monkeypatch.delenv(BINARY_VARIABLES[0], raising=False)
    monkeypatch.setenv(variable, str(binary))
    with pytest.raises(EtcdNotFound, match=f"{variable}=.*my-etcd"):
        find_etcd()
    binary.touch()
    os.chmod(binary, 0o755)
    assert find_etcd() == str(binary)
