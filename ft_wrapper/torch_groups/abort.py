"""The abort: makes every pending operation of ``torch.distributed`` in this process fail."""

import contextlib
import functools
import logging
import os
from typing import Any

import torch

from ..monitor.frames import current_frames, locations
from ..store.bounded import in_background
from . import nccl
from .gloo import shut_down_gloo_sockets
from .sockets import shut_down_clients

log = logging.getLogger(__name__)
c10d: Any = torch.distributed.distributed_c10d
_SOON = 0.25  # seconds within which an abort normally returns

_aborting: list[str] = []  # groups whose abort has not returned


def abort_all() -> None:
    """Makes every pending operation of ``torch.distributed`` in this process fail.

    `ft_wrapper.abort.AbortTorchDistributed` describes what that frees, and what it does not. If
    ``torch.distributed`` is not in use, it does almost nothing. It raises nothing, but logs failures.
    """
    # The backends' own aborts last: NCCL's may hang, and the other steps only touch sockets.
    for what, step in (
        ("gloo", functools.partial(shut_down_gloo_sockets, _size_being_made)),
        ("the iteration's store", _abort_store_clients),
        ("NCCL's initialization", nccl.free_pending_init),
        ("the backends", _abort_backends),
    ):
        try:
            step()
        except Exception:
            log.warning("could not abort %s", what, exc_info=True)


def abort_may_hang() -> bool:
    """Whether `abort_all` would call a backend's abort. For gloo it only shuts down sockets."""
    try:
        return bool(groups_that_abort())
    except Exception:  # the function is just making a group
        return True


def describe_pending_aborts() -> str:
    """Names the groups whose abort has not returned."""
    return ", ".join(_aborting) or "not in a process group"


def _size_being_made() -> int:
    """Upper bound for the size of the group that some thread is making; 0 if no thread makes one."""
    inside = (place for frame in current_frames().values() for place in locations(frame))
    if not any(at.function == "_new_process_group_helper" and at.file == c10d.__file__ for at in inside):
        return 0
    size, default = os.environ.get("WORLD_SIZE", ""), c10d._world.default_pg
    return default.size() if default is not None else int(size) if size.isdecimal() else 0


def _abort_store_clients() -> None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if host and port.isdecimal():
        shut_down_clients(host, int(port))


def groups_that_abort() -> dict[Any, dict[torch.device, Any]]:
    """All groups but gloo's, with their backends."""
    # By name, not by class: torch >= 2.15 has two classes for NCCL, and other programs add their own.
    backends = {group: backends_of(group) for group in c10d._world.pg_names}
    return {group: its for group, its in backends.items() if not its or not all(map(is_gloo, its.values()))}


def _abort_backends() -> None:
    """Aborts all groups at once: one abort may wait for another (pytorch issue 119797)."""
    backends = groups_that_abort()
    if not backends:
        return
    threads = []
    with nccl.service_threads_awake(aborted=True):
        for group, its in backends.items():
            kinds = ", ".join(one.name() for one in its.values())
            name = f"group {c10d._world.pg_names[group]} of {kinds}"
            threads.append(in_background(f"aborting {name}", functools.partial(abort_group, group, name)))
        for thread in threads:
            thread.join(_SOON)
            if thread.is_alive():  # behind a destroy, which since NCCL 2.31 waits for peers (pytorch 194679)
                in_background("freeing NCCL's destroy", nccl.free_pending_init).join()  # raises nothing
            thread.join()


def abort_group(group: Any, name: str) -> None:
    _aborting.append(name)
    try:
        # Before torch 2.8 groups have no abort, and of the backends only NCCL's has one.
        for one in [group] if hasattr(group, "abort") else backends_of(group).values():
            if hasattr(one, "abort"):
                one.abort()
    except Exception:
        log.warning("could not abort %s; hard_timeout limits any wait there", name, exc_info=True)
    finally:
        _aborting.remove(name)


def backends_of(group: Any) -> dict[torch.device, Any]:
    """A group's backends, by device. A group that is a Python class is its own backend."""
    if not group._device_types:
        return {torch.device("cpu"): group}
    found = {}
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            found[device] = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    return found


def is_gloo(backend: Any) -> bool:
    """Whether a backend is gloo's. Its ``abort`` does nothing, so its sockets are shut down instead."""
    return bool(getattr(backend, "name", str)() == "gloo")
