"""The agent as a class: results, failures, restarts and states."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_agents import ROLE, Alone, Metrics, agent, c10d, collected, fails, who
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.events.api import Event
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.launcher import api as launcher

from ft_wrapper.agent.elastic import (
    CannotStart,
    Counts,
    LocalElasticAgent,
    Policy,
    WorkerSpec,
    WorkerState,
)
from ft_wrapper.testing.etcd_server import free_port

TIMEOUT = 120.0
ALONE: dict[str, Any] = {"restart_policy": Policy.RANK}


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    with collected() as handler:
        yield handler


@pytest.fixture
def torchs_launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch's own launcher, with our agent in the place of torch's."""
    monkeypatch.setattr(launcher, "LocalElasticAgent", LocalElasticAgent)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # it sets that for good
    return launcher


# How it ends -----------------------------------------------------------------------------------------------


def test_functions_return_values(tmp_path: Path, metrics: Metrics) -> None:
    running = agent(tmp_path, who, 7, "local ${local_rank}", handler=c10d())
    assert running.get_worker_group().state is WorkerState.INIT
    result = running.run()
    group = running.get_worker_group()
    assert result.state is group.state is WorkerState.SUCCEEDED
    assert result.return_values == {
        rank: (7, f"local {rank}", group.workers[rank].id, str(rank)) for rank in range(2)
    }
    assert not result.failures
    assert metrics.states == ["healthy", "succeeded"]
    with pytest.raises(RuntimeError, match="make another one"):
        running.run()


def test_torchs_launcher_runs_it(
    tmp_path: Path, torchs_launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything that the launcher wants of an agent, its events for instance."""
    recorded: list[Event] = []
    monkeypatch.setattr(events, "record", lambda event, *_: recorded.append(event))
    config = torchs_launcher.LaunchConfig(
        1,
        1,
        1,
        run_id=uuid.uuid4().hex,
        rdzv_backend="ft",
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        rdzv_configs={"rank": 0, "timeout": 60},
        monitor_interval=0.01,
        logs_specs=DefaultLogsSpecs(str(tmp_path / "logs")),
        local_addr="127.0.0.1",
    )
    results = torchs_launcher.elastic_launch(config, who)(7)
    assert {rank: (result[0], result[-1]) for rank, result in results.items()} == {0: (7, "0")}
    (event,) = recorded
    assert event.name == "torchelastic.worker.status.SUCCEEDED"
    assert (event.metadata["role"], event.metadata["rdzv_backend"]) == ("default_role", "ft")


def test_how_long_something_took_is_an_event_of_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Event] = []
    monkeypatch.setattr(api, "record", lambda event, *_: recorded.append(event))
    running = agent(tmp_path, "true")
    with pytest.raises(KeyError), running.record_duration("LOADING"):
        raise KeyError
    (event,) = recorded
    assert event.name == "torchelastic.worker.status.LOADING"
    assert event.metadata["duration_ms"] >= 0 and event.metadata["raw_error"] is None
    try:
        raise ValueError("the agent's own")
    except ValueError:
        assert "the agent's own" in str(running.get_event_failed().metadata["raw_error"])


def test_the_end_of_each_worker_is_an_event_of_torchs(
    tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the end of all a metric; both as torch's agent tells them."""
    recorded: list[tuple[Event, str]] = []
    # Older torch has one handler for all.
    monkeypatch.setattr(api, "record", lambda event, handler="theirs": recorded.append((event, handler)))
    spec = WorkerSpec(
        ROLE,
        2,
        Alone(),
        entrypoint="sh",
        args=("-c", "[ $RANK = 0 ] && exec sleep 1000; exit 3"),
        max_restarts=1,
        monitor_interval=0.01,
        master_addr="127.0.0.1",
    )
    spec.event_log_handler = "theirs"
    running = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), restart_policy=Policy.GROUP)
    assert {rank: one.exitcode for rank, one in running.run().failures.items()} == {1: 3}
    assert running.counts == Counts(failures=2, restarts=1, rounds=2)
    assert running.remaining_restarts == 0
    assert {handler for _, handler in recorded} == {"theirs"}
    ended, failed = (event.metadata for event, _ in recorded)
    assert (ended["state"], ended["global_rank"], ended["raw_error"]) == ("TERMINATED", 0, None)
    assert (failed["state"], failed["global_rank"], failed["agent_restarts"]) == ("FAILED", 1, 1)
    assert json.loads(failed["metadata"]).get("exit_code", [3]) == [3]  # not in older torch
    names = ("run_success_with_retries", "run_success_no_retries", "run_failed_no_retries")
    assert metrics.end == {
        "flakiness": 100,
        "run_total": 1,
        "run_failed_with_retries": 1,
        **dict.fromkeys(names, 0),
    }


def test_the_store_of_the_workers_is_where_the_spec_says(tmp_path: Path) -> None:
    port = free_port()
    ports = f'[ "$MASTER_PORT" = {port} ]'
    spec = WorkerSpec(
        ROLE, 1, Alone(), entrypoint="sh", args=("-c", ports), master_addr="127.0.0.1", master_port=port
    )
    assert not LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path))).run().is_failed()


def test_another_health_check_takes_the_place_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "no port: no one reads it")

    class Server:
        stopped = 0

        def stop(self) -> None:
            self.stopped += 1

    server = Server()
    running = agent(tmp_path, "true", health_check_server=server)
    assert not running.run().is_failed() and server.stopped == 1
    assert abs(running._get_alive_time() - time.time()) < TIMEOUT


def test_a_function_that_raises(tmp_path: Path) -> None:
    result = agent(tmp_path, fails, "0", nproc=1).run()
    assert result.is_failed()
    assert not result.return_values
    (failure,) = result.failures.values()
    assert result.failures == {0: failure}
    assert (failure.local_rank, failure.exitcode) == (0, 1)
    assert failure.message["message"] == "ValueError: rank 0 does not want to"
    assert os.path.isfile(failure.error_file)


def test_what_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        agent(tmp_path, lambda: 1)
    with pytest.raises(TypeError, match="can be pickled"):
        agent(tmp_path, who, threading.Lock())


def test_failures_are_in_order(tmp_path: Path, metrics: Metrics) -> None:
    fifo = tmp_path / "noticed"
    os.mkfifo(fifo)
    metrics.on_state = lambda state: fifo.write_text("") if state == "unhealthy" else None  # type: ignore[assignment]
    script = f'[ $RANK = 1 ] || read _ < "{fifo}"; exit $((RANK + 3))'
    running = agent(tmp_path, "sh", "-c", script, **ALONE, max_rank_restarts=0)
    result = running.run()
    assert [(rank, one.exitcode) for rank, one in result.failures.items()] == [(1, 4), (0, 3)]
    assert result.state is running.get_worker_group().state is WorkerState.FAILED
    assert running.counts == Counts(failures=2, rounds=1)
    assert metrics.states == ["healthy", "unhealthy", "failed"]


def test_a_signal(tmp_path: Path, metrics: Metrics) -> None:
    metrics.on_state = lambda state: os.kill(os.getpid(), signal.SIGTERM) if state == "healthy" else None
    running = agent(tmp_path, "sleep", "1000")
    with pytest.raises(SignalException) as error:
        running.run()
    assert error.value.sigval == signal.SIGTERM
    assert running.get_worker_group().state is WorkerState.STOPPED


@pytest.mark.parametrize(
    ("error", "why"),
    [(RendezvousTimeoutError("no one came"), "no one came"), (RendezvousClosedError(), "the job is over")],
)
def test_no_round(tmp_path: Path, error: RendezvousError, why: str) -> None:
    class NobodyComes(Alone):
        def next_rendezvous(self) -> RendezvousInfo:
            raise error

    running = agent(tmp_path, "true", handler=NobodyComes())
    with pytest.raises(CannotStart, match=why):
        running.run()
    assert running.get_worker_group().state is WorkerState.UNKNOWN


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="start_method='fork'"):
        agent(tmp_path, "true", start_method="fork")


# Restarts --------------------------------------------------------------------------------------------------

FAILS_AT_FIRST = '[ "$TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS" = 1/2 ] || exit $LOCAL_RANK'


def test_a_restart_of_the_group(tmp_path: Path, metrics: Metrics) -> None:
    handler = Alone()
    running = agent(tmp_path, "sh", "-c", FAILS_AT_FIRST, max_restarts=2, handler=handler)
    assert running.run().state is WorkerState.SUCCEEDED
    assert metrics.states == ["healthy", "unhealthy", "stopped", "healthy", "succeeded"]
    assert metrics.remaining == [2, 2, 1, 1, 1]
    assert metrics.end["flakiness"] == 33 and metrics.end["run_success_with_retries"] == 1
    assert running.remaining_restarts == 1
    assert running.counts == Counts(failures=1, restarts=1, rounds=2)
    assert handler.was_shut_down


def test_a_change_of_the_nodes_does_not_count(tmp_path: Path, metrics: Metrics) -> None:
    class Noted(Alone):
        def next_rendezvous(self) -> RendezvousInfo:
            info = super().next_rendezvous()
            (tmp_path / f"round {self.rounds}").touch()
            return info

    handler = Noted()

    def wait_at_first(state: str) -> None:
        if state == "healthy" and handler.rounds == 1:
            handler.waiting = 1

    metrics.on_state = wait_at_first
    script = f'[ -e "{tmp_path}/round 2" ] || exec sleep 1000'
    running = agent(tmp_path, "sh", "-c", script, max_restarts=1, handler=handler)
    assert running.run().state is WorkerState.SUCCEEDED
    assert running.counts == Counts(rounds=2)
    assert running.remaining_restarts == 1
    assert metrics.states == ["healthy", "stopped", "healthy", "succeeded"]


def test_a_worker_is_replaced(tmp_path: Path, metrics: Metrics) -> None:
    script = f'echo $$ > "{tmp_path}/$RANK.$FT_WRAPPER_INCARNATION"; [ $RANK.$FT_WRAPPER_INCARNATION != 1.0 ]'
    running = agent(tmp_path, "sh", "-c", script, **ALONE)
    result = running.run()
    assert result.state is WorkerState.SUCCEEDED
    assert not result.failures
    ids = [worker.id for worker in running.get_worker_group().workers]
    assert ids == [int((tmp_path / name).read_text()) for name in ("0.0", "1.1")]
    assert running.counts == Counts(failures=1, replacements=1, rounds=1)
    assert metrics.states == ["healthy", "unhealthy", "healthy", "succeeded"]


# What workers find -----------------------------------------------------------------------------------------


def test_what_a_worker_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    script = f'env > "{tmp_path}/$RANK.env"; echo "$0" "$1" $$'
    running = agent(tmp_path, "sh", "-c", script, "${local_rank}", "${rank}", max_restarts=4)
    assert running.run().state is WorkerState.SUCCEEDED
    group = running.get_worker_group()
    for rank in range(2):
        lines = (tmp_path / f"{rank}.env").read_text().splitlines()
        expected = {
            "ROLE_NAME": ROLE,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_RUN_ID": "job",
        }
        assert {f"{name}={value}" for name, value in expected.items()} <= {*lines}
        # That is the wrapper's.
        assert not any(line.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING") for line in lines)
    # ${rank} is none of torch's macros, and a shell's own $$ stays.
    said = capfd.readouterr().out.splitlines()
    assert sorted(said) == [f"{worker.local_rank} ${{rank}} {worker.id}" for worker in group.workers]


def test_lines_have_the_prefix_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = WorkerSpec(ROLE, 2, Alone(), entrypoint="echo", args=("hello",), master_addr="127.0.0.1")
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
    prefix = "${role_name}/${rank}/${local_rank}/${other}: "
    LocalElasticAgent(spec, logs, log_line_prefix_template=prefix).run()
    lines = [f"{ROLE}/{rank}/{rank}/${{other}}: hello" for rank in range(2)]
    assert sorted(capsys.readouterr().out.splitlines()) == lines
