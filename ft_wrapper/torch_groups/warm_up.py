"""Warming up: while spares wait, they do the work that torch leaves to the first training step.

Most of that is one import, of torch's compiler, which the first optimizer or `DistributedDataParallel` object
needs. It takes a second, or several on a busy machine. Otherwise a spare that takes a lost rank's place would
be that late with its first step, and delay all other ranks.

The replacement of a lost process creates its device's context before it joins, while the survivors abort.
"""

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..monitor.frames import forget_frames
from ..protocol import keys
from ..protocol.operations import Operations, read, write_text
from ..store.bounded import in_background
from .caches import reset_compiled_code_at_entry

log = logging.getLogger(__name__)

_LAZY_MODULES = ("sympy", "torch.distributed.fsdp", "torch._dynamo")

_early: list[threading.Thread] = []
# Events, not the thread's `join`: after an interrupted join, Python 3.11 takes the thread for ended.
_imports_begun, _imports_through = threading.Event(), threading.Event()
#: The parts that have run, or failed, in this process.
_done: list[Callable[[], object]] = []


def warm_up(users: Callable[[], object] | None, is_interrupted: Callable[[], bool]) -> None:
    """Runs the parts that have not run in this process. A part that fails is logged and not retried.

    Args:
        users: the user's own part; None if there is none.
        is_interrupted: whether the caller is being made to leave. Then an exception of a part counts as
            caused by that, and the part runs again the next time.

    Raises:
        Exception: an exception of a part while the caller is being made to leave.
        BaseException: any error of the user's part that is not an ``Exception``.
    """
    if not _imports_begun.is_set():
        # In a thread, since the caller may be made to leave, and an import cannot be cut short.
        in_background("importing what torch imports late", _import)
        _imports_begun.wait()
    await_imports()
    # The user's part first, since it may choose the device for the other parts.
    for part in (users, _train, _reduce_alone):
        if part is None or part in _done:
            continue
        if part is users:
            reset_compiled_code_at_entry()
        try:
            part()
        except Exception as error:
            if is_interrupted():
                raise
            _done.append(part)  # before the log line, or an interruption between both would repeat it
            words = "%s failed: this spare keeps waiting, and may be late with its first step"
            log.warning(words, "warm_up" if part is users else "warming torch", exc_info=error)
            forget_frames(error)
        else:
            _done.append(part)


def announce_cuda(store: Operations) -> None:
    """Notes, for the replacements of lost processes, that CUDA is in use. Without CUDA it does nothing."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        write_text(store, keys.CUDA, str(torch.cuda.device_count()))


def make_context_early(store: Operations, incarnation: int) -> None:
    """Creates the context of the device that ``LOCAL_RANK`` names, in a thread, if the job uses CUDA.

    A replacement does this before it joins, while the survivors may still be aborting. It does nothing if it
    sees a different number of devices: then the function chooses the visible devices.

    Args:
        store: the job's store, to which `announce_cuda` writes.
        incarnation: number of processes that had the slot before.
    """
    is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    count = read(store, keys.CUDA) if incarnation and is_built else None

    def make() -> None:
        device = os.environ.get("LOCAL_RANK", "")
        if str(torch.cuda.device_count()) == count and device.isdecimal() and int(device) < int(count):
            torch.zeros((), device=f"cuda:{device}")

    if count is not None:
        _early.append(in_background("making the device's context early", make))


def await_early_context() -> None:
    """Waits, at the end of a call, for the thread of `make_context_early` and for the imports."""
    while _early:
        _early.pop().join(10.0)
    await_imports(10.0)


def await_imports(seconds: float | None = None) -> None:
    """Waits for the imports, before the function may fork: a child would wait for a thread it lacks."""
    if _imports_begun.is_set():
        _imports_through.wait(seconds)


def _import() -> None:
    _imports_begun.set()  # here, since the caller may be interrupted before the thread starts
    try:
        import_lazy_modules()
    finally:
        _imports_through.set()


def import_lazy_modules() -> None:
    """Imports the modules that torch imports only at their first use."""
    before = set(os.environ)
    try:
        with torch.device("cpu"):  # torch 2.6's compiler computes while it is imported
            for name in _LAZY_MODULES:
                importlib.import_module(name)
    finally:
        # The compiler's import sets the path of its cache, and torch sets it again on use. Other new
        # variables are another thread's.
        for name in {name for name in os.environ if "TORCHINDUCTOR" in name} - before:
            del os.environ[name]


def _train() -> None:
    """Trains a tiny model for one step, without drawing random numbers."""
    device = _device()
    if device is None:
        return
    with torch.device(device), torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(8, 8, dtype=torch.float32, requires_grad=True)
        optimizer = torch.optim.AdamW([weight])
        x = torch.ones(1, 2, 4, 8, dtype=torch.float32)  # batch, heads, length, width
        x = F.gelu(F.layer_norm(F.linear(x, weight), (8,)))
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        loss = F.cross_entropy(x.flatten(0, 2), torch.zeros(8, dtype=torch.long))
        torch.autograd.backward(loss)
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reduce_alone() -> None:
    """Reduces a number with NCCL without other ranks, since NCCL loads its kernels with the first group.

    On an H100 the first group costs 0.48 s, later ones 0.06 s.
    """
    if torch.cuda.is_initialized() and torch.distributed.is_nccl_available():  # type: ignore[no-untyped-call]
        torch.cuda.nccl.all_reduce((torch.ones(1, device="cuda"),))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _device() -> torch.device | None:
    """The device on which this process will train; None if unknown.

    A torch built for GPUs queries them in the first backward pass, even on the CPU. That would be too early
    before the function has chosen its device, since it may still set which devices are visible.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    with contextlib.suppress(RuntimeError):  # torch 2.6 raises it if there is no accelerator
        if torch.backends.cuda.is_built() or torch.accelerator.current_accelerator():  # type: ignore[no-untyped-call]
            return None
    return torch.device("cpu")
