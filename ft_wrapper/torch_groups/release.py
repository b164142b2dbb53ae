"""Destroys process groups between two iterations, without torch's deadlock there.

A gloo group's destructor waits for the group's threads. These need the GIL to drop the tensors of a failed
collective. If C++ holds the last reference to a group (the reducer inside a ``DistributedDataParallel``), the
destructor runs with the GIL held, and both wait forever. If Python holds the last reference, torch releases
the GIL first. So Python references to every group and backend are kept until the groups' threads are idle.
Then a background thread drops them: joining gloo's threads takes about 10 ms per group, too long for a
restart.

Most scripts call ``destroy_process_group`` in their last line, before the function's frame drops the model.
Three ranks that did this, without any fault, hung in nearly every call. So while the wrapped function runs,
``destroy_process_group`` is replaced.
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
# More than twice as long as a thread that wants the GIL sleeps between two attempts.
_IDLE_CHECK = 0.02
_IDLE_LIMIT = 5.0

_to_drop: list[list[Any]] = []  # references to released groups; empty while no thread drops them
_dropping = threading.Lock()
_dropper: threading.Thread | None = None  # the dropping thread, running or ended
_torchs_destroy: Any = None


def release_process_groups(*, aborted: bool = False, kept: Any = None) -> None:
    """Destroys all process groups and resets the state that ``torch.distributed`` keeps of them.

    Call it in the thread that ran the function, after the function has left and `AbortTorchDistributed` has
    returned. Afterwards ``is_initialized()`` is False and group names count from 0 again, even if
    ``init_process_group`` was interrupted. The groups' threads and sockets end in the background;
    `wait_for_released_groups` waits for them. If ``torch.distributed`` was not used, it does nothing. It
    raises nothing, but logs failures.

    Args:
        aborted: whether the function was interrupted. Then groups are aborted, without waiting for their
            operations, since a peer may be lost. If False, operations in flight are completed.
        kept: the default group, if it should stay; all other groups are destroyed.
    """
    world, names = c10d._world, c10d._world.pg_names
    references = _references(world, kept)
    groups = [world.default_pg] if world.default_pg is not None else []  # it takes all others with it
    if kept is not None:
        groups = sorted(set(names) - {kept}, key=lambda each: str(names[each]), reverse=True)
    for group in groups:
        try:
            _destroy(group, aborted)
        except Exception:
            log.warning("torch.distributed could not destroy %r", group, exc_info=True)
    world.group_count = 1  # new groups are named after the kept one
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

    For the caller nothing changes: operations in flight are completed, and then a new ``init_process_group``
    works. Names of new groups do not count from 0 again, since the new groups use the same store, which still
    has the keys of the destroyed ones.

    The function's code is replaced, not its name, since scripts import the name before the call.
    """
    global _torchs_destroy
    destroy: Any = c10d.destroy_process_group
    ours = _in_the_place_of_destroy.__code__
    if not isinstance(destroy, types.FunctionType) or destroy.__closure__ or destroy.__code__ is ours:
        yield  # another program has replaced the function; or this call is inside another one
        return
    code = destroy.__code__
    _torchs_destroy = types.FunctionType(code, destroy.__globals__, destroy.__name__, destroy.__defaults__)
    destroy.__code__ = ours
    try:
        yield
    finally:
        destroy.__code__ = code


def _in_the_place_of_destroy(group: Any = None) -> None:
    import ft_wrapper.torch_groups.release  # this code runs with the globals of torch's module

    ft_wrapper.torch_groups.release.destroy_and_release(group)


def destroy_and_release(group: Any) -> None:
    """Does the work of ``destroy_process_group`` within `taking_over_destroy`.

    Args:
        group: the ``group`` of ``destroy_process_group``.
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
    """Waits until released groups have ended, with their threads and sockets.

    Args:
        timeout: seconds to wait.

    Returns:
        Whether they have ended; if not, a warning is logged.
    """
    if (dropper := _dropper) is not None:  # another one may start meanwhile
        dropper.join(timeout)
        if dropper.is_alive():
            log.warning("released process groups have not ended after %g s", timeout)
            return False
    return True


def _destroy(group: Any, aborted: bool) -> None:
    """Destroys a group, or with the default group all of them. It does not wait for aborted groups."""
    if not aborted:
        with _destroying():
            c10d.destroy_process_group(group)
    elif hasattr(group, "abort") or "nccl" in str(c10d._world.pg_backend_config.get(group)):
        c10d._abort_process_group(group)
    # Otherwise it is torch 2.6, which would log at each restart that there is nothing to abort.


def _destroying() -> contextlib.AbstractContextManager[None]:
    return nccl.service_threads_awake(aborted=False) if groups_that_abort() else contextlib.nullcontext()


def _references(world: Any, kept: Any) -> list[Any]:
    """Every group except the kept one, its store and its backends, as Python objects."""
    references: list[Any] = []
    for group, value in list(world.pg_map.items()):
        if group is kept:
            continue
        references.append((group, value))
        tracker.current.track(group)
        with contextlib.suppress(Exception):  # the group has no backend
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
    # torch makes group names from this counter. Without a reset the names would differ between ranks, and the
    # next init_process_group would wait forever.
    world.group_count = 0


def _unhook() -> None:
    """Removes the hooks that each ``init_process_group`` wraps around ``sys.excepthook``."""
    hook: Any = sys.excepthook
    torchs = (c10d.__name__, "_distributed_excepthook")
    while (getattr(hook, "__module__", None), getattr(hook, "__name__", None)) == torchs:
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        if "old_hook" not in cells:
            return
        hook = sys.excepthook = cells["old_hook"].cell_contents


def _drop_meshes() -> None:
    """Drops meshes of dead groups: the active meshes, and torch < 2.8's tables of sub-meshes."""
    device_mesh: Any = sys.modules.get("torch.distributed.device_mesh")
    resources = getattr(device_mesh, "_mesh_resources", None)
    older = "child_to_root_mapping root_to_flatten_mapping flatten_name_to_root_dims"
    for name in ("mesh_stack", *older.split()):
        getattr(resources, name, []).clear()


def _drop_in_background(references: list[Any]) -> None:
    """Makes a thread drop references. One thread for all, since a function may destroy many groups."""
    global _dropper
    with _dropping:
        _to_drop.append(references)
        if len(_to_drop) == 1:  # otherwise the running thread drops these, too
            _dropper = in_background("release-groups", _drop_all)


def _drop_all() -> None:
    is_done = False
    while not is_done:
        batch = _to_drop[:]
        try:
            # References to other backends' groups are dropped at once: they may hold memory of the device,
            # and none of their threads wants the GIL.
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
    """Waits until none of the given threads runs or wants the GIL.

    A thread that wants the GIL wakes every few milliseconds to ask for it, and the kernel counts that. An
    idle thread sleeps. Threads of newer groups may be among them and be busy: hence the limit.
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
    """State and context switches of a thread; empty once it has ended, or while it waits for descriptors.

    No worker thread of a group waits for descriptors. But if threads have no names, gloo's loops are among
    them, which wake every 10 ms.
    """
    found = []
    with contextlib.suppress(OSError):  # the thread has ended, or this kernel does not show its call
        with open(f"/proc/self/task/{tid}/status", encoding="utf-8", errors="replace") as status:
            found = [line for line in status if line.startswith(("State:", "voluntary_", "nonvoluntary_"))]
        if (system_call(tid) or (None,))[0] in POLLS:
            return []
    return found
