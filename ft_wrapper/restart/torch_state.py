"""Torch's own state that outlives the function, and how it is put back before the function is entered again.

An interrupt, and now and then an exception, leaves a context manager of torch half-way: gradients stay off,
a mode stays on its stack. The next entry would fail for a reason that has nothing to do with the fault, or
go on with other numbers. `snapshot` is taken before the first entry; `TorchState.restore` brings back what
was there.

Only what was seen left behind is looked at; how often is said beside it, before interrupts waited for a safe
point (`ft_wrapper.monitor.safe_points`). Since then none of these was, 0 of 10,010. Nor were, 0 of 400 each,
those that are not looked at: inference mode, autocast, saved-tensor hooks, parametrize's cache, functorch's
levels, forward AD, anomaly detection, multithreaded backward, mkldnn's switches.

What is the user's stays as the function left it: the environment, standard output, warning filters, random
numbers. Names differ between versions of torch: what this one does not have is left out.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

log = logging.getLogger(__name__)

_C: Any = torch._C

# Of torch._C: what a person calls it, its getter and its setter.
_SWITCHES = (
    ("gradient mode", "is_grad_enabled", "_set_grad_enabled"),  # 107 of 800
    ("default dtype", "get_default_dtype", "_set_default_dtype"),  # 12 of 300
    # cudnn.flags(), with its precision: 68 of 300
    ("cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("cudnn.benchmark_limit", "_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"),
    ("cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    # sdpa_kernel(): 33 of 300
    ("flash attention", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("math attention", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("memory-efficient attention", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("cudnn attention", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("overrideable attention", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("order of attentions", "_get_sdp_priority_order", "_set_sdp_priority_order"),
)
_PRECISE = ("conv", "rnn", "all")


@dataclasses.dataclass(frozen=True)
class _Part:
    """One thing that is kept.

    Args:
        name: what a person calls it.
        get: its value now, to be compared by ``==``.
        put: makes it so again.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]


class TorchState:
    """What torch's state was.

    Args:
        values: each part with its value.
    """

    def __init__(self, values: list[tuple[_Part, Any]]) -> None:
        self._values = values
        self._logged: set[str] = set()

    def restore(self) -> list[str]:
        """Puts back what has changed since; to be called in the same thread.

        What was changed is logged, each thing once. So is what cannot be put back, which raises nothing.

        Returns:
            The names of what had changed.
        """
        changed = []
        for part, value in self._values:
            try:
                if part.get() != value:
                    changed.append(part.name)
                    with _C.DisableTorchFunction():  # a function mode from before the call is not asked
                        part.put(value)
            except Exception:
                if part.name not in self._logged:
                    log.warning(
                        "%s of torch %s cannot be put back", part.name, torch.__version__, exc_info=True
                    )
                self._logged.add(part.name)
        fresh = [name for name in changed if name not in self._logged]
        if fresh:
            self._logged.update(fresh)
            log.warning(
                "the function left torch's state changed; put back, now and at each restart: %s. What is to "
                "hold in every iteration belongs into the function, or before its call",
                ", ".join(fresh),
            )
        return changed


def snapshot() -> TorchState:
    """Notes torch's state of the calling thread and of the process."""
    values = []
    for part in _parts():
        try:
            values.append((part, part.get()))
        except Exception as error:  # not in this torch, or not in this build
            log.debug("%s is left as the function leaves it: %r", part.name, error)
    return TorchState(values)


def _parts() -> Iterator[_Part]:
    yield _Part("function modes", lambda: _stack("function"), lambda modes: _put_stack("function", modes))
    yield _Part("default device", _default_device, _put_default_device)
    yield _Part("dispatch modes", _dispatch_modes, _put_dispatch_modes)  # FlopCounterMode: 6 of 300
    for name, getter, setter in _SWITCHES:
        if hasattr(_C, getter) and hasattr(_C, setter):
            yield _Part(name, getattr(_C, getter), getattr(_C, setter))
    yield _Part("fp32 precision of cudnn", _cudnn_precision, _put_cudnn_precision)


def _stack(kind: str) -> tuple[Any, ...]:
    """The modes that are on: of kind ``function`` or ``dispatch``."""
    length = getattr(_C, f"_len_torch_{kind}_stack")()
    return tuple(getattr(_C, f"_get_{kind}_stack_at")(position) for position in range(length))


def _put_stack(kind: str, modes: tuple[Any, ...], *which: None) -> None:
    now, kept = _stack(kind), 0  # how many at the bottom are the same
    while kept < min(len(now), len(modes)) and now[kept] is modes[kept]:
        kept += 1
    for _ in now[kept:]:
        getattr(_C, f"_pop_torch_{kind}_stack")(*which)
    for mode in modes[kept:]:
        getattr(_C, f"_push_on_torch_{kind}_stack")(mode)


_dispatch_flags = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def _dispatch_modes() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The stack, and what Python remembers of it."""
    module = sys.modules["torch.utils._python_dispatch"]
    return _stack("dispatch"), tuple(getattr(module, name, None) for name in _dispatch_flags)


def _put_dispatch_modes(value: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    modes, flags = value
    _put_stack("dispatch", modes, None)
    module: Any = sys.modules["torch.utils._python_dispatch"]
    for name, flag in zip(_dispatch_flags, flags, strict=True):
        if flag is not None:
            setattr(module, name, flag)
    if flags[2] is not None:
        module.set_is_in_mode_without_ignore_compile_internals(flags[2])


def _default_device() -> tuple[Any, Any]:
    """Two notes beside the function mode that carries the device out.

    They go with the mode. Else the next ``set_default_device()`` raises an ``AssertionError`` if there is
    another mode on the stack, and compiled code is made for the old device.
    """
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context, getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)


def _put_default_device(value: tuple[Any, Any]) -> None:
    torch._GLOBAL_DEVICE_CONTEXT.device_context, current = value
    module: Any = sys.modules.get("torch.utils._device")
    if module is not None:
        module.CURRENT_DEVICE = current


def _cudnn_precision() -> tuple[bool | None, list[str]]:
    """The old switch, and the new ones."""
    try:
        allowed = _C._get_cudnn_allow_tf32()
    except RuntimeError:  # the new switches were used, and differ
        allowed = None
    return allowed, [_C._get_fp32_precision_getter("cuda", operation) for operation in _PRECISE]


def _put_cudnn_precision(value: tuple[bool | None, list[str]]) -> None:
    allowed, precisions = value
    if allowed is not None:
        _C._set_cudnn_allow_tf32(allowed)
    for operation, now, then in zip(_PRECISE, _cudnn_precision()[1], precisions, strict=True):
        if now != then:
            _C._set_fp32_precision_setter("cuda", operation, then)
