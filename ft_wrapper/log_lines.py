"""How log lines look where the program has not set up logging: level, time, place, message."""

import logging
import os
import socket
import sys
import time
from typing import TextIO

NAME = __name__.partition(".")[0]

_node: int | None = None


def note_node(number: int) -> None:
    """Sets the node rank in the lines of this process, if the environment does not."""
    global _node
    _node = number


class LineFormatter(logging.Formatter):
    """Formats as torch and glog do, and adds the place: ``W1123 03:04:05.678 [0/2] restart 1: …``.

    The letter is the level's; the digits are month, day and time. The place is the node, and the rank in it.

    Args:
        program: put in front of the message; None for a rank, which has its number in the place.
    """

    def __init__(self, program: str | None = None) -> None:
        super().__init__()
        self._program = program

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        """Formats the line itself; a traceback follows below it."""
        when = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        place = _node_name() if self._program else f"{_node_name()}/{os.environ.get('RANK', '-')}"
        message = f"{self._program}: {record.message}" if self._program else record.message
        return f"{record.levelname[0]}{when}.{int(record.msecs):03d} [{place}] {message}"


class DefaultHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr what Python writes there if the program has not set up logging, with time and place.

    It is silent as soon as the program has handlers of its own, for all loggers or for this package's.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)  # not StreamHandler's, which keeps a stream
        self.setFormatter(LineFormatter())

    @property
    def stream(self) -> TextIO:
        """What stderr is at the moment."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, unless another handler does."""
        if logging.getLogger().handlers or len(logging.getLogger(NAME).handlers) > 1:
            return
        super().emit(record)


def install() -> None:
    """Puts a `DefaultHandler` on this package's logger; called once, when the package is imported."""
    logging.getLogger(NAME).addHandler(DefaultHandler())


def _node_name() -> str:
    if _node is not None:
        return str(_node)
    for variable in ("GROUP_RANK", "SLURM_NODEID"):
        if os.environ.get(variable):
            return os.environ[variable]
    return socket.gethostname()
