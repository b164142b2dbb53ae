"""`ftrun status`: how a running job stands, read from its store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from rank_harness import Job
from rejoin_job import Training, training

from ft_wrapper.cli import status
from ft_wrapper.cli.status import COMPLETED, NOT_FORMED, RUNNING, read_status, watch
from ft_wrapper.rendezvous.keys import endpoint_key
from ft_wrapper.rendezvous.moves import close
from ft_wrapper.rendezvous.record import Node, RendezvousRecord, Seat
from ft_wrapper.rendezvous.register import RecordRegister
from ft_wrapper.store import TCPStoreServer, connect
from ft_wrapper.testing import FakeStore


@pytest.fixture
def run(job: Job, tmp_path: Path) -> Iterator[Training]:
    """A training that nothing has been started of."""
    with training(job, tmp_path) as run:
        yield run


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
    assert status.main([endpoint, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iteration"] == 1
    assert status.main([endpoint]) == 0
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
    monkeypatch.setattr(status, "_follow", lambda *_: iter(found))
    assert status.main(["127.0.0.1:29400", "--watch"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if "iteration 3" in line] == [
        "running: iteration 3 of call 0, 1 of 1 ranks active",
        "completed: iteration 3 of call 0, 1 of 1 ranks active",
    ]
    assert "  1     2            -            gpu\ufffd[31m7  -\n" in shown
    assert "last fault: rank 1 raised [red]KeyError[/red]\n" in shown
    assert status.main(["127.0.0.1:29400", "--watch", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["state"] for line in lines] == [RUNNING, COMPLETED]


def test_ctrl_c_ends_it_at_once() -> None:
    """It waits for news of the job, for up to ten minutes."""
    with contextlib.closing(TCPStoreServer(0)) as server:
        command = [sys.executable, "-m", "ft_wrapper.run", "status", f"127.0.0.1:{server.port}"]
        with subprocess.Popen(
            [*command, "--watch", "--interval", "600"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
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


def test_a_job_whose_nodes_have_not_met_is_watched_until_they_have() -> None:
    node = Node("7", address="here")
    half = RendezvousRecord(2, 2, seats=(Seat(None, 0, 1, "default", node, "7"),))
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(contextlib.closing(TCPStoreServer(0)))
        endpoint = f"localhost:{server.port}"
        store = opened.enter_context(contextlib.closing(connect(endpoint, timedelta(seconds=10))))
        register = RecordRegister(store, RendezvousRecord(2, 2))
        first, _ = register.replace(register.read(), half)
        statuses = status._follow(endpoint, 60.0, opened)
        found = next(statuses)
        assert (found.state, [one.group_rank for one in found.nodes]) == (NOT_FORMED, [None])
        whole = dataclasses.replace(
            half, complete=True, seats=(dataclasses.replace(half.seats[0], group_rank=0),)
        )
        store.set(endpoint_key(0), endpoint)
        register.replace(first, whole)
        found = next(statuses)
        assert (found.state, [one.group_rank for one in found.nodes]) == (NOT_FORMED, [0])


@pytest.mark.parametrize("stays", [False, True], ids=["its store ends", "its store stays"])
def test_a_job_that_goes_to_another_round_is_watched_there(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "TIMEOUT", timedelta(seconds=0.5))
    node = Node("7", address="here")
    seat = Seat(0, 0, 1, "default", node, "7")
    record = RendezvousRecord(2, 2, complete=True, seats=(seat,))
    with contextlib.ExitStack() as opened:
        ends = [opened.enter_context(contextlib.ExitStack()) for _ in range(3)]
        servers = [end.enter_context(contextlib.closing(TCPStoreServer(0))) for end in ends]
        meeting, first, second = (f"localhost:{server.port}" for server in servers)
        store = opened.enter_context(contextlib.closing(connect(meeting, timedelta(seconds=10))))
        register = RecordRegister(store, RendezvousRecord(2, 2))
        snapshot, _ = register.replace(register.read(), record)
        store.set(endpoint_key(0), first)
        statuses = status._follow(meeting, 0.1, opened)
        assert [one.place for one in next(statuses).nodes] == ["seat"]
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
        (found,) = status._follow(f"localhost:{server.port}", 60.0, opened)
        assert found.state == NOT_FORMED


@pytest.mark.parametrize("endpoint", [[], ["host"], ["host:port"], [":29400"]])
def test_no_endpoint(
    endpoint: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FT_WRAPPER_STORE", raising=False)
    assert status.main(endpoint) == 2
    assert "give HOST:PORT" in capsys.readouterr().err


def test_a_store_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "TIMEOUT", timedelta(seconds=0.2))
    assert status.main(["127.0.0.1:1"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err
