"""What a function leaves behind of torch's state, and that the next entry finds it as the first one did."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import timeit
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ft_wrapper.restart import torch_state


class Functions(TorchFunctionMode):
    """Any mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Any mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Refuses(TorchFunctionMode):
    """Anyone who asks it has made a mistake."""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str | None) -> Iterator[None]:
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def autocast_on_cuda() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses it where there is no GPU
    yield
    torch.set_autocast_enabled("cuda", False)


@contextlib.contextmanager
def vmap_level() -> Iterator[None]:
    torch._C._functorch._vmap_increment_nesting(3, "error")
    yield
    torch._C._functorch._vmap_decrement_nesting()


@contextlib.contextmanager
def jvp_level() -> Iterator[None]:
    from torch._functorch.eager_transforms import jvp_increment_nesting

    with jvp_increment_nesting():
        yield


# Everything that the issue names, and what of it the warning says.
LEFT_ON: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (torch.no_grad, "gradient mode"),
    "set_grad_enabled": (lambda: torch.set_grad_enabled(False), "gradient mode"),
    "inference_mode": (torch.inference_mode, "inference mode"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast on cpu"),
    "autocast on cuda": (autocast_on_cuda, "autocast on cuda"),
    "function mode": (Functions, "function modes"),
    "no torch functions": (torch._C.DisableTorchFunction, "torch functions"),
    "dispatch mode": (Dispatches, "dispatch modes"),
    "fake tensors": (FakeTensorMode, "dispatch modes"),
    "device": (lambda: torch.device("meta"), "function modes"),
    "set_default_device": (lambda: default_device("meta"), "default device"),
    "default dtype": (lambda: default_dtype(torch.float64), "default dtype"),
    "saved-tensor hooks": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        "saved-tensor hooks",
    ),
    "saved-tensor hooks, twice": (torch.autograd.graph.save_on_cpu, "saved-tensor hooks"),
    "no saved-tensor hooks": (
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not now"),
        "ban of saved-tensor hooks",
    ),
    "vmap": (vmap_level, "functorch levels"),
    "jvp": (jvp_level, "jvp levels"),
    "forward AD": (torch.autograd.forward_ad.dual_level, "forward-AD level"),
    "anomaly": (torch.autograd.detect_anomaly, "anomaly detection"),
    "multithreading": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        "multithreaded backward",
    ),
    "cudnn": (
        lambda: torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True),
        "cudnn.enabled, cudnn.benchmark, cudnn.deterministic",
    ),
    "cudnn's precision": (
        lambda: torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        "fp32 precision of cudnn",
    ),
    "mkldnn": (lambda: torch.backends.mkldnn.flags(enabled=False), "mkldnn.enabled"),
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
    "deterministic": (deterministic, "deterministic algorithms"),
    "parametrize": (parametrize.cached, "parametrize's cache"),
}


def state_now() -> dict[str, Any]:
    """Seen as `torch_state` does not look: by what torch does."""
    a = torch.ones(2, 2, requires_grad=True)
    b = a @ a
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        pass  # raises where they are banned
    return {
        "result": (type(b), b.dtype, b.device, b.requires_grad, b.is_inference()),
        "default": (torch.get_default_dtype(), torch.get_default_device()),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "function": torch._C._get_torch_function_state(),
        "level": (torch._C._functorch.peek_interpreter_stack(), torch.autograd.forward_ad._current_level),
        "anomaly": torch.is_anomaly_enabled(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "cudnn": [getattr(torch.backends.cudnn, n) for n in ("enabled", "benchmark", "deterministic")],
        "tf32": torch.backends.cudnn.allow_tf32,
        "mkldnn": torch.backends.mkldnn.enabled,
        "sdp": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "order": torch._C._get_sdp_priority_order(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "parametrize": (parametrize._cache_enabled, parametrize._cache),
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
        kept = torch_state.snapshot()
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
            kept = torch_state.snapshot()
            left = [
                torch.autocast("cpu", torch.float16),
                torch.autograd.set_multithreading_enabled(False),
                Functions(),
                Dispatches(),
            ]
            for manager in left:
                manager.__enter__()
            assert kept.restore()
            assert kept.restore() == []

    in_a_thread_of_its_own(check)


def test_a_function_mode_is_not_asked() -> None:
    def check() -> None:
        with Refuses():
            kept = torch_state.snapshot()
            with torch._C.DisableTorchFunction():
                torch.autograd.set_multithreading_enabled(False)
                torch._C._set_grad_enabled(False)
            assert kept.restore() == ["gradient mode", "multithreaded backward"]
            assert kept.restore() == []

    in_a_thread_of_its_own(check)


def test_what_was_taken_off_comes_back() -> None:
    def check() -> None:
        modes = [Functions(), Dispatches()]
        hooks = [torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) for _ in range(2)]
        managers: list[Any] = [torch.no_grad(), *modes, *hooks]
        with contextlib.ExitStack() as stack:
            for manager in managers:
                stack.enter_context(manager)
            kept = torch_state.snapshot()
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            torch._C._pop_torch_function_stack()
            torch._C._set_grad_enabled(True)
            torch._C._pop_torch_dispatch_stack(None)
            torch._C._autograd._pop_saved_tensors_default_hooks()
            names = ["function modes", "dispatch modes", "gradient mode", "saved-tensor hooks"]
            assert kept.restore() == names
            assert not torch.is_grad_enabled()
            assert torch._C._get_function_stack_at(0) is modes[0]
            assert torch._C._get_dispatch_stack_at(0) is modes[1]
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) == top
        assert torch.is_grad_enabled()  # the blocks around the call end as they should

    in_a_thread_of_its_own(check)


def test_the_users_things_are_left_alone() -> None:
    def users() -> list[Any]:
        numbers = torch.get_rng_state().tolist(), random.getstate()
        return [dict(os.environ), sys.stdout, list(warnings.filters), numbers, torch.get_num_threads()]

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        kept = torch_state.snapshot()
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
    monkeypatch.delattr(torch._C, "_get_fp32_precision_getter")
    monkeypatch.delattr(torch._C._functorch, "get_dynamic_layer_stack_depth")
    kept = torch_state.snapshot()
    torch.set_grad_enabled(False)
    try:
        assert kept.restore() == ["gradient mode"]
    finally:
        torch.set_grad_enabled(True)
    assert len(caplog.records) == 1


def test_what_cannot_be_put_back_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = torch_state.snapshot()
    monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    kept.restore()
    kept.restore()
    assert [
        f"function modes of torch {torch.__version__}" in record.message for record in caplog.records
    ] == [True]


def test_it_costs_less_than_a_millisecond() -> None:
    kept = torch_state.snapshot()
    assert min(timeit.repeat(kept.restore, number=10, repeat=20)) / 10 < 1e-3


def test_nothing_is_imported_for_it() -> None:
    before = set(sys.modules)
    torch_state.snapshot().restore()
    assert set(sys.modules) == before
