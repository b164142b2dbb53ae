"""Several ftruns that meet in etcd: any machine may be lost, the first one too."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from agent_job import await_that, send
from test_nodes import CONF, WRAPPED, Cluster, lose, pids_of, places

from ft_wrapper.run import main
from ft_wrapper.store.etcd_messages import Put, Range, Span
from ft_wrapper.testing import EtcdServer
from ft_wrapper.testing.etcd_server import EtcdNotFound, EtcdTLS
from ft_wrapper.testing.ports import free_port


@pytest.fixture
def members() -> Iterator[EtcdServer]:
    """Three members of etcd."""
    try:
        server = EtcdServer(members=3)
    except EtcdNotFound as error:
        pytest.skip(str(error))
    with server:
        yield server


class EtcdCluster(Cluster):
    """A cluster whose nodes meet in etcd."""

    @property
    def address(self) -> str:
        return f"etcd://{self._endpoint}/ft_wrapper/job"

    def use(self, etcd: EtcdServer) -> None:
        self._endpoint = etcd.endpoints
        self._options += ["--rdzv-backend", "etcd", "--rdzv-id", "job"]
        self._conf = CONF.replace("last_call_timeout=0.2", "last_call_timeout=60")


# Each rank counts, in a file of its own.
COUNTING = WRAPPED.replace(
    """            time.sleep(0.02)
""",
    """            time.sleep(0.02)
            with open(f"{folder}/count.{os.environ['RANK']}", "a") as file:
                file.write(".")
""",
)


def left_in(etcd: EtcdServer) -> list[bytes]:
    """All keys."""
    with contextlib.closing(etcd.get_client()) as client:
        return [kv.key for kv in client.range(Range(Span.prefix(b"ft_wrapper"), keys_only=True))]


def test_any_machine_may_be_lost(
    tmp_path: Path, members: EtcdServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with EtcdCluster(tmp_path, WRAPPED, nnodes="2:3") as cluster:
        cluster.use(members)
        nodes = [cluster.start(str(number)) for number in range(3)]
        before = cluster.await_inside(3, *nodes)
        await_that(lambda: "a job has formed" in nodes[0].said, *nodes)
        pids = [rank["pid"] for rank in before]

        # The leader of etcd: nothing happens. It would be seen in the next iteration's number.
        members.kill(members.leader())
        # The first machine: its agent, its ranks, and the first of the other etcd members.
        lose(nodes[0])
        left = cluster.await_inside(2, *nodes[1:])
        assert [rank["pid"] for rank in left] == pids[1:]
        assert left[0]["iteration"] == before[0]["iteration"] + 1

        found = [(node, place) for node, place, *_ in places(cluster, capsys)]
        assert found == [("0", "lost"), ("1", "seat"), ("2", "seat")]

        back = cluster.start("0")
        after = cluster.await_inside(3, back, *nodes[1:])
        assert [rank["pid"] for rank in after[1:]] == pids[1:]
        assert after[0]["RANK"] == "0"
        assert after[0]["iteration"] == left[0]["iteration"] + 1
        cluster.finish(back, *nodes[1:])
    assert [len(*pids_of(node).values()) for node in nodes[1:]] == [1, 1]
    assert left_in(members) == []


def test_without_a_majority_training_goes_on_and_a_fault_waits(tmp_path: Path, members: EtcdServer) -> None:
    with EtcdCluster(tmp_path, COUNTING, nnodes="2") as cluster:
        cluster.use(members)
        nodes = [cluster.start(str(number)) for number in range(2)]
        before = cluster.await_inside(2, *nodes)
        await_that(lambda: "a job has formed" in nodes[0].said, *nodes)
        members.kill(0)
        members.kill(1)
        counts = [cluster.shared / f"count.{rank}" for rank in range(2)]
        began = [path.stat().st_size for path in counts]
        await_that(
            lambda: all(p.stat().st_size > s + 100 for p, s in zip(counts, began, strict=True)), *nodes
        )
        send(before[1]["pid"], signal.SIGKILL)
        await_that(lambda: "it is started again" in nodes[1].said, *nodes)
        members.restart(0)
        after = cluster.await_inside(2, *nodes)
        members.restart(1)
        cluster.finish(*nodes)
    assert after[0]["pid"] == before[0]["pid"]
    assert after[1]["pid"] != before[1]["pid"]
    assert after[0]["iteration"] == before[0]["iteration"] + 1
    assert left_in(members) == []


def test_a_wrapped_job_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks, too, find certificates where etcdctl does."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {name: str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    for variable, name in (("CACERT", "ca"), ("CERT", "cert"), ("KEY", "key")):
        monkeypatch.setenv(f"ETCDCTL_{variable}", files[name])
    try:
        server = EtcdServer(tls=EtcdTLS(**files))
    except EtcdNotFound as error:
        pytest.skip(str(error))
    with server, EtcdCluster(tmp_path, WRAPPED, nnodes="1") as cluster:
        cluster.use(server)
        assert server.endpoints.startswith("https://")
        node = cluster.start("0")
        (rank,) = cluster.await_inside(1, node)
        assert rank["FT_WRAPPER_STORE"].startswith("etcd://")
        cluster.finish(node)
        assert left_in(server) == []


@pytest.fixture
def end_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Starts a job that cannot begin; gives the line that it ends with."""
    script = tmp_path / "script.py"
    script.touch()

    def end(endpoint: str) -> str:
        options = ["--nnodes", "1", "--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
        try:
            code = main([*options, str(script)])
        except SystemExit as ended:  # of what the command line itself is checked for
            code = ended.code
        assert code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return end


def test_nobody_answers(end_of: Callable[[str], str]) -> None:
    assert "Connection refused" in end_of(f"localhost:{free_port()}")


def test_no_majority_at_the_beginning(end_of: Callable[[str], str], members: EtcdServer) -> None:
    members.kill(0)
    members.kill(1)
    assert "have a majority" in end_of(members.endpoints)


def test_somebody_else_s_keys(end_of: Callable[[str], str], members: EtcdServer) -> None:
    with contextlib.closing(members.get_client()) as client:
        client.put(Put(b"ft_wrapper/job/life", b"somebody's"))
    assert "another program uses this prefix" in end_of(members.endpoints)


def test_who_may_not_come_in(
    end_of: Callable[[str], str], members: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(members.get_client()) as client:
        client.call("auth/user/add", {"name": "root", "password": "secret"})
        client.call("auth/role/add", {"name": "root"})
        client.call("auth/user/grant", {"user": "root", "role": "root"})
        client.call("auth/enable", {})
    assert "wants a user and a password" in end_of(members.endpoints)
    monkeypatch.setenv("ETCDCTL_USER", "root:guessed")
    line = end_of(members.endpoints)
    assert "authentication failed" in line
    assert "guessed" not in line


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ETCDCTL_USER", "root", "ETCDCTL_USER=root comes without a password"),
        ("ETCDCTL_CACERT", "/nowhere/ca.pem", "ca='/nowhere/ca.pem' for etcd cannot be read"),
    ],
)
def test_what_is_wrong_before_etcd_is_asked(
    end_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert words in end_of("localhost:1")
