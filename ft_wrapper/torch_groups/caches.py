"""Torch's caches, which keep what belongs to an iteration that is over; garbage with them.

Several caches of torch do not know that ranks can move. DTensor's are keyed by a mesh's layout: after a
restart operations go on with the old mesh, whose coordinate is another rank's, and give that rank's rows
without an error. Symmetric memory's tables are keyed by group name, and names begin again. Compiled code has
``get_rank()`` and ``get_world_size()`` as constants. The functions of ``torch.distributed.nn`` have the
default group of the moment of their import as a default argument. The process that writes checkpoints for
``async_save`` keeps a group with ranks that are gone.

Nothing is imported for it: what was not imported has nothing to forget. The names are torch 2.13's. Where an
older torch lacks one, it has no such cache; where 2.13 or a newer one does, a warning says so.
"""

import contextlib
import gc
import logging
import sys
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

_KNOWN = (2, 13)
_SLOW_COLLECTION = 1.0  # seconds
_KILL_PATIENCE = 5.0  # seconds, for a process to be gone after SIGKILL

_warned: set[str] = set()
_compiled_for: tuple[int, int] | None = None
_frozen: set[str] = set()
_frozen_modules: list["weakref.ref[torch.nn.Module]"] = []


def clear_caches() -> None:
    """Clears torch's caches of the iteration that is over; raises nothing.

    Call it in the thread that ran the function, once process groups are released. DTensor's fast cache
    is each thread's own: it is cleared in this thread and in those that run CUDA backward passes, not in
    threads of the user's that live on.
    """
    # Most programs have imported none of these, and in each restart the others wait for this.
    for what, name, step in _STEPS:
        module = sys.modules.get(name)
        # A spare's warm-up may import it just now.
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _succeeds(what, step, module)


def end_checkpoint_process() -> None:
    """Ends the process that writes checkpoints for ``async_save``, and with it a save under way."""
    executor = sys.modules.get("torch.distributed.checkpoint._async_process_executor")
    if executor is not None:
        _succeeds("the checkpoint process", _end_checkpoint_process, executor)


def reset_compiled_code(rank: int, world_size: int) -> bool:
    """Drops compiled code if it was compiled for another rank or world size.

    Args:
        rank: of this process among the active ones, in the iteration that it is about to enter.
        world_size: number of active ranks there.

    Returns:
        Whether it was dropped, so that the next step compiles.
    """
    global _compiled_for
    before, _compiled_for = _compiled_for, (rank, world_size)
    if before in (None, _compiled_for) or not _has_compiled():
        return False
    return _succeeds("compiled code", torch.compiler.reset)


def reset_compiled_code_at_entry() -> None:
    """Makes the next entry drop the code that this process, a spare, may compile from now on.

    Without a process group ``is_initialized()`` is a constant in it, too.
    """
    global _compiled_for
    _compiled_for = (-1, 0)  # no rank


def collect_garbage(when: str) -> None:
    """Frees what an iteration left in reference cycles, before the next one makes its own.

    FSDP2 models, compiled ones and those of several frameworks refer to themselves. Until the collector runs
    they keep their memory, their process groups and those groups' sockets; on a GPU the next model does not
    fit beside them.

    The first time at each point it also freezes what is left. With the hundreds of thousands of objects that
    imports make a collection takes tenths of a second; without them, less than a millisecond. The collector
    never frees what is frozen. So all is thawed, and looked at, where modules were frozen that still live and
    there are new ones: the old ones may be what these replace.

    Args:
        when: before the first ``"call"``, so that what the script has imported costs no restart time; or at a
            ``"restart"`` or after a spare's ``"warm-up"``, for what the function has imported.
    """
    if (when == "call" and _frozen) or (when == "warm-up" and when in _frozen):
        return
    began = time.monotonic()
    if _frozen_modules and any(each() is not None for each in _frozen_modules) and _modules():
        gc.unfreeze()
        _frozen.discard(when)
    gc.collect()
    seconds = time.monotonic() - began
    if when == "restart" and seconds > _SLOW_COLLECTION and "collection" not in _warned:
        _warned.add("collection")
        words = (
            "collecting garbage took %.1f s of this restart: there are %d objects. Import at the top of the "
            "script, and make what is large there: what is there before the call is not looked at. "
            "collect_garbage=False leaves it to Python; see docs/usage.md, 'What torch keeps'"
        )
        log.warning(words, seconds, len(gc.get_objects()))
    if when not in _frozen:
        _frozen_modules.extend(map(weakref.ref, _modules()))
        gc.freeze()
        _frozen.add(when)


def _modules() -> list[torch.nn.Module]:
    """Those with parameters that are not frozen."""
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module))
    return [each for each in found if getattr(each, "_parameters", None)]


def _succeeds(what: str, step: Callable[..., object], *arguments: Any) -> bool:
    """Whether a step could be carried out, or this torch is so old that it need not be; warns once if not."""
    try:
        step(*arguments)
    except Exception as error:
        log.debug("%r", step, exc_info=True)
        is_old = torch.torch_version.TorchVersion(torch.__version__) < _KNOWN  # type: ignore[operator]
        if isinstance(error, AttributeError) and is_old:
            return True
        if what not in _warned:
            _warned.add(what)
            words = "torch %s does not let go of what it keeps of old ranks: %s. "
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
            # The other devices were not used, and stay unused.
            with torch.inference_mode(False), torch.enable_grad():
                zero = torch.zeros((), device=f"cuda:{device}", requires_grad=True)
                _InDevicesThread.apply(zero, clear).backward()  # type: ignore[no-untyped-call]


class _InDevicesThread(torch.autograd.Function):
    """Calls a function in the thread in which autograd runs backward passes on the tensor's device."""

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
    # Its contents are each thread's own, and `cache_clear` empties the caller's; another object empties all.
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
    """None, which they have where no group was there at their import, stands for the present one."""
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
    """Whether code of this process was compiled since the last reset."""
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    with contextlib.suppress(AttributeError):
        return convert_frame is not None and bool(convert_frame.input_codes.seen)
    return True  # not to be seen in this torch
