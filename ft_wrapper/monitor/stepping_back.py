"""A process that dies leaves the CPUs to those who restart.

The kernel frees a dead process's memory in that process: 10 ms for any that has imported torch, 80 ms more
for each gigabyte. Linux lets a task that was just woken wait until the running one has had its slice, and
looks at that only with the timer's tick. Where CPUs are few, each step of a restart that fell on the dying
process's CPU waited 3 to 5 ms. (Measured on two cores, Linux 6.18, as time that threads were runnable and did
not run: SIGKILL of one rank of two, back after 9 to 13 ms, with 5 ms of work in it.)

Under ``SCHED_IDLE`` a task gives way at once to any other, and its CPU counts as free when another is woken.
It is meant for a moment only: on a machine whose CPUs are all busy the memory would not be freed. Going back
needs ``CAP_SYS_NICE``, or ``RLIMIT_NICE`` at 20; without it, other processes' threads are left alone.

Nothing here touches a thread that is not on its way out already.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_PF_EXITING = 0x4
_SIGKILL_PENDING = 1 << 8
_FLAGS, _PENDING = 6, 28  # fields of /proc/<pid>/stat, counted from the state, which is the third

_IDLE = os.sched_param(0)  # priorities are 0 where there are none


def may_step_forward() -> bool:
    """Whether this process is allowed to undo ``SCHED_IDLE``. Tried out, on a thread that ends with it."""
    allowed = []

    def try_it() -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, _IDLE)
            os.sched_setscheduler(0, os.SCHED_OTHER, _IDLE)
            allowed.append(True)

    thread = threading.Thread(target=try_it, name="ft_wrapper-may-step-forward", daemon=True)
    thread.start()
    thread.join()
    return bool(allowed)


@contextlib.contextmanager
def stepping_back(pid: int, allowed: bool) -> Iterator[None]:
    """A block during which the dying threads of a process run only where no one else wants to.

    Args:
        pid: the process. Of one that lives, or has gone, nothing is changed.
        allowed: what `may_step_forward` has said; nothing is done without it.
    """
    changed = [tid for tid in _dying_threads(pid) if _step_back(tid)] if allowed else []
    try:
        yield
    finally:
        for tid in changed:
            with contextlib.suppress(OSError):  # gone
                os.sched_setscheduler(tid, os.SCHED_OTHER, _IDLE)


def step_back_for_good() -> None:
    """Before a process ends of its own accord while others restart: frees its memory behind them."""
    for tid in _threads(os.getpid()):
        _step_back(tid)


def _step_back(tid: int) -> bool:
    try:
        if os.sched_getscheduler(tid) != os.SCHED_OTHER:
            return False  # somebody has chosen something else for it
        os.sched_setscheduler(tid, os.SCHED_IDLE, _IDLE)
    except OSError:
        return False
    return True


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _dying_threads(pid: int) -> list[int]:
    """Those that have begun to exit, or will do nothing else any more."""
    dying = []
    for tid in _threads(pid):
        try:
            with open(f"/proc/{pid}/task/{tid}/stat", "rb", buffering=0) as file:
                stat = file.read(4096)
        except OSError:
            continue
        fields = stat[stat.rindex(b")") + 2 :].split()
        if int(fields[_FLAGS]) & _PF_EXITING or int(fields[_PENDING]) & _SIGKILL_PENDING:
            dying.append(tid)
    return dying
