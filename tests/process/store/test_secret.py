"""The job's secret: who gets it, and what is done with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ft_wrapper.exception import StoreError
from ft_wrapper.monitor.service import MonitorService
from ft_wrapper.protocol.operations import (
    Append,
    CompareAndSet,
    Read,
    ReadLog,
    SetIfAbsent,
    Write,
    read,
    set_if_absent,
)
from ft_wrapper.protocol.seal import Seal
from ft_wrapper.store import StoreMixin, TCPStore, TCPStoreServer, secret

OWN = b"a secret of the job's own"
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process that does not know of any secret."""
    monkeypatch.setattr(secret, "_known", [])
    monkeypatch.setattr(secret, "_warned", [])
    monkeypatch.delenv(secret.AGENT_ENV, raising=False)
    monkeypatch.delenv(secret.SECRET_ENV, raising=False)


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with contextlib.closing(TCPStoreServer(0)) as server:
        yield server


@contextlib.contextmanager
def client(server: TCPStoreServer) -> Iterator[TCPStore]:
    with contextlib.closing(TCPStore("localhost", server.port)) as store:
        yield store


def seal(of: bytes = OWN, store: str = "store") -> Seal:
    return Seal(of, store, lambda key: None)


# Seals -----------------------------------------------------------------------------------------------------


@given(some.text(), some.text(some.characters(exclude_categories=["Cs"])))
def test_what_is_sealed_is_read_again(key: str, text: str) -> None:
    line = text.replace("\n", " ")
    for each in (line, f"{line}\n{line}"):
        if each.splitlines() == each.split("\n"):  # a text in the store has lines of one kind
            assert seal().check("a" + key, seal().close("a" + key, each)) == each


@given(some.text(), some.text())
def test_nothing_else_is(key: str, text: str) -> None:
    closed = seal().close("key", "text")
    assert seal().check("key", text) is None
    for other in (seal(OWN + b"!"), seal(store="another"), seal(b"")):
        assert other.check("key", closed) is None
    assert seal().check("key" + key + "!", closed) is None
    for at in range(len(closed)):
        assert (
            seal().check("key", closed[:at] + ("0" if closed[at] != "0" else "1") + closed[at + 1 :]) is None
        )


def test_of_a_log_the_own_lines_are_read() -> None:
    one, two = seal().close("log", "one"), seal().close("log", "two")
    assert seal().check("log", f"{one}\nforged\n{two}\n\n") == "one\ntwo"


def test_who_has_no_secret_reads_and_does_not_write() -> None:
    blind = Seal(None, "store", lambda key: None)
    assert blind.check("key", seal().close("key", "text")) == "text"
    with pytest.raises(StoreError, match="set FT_WRAPPER_SECRET to it"):
        blind.close("key", "text")


@pytest.mark.parametrize("store", ["fake", "tcp", "etcd"], indirect=True)
@pytest.mark.parametrize("forged", [b"", b"d", b"a \xff"], ids=repr)
def test_each_step_is_sealed(store: StoreMixin, forged: bytes) -> None:
    with contextlib.closing(store.clone()) as own, contextlib.closing(store.clone()) as stranger:
        own.seal = seal()
        own.execute([Write({"text": "a", "other": "b"}), Append("log", "c"), SetIfAbsent("register", "d")])
        steps = [
            Read("text"),
            Read("other"),
            ReadLog("log"),
            CompareAndSet("register", "d", "e"),
            SetIfAbsent("register", "f"),
        ]
        assert own.execute(steps) == ["a", "b", "c", "e", "e"]
        for key in ("text", "other", "register"):
            stranger.set(key, forged)
        stranger.append("log", forged + b"\n")
        assert own.execute([*steps[:3], Read("absent"), SetIfAbsent("register", "f")]) == [
            "a",
            "b",
            "c",
            None,
            "f",
        ]
        stranger.set("register", forged)
        assert own.execute([CompareAndSet("register", "f", "g")]) == ["g"] if forged else [None]


def test_a_register_that_is_overwritten_twice_is_named(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(server) as own, client(server) as stranger:
        own.seal = seal()
        call, forgeries = own._call, iter(("one", "two"))

        def beaten(name: str, *arguments: object) -> object:
            stranger.set("register", next(forgeries))
            return call(name, *arguments)

        monkeypatch.setattr(own, "_call", beaten)
        with pytest.raises(StoreError, match="register"):
            set_if_absent(own, "register", "own")
        assert stranger.get("register") == b"two"


# Who gets it -----------------------------------------------------------------------------------------------


def test_that_of_the_environment_is_not_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.SECRET_ENV, "0123456789abcdef")
    assert secret.job_secret() == b"0123456789abcdef"
    assert secret.SECRET_ENV not in os.environ
    assert secret.job_secret() == b"0123456789abcdef"


@pytest.mark.parametrize("text", ["0123456789abcde", " 0123456789abcde\n", "x" * 4097])
def test_one_that_cannot_be_right(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(secret.SECRET_ENV, text)
    with pytest.raises(
        ValueError, match=r"FT_WRAPPER_SECRET: a secret has 16 to 4096 bytes, this one has \d+"
    ):
        secret.job_secret()


def test_processes_of_the_user_get_it_from_the_agent(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret.use(OWN)
    with contextlib.closing(MonitorService("job")) as agent, client(server) as own:
        secret.announce(own, agent.name, "record")
        closed = own.seal.close("key", "text") if own.seal else ""

        def found_by(user: int) -> None:
            secret._known.clear()
            os.environ[secret.AGENT_ENV] = agent.name
            os.setuid(user)
            with client(server) as store:
                seal = secret.found_seal(store)
                assert seal is not None and seal.check("key", closed) == "text"
            # Who does not get it reads all the same, unverified.
            assert secret.job_secret() == (OWN if user == us else None)
            assert secret.SECRET_ENV not in os.environ

        us = os.geteuid()
        for user in (us, *([65534] * (us == 0))):
            process = FORK.Process(target=found_by, args=(user,))
            process.start()
            process.join(60)
            code = process.exitcode
            process.kill()
            process.join()
            assert code == 0, user


def test_a_node_without_it_says_what_it_lacks(server: TCPStoreServer) -> None:
    secret.use(OWN)
    with client(server) as own:
        secret.announce(own, "agent", "record")
        own.execute([Write({"record": "1"})])
    secret.use(None)
    with (
        client(server) as other,
        pytest.raises(StoreError, match="the job has a secret: set FT_WRAPPER_SECRET"),
    ):
        secret.announce(other, "agent", "record")
    secret.use(OWN + b"!")
    with client(server) as other, pytest.raises(StoreError, match="'record' was not written with the secret"):
        secret.announce(other, "agent", "record")


def test_an_open_job_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    secret.use(None)
    for _ in range(2):
        secret.warn_if_open("host:1")
    assert [line.getMessage()[:28] for line in caplog.records] == ["the store at host:1 is open:"]
    secret.use(OWN)
    secret.warn_if_open("host:2")
    assert len(caplog.records) == 1


def test_a_forged_key_is_named_once(server: TCPStoreServer, caplog: pytest.LogCaptureFixture) -> None:
    secret.use(OWN)
    with client(server) as own:
        own.set("key", "forged")
        assert [read(own, "key") for _ in range(3)] == [None] * 3
    assert [line.levelname for line in caplog.records] == ["ERROR"]
    assert "key key was not written with this job's secret" in caplog.text


def test_a_record_that_another_node_writes_meanwhile_is_the_jobs_own(
    server: TCPStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret.use(OWN)
    with client(server) as store, client(server) as other:
        check = store.check

        def late(keys: list[str]) -> bool:
            set_if_absent(other, "record", "text")
            return check(keys)

        monkeypatch.setattr(store, "check", late)
        secret.announce(store, "agent", "record")
