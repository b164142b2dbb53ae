"""Torch's own state that outlives the function, and how it is put back before the function is entered again.

An interrupt, and now and then an exception, leaves a context manager of torch half-way: gradients stay off,
a mode stays on its stack. The next entry would fail for a reason that has nothing to do with the fault, or
go on with other numbers. `snapshot` is taken before the first entry; `TorchState.restore` brings back what
was there.

Only torch's state of this thread and of the process is looked at, and only what torch itself switches for the
length of a block. What is the user's stays as the function left it: the environment, standard output, warning
filters, random numbers. Names differ between versions of torch: what this one does not have is left out.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

log = logging.getLogger(__name__)

_C: Any = torch._C

# Of torch._C: what a person calls it, its getter and its setter. The order counts: leaving inference mode
# sets the gradient modes, too.
_SWITCHES = (
    ("inference mode", "is_inference_mode_enabled", "inference_mode"),
    ("gradient mode", "is_grad_enabled", "_set_grad_enabled"),
    ("forward gradient mode", "_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
    ("multithreaded backward", "_is_multithreading_enabled", "_set_multithreading_enabled"),
    ("view replay", "_is_view_replay_enabled", "_set_view_replay_enabled"),
    ("torch functions", "_get_torch_function_state", "_set_torch_function_state"),
    ("fake tensors' lifting", "_only_lift_cpu_tensors", "_set_only_lift_cpu_tensors"),
    ("default dtype", "get_default_dtype", "_set_default_dtype"),
    ("autocast cache", "is_autocast_cache_enabled", "set_autocast_cache_enabled"),
    ("cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("cudnn.benchmark_limit", "_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"),
    ("cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("mkldnn.enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("mkldnn.deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("flash attention", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("math attention", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("memory-efficient attention", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("cudnn attention", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("overrideable attention", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("order of attentions", "_get_sdp_priority_order", "_set_sdp_priority_order"),
)
# What cudnn.flags() and mkldnn.flags() switch: the old switch, for which library, and the new ones.
_PRECISIONS = (("cudnn", "cuda"), ("onednn", "mkldnn"))
_PRECISE = ("conv", "rnn", "all")
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone")


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
        """Puts back what has changed since; to be called in the same thread. Takes 15 to 200 µs.

        What was changed is logged, each thing once. So is what cannot be put back, which raises nothing.

        Returns:
            The names of what had changed.
        """
        changed = []
        for part, value in self._values:
            try:
                if part.get() != value:
                    changed.append(part.name)
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
    yield _Part("dispatch modes", _dispatch_modes, _put_dispatch_modes)
    for name, getter, setter in _SWITCHES:
        get, put = getattr(_C, getter, None), globals().get(f"_{setter}") or getattr(_C, setter, None)
        if get is not None and put is not None:
            yield _Part(name, get, put if name == "torch functions" else _unseen(put))
    yield _Part("default device", _default_device, _put_default_device)
    for device in _AUTOCAST_DEVICES:
        yield _Part(f"autocast on {device}", *_autocast_on(device))
    yield _Part("autocast", _autocast_nesting, _put_autocast_nesting)
    for library, backend in _PRECISIONS:
        yield _Part(f"fp32 precision of {library}", *_fp32_precision(library, backend))
    yield _Part(
        "deterministic algorithms",
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        lambda value: _C._set_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield _Part(
        "anomaly detection",
        lambda: (_C.is_anomaly_enabled(), _C.is_anomaly_check_nan_enabled()),
        lambda value: _C.set_anomaly_enabled(*value),
    )
    yield _Part(
        "ban of saved-tensor hooks",
        lambda: _C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        _put_ban,
    )
    yield _Part("saved-tensor hooks", _saved_tensor_hooks, _put_saved_tensor_hooks)
    yield _Part("functorch levels", _functorch_levels, _put_functorch_levels)
    yield _Part("jvp levels", *_global_of("torch._functorch.eager_transforms", "JVP_NESTING", 0))
    yield _Part("forward-AD level", _forward_ad_level, _put_forward_ad_level)
    yield _Part("parametrize's cache", _parametrize_cached, _put_parametrize_cached)


def _unseen(put: Callable[[Any], object]) -> Callable[[Any], None]:
    """So that a function mode of the user's, on the stack from before, is not asked."""

    def run(value: Any) -> None:
        with _C.DisableTorchFunction():
            put(value)

    return run


_inference_modes: list[Any] = []


def _inference_mode(enabled: bool) -> None:
    # There is no plain setter. The guard stays: at its end it would bring back what was wrong.
    guard = _C._InferenceMode(enabled)
    guard.__enter__()
    _inference_modes.append(guard)


def _global_of(module: str, name: str, default: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Getter and setter of a module's global, which is ``default`` until the module is imported."""

    def put(value: Any) -> None:
        setattr(sys.modules[module], name, value)

    return lambda: getattr(sys.modules.get(module), name, default), put


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
    """Two notes beside the function mode that carries the device out."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context, getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)


def _put_default_device(value: tuple[Any, Any]) -> None:
    torch._GLOBAL_DEVICE_CONTEXT.device_context, current = value
    module: Any = sys.modules.get("torch.utils._device")
    if module is not None:
        module.CURRENT_DEVICE = current


def _autocast_on(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def put(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, value[0])
        torch.set_autocast_dtype(device, value[1])

    return lambda: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)), put


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _put_autocast_nesting(depth: int) -> None:
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def _fp32_precision(library: str, backend: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def get() -> tuple[bool | None, list[str]]:
        try:
            allowed = getattr(_C, f"_get_{library}_allow_tf32")()
        except RuntimeError:  # the new switches were used, and differ
            allowed = None
        return allowed, [_C._get_fp32_precision_getter(backend, operation) for operation in _PRECISE]

    def put(value: tuple[bool | None, list[str]]) -> None:
        allowed, precisions = value
        if allowed is not None:
            getattr(_C, f"_set_{library}_allow_tf32")(allowed)
        for operation, now, then in zip(_PRECISE, get()[1], precisions, strict=True):
            if now != then:
                _C._set_fp32_precision_setter(backend, operation, then)

    return get, put


def _put_ban(message: str | None) -> None:
    if message is None:
        _C._autograd._saved_tensors_hooks_enable()
    else:
        _C._autograd._saved_tensors_hooks_disable(message)


def _saved_tensor_hooks() -> tuple[Any, ...]:
    """All of them, the outermost first. Only the innermost can be seen, so the others are uncovered."""
    hooks = []
    while (top := _C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        _C._autograd._pop_saved_tensors_default_hooks()
    _push_saved_tensor_hooks(hooks[::-1])
    return tuple(hooks[::-1])


def _put_saved_tensor_hooks(hooks: tuple[Any, ...]) -> None:
    while _C._autograd._top_saved_tensors_default_hooks(True) is not None:
        _C._autograd._pop_saved_tensors_default_hooks()
    _push_saved_tensor_hooks(hooks)


def _push_saved_tensor_hooks(hooks: Any) -> None:
    for pack, unpack in hooks:
        _C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _functorch_levels() -> int:
    return int(_C._functorch.get_dynamic_layer_stack_depth())


def _put_functorch_levels(depth: int) -> None:
    while _functorch_levels() > depth:
        _C._functorch.pop_dynamic_layer_stack()


def _forward_ad_level() -> int:
    return int(torch.autograd.forward_ad._current_level)


def _put_forward_ad_level(level: int) -> None:
    while _forward_ad_level() > level:
        torch.autograd.forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]


def _parametrize_cached() -> int:
    """How many ``cached()`` blocks are on."""
    return int(getattr(sys.modules.get("torch.nn.utils.parametrize"), "_cache_enabled", 0))


def _put_parametrize_cached(count: int) -> None:
    module: Any = sys.modules["torch.nn.utils.parametrize"]
    module._cache_enabled = count
    if not count:
        module._cache = {}
