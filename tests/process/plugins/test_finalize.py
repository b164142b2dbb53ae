"""ThreadedFinalize: the function's arguments, its errors, and one that hangs."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from ft_wrapper.exception import TimeoutError
from ft_wrapper.finalize import ThreadedFinalize
from ft_wrapper.state import FrozenState

STATE = FrozenState(rank=3, world_size=4)
LIMIT = timedelta(seconds=30)


def test_it_calls_the_function_in_another_thread_at_every_restart() -> None:
    calls: list[Any] = []

    def fn(*args: Any, **kwargs: Any) -> None:
        calls.append(((args, kwargs), threading.current_thread()))

    for given, got in (((), ((), {})), (((1, 2), {"key": 3}), ((1, 2), {"key": 3})), ((None,), ((), {}))):
        finalize = ThreadedFinalize(LIMIT, fn, *given)
        assert finalize(STATE) is finalize(STATE) is STATE
        for arguments, thread in (calls.pop(), calls.pop()):
            assert arguments == got
            assert thread is not threading.main_thread() and not thread.is_alive()
    assert not calls


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_the_functions_error_is_raised(error: BaseException) -> None:
    def fn() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        ThreadedFinalize(LIMIT, fn)(STATE)
    assert caught.value is error


def test_a_function_that_hangs_is_named() -> None:
    let_go = threading.Event()
    threads: list[threading.Thread] = []

    def hang(event: threading.Event) -> None:
        threads.append(threading.current_thread())
        event.wait(LIMIT.total_seconds())

    try:
        with pytest.raises(
            TimeoutError, match=r"rank 3: fn=.*hang did not finish within timeout=0:00:00\.05"
        ):
            ThreadedFinalize(timedelta(seconds=0.05), hang, args=(let_go,))(STATE)
    finally:
        let_go.set()
    for thread in threads:
        thread.join(LIMIT.total_seconds())


@pytest.mark.parametrize(("local_rank", "device"), [("1", 1), ("5", 0), (None, 0)])
def test_the_thread_uses_the_ranks_gpu(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, device: int
) -> None:
    calls: list[tuple[str, int, threading.Thread]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda d: calls.append(("set_device", d, threading.current_thread()))
    )
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    ThreadedFinalize(LIMIT, lambda: calls.append(("fn", device, threading.current_thread())))(STATE)
    assert [call[:2] for call in calls] == [("set_device", device), ("fn", device)]
    assert calls[0][2] is calls[1][2]


def test_bad_arguments() -> None:
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((None, print), TypeError, "timeout=None"),
        ((-1, print), ValueError, "timeout=-1 must be more than 0 seconds"),
        ((float("inf"), print), ValueError, "timeout=inf"),
        ((LIMIT, None), TypeError, "fn=None"),
        ((LIMIT, print, 5), TypeError, "args=5"),
        ((LIMIT, print, "ab"), TypeError, "args='ab'"),
        ((LIMIT, print, (), [1]), TypeError, r"kwargs=\[1\]"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            ThreadedFinalize(*arguments)
