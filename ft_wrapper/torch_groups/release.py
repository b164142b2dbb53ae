"""Destroying process groups between two iterations, without the deadlock that torch has there.

A gloo group's destructor waits for the group's threads; these need the interpreter's lock to drop the tensors
of a failed collective. When the last reference to a group is held by C++ (the reducer inside a
``DistributedDataParallel``), that destructor runs with the lock held, and both wait for ever. When the last
reference is one of Python's, torch releases the lock first. So Python references to every group and backend
are kept until the groups' threads have nothing left to do, and a background thread drops them: joining gloo's
threads takes about 10 ms a group, too long for a restart.

Most scripts call ``destroy_process_group`` in their last line, before the function's frame drops the model:
three ranks that did so, without any fault, hung in nearly every call. So that function is taken over while
the wrapped one runs.
"""

import contextlib
import logging
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

from ..store.bounded import in_background
from . import nccl, tracker
from .abort import abort_group, c10d, groups_that_abort, is_gloo
from .gloo import unnamed_threads
from .sockets import POLLS, named_threads, system_call

log = logging.getLogger(__name__)
_WORKER_NAME = "pt_gloo_runloop"
# Twice as long as a thread that wants the interpreter's lock sleeps between two attempts, and more.
_IDLE_CHECK = 0.02
_IDLE_LIMIT = 5.0

_to_drop: list[list[Any]] = []  # references to released groups, while a thread runs that drops them
_dropping = threading.Lock()
_background: list[threading.Thread] = []  # that thread, or the last one
_torchs_destroy: Any = None


def release_process_groups(*, aborted: bool = False, kept: Any = None) -> None:
    """Destroys all process groups and resets what ``torch.distributed`` remembers of them.

    Call it in the thread that ran the function, after that has left and `AbortTorchDistributed` has returned.
    Afterwards ``is_initialized()`` is False and group names count from 0 again, also when
    ``init_process_group`` was interrupted half-way. The groups' threads and sockets end in the background:
    `wait_for_released_groups`. Does nothing where ``torch.distributed`` was not used. Raises nothing: what
    fails is logged.

    Args:
        aborted: the function was interrupted. Groups that NCCL has not finished with are aborted, not waited
            for: a peer may be gone. False lets operations in flight come to their end.
        kept: the default group, if it is to stay; then all others are destroyed.
    """
    world, names = c10d._world, c10d._world.pg_names
    references = _references(world, kept)
    groups = [world.default_pg] if world.default_pg is not None else []  # all others go with it
    if kept is not None:
        groups = sorted(set(names) - {kept}, key=lambda each: str(names[each]), reverse=True)
    for group in groups:
        try:
            _destroy(group, aborted)
        except Exception:
            log.warning("torch.distributed could not destroy %r", group, exc_info=True)
    world.group_count = 1  # names of new groups begin behind the kept one's
    try:
        if kept is None:
            _reset_tables()
        _unhook()
        _drop_meshes()
    except Exception:
        log.warning("torch.distributed could not be reset", exc_info=True)
    if references:
        _drop_in_background(references)


@contextlib.contextmanager
def taking_over_destroy() -> Iterator[None]:
    """Within it, ``destroy_process_group`` releases groups as `release_process_groups` does.

    For its caller they are gone at once, as always: operations in flight come to their end, and a new
    ``init_process_group`` works. Names of new groups do not begin at 0 again: they meet in the same store,
    where what the destroyed ones have written still is.

    Its code is replaced, not the name: scripts import that before the call.
    """
    global _torchs_destroy
    destroy: Any = c10d.destroy_process_group
    ours = _in_the_place_of_destroy.__code__
    if not isinstance(destroy, types.FunctionType) or destroy.__closure__ or destroy.__code__ is ours:
        yield  # another program has put its own there; or this is a call within another one
        return
    code = destroy.__code__
    _torchs_destroy = types.FunctionType(code, destroy.__globals__, destroy.__name__, destroy.__defaults__)
    destroy.__code__ = ours
    try:
        yield
    finally:
        destroy.__code__ = code


def _in_the_place_of_destroy(group: Any = None) -> None:
    import ft_wrapper.torch_groups.release  # it runs among the names of torch's module

    ft_wrapper.torch_groups.release.destroy_and_release(group)


def destroy_and_release(group: Any) -> None:
    """What ``destroy_process_group`` does within `taking_over_destroy`.

    Args:
        group: as there.
    """
    world = c10d._world
    references, count = _references(world, None), world.group_count
    try:
        with _destroying():
            _torchs_destroy(group)
    finally:
        world.group_count = max(count, world.group_count)
        _drop_in_background(references)


def wait_for_released_groups(timeout: float = 10.0) -> bool:
    """Waits until the groups that were released are gone, with their threads and sockets.

    Args:
        timeout: seconds.

    Returns:
        False when some are still there; a warning says so.
    """
    for thread in list(_background):
        thread.join(timeout)
        if thread.is_alive():
            log.warning("process groups still not gone after %g s", timeout)
            return False
    return True


def _destroy(group: Any, aborted: bool) -> None:
    """Destroys a group, or all with the default one; aborted ones are not waited for."""
    if not aborted:
        with _destroying():
            c10d.destroy_process_group(group)
    elif hasattr(group, "abort") or "nccl" in str(c10d._world.pg_backend_config.get(group)):
        c10d._abort_process_group(group)
    # Else it is torch 2.6, which would say at each restart that there is nothing to abort.


def _destroying() -> contextlib.AbstractContextManager[None]:
    return nccl.service_threads_awake(aborted=False) if groups_that_abort() else contextlib.nullcontext()


def _references(world: Any, kept: Any) -> list[Any]:
    """Every group, its store and its backends, as Python objects; but not the one that stays."""
    references: list[Any] = []
    for group, value in list(world.pg_map.items()):
        if group is kept:
            continue
        references.append((group, value))
        tracker.current.track(group)
        with contextlib.suppress(Exception):  # it has no backend
            references.extend(group._get_backend(device) for device in group._device_types)
    return references


def _reset_tables() -> None:
    """Clears what an interrupted ``init_process_group``, or a failed destruction, leaves behind."""
    world = c10d._world
    leftovers = list(world.pg_map)
    for group in leftovers:
        abort_group(group, repr(group))
    if leftovers or world.default_pg is not None:
        c10d._update_default_pg(None)
        tables = "pg_map pg_names pg_group_ranks pg_backend_config pg_to_tag tags_to_pg pg_coalesce_state"
        for name in tables.split():
            getattr(world, name).clear()
        c10d._unregister_all_process_groups()
    # Names are made from this counter. Left raised, it makes them differ between ranks, and the next
    # init_process_group waits for ever.
    world.group_count = 0


def _unhook() -> None:
    """Takes off the ``sys.excepthook`` that each ``init_process_group`` puts around the last one."""
    hook: Any = sys.excepthook
    torchs = (c10d.__name__, "_distributed_excepthook")
    while (getattr(hook, "__module__", None), getattr(hook, "__name__", None)) == torchs:
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        if "old_hook" not in cells:
            return
        hook = sys.excepthook = cells["old_hook"].cell_contents


def _drop_meshes() -> None:
    """Forgets meshes of dead groups: an active one, and torch < 2.8's tables of sub-meshes."""
    device_mesh: Any = sys.modules.get("torch.distributed.device_mesh")
    resources = getattr(device_mesh, "_mesh_resources", None)
    older = "child_to_root_mapping root_to_flatten_mapping flatten_name_to_root_dims"
    for name in ("mesh_stack", *older.split()):
        getattr(resources, name, []).clear()


def _drop_in_background(references: list[Any]) -> None:
    """Has a thread drop them: the one that runs, if there is one, for a function may destroy many groups."""
    with _dropping:
        _to_drop.append(references)
        if len(_to_drop) == 1:  # else it comes to them
            _background[:] = [in_background("release-groups", _drop_all)]


def _drop_all() -> None:
    is_done = False
    while not is_done:
        batch = _to_drop[:]
        try:
            # The others' go at once: they may hold memory of the device, and none of their threads wants
            # the interpreter's lock.
            gloos = [each for references in batch for each in references if is_gloo(each)]
            for references in batch:
                references.clear()
            _wait_until_idle(gloos and (named_threads(_WORKER_NAME) or unnamed_threads()))
            gloos.clear()
        except Exception:
            log.warning("process groups could not be dropped", exc_info=True)
        with _dropping:
            del _to_drop[: len(batch)]
            is_done = not _to_drop


def _wait_until_idle(tids: list[int]) -> None:
    """Waits until no such thread runs or wants the interpreter's lock.

    One that wants it wakes every few milliseconds to ask for it, and the kernel counts that. One that has
    nothing to do sleeps. Groups made in the meantime may be among them and be busy: hence the limit.
    """
    deadline = time.monotonic() + _IDLE_LIMIT
    interval = max(_IDLE_CHECK, 4 * sys.getswitchinterval())
    before = None
    while tids and time.monotonic() < deadline:
        now = [_activity(tid) for tid in tids]
        if now == before and not any("running" in line for lines in now for line in lines):
            return
        before = now
        time.sleep(interval)


def _activity(tid: int) -> list[str]:
    """State and context switches of a thread; nothing once it has ended, or while it waits for descriptors.

    No thread of a group does that. Others do, where threads have no names: gloo's loops wake every 10 ms.
    """
    found = []
    with contextlib.suppress(OSError):  # it has ended; or this kernel does not tell what it waits in
        with open(f"/proc/self/task/{tid}/status", encoding="utf-8", errors="replace") as status:
            found = [line for line in status if line.startswith(("State:", "voluntary_", "nonvoluntary_"))]
        if (system_call(tid) or (None,))[0] in POLLS:
            return []
    return found
