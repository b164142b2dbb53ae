"""Attaches to a process as a debugger does, for some seconds: trace_process.py PID SECONDS.

All of its threads stand still meanwhile. The kernel lets them go on, should this program be killed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

ATTACH, DETACH = 16, 17
ALL_CHILDREN = 0x40000000  # __WALL: threads, too


def ptrace(request: int, thread: int) -> None:
    """One request to the kernel.

    Raises:
        OSError: it is refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(request, thread, None, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace({request}, {thread}): {os.strerror(number)}")


def main() -> None:
    """Attaches, waits and detaches."""
    pid, seconds = int(sys.argv[1]), float(sys.argv[2])
    attached = []
    for name in os.listdir(f"/proc/{pid}/task"):
        ptrace(ATTACH, int(name))
        os.waitpid(int(name), ALL_CHILDREN)
        attached.append(int(name))
    time.sleep(seconds)
    for thread in attached:
        ptrace(DETACH, thread)


if __name__ == "__main__":
    main()
