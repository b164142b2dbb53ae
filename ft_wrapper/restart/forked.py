"""Processes that the wrapped function makes by ``os.fork``: none of them is the rank.

A child has copies of the rank's sockets, and stands in the wrapper's frames, too. If it left them it would
say goodbye, publish its error, or return, all in the rank's name.
"""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def children_end() -> Iterator[None]:
    """In a child that leaves the block, by whatever way, ends the process.

    With the exit code, and with the traceback, that Python's own end would have, but without ``atexit``: what
    is registered there is the rank's, as for a child that ``multiprocessing`` forks.
    """
    rank, error = os.getpid(), None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() != rank:
            _end(error)
        del error  # its frames refer to this one


def _end(error: BaseException | None) -> None:
    code: object = None if error is None else error.code if isinstance(error, SystemExit) else 1
    try:
        if error is not None and not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))
