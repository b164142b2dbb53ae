"""The health endpoint: what it answers, and how it wakes a loop that sleeps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
from elastic_agents import ROLE, Alone, agent, collected

from ft_wrapper.agent.elastic import CannotStart, Policy, WorkerState
from ft_wrapper.agent.group import Group
from ft_wrapper.agent.health import _MOST_CONNECTIONS, NOTICE, Health, _Handler, application, facts, health
from ft_wrapper.agent.nodes import Inbox, Nodes
from ft_wrapper.agent.rounds import What
from ft_wrapper.run import main
from ft_wrapper.store.address import host_port, is_this_host
from ft_wrapper.testing.etcd_server import free_port

TIMEOUT = 120.0
PORT = "use a port's number, HOST:PORT or "


def get(port: int, path: str = "/", host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host_port(host, port)}{path}", timeout=TIMEOUT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with contextlib.closing(Nodes()) as made:
        yield made


@pytest.fixture
def inbox(nodes: Nodes) -> Inbox:
    return nodes.inbox


def group() -> Group:
    return Group(ROLE, 2, max_restarts=3)


def serve(nodes: Nodes, timeout: float = TIMEOUT, host: str = "") -> Health:
    return Health(host, 0, application(group(), nodes, "job", timeout), nodes.inbox)


def test_a_loop_that_does_not_come_round(nodes: Nodes) -> None:
    with serve(nodes, 0.05) as health:
        code, body = get(health.server_port)
    assert code == 503
    assert json.loads(body)["alive"] is False


def test_nobody_has_to_come_round_while_the_nodes_come_together(nodes: Nodes) -> None:
    with serve(nodes) as health, nodes.inbox.unattended():
        code, body = get(health.server_port)
    assert (code, json.loads(body)["state"]) == (200, "INIT")


def test_who_asks_while_the_loop_goes_on_to_the_next_round_is_answered(inbox: Inbox) -> None:
    assert not inbox.is_attended(0)
    assert select.select([inbox], [], [], 0)[0], "the loop is woken"
    with inbox.unattended():
        assert inbox.is_attended(0)
    for look in (inbox.take, lambda: inbox.unattended().__enter__(), inbox.close):
        inbox.take()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(inbox.is_attended, TIMEOUT)
            assert select.select([inbox], [], [], TIMEOUT)[0]
            look()
            assert asked.result()
    assert inbox.is_attended(0)


def test_the_end_waits_for_nobody(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a client that says nothing, nor for one whose answer no one gives."""
    monkeypatch.setattr(_Handler, "timeout", TIMEOUT * 10)
    answers: list[tuple[int, str]] = []
    with contextlib.ExitStack() as clients:
        with serve(nodes, TIMEOUT * 10) as health:
            clients.enter_context(socket.create_connection(("127.0.0.1", health.server_port)))
            asking = threading.Thread(target=lambda: answers.append(get(health.server_port)))
            asking.start()
            assert select.select([nodes.inbox], [], [], TIMEOUT)[0], "it has asked"
        asking.join(TIMEOUT)
    assert [code for code, _ in answers] == [200]


def test_further_connections_are_closed(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing use up neither the agent's files nor its threads."""
    monkeypatch.setattr(_Handler, "timeout", TIMEOUT * 10)
    with serve(nodes) as health, nodes.inbox.unattended(), contextlib.ExitStack() as clients:
        address = ("127.0.0.1", health.server_port)
        silent, *_ = (
            clients.enter_context(socket.create_connection(address, TIMEOUT))
            for _ in range(_MOST_CONNECTIONS)
        )
        with socket.create_connection(address, TIMEOUT) as further:
            assert further.recv(1) == b""
        silent.shutdown(socket.SHUT_WR)
        assert silent.recv(1) == b""
        assert get(health.server_port)[0] == 200


def test_a_request_in_parts_gets_no_more_time(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Handler, "timeout", 0.3)
    with (
        serve(nodes) as health,
        socket.create_connection(("127.0.0.1", health.server_port)) as slow,
        pytest.raises(OSError, match=r"reset|Broken pipe"),
    ):
        for _ in range(3000):
            slow.sendall(b"x")
            select.select([slow], [], [], 0.01)


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_a_request_in_two_parts_is_answered(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    waits, wait = threading.Semaphore(0), connection.wait

    def note(*arguments: Any) -> list[Any]:
        waits.release()
        return wait(*arguments)

    monkeypatch.setattr(connection, "wait", note)
    monkeypatch.setattr(_Handler, "timeout", TIMEOUT)
    with (
        serve(nodes) as health,
        nodes.inbox.unattended(),
        socket.create_connection(("127.0.0.1", health.server_port), TIMEOUT) as client,
    ):
        client.sendall(f"GET / HTTP/1.0{end}X: ".encode())
        for _ in range(2):  # for this part, and for the next one
            assert waits.acquire(timeout=TIMEOUT)
        client.sendall(f"y{end}{end}".encode())
        assert client.recv(12) == b"HTTP/1.0 200"


def test_an_agent_that_sleeps_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(port))
    fifo = tmp_path / "go on"
    os.mkfifo(fifo)
    answers: dict[str, Any] = {}

    def ask() -> None:
        answers["code"], body = get(port)
        answers["body"] = json.loads(body)
        answers["metrics"] = get(port, "/metrics")[1]
        fifo.write_text("")

    asking = threading.Thread(target=ask)

    def happen(state: str) -> None:
        if state == "healthy" and running.counts.replacements == 1:
            asking.start()

    with collected() as metrics:
        metrics.on_state = happen
        script = f'[ $FT_WRAPPER_INCARNATION = 1 ] || exit 7; read _ < "{fifo}"; exit 0'
        running = agent(tmp_path, "sh", "-c", script, nproc=1, max_restarts=2, restart_policy=Policy.RANK)
        assert running.run().state is WorkerState.SUCCEEDED
    asking.join(TIMEOUT)
    assert answers["code"] == 200
    (worker,) = running.get_worker_group().workers
    assert answers["body"] == {
        "alive": True,
        "state": "HEALTHY",
        "role": ROLE,
        "group_rank": 0,
        "ranks": {"0": worker.id},
        "restarts": 0,
        "remaining_restarts": 2,
        "rank_failures": 1,
        "rank_replacements": 1,
    }
    pytest.importorskip("prometheus_client")
    assert 'ft_wrapper_replacements_total{run_id="job"} 1.0\n' in answers["metrics"]
    with pytest.raises(OSError):
        get(port)  # it has ended with the agent


def test_metrics_do_not_wait_for_the_loop(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what one wants to see of an agent that is stuck."""
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(nodes.inbox, "is_attended", lambda _: pytest.fail("the loop was asked"))
    known = group()
    known.failed(1)
    with Health("", 0, application(known, nodes, "job", TIMEOUT), nodes.inbox) as health:
        code, body = get(health.server_port, "/metrics")
    assert code == 200
    assert 'ft_wrapper_ranks{run_id="job",state="gone"} 1.0' in body
    assert 'ft_wrapper_workers_state{run_id="job",state="init"} 1.0' in body
    assert "ft_wrapper_step{" not in body, "what is not known is left out"


@pytest.mark.parametrize(("path", "what"), [("/drain", What.LEAVE), ("/notice", What.CHECKPOINT)])
def test_a_request_by_http_reaches_the_loop(nodes: Nodes, path: str, what: What) -> None:
    def post(query: str) -> int:
        asked = urllib.request.Request(f"http://127.0.0.1:{health.server_port}{path}{query}", method="POST")
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            return int(answer.status)

    with serve(nodes) as health:
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post("?within=soon")
        assert [post("?within=45"), post("")] == [202, 202]
    notices = [(news.what, news.why, news.within) for news in nodes.inbox.take()]
    assert notices == [(what, "asked by HTTP", 45.0), (what, "asked by HTTP", NOTICE)]


def test_metrics_need_the_extra(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with serve(nodes) as health:
        code, body = get(health.server_port, "/metrics")
    assert code == 404
    assert "ft-wrapper[prometheus]" in body


def test_facts_name_no_rank_before_there_are_any() -> None:
    assert facts(group())["ranks"] == {}


@pytest.mark.parametrize(
    ("where", "asked", "others"),
    [
        ("localhost:0", "127.0.0.1", "127.0.0.2"),
        ("[::1]:0", "::1", "127.0.0.1"),
        (":0", "127.0.0.1", "127.0.0.2"),
        ("0.0.0.0:0", "127.0.0.2", ""),
    ],
)
def test_where_it_answers(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, where: str, asked: str, others: str
) -> None:
    """At the loopback, at another address, or at all; 127.0.0.2 is this host, too."""
    if ":" in asked and not is_this_host(asked):
        pytest.skip("this host has no IPv6")
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", where)
    with health(group(), nodes, "job") as server, nodes.inbox.unattended():
        assert server is not None
        assert get(server.server_port, host=asked)[0] == 200
        if others:
            with pytest.raises(OSError):
                get(server.server_port, host=others)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(("PORT", port, PORT) for port in ("70000", "", "127.0.0.1:-1", "::1")),
        ("PORT", "203.0.113.1:0", "Cannot assign requested address; choose a name"),
        ("PORT", "no such.invalid:0", "[^;]*; choose a name or address of this host"),
        ("TIMEOUT", "0", "use a number of seconds"),
    ],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "0")
    variable = f"TORCHELASTIC_HEALTH_CHECK_{name}"
    monkeypatch.setenv(variable, value)
    handler = Alone()
    with pytest.raises(CannotStart, match=f"{variable}={re.escape(value)}: {words}"):
        agent(tmp_path, "true", handler=handler).run()
    assert handler.rounds == 0


def test_a_second_agent_on_a_host_runs_without_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(port))
        assert main(["--no-python", "touch", str(tmp_path / "started")]) == 0
    (said,) = [message for message in caplog.messages if "HEALTH_CHECK" in message]
    assert f"TORCHELASTIC_HEALTH_CHECK_PORT={port}: another program has this port" in said
    assert (tmp_path / "started").exists()
