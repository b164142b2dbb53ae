"""Plug-ins that free the function's thread at a restart: they make its pending operations fail.

They run in one of the wrapper's threads while the function is still running: in a collective, in
``init_process_group``, in a backward pass, or anywhere else.
"""

import contextlib
import functools
import logging
import multiprocessing.process
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing import connection
from typing import Any, TypeAlias

import psutil

from .compose import Compose, PlugIn
from .settings import as_seconds, check_callable, check_kind
from .state import FrozenState
from .torch_groups.abort import abort_all, abort_may_hang
from .torch_groups.gloo import close_aborted_sockets as close_aborted_sockets
from .torch_groups.release import release_process_groups as release_process_groups
from .torch_groups.release import wait_for_released_groups as wait_for_released_groups

_logger = logging.getLogger(__name__)

Processes: TypeAlias = Iterable["int | psutil.Process"]


class Abort(PlugIn):
    """Base of the ``abort`` plug-ins of `Wrapper`: frees the function's thread.

    It runs in one of the wrapper's threads, after an iteration has ended and before the function is
    interrupted, and gets the rank's state in that iteration. It may run again for the same iteration until
    the rank has left the function. It must not wait for the function or for other ranks. If it raises, the
    error is logged and the restart goes on. If it has not returned after 5 s, that is logged and the function
    is interrupted; the restart waits for it until ``hard_timeout`` ends the process.
    """


class AbortTorchDistributed(Abort):
    """Makes all pending operations of ``torch.distributed`` in this process fail.

    It frees collectives, point-to-point operations and barriers of gloo, and of any backend that can abort,
    on any group, even if the peer is alive and hangs. It also frees ``init_process_group`` and ``new_group``
    while they wait for a peer through the store at ``MASTER_ADDR``:``MASTER_PORT``. From its second run in an
    iteration on, it also frees a thread in which NCCL waits for a peer to make a communicator. It shuts down
    the connections of all gloo groups and those to that store, and calls ``abort`` of all other groups, each
    in its own thread. Meanwhile it wakes NCCL's service threads, which would delay an abort by half a second.
    It leaves other sockets alone, with one exception: while a thread is still in ``torch.distributed`` or in
    a backward pass, it shuts down sockets that C++ code has made listen at one address since the function was
    entered and that no thread polls. It does not destroy groups: `release_process_groups` does, once the
    rank has left the function. Gloo's connections stay open until `close_aborted_sockets`, so that peers do
    not fail because this rank left: each rank aborts itself.

    Not freed, until their own timeout or the wrapper's ``hard_timeout``:

    - ``recv`` without a source on gloo;
    - a gloo send larger than the kernel's buffers (megabytes) to a peer that has stopped reading halfway;
      gloo does not end it even when that peer is killed;
    - a group that waits for a peer on the user's own store;
    - a store client that cannot reach its server: it retries on its own;
    - a send that gloo loses, in about one of thousands of aborts during traffic.

    A second call costs little and can help: a group that was being made may have opened connections since.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Aborts. Does almost nothing if ``torch.distributed`` is not in use."""
        abort_all()
        return state


class AbortTransformerEngine(Abort):
    """Destroys Transformer Engine's communication buffers ("userbuffers").

    Does nothing if Transformer Engine is not installed, or if the function has not imported it.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Destroys the buffers."""
        # Importing it here would add seconds to the restart, and without the import there are no buffers.
        base: Any = sys.modules.get("transformer_engine.pytorch.module.base")
        if base is not None:
            base.destroy_ub()
        return state


class AbortProcesses(Abort):
    """Ends the function's helper processes: SIGTERM, then SIGKILL after the grace time.

    Otherwise they would keep working for an iteration that is over: a checkpoint daemon whose group has a
    dead member, a data loader's workers, a process pool that keeps this process from exiting. A hung worker
    delays leaving the function by about 5 s. The processes are not reaped: their parent gets the exit status.
    This process, its parent and the wrapper's monitor process are never ended, even if ``processes`` names
    them.

    Args:
        processes: pids or ``psutil.Process``, or a function without arguments that returns them at each
            abort. None: the children started with ``multiprocessing`` since the wrapped call began: data
            loaders' workers, process pools, the daemon of ``torch.distributed.checkpoint``. Children of
            ``subprocess``, ``multiprocessing``'s own helpers and torch's compile workers are not included.
        keep: called with each ``psutil.Process``. Processes for which it returns True are kept.
        termination_grace_time: how long to wait after SIGTERM, and again after SIGKILL: a ``timedelta`` or
            seconds.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the grace time is negative.
    """

    def __init__(
        self,
        processes: Callable[[], Processes] | Processes | None = None,
        keep: Callable[[psutil.Process], bool] | None = None,
        termination_grace_time: float | timedelta = 1.0,
    ) -> None:
        if keep is not None:
            check_callable("keep", keep, "keep=lambda process: process.pid == server.pid")
        if processes is None:
            processes = find_children
        elif not callable(processes):
            words = "None, or pids or psutil.Process, as an iterable or from a function without arguments"
            check_kind("processes", processes, Iterable, words, but=str | bytes)
            processes = functools.partial(tuple, tuple(processes))
        self._processes = processes
        self._keep = keep
        self._grace = as_seconds("termination_grace_time", termination_grace_time, from_zero=True)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Ends the processes.

        Raises:
            TypeError: ``processes`` returned something other than pids and ``psutil.Process``.
        """
        with contextlib.ExitStack() as stack:
            running: dict[int, psutil.Process] = {}  # by pidfd: psutil would reap the processes it waits for
            for process in self._helpers():
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(process.pid)
                    stack.callback(os.close, pidfd)
                    running[pidfd] = process
            for signum in (signal.SIGTERM, signal.SIGKILL):
                _end(running, signum, self._grace)
        if running:
            pids = ", ".join(str(process.pid) for process in running.values())
            _logger.warning("processes still running: %s", pids)
        return state

    def _helpers(self) -> Iterator[psutil.Process]:
        """The processes to end."""
        for given in self._processes():
            if not isinstance(given, (int, psutil.Process)) or isinstance(given, bool):
                raise TypeError(f"processes gave {given!r}; it must give pids or psutil.Process")
            pid = given if isinstance(given, int) else given.pid
            # Signals to 0 and -1 go to whole groups of processes.
            if pid in {-1, 0, 1, os.getpid(), os.getppid(), *(monitor for monitor, _ in _protected)}:
                _logger.warning("process %d is not ended: it is not a helper of the function", pid)
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(given) if isinstance(given, int) else given
                if self._keep is None or not self._keep(process):
                    yield process


def _end(running: dict[int, psutil.Process], signum: signal.Signals, seconds: float) -> None:
    """Sends a signal to processes. Removes those that end in time, and those that cannot be signalled."""
    for pidfd, process in list(running.items()):
        try:
            process.send_signal(signum)
            process.resume()  # a stopped process would not act on it
        except psutil.NoSuchProcess:  # and another process may have its pid
            del running[pidfd]
        except psutil.AccessDenied as error:
            _logger.warning("process %d cannot be ended: %s", process.pid, error)
            del running[pidfd]
    deadline = time.monotonic() + min(seconds, 1e6)  # poll waits 25 days at most
    while running and (ended := connection.wait(list(running), max(0.0, deadline - time.monotonic()))):
        for pidfd in running.keys() & set(ended):
            del running[pidfd]


def may_hang(abort: object) -> bool:
    """Whether an ``abort`` plug-in may never return, and so needs its own thread.

    Starting a thread and waiting for it takes each rank some tenths of a millisecond. That is a lot if there
    are only gloo sockets to abort, or nothing.
    """
    if isinstance(abort, Compose):
        return any(map(may_hang, abort.parts))
    if type(abort) is AbortTorchDistributed:
        return abort_may_hang()
    if type(abort) is AbortProcesses:  # without processes it has nothing to wait for
        return abort._processes is not find_children or bool(find_children())
    return abort is not None


def find_children() -> list[psutil.Process]:
    """Returns the function's child processes, started with ``multiprocessing``.

    Excludes the children that `protect_processes` protects, and torch's compile workers.
    """
    protected = {child for _, children in _protected for child in children}
    compiling = _compile_workers()
    found = []
    # Not psutil's children of this process: with the start method "forkserver" they have another parent.
    for child in multiprocessing.active_children():
        if child not in protected and child.pid not in compiling:
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(child.pid))
    return found


def _compile_workers() -> set[int]:
    """The processes in which torch compiles, where they are children of this one."""
    module = sys.modules.get("torch._inductor.async_compile")
    pools = list(getattr(module, "_pool_set", ()))
    return {pid for pool in pools for pid in getattr(pool, "_processes", None) or ()}


@contextlib.contextmanager
def protect_processes(monitor: int) -> Iterator[None]:
    """Keeps `AbortProcesses` from ending the present children, unless its ``processes`` names them.

    Args:
        monitor: the wrapper's monitor process, which is protected even then.
    """
    held = monitor, multiprocessing.active_children()
    _protected.append(held)
    try:
        yield
    finally:
        _protected.remove(held)


_protected: list[tuple[int, list[multiprocessing.process.BaseProcess]]] = []
