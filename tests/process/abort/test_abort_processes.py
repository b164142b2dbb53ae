"""Helper processes of a function are ended, and no others."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
from abort_ranks import TIMEOUT, Rank, RunRanks
from support.ended import has_ended
from support.nightly import at_night

from ft_wrapper.abort import AbortProcesses, AbortTransformerEngine, protect_processes
from ft_wrapper.state import FrozenState

STATE = FrozenState(rank=0, world_size=1)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@pytest.fixture
def helpers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that end on SIGTERM, and one that does not."""
    processes = [
        subprocess.Popen(["sleep", "1000"], preexec_fn=before) for before in (None, None, ignore_sigterm)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.wait(TIMEOUT)


def test_only_what_is_found_is_ended(helpers: list[subprocess.Popen[bytes]]) -> None:
    first, second, _ = helpers
    assert AbortProcesses([first.pid], None, timedelta(days=30))(STATE) is STATE
    assert first.wait(TIMEOUT) == -15  # its starter still gets its exit status
    assert second.poll() is None


def test_who_ignores_sigterm_is_killed(helpers: list[subprocess.Popen[bytes]]) -> None:
    find = [psutil.Process(helpers[2].pid)]
    AbortProcesses(lambda: find, termination_grace_time=timedelta(seconds=0.1))(STATE)
    assert helpers[2].wait(TIMEOUT) == -9


def test_who_is_stopped_ends_by_sigterm_all_the_same(helpers: list[subprocess.Popen[bytes]]) -> None:
    helpers[0].send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, helpers[0].pid, os.WSTOPPED | os.WNOWAIT)
    AbortProcesses([helpers[0].pid], termination_grace_time=TIMEOUT)(STATE)
    assert helpers[0].wait(TIMEOUT) == -15


def test_the_monitor_process_is_never_ended(
    helpers: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    monitor, other, _ = helpers
    abort = AbortProcesses(lambda: [monitor.pid, other.pid, os.getpid(), os.getppid(), 0, -1])
    with protect_processes(monitor.pid), caplog.at_level(logging.WARNING, "ft_wrapper"):
        abort(STATE)
    assert other.wait(TIMEOUT) == -15
    assert monitor.poll() is None
    assert f"process {monitor.pid} is not ended" in caplog.text
    abort(STATE)
    assert monitor.wait(TIMEOUT) == -15


def test_a_process_that_is_gone_is_no_error(helpers: list[subprocess.Popen[bytes]]) -> None:
    gone = psutil.Process(helpers[0].pid)
    helpers[0].kill()
    helpers[0].wait(TIMEOUT)
    AbortProcesses([gone, gone.pid])(STATE)


def forked_data_loader_workers(rank: Rank) -> Any:
    return data_loader_workers("fork")


def served_data_loader_workers(rank: Rank) -> Any:
    return data_loader_workers("forkserver")  # not children of this process


def data_loader_workers(method: str) -> Any:
    import torch.utils.data

    helper = subprocess.Popen(["sleep", "1000"])
    data: Any = list(range(4))
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    loader = torch.utils.data.DataLoader(
        data, num_workers=2, persistent_workers=True, multiprocessing_context=method
    )
    batches: Any = iter(loader)
    list(batches)  # both have answered, and wait for the next epoch
    workers = [psutil.Process(worker.pid) for worker in batches._workers]
    AbortProcesses()(STATE)
    ended = [has_ended(worker) for worker in workers]
    lives = helper.poll() is None
    helper.kill()
    helper.wait(TIMEOUT)
    return ended, lives


class Hangs:
    """A dataset whose worker tells of its start, and answers no more."""

    def __init__(self) -> None:
        self.begun = multiprocessing.get_context("fork").Semaphore(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.begun.release()
        signal.pause()
        return index


def hung_torchdata_workers(rank: Rank) -> Any:
    """Whether they are ended, and are so before SIGKILL: within the grace time."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Hangs()
    loader = StatefulDataLoader(data, num_workers=2, multiprocessing_context="fork", snapshot_every_n_steps=1)
    thread = threading.Thread(target=lambda: next(iter(loader)), daemon=True)
    thread.start()
    begun = [data.begun.acquire(timeout=TIMEOUT) for _ in range(2)]
    children = multiprocessing.active_children()
    AbortProcesses(termination_grace_time=TIMEOUT)(STATE)
    codes = [child.exitcode for child in children]
    return begun, codes


@pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed: pip install torchdata"
)
def test_hung_workers_of_torchdata_are_ended_within_the_grace_time(run_ranks: RunRanks) -> None:
    ended = run_ranks(hung_torchdata_workers, world_size=1)
    assert ended == [[[True, True], [0, 0]]]  # torch's own handler of SIGTERM


@pytest.mark.parametrize(
    "body", [forked_data_loader_workers, *at_night("forked ones run always", [served_data_loader_workers])]
)
def test_data_loader_workers_are_ended_by_default(run_ranks: RunRanks, body: Callable[[Rank], Any]) -> None:
    assert run_ranks(body, world_size=1) == [[[True, True], True]]


def test_processes_of_a_wrong_type() -> None:
    wrong: list[Any] = ["1234", 1234, b"1"]
    for processes in wrong:
        with pytest.raises(TypeError, match="processes="):
            AbortProcesses(processes)
    for found in ("1", True, None, 1.0):
        with pytest.raises(TypeError, match="pids or psutil"):
            AbortProcesses(lambda found=found: [found])(STATE)  # type: ignore[misc]


def test_another_users_process_is_named_and_not_waited_for(
    helpers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(process: psutil.Process, signum: int) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "send_signal", refuse)
    with caplog.at_level(logging.WARNING, "ft_wrapper"):
        AbortProcesses([helpers[0].pid], termination_grace_time=10 * TIMEOUT)(STATE)
    assert f"process {helpers[0].pid} cannot be ended" in caplog.text
    assert "still running" not in caplog.text


@pytest.mark.parametrize(
    ("grace", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)]
)
def test_a_wrong_grace_time(grace: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="termination_grace_time="):
        AbortProcesses(termination_grace_time=grace)


def test_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "transformer_engine" not in sys.modules
    assert AbortTransformerEngine()(STATE) is STATE
    assert "transformer_engine" not in sys.modules
    destroyed = []
    base = types.ModuleType("transformer_engine.pytorch.module.base")
    base.destroy_ub = lambda: destroyed.append(True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, base.__name__, base)
    AbortTransformerEngine()(STATE)
    assert destroyed == [True]
