"""Bad input: an error before anything is started, which names what it is, its value and a way out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import SETTINGS, Job, Rank, with_limits

from ft_wrapper import CallWrapper, Compose, Limits, Wrapper
from ft_wrapper.abort import AbortTorchDistributed
from ft_wrapper.rank_assignment import ActivateAllRanks, ShiftRanks
from ft_wrapper.store import FileStore, TCPStoreServer

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

# Durations that may also be "auto".
AUTOMATIC = ["soft_timeout", "hard_timeout"]

WRONG_TYPES: list[tuple[str, Any]] = [
    *[(name, value) for name in DURATIONS for value in (None, True)],
    *[(name, "10") for name in DURATIONS if name not in AUTOMATIC],
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
    *[(name, "10") for name in AUTOMATIC],
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


SHORTER: dict[str, tuple[str, ...]] = {
    "hard_timeout": ("soft_timeout",),
    "barrier_timeout": ("hard_timeout", "heartbeat_timeout"),
    "heartbeat_timeout": ("heartbeat_interval", "monitor_process_interval"),
    "soft_timeout": ("monitor_process_interval", "monitor_thread_interval", "progress_watchdog_interval"),
}


def test_durations_that_contradict_each_other_are_named() -> None:
    fitting = {"soft_timeout": 60, "hard_timeout": 90, "barrier_timeout": 120, "heartbeat_timeout": 70}
    fitting |= {"monitor_process_interval": 1, "heartbeat_interval": 1}
    for longer, shorter in (
        (longer, each) for longer, all_of_them in SHORTER.items() for each in all_of_them
    ):
        settings = {**fitting, shorter: fitting[longer]}
        with pytest.raises(ValueError) as caught:
            Wrapper(**settings)
        assert f"{shorter}={timedelta(seconds=settings[shorter])}" in str(caught.value)
        assert f"{longer}=" in str(caught.value)


def test_two_ways_to_say_who_is_active_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"active_world_size=2 and rank_assignment=.* MaxActiveWorldSize"):
        Wrapper(active_world_size=2, rank_assignment=Compose(ActivateAllRanks(), ShiftRanks()))


def test_store_kwargs_that_do_not_fit_are_named() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"store_kwargs": {"prot": 5}}, "prot"),
        ({"store_kwargs": {5: 5}}, "keywords must be strings"),
        ({"store_kwargs": {"port": 1, "is_master": True}}, "is_master"),
        ({"store_factory": FileStore, "store_kwargs": {"function": 1}}, "FileStore"),
    ]
    for settings, error in wrong:
        with pytest.raises(TypeError, match=r"store_kwargs=.*do not fit") as caught:
            Wrapper(**settings)
        assert error in str(caught.value)


def test_an_argument_that_is_one_of_the_limits_is_named() -> None:
    for moved in ({"max_faults": 3}, {"max_faults": 3, "fault_window": 60}):
        with pytest.raises(TypeError) as caught:
            Wrapper(rejoin=True, **moved)
        new = ", ".join(f"{name}=..." for name in moved)
        assert str(caught.value) == f"max_faults is an argument of Limits now: Wrapper(limits=Limits({new}))"


def test_positional_arguments_unknown_ones_and_a_function_with_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="soft_timout"):
        Wrapper(soft_timout=1)
    for arguments, settings in (((5,), {}), ((len, len), {}), ((len,), {"soft_timeout": 5})):
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


class Trainer:
    def __call__(self) -> int:
        return 1


def test_what_is_no_plain_function_is_refused() -> None:
    """What only begins when it is called, a class, and what cannot be called."""
    trainer = AsynchronousTrainer()
    refused: list[tuple[Any, str]] = [
        *[(each, rf"{each.__name__}.*wrap a plain function") for each in (coroutine, generator)],
        (asynchronous_generator, "asynchronous_generator.*wrap a plain function"),
        *[(each, "is a coroutine or generator function") for each in (trainer, trainer.__call__)],
        (functools.partial(coroutine), "is a coroutine or generator function"),
        (Trainer, r"Trainer.* is a class: .* wrap a function or method"),
    ]
    for decorate in (Wrapper, Wrapper(), Wrapper(enabled=False)):
        for function, words in refused:
            with pytest.raises(TypeError, match=words):
                decorate(function)
    with pytest.raises(TypeError, match="5"):
        Wrapper()(5)  # type: ignore[type-var]


def test_two_call_wrapper_arguments_are_named() -> None:
    def train(one: CallWrapper, x: int, two: CallWrapper | None = None) -> None:
        pass

    with pytest.raises(TypeError, match=r"2 arguments annotated with CallWrapper \(one, two\)"):
        Wrapper(train)


# ---- the environment. In this process: had anything been started, `nothing_left_behind` would see it.

GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was started")

    monkeypatch.setattr(os, "fork", started)
    monkeypatch.setattr(socket, "create_connection", started)


def nothing() -> None:
    raise AssertionError("the function was called")


BAD_VARIABLES: dict[str, tuple[str | None, ...]] = {
    "RANK": (None, "one", "2", "9" * 5000),
    "WORLD_SIZE": (None, "0", "99999999999999999999"),
    "MASTER_ADDR": (None, "", "a..b", "x" * 70),
    "MASTER_PORT": (None, "http", "0", "65535", "²"),
    "FT_WRAPPER_FORMATION_SIZE": ("9" * 5000,),
    "FT_WRAPPER_STORE": ("localhost:²", "x..y:1", "localhost", "localhost:http", "localhost:70000"),
}


@pytest.fixture
def good_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch)
    for name in ("FT_WRAPPER_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variable", BAD_VARIABLES)
def test_a_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, good_environment: None, variable: str
) -> None:
    for value in BAD_VARIABLES[variable]:
        if value is None:
            monkeypatch.delenv(variable)
        else:
            monkeypatch.setenv(variable, value)
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


@pytest.mark.parametrize("name", ["active_world_size", "min_world_size"])
def test_more_ranks_than_there_are(good_environment: None, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=3 is more than WORLD_SIZE=2; start more ranks or lower it"):
        Wrapper(**{name: 3})(nothing)()


def test_a_process_group_is_initialized(monkeypatch: pytest.MonkeyPatch, good_environment: None) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"initialized; call .*destroy_process_group.* Accelerator\(\)"):
        Wrapper(nothing)()


# ---- ports, stores and durations


def calls(rank: Rank, settings: dict[str, Any]) -> Any:
    @Wrapper(**with_limits(**{**SETTINGS, **settings}))
    def train() -> str:
        return "trained"

    return train()


def test_a_port_that_another_jobs_store_has_is_named(job: Job) -> None:
    with contextlib.closing(TCPStoreServer(0, "127.0.0.1")) as server:
        job.port = server.port - 1
        job.start(1, calls, {"rejoin": True})
        job.wait_for_end()
    assert job[0].error == "StoreError"
    assert f":{job.port + 1}: [Errno 98] Address already in use" in job[0].text
    assert "choose another MASTER_PORT" in job[0].text
    assert not job.monitors()


SHORT = {
    "soft_timeout": 1.5,
    "hard_timeout": 2.0,
    "heartbeat_timeout": 2.5,
    "barrier_timeout": 3.0,
}


def test_a_store_at_an_address_of_another_host_is_named(job: Job) -> None:
    """Its host's monitor waited for its own server, at an address of documentation's, and said nothing."""
    job.start(1, calls, SHORT, env={"MASTER_ADDR": "192.0.2.1"})
    job.wait_for_end()
    assert "this rank hosts the store, and 192.0.2.1 leads to no address of this host" in job[0].log
    assert job[0].error == "StoreError"
    assert "store at 192.0.2.1:" in job[0].text and "cannot be reached within 3 s" in job[0].text


def test_a_call_may_wait_for_years(job: Job) -> None:
    """The kernel's waits take 25 days at most; a call whose settings are longer ended with an error."""
    year = 365 * 24 * 3600.0
    long = dict.fromkeys(("heartbeat_timeout", "completion_timeout", "termination_grace_time"), year)
    long |= {"soft_timeout": year, "hard_timeout": 2 * year, "barrier_timeout": 3 * year}
    job.start(2, calls, {**long, "rejoin_wait": year, "fault_window": year})
    assert job.wait() == ["trained"] * 2


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


def may_open_few_files(rank: Rank) -> Any:
    if rank.slot == 1:
        may = len(os.listdir("/proc/self/fd")) + 4
        resource.setrlimit(resource.RLIMIT_NOFILE, (may, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return calls(rank, SHORT)


def test_too_few_files_and_ranks_that_never_come_are_named(job: Job) -> None:
    """A rank that no agent has started, and so none has counted files for."""
    job.start(4, may_open_few_files, slots=[0, 1, 3])
    job.wait_for_end()
    assert job[1].error == "OSError"
    assert "[Errno 24] Too many open files: rank 1 needs" in job[1].text
    assert "raise the limit (ulimit -n)" in job[1].text
    for slot in (0, 3):
        assert job[slot].error == "RestartTimeout"
        assert "ranks [1, 2] of 4 are missing" in job[slot].text
        assert "within 3 s" in job[slot].text
