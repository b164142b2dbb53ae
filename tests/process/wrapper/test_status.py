"""`ftrun status`: how a running job stands, read from its store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from rank_harness import Job
from rejoin_job import Training
from support.warm_ftrun import start_python

from ft_wrapper.attribution import Interruption
from ft_wrapper.cli import control, local, status
from ft_wrapper.cli import main as cli
from ft_wrapper.cli.main import main
from ft_wrapper.cli.status import COMPLETED, NOT_FORMED, RUNNING, read_status, watch
from ft_wrapper.protocol import Agreement
from ft_wrapper.protocol.global_iteration import GlobalIteration
from ft_wrapper.protocol.notice import Notice
from ft_wrapper.protocol.records import Decision, Fault, Member
from ft_wrapper.rendezvous.moves import add_drain, close, give_notice, remove_nodes
from ft_wrapper.rendezvous.record import Drain, Node, RendezvousRecord, RoundPolicy, Seat
from ft_wrapper.rendezvous.register import RecordRegister, endpoint_key
from ft_wrapper.store import TCPStoreServer, connect
from ft_wrapper.store.address import canonical
from ft_wrapper.testing import FakeStore


def test_the_status_of_a_job_from_its_begin_to_its_end(
    run: Training, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    host = os.uname().nodename
    assert read_status(run.store).state == NOT_FORMED
    run.start(4, active_world_size=3)
    job.expect("in", 0, 1, 2, n=0)
    seen = watch(run.store, 5.0)
    first = next(found for found in seen if found.state == RUNNING)
    assert (first.call, first.iteration, first.world_size, first.active_world_size) == (0, 0, 4, 3)
    assert first.last_faults is None
    assert [(rank.slot, rank.incarnation, rank.active_rank, rank.host, rank.pid) for rank in first.ranks] == [
        (slot, 0, slot if slot < 3 else None, host, job[slot].pid) for slot in range(4)
    ]
    gone = job[1].pid
    run.abort(1)
    job.expect("in", 0, 2, 3, n=1, world=3)
    second = next(found for found in seen if found.iteration == 1 and found.state == RUNNING)
    assert [rank.slot for rank in second.ranks] == [0, 2, 3]
    assert second.last_faults is not None
    assert f"(slot 1 on {host} pid {gone}) " in second.last_faults

    endpoint = run.env["FT_WRAPPER_STORE"]
    assert endpoint is not None
    assert main(["status", endpoint, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iteration"] == 1
    assert main(["status", endpoint]) == 0
    head, titles, *ranks, fault = capsys.readouterr().out.splitlines()
    assert head == "running: iteration 1 of call 0, 3 of 3 ranks active"
    assert titles.split() == ["slot", "incarnation", "active", "rank", "host", "pid"]
    assert [row.split()[0] for row in ranks] == ["0", "2", "3"]
    assert fault == f"last fault: {second.last_faults}"

    job.forget(1)
    run.finish()
    *_, last = seen
    assert last.state == COMPLETED


def test_watching_prints_each_status_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = status.RankStatus(1, 2, None, "gpu\x1b[31m7", None, False)
    job = status.Status(RUNNING, 0, 3, 1, 1, (rank,), "rank 1 raised [red]KeyError[/red]")
    found = [job, job, dataclasses.replace(job, state=COMPLETED)]
    monkeypatch.setattr(cli, "_statuses", lambda *_: iter(found))
    assert main(["status", "127.0.0.1:29400", "--watch"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if "iteration 3" in line] == [
        "running: iteration 3 of call 0, 1 of 1 ranks active",
        "completed: iteration 3 of call 0, 1 of 1 ranks active",
    ]
    assert "  1     2            -            gpu\ufffd[31m7  -\n" in shown
    assert "last fault: rank 1 raised [red]KeyError[/red]\n" in shown
    assert main(["status", "127.0.0.1:29400", "--watch", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["state"] for line in lines] == [RUNNING, COMPLETED]


def test_ctrl_c_ends_it_at_once() -> None:
    """It waits for news of the job, for up to ten minutes."""
    with contextlib.closing(TCPStoreServer(0)) as server:
        words = ["-m", "ft_wrapper.run", "status", f"127.0.0.1:{server.port}", "--watch", "--interval", "600"]
        with start_python(words) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("not formed")
                process.send_signal(signal.SIGINT)
                _, error = process.communicate(timeout=60)
                assert (process.returncode, "Traceback" in error) == (130, False)
            finally:
                process.kill()


def test_a_job_that_has_not_formed() -> None:
    found = read_status(FakeStore())
    assert found.to_text() == "not formed: no wrapped function has been entered by all ranks yet"
    assert json.loads(found.to_json())["iteration"] is None


@pytest.mark.parametrize("stays", [False, True], ids=["its store ends", "its store stays"])
def test_a_job_that_goes_to_another_round_is_watched_there(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "TIMEOUT", timedelta(seconds=0.5))
    node = Node("7", address="here")
    seat = Seat(0, 0, 1, "default", node, "7")
    notice = Notice("node 7", "SIGTERM", 9.0)
    record = RendezvousRecord(2, 2, complete=True, seats=(seat,), notice=notice)
    with contextlib.ExitStack() as opened:
        ends = [opened.enter_context(contextlib.ExitStack()) for _ in range(3)]
        servers = [end.enter_context(contextlib.closing(TCPStoreServer(0))) for end in ends]
        meeting, first, second = (f"localhost:{server.port}" for server in servers)
        store = opened.enter_context(contextlib.closing(connect(meeting, timedelta(seconds=10))))
        register = RecordRegister(store, RendezvousRecord(2, 2))
        snapshot, _ = register.replace(register.read(), record)
        store.set(endpoint_key(0), first)
        statuses = control.follow(meeting, 0.1, opened)
        seen = next(statuses)
        assert [one.place for one in seen.nodes] == ["seat"]
        assert seen.to_text().endswith("\nlast notice: node 7: SIGTERM")
        if not stays:
            ends[1].close()
        begun = dataclasses.replace(record, round=1, complete=False)
        snapshot, _ = register.replace(snapshot, begun)
        found = next(statuses)
        assert (found.state, [one.group_rank for one in found.nodes]) == (NOT_FORMED, [None])
        snapshot, _ = register.replace(snapshot, dataclasses.replace(begun, complete=True))
        store.set(endpoint_key(1), second)
        assert [one.group_rank for one in next(statuses).nodes] == [0]
        if not stays:
            ends[2].close()
            # Another job may have taken its port.
            opened.enter_context(contextlib.closing(TCPStoreServer(servers[2].port)))
        register.replace(snapshot, close(dataclasses.replace(begun, complete=True), "rank 0 failed"))
        assert list(statuses) == [], "the job is over, which is no error"


def test_a_job_that_has_ended_before_its_nodes_met_is_not_watched() -> None:
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(contextlib.closing(TCPStoreServer(0)))
        store = opened.enter_context(
            contextlib.closing(connect(f"localhost:{server.port}", timedelta(seconds=10)))
        )
        register = RecordRegister(store, RendezvousRecord(2, 2))
        register.replace(register.read(), close(RendezvousRecord(2, 2), "too few"))
        (found,) = control.follow(f"localhost:{server.port}", 60.0, opened)
        assert found.state == NOT_FORMED


def test_the_lost_host_is_blamed_and_not_what_failed_in_its_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the line of the restart has it: the loss shows only after the iteration has ended."""
    store = FakeStore()
    survivor, lost = Member(0, 0), Member(1, 0)
    gloo = Fault(survivor, 0, Interruption.EXCEPTION, "raised RuntimeError: Connection reset by peer", "a", 1)
    Agreement(store).ends.report_fault(0, gloo)
    decision = Decision(0, 1, 0, (lost,), (1,), (), (), (), 2, 1)
    view = SimpleNamespace(n=1, call=0, members=(survivor,), decision=decision)
    monkeypatch.setattr(GlobalIteration, "read_current", lambda _: view)
    found = read_status(store)
    assert (found.state, found.last_faults) == (
        RUNNING,
        "slot 1 stopped answering: evicted (and 1 fault in its wake)",
    )


def test_a_rank_that_was_drained_has_not_died(monkeypatch: pytest.MonkeyPatch) -> None:
    store, (goes_on, drained, lost) = FakeStore(), (Member(slot, 0) for slot in range(3))
    ends = Agreement(store).ends
    was_drained = Fault(drained, 1, Interruption.DRAINED, "was drained", "a", 1)
    ends.log_deaths(1, {drained: was_drained, lost: None}, ends=True)
    decision = Decision(0, 1, 0, (), (), (), (), (), 3, 1)
    view = SimpleNamespace(n=1, call=0, members=(goes_on, drained, lost), decision=decision)
    monkeypatch.setattr(GlobalIteration, "read_current", lambda _: view)
    found = read_status(store)
    assert [rank.left for rank in found.ranks] == ["", "drained", "died"]
    rows = found.to_text().splitlines()[2:5]
    assert [row.split()[2] for row in rows] == ["-", "drained", "died"]


def test_a_node_that_is_gone_keeps_its_address_and_says_whether_it_was_drained() -> None:
    nodes = [Node(name, address=f"host{name}") for name in "abc"]
    seats = tuple(Seat(rank, rank, 1, "default", node, node.id) for rank, node in enumerate(nodes))
    record = RendezvousRecord(1, 3, complete=True, policy=RoundPolicy.RANK, next_slot=3, seats=seats)
    record = add_drain(record, Drain(nodes[1].name, (), 30.0))
    record = give_notice(record, Notice("node c", "SIGTERM", leaving=(nodes[2].name,)))
    assert [node.place for node in status.nodes_in(record)] == ["seat", "leaving", "leaving"]
    record, _ = remove_nodes(RendezvousRecord.from_json(record.to_json(), "key"), nodes[1:])
    found = status.nodes_in(RendezvousRecord.from_json(record.to_json(), "key"))
    assert [(node.id, node.place, node.slots, node.address) for node in found] == [
        ("a", "seat", (0, 0), "hosta"),
        ("b", "drained", (1, 1), "hostb"),
        ("c", "lost", (2, 2), "hostc"),
    ]


# Which job it is -------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sockets are of what runs on this host: nothing but what a test starts."""
    monkeypatch.delenv("FT_WRAPPER_STORE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ft_wrapper-{os.geteuid()}"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """How the jobs stand, by their endpoints."""
    found = {"127.0.0.1:7": status.Status(RUNNING, 0, 3).to_json(), "h:8": ""}
    monkeypatch.setattr(control, "read_now", lambda endpoint: found[endpoint])
    return found


def job_at(endpoint: str, *more: str, pid: int = 1) -> Callable[[], local.LocalJob]:
    return lambda: local.LocalJob([endpoint, *map(canonical, (endpoint, *more))], f"{pid}.py", pid)


def test_an_agent_on_this_host_answers(
    here: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    node = status.NodeStatus("7", "seat", 0, (0, 1), 0, "here")
    rank = status.RankStatus(1, 2, None, "gpu7", None, "")
    whole = status.Status(RUNNING, 0, 3, 1, 1, (rank,), "rank 1 died", (node,))
    answers["127.0.0.1:7"] = whole.to_json()
    with local.served(job_at("127.0.0.1:7", "h:9")):
        (path,) = here.iterdir()
        for words in ([], ["127.0.0.1:7"], ["localhost:7"], ["h:9"]):
            assert main(["status", *words]) == 0
            assert capsys.readouterr().out == f"{whole.to_text()}\n"
        assert main(["status", "--json"]) == 0
        assert status.Status.from_json(capsys.readouterr().out) == whole
    assert not path.exists()


def test_one_of_several_jobs_has_to_be_named(
    here: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with local.served(job_at("127.0.0.1:7")), local.served(job_at("h:8", pid=2)), local.served(job_at("h:8")):
        assert main(["status"]) == 0
        first, second = sorted(capsys.readouterr().out.splitlines())
        assert first == "ftrun status 127.0.0.1:7  # 1.py, pid 1"
        assert second.startswith("ftrun status h:8  # ")
        assert main(["status", "--json"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sorted(json.loads(line)["names"][0] for line in lines) == ["127.0.0.1:7", "h:8"]


def test_agents_that_are_gone_are_not_asked_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with local.served(job_at("h:8")):  # it makes the folder
        pass
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as begins:
        dead.bind(str(here / "dead"))
        begins.bind(str(here / "begins.new"))
    assert main(["status"]) == 2
    assert "no ftrun of this user runs on this host; give HOST:PORT" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["begins.new"]


def test_a_folder_that_others_may_enter_is_not_used(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    here.mkdir()
    here.chmod(0o755)
    with caplog.at_level("INFO"), local.served(job_at("h:8")):
        assert local.jobs_here() == []
    assert "finds this job only by its endpoint" in caplog.text
    assert list(here.iterdir()) == []


def test_what_an_agent_does_not_know_is_read_from_the_store(
    here: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(TCPStoreServer(0)) as server:
        endpoint = f"127.0.0.1:{server.port}"
        answers[endpoint] = ""
        with local.served(job_at(endpoint)):
            assert main(["status"]) == 0
        assert capsys.readouterr().out.startswith("not formed")


def test_a_job_whose_store_does_not_answer_is_found_all_the_same(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over = threading.Event(), threading.Event()

    def read_now(endpoint: str) -> str:
        asked.set()
        over.wait(60)
        return ""

    monkeypatch.setattr(control, "read_now", read_now)
    monkeypatch.setattr(local, "_PATIENCE", 0.2)
    with local.served(job_at("h:8")):
        assert [(job.pid, said) for job, said in local.jobs_here()] == [(1, "")]
        assert asked.is_set()
        over.set()


@pytest.mark.parametrize("endpoint", [[], ["host"], ["host:port"], [":29400"]])
def test_no_endpoint(endpoint: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *endpoint]) == 2
    assert "give HOST:PORT" in capsys.readouterr().err


def test_a_store_that_does_not_answer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for endpoint in ("127.0.0.1:1", "etcd://127.0.0.1:1,127.0.0.1:1/job"):
        assert main(["status", endpoint]) == 2
        assert f"nothing listens at {endpoint}: " in capsys.readouterr().err


def test_what_uses_no_store_imports_no_torch(here: Path) -> None:
    wrong = "status localhost:1, drain 0 localhost:1, report /no, stop h, drain slot: h:1, restart --help"
    code = f"""
import contextlib, sys
from ft_wrapper.cli.main import main
for words in "{wrong}, stauts, --version".split(", "):
    with contextlib.suppress(SystemExit):
        main(words.split())
    assert "torch" not in sys.modules, words
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
