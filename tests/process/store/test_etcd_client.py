"""The gateway client on a real etcd: what it reads and writes, and what it does when members fail."""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from etcd_helpers import ask, erase, write
from store_helpers import Background
from support.etcd_users import require_login

from ft_wrapper.exception import StoreError
from ft_wrapper.protocol.keys import WAKE
from ft_wrapper.protocol.operations import Heartbeat, read_heartbeat
from ft_wrapper.store import EtcdStore
from ft_wrapper.store.address import Endpoint
from ft_wrapper.store.etcd_client import EtcdClient, Watch
from ft_wrapper.store.etcd_messages import EtcdCompacted, EtcdRefused, KeyValue, Range, read_answer
from ft_wrapper.testing import EtcdServer
from ft_wrapper.testing.etcd_server import EtcdTLS

PASSWORD = "the-secret-word"


@pytest.fixture
def client(etcd: EtcdServer) -> Iterator[EtcdClient]:
    """A client of an etcd that all tests share."""
    gateway = etcd.get_client()
    yield gateway
    gateway.close()


@pytest.fixture
def name(prefix: str) -> Callable[[str], bytes]:
    """Names of keys that no one else has."""
    return lambda text: f"{prefix}/{text}".encode()


Name = Callable[[str], bytes]


class Following:
    """A watch in a thread of its own, until so many events have come."""

    def __init__(self, watch: Watch, number: int) -> None:
        self.events: list[KeyValue] = []
        self.watch = watch
        self._number = number
        self._background = Background(self._run)

    def _run(self) -> None:
        for event in self.watch.events():
            self.events.append(event)
            if len(self.events) == self._number:
                return

    def values(self) -> list[bytes | None]:
        """None for what was deleted."""
        self._background.join()
        return [event.value if event.create_revision else None for event in self.events]


# Keys, transactions, leases


def test_keys(client: EtcdClient, name: Name) -> None:
    write(client, name("a"), b"\x00\xff")
    revision = write(client, name("b"), b"")
    write(client, name("a"), b"2")
    a, b = client.read(Range.prefix(name("")))
    assert (a.key, a.value) == (name("a"), b"2") and a.create_revision < a.mod_revision
    assert (b.value, b.create_revision, b.mod_revision) == (b"", revision, revision)
    assert [kv.key for kv in client.read(Range(name("a"), name("b")))] == [name("a")]
    past = {**Range(name("a")).json, "revision": str(revision)}
    assert ask(client, "kv/range", past)["kvs"][0]["value"] == "AP8="
    assert erase(client, Range.prefix(name(""))) == 2
    assert client.read(Range(name("a"))) == ()


def test_end_of_a_prefix() -> None:
    assert Range.prefix(b"a\xff").end == b"b"
    assert Range.prefix(b"a/").end == b"a0"


def test_lease(client: EtcdClient, name: Name) -> None:
    lease = client.grant(600)

    def seconds_left() -> int:
        return int(ask(client, "lease/timetolive", {"ID": str(lease)})["TTL"])

    write(client, name("k"), b"v", lease)
    assert client.read(Range(name("k")))[0].lease == lease
    assert client.keep_alive(lease) == 600
    assert 500 < seconds_left() <= 600
    assert client.revoke(lease) is True
    assert client.read(Range(name("k"))) == ()
    assert (client.revoke(lease), client.keep_alive(lease), seconds_left()) == (False, 0, -1)


# Watches


def test_watch_sees_what_was_written_since(client: EtcdClient, name: Name) -> None:
    revision = write(client, name("a"), b"0")
    write(client, name("a"), b"1")
    of_a = Following(Watch(client, Range(name("a")), revision + 1), 2)
    of_both = Following(Watch(client, Range.prefix(name("")), revision + 1), 4)
    write(client, name("b"), b"2")
    erase(client, Range(name("a")))
    write(client, name("b"), b"3")
    assert of_a.values() == [b"1", None]
    assert of_both.values() == [b"1", b"2", None, b"3"]


def test_watch_of_what_is_compacted(client: EtcdClient, name: Name) -> None:
    first = write(client, name("a"), b"0")
    last = write(client, name("a"), b"1")
    ask(client, "kv/compaction", {"revision": str(last)})
    with pytest.raises(EtcdCompacted, match=rf"\b{last}\b"):
        Following(Watch(client, Range(name("a")), first), 1).values()
    with pytest.raises(EtcdCompacted):
        ask(client, "kv/range", {**Range(name("a")).json, "revision": str(first)})


# Members that fail


def test_members_that_fail(cluster: EtcdServer) -> None:
    client, other = cluster.get_client(), cluster.get_client(timeout=10.0)
    following = Following(Watch(client, Range(b"k"), 1), 60)
    with pytest.raises(RuntimeError, match="still runs"):
        cluster.restart(0)
    for index in range(3):
        fail, recover = (cluster.kill, cluster.restart) if index < 2 else (cluster.pause, cluster.resume)
        for number in range(20):
            if number == 10:
                fail(index)
            write(other, b"k", f"{index}.{number}".encode())
        assert client.read(Range(b"k"))[0].value == f"{index}.19".encode()
        recover(index)
    write(other, b"k", b"end")
    seen = following.values()
    assert seen == [f"{i}.{n}".encode() for i in range(3) for n in range(20)][: len(seen)]
    revisions = [event.mod_revision for event in following.events]
    assert revisions == list(range(revisions[0], revisions[0] + 60))

    # Without the leader, and then without a majority.
    cluster.kill(cluster.leader())
    write(other, b"k", b"1")
    cluster.kill(cluster.leader())
    with pytest.raises(StoreError, match=r"range got no answer for 1 s.*majority") as caught:
        Background(lambda: client.read(Range(b"k"), timeout=1.0)).join()
    assert all(endpoint in str(caught.value) for endpoint in cluster.endpoints.split(","))
    client.close()
    other.close()


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"endpoints": ""}, "endpoints of etcd are empty"),
        ({"endpoints": "host"}, "endpoint 'host'"),
        ({"endpoints": "host:port"}, "endpoint 'host:port'"),
        ({"endpoints": "host:70000"}, "endpoint 'host:70000'"),
        ({"endpoints": "ftp://host:1"}, "endpoint 'ftp://host:1'"),
        ({"endpoints": "http://host:1/path"}, "must be host:port"),
        ({"endpoints": f"http://me:{PASSWORD}@host:1"}, "holds a password"),
        ({"endpoints": "host:1", "user": "me"}, "go together"),
        ({"endpoints": "host:1", "password": PASSWORD}, "go together"),
        ({"endpoints": "host:1", "cert": "/c"}, "go together"),
        ({"endpoints": "host:1", "ca": "/no/such/file"}, "/no/such/file"),
        ({"endpoints": "http://host:1", "ca": "/c"}, "plain http"),
    ],
)
def test_arguments_that_cannot_be_right(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        EtcdClient(**arguments)
    assert PASSWORD not in str(caught.value)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = EtcdClient(f"127.0.0.1:{port}", timeout=0.3)
    with pytest.raises(StoreError, match=rf"127.0.0.1:{port}: put got no answer for 0.3 s.*refused"):
        write(client, b"k", b"v")


def test_host_that_does_not_exist() -> None:
    client = EtcdClient("no-such-host.invalid:1234", timeout=0.3)
    with pytest.raises(StoreError, match=r"no-such-host\.invalid:1234: put got no answer"):
        write(client, b"k", b"v")


@pytest.mark.parametrize("status", [404, 200])
def test_somebody_else_listens(status: int) -> None:
    """A server of version 2 only, or one without the gateway, does not know the path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with pytest.raises(StoreError, match=rf"does not answer put as etcd's v3 .*, but HTTP {status}"):
        write(EtcdClient(f"127.0.0.1:{server.server_port}", timeout=20.0), b"k", b"v")
    server.shutdown()
    thread.join()
    server.server_close()


# Users and passwords


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdServer]:
    """An etcd with users: root, and job, who may do everything below job/."""
    with EtcdServer() as server:
        require_login(server, {"root": "root's own", "job": PASSWORD}, {"job": "job/"})
        yield server


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (400, {"error": "etcdserver: user name is empty", "code": 3}),
        (400, {"code": 3, "message": "etcdserver: user name is empty", "details": []}),
        (200, {"error": {"grpc_code": 3, "message": "etcdserver: user name is empty"}}),
        (200, {"error": {"code": 3, "message": "etcdserver: user name is empty", "details": []}}),
    ],
    ids=["3.4", "3.5", "a stream of 3.4", "a stream of 3.5"],
)
def test_a_refusal_is_told_in_the_words_of_each_version(status: int, answer: dict[str, Any]) -> None:
    with pytest.raises(EtcdRefused, match=r"h:1 refuses range: .*empty; it wants a user") as refused:
        read_answer("range", Endpoint("h", 1, False), status, json.dumps(answer).encode())
    assert refused.value.code == 3


def test_password(guarded: EtcdServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = EtcdClient(guarded.endpoints, user="job", password=PASSWORD)
    with pytest.raises(EtcdRefused, match="permission denied"):
        write(client, b"other/k", b"v")
    with pytest.raises(EtcdRefused, match="permission denied"):
        Following(Watch(client, Range(b"other/k"), 1), 1).values()
    write(client, b"job/k", b"1")
    assert client.read(Range(b"job/k"))[0].value == b"1"
    assert PASSWORD not in caplog.text and PASSWORD not in repr(client)
    caplog.clear()  # the errors in its records hold connections
    client.close()


def test_a_watch_logs_in_again(guarded: EtcdServer) -> None:
    """As often as etcd forgets the token; some versions then deny a watch the permission that it has."""
    client = EtcdClient(guarded.endpoints, user="job", password=PASSWORD)
    root = EtcdClient(guarded.endpoints, user="root", password="root's own")
    revision = write(client, b"job/k", b"0")
    watch = Watch(client, Range(b"job/k"), revision + 1)
    events = watch.events()
    for value in (b"1", b"2", b"3"):
        ask(root, "auth/user/changepw", {"name": "job", "password": PASSWORD})  # its tokens go
        watch._leave(client.current)
        write(client, b"job/k", value)
        assert Background(lambda: next(events).value).join() == value
    watch.close()
    events.close()
    client.close()
    root.close()


def test_a_store_needs_no_permission_outside_its_prefix(guarded: EtcdServer) -> None:
    arguments = {"user": "job", "password": PASSWORD, "timeout": timedelta(seconds=20)}
    with (
        contextlib.closing(EtcdStore(guarded.endpoints, "job", **arguments)) as store,
        contextlib.closing(store.clone()) as other,
    ):
        for key in ("k", f"{WAKE}1"):
            waiting = Background(lambda key=key: store.wait([key]))
            other.set(key, "1")
            waiting.join()
        assert store.add("counter", 2) == 2 and store.append("k", "2") is None
        assert store.get("k") == b"12" and store.delete_key("k")
        store.execute([Heartbeat("heart", 60.0)])
        assert read_heartbeat(other, "heart") > 0
        assert other.remove()


def test_wrong_password(guarded: EtcdServer) -> None:
    for user, password, message in (
        ("job", "wrong", "invalid user ID or password"),
        (None, None, "it wants a user and a password"),
    ):
        client = EtcdClient(guarded.endpoints, user=user, password=password)
        with pytest.raises(StoreError, match=message) as caught:
            write(client, b"job/k", b"v")
        assert guarded.endpoints in str(caught.value)
        assert PASSWORD not in str(caught.value) and "wrong" not in str(caught.value)
        client.close()


def test_password_that_nobody_wants(etcd: EtcdServer, name: Name) -> None:
    client = EtcdClient(etcd.endpoints, user="job", password=PASSWORD)
    write(client, name("k"), b"v")
    client.close()


# Certificates


class Certificates:
    """Certificates of one who signs them, in files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        authority = trustme.CA()
        self.ca = str(directory / "ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        issued = authority.issue_cert("127.0.0.1")
        self.cert, self.key = str(directory / "cert.pem"), str(directory / "key.pem")
        issued.cert_chain_pems[0].write_to_path(self.cert)
        issued.private_key_pem.write_to_path(self.key)


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates that fit each other."""
    return Certificates(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of somebody else."""
    return Certificates(tmp_path_factory.mktemp("certificates") / "theirs")


@pytest.fixture(scope="module")
def encrypted(ours: Certificates) -> Iterator[EtcdServer]:
    """An etcd that wants to see a certificate."""
    with EtcdServer(tls=EtcdTLS(ours.cert, ours.key, ours.ca)) as server:
        yield server


def test_certificates(encrypted: EtcdServer) -> None:
    client = encrypted.get_client()
    revision = write(client, b"k", b"v")
    following = Following(Watch(client, Range(b"k"), revision + 1), 1)
    write(client, b"k", b"1")
    assert following.values() == [b"1"]
    idle = Following(Watch(client, Range(b"other"), 1), 1)
    idle.watch.close()
    assert idle.values() == []
    client.close()


def test_wrong_certificates(encrypted: EtcdServer, ours: Certificates, theirs: Certificates) -> None:
    # What etcd says of the client's certificate may be lost with the connection that it closes.
    refused = "no TLS connection|whether the certificates are right"
    for given, message in (
        ({"ca": theirs.ca, "cert": ours.cert, "key": ours.key}, "no TLS connection"),
        ({"ca": ours.ca, "cert": theirs.cert, "key": theirs.key}, refused),
        ({"ca": ours.ca}, refused),
    ):
        client = EtcdClient(encrypted.endpoints, timeout=3.0, **given)
        with pytest.raises(StoreError, match=message):
            write(client, b"k", b"v")
        client.close()
    with pytest.raises(ValueError, match="cannot be used for etcd"):
        EtcdClient(encrypted.endpoints, ca=ours.ca, cert=ours.cert, key=theirs.key)


def test_tls_where_there_is_none_and_the_other_way_round(
    etcd: EtcdServer, encrypted: EtcdServer, ours: Certificates
) -> None:
    client = EtcdClient(etcd.endpoints, ca=ours.ca, timeout=0.3)
    with pytest.raises(StoreError, match="see whether it speaks TLS"):
        write(client, b"k", b"v")
    client = EtcdClient(encrypted.endpoints.replace("https://", "http://"), timeout=0.3)
    with pytest.raises(StoreError, match="https"):
        write(client, b"k", b"v")
