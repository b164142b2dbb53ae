"""Several ftruns that meet in etcd: any machine may be lost, the first one too."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from agent_job import TIMEOUT, all_gone, await_that, send
from support.etcd_users import require_login
from test_nodes import lose, pids_of, places
from training import Training

from ft_wrapper.agent.rounds import INFRASTRUCTURE
from ft_wrapper.run import main
from ft_wrapper.store.etcd_messages import Range, Transaction, put
from ft_wrapper.testing import EtcdServer
from ft_wrapper.testing.etcd_server import EtcdTLS, free_port


@pytest.fixture
def members() -> Iterator[EtcdServer]:
    """Three members of etcd."""
    with EtcdServer(members=3) as server:
        yield server


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EtcdTLS:
    """Certificates, which ftrun and the ranks find where etcdctl does."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {name: str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    for variable, name in (("CACERT", "ca"), ("CERT", "cert"), ("KEY", "key")):
        monkeypatch.setenv(f"ETCDCTL_{variable}", files[name])
    return EtcdTLS(**files)


def left_in(etcd: EtcdServer) -> list[bytes]:
    """All keys."""
    with contextlib.closing(etcd.get_client()) as client:
        return [kv.key for kv in client.read(Range.prefix(b"ft_wrapper"))]


@pytest.mark.nightly("machines are lost in test_power_loss.py always")
def test_any_machine_may_be_lost(tmp_path: Path, tls: EtcdTLS, capsys: pytest.CaptureFixture[str]) -> None:
    with EtcdServer(members=3, tls=tls) as members, Training(tmp_path, members.endpoints) as cluster:
        assert members.endpoints.startswith("https://")
        nodes = [cluster.start(str(number)) for number in range(3)]
        began = cluster.await_active([0, 1, 2, 3], *nodes)
        await_that(lambda: all("a job has formed" in node.said for node in nodes), *nodes)

        leader = members.leader()
        members.kill(leader)
        assert cluster.go_on(*nodes) == began
        members.restart(leader)

        # The first machine: its agent, and the first ranks.
        lose(nodes[0])
        without = cluster.await_active([2, 3, 4, 5], *nodes[1:])
        assert cluster.go_on(*nodes[1:]) == without == began + 1
        found = [(node, place) for node, place, *_ in places(cluster, capsys)]
        assert found == [("0", "lost"), ("1", "seat"), ("2", "seat")]
        nodes[0] = cluster.start("0")
        again = cluster.await_active([0, 1, 2, 3], *nodes)

        # Both at once, as on a machine that has a member of etcd, and ranks.
        members.kill(members.leader())
        lose(nodes[1])
        without = cluster.await_active([0, 1, 4, 5], nodes[0], nodes[2])
        assert cluster.go_on(nodes[0], nodes[2]) == without == again + 1
        cluster.finish(nodes[0], nodes[2])
    assert [[len(pids) for pids in pids_of(node).values()] for node in nodes] == [[1, 1]] * 3


def lose_majority(members: EtcdServer) -> None:
    """Of three."""
    members.kill(0)
    members.kill(1)


@pytest.mark.nightly("there is an outage in test_without_a_majority_training_goes_on_and_a_fault_waits")
def test_an_outage_longer_than_all_timeouts_disturbs_nobody(tmp_path: Path, members: EtcdServer) -> None:
    """Without a fault. What stands still for want of etcd is no one's silence."""
    conf = ",read_timeout=1"
    timeouts = {"soft_timeout": 8, "hard_timeout": 12, "heartbeat_timeout": 12, "barrier_timeout": 15}
    with Training(tmp_path, members.endpoints, conf, **timeouts) as cluster:
        nodes = [cluster.start(str(number)) for number in range(3)]
        began = cluster.await_all(*nodes)
        await_that(lambda: all("a job has formed" in node.said for node in nodes), *nodes)
        lose_majority(members)
        # A try of barrier_timeout, the longest of them, has been in vain.
        await_that(lambda: all("training goes on" in node.said for node in nodes), *nodes)
        assert cluster.go_on(*nodes) == began
        members.restart(0)
        members.restart(1)
        await_that(lambda: all("the rendezvous store is back" in node.said for node in nodes), *nodes)
        assert cluster.go_on(*nodes) == began
        cluster.finish(*nodes)
    assert cluster.trained()[0] == began
    assert [[len(pids) for pids in pids_of(node).values()] for node in nodes] == [[1, 1]] * 3
    assert any("no heartbeat reaches the store" in node.said for node in nodes)
    evicts = "has sent no heartbeat", "no heartbeat from"
    assert not any(words in node.said for words in evicts for node in nodes)


@pytest.mark.nightly("there is an outage in test_without_a_majority_training_goes_on_and_a_fault_waits")
def test_a_fault_in_an_outage_longer_than_barrier_timeout_ends_the_job(
    tmp_path: Path, members: EtcdServer
) -> None:
    timeouts = {"soft_timeout": 6, "hard_timeout": 9, "heartbeat_timeout": 9, "barrier_timeout": 10}
    with Training(tmp_path, members.endpoints, ",read_timeout=2", nnodes="2", **timeouts) as cluster:
        nodes = [cluster.start(str(number)) for number in range(2)]
        cluster.await_all(*nodes)
        await_that(lambda: all("a job has formed" in node.said for node in nodes), *nodes)
        families = [process for node in nodes for process in node.family()]
        lose_majority(members)
        (cluster.shared / "fail").touch()
        assert [node.end() for node in nodes] == [INFRASTRUCTURE] * 2, nodes[0].said
        assert all_gone(families, TIMEOUT) == []
    for node in nodes:
        assert "InternalError" not in node.said
        lines = node.said.splitlines()
        leaving = [line for line in lines if "leaves the job" in line]
        assert len(leaving) == 2
        for line in (*leaving, lines[-1]):
            assert members.endpoints in line and "check that its members run, can be reached" in line


@pytest.mark.nightly("that any machine may be lost is tested always")
def test_without_a_majority_training_goes_on_and_a_fault_waits(tmp_path: Path, members: EtcdServer) -> None:
    with Training(tmp_path, members.endpoints, nnodes="2") as cluster:
        nodes = [cluster.start(str(number)) for number in range(2)]
        began = cluster.await_active([0, 1, 2, 3], *nodes)
        await_that(lambda: all("a job has formed" in node.said for node in nodes), *nodes)
        lose_majority(members)
        assert cluster.go_on(*nodes, steps=100) == began
        send(nodes[1].pids(3)[0], signal.SIGKILL)
        await_that(lambda: "it is started again" in nodes[1].said, *nodes)
        assert cluster.trained()[0] == began
        members.restart(0)
        members.restart(1)
        await_that(lambda: cluster.trained()[0] > began, *nodes)
        assert cluster.await_active([0, 1, 2, 3], *nodes) == began + 1
        cluster.finish(*nodes)
    assert [[len(pids) for pids in pids_of(node).values()] for node in nodes] == [[1, 1], [1, 2]]
    assert left_in(members) == []


@pytest.fixture
def end_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Starts a job that cannot begin; gives the line that it ends with."""
    script = tmp_path / "script.py"
    script.touch()

    def end(endpoint: str, is_down: bool = False) -> str:
        options = ["--nnodes", "1", "--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
        options += ["--rdzv-conf", "read_timeout=2"] if is_down else []
        try:
            code = main([*options, str(script)])
        except SystemExit as ended:  # of what the command line itself is checked for
            code = ended.code
        assert code == (75 if is_down else 2)
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return end


def test_nobody_answers(end_of: Callable[..., str]) -> None:
    assert "Connection refused" in end_of(f"localhost:{free_port()}", is_down=True)


def test_no_majority_at_the_beginning(end_of: Callable[..., str], members: EtcdServer) -> None:
    members.kill(0)
    members.kill(1)
    assert "have a majority" in end_of(members.endpoints, is_down=True)


def test_who_may_not_come_in(end_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    with EtcdServer() as server:
        with contextlib.closing(server.get_client()) as client:
            client.transaction(Transaction("put", [put(b"ft_wrapper/job/life", b"somebody's")]))
        assert "another program has this prefix" in end_of(server.endpoints)
        require_login(server, {"root": "secret"}, {})
        assert "wants a user and a password" in end_of(server.endpoints)
        monkeypatch.setenv("ETCDCTL_USER", "root:guessed")
        line = end_of(server.endpoints)
        assert "authentication failed" in line and "guessed" not in line


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ETCDCTL_USER", "root", "ETCDCTL_USER=root comes without a password"),
        ("ETCDCTL_CACERT", "/nowhere/ca.pem", "ca='/nowhere/ca.pem', cert=None, key=None cannot be used"),
    ],
)
def test_what_is_wrong_before_etcd_is_asked(
    end_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert words in end_of("localhost:1")
