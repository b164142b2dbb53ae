"""State that torch keeps from an earlier iteration: clears caches and cycles, restores switches.

Several caches of torch assume that ranks never move:

- DTensor's caches are keyed by a mesh's layout. After a restart, operations go on with the old mesh, where
  this process has another coordinate. They return another rank's rows, without an error.
- Symmetric memory's tables are keyed by group name, and the names start over.
- Compiled code has ``get_rank()`` and ``get_world_size()`` as constants.
- The functions of ``torch.distributed.nn`` have, as a default argument, the group that was the default one
  when they were imported.
- The process that writes checkpoints for ``async_save`` keeps a group with lost ranks.

No module is imported to clear its caches. Their names are torch 2.13's. An older torch that lacks a name has
no such cache; if 2.13 or a newer torch lacks one, a warning says so.
"""

import contextlib
import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

_C: Any = torch._C
_KNOWN = (2, 13)
_KILL_PATIENCE = 5.0  # seconds for a process to end after SIGKILL

_warned: set[str] = set()
_compiled_for: tuple[int, int] | None = None
_frozen: set[str] = set()
_frozen_modules: list["weakref.ref[torch.nn.Module]"] = []


def clear_caches() -> None:
    """Clears torch's caches after an iteration; raises nothing.

    Call it in the thread that ran the function, once process groups are released. Each thread has its own
    fast DTensor cache. It is cleared in this thread and in the threads that run CUDA backward passes, but not
    in other user threads.
    """
    # Imports nothing: most programs have none of these modules, and the other ranks wait for this.
    for what, name, step in _STEPS:
        module = sys.modules.get(name)
        # A spare's warm-up may be importing it right now.
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _succeeds(what, step, module)


def end_checkpoint_process() -> None:
    """Ends the process that writes checkpoints for ``async_save``, and any save under way."""
    executor = sys.modules.get("torch.distributed.checkpoint._async_process_executor")
    if executor is not None:
        _succeeds("the checkpoint process", _end_checkpoint_process, executor)


def reset_compiled_code(rank: int, world_size: int) -> bool:
    """Drops compiled code that was compiled for another rank or world size.

    Args:
        rank: active rank of this process in the iteration that it is about to enter.
        world_size: number of active ranks in that iteration.

    Returns:
        Whether code was dropped, so that the next step compiles again.
    """
    global _compiled_for
    before, _compiled_for = _compiled_for, (rank, world_size)
    if before in (None, _compiled_for) or not _has_compiled():
        return False
    return _succeeds("compiled code", torch.compiler.reset)


def reset_compiled_code_at_entry() -> None:
    """Makes the next entry drop the code that this process, a spare, may compile from now on.

    A spare has no process group, so ``is_initialized()`` is also a wrong constant in that code.
    """
    global _compiled_for
    _compiled_for = (-1, 0)  # no rank


def collect_garbage(when: str) -> None:
    """Frees objects that an iteration left in reference cycles, before the next one makes its own.

    FSDP2 models, compiled models and those of several frameworks refer to themselves. Until the collector
    runs, they keep their memory, their process groups and the groups' sockets. On a GPU the next model does
    not fit next to them.

    At its first call for each ``when`` it also freezes the remaining objects. Imports make hundreds of
    thousands of objects: with them a collection takes tenths of a second, without them less than a
    millisecond. The collector never frees frozen objects. So if frozen modules are still alive and there are
    new modules, which may replace the frozen ones, all objects are unfrozen and collected.

    Args:
        when: ``"call"`` before the first call, so that the script's imports cost no restart time;
            ``"restart"``, or ``"warm-up"`` after a spare's warm-up, for imports of the function.
    """
    if (when == "call" and _frozen) or (when == "warm-up" and when in _frozen):
        return
    if _frozen_modules and any(each() is not None for each in _frozen_modules) and _modules():
        gc.unfreeze()
        _frozen.discard(when)
    gc.collect()
    if when not in _frozen:
        _frozen_modules.extend(map(weakref.ref, _modules()))
        gc.freeze()
        _frozen.add(when)


def _modules() -> list[torch.nn.Module]:
    """The modules that have parameters, and that the collector has not frozen."""
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module))
    return [each for each in found if getattr(each, "_parameters", None)]


def _succeeds(what: str, step: Callable[..., object], *arguments: Any) -> bool:
    """Whether a step succeeded, or this torch is too old to need it. If not, it warns once."""
    try:
        step(*arguments)
    except Exception as error:
        log.debug("%r", step, exc_info=True)
        is_old = torch.torch_version.TorchVersion(torch.__version__) < _KNOWN  # type: ignore[operator]
        if isinstance(error, AttributeError) and is_old:
            return True
        if what not in _warned:
            _warned.add(what)
            words = "torch %s cannot be made to forget old ranks: %s. "
            words += "Results may be wrong once ranks have moved; see docs/usage.md, 'What torch keeps'"
            log.warning(words, torch.__version__, what)
        return False
    return True


def _clear_fast_cache(_: Any) -> None:
    clear = torch._C._clear_DTensor_sharding_propagator_cache
    clear()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]
            # Other devices are unused, and stay unused.
            with torch.inference_mode(False), torch.enable_grad():
                zero = torch.zeros((), device=f"cuda:{device}", requires_grad=True)
                _InDevicesThread.apply(zero, clear).backward()  # type: ignore[no-untyped-call]


class _InDevicesThread(torch.autograd.Function):
    """Calls a function in autograd's thread for backward passes on the tensor's device."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return grads[0], None


def _clear_propagation(api: Any) -> None:
    propagator = api.DTensor._op_dispatcher.sharding_propagator
    # Each thread has its own contents, and `cache_clear` empties only the caller's. A new object empties all.
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(
        propagator.propagate_op_sharding_non_cached
    )
    type(propagator)._propagate_tensor_meta_cached.cache_clear()


def _clear_redistribution(redistribute: Any) -> None:
    redistribute._gen_transform_infos.cache_clear()
    redistribute.clear_redistribute_planner_cache()


def _clear_topology(collectives: Any) -> None:
    collectives.MeshTopoInfo.build_from_mesh.cache_clear()


def _drop_rng_tracker(random: Any) -> None:
    if random._rng_tracker is not None:
        random._rng_tracker = None


def _clear_symmetric_memory(memory: Any) -> None:
    memory._group_name_to_store.clear()
    memory._group_name_to_workspace_tensor.clear()


def _drop_default_group(functional: Any) -> None:
    """Sets default arguments that are a group to None, which stands for the current default group."""
    group = torch.distributed.ProcessGroup
    for value in vars(functional).values():
        if isinstance(value, types.FunctionType) and value.__defaults__:
            value.__defaults__ = tuple(None if isinstance(one, group) else one for one in value.__defaults__)


_STEPS: tuple[tuple[str, str, Callable[[Any], None]], ...] = (
    ("DTensor's fast cache", "torch.distributed.tensor._api", _clear_fast_cache),
    ("DTensor's propagation caches", "torch.distributed.tensor._api", _clear_propagation),
    ("DTensor's redistribution caches", "torch.distributed.tensor._redistribute", _clear_redistribution),
    ("DTensor's mesh topologies", "torch.distributed.tensor._collective_utils", _clear_topology),
    ("DTensor's random number tracker", "torch.distributed.tensor._random", _drop_rng_tracker),
    ("torch.distributed.nn's default group", "torch.distributed.nn.functional", _drop_default_group),
    ("symmetric memory", "torch.distributed._symmetric_memory", _clear_symmetric_memory),
)


def _end_checkpoint_process(executor: Any) -> None:
    checkpointer = executor._CHECKPOINT_PROCESS
    if checkpointer is None:
        return
    executor._CHECKPOINT_PROCESS = None
    process = checkpointer._save_process
    process.kill()
    process.join(_KILL_PATIENCE)


def _has_compiled() -> bool:
    """Whether this process may have compiled code since the last reset."""
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    with contextlib.suppress(AttributeError):
        return convert_frame is not None and bool(convert_frame.input_codes.seen)
    return True  # this torch does not show it


# Switches ---------------------------------------------------------------------------------------------------

# Of torch._C: a readable name, the getter and the setter.
_SWITCHES = (
    ("gradient mode", "is_grad_enabled", "_set_grad_enabled"),  # 107 of 800
    ("default dtype", "get_default_dtype", "_set_default_dtype"),  # 12 of 300
    # cudnn.flags(): 68 of 300
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


class TorchState:
    """The values of torch's switches, for the calling thread and the process, when this was made.

    A switch that the function turns off temporarily, such as gradients, stays off if an exception or an
    interrupt occurs meanwhile. The next entry would fail for a reason unrelated to the fault, or compute
    different numbers. So this is made before the first entry, and `restore` brings back the old values.

    It covers only switches that were seen left behind; comments give how often, before interrupts waited for
    a safe point (`ft_wrapper.monitor.safe_points`). Since then an interrupt has left none of these, 0 of
    10,010. Nor has it left those not covered: modes for functions and dispatch, the default device, cudnn's
    precision; nor, 0 of 400 each, inference mode, autocast, saved-tensor hooks, parametrize's cache,
    functorch's levels, forward AD, anomaly detection, multithreaded backward, mkldnn's switches.

    User state stays as the function left it: the environment, standard output, warning filters, random
    numbers. Names differ between versions of torch: those that this version lacks are left out.
    """

    def __init__(self) -> None:
        self._values = _switches()
        self._logged: set[str] = set()

    def restore(self) -> list[str]:
        """Restores the changed switches, and logs each one once; call it in the same thread.

        Returns:
            The names of the changed switches.
        """
        now = _switches()
        changed = [name for name, value in self._values.items() if now[name] != value]
        with _C.DisableTorchFunction():  # bypasses a function mode from before the call
            for name, _, setter in _SWITCHES:
                if name in changed:
                    getattr(_C, setter)(self._values[name])
        if fresh := [name for name in changed if name not in self._logged]:
            self._logged.update(fresh)
            log.warning(
                "the function left torch's state changed; restored, now and at each restart: %s. Settings "
                "for every iteration belong in the function, or before its call",
                ", ".join(fresh),
            )
        return changed


def _switches() -> dict[str, Any]:
    """The value of each switch, by its readable name."""
    there = [one for one in _SWITCHES if hasattr(_C, one[1]) and hasattr(_C, one[2])]
    return {name: getattr(_C, getter)() for name, getter, _ in there}
