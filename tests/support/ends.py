"""Ends of processes that have torch: whole ones, with all that Python does, and quick ones.

Python's own last steps, with torch in the process, write to most of its memory: three quarters of the
processor time of a forked rank. So forked processes leave them out in daily runs: they join their threads,
run what was registered for the end, and end. Nightly runs, and tests marked `whole_ends`, have whole ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref

ENDS = "FT_WRAPPER_TEST_ENDS"
"""Tells processes of the tests how to end: ``quick`` or, as without it, whole."""


def end_quickly(code: object = None) -> None:
    """Ends this process as Python would, but for its own last steps; returns where it is to have a whole end.

    Args:
        code: what it ends with: as that of a SystemExit.
    """
    if os.environ.get(ENDS) != "quick" or not (code is None or isinstance(code, int)):
        return
    for finalizer, call in weakref.finalize._registry.copy().items():  # type: ignore[attr-defined]
        if call.func.__module__ == "torch.library":  # it takes back the operators that Python made
            finalizer.detach()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)
