"""What a function leaves behind of torch's state, and that the next entry finds it as the first one did."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ft_wrapper.torch_groups.caches import TorchState


class Refuses(TorchFunctionMode):
    """Anyone who asks it has made a mistake."""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


# What was seen to be left on, and what of it the warning says.
LEFT_ON: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (torch.no_grad, "gradient mode"),
    "set_grad_enabled": (lambda: torch.set_grad_enabled(False), "gradient mode"),
    "default dtype": (lambda: default_dtype(torch.float64), "default dtype"),
    "cudnn": (
        lambda: torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True),
        "cudnn.enabled, cudnn.benchmark, cudnn.deterministic",
    ),
    "sdpa": (
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        "flash attention",
    ),
    "order of sdpa": (
        lambda: torch.nn.attention.sdpa_kernel(
            [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION],
            set_priority=True,
        ),
        "order of attentions",
    ),
}


def state_now() -> dict[str, Any]:
    """Seen as `TorchState` does not look: by what torch does."""
    a = torch.ones(2, 2, requires_grad=True)
    b = a @ a
    return {
        "result": (type(b), b.dtype, b.device, b.requires_grad),
        "default": torch.get_default_dtype(),
        "cudnn": [getattr(torch.backends.cudnn, n) for n in ("enabled", "benchmark", "deterministic")],
        "sdp": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "order": torch._C._get_sdp_priority_order(),
    }


def in_a_thread_of_its_own(check: Callable[[], None]) -> None:
    """Most of the state is a thread's: what a failed test leaves there goes with it."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            check()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


@pytest.mark.parametrize("what", LEFT_ON)
def test_what_was_left_on_is_put_back(what: str, caplog: pytest.LogCaptureFixture) -> None:
    make, said = LEFT_ON[what]

    def check() -> None:
        kept = TorchState()
        before = state_now()
        manager = make()
        manager.__enter__()  # and never leaves
        kept.restore()
        assert state_now() == before
        assert said in caplog.text
        count = len(caplog.records)
        assert kept.restore() == []
        assert len(caplog.records) == count == 1
        left.append(manager)

    left: list[Any] = []  # its end would mend some of it
    in_a_thread_of_its_own(check)


@pytest.mark.parametrize("what", LEFT_ON)
def test_what_was_on_before_stays_on(what: str) -> None:
    """The call may stand in a block: what is inside comes back, not what is outside."""
    make, _ = LEFT_ON[what]

    def check() -> None:
        with make():
            kept, before = TorchState(), state_now()
            with torch.inference_mode(), default_dtype(torch.float16):
                assert kept.restore()
            assert state_now() == before

    in_a_thread_of_its_own(check)


def test_a_function_mode_is_not_asked() -> None:
    def check() -> None:
        with Refuses():
            kept = TorchState()
            with torch._C.DisableTorchFunction():
                torch._C._set_grad_enabled(False)
            assert kept.restore() == ["gradient mode"]
            assert kept.restore() == []

    in_a_thread_of_its_own(check)


def test_the_users_things_are_left_alone() -> None:
    def users() -> list[Any]:
        numbers = torch.get_rng_state().tolist(), random.getstate()
        return [dict(os.environ), sys.stdout, list(warnings.filters), numbers, torch.get_num_threads()]

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        kept = TorchState()
        before = users()
        patch.setenv("OF_THE_USER", "1")
        patch.setattr(sys, "stdout", sys.stderr)
        warnings.simplefilter("error")
        torch.rand(3), random.random()
        after = users()
        assert kept.restore() == []
        assert users() == after != before


def test_what_this_torch_does_not_have_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch._C, "_get_cudnn_enabled")
    kept = TorchState()
    torch.set_grad_enabled(False)
    try:
        assert kept.restore() == ["gradient mode"]
    finally:
        torch.set_grad_enabled(True)
    assert len(caplog.records) == 1


def test_nothing_is_imported_for_it() -> None:
    before = set(sys.modules)
    TorchState().restore()
    assert set(sys.modules) == before
