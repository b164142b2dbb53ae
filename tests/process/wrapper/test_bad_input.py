"""Bad input: an error before anything is started, which names what it is, its value and a way out."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import resource
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import SETTINGS, Job, Rank
from support.warm_ftrun import run_python

from ft_wrapper import CallWrapper, Compose, Limits, Wrapper
from ft_wrapper.abort import AbortTorchDistributed
from ft_wrapper.rank_assignment import ActivateAllRanks, ShiftRanks
from ft_wrapper.store import FileStore
from ft_wrapper.testing.etcd_server import free_port

DURATIONS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "soft_timeout",
    "hard_timeout",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "termination_grace_time",
    "last_call_wait",
    "join_window",
    "rejoin_wait",
)
PLUG_INS = (
    "initialize",
    "abort",
    "finalize",
    "health_check",
    "completion",
    "terminate",
    "rank_assignment",
)

# ---- arguments of Wrapper

WRONG_TYPES: list[tuple[str, Any]] = [
    *[(name, value) for name in DURATIONS for value in ("10", None, True)],
    *[(name, value) for name in PLUG_INS for value in ("x", object(), AbortTorchDistributed)],
    ("initialize", AbortTorchDistributed()),
    ("abort", ShiftRanks()),
    ("rank_assignment", Compose(AbortTorchDistributed())),
    ("store_factory", "TCPStore"),
    ("store_kwargs", ["port"]),
    ("monitor_process_logfile", Path("/tmp/log")),
    ("monitor_process_pidfile", 5),
    ("enabled", 1),
    ("use_global_iteration", "yes"),
    ("rejoin", "yes"),
    ("min_world_size", 1.5),
    ("min_world_size", True),
    ("active_world_size", "2"),
    ("on_join", 5),
    ("max_same_faults", 1.5),
    ("max_same_faults", True),
    ("warm_up", True),
    ("warm_up", "torch"),
    ("warm_up", lambda state: state),
    ("limits", None),
]

WRONG_VALUES: list[tuple[str, Any]] = [
    *[(name, value) for name in DURATIONS for value in (-1, timedelta(seconds=-1))],
    *[(name, 0) for name in DURATIONS[:10]],
    *[(name, float(value)) for name in DURATIONS for value in ("nan", "inf", "1e10", "1e300")],
    ("monitor_process_logfile", "monitor-{rank}.log"),
    ("monitor_process_pidfile", "./{rank}.pid"),
    ("min_world_size", 0),
    ("max_same_faults", 0),
    ("active_world_size", 0),
    ("on_join", "never"),
]


def pass_one(name: str, value: Any) -> None:
    owner = Limits if name in inspect.signature(Limits).parameters else Wrapper
    owner(**{name: value})


def test_a_wrong_type_is_named() -> None:
    for name, value in WRONG_TYPES:
        with pytest.raises(TypeError) as caught:
            pass_one(name, value)
        assert f"{name}={value!r}" in str(caught.value)
        assert "must be" in str(caught.value)


def test_a_wrong_value_is_named() -> None:
    for name, value in WRONG_VALUES:
        with pytest.raises(ValueError) as caught:
            pass_one(name, value)
        assert name in str(caught.value), name
        assert repr(value) in str(caught.value) or str(value) in str(caught.value)
        assert "must be" in str(caught.value)


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ("soft_timeout", "hard_timeout"),
        ("hard_timeout", "barrier_timeout"),
        ("heartbeat_timeout", "barrier_timeout"),
        ("heartbeat_interval", "heartbeat_timeout"),
        ("monitor_process_interval", "heartbeat_timeout"),
        ("monitor_process_interval", "soft_timeout"),
        ("monitor_thread_interval", "soft_timeout"),
        ("progress_watchdog_interval", "soft_timeout"),
    ],
)
def test_durations_that_contradict_each_other_are_named(shorter: str, longer: str) -> None:
    settings = {
        "soft_timeout": 60,
        "hard_timeout": 90,
        "barrier_timeout": 120,
        "heartbeat_timeout": 70,
        "monitor_process_interval": 1,
        "heartbeat_interval": 1,
    }
    settings[shorter] = settings.get(longer, 60)
    with pytest.raises(ValueError) as caught:
        Wrapper(**settings)
    assert f"{shorter}={timedelta(seconds=settings[shorter])}" in str(caught.value)
    assert f"{longer}=" in str(caught.value)


def test_two_ways_to_say_who_is_active_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"active_world_size=2 and rank_assignment=.* MaxActiveWorldSize"):
        Wrapper(active_world_size=2, rank_assignment=Compose(ActivateAllRanks(), ShiftRanks()))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"store_kwargs": {"prot": 5}}, "prot"),
        ({"store_kwargs": {"port": 1, "is_master": True}}, "is_master"),
        ({"store_factory": FileStore, "store_kwargs": {"port": 1}}, "FileStore"),
    ],
)
def test_store_kwargs_that_do_not_fit_are_named(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(TypeError, match=r"store_kwargs=.*do not fit") as caught:
        Wrapper(**settings)
    assert error in str(caught.value)


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match="soft_timout"):
        Wrapper(soft_timout=1)


def test_positional_arguments_and_a_function_with_settings_are_refused() -> None:
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((5,), {}),
        ((len, len), {}),
        ((len,), {"soft_timeout": 5}),
    ]
    for arguments, settings in wrong:
        with pytest.raises(TypeError, match="use @Wrapper"):
            Wrapper(*arguments, **settings)


# ---- functions


async def coroutine() -> None:
    await asyncio.sleep(0)


def generator() -> Iterator[int]:
    yield 1


async def asynchronous_generator() -> AsyncIterator[int]:
    yield 1


class AsynchronousTrainer:
    async def __call__(self) -> None:
        await asyncio.sleep(0)


DECORATORS: list[Callable[..., Any]] = [Wrapper, Wrapper(), Wrapper(enabled=False)]


@pytest.mark.parametrize("decorate", DECORATORS)
def test_what_only_begins_when_it_is_called_is_refused(decorate: Callable[..., Any]) -> None:
    for function in (coroutine, generator, asynchronous_generator):
        with pytest.raises(TypeError) as caught:
            decorate(function)
        assert function.__name__ in str(caught.value)
        assert "wrap a plain function" in str(caught.value)
    trainer = AsynchronousTrainer()
    for other in (trainer, trainer.__call__, functools.partial(coroutine)):
        with pytest.raises(TypeError, match="is a coroutine function"):
            decorate(other)


def test_two_call_wrapper_arguments_are_named() -> None:
    def train(one: CallWrapper, x: int, two: CallWrapper | None = None) -> None:
        pass

    with pytest.raises(TypeError, match=r"2 arguments annotated with CallWrapper \(one, two\)"):
        Wrapper(train)


class Trainer:
    def __call__(self) -> int:
        return 1


@pytest.mark.parametrize("decorate", DECORATORS)
def test_a_class_is_refused(decorate: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"Trainer.* is a class: .* wrap the function or the method"):
        decorate(Trainer)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="5"):
        Wrapper()(5)  # type: ignore[type-var]


# ---- durations that are long, and can be waited for

LONG = """
from datetime import timedelta
from ft_wrapper import Limits, Wrapper

year = timedelta(days=365)

@Wrapper(barrier_timeout=3 * year, hard_timeout=2 * year, soft_timeout=year, heartbeat_timeout=year,
         completion_timeout=year, termination_grace_time=year,
         limits=Limits(rejoin_wait=year, fault_window=year))
def train():
    return "returned"

print(train())
"""


def alone(script: Path, text: str, address: str = "127.0.0.1") -> subprocess.CompletedProcess[str]:
    """Runs a script as the only rank of a job."""
    script.write_text(text)
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port() - 1),
    }
    return run_python([script], 60, environment)


def test_a_call_may_wait_for_years(tmp_path: Path) -> None:
    """The kernel's waits take 25 days at most; a call whose settings are longer ended with an error."""
    ended = alone(tmp_path / "train.py", LONG)
    assert (ended.returncode, ended.stdout) == (0, "returned\n"), ended.stderr


FOREIGN = """
from ft_wrapper import Wrapper

@Wrapper(barrier_timeout=3, hard_timeout=2, soft_timeout=1.5, heartbeat_timeout=2)
def train():
    print("entered")

train()
"""


def test_a_store_at_an_address_of_another_host_is_named(tmp_path: Path) -> None:
    """Its host's monitor waited for its own server, at an address of documentation's, and said nothing."""
    ended = alone(tmp_path / "train.py", FOREIGN, "192.0.2.1")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "this rank hosts the store, and 192.0.2.1 leads to no address of this host" in ended.stderr
    assert (
        "StoreError: store at 192.0.2.1:" in ended.stderr and "cannot be reached within 3 s" in ended.stderr
    )


# ---- the environment. In this process: had anything been started, `nothing_left_behind` would see it.

GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was started")

    monkeypatch.setattr(os, "fork", started)
    monkeypatch.setattr(socket, "create_connection", started)


def nothing() -> None:
    raise AssertionError("the function was called")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RANK", None),
        ("RANK", "one"),
        ("RANK", "2"),
        ("WORLD_SIZE", None),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "99999999999999999999"),
        ("RANK", "9" * 5000),
        ("MASTER_ADDR", None),
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", None),
        ("MASTER_PORT", "http"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65535"),
        ("MASTER_PORT", "²"),
        ("MASTER_ADDR", "a..b"),
        ("MASTER_ADDR", "x" * 70),
        ("FT_WRAPPER_FORMATION_SIZE", "9" * 5000),
        ("FT_WRAPPER_STORE", "localhost:²"),
        ("FT_WRAPPER_STORE", "x..y:1"),
        ("FT_WRAPPER_STORE", "localhost"),
        ("FT_WRAPPER_STORE", "localhost:http"),
        ("FT_WRAPPER_STORE", "localhost:70000"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None) -> None:
    forbid(monkeypatch)
    for name in (*GOOD, "FT_WRAPPER_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {**GOOD, variable: value}.items():
        if text is not None:
            monkeypatch.setenv(name, text)
    with pytest.raises(ValueError) as caught:
        Wrapper(nothing)()
    message = str(caught.value)
    is_host = variable == "MASTER_ADDR" and value
    assert (f"host_name={value!r}" if is_host else variable) in message
    if variable == "FT_WRAPPER_STORE":
        assert any(part in message for part in (repr(value), "port=70000", "host_name='x..y'"))
    elif value:
        assert value in message
    else:
        assert "not set" in message or "must be an integer" in message
    assert "ftrun" in message or "remove it" in message or is_host


def good_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch)
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["active_world_size", "min_world_size"])
def test_more_ranks_than_there_are(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    good_environment(monkeypatch)
    with pytest.raises(ValueError, match=f"{name}=3 is more than WORLD_SIZE=2; start more ranks or lower it"):
        Wrapper(**{name: 3})(nothing)()


def test_a_process_group_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    good_environment(monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"initialized; call .*destroy_process_group.* Accelerator\(\)"):
        Wrapper(nothing)()


# ---- ports and stores


def calls(rank: Rank, settings: dict[str, Any]) -> Any:
    @Wrapper(**{**SETTINGS, **settings})
    def train() -> str:
        return "trained"

    return train()


def test_a_port_in_use_is_named(job: Job) -> None:
    job.port = free_port(consecutive=2)
    with socket.create_server(("127.0.0.1", job.port + 1)):
        job.start(1, calls, {})
        job.wait_for_end()
    assert job[0].error == "StoreError"
    assert f"port {job.port + 1}" in job[0].text
    assert "choose another MASTER_PORT" in job[0].text
    assert not job.monitors()


SHORT = {
    "soft_timeout": 1.5,
    "hard_timeout": 2.0,
    "heartbeat_timeout": 2.5,
    "barrier_timeout": 3.0,
}


def test_an_unreachable_store_is_named_within_its_timeout(job: Job) -> None:
    job.start(2, calls, SHORT, slots=[1])  # rank 0, whose monitor hosts the store, never comes
    job.wait_for_end()
    assert job[1].error == "StoreError"
    assert f"127.0.0.1:{job.port + 1} cannot be reached within 3 s" in job[1].text
    assert "rank 0" in job[1].text


def test_a_store_that_never_answers_is_named(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        job.start(1, calls, SHORT, env={"FT_WRAPPER_STORE": f"127.0.0.1:{port}"})
        # The thread that torch's client is stuck in cannot be ended.
        job.wait_for_end(leftovers=False)
    assert job[0].error == "StoreError"
    assert f"127.0.0.1:{port}" in job[0].text


def test_ranks_that_never_come_are_named(job: Job) -> None:
    job.start(3, calls, SHORT, slots=[0, 2])
    job.wait_for_end()
    for slot in (0, 2):
        assert job[slot].error == "RestartTimeout"
        assert "ranks [1] of 3 are missing" in job[slot].text
        assert "within 3 s" in job[slot].text


def may_open_few_files(rank: Rank) -> Any:
    if rank.slot == 1:
        may = len(os.listdir("/proc/self/fd")) + 4
        resource.setrlimit(resource.RLIMIT_NOFILE, (may, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return calls(rank, SHORT)


def test_too_few_files_are_named(job: Job) -> None:
    """A rank that no agent has started, and so none has counted for."""
    job.start(2, may_open_few_files)
    job.wait_for_end()
    assert job[1].error == "OSError"
    assert "[Errno 24] Too many open files: rank 1 needs" in job[1].text
    assert "raise the limit (ulimit -n)" in job[1].text
    assert job[0].error == "RestartTimeout"
    assert "ranks [1] of 2 are missing" in job[0].text
