"""Whether a process has ended."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process | int) -> bool:
    """Whether it is gone, or about to be: its parent, a fork server for instance, may just wait for it.

    Args:
        process: it, or its process id.
    """
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
