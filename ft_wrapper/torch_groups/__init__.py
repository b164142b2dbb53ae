"""Process groups of ``torch.distributed``: aborting them all; and the GPU that a rank uses."""

import functools
import logging
import os
import sys
from types import FrameType
from typing import Any

import torch

from ..monitor.frames import current_frames
from .gloo import shut_down_clients, shut_down_gloo_sockets

log = logging.getLogger(__name__)


def abort_all() -> None:
    """Makes every operation of ``torch.distributed`` that is under way in this process fail.

    See `ft_wrapper.abort.AbortTorchDistributed` for what that frees, and what not. Does next to nothing where
    ``torch.distributed`` is not in use. Raises nothing: what fails is logged.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    # NCCL last: its abort has been known to hang, the other two only touch sockets.
    for what, step in (
        ("gloo", functools.partial(shut_down_gloo_sockets, lambda: _size_being_made(c10d))),
        ("the iteration's store", _abort_store_clients),
        ("NCCL", lambda: _abort_nccl(c10d)),
    ):
        try:
            step()
        except Exception:
            log.warning("could not abort %s", what, exc_info=True)


def cuda_device() -> int | None:
    """Index of the GPU that this process uses; None where it has not used any so far.

    It is the one that ``LOCAL_RANK`` names, if the process sees it, else the current one.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    local_rank = os.environ.get("LOCAL_RANK", "")
    # A launcher that shows each rank its own GPU only makes all of them number 0.
    if local_rank.isdecimal() and int(local_rank) < torch.cuda.device_count():
        return int(local_rank)
    return torch.cuda.current_device()


def _size_being_made(c10d: Any) -> int:
    """Size, at most, of the group that some thread is making; 0 when none does."""
    for frame in current_frames().values():
        inner: FrameType | None = frame
        while inner is not None:
            code = inner.f_code
            if code.co_name == "_new_process_group_helper" and code.co_filename == c10d.__file__:
                size = os.environ.get("WORLD_SIZE", "")
                default = c10d._world.default_pg
                return default.size() if default is not None else int(size) if size.isdecimal() else 0
            inner = inner.f_back
    return 0


def _abort_store_clients() -> None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if host and port.isdecimal():
        shut_down_clients(host, int(port))


def _abort_nccl(c10d: Any) -> None:
    if not c10d.is_nccl_available():
        return
    with_nccl = []
    for group, _ in sorted(c10d._world.pg_names.items(), key=lambda item: str(item[1]), reverse=True):
        backend = _nccl_backend(c10d, group)
        if backend is not None:
            with_nccl.append((group, backend))
    if not with_nccl:
        return
    # All within one NCCL group, in the same order on every rank: aborting one communicator may wait for the
    # abort of another. Between start and end nothing may return early.
    first = with_nccl[0][1]
    first._group_start()
    try:
        for group, _ in with_nccl:
            try:
                group.abort()
            except Exception:
                log.warning("could not abort NCCL group %r", group, exc_info=True)
    finally:
        first._group_end()


def _nccl_backend(c10d: Any, group: Any) -> Any:
    try:
        backend = group._get_backend(c10d.torch.device("cuda"))
    except RuntimeError:
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return backend if isinstance(backend, c10d.ProcessGroupNCCL) else None
