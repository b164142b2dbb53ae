"""torch's timers: who overruns one has failed, like any other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from elastic_agents import agent, overruns

from ft_wrapper.agent.elastic import Counts, Policy, WorkerState
from ft_wrapper.agent.torch_api.timers import watchdog


@pytest.fixture(autouse=True)
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "timers"
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(path))
    return path


def test_who_overruns_a_timer_is_replaced(tmp_path: Path, pipe: Path) -> None:
    running = agent(tmp_path, overruns, nproc=1, restart_policy=Policy.RANK)
    result = running.run()
    assert result.state is WorkerState.SUCCEEDED, "and the agent, whose end torch's server wants, lives"
    assert result.return_values == {0: "in time"}
    assert running.counts == Counts(failures=1, replacements=1, rounds=1)
    assert not pipe.exists()


def test_workers_find_a_pipe_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = f'[ -p "$TORCHELASTIC_TIMER_FILE" ] && echo "$TORCHELASTIC_TIMER_FILE" > "{tmp_path}/$RANK"'
    assert agent(tmp_path, "sh", "-c", script).run().state is WorkerState.SUCCEEDED
    paths = {(tmp_path / str(rank)).read_text().strip() for rank in range(2)}
    assert len(paths) == 1
    assert not os.path.exists(*paths)


@pytest.mark.parametrize("umask", [0, 0o022])
@pytest.mark.parametrize("is_named", [True, False])
def test_only_this_user_may_open_the_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, is_named: bool
) -> None:
    """Who writes to it can have any process of this user killed; who reads from it takes timers away."""
    if not is_named:
        monkeypatch.delenv("TORCHELASTIC_TIMER_FILE")
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(umask)
    try:
        with watchdog("job") as path:
            assert os.stat(path).st_mode & 0o777 == 0o600
            if not is_named:
                assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
            assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert not list(tmp_path.iterdir())


def test_a_pipe_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", f"{tmp_path}/no/timers")
    with pytest.raises(FileNotFoundError, match=f"TORCHELASTIC_TIMER_FILE: .*'{tmp_path}/no/timers'"):
        watchdog("job").__enter__()


def test_there_is_none_unless_asked_for(monkeypatch: pytest.MonkeyPatch, pipe: Path) -> None:
    monkeypatch.delenv("TORCHELASTIC_ENABLE_FILE_TIMER")
    with watchdog("job") as path:
        assert path == ""
        assert not pipe.exists()
