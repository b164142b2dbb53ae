"""Processes whose parent has died become children of the agent, which waits for them when they end.

The agent makes itself a subreaper, so that the ranks which its template forks become its own children. Then
it also gets what the ranks leave behind, data loaders for instance, and no one else would wait for these.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterator

import psutil

_PR_SET_CHILD_SUBREAPER = 36


class Orphans:
    """What was adopted. Use `adopted` to make one."""

    def __init__(self) -> None:
        # Children that somebody else in this process has started, and waits for.
        self._others = {child.pid for child in psutil.Process().children()}

    def reap(self, ours: Collection[int]) -> None:
        """Waits for those that have ended. Does not block.

        Args:
            ours: children that the caller waits for itself. The first of them that has ended, and was not
                waited for yet, hides what comes behind it: call this again then.
        """
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in self._others or ended.si_pid in ours:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)


@contextlib.contextmanager
def adopted() -> Iterator[Orphans]:
    """For a while, this process adopts what its descendants leave behind.

    Raises:
        OSError: the kernel refuses.
    """
    _set_subreaper(True)
    try:
        orphans = Orphans()
        yield orphans
        orphans.reap(())
    finally:
        _set_subreaper(False)


def _set_subreaper(on: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
